"""Bytes that an optimizer holds after steps, against a closed form."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from first_of_two import STAGES, FirstOfTwo, zero
from handmade import Lion
from torch import nn

from mntrain.optim import Muon
from zero import SingleProcessCollectives
from zero.layout import ParameterSpec, lay_out
from zero.memory import Memory

ADAM, AMSGRAD = torch.optim.AdamW, partial(torch.optim.AdamW, amsgrad=True)
# Tensors by element that an optimizer keeps, and bytes besides for each piece (a step count).
KEPT = {
    "AdamW": (ADAM, 2, 4),
    "AMSGrad": (AMSGRAD, 3, 4),
    "fused": (partial(torch.optim.Adam, fused=True), 2, 4),
    "SGD": (torch.optim.SGD, 0, 0),
    "momentum": (partial(torch.optim.SGD, momentum=0.9), 1, 0),
    "Lion": (Lion, 1, 0),
}
PLACES = (1, 0), (2, 0), (3, 2), (4, 1)  # numbers of ranks, and a rank
BUCKET = 400  # bytes


def one_of(size, rank):
    """A world as one of its ranks sees it, alone."""
    return type("OneOfSeveral", (FirstOfTwo,), {"size": size, "rank": rank})


def closed_form(specs, tensors, extra, *, stage, size, slot, rounded):
    """Bytes of the rank that owns a slot, cut by element, but for working tensors."""
    parameters = gradients = copies = master = state = 0
    for bucket in lay_out(specs, BUCKET, size):
        each = bucket.dtype.itemsize
        low, high = (0, bucket.numel) if stage == 0 else bucket.shard(slot)
        owned, narrow, rounds = high - low, each < 4, rounded and stage > 0 and each > 2
        parameters += bucket.numel * each
        if stage == 2 and size > 1:
            gradients += owned * max(4, each)
        else:
            padded = bucket.numel + (bucket.numel % 2 if narrow and stage and size > 1 else 0)
            gradients += padded * each
            if narrow and owned * 4 > padded * each:
                gradients += owned * 4
        copies += bucket.numel * 2 * (rounds and size > 1)
        master += owned * max(4, each) * (narrow or rounds)
        for piece in bucket.pieces(low, high):  # in fp32 for 16 bits
            state += piece.numel * max(4, each) * tensors + extra
    return Memory(parameters, gradients, copies, master, state)


class LayersOfDtypes(nn.Module):
    """Linear layers of several dtypes, a scalar and an empty parameter."""

    def __init__(self, *dtypes):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(9, 9).to(dtype) for dtype in dtypes * 2)
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=dtypes[0]))
        self.nothing = nn.Parameter(torch.zeros(0, dtype=dtypes[-1]))

    def forward(self, x):
        x = x * self.scale
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype))
        return x


def specs_of(model):
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [ParameterSpec(name, tuple(p.shape), p.dtype) for name, p in named]


def measured(model, optimizer_class, world=SingleProcessCollectives, micro_batches=1, **options):
    """The bytes of an optimizer after two steps, which are as predicted."""
    optimizer = zero(model, optimizer_class, world, bucket_bytes=BUCKET, **options)
    for _ in range(2):
        for turn in range(micro_batches):
            with optimizer.no_sync() if turn < micro_batches - 1 else nullcontext():
                model(torch.ones(2, 9)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.predicted_memory() == optimizer.memory()
    return optimizer.memory()


DTYPES = {
    "fp32": (torch.float32,),
    "bf16": (torch.bfloat16,),
    "fp32 and bf16": (torch.float32, torch.bfloat16),
    "three": (torch.bfloat16, torch.float64, torch.float32),
}


# Every pair of a place, a stage, dtypes, an optimizer and a number of micro-batches.
CASES = [
    (PLACES[p], s, list(DTYPES)[d], list(KEPT)[(p + s + d) % 6], 1 + 2 * ((p + s + p // 2) % 2))
    for p, s, d in product(range(4), range(3), range(4))
]


@pytest.mark.parametrize(("place", "stage", "dtypes", "kind", "micro_batches"), CASES)
def test_an_optimizer_holds_the_closed_form(place, stage, dtypes, kind, micro_batches):
    check_closed_form(place, stage, DTYPES[dtypes], kind, micro_batches)


@STAGES
@pytest.mark.parametrize("place", [(1, 0), (3, 2)], ids=str)
def test_parameters_that_travel_in_bf16_have_masters_and_copies(place, stage):
    check_closed_form(place, stage, DTYPES["three"], "AdamW", rounded=True)


def check_closed_form(place, stage, dtypes, kind, micro_batches=1, *, rounded=False):
    size, rank = place
    optimizer_class, tensors, extra = KEPT[kind]
    model = LayersOfDtypes(*dtypes)
    model.layers[0].requires_grad_(False)
    specs = specs_of(model)
    options = {"stage": stage, "gather_dtype": torch.bfloat16 if rounded else None}
    options["partition"] = "element"
    found = measured(model, optimizer_class, one_of(size, rank), micro_batches, **options)
    where = {"stage": stage, "size": size, "slot": rank, "rounded": rounded}
    expected = closed_form(specs, tensors, extra, **where)
    sizes = [bucket.nbytes for bucket in lay_out(specs, BUCKET, size)]
    working = found.buckets - expected.buckets
    if stage == 2 and size > 1:  # at most one a dtype, and one in flight
        assert max(sizes) <= working <= (len(dtypes) + 1) * max(sizes)
    else:
        assert working == 0
    assert replace(found, buckets=expected.buckets) == expected


def test_rows_and_columns_of_adafactor_and_parameters_that_are_added_count():
    model = nn.Sequential(nn.Linear(9, 20))
    found = measured(model, torch.optim.Adafactor, stage=1)
    assert found.state == 4 * (9 + 20) + 4 + 4 * 20 + 4
    model = LayersOfDtypes(torch.float32)
    (name, first), *rest = model.named_parameters()
    optimizer = zero(rest, ADAM, stage=1)
    optimizer.add_param_group({"params": [(name, first)], "amsgrad": True})
    model(torch.ones(2, 9)).square().mean().backward()
    optimizer.step()
    elements = sum(parameter.numel() for parameter in model.parameters())
    found = optimizer.memory()
    assert found.parameters == 4 * elements
    steps = 4 * (len(rest) + 1 - 1)  # of the empty one none
    assert found.state == 2 * 4 * elements + 4 * first.numel() + steps
    assert optimizer.predicted_memory() == found


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("stage", [1, 2])
def test_another_stage_is_predicted_as_it_is_then_measured(stage, dtypes):
    options = {"partition": "parameter", "gather_dtype": torch.bfloat16}
    world = one_of(3, 2)
    at_0 = measured(LayersOfDtypes(*dtypes), ADAM, world, partition="parameter")
    optimizer = zero(
        LayersOfDtypes(*dtypes), ADAM, world, stage=stage, bucket_bytes=BUCKET, **options
    )
    assert optimizer.predicted_memory(stage=0) == at_0
    assert optimizer.predicted_memory() == measured(
        LayersOfDtypes(*dtypes), ADAM, world, stage=stage, **options
    )


# A class of each kind: those that read numbers from tensors, factor their state, or keep none.
CLASSES = ("Adafactor", "NAdam", "ASGD", "Rprop", "RAdam", "SGD", "Muon", "RMSprop")


@pytest.mark.parametrize("kind", CLASSES)
def test_the_state_of_every_optimizer_is_predicted(kind):
    optimizer_class = Muon if kind == "Muon" else getattr(torch.optim, kind)
    model = nn.Sequential(nn.Linear(9, 20), nn.Linear(20, 3))
    groups = [{"params": list(model.named_parameters())}]
    if kind == "Muon":
        named = list(model.named_parameters())
        matrices = [pair for pair in named if pair[1].dim() == 2]
        others = [pair for pair in named if pair[1].dim() != 2]
        groups = [{"params": matrices, "muon": True}, {"params": others, "muon": False}]
    options = {"stage": 2, "partition": "parameter", "lr": 1e-3}
    optimizer = zero(groups, optimizer_class, one_of(3, 1), **options)
    model(torch.ones(2, 9)).square().mean().backward()
    optimizer.step()
    assert optimizer.predicted_memory() == optimizer.memory()


class LionOfSome(Lion):
    """Updates parameters that are not said to rest."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None if getattr(p, "rests", False) else p.grad
        return super().step()


@STAGES
def test_the_state_of_an_optimizer_that_reads_attributes_of_parameters_is_predicted(stage):
    model = nn.Sequential(nn.Linear(9, 20), nn.Linear(20, 3))
    model[0].weight.rests = True
    optimizer = zero(model, LionOfSome, FirstOfTwo, stage=stage, partition="element")
    model(torch.ones(2, 9)).square().mean().backward()
    optimizer.step()
    assert 0 < optimizer.memory().state < 4 * 9 * 20
    assert optimizer.predicted_memory() == optimizer.memory()
