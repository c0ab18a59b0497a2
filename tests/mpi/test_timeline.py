"""Timelines of an own loop on all ranks: one clock, every byte, slow ranks, errors and limits."""

import gzip
import json
import time
from collections import defaultdict

import pytest
import torch
from mpi4py import MPI
from torch import nn
from worlds import RANKS, make_world, meet, refusal

from mntrain import AgreedError
from mntrain.timeline import trace

RANK = MPI.COMM_WORLD.rank
LEVELS = ("node_messages", "node_bytes", "cross_messages", "cross_bytes")


@pytest.fixture(params=[2, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (None, 1))])
def world(request):
    with make_world(layout=request.param, bucket_mb=0.01) as made:
        yield made


def train(world, steps, *, stage=1, slow=None):
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    optimizer = world.optimizer(model, torch.optim.AdamW, stage=stage, overlap_forward=True)
    samples = torch.linspace(-1, 1, 4 * RANKS * steps * 64).view(-1, 64)
    loader = torch.utils.data.DataLoader(samples, 4 * RANKS)
    for batch in world.shard(loader):
        with world.recorder.phase("forward"):
            loss = model(batch).square().mean()
            if slow == RANK:
                time.sleep(0.2)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.wait_for_parameters()


def slices_of(found):
    """The slices of a trace by rank and the name of their track."""
    names, slices = {}, defaultdict(lambda: defaultdict(list))
    for event in found["traceEvents"]:
        if event["name"] == "thread_name":
            names[event["pid"], event["tid"]] = event["args"]["name"]
    for event in found["traceEvents"]:
        if event["ph"] == "X":
            slices[event["pid"]][names[event["pid"], event["tid"]]].append(event)
    return slices


def collectives(slices):
    """The collectives of each rank by stream and number."""
    return {
        rank: {(e["args"]["stream"], e["args"]["number"]): e for e in tracks["communication"]}
        for rank, tracks in slices.items()
    }


def summed(slices, name):
    return sum(e["dur"] for e in slices["training"] if e["name"] == name)


def test_collectives_of_all_ranks_lie_on_one_clock_with_all_their_bytes(world, folder, monkeypatch):
    """Clocks of ranks are hours apart and drift, and no rank is done before all have begun."""
    real, start = time.perf_counter, time.perf_counter()
    monkeypatch.setattr(
        time, "perf_counter", lambda: 3600.0 * RANK + real() + 2e-3 * RANK * (real() - start)
    )
    path = folder / "new" / "trace.json"
    before = world.usage()
    with world.timeline(path):
        train(world, 3)
        after = world.usage()
    meet()
    found = json.loads(path.read_text())
    slices, facts = slices_of(found), found["otherData"]["ranks"]
    assert sorted(slices) == list(range(RANKS))
    by_rank = collectives(slices)
    assert by_rank[0].keys() == by_rank[RANK].keys()
    error = 1 + 2 * max(one["clock_error_us"] for one in facts)
    assert error < 1e5
    gradients = 0
    for key, own in by_rank[0].items():
        every = [by_rank[rank][key] for rank in range(RANKS)]
        assert {e["name"] for e in every} == {own["name"]}
        gradients += own["name"] == "gradient bucket 0: reduce_scatter"
        ended = [e["ts"] + e["dur"] for e in every]
        if "broadcast" in own["name"]:
            assert min(ended) + error >= own["ts"]
        elif "ends_after_the_timeline" not in own["args"]:
            assert min(ended) + error >= max(e["ts"] for e in every)
    assert gradients == 3
    for rank in range(RANKS):
        in_collectives = [
            sum(e["args"].get(name, 0) for e in by_rank[rank].values()) for name in LEVELS
        ]
        counted = [getattr(after[rank], name) - getattr(before[rank], name) for name in LEVELS]
        assert in_collectives == counted
        assert "between nodes" in slices[rank] or not counted[3]
        assert "within the node" in slices[rank] or not counted[1]
    assert any(after[rank].cross_bytes for rank in range(RANKS)) == (len(world.topology.nodes) > 1)


def test_a_slow_rank_and_what_an_own_loop_does_are_seen(world, folder):
    path = folder / "trace.json.gz"
    with world.timeline(path):
        train(world, 3, stage=2, slow=1)
    meet()
    slices = slices_of(json.loads(gzip.decompress(path.read_bytes())))
    for rank in range(RANKS):
        names = [e["name"] for e in slices[rank]["training"]]
        assert {name: names.count(name) for name in ("forward", "backward", "optimizer")} == (
            dict.fromkeys(("forward", "backward", "optimizer"), 3)
        )
        assert names.count("data") >= 3
        assert {"wait", "reduce_wait"} <= set(names)
        if rank != 1:
            assert summed(slices[rank], "forward") < summed(slices[1], "forward")
            assert summed(slices[rank], "wait") > summed(slices[1], "wait")
    first = next(e for e in slices[0]["training"] if e["name"] == "backward")
    inner = [
        e
        for e in slices[0]["training"]
        if e["name"] == "reduce_wait" and first["ts"] <= e["ts"] < first["ts"] + first["dur"]
    ]
    assert len(inner) == 1


def test_one_timeline_at_a_time_and_what_there_is_after_an_error_of_all(world, folder, capfd):
    path = folder / "trace.json"
    with world.timeline(path), pytest.raises(AgreedError, match="is being recorded"):
        world.timeline(path).__enter__()
    assert "no timeline can be written" in refusal(world.timeline(folder).__enter__)
    if RANK == 0:
        path.unlink()

    def fail():
        with world.timeline(path), world.agreement():
            world.barrier()
            if RANK == 1:
                raise ValueError("bad batch")

    assert "bad batch" in refusal(fail)
    meet()
    assert collectives(slices_of(json.loads(path.read_text())))[RANK]
    with pytest.raises(KeyError), world.timeline(folder / "none.json"):  # of each rank alone
        raise KeyError("a bug")
    world.barrier()
    assert not (folder / "none.json").exists()
    assert not capfd.readouterr().err


def test_a_timeline_that_is_too_long_lacks_its_end_and_says_so(world, folder, capfd, monkeypatch):
    monkeypatch.setattr(trace, "MOST_EVENTS", (10, 10 * RANKS))
    path = folder / "trace.json"
    with world.timeline(path):
        train(world, 2)
    meet()
    found = json.loads(path.read_text())
    assert sum(len(row) for tracks in slices_of(found).values() for row in tracks.values()) > 0
    assert all(one["lacks_events"] > 0 for one in found["otherData"]["ranks"])
    told = capfd.readouterr().err
    assert ("lacks the last" in told) == (RANK == 0)
