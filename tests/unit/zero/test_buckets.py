"""Launches of buckets: their time, order, units and wire dtypes; and backward passes that fail."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from first_of_two import STAGES, FirstOfTwo, zero
from torch import nn
from torch.utils.checkpoint import checkpoint

from zero import SingleProcessCollectives, ZeroOptimizer
from zero.comm_hooks import CommHook, make_hook

WIDTH = 4
LAYER_BYTES = 4 * WIDTH * (WIDTH + 1)  # of a layer's weight and bias: one layer a bucket


class RecordingCollectives(FirstOfTwo):
    """Writes down each launch of a bucket, and each wait for one; and what it allocates."""

    def __init__(self, log):
        self.log, self.allocated = log, []

    def allocate(self, *arguments):
        self.allocated.append(super().allocate(*arguments))
        return self.allocated[-1]

    def reduce_scatter(self, tensor, bounds=None, wire=None):
        address = tensor.data_ptr()
        self.log.append(("launch", address))
        return SimpleNamespace(wait=lambda: self.log.append(("wait", address)))


class BackwardMark(torch.autograd.Function):
    """Writes down when backward comes by."""

    @staticmethod
    def forward(ctx, x, log, layer):
        ctx.log, ctx.layer = log, layer
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.log.append(("backward below layer", ctx.layer))
        return gradient, None, None


class Chain(nn.Module):
    """Layers, used in the order given; below each, backward leaves a mark."""

    def __init__(self, log, order=(0, 1, 2)):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in order)
        self.log, self.order = log, order

    def forward(self, x):
        for layer in self.order:
            x = self.layers[layer](BackwardMark.apply(x, self.log, layer))
        return x


class Chained(SimpleNamespace):
    """A chain under an optimizer that records: `log`, `model`, `optimizer`, `buckets`."""

    def __init__(self, bucket_bytes=LAYER_BYTES, **options):
        log = []
        model = Chain(log, **options)
        recording = RecordingCollectives(log)
        named = list(model.named_parameters())  # buckets are by layer, whatever the groups
        groups = [{"params": [(n, p) for n, p in named if p.dim() == dim]} for dim in (2, 1)]
        options = {"stage": 1, "lr": 0.1, "bucket_bytes": bucket_bytes, "model": model}
        optimizer = ZeroOptimizer(groups, torch.optim.SGD, recording, **options)
        # By layer, where its bucket starts. Gradients are allocated after the parameters.
        flats = recording.allocated[len(recording.allocated) // 2 :]
        buckets = [flat.data_ptr() for flat in reversed(flats)]
        super().__init__(log=log, model=model, optimizer=optimizer, buckets=buckets)

    def loss(self):
        return self.model(torch.ones(2, WIDTH, requires_grad=True)).square().mean()

    def launches(self):
        return [self.buckets.index(address) for what, address in self.log if what == "launch"]


def test_a_bucket_leaves_before_backward_reaches_the_next_layer_and_step_does_not_wait_again():
    chained = Chained()
    chained.loss().backward()
    chained.optimizer.synchronize()
    chained.optimizer.step()
    first, second, third = chained.buckets
    assert chained.log == [
        ("launch", third),
        ("backward below layer", 2),
        ("launch", second),
        ("backward below layer", 1),
        ("launch", first),
        ("backward below layer", 0),
        *(("wait", address) for address in reversed(chained.buckets)),
    ]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_the_order_of_launches_is_not_that_of_backward(order):
    chained = Chained(order=order)
    for _ in range(2):
        chained.loss().backward()
        chained.optimizer.step()
    assert chained.launches() == [2, 1, 0] * 2


def test_a_bucket_without_a_gradient_is_launched_at_the_end_of_backward():
    chained = Chained(order=(0, 2, 2))  # layer 1 is left out, layer 2 taken twice
    chained.loss().backward()
    launches = [i for i, (what, _) in enumerate(chained.log) if what == "launch"]
    assert chained.launches() == [2, 1, 0]
    assert launches[0] < chained.log.index(("backward below layer", 0)) < launches[1]


def test_no_sync_which_may_be_nested_and_a_closed_optimizer_launch_nothing():
    chained = Chained()
    with chained.optimizer.no_sync():
        with chained.optimizer.no_sync():
            chained.loss().backward()
        chained.loss().backward()
    assert chained.launches() == []
    chained.loss().backward()
    assert chained.launches() == [2, 1, 0]
    chained.optimizer.close()
    for _ in range(2):
        chained.loss().backward()
    assert chained.launches() == [2, 1, 0]


@STAGES
@pytest.mark.parametrize("launched", [False, True])
def test_after_a_backward_that_failed_nothing_goes_on_by_itself(stage, launched):
    class FailsInBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            raise KeyError("in backward")

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    bucket_bytes = 1 if launched else 1 << 20
    optimizer = zero(model, world=FirstOfTwo, stage=stage, bucket_bytes=bucket_bytes)

    def fail():
        with pytest.raises(KeyError):
            model[1](FailsInBackward.apply(model[0](torch.ones(1, 2)))).sum().backward()

    fail()
    with pytest.raises(RuntimeError, match="did not end"):
        model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="did not end"):
        optimizer.step()
    optimizer.zero_grad()
    if launched:
        with pytest.raises(RuntimeError, match="did not end"):
            optimizer.step()
        return
    model(torch.ones(1, 2)).sum().backward()
    assert optimizer.step().grad_norm > 0


@STAGES
@pytest.mark.parametrize("nested", [False, True])
def test_a_backward_that_raises_after_a_nested_one_has_ended_is_not_continued(stage, nested):
    def fail(gradient):
        raise KeyError("in backward")

    model, x = nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)
    named = [*model.named_parameters(), ("other", nn.Parameter(torch.ones(1)))]
    optimizer = zero(named, world=FirstOfTwo, stage=stage, partition="parameter")

    def forward(x):
        return checkpoint(model, x, use_reentrant=True).sum()

    failing = x * 1
    failing.register_hook(fail)
    with pytest.raises(KeyError):
        forward(failing).backward()
    with pytest.raises(RuntimeError, match="did not end"):
        (forward(x) if nested else model(x).sum()).backward()
    with pytest.raises(RuntimeError, match="did not end"):
        optimizer.step()
    optimizer.zero_grad()
    forward(x).backward()
    assert optimizer.step().grad_norm == 2.0  # of the weight, which is this rank's


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("weights", [(), (500,), (300, 500, 200), (1, 1, 1)])
def test_in_fp16_neither_addends_nor_their_sums_are_larger_than_the_mean(size, stage, weights):
    """The gradients of `size` ranks are equal, and add up before they are rounded."""
    largest, sums = 49152.0, []

    class Alike(SingleProcessCollectives):
        def all_reduce(self, tensor, wire=None):
            total = tensor.double() * self.size
            sums.extend([total] if tensor.dtype == torch.float16 else [])
            tensor.copy_(total)
            return super().all_reduce(tensor, wire)

        def reduce_scatter(self, tensor, bounds=None, wire=None):
            return self.all_reduce(tensor, wire)

    Alike.size = size
    model = nn.Linear(1, 1, bias=False).half()
    optimizer = zero(model, world=Alike, stage=stage, partition="parameter")
    for first in (True, False):  # the weight of an accumulation is known from the one before
        value = largest / max(len(weights), 1) if first else largest
        inputs = torch.full((1, 1), value, dtype=torch.float16)
        if not weights:
            model(inputs).mean().backward()
        for number, weight in enumerate(weights):
            with nullcontext() if number == len(weights) - 1 else optimizer.no_sync():
                optimizer.backward(model(inputs).mean(), weight=weight)
        total = optimizer.full_gradient(model.weight).item()
        optimizer.zero_grad()
        assert total == pytest.approx(value, rel=2e-3)
    assert max(map(float, sums)) <= largest * 1.01


# The wire.


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(
    ("own", "wire", "given"),
    [
        (torch.float32, None, None),
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float16, torch.float16),
        (torch.float32, torch.float32, None),
        (torch.float64, torch.float32, torch.float32),
        (torch.bfloat16, torch.float16, None),
        (torch.bfloat16, torch.float32, None),
    ],
    ids=str,
)
def test_gradients_travel_in_the_wires_dtype_where_it_is_narrower(stage, own, wire, given):
    wires = []

    class Wired(FirstOfTwo):
        def reduce_scatter(self, tensor, bounds=None, wire=None):
            wires.append(wire)
            return super().reduce_scatter(tensor, bounds, wire)

    model = nn.Linear(2, 2).to(own)
    optimizer = zero(model, world=Wired, stage=stage, comm_hook=CommHook(wire))
    model(torch.ones(1, 2, dtype=own)).mean().backward()
    optimizer.step()
    assert wires == [given]


def test_a_wire_of_whole_numbers_is_refused():
    with pytest.raises(ValueError, match=r"torch\.int8.*torch\.bfloat16"):
        make_hook(None, torch.int8)
