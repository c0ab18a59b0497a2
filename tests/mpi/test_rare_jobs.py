"""Training jobs whose nodes exchange parameters every few steps."""

from dataclasses import replace

import pytest
import torch
from job import lines_of, summary
from model_digest import model_digest
from mpi4py import MPI
from small_jobs import Silent, small
from worlds import RANKS, make_world

from mntrain.errors import TrainingStoppedError
from mntrain.metrics.display import Display
from mntrain.options.config import CheckpointConfig, LogConfig
from mntrain.sync import SyncConfig
from mntrain.train.entry import exit_code
from mntrain.train.trainer import Trainer
from zero.exchange import exchange

pytestmark = pytest.mark.simulated

RANK = MPI.COMM_WORLD.rank


def fit(config):
    """Run a job on nodes of one rank: its exit code, and how many different models ranks have."""
    with make_world(layout=1) as world:
        trainer = Trainer(world, config)
        code = exit_code(trainer.fit())
        return code, len(set(world.gather(model_digest(trainer._model))))


def stops(config, step):
    """Run a job that an exchange stops in this step."""
    with make_world(layout=1) as world:
        trainer = Trainer(world, config)
        with pytest.raises(TrainingStoppedError, match=f"in step {step}, the difference between"):
            trainer.fit()
        world.barrier()


STALE = SyncConfig(mode="diloco", every=2, warmup=1, max_staleness=2)


@pytest.mark.parametrize("bound", [0, 2])
def test_nodes_report_their_own_losses_and_those_of_all_after_a_round(folder, monkeypatch, bound):
    losses = []
    report = Display.step

    def noted(display, record):
        losses.append(record.loss)
        report(display, record)

    monkeypatch.setattr(Display, "step", noted)
    every, log = 3, LogConfig(per_rank=True)
    sync = SyncConfig(mode="diloco", every=every, max_staleness=bound)
    config = replace(small(folder, steps=10, check_every=4), sync=sync, log=log)
    with make_world(layout=1) as world:
        assert Trainer(world, config).fit()["status"] == "completed"
        by_node = world.gather(losses)
        places = world.size
    if RANK == 0:
        lines = lines_of(config.run.dir)
        assert [line["step"] for line in lines] == [*range(1, 11)]
        assert [line["loss"] for line in lines] == by_node[0]
        assert len(set(zip(*by_node, strict=True))) == 10
        means = [sum(of_step) / RANKS for of_step in zip(*by_node, strict=True)]
        of_rounds = [sum(means[i : i + every]) / every for i in range(0, 9, every)]
        told = {line["step"]: line["round_loss"] for line in lines if "round_loss" in line}
        counts = [every * (1 + n + bound) for n in range(3 - bound)]
        if not bound:  # the last step has an exchange, too
            counts, of_rounds = [*counts, 10], [*of_rounds, means[9]]
        assert [*told] == counts
        assert [*told.values()] == pytest.approx(of_rounds[: len(counts)], rel=1e-6)
        measured = {line["step"] for line in lines if "rank_step_s" in line}
        assert measured == {*counts}
        assert all(len(line["rank_step_s"]) == places for line in lines if "rank_step_s" in line)


@pytest.mark.parametrize(("settles", "step"), [("bound", 7), ("evaluation", 4), ("save", 4)])
def test_an_exchange_that_is_not_finite_stops_the_run_with_all_steps_before(
    folder, monkeypatch, settles, step
):
    monkeypatch.setattr(exchange, "is_finite", lambda tensor: False)
    config = replace(
        small(folder, steps=20, eval_every=4 if settles == "evaluation" else 0),
        sync=STALE,
        checkpoint=CheckpointConfig(every="4" if settles == "save" else "0"),
    )
    stops(config, step)
    assert summary(folder)["status"] == "failed"
    lines = lines_of(config.run.dir)
    whole = [line["step"] for line in lines if "loss" in line]
    assert whole == [*range(1, step + (settles == "save"))]
    assert lines[-1]["step"] == step
    assert "error" in lines[-1]


class NewMetric(Silent):
    """Has a metric of each rank from its fourth step on, or a later one, and none before."""

    calls = 0

    def loss(self, model, batch):
        self.calls += model.training
        loss = super().loss(model, batch)
        new = {f"half of {RANK}": torch.tensor(0.5)} if self.calls > 3 + RANK else {}
        return replace(loss, metrics={**loss.metrics, **new})


def test_a_metric_that_one_node_begins_to_report_is_of_that_node(folder):
    config = replace(small(folder, f"{__name__}:NewMetric", steps=6), sync=STALE)
    assert fit(config)[0] == 0
    if RANK == 0:
        lines = lines_of(config.run.dir)
        found = [{name for name in line["metrics"] if name.startswith("half")} for line in lines]
        assert found == [set()] * 3 + [{"half of 0"}] * 3
