"""Random runs that are killed at any moment and go on, against one process that is not.

Each start has other nodes and another stage, and some nodes have lost what was in their memory.
"""

import copy
import shutil
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import net
from network import NetworkModel
from oracle import ADAMW, EXACT, PlainTraining, assert_close, loss_of, rows, samples
from search import searched
from simulated_runs import SimulatedRuns
from test_programs import networks
from virtual_time import current

from mntrain.checkpoint.partner_copies import partner_nodes
from zero.layout import split

LAST = 8


@dataclass(frozen=True)
class Start:
    """One start of a run, whose memory some nodes have `lost` before the next start.

    It is killed so many seconds after a step, or after it has begun to restore, at step 0; None: it
    ends by itself.
    """

    nodes: int
    per_node: int
    stage: int
    killed: tuple[int, float] | None
    lost: tuple[int, ...]


@dataclass(frozen=True)
class RunProgram:
    """Starts of a run that saves every few steps, in its directory and in its nodes' memory."""

    seed: int
    starts: tuple[Start, ...]
    every: int
    local_every: int  # 0: none
    now: int  # the step that is saved at once
    step_s: float  # for which a rank computes
    network: NetworkModel


@dataclass
class SafeSteps:
    """The newest safe steps, as a start knows: in the directory, and in the nodes' memory."""

    saved: int = 0
    local: int = 0
    begun: int = 0
    everywhere: int = 0  # the step that the last start has restored, which each node had whole
    left: bool = True  # whether the lost nodes were no partners of each other
    left_anywhere: bool = True  # whether there was another node
    restored: list[int] = field(default_factory=list)
    final: object = None
    reached: int = 0  # the step that the last start has begun, after a step that is in memory; or 0
    longest: int = 0  # the most steps during a local save


def states():
    """The model after each step in one process, from the start on."""
    alone = PlainTraining(net(), ADAMW)
    yield copy.deepcopy(alone.model)
    for step in range(1, LAST + 1):
        alone.step(loss_of(alone.model, samples(12, step)))
        yield copy.deepcopy(alone.model)


EXPECTED = list(states())


def on_rank(world, run, start, folder, *, known, kill):
    model, stage = net(), start.stage
    optimizer = world.optimizer(model, torch.optim.AdamW, stage=stage, lr=0.01, weight_decay=0.1)

    def kill_after(step):
        if world.master and start.killed is not None and step == start.killed[0]:
            kill(current().time.now + start.killed[1])

    local = {"local": folder / "local", "local_every": run.local_every} if run.local_every else {}
    checkpoints = world.checkpoints(
        folder / "run", model=model, optimizer=optimizer, every=run.every, keep=2, **local
    )
    kill_after(0)
    done = checkpoints.restore()
    optimizer.wait_for_parameters()
    assert_close(model, EXPECTED[done], EXACT)
    found, begun, at_once = checkpoints._resumed, done, 0
    known.restored.append((done, bool(found and found.from_nodes)))
    low, high = split(12, world.size)[world.rank : world.rank + 2]
    for step in range(done + 1, LAST + 1):
        known.begun, known.reached = max(known.begun, step), max(known.reached, step)
        current().time.sleep(run.step_s * (1 + (7 * world.rank + 3 * step + run.seed) % 4) / 4)
        loss = loss_of(model, rows(samples(12, step), low, high))
        optimizer.backward(loss, weight=high - low)
        optimizer.step()
        optimizer.zero_grad()
        checkpoints.save(step, now=step in (run.now, LAST))
        note(checkpoints, known)
        if checkpoints._local is not None:
            pending = checkpoints._local.saver._pending
            begun = step_in(pending.path) if pending else begun
            known.longest = max(known.longest, step - begun + 1 if pending else 0)
            at_once = step if step in (run.now, LAST) else at_once  # in the run directory
            # One that is due begins when the one before is complete.
            assert pending or step - max(begun, at_once) < run.local_every
        kill_after(step)
    optimizer.wait_for_parameters()
    assert_close(model, EXPECTED[LAST], EXACT)
    known.final = LAST


def note(checkpoints, known):
    """Note what is safe by now, as every rank knows it."""
    if checkpoints._last is not None:
        known.saved = max(known.saved, step_in(checkpoints._last))
    if checkpoints._local is not None:
        saver = checkpoints._local.saver
        if saver._whole is not None and saver._copied:
            known.local = step_in(saver._whole)


def ended_safely(folder):
    """Return whether the last step is saved in the run directory."""
    return any(step_in(path) == LAST for path in folder.glob("run/checkpoints/step-*"))


def step_in(path):
    return int(path.name.removeprefix("step-"))


def runs():
    seconds = st.floats(-6, -2).map(lambda power: 10**power)
    start = st.builds(
        Start,
        nodes=st.integers(1, 4),
        per_node=st.integers(1, 2),
        stage=st.integers(0, 2),
        killed=st.tuples(st.integers(0, LAST), seconds),
        lost=st.sets(st.integers(0, 3)).map(lambda lost: tuple(sorted(lost))),
    )
    last = st.builds(
        Start,
        nodes=st.integers(1, 4),
        per_node=st.integers(1, 2),
        stage=st.integers(0, 2),
        killed=st.none(),
        lost=st.just(()),
    )
    return st.builds(
        RunProgram,
        seed=st.integers(0, 1 << 32),
        starts=st.tuples(st.lists(start, min_size=1, max_size=2), last).map(
            lambda s: (*s[0], s[1])
        ),
        every=st.sampled_from([0, 0, 1, 2]),
        local_every=st.sampled_from([0, 1, 1, 2]),
        now=st.sampled_from([0, 0, 2, 5]),
        step_s=st.sampled_from([1e-5, 1e-3, 1e-2]),
        network=networks,
    )


@pytest.mark.thorough
@searched(9)
@given(runs())
def test_every_start_goes_on_from_what_is_left_and_ends_as_an_undisturbed_run(run):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder, known = Path(name), SafeSteps()
        for number, start in enumerate(run.starts):
            safe, most = max(known.saved, known.local if known.left else 0), known.begun
            worlds = SimulatedRuns(
                [start.nodes * start.per_node],
                seed=run.seed + number,
                network=run.network,
                switches=0.1 * (run.seed % 4),
                options={"bucket_mb": 1e-3, "ranks_per_node": start.per_node},
            )
            known.restored, known.final = [], None
            reached, known.reached = known.reached, 0
            places = {"run": run, "start": start, "folder": folder, "known": known}
            worlds.run(partial(on_rank, **places, kill=worlds.kill))
            if known.restored:
                assert len(set(known.restored)) == 1
                (done, from_nodes), *_ = known.restored
                assert safe <= done <= most
                if reached and known.left and run.local_every:
                    assert reached - done <= max(run.local_every, known.longest) + known.longest + 1
                if not (known.left or (known.left_anywhere and known.everywhere)):
                    assert not from_nodes
                known.everywhere = done if from_nodes else 0
            if start.killed is None:
                assert known.final == LAST
            if known.final == LAST and ended_safely(folder):
                known.local = 0  # nodes keep nothing of a run that has ended
            lost = {node for node in start.lost if node < start.nodes}
            partners = partner_nodes([""] * start.nodes)
            known.left = not any(partners[node] in lost for node in lost)
            known.left_anywhere = len(lost) < start.nodes
            for node in lost:
                for path in folder.glob(f"local/*/node-{node}"):
                    shutil.rmtree(path)
        kept = list(folder.glob("local/*"))  # after the clean end
        assert not (kept and (ended_safely(folder) or not run.local_every))
