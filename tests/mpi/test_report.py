"""A world's report of memory, traffic and compression, against the tensors and closed forms."""

import gc

import pytest
import torch
from cases import RANK
from torch import nn
from torch.nn import Parameter
from torch.utils.data import DataLoader, TensorDataset
from worlds import RANKS

import mntrain
from mntrain.sync import SparseLoCo

STEPS, SAMPLES = 3, 10
WIDTH = 301  # of a layer of 356 KiB, which is no small message
NUMEL = WIDTH * WIDTH + WIDTH + 3 * WIDTH  # without the frozen bias


def memory_of_tensors():
    """The addresses of all tensors of this process, from and to."""
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, Parameter)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages if s.nbytes()}


def length(spans):
    """The bytes of spans, of which several may overlap."""
    total = end = 0
    for low, high in sorted(spans):
        total += max(0, high - max(low, end))
        end = max(end, high)
    return total


def report_of(stage, dtype=torch.float32, sync=None, **settings):
    """The figures after a few steps, and the bytes of the tensors of every rank."""
    with mntrain.init(device="cpu", **settings) as world:
        torch.manual_seed(3)
        data = TensorDataset(torch.randn(SAMPLES, WIDTH, dtype=dtype))
        gc.collect()
        before = length(memory_of_tensors())
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)).to(dtype)
        model[1].bias.requires_grad_(False)
        optimizer = world.optimizer(model, torch.optim.AdamW, lr=1e-3, stage=stage, sync=sync)
        loader = world.shard(DataLoader(data, batch_size=SAMPLES))
        for _ in range(STEPS):
            for (x,) in loader:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
        gc.collect()
        held = length(memory_of_tensors()) - before
        figures = world.report()
        assert world.gather(figures) == [figures] * world.size
        return figures, world.gather(held), len(world.topology.nodes)


def by_role(figures, key):
    return {role: sizes[key] for role, sizes in figures["memory"].items() if "predicted" in sizes}


exhaustive = pytest.mark.exhaustive
BF16 = pytest.param(torch.bfloat16, marks=exhaustive)


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("stage", [*(pytest.param(n, marks=exhaustive) for n in (0, 1)), 2])
def test_memory_is_that_of_the_tensors_and_saves_what_a_run_at_stage_0_takes_more(
    capsys, stage, dtype
):
    # On nodes of their own, where no rank has tensors over the memory of others.
    at_0, *_ = report_of(0, dtype, ranks_per_node=1)
    capsys.readouterr()
    figures, held, _ = report_of(stage, dtype, ranks_per_node=1)
    most, most_at_0 = by_role(figures, "most"), by_role(at_0, "most")
    assert by_role(figures, "stage_0") == most_at_0
    assert by_role(figures, "predicted") == most
    assert by_role(figures, "predicted_least") == by_role(figures, "least")
    assert by_role(figures, "saved") == {role: most_at_0[role] - n for role, n in most.items()}
    for rank in figures["ranks"]:
        own = rank["memory_by_role"]
        assert rank["predicted_by_role"] == own
        # The wide gradients of the update are gone: those of 16 bits that do not fit elsewhere.
        gone = max(0, own["gradients"] - 2 * NUMEL - 1) if dtype.itemsize == 2 and stage < 2 else 0
        others = held[rank["rank"]] - (sum(own.values()) - gone) - rank["buffer_memory"]
        assert 0 <= others < 20_000  # the data, and what ranks compare
    assert figures["samples"] == STEPS * SAMPLES
    assert figures["samples_per_s"] == pytest.approx(STEPS * SAMPLES / figures["wall_s"])
    assert figures["steps"] == STEPS
    assert figures["checks"]["weights"] == STEPS  # before the first, second and third
    assert figures["checks"]["seconds"] == max(rank["checks_s"] for rank in figures["ranks"])
    assert (figures["stage"], figures["partition"], figures["sync"]) == (
        stage,
        "element",
        "every-step",
    )
    assert ("total of these" in capsys.readouterr().out) == (RANK == 0)


# How many bytes of an all-reduce, a reduce-scatter and an all-gather are compressed in a step.
WAYS, LAST = [{}, {"wire_dtype": "bf16"}, {"gather_dtype": "bf16"}], {"compress": "int8"}


@pytest.mark.parametrize("layout", [1, *(pytest.param(n, marks=exhaustive) for n in (None, 2, 3))])
@pytest.mark.parametrize("stage", [pytest.param(0, marks=exhaustive), 2])
@pytest.mark.parametrize(
    "way", [*(pytest.param(way, marks=exhaustive) for way in WAYS), LAST], ids=str
)
def test_compression_is_what_was_sent_and_what_it_stands_for(way, stage, layout):
    figures, _, nodes = report_of(stage, ranks_per_node=layout, **way)
    once = (nodes - 1) * 4 * NUMEL * STEPS  # the bytes that cross nodes in one half of all-reduces
    reduced, gathered = (once, once) if stage else (2 * once, 0)
    plain = gathered if "gather_dtype" in way else reduced if way else 0
    found, cross = figures["compression"], figures["traffic"]["cross_bytes"]
    if not plain:
        assert found == {"before_bytes": 0, "sent_bytes": 0, "ratio": None}
    else:
        # Of int8, each of all nodes' codes, a byte an element, goes to every other node.
        factor = nodes / (1 if stage else 2) / 4 if "compress" in way else 1 / 2
        assert found["before_bytes"] == pytest.approx(plain, abs=8 * RANKS * STEPS)
        assert found["sent_bytes"] == pytest.approx(plain * factor, rel=0.02)
        assert found["ratio"] == found["before_bytes"] / found["sent_bytes"]
    others = cross - found["sent_bytes"] - (reduced + gathered - plain)
    start = (nodes - 1) * 4 * (NUMEL + 3)  # the broadcast of the weights
    small = 4000 * RANKS * STEPS if nodes > 1 else 0
    assert start <= others <= start + small


@exhaustive
@pytest.mark.parametrize("stage", [0, 1])
def test_codes_of_an_exchange_are_compressed_too(stage):
    sync = SparseLoCo(every=STEPS, density=0.05)
    figures, _, nodes = report_of(stage, sync=sync, ranks_per_node=1)
    found = figures["compression"]
    assert figures["sync"] == "sparseloco"
    assert by_role(figures, "predicted") == by_role(figures, "most")
    assert found["before_bytes"] == pytest.approx(2 * (nodes - 1) * 4 * NUMEL, abs=8 * RANKS)
    assert found["ratio"] > 5
    assert figures["memory"]["exchange"]["most"] >= 4 * NUMEL
