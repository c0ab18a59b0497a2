"""Checkpoints, metrics and requests to stop of a user's own loop."""

import errno
import os
import re
import signal
import sys
import time
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from job import lines_of, steps_kept, summary_of
from mpi4py import MPI
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset
from worlds import RANKS, first_ranks, meet, refusal

import mntrain
from mntrain import AgreedError
from mntrain.checkpoint import directory_saver, saver
from mntrain.comm.mpi import Communicator
from mntrain.metrics import files, writers
from mntrain.run import lock
from mntrain.sync import DiLoCo
from zero.step_message import StepMessage

pytestmark = pytest.mark.simulated

COMM = MPI.COMM_WORLD
RANK = COMM.rank
STEPS = 12


@contextmanager
def world_of(comm=COMM):
    with mntrain.init(comm, device="cpu") as world:
        yield world


def samples(step):
    """The global batch of a step: inputs and targets, fewer in every third step."""
    generator = torch.Generator().manual_seed(step)
    count = 7 if step % 3 == 0 else 12
    rows = torch.randn(count, 8, generator=generator, dtype=torch.float64)
    return rows[:, :5], rows[:, 5:]


def cosine(optimizer):
    return lr_scheduler.CosineAnnealingLR(optimizer, 8)  # computes a rate from the last one


class Loop:
    """A user's own loop of `STEPS` steps. Leaves it after `stop_after`, without a word."""

    def __init__(self, world, run_dir, *, stage=0, sync=None, **options):
        torch.manual_seed(world.rank)
        self.world = world
        self.model = nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)).double()
        given = {"lr": 0.05, "stage": stage, "sync": sync}
        self.optimizer = world.optimizer(self.model, torch.optim.AdamW, **given)
        self.scheduler = cosine(self.optimizer)
        given = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        self.checkpoints = world.checkpoints(run_dir, **given, **{"every": 2, **options})
        self.metrics = world.metrics(run_dir)
        self.model.eval()  # running statistics are those of a rank's own samples

    def run(self, stop_after=STEPS):
        for step in range(self.checkpoints.restore() + 1, stop_after + 1):
            self.step(step)
            self.checkpoints.save(step)

    def step(self, step):
        x, y = samples(step)
        low, high = (len(x) * (self.world.rank + i) // self.world.size for i in (0, 1))
        count = high - low
        out = self.model(x[low:high])
        loss = (out - y[low:high]).square().mean() if count else out.sum()
        self.optimizer.backward(loss, weight=count) if count else self.optimizer.share(0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.own = (count, loss.item() if count else 0.0)  # of the last step
        rate = self.scheduler.get_last_lr()[0]
        self.metrics.log(step, weight=count, loss=loss, lr=rate)
        self.scheduler.step()


@contextmanager
def looping(run_dir, **options):
    """A loop that begins."""
    with world_of() as world:
        loop = Loop(world, run_dir, **options)
        loop.checkpoints.restore()
        yield loop


def train(run_dir, *, comm=COMM, stop_after=STEPS, **options):
    """Run the loop on the ranks of comm; the other ranks wait."""
    if comm is not None:
        with world_of(comm) as world:
            loop = Loop(world, run_dir, **options)
            loop.run(stop_after)
            if stop_after == STEPS:
                loop.metrics.close()
    meet()


def column(run_dir, name):
    return [line[name] for line in lines_of(run_dir)]


def test_a_loop_resumed_on_other_ranks_at_another_stage_has_the_same_losses(folder):
    with first_ranks(1) as comm:
        train(folder / "whole", comm=comm, every=0)
    train(folder / "parts", stop_after=5)
    assert steps_kept(folder / "parts") == [4, 2]  # step 5 is taken again
    with first_ranks(RANKS - 1) as comm:
        train(folder / "parts", comm=comm, stage=2)
    for name in ("loss", "lr"):
        expected = column(folder / "whole", name)
        assert column(folder / "parts", name) == pytest.approx(expected, rel=1e-9)
    assert column(folder / "parts", "step") == list(range(1, STEPS + 1))
    found = summary_of(folder / "parts")
    assert (found["status"], found["steps"]) == ("completed", STEPS)
    assert found["resumed_from"].endswith("checkpoints/step-00000004")
    assert found["checkpoint"].endswith("checkpoints/step-00000012")
    assert found["final_loss"] == column(folder / "parts", "loss")[-1]


def test_a_closed_world_has_removed_old_checkpoints(folder, monkeypatch):
    remove_old = directory_saver.remove_old

    def slowly(*arguments):
        time.sleep(0.3)
        remove_old(*arguments)

    monkeypatch.setattr(directory_saver, "remove_old", slowly)
    train(folder / "run", stop_after=5, keep=1)
    assert [path.name for path in (folder / "run" / "checkpoints").iterdir()] == ["step-00000004"]


@pytest.mark.both
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGUSR1, marks=pytest.mark.exhaustive),
        pytest.param(signal.SIGINT, marks=pytest.mark.exhaustive),
    ],
)
def test_a_signal_on_one_rank_stops_all_ranks_after_the_same_step(folder, number):
    handlers = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    with world_of() as world:
        loop = Loop(world, folder / "run", every=0)
        with loop.metrics:
            step = loop.checkpoints.restore()
            while not world.stop_requested():
                step += 1
                loop.step(step)
                if step == 3 and world.rank == world.size - 1:
                    os.kill(os.getpid(), number)
                assert step < 9
            assert world.stop_requested()  # still
            loop.checkpoints.save(step, now=True)
        assert len(set(world.gather(step))) == 1
        assert step <= 5
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == handlers
    found = summary_of(folder / "run")
    assert found["status"] == ("interrupted" if number == signal.SIGINT else "preempted")
    assert found["reason"] == f"{number.name} on rank {RANKS - 1}"
    assert steps_kept(folder / "run") == [step]
    train(folder / "run")
    assert column(folder / "run", "step") == list(range(1, STEPS + 1))
    assert summary_of(folder / "run")["status"] == "completed"


@pytest.mark.processes
def test_signals_while_a_loop_saves_do_not_end_it(folder, monkeypatch):
    save = saver.Saver.save

    def slow(*args):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
        return save(*args)

    monkeypatch.setattr(saver.Saver, "save", slow)
    with world_of() as world:
        loop = Loop(world, folder / "run", every=0)
        loop.checkpoints.restore()
        assert not world.stop_requested(grace=0.2)
        loop.step(1)
        loop.checkpoints.save(1, now=True)
        polls = 1
        while not (stop := world.stop_requested()):
            polls += 1
            assert polls <= 3
        loop.metrics.close()
    assert stop == ("interrupted", "SIGINT on rank 0")
    assert steps_kept(folder / "run") == [1]


def test_nothing_is_written_to_a_folder_in_the_place_of_the_run_directory(folder, monkeypatch):
    """Before the lock has seen it, and ended the job."""
    monkeypatch.setattr(lock, "BEAT_S", 1e3)
    run, error = folder / "run", pytest.raises(AgreedError, match="there is another folder in its")
    with looping(run, every=0) as loop:
        loop.step(1)
        loop.metrics.flush()
        if RANK == 0:
            run.rename(folder / "there")
            run.mkdir()
        meet()
        loop.step(2)
        with error:
            loop.checkpoints.save(2, now=True)
        with error:
            loop.metrics.close()
    assert list(run.iterdir()) == []
    assert [line["step"] for line in lines_of(folder / "there")] == [1]


def test_no_rank_waits_for_another(folder):
    with looping(folder / "run", every="10min") as loop:
        world = loop.world
        for step in (1, 2):  # the names of the metrics are known after the second
            loop.step(step)
            loop.checkpoints.save(step)
            world.stop_requested()
        loop.optimizer.backward(loop.model(samples(3)[0]).square().mean(), weight=1)
        loop.optimizer.step()
        while world.rank and not (folder / "rank 0 is ahead").exists():
            time.sleep(0.01)
        loop.metrics.log(3, loss=1.0, lr=0.1)
        world.stop_requested()
        loop.checkpoints.save(3)
        (folder / "rank 0 is ahead").touch()


@pytest.mark.parametrize("stage", [0, 2])
def test_metrics_flags_of_saves_and_requests_travel_in_the_message_of_the_gradients(
    folder, monkeypatch, stage
):
    sent, send = [], StepMessage.send
    monkeypatch.setattr(StepMessage, "send", lambda *to: sent.append(to) or send(*to))
    with looping(folder / "run", stage=stage, every="100min") as loop:
        for step in range(1, 7):
            loop.step(step)
            loop.checkpoints.save(step)
            assert not loop.world.stop_requested()
            if step == 2:  # the first line has told its names
                sent.clear()
        assert len(sent) == 2 * 4  # in each step this one, and that of the gradients' norm
        loop.metrics.close()
    assert column(folder / "run", "step") == list(range(1, 7))


@pytest.mark.parametrize("bound", [0, 1])
def test_nothing_of_a_loop_crosses_nodes_between_two_exchanges(folder, monkeypatch, bound):
    sync, own = DiLoCo(every=3, warmup=1, max_staleness=bound), []
    calls, crossed = [], {}  # of MPI, all of which would cross nodes of one rank; by step

    def spied(call):
        return lambda comm, *a, **k: calls.append(comm) or call(comm, *a, **k)

    for name in ("send", "gather_unequal", "gather"):
        monkeypatch.setattr(Communicator, name, spied(getattr(Communicator, name)))
    with mntrain.init(COMM, device="cpu", ranks_per_node=1) as world:
        loop = Loop(world, folder / "run", sync=sync, every="100min")
        with loop.metrics:
            loop.checkpoints.restore()
            for step in range(1, 12):
                calls.clear()
                loop.step(step)
                own.append(loop.own)
                loop.checkpoints.save(step)
                stops = world.stop_requested()
                crossed[step] = len([comm for comm in calls if comm.size > 1])
                if step == 6 and RANK == RANKS - 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                if stops:
                    break
            lines = len(lines_of(folder / "run")) if RANK == 0 else 0
            by_rank = world.gather(own)
    # A round ends after steps 4, 7 and 10: what is asked for in it is sent with the exchange, and
    # counts then, or one round later.
    assert step == (10 if bound else 7)
    quiet = {step for step, count in crossed.items() if not count}
    assert quiet >= ({2, 3, 6} if bound else {2, 3, 5, 6})  # the exchange may take until step 5
    assert bound or 4 not in quiet
    if RANK == 0:
        assert lines == 6
        expected = [
            sum(w * v for w, v in one) / sum(w for w, _ in one)
            for one in zip(*by_rank, strict=True)
        ]
        assert column(folder / "run", "loss") == pytest.approx(expected, rel=1e-12)
        assert column(folder / "run", "step") == [*range(1, step + 1)]
        assert summary_of(folder / "run")["status"] == "preempted"


def test_a_loop_that_takes_no_steps_within_a_round_hears_of_requests(folder):
    with mntrain.init(COMM, device="cpu", ranks_per_node=1) as world:
        loop = Loop(world, folder / "run", sync=DiLoCo(every=100), every="100min")
        loop.checkpoints.restore()
        for step in (1, 2):
            loop.step(step)
            loop.checkpoints.save(step)
            assert not world.stop_requested()
        if RANK == RANKS - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        asked = 1  # such as between the batches of a long evaluation
        while not world.stop_requested():
            asked += 1
            assert asked <= 3
        loop.metrics.close()
    assert column(folder / "run", "step") == [1, 2]


def test_a_loop_that_goes_on_with_another_optimizer_hears_of_requests(folder):
    with mntrain.init(COMM, device="cpu", ranks_per_node=1) as world:
        loop = Loop(world, folder / "run", sync=DiLoCo(every=100))
        loop.step(1)
        assert not world.stop_requested()
        other = Loop(world, folder / "other", sync=DiLoCo(every=4))
        if RANK == RANKS - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        for step in range(1, 9):
            other.step(step)
            if step > 1 and world.stop_requested():  # it has taken most steps then
                break
        assert step == 2


def test_metrics_are_exact_means_by_weight(folder):
    with world_of() as world, world.metrics(folder, config={"lr": 0.1, "a": {"b": None}}) as log:
        weights, values = range(RANKS), [1.5 * rank + 1 for rank in range(RANKS)]
        log.log(1, weight=RANK or 0.5, loss=torch.tensor(values[RANK]), lr=0.1)
        log.log(2, weight=RANK or 0.5, lr=0.1, eval_loss=float(RANK))
        log.log(5, weight=1.0 if RANK == 0 else 0, loss=1.0 if RANK == 0 else float("nan"))
        log.log(6, loss=float("inf"))
    expected = [rank or 0.5 for rank in weights]
    mean = sum(w * v for w, v in zip(expected, values, strict=True)) / sum(expected)
    first, second, third, last = lines_of(folder)
    assert first["loss"] == pytest.approx(mean, rel=1e-15)
    assert first["lr"] == second["lr"] == 0.1  # not 0.1 plus the rounding of a sum
    assert list(second)[:3] == ["step", "lr", "eval_loss"]
    assert third["loss"] == 1.0
    assert last["loss"] is None  # not in JSON
    assert first.keys() - {"step", "loss", "lr"} == {"step_s", "communication", "exposed"}
    assert (folder / "config.toml").read_text() == 'lr = 0.1\n\n[a]\nb = "none"\n'
    found = summary_of(folder)
    assert (found["status"], found["steps"]) == ("completed", 6)
    assert found["eval_loss"] == pytest.approx(
        sum(w * rank for rank, w in enumerate(expected)) / sum(expected)
    )
    assert found["world"]["size"] == len(found["ranks"]) == RANKS


def test_copies_that_cannot_be_written_are_refused_on_all_ranks(folder, monkeypatch):
    with world_of() as world:
        assert "report: Input should be a valid boolean, not 'yes'" in refusal(
            partial(world.metrics, folder, report="yes")
        )
        if RANK == 0:  # the only one that writes
            monkeypatch.setitem(sys.modules, "wandb", None)
        said = refusal(partial(world.metrics, folder, wandb="digits"))
        assert "world.metrics(wandb=) needs the package wandb, which cannot be imported" in said
        said = refusal(partial(world.metrics, folder, per_rank=RANK == 1))
        assert "per_rank" in said
        assert "give the same on all ranks" in said
        log = world.metrics(folder, per_rank=True)
        said = refusal(partial(log.log, 1, rank_memory=1.0))
        assert "rank_memory is written by the log itself" in said


def test_ranks_that_log_different_names_or_steps_are_told_so(folder):
    with world_of() as world:
        log = world.metrics(folder)
        log.log(1, loss=1.0)
        log.log(2, loss=1.0, **({"accuracy": 0.5} if RANK == 1 else {}))
        said = refusal(log.log, 3, loss=1.0)
        assert column(folder, "step") == [1]  # what they have alike is written
        assert said.startswith("metrics.log differs between ranks: rank")
        assert "have step 2 with loss, rank 1" in said or "0 has step 2 with loss, rank 1" in said
        assert said.endswith("rank 1 has step 2 with accuracy and loss")
        log.log(4 if RANK == 1 else 3, loss=1.0)
        assert "rank 1 has step 4 with loss" in refusal(log.close)


def test_wrong_arguments_of_log_are_refused(folder):
    with world_of() as world:
        words = refusal(world.metrics, folder, config=SimpleNamespace(lr=0.1))
        assert words == "config is of type SimpleNamespace: give a mapping, such as vars(args)"
        log = world.metrics(folder)
        log.log(1, loss=1.0)
        wrong = {"loss": "low", "norm": torch.ones(2), "accuracy": 0.5}
        for words, call in (
            ("has step 1 already, and has a line for each step", partial(log.log, 1, loss=1.0)),
            ("weight is -1", partial(log.log, 2, weight=-1)),
            ("weight is '9'", partial(log.log, 2, weight="9")),
            ("metrics.log('one'): the step is no number", partial(log.log, "one")),
            ("loss, norm is neither a number nor", partial(log.log, 2, **wrong)),
            ("step_s is written by the log itself", partial(log.log, 2, step_s=1.0)),
            (
                "max_minutes is 'soon': give a number, or None",
                partial(world.stop_requested, "soon"),
            ),
            ("grace is 0: give seconds above 0", partial(world.stop_requested, grace=0)),
        ):
            assert words in refusal(call)
        log.log(2, weight=0, loss=1.0)
        assert refusal(log.log, 3, loss=1.0) == "metrics.log(2): the weights of all ranks are 0"
        log.close()
        assert "the log is closed" in refusal(log.log, 4, loss=1.0)
        assert "has metrics in this world already" in refusal(world.metrics, folder)
    with world_of() as world:
        assert "has step 1 already" in refusal(world.metrics(folder).log, 1, loss=1.0)


def test_an_agreed_error_makes_the_run_a_failed_one_and_that_of_one_rank_leaves_no_summary(folder):
    with world_of() as world:
        loop = Loop(world, folder / "run", every=1)

        def fail():
            with loop.metrics, loop.checkpoints:
                loop.run(3)
                raise AgreedError("no more", world.rank)

        assert refusal(fail) == "no more"
        log = world.metrics(folder / "one")
        if RANK == 0:
            with pytest.raises(KeyError), log:
                raise KeyError
        assert not (folder / "one" / "summary.json").exists()
    found = summary_of(folder / "run")
    assert (found["status"], found["error"]) == ("failed", "no more")
    assert steps_kept(folder / "run")[0] == 3


def test_the_line_of_a_step_is_written_before_its_checkpoint(folder):
    with world_of() as world:
        loop = Loop(world, folder / "run", every=1)
        loop.run(3)
        loop.checkpoints.close()
        loop.step(4)
        loop.checkpoints.save(4, now=True)
        world.barrier()  # the master has removed old checkpoints
        assert steps_kept(folder / "run")[0] == 4
        assert column(folder / "run", "step") == [1, 2, 3, 4]  # though the log is still open
        world.barrier()


def test_steps_that_cannot_be_counts_are_refused(folder):
    with world_of() as world:
        save = (loop := Loop(world, folder / "run")).checkpoints.save
        assert refusal(save, 1) == (
            "checkpoints.save(1): call restore() before: it returns 0 in a new run"
        )
        assert loop.checkpoints.restore() == 0
        assert "the run began after 0 steps" in refusal(save, 0)
        for now in (False, True, True, False):  # is saved once
            save(5, now=now)
        assert loop.checkpoints.summary()["checkpoints"]["saved"] == 1
        assert "step 5 came before: give the number of steps taken" in refusal(save, 4)
        save(6)
        assert steps_kept(folder / "run")[-1] == 5
    with world_of() as world:
        loop = Loop(world, folder / "run")
        assert loop.checkpoints.restore() == 6
        assert "the run began after 6 steps" in refusal(loop.checkpoints.save, 6)


def test_the_checkpoint_of_the_lowest_evaluation_loss_is_kept(folder):
    with looping(folder / "run", every=5, keep=1) as loop:
        for step, loss in [(1, 3.0), (2, 1.0), (3, 2.0), (4, float("nan")), (5, None)]:
            loop.checkpoints.save(step, eval_loss=loss)
        said = refusal(loop.checkpoints.save, 5, eval_loss=0.5)
        assert "save(5) was called before: give eval_loss in the first call" in said
        loop.checkpoints.save(6, now=True)
        loop.world.barrier()  # the master has removed old checkpoints
        assert steps_kept(folder / "run") == [6, 2]
        said = refusal(loop.checkpoints.save, 7, eval_loss=float(RANK))
        assert "eval_loss differs between ranks: rank 0 has 0.0, rank 1 has 1.0" in said


class Bookmark:
    """A data position of a user's own."""

    def __init__(self, at):
        self.at = at

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def bare(world):
    """A model and its optimizer, as `World.checkpoints` takes them."""
    model = nn.Linear(2, 2)
    return {"model": model, "optimizer": world.optimizer(model, torch.optim.SGD, lr=0.1)}


@pytest.mark.parametrize("divided", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_a_loop_that_is_resumed_on_other_data_of_the_same_size_warns(folder, monkeypatch, divided):
    said = []
    monkeypatch.setattr("mntrain.output.print_warning", said.append)

    def run(rows):
        with world_of() as world:
            loader = DataLoader(TensorDataset(rows), batch_size=4)
            data = world.shard(loader, divided=divided)
            checkpoints = world.checkpoints(folder, **bare(world), every=0, data=data)
            checkpoints.save(checkpoints.restore() + 1, now=True)

    rows = torch.arange(12.0)
    run(rows)
    run(rows)
    assert said == []
    run(rows if divided and RANK < RANKS - 1 else rows.flip(0))
    where = f" on rank {RANKS - 1}" if divided else ""
    told = f"the data is not that of the checkpoint: samples of data{where} changed"
    assert said == ([told] if RANK == 0 else [])


def test_ranks_that_are_seeded_behind_the_optimizer_draw_unlike_masks(folder):
    """Their weights are those of rank 0, and a resumed loop draws on."""
    masks = []
    for _ in range(2):
        with world_of() as world:
            torch.manual_seed(0)
            given = bare(world)
            assert len({*world.gather(str(given["model"].weight))}) == 1
            torch.manual_seed(world.rank)
            checkpoints = world.checkpoints(folder, **given, every=0)
            step = checkpoints.restore()
            masks.append(nn.functional.dropout(torch.ones(64)).tolist())
            checkpoints.save(step + 1, now=True)
            assert len({*map(str, world.gather(masks[-1]))}) == RANKS
    torch.manual_seed(RANK)
    assert masks == [nn.functional.dropout(torch.ones(64)).tolist() for _ in range(2)]


def test_a_position_is_restored_on_the_rank_that_had_it(folder, capfd):
    with world_of() as world:
        given = bare(world)
        common, own = Bookmark(7), Bookmark(10 * RANK)
        checkpoints = world.checkpoints(folder, **given, common=common, own=own)
        checkpoints.restore()
        checkpoints.save(1, now=True)
    with world_of() as world:
        common, own = Bookmark(0), Bookmark(-1)
        checkpoints = world.checkpoints(folder, **bare(world), common=common, own=own)
        assert checkpoints.restore() == 1
        assert (common.at, own.at) == (7, 10 * RANK)
    with world_of() as world:
        capfd.readouterr()
        assert world.checkpoints(folder, **bare(world), common=common).restore() == 1
        warning = "mntrain: warning: step-00000001 also has the state of own\n"
        assert capfd.readouterr().err == (warning if RANK == 0 else "")


def test_a_scheduler_that_was_not_saved_is_warned_about(folder, capfd):
    for warned in (False, True):
        with world_of() as world:
            given = bare(world)
            scheduler = cosine(given["optimizer"])
            both = {} if warned else {"scheduler": scheduler}
            checkpoints = world.checkpoints(folder, **given, **both)
            checkpoints.restore()
            checkpoints.save(1 + warned, now=True)
        assert ("scheduler of the optimizer begins anew" in capfd.readouterr().err) == (
            warned and RANK == 0
        )


def test_wrong_arguments_of_checkpoints_are_refused(folder):
    with world_of() as world:
        given = bare(world)
        often = "a number of steps, minutes such as 10min, or auto"
        torchs = {"optimizer": torch.optim.SGD(given["model"].parameters(), lr=0.1)}
        for options, message in [
            ({"every": "often"}, f"every: must be {often}, not 'often'"),
            ({"keep": 0}, "keep: Input should be greater than or equal to 1, not 0"),
            ({"schedule": "cosine"}, "schedule is a str without state_dict and"),
            ({"model": nn.Linear(2, 2)}, "optimizer trains parameters that model does"),
            (torchs, "optimizer is not one that world.optimizer() has made"),
        ]:
            assert message in refusal(world.checkpoints, folder / "run", **given | options)
        second = {"critic": world.optimizer(nn.Linear(2, 2), torch.optim.SGD, stage=1, lr=0.1)}
        said = refusal(world.checkpoints, folder / "run", **given | second)
        assert "save critic.full_state_dict(), which all ranks call" in said
        unsaved = world.checkpoints(folder / "unsaved", **given, data=Bookmark(len))
        assert "the state has data.at, a builtin_function" in refusal(unsaved.restore)
        world.checkpoints(folder / "run", **given)
        said = refusal(world.checkpoints, folder / "run", **given)
        assert "run has checkpoints in this world already" in said
        every = {"every": 5 + RANK}
        said = refusal(world.checkpoints, folder / "other", **given, **every)
        assert "every differs between ranks: rank 0 has 5, rank 1 has 6" in said


def test_a_directory_in_use_and_one_with_a_finished_run_are_refused(folder):
    with world_of() as world:
        world.metrics(folder).log(1, loss=2.0)
        with world_of() as other:
            assert "is in use by a job (on " in refusal(other.metrics, folder)
    with world_of() as world:
        checkpoints = world.checkpoints(folder, **bare(world))
        assert checkpoints.restore() == 0  # killed before its first checkpoint: begins anew
        with world.metrics(folder) as metrics:
            metrics.log(1, loss=3.0)
    assert column(folder, "loss") == [3.0]
    with world_of() as world:
        checkpoints = world.checkpoints(folder, **bare(world))
        assert "holds a run already: give another run directory" in refusal(checkpoints.restore)


def test_a_full_disk_ends_no_loop_and_its_end_says_what_is_lost(folder, monkeypatch, capfd):
    full = [True]

    def unless_full(write, *arguments):
        if full[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(*arguments)

    with world_of() as world:
        logs = [world.metrics(folder / name) for name in ("whole", "lost", "failed")]
        for owner, name in ((writers, "append_whole"), (files, "write_whole")):
            monkeypatch.setattr(owner, name, partial(unless_full, getattr(owner, name)))
        for log in logs:
            for step in range(1, 4):
                log.log(step, loss=1.0)
        full[0] = False
        logs[0].close()
        full[0] = True
        reason = "(No space left on device)"
        lacks = f"lacks 3 lines of metrics.jsonl {reason}, summary.json {reason}: these could not"
        with pytest.raises(AgreedError, match=re.escape(f"{folder}/lost {lacks} be written")):
            logs[1].close()
        capfd.readouterr()
        with pytest.raises(AgreedError, match="an error of all"), logs[2]:  # and not that of files
            raise AgreedError("an error of all", RANK)
        assert (f"{folder}/failed {lacks}" in capfd.readouterr().err) == (RANK == 0)
    assert column(folder / "whole", "step") == [1, 2, 3]
    assert summary_of(folder / "whole")["status"] == "completed"


def test_a_save_that_fails_warns_and_the_last_one_raises(folder, capfd):
    with looping(folder / "run", every=1) as loop:
        if RANK == 0:
            (folder / "run" / "checkpoints").write_text("in the way")
        loop.world.barrier()
        for step in (1, 2):
            loop.step(step)
            loop.checkpoints.save(step)
        assert "step-00000003 was not saved: " in refusal(loop.checkpoints.save, 3, now=True)
        loop.checkpoints.save(4)
        assert "step-00000004 was not saved: " in refusal(loop.checkpoints.close)
        loop.checkpoints.close()
    printed = capfd.readouterr().err
    assert printed.count(" was not saved: ") == (RANK == 0)  # of two, within a minute
    assert ("step-00000001 was not saved: " in printed) == (RANK == 0)


def test_a_run_can_be_rolled_back(folder):
    with world_of() as world:
        loop = Loop(world, folder / "run", every=3)
        loop.run(5)
        before = column(folder / "run", "loss")[3:]
        assert loop.checkpoints.restore() == 3
        assert column(folder / "run", "step") == [1, 2, 3]
        for step in (4, 5):
            loop.step(step)
        loop.metrics.close()
    assert column(folder / "run", "loss")[3 : 3 + len(before)] == before
