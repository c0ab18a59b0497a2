"""Bytes that an optimizer holds: predicted, in closed form, and measured after steps."""

from contextlib import nullcontext
from dataclasses import replace
from fractions import Fraction
from functools import partial

import pytest
import torch
from first_of_two import FirstOfTwo
from handmade import Decaying, Lamb, Lion
from predictions import predict
from torch import nn

from zero import SingleProcessCollectives, ZeroOptimizer
from zero.layout import ParameterSpec, plan_buckets
from zero.memory import Memory

ADAM, AMSGRAD = torch.optim.AdamW, partial(torch.optim.AdamW, amsgrad=True)
SGD, MOMENTUM = torch.optim.SGD, partial(torch.optim.SGD, momentum=0.9)
# Tensors by element that an optimizer keeps, and bytes besides for each piece (a step count).
KEPT = {
    "AdamW": (ADAM, 2, 4),
    "AMSGrad": (AMSGRAD, 3, 4),
    "SGD": (SGD, 0, 0),
    "momentum": (MOMENTUM, 1, 0),
    "Lion": (Lion, 1, 0),
}
STAGES = pytest.mark.parametrize("stage", [0, 1, 2])

# Awkward on purpose: empty, a scalar, odd numbers, one larger than a bucket.
SHAPES = [(33, 17), (17,), (), (0, 4), (64, 65), (5,), (3, 3, 7)]
BUCKET = 4096  # bytes
SLOTS = [(n, slot) for n in range(1, 9) for slot in sorted({0, n // 2, n - 1})]  # of sizes 1 to 8


def specs_of(*dtypes):
    return [
        ParameterSpec(f"p{i}", shape, dtypes[i % len(dtypes)])
        for i, shape in enumerate(SHAPES * len(dtypes))
    ]


def even(dtype):
    """A model whose every bucket can be cut into any of 1 to 8 equal shards: 840 is their LCM."""
    return [ParameterSpec(f"p{i}", (2, 840), dtype) for i in range(6)]


def bytes_of(piece, tensors, extra):
    """Of state; in fp32 for 16 bits. A scalar's tensors count as those of any element."""
    wide = max(4, piece.spec.dtype.itemsize)
    return piece.numel * wide * tensors + extra


def predicted(specs, optimizer_class, **place):
    """The prediction without working tensors, of which there are at most one a dtype and one."""
    found = predict(specs, optimizer_class, bucket_bytes=BUCKET, **place)
    sizes = [bucket.nbytes for bucket in plan_buckets(specs, BUCKET, place["size"])]
    kinds = len({spec.dtype for spec in specs})
    if place["stage"] == 2 and place["size"] > 1:
        assert max(sizes) <= found.buckets <= (kinds + 1) * max(sizes)
    else:
        assert found.buckets == 0
    return replace(found, buckets=0)


def closed_form(specs, tensors, extra, *, stage, size, slot):
    """What a rank holds that owns a slot, cut by element, but for working tensors."""
    plan = plan_buckets(specs, BUCKET, size)
    parameters = gradients = master = state = 0
    for bucket in plan:
        each = bucket.dtype.itemsize
        low, high = (0, bucket.numel) if stage == 0 else bucket.shard(slot)
        owned, narrow = high - low, each < 4
        parameters += bucket.numel * each
        if stage == 2 and size > 1:
            gradients += owned * max(4, each)
        else:
            gradients += bucket.numel * each
            if narrow and (stage == 0 or size == 1):
                gradients += owned * 4
        master += owned * 4 * narrow
        state += sum(bytes_of(piece, tensors, extra) for piece in bucket.pieces(low, high))
    return Memory(parameters, gradients, 0, master, state)


FP32, FP64, BF16, FP16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
PREDICTED = {  # the parameters, and the slots
    "fp32": (specs_of(FP32), SLOTS),
    "fp64": (specs_of(FP64), [(1, 0), (3, 2), (4, 1)]),
    "fp32 and fp64": (specs_of(FP32, FP64), [(1, 0), (3, 2), (4, 1)]),
    "bf16": (even(BF16), SLOTS),
    "fp16": (even(FP16), SLOTS),
}


@STAGES
@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.parametrize("dtypes", PREDICTED)
def test_prediction_is_the_closed_form(dtypes, kind, stage):
    specs, slots = PREDICTED[dtypes]
    optimizer_class, tensors, extra = KEPT[kind]
    for size, slot in slots:
        place = {"stage": stage, "size": size, "slot": slot}
        found = predicted(specs, optimizer_class, **place)
        assert found == closed_form(specs, tensors, extra, **place)


# Bytes a parameter on N ranks with Adam; at stage 2 of 16 bits, in the update.
PER_PARAMETER = {
    (torch.float32, 0): lambda n: 4 + 4 + 8,
    (torch.float32, 1): lambda n: 4 + 4 + Fraction(8, n),
    (torch.float32, 2): lambda n: 4 + Fraction(12, n),
    (torch.bfloat16, 0): lambda n: 2 + 6 + 12,
    (torch.bfloat16, 1): lambda n: 2 + 2 + Fraction(12, n),
    (torch.bfloat16, 2): lambda n: 2 + Fraction(16, n),
}


@pytest.mark.parametrize("size", range(2, 9))
@pytest.mark.parametrize(("dtype", "stage"), PER_PARAMETER, ids=str)
def test_adams_bytes_a_parameter_are_those_of_the_table(dtype, stage, size):
    specs = even(dtype)
    plan = plan_buckets(specs, BUCKET, size)
    found = predict(specs, ADAM, stage=stage, size=size, slot=size - 1, bucket_bytes=BUCKET)
    expected = PER_PARAMETER[dtype, stage](size) * sum(spec.numel for spec in specs)
    besides = found.total - found.buckets - expected
    assert 0 < besides <= 4 * len(specs)  # a step count for each piece
    assert found.buckets == (2 * plan[0].nbytes if stage == 2 else 0)


def test_adafactor_keeps_rows_and_columns_and_options_of_an_optimizer_count():
    specs = [
        ParameterSpec("matrix", (30, 20), torch.float32),
        ParameterSpec("vector", (7,), torch.bfloat16),
    ]
    options = {"stage": 1, "size": 2, "bucket_bytes": BUCKET}
    found = [
        predict(specs, torch.optim.Adafactor, slot=slot, partition="parameter", **options)
        for slot in range(2)
    ]
    assert sorted(memory.state for memory in found) == [4 * 7 + 4, 4 * (30 + 20) + 4]
    assert predict(specs, ADAM, amsgrad=True, **options) == predict(specs, AMSGRAD, **options)


# Measured.


class Model(nn.Module):
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


class Matrices(nn.Module):
    """Two matrices."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 8, bias=False), nn.Linear(8, 3, bias=False)

    def forward(self, x):
        return self.last(self.first(x[:, :5]))


WORLDS = pytest.mark.parametrize("world", [SingleProcessCollectives, FirstOfTwo])


def measured(model, optimizer_class, world=SingleProcessCollectives, micro_batches=1, **options):
    """What an optimizer holds after two steps, and what it had expected."""
    optimizer = ZeroOptimizer(
        model.named_parameters(), optimizer_class, world(), bucket_bytes=400, **options
    )
    expected = optimizer.expected_memory()
    for _ in range(2):
        for turn in range(micro_batches):
            with optimizer.no_sync() if turn < micro_batches - 1 else nullcontext():
                model(torch.ones(2, 9)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = optimizer.memory()
    optimizer.close()
    return found, expected


def all_of_torch():
    """The optimizers of torch.optim that take a dense gradient and no closure."""
    kinds = [getattr(torch.optim, name) for name in dir(torch.optim)]
    return [
        kind
        for kind in kinds
        if isinstance(kind, type)
        and issubclass(kind, torch.optim.Optimizer)
        and kind.__name__ not in ("Optimizer", "LBFGS", "SparseAdam")
    ]


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize(
    "optimizer_class", [*all_of_torch(), Lion, Lamb, Decaying], ids=lambda kind: kind.__name__
)
def test_every_optimizer_of_torch_holds_what_was_predicted(optimizer_class, stage):
    model = Matrices() if optimizer_class.__name__ == "Muon" else Model(torch.float32)
    make = partial(optimizer_class, lr=0.01)
    found, expected = measured(model, make, stage=stage, partition="parameter")
    assert found == expected


DTYPES = {
    "fp32": (torch.float32,),
    "bf16": (torch.bfloat16,),
    "fp32 and bf16": (torch.float32, torch.bfloat16),
    "three": (torch.bfloat16, torch.float64, torch.float32),
}


@pytest.mark.parametrize("partition", ["element", "parameter"])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@STAGES
@WORLDS
def test_dtypes_and_accumulation_hold_what_was_predicted(
    world, stage, dtypes, micro_batches, partition
):
    options = {"stage": stage, "partition": partition, "micro_batches": micro_batches}
    found, expected = measured(Model(*dtypes), ADAM, world, **options)
    assert found == expected


@pytest.mark.parametrize("kind", [ADAM, AMSGRAD, MOMENTUM, SGD], ids=str)
@STAGES
@WORLDS
def test_what_was_predicted_before_a_job_is_held_but_of_frozen_parameters_nothing(
    world, stage, kind
):
    model = Model(torch.bfloat16, torch.float32)
    model.layers[0].requires_grad_(False)
    specs = [
        ParameterSpec(name, tuple(p.shape), p.dtype)
        for name, p in model.named_parameters()
        if p.requires_grad
    ]
    found, expected = measured(model, kind, world, stage=stage)
    assert found == expected
    assert found == predict(specs, kind, stage=stage, size=world.size, bucket_bytes=400)
    assert found.parameters == sum(spec.numel * spec.dtype.itemsize for spec in specs)


def test_parameters_that_are_added_count():
    model = Model(torch.float32)
    (name, first), *rest = model.named_parameters()
    optimizer = ZeroOptimizer(rest, ADAM, SingleProcessCollectives(), stage=1)
    before = optimizer.expected_memory()
    optimizer.add_param_group({"params": [(name, first)], "amsgrad": True})
    after = optimizer.expected_memory()
    assert after.parameters - before.parameters == 4 * first.numel()
    assert after.state - before.state == 3 * 4 * first.numel() + 4
    model(torch.ones(2, 9)).square().mean().backward()
    optimizer.step()
    assert optimizer.memory() == after
