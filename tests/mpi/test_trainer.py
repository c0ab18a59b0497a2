"""The order in which a training job communicates, and how it stops for one of its ranks."""

import json
import os
import signal
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from mpi4py import MPI
from worlds import RANKS, make_world

from mntrain.checkpoint import Saver
from mntrain.checkpoint.reader import inspect, list_checkpoints
from mntrain.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    ModelConfig,
    RunConfig,
    TrainConfig,
    ZeroConfig,
)
from mntrain.errors import TrainingStoppedError
from mntrain.sync import SyncConfig
from mntrain.tasks.lm import LanguageModel
from mntrain.train.consensus import model_digest
from mntrain.train.trainer import Trainer
from zero import stale_rounds, streaming

pytestmark = pytest.mark.mpi

RANK = MPI.COMM_WORLD.rank

EACH_STEP = {"eval_every": 1, "check_every": 1}
VERBS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")


class Signalling(LanguageModel):
    """Sends the last rank signals, in the forward of its second step."""

    signals = ()
    calls = 0

    def loss(self, model, batch):
        self.calls += 1
        if self.calls == 2 and MPI.COMM_WORLD.rank == RANKS - 1:
            for number in self.signals:
                os.kill(os.getpid(), number)
        return super().loss(model, batch)


@pytest.fixture
def world():
    with make_world() as world:
        yield world


def small(folder: Path, task: str = "lm", **train) -> Config:
    """A job of four short steps, with one micro-batch on every rank."""
    corpus = folder / "corpus.txt"
    corpus.write_text("one and two make three\n" * 40)
    steps = {"steps": 4, "batch_size": RANKS, "eval_every": 0, "eval_samples": 2}
    return Config(
        task=task,
        device="cpu",
        data=DataConfig(path=corpus),
        model=ModelConfig(layers=2, heads=2, width=16, context=16),
        train=TrainConfig(**(steps | train)),
        zero=ZeroConfig(stage=2),
        run=RunConfig(dir=folder / "run"),
    )


def logged(log: list[str], owner: object, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = getattr(owner, name)

    def wrapped(*args, **kwargs):
        log.append(name)
        return call(*args, **kwargs)

    monkeypatch.setattr(owner, name, wrapped)


@pytest.mark.thorough
@pytest.mark.mpi(min_size=2)
def test_nothing_queues_between_an_update_and_the_next_forward(world, tmp_path, monkeypatch):
    log: list[str] = []
    for verb in VERBS:
        logged(log, world.collectives, verb, monkeypatch)
    logged(log, world, "gather", monkeypatch)
    logged(log, LanguageModel, "loss", monkeypatch)
    trainer = Trainer(world, small(tmp_path))
    log.clear()
    assert trainer.fit() == 0
    # The first step is left out: it also gathers the names of the task's metrics.
    starts = [index for index, name in enumerate(log) if name == "loss"][1:4]
    for start, end in pairwise(starts):
        communicated = log[start + 1 : end]
        gathers = communicated.count("all_gather")
        assert gathers > 0
        assert communicated[-gathers:] == ["all_gather"] * gathers


def steps_taken(folder: Path) -> int:
    return len((folder / "run" / "metrics.jsonl").read_text().splitlines())


def lines_of(run: Path) -> list[dict]:
    return [*map(json.loads, (run / "metrics.jsonl").read_text().splitlines())]


def summary_of(folder: Path) -> dict:
    return json.loads((folder / "run" / "summary.json").read_text())


@pytest.mark.parametrize(
    ("signals", "status", "code"),
    [
        ([signal.SIGINT], "interrupted", 130),
        pytest.param([signal.SIGTERM], "preempted", 75, marks=pytest.mark.thorough),
        pytest.param([signal.SIGUSR1, signal.SIGUSR1], "preempted", 75, marks=pytest.mark.thorough),
        ([signal.SIGUSR2, signal.SIGTERM, signal.SIGINT], "preempted", 75),
    ],
)
def test_a_signal_on_one_rank_ends_all_ranks_after_the_same_step(
    world, tmp_path, capsys, *, signals, status, code
):
    Signalling.signals = signals
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGUSR1)]
    config = small(tmp_path, f"{__name__}:Signalling", steps=50)
    assert Trainer(world, config).fit() == code
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGUSR1)] == handlers
    if world.master:
        assert steps_taken(tmp_path) == 2
        summary = summary_of(tmp_path)
        assert summary["status"] == status
        assert summary["reason"] == f"{signals[0].name} on rank {RANKS - 1}"
        # Who only interrupts gets the checkpoints asked for: none.
        saved = [path.name for path in list_checkpoints(tmp_path / "run")]
        assert saved == (["step-00000002"] if status == "preempted" else [])
        told = capsys.readouterr().out.count("the steps of this job were not saved: with --checkp")
        assert told == (status == "interrupted")


def test_a_signal_while_the_last_checkpoint_is_written_does_not_end_it(
    world, tmp_path, monkeypatch
):
    Signalling.signals = [signal.SIGINT]
    config = small(tmp_path, f"{__name__}:Signalling", steps=50)
    save = Saver.save

    def slow(*args):
        os.kill(os.getpid(), signal.SIGINT)
        return save(*args)

    monkeypatch.setattr(Saver, "save", slow)
    config = replace(config, checkpoint=CheckpointConfig(every="40"))
    assert Trainer(world, config).fit() == 130
    if world.master:
        assert summary_of(tmp_path)["checkpoint"].endswith("step-00000002")


def test_a_job_ends_before_its_deadline(world, tmp_path):
    config = small(tmp_path, steps=10**6)
    config = replace(config, run=replace(config.run, max_minutes=2 / 60))
    assert Trainer(world, config).fit() == 75
    if world.master:
        summary = summary_of(tmp_path)
        assert (summary["status"], summary["reason"]) == (
            "preempted",
            "its 0.0333333 minutes are over",
        )
        newest = list_checkpoints(tmp_path / "run")[0]
        assert inspect(newest).step == summary["steps"] == steps_taken(tmp_path)


class Content(LanguageModel):
    """Asks on the last rank, after the second evaluation, for the run to end."""

    def on_evaluation(self, record):
        return "good enough" if MPI.COMM_WORLD.rank == RANKS - 1 and record.step == 4 else None


def test_a_callback_of_one_rank_after_an_evaluation_ends_the_run_on_all(world, tmp_path):
    config = small(tmp_path, f"{__name__}:Content", steps=50, eval_every=2)
    assert Trainer(world, config).fit() == 0
    if world.master:
        summary = summary_of(tmp_path)
        assert (summary["status"], summary["reason"]) == ("stopped", "good enough")
        assert steps_taken(tmp_path) == 5  # in which all ranks learn of it


@pytest.mark.thorough
def test_the_checkpoint_of_the_best_evaluation_is_kept(world, tmp_path, monkeypatch):
    losses = iter([5.0, 3.0, 4.0, 4.5, 3.5, 6.0])
    evaluate = Trainer.evaluate
    monkeypatch.setattr(Trainer, "evaluate", lambda self: (next(losses), evaluate(self)[1]))
    config = small(tmp_path, steps=12, eval_every=2)
    config = replace(config, checkpoint=CheckpointConfig(every="6", keep=1))
    assert Trainer(world, config).fit() == 0
    if world.master:
        kept = list_checkpoints(tmp_path / "run")
        assert [(inspect(path).step, inspect(path).eval_loss) for path in kept] == [(12, 6), (4, 3)]
        assert summary_of(tmp_path)["checkpoints"]["saved"] == 4  # after 2, 4, 6 and 12


class Slow(LanguageModel):
    """Takes a twentieth of a second for a step."""

    def loss(self, model, batch):
        time.sleep(0.05)
        return super().loss(model, batch)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("checkpoint", "least", "most"),
    [
        (CheckpointConfig(every="0.005min"), 2, 7),  # after 0.3 s or more, and in the end
        (CheckpointConfig(every="auto", mtbf_hours=0.001), 3, 20),  # after the first step too
        (CheckpointConfig(every="auto", mtbf_hours=1e6), 2, 2),  # too seldom for a second one
    ],
)
def test_the_clock_decides_when_to_save(world, tmp_path, checkpoint, least, most):
    config = replace(small(tmp_path, f"{__name__}:Slow", steps=12), checkpoint=checkpoint)
    assert Trainer(world, config).fit() == 0
    if world.master:
        summary = summary_of(tmp_path)
        assert least <= summary["checkpoints"]["saved"] <= most
        assert summary["checkpoints"]["waited_s"] > 0
        assert summary["checkpoint"].endswith("step-00000012")


@pytest.mark.thorough
def test_a_slow_disk_is_warned_about_once(world, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("mntrain.run.checkpointing._LONG_WAIT_S", 0.0)
    config = replace(small(tmp_path, steps=6), checkpoint=CheckpointConfig(every="1"))
    assert Trainer(world, config).fit() == 0
    warned = capsys.readouterr().err.count("since the checkpoint before was still being written")
    assert warned == (1 if world.master else 0)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "sync",
    [
        SyncConfig(mode="diloco", every=4, warmup=1),
        SyncConfig(mode="streaming", every=4, warmup=1, overlap=2),
        pytest.param(SyncConfig(mode="sparseloco", every=4, warmup=1), marks=pytest.mark.thorough),
    ],
    ids=lambda sync: sync.mode,
)
def test_nodes_that_exchange_rarely_resume_and_evaluate_without_changing_the_run(tmp_path, sync):
    folder = MPI.COMM_WORLD.bcast(tmp_path)
    jobs = [("whole", None, {}), *[("parts", n, EACH_STEP) for n in (3, None)]]
    for name, stop_after, options in jobs:
        config = replace(
            small(folder, steps=6, **options),
            sync=sync,
            run=RunConfig(dir=folder / name, stop_after=stop_after),
            checkpoint=CheckpointConfig(every="100"),
        )
        with make_world(layout=1) as world:
            trainer = Trainer(world, config)
            assert trainer.fit() == 0
            assert len(set(world.gather(model_digest(trainer._model)))) == (
                RANKS if stop_after else 1
            )
    if MPI.COMM_WORLD.rank == 0:
        whole, parts = (
            list(map(json.loads, (folder / name / "metrics.jsonl").read_text().splitlines()))
            for name in ("whole", "parts")
        )
        assert [line["loss"] for line in whole] == [line["loss"] for line in parts]
        assert [line["step"] for line in parts if "eval_loss" in line] == [1, 2, 3, 4, 5, 6]
        assert whole[-1]["eval_loss"] == parts[-1]["eval_loss"]
        models = {
            (folder / name / "checkpoints/step-00000006/model.safetensors").read_bytes()
            for name in ("whole", "parts")
        }
        assert len(models) == 1


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("settles", ["evaluation", "save"])
def test_an_exchange_in_flight_that_is_not_finite_stops_the_run(tmp_path, monkeypatch, settles):
    folder = MPI.COMM_WORLD.bcast(tmp_path)
    monkeypatch.setattr(streaming, "is_finite", lambda tensor: False)
    config = replace(
        small(folder, eval_every=2 if settles == "evaluation" else 0),
        sync=SyncConfig(mode="streaming", every=2, fragments=1),
        checkpoint=CheckpointConfig(every="2" if settles == "save" else "0"),
    )
    with make_world(layout=1) as world:
        trainer = Trainer(world, config)
        with pytest.raises(TrainingStoppedError, match="in step 2, the difference between"):
            trainer.fit()
        if world.master:
            summary = json.loads((config.run.dir / "summary.json").read_text())
            assert summary["status"] == "failed"


STALE = SyncConfig(mode="diloco", every=2, warmup=1, max_staleness=2)


class Holds(LanguageModel):
    """Keeps the last rank back, in its second step, until the others are in their seventh."""

    folder = Path()
    calls = 0

    def loss(self, model, batch):
        self.calls += model.training
        rank, last = MPI.COMM_WORLD.rank, RANKS - 1
        if rank < last and self.calls == 7:
            (self.folder / f"ahead-{rank}").touch()
        deadline = time.monotonic() + 60
        while rank == last and self.calls == 2 and len([*self.folder.glob("ahead-*")]) < last:
            assert time.monotonic() < deadline, "the others wait within the bound"
            time.sleep(0.01)
        return super().loss(model, batch)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("stage", [0, pytest.param(2, marks=pytest.mark.thorough)])
def test_a_job_waits_for_a_slow_node_at_the_bound_only(tmp_path, monkeypatch, stage):
    folder = MPI.COMM_WORLD.bcast(tmp_path)
    monkeypatch.setattr(Holds, "folder", folder)
    config = replace(
        small(folder, f"{__name__}:Holds", steps=12),
        sync=STALE,
        zero=ZeroConfig(stage=stage),
        checkpoint=CheckpointConfig(every="0.0001min"),  # as often as it may
    )
    with make_world(layout=1) as world:
        trainer = Trainer(world, config)
        assert trainer.fit() == 0
        assert len(set(world.gather(model_digest(trainer._model)))) == 1
    if MPI.COMM_WORLD.rank == 0:
        lines = lines_of(config.run.dir)
        assert [line["step"] for line in lines] == [*range(1, 13)]
        assert 2 <= summary_of(folder)["checkpoints"]["saved"] <= 6  # in the end, and after rounds


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("mode", ["local-sgd", "diloco", "sparseloco"])
def test_rounds_report_the_means_of_all_nodes_in_order(tmp_path, mode):
    folder = MPI.COMM_WORLD.bcast(tmp_path)
    by_bound = []
    for bound in (0, 2):
        config = replace(
            small(folder, steps=8, check_every=4),
            sync=SyncConfig(mode=mode, every=3, max_staleness=bound),
            run=RunConfig(dir=folder / f"run-{bound}"),
        )
        with make_world(layout=1) as world:
            assert Trainer(world, config).fit() == 0
        if MPI.COMM_WORLD.rank == 0:
            by_bound.append(lines_of(config.run.dir))
    if MPI.COMM_WORLD.rank == 0:
        waits, goes_on = by_bound
        assert [line["step"] for line in goes_on] == [*range(1, 9)]
        assert [line.keys() for line in goes_on] == [line.keys() for line in waits]
        for one, other in zip(waits[:3], goes_on[:3], strict=True):  # before anything is exchanged
            assert other["loss"] == pytest.approx(one["loss"], rel=1e-6)
            assert other["samples"] == one["samples"]
            assert other["lr"] == one["lr"]
        # Within a few percent of what nodes that wait have, though they go on from other rounds.
        assert goes_on[-1]["loss"] == pytest.approx(waits[-1]["loss"], rel=0.1)
        assert goes_on[-1]["eval_loss"] == pytest.approx(waits[-1]["eval_loss"], rel=0.1)


@pytest.mark.mpi(min_size=2)
def test_a_signal_ends_nodes_that_do_not_wait_after_the_same_step(tmp_path, monkeypatch):
    folder = MPI.COMM_WORLD.bcast(tmp_path)
    monkeypatch.setattr(Signalling, "signals", [signal.SIGTERM])
    config = replace(small(folder, f"{__name__}:Signalling", steps=50), sync=STALE)
    with make_world(layout=1) as world:
        assert Trainer(world, config).fit() == 75
    if MPI.COMM_WORLD.rank == 0:
        # It arrives in step 2, is sent after step 3, and counts two rounds later.
        assert steps_taken(folder) == 7
        (saved,) = list_checkpoints(folder / "run")
        assert inspect(saved).step == 7
        assert summary_of(folder)["reason"] == f"SIGTERM on rank {RANKS - 1}"


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("settles", ["bound", "evaluation", "save"])
def test_a_round_that_is_not_finite_stops_the_run_with_all_steps_before(
    tmp_path, monkeypatch, settles
):
    folder = MPI.COMM_WORLD.bcast(tmp_path)
    monkeypatch.setattr(stale_rounds, "is_finite", lambda tensor: False)
    config = replace(
        small(folder, steps=20, eval_every=4 if settles == "evaluation" else 0),
        sync=STALE,
        checkpoint=CheckpointConfig(every="4" if settles == "save" else "0"),
    )
    step = 7 if settles == "bound" else 4
    with make_world(layout=1) as world:
        trainer = Trainer(world, config)
        with pytest.raises(TrainingStoppedError, match=f"in step {step}, the difference between"):
            trainer.fit()
        if world.master:
            assert summary_of(folder)["status"] == "failed"
            lines = lines_of(config.run.dir)
            whole = [line["step"] for line in lines if "loss" in line]
            assert whole == [*range(1, step + (settles == "save"))]
            assert lines[-1]["step"] == step
            assert "error" in lines[-1]


class NewMetric(LanguageModel):
    """Has a metric on the last rank from its fourth step on, and a loss without it before."""

    calls = 0

    def loss(self, model, batch):
        self.calls += model.training
        loss = super().loss(model, batch)
        new = {"half": torch.tensor(0.5)} if self.calls > 3 and RANK == RANKS - 1 else {}
        return replace(loss, metrics={**loss.metrics, **new})


@pytest.mark.mpi(min_size=2)
def test_a_metric_that_one_node_begins_to_report_is_in_the_records(tmp_path):
    folder = MPI.COMM_WORLD.bcast(tmp_path)
    config = replace(small(folder, f"{__name__}:NewMetric", steps=6), sync=STALE)
    with make_world(layout=1) as world:
        assert Trainer(world, config).fit() == 0
    if RANK == 0:
        lines = lines_of(config.run.dir)
        assert [line["metrics"].get("half") for line in lines] == [None] * 3 + [0.5] * 3
