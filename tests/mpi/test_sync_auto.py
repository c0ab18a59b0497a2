"""Jobs with --sync.mode auto do what the choice does, with the same bits, and keep it."""

import json
import random
import tomllib
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import nn
from torch.utils.data import Dataset
from worlds import RANKS, make_world

from mntrain import AgreedError
from mntrain.cli import parse
from mntrain.config import (
    CheckpointConfig,
    CommConfig,
    Config,
    LogConfig,
    RunConfig,
    TrainConfig,
    ZeroConfig,
)
from mntrain.sync import StreamingDiLoCo, SyncConfig
from mntrain.tasks import Loss, Task
from mntrain.train import sync_auto
from mntrain.train.consensus import model_digest
from mntrain.train.sync_measurement import Computing, measure_codecs, measure_wire
from mntrain.train.trainer import Trainer

pytestmark = [pytest.mark.mpi, pytest.mark.mpi(min_size=2)]

FAST, SLOW = 1e-15, 1.0  # seconds per byte


class Noisy(Dataset):
    """Points with noise of every generator, one of them the dataset's own."""

    def __init__(self):
        self.own = np.random.default_rng(5)

    def __len__(self):
        return 48  # whole batches of 2, 3 and 4 ranks: statistics need two samples

    def __getitem__(self, index):
        noise = self.own.random() + random.random() + np.random.random() + float(torch.rand(()))
        return torch.tensor([index / 48, noise]), torch.tensor([noise])


class Points(Task):
    """A net with batch statistics and dropout."""

    def model(self):
        return nn.Sequential(
            nn.Linear(2, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1)
        )

    def dataset(self, split):
        return Noisy() if split == "train" else None

    def loss(self, model, batch):
        x, y = batch
        return Loss((model(x) - y).square().mean() + 0 * random.random(), len(x))


class Line(Points):
    """Trains on single samples, too."""

    def model(self):
        return nn.Linear(2, 1)


class BrokenOnOne(Points):
    """Fails in its first call on the last rank, as if for lack of memory."""

    calls = 0

    def loss(self, model, batch):
        BrokenOnOne.calls += 1
        if BrokenOnOne.calls == 1 and MPI.COMM_WORLD.rank == RANKS - 1:
            raise MemoryError("no room")
        return super().loss(model, batch)


def job(folder, name, task="Points", *, sync=None, compress="none", stage=0, every="0", **run):
    return Config(
        task=f"{__name__}:{task}",
        device="cpu",
        train=TrainConfig(steps=12, batch_size=4 * RANKS, micro_batch_size=2),
        zero=ZeroConfig(stage=stage),
        sync=sync or SyncConfig(mode="auto"),
        comm=CommConfig(compress=compress),
        run=RunConfig(dir=folder / name, **run),
        checkpoint=CheckpointConfig(every=every),
        log=LogConfig(plot=False),
    )


@contextmanager
def links(s_per_byte, computing=None):
    """Let links be of this speed; computing is measured, unless it is given."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sync_auto, "measure_wire", lambda world: (1e-15, s_per_byte))
        patch.setattr(sync_auto, "measure_codecs", lambda world, elements: {})
        if computing:
            patch.setattr(sync_auto, "measure_computing", lambda world, trial: computing)
        yield


def run(config, layout=1, compress="none"):
    """Run a job on nodes of so many ranks; return its losses and its weights."""
    with make_world(layout=layout, compress=compress) as world:
        trainer = Trainer(world, config)
        assert trainer.fit() == 0
        digests = world.gather(model_digest(trainer._model))
    lines = []
    if MPI.COMM_WORLD.rank == 0:
        lines = (config.run.dir / "metrics.jsonl").read_text().splitlines()
    lines = MPI.COMM_WORLD.bcast(lines)
    return [json.loads(line)["loss"] for line in lines], digests


def auto_of(config):
    """The entry of summary.json, and the options in config.toml."""
    made = None
    if MPI.COMM_WORLD.rank == 0:
        summary = json.loads((config.run.dir / "summary.json").read_text())
        made = summary["sync_auto"], tomllib.loads((config.run.dir / "config.toml").read_text())
    return MPI.COMM_WORLD.bcast(made)


@pytest.fixture
def folder(tmp_path):
    return MPI.COMM_WORLD.bcast(tmp_path)


@pytest.mark.parametrize("stage", [0, pytest.param(2, marks=pytest.mark.thorough)])
def test_auto_that_chooses_every_step_has_the_bits_of_a_job_without_it(folder, stage):
    plain = job(folder, "plain", sync=SyncConfig(), stage=stage)
    auto = job(folder, "auto", stage=stage)
    with links(FAST):
        assert run(auto) == run(plain)
    found, options = auto_of(auto)
    assert found["choice"] == "every-step"
    assert found["measured"]
    assert found["seconds"]["micro_batches"] == 2
    assert options["sync"]["mode"] == "every-step"
    assert options["comm"]["compress"] == "none"


@pytest.mark.parametrize(
    ("seconds", "sync", "compress", "given"),
    [
        # 97 gradients of 4 bytes, of which each of RANKS nodes sends 2 (RANKS - 1) / RANKS.
        pytest.param(1e-9, SyncConfig("every-step"), "none", {}, marks=pytest.mark.thorough),
        (SLOW, SyncConfig(mode="streaming", every=10), "none", {}),
        pytest.param(
            SLOW,
            SyncConfig(mode="streaming", every=7, outer_lr=0.5),
            "none",
            {"every": 7},
            marks=pytest.mark.thorough,
        ),
        pytest.param(0.13, SyncConfig("every-step"), "bf16", {}, marks=pytest.mark.thorough),
        pytest.param(0.205, SyncConfig("every-step"), "int8", {}, marks=pytest.mark.thorough),
    ],
    ids=["every-step", "streaming", "given", "bf16", "int8"],
)
def test_auto_has_the_bits_of_its_choice(folder, seconds, sync, compress, given):
    if compress == "int8" and RANKS > 3:
        pytest.skip("codes of four nodes take more bytes than bf16")
    outer = {"outer_lr": sync.outer_lr} if sync.outer_lr else {}
    auto = job(folder, "auto", sync=SyncConfig(mode="auto", **given, **outer))
    chosen = job(folder, "chosen", sync=sync, compress=compress)
    numel = 2 * 16 + 16 + 16 + 16 + 16 + 1
    sent = 2 * (RANKS - 1) / RANKS * 4 * numel
    # Computing takes 1 s; `seconds` is that of fp32 gradients between nodes.
    with links(seconds * (1 if seconds == SLOW else 1 / sent), Computing(1.0, 0.0, 2)):
        assert run(auto) == run(chosen, compress=compress)
    found, options = auto_of(auto)
    assert [row["name"] for row in found["candidates"] if row["chosen"]] == [found["choice"]]
    assert ("approximates" in found["why"]) == (sync.mode == "streaming")
    assert options["sync"]["mode"] == sync.mode
    assert options["sync"]["every"] == (sync.every or "none")
    assert options["comm"]["compress"] == compress
    # The options that the run leaves stand for the choice.
    written = parse(["--config", str(auto.run.dir / "config.toml")])
    assert (written.sync, written.comm.compress) == (sync, compress)


def never(*arguments):
    raise AssertionError("a resumed run is measured again")


def test_a_resumed_run_keeps_the_choice_and_does_not_measure(folder, monkeypatch, capsys):
    with links(SLOW):
        for name in ("parts", "explicit"):
            run(job(folder, name, every="100", stop_after=7))
    rare = SyncConfig(mode="streaming", every=10)
    explicit = run(job(folder, "explicit", every="100", sync=rare))
    monkeypatch.setattr(sync_auto, "measure_computing", never)
    monkeypatch.setattr(sync_auto, "measure_wire", never)
    parts = job(folder, "parts", every="100")
    capsys.readouterr()
    assert run(parts) == explicit
    found, options = auto_of(parts)
    assert (found["choice"], found["measured"]) == ("streaming every 10 steps", False)
    assert found["why"] == "streaming every 10 steps, as in the run so far"
    assert options["sync"]["mode"] == "streaming"
    said = capsys.readouterr().out
    if MPI.COMM_WORLD.rank == 0:
        assert "sync auto: streaming every 10 steps, as in the run so far" in said
        assert "changed since then" not in said


@pytest.mark.thorough
def test_a_resumed_run_takes_options_that_are_given_now(folder):
    with links(SLOW):
        run(job(folder, "run", every="100", stop_after=5))
    other = job(folder, "run", every="100", sync=SyncConfig(mode="auto", every=4, outer_lr=0.9))
    with make_world(layout=1) as world:
        trainer = Trainer(world, other)
        with trainer._job.lock or nullcontext():
            assert trainer._config.sync == SyncConfig(mode="streaming", every=4, outer_lr=0.9)
            assert trainer._job.sync == StreamingDiLoCo(4, 0, 0.9)


@pytest.mark.parametrize(
    ("before", "comm", "given", "error"),
    [
        (
            SyncConfig(mode="streaming", every=4),
            {},
            {"every": 1},
            r"keeps --sync\.mode streaming, .*--sync\.overlap 1 .*below --sync\.every 1; leave",
        ),
        (
            SyncConfig(mode="local-sgd", every=4),
            {},
            {"outer_lr": 0.5},
            r"auto keeps --sync\.mode local-sgd, .*--sync\.outer-lr 0\.5: has no effect .*; leave",
        ),
        (
            SyncConfig(),
            {"wire_dtype": "fp16"},
            {},
            "--comm.wire-dtype fp16 so far, which auto cann",
        ),
    ],
    ids=["overlap", "local-sgd", "fp16"],
)
def test_a_run_that_auto_cannot_keep_is_refused_in_one_sentence(folder, before, comm, given, error):
    explicit = job(folder, "run", every="100", stop_after=5, sync=before)
    run(replace(explicit, comm=CommConfig(**comm)))
    config = job(folder, "run", every="100", sync=SyncConfig(mode="auto", **given))
    with make_world(layout=1) as world, pytest.raises(AgreedError, match=error) as raised:
        Trainer(world, config)
    assert "\n" not in str(raised.value)


def test_a_resumed_run_keeps_every_step_in_bf16_and_names_options_without_effect(
    folder, monkeypatch
):
    monkeypatch.setattr(sync_auto, "measure_computing", never)
    explicit = job(folder, "run", every="100", stop_after=5, sync=SyncConfig())
    run(replace(explicit, comm=CommConfig(wire_dtype="bf16")))
    run(job(folder, "run", every="100", sync=SyncConfig(mode="auto", every=20)))
    found, options = auto_of(explicit)
    assert found["choice"] == "every-step with bf16 gradients"
    assert found["why"] == (
        "every-step with bf16 gradients, as in the run so far, in which --sync.every has no effect"
    )
    assert options["comm"]["compress"] == "bf16"


@pytest.mark.thorough
def test_another_number_of_nodes_chooses_anew_and_says_so(folder):
    with links(SLOW):
        run(job(folder, "run", every="100", stop_after=5))
    other = job(folder, "run", every="100")
    layout = None if RANKS == 2 else 2
    with links(FAST):
        run(other, layout)
    found, _ = auto_of(other)
    if layout is None:
        assert found["why"] == "every-step: all ranks are on one node"
    else:
        assert "every-step, expected" in found["why"]
        assert found["why"].endswith(
            f"(chosen anew: the run had streaming every 10 steps on {RANKS} nodes)"
        )


def test_on_one_node_nothing_is_measured(folder, monkeypatch):
    monkeypatch.setattr(sync_auto, "measure_computing", never)
    config = job(folder, "run")
    run(config, layout=None)
    found, options = auto_of(config)
    assert found == {
        "choice": "every-step",
        "why": "every-step: all ranks are on one node",
        "measured": False,
    }
    assert options["sync"]["mode"] == "every-step"


def test_a_rank_that_cannot_measure_leaves_every_step_synchronous(folder, capsys):
    BrokenOnOne.calls = 0
    config = job(folder, "run", "BrokenOnOne")
    with links(SLOW):
        run(config)
    found, _ = auto_of(config)
    assert found["choice"] == "every-step"
    assert f"MemoryError: no room on rank {RANKS - 1}" in found["why"]
    said = capsys.readouterr().err
    if MPI.COMM_WORLD.rank == 0:
        assert "warning: sync auto: every-step: a step's computing could not be measured" in said


@pytest.mark.thorough
@pytest.mark.mpi(min_size=3)
def test_nodes_of_unequal_numbers_of_ranks_exchange_in_every_step(folder):
    config = job(folder, "run")
    with links(SLOW):
        run(config, layout="aba" if RANKS == 3 else "abbb")
    found, _ = auto_of(config)
    assert found["choice"].startswith("every-step")
    reasons = {row["excluded"] for row in found["candidates"] if row["mode"] == "streaming"}
    assert "nodes that exchange rarely need equal numbers of ranks" in reasons.pop()


@pytest.mark.thorough
def test_a_batch_that_leaves_a_node_without_a_sample_exchanges_in_every_step(folder):
    config = job(folder, "run", "Line")
    config = replace(config, train=replace(config.train, batch_size=RANKS - 1))
    with links(SLOW):
        run(config)
    found, _ = auto_of(config)
    assert found["measured"]
    assert found["choice"].startswith("every-step")
    reasons = {row["excluded"] for row in found["candidates"] if row["mode"] == "streaming"}
    assert "each of the" in reasons.pop()


@pytest.mark.parametrize("option", [{"compress": "int8"}, {"wire_dtype": "bf16"}])
def test_another_option_for_what_crosses_nodes_is_refused(folder, option):
    config = replace(job(folder, "run"), comm=CommConfig(**option))
    error = r"--sync\.mode auto chooses how gradients cross nodes; give one of the two"
    with make_world(layout=1) as world, pytest.raises(AgreedError, match=error):
        Trainer(world, config)
    assert not config.run.dir.exists()


def test_links_and_codes_have_one_time_on_all_ranks():
    with make_world(layout=1) as world:
        wire, codecs = measure_wire(world), measure_codecs(world, 1 << 20)
        assert world.gather((wire, codecs)) == [(wire, codecs)] * RANKS
        twice = measure_codecs(world, 1 << 24)
    latency_s, s_per_byte = wire
    assert 0 < latency_s < 1
    assert 1e-13 < s_per_byte < 1e-5
    assert codecs.keys() == {"bf16", "int8"}
    assert all(0 < codecs[name] < twice[name] for name in codecs)  # 16 times the elements
