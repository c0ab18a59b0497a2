"""When buckets are launched, in which order, and what a rank's gradient is said to stand for."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from first_of_two import FirstOfTwo
from torch import Tensor, nn

from zero import SingleProcessCollectives, ZeroOptimizer

WIDTH = 4
LAYER_BYTES = 4 * WIDTH * (WIDTH + 1)  # of a layer's weight and bias: one layer a bucket


class Recording(FirstOfTwo):
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


class Mark(torch.autograd.Function):
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
            x = self.layers[layer](Mark.apply(x, self.log, layer))
        return x


class Chained(SimpleNamespace):
    """A chain under an optimizer that records: `log`, `model`, `optimizer`, `buckets`."""

    def __init__(self, bucket_bytes=LAYER_BYTES, **options):
        log = []
        model = Chain(log, **options)
        recording = Recording(log)
        optimizer = ZeroOptimizer(
            model.named_parameters(),
            torch.optim.SGD,
            recording,
            stage=1,
            lr=0.1,
            bucket_bytes=bucket_bytes,
        )
        # By layer, where its bucket starts. Gradients are allocated after the parameters.
        flats = recording.allocated[len(recording.allocated) // 2 :]
        buckets = [flat.data_ptr() for flat in reversed(flats)]
        super().__init__(log=log, model=model, optimizer=optimizer, buckets=buckets)

    def loss(self):
        return self.model(torch.ones(2, WIDTH, requires_grad=True)).square().mean()

    def launches(self):
        return [self.buckets.index(address) for what, address in self.log if what == "launch"]


def linear(stage=0, world=SingleProcessCollectives):
    """One weight of 1, whose gradient is the mean of the inputs."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    options = {"stage": stage, "partition": "parameter"}  # so it is the first rank's to update
    optimizer = ZeroOptimizer(model.named_parameters(), torch.optim.SGD, world(), lr=1.0, **options)
    return model, optimizer


# Gradients stay where backward made them, or are held in buckets.
stages = pytest.mark.parametrize(
    ("stage", "world"),
    [(0, SingleProcessCollectives), (1, SingleProcessCollectives), (0, FirstOfTwo)],
)


def mean(model, *inputs):
    return model(torch.tensor(inputs).view(-1, 1)).mean()


def test_a_bucket_leaves_before_backward_reaches_the_next_layer():
    chained = Chained()
    chained.loss().backward()
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


def test_backward_has_waited_for_the_buckets_and_step_does_not_again():
    chained = Chained()
    chained.loss().backward()
    chained.log.clear()
    chained.optimizer.synchronize()
    chained.optimizer.step()
    assert chained.log == []


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


def test_one_large_bucket_leaves_when_the_last_gradient_is_in():
    chained = Chained(bucket_bytes=1 << 20)
    chained.loss().backward()
    bucket = min(chained.buckets)
    assert chained.log == [
        ("backward below layer", 2),
        ("backward below layer", 1),
        ("launch", bucket),
        ("backward below layer", 0),
        ("wait", bucket),
    ]


def test_gradients_become_views_into_what_the_collectives_allocated():
    recording, model = Recording([]), Chain([])
    ZeroOptimizer(model.named_parameters(), torch.optim.SGD, recording, lr=0.1)
    assert all(p.grad is None for p in model.parameters())
    model(torch.ones(2, WIDTH, requires_grad=True)).square().mean().backward()
    (flat,) = recording.allocated
    for parameter in model.parameters():
        assert 0 <= parameter.grad.data_ptr() - flat.data_ptr() < flat.nbytes


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_what_one_rank_alone_needs_is_not_allocated_by_all(order):
    model, recording = Chain([], order), Recording([])
    optimizer = ZeroOptimizer(
        model.named_parameters(),
        torch.optim.SGD,
        recording,
        stage=2,
        lr=0.1,
        bucket_bytes=LAYER_BYTES,
    )
    count, working = len(recording.allocated), optimizer.memory().buckets
    model(torch.ones(2, WIDTH)).square().mean().backward()
    optimizer.step()
    assert len(recording.allocated) == count
    # Backward fills all three before it has filled the one that is to leave first.
    more = LAYER_BYTES if order == (2, 1, 0) else 0
    assert optimizer.memory().buckets == working + more


def test_gradients_come_back_into_their_bucket():
    model, optimizer = linear(world=FirstOfTwo)
    mean(model, 3.0).backward()
    place = model.weight.grad.data_ptr()
    optimizer.step()
    model.zero_grad(set_to_none=True)
    mean(model, 3.0).backward()
    assert model.weight.grad.data_ptr() == place
    optimizer.step()
    assert model.weight.item() == 1.0 - 3.0 - 3.0


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_leaves_none_or_zeros(stage, set_to_none):
    model, optimizer = linear(stage)
    for _ in range(2):
        mean(model, 3.0).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none)
        gradient = model.weight.grad
        assert gradient is None if set_to_none else gradient.item() == 0.0
    assert model.weight.item() == 1.0 - 3.0 - 3.0


def test_no_sync_launches_nothing():
    chained = Chained()
    with chained.optimizer.no_sync():
        chained.loss().backward()
    assert chained.launches() == []
    chained.loss().backward()
    assert chained.launches() == [2, 1, 0]


def test_no_sync_may_be_nested():
    chained = Chained()
    with chained.optimizer.no_sync():
        with chained.optimizer.no_sync():
            chained.loss().backward()
        chained.loss().backward()
    assert chained.launches() == []


@stages
def test_weighted_and_plain_backward_passes_add_their_means(stage, world):
    model, optimizer = linear(stage, world)
    optimizer.share(4)
    mean(model, 3.0).backward()
    optimizer.backward(mean(model, 5.0), weight=7)
    optimizer.backward(mean(model, 5.0), weight=3)
    assert optimizer.step().grad_norm == 13.0


@stages
def test_one_batch_weighs_every_backward_until_the_next(stage, world):
    model, optimizer = linear(stage, world)
    for batch in (5, 2):
        optimizer.expect_batch(batch, 2 * batch)
        for _ in range(2):
            mean(model, 3.0).backward()
            assert optimizer.step().weight == batch
            optimizer.zero_grad()


@stages
def test_a_stand_in_counts_nothing_whatever_is_stated(stage, world):
    model, optimizer = linear(stage, world)
    with optimizer.no_sync():
        optimizer.expect_batch(0, 1)
        optimizer.backward(mean(model, math.nan), weight=8)
    optimizer.expect_batch(1, 1)
    optimizer.backward(mean(model, 3.0), weight=2)
    result = optimizer.step()
    assert (result.grad_norm, result.weight) == (3.0, 2.0)


@stages
def test_a_batch_is_forgotten(stage, world):
    model, optimizer = linear(stage, world)
    optimizer.expect_batch(7, 14)
    optimizer.forget_batches()
    mean(model, 3.0).backward()
    assert optimizer.step().weight == 1.0


def after_a_pass(stage, world):
    """A model and its optimizer, which has taken a step on the only batch of a pass."""
    model, optimizer = linear(stage, world)
    optimizer.expect_batch(7, 14)
    mean(model, 3.0).backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.forget_batches(drawn=False)
    return model, optimizer


def test_a_batch_that_was_kept_after_its_pass_is_refused_unless_there_is_one_rank():
    model, _ = after_a_pass(0, SingleProcessCollectives)
    mean(model, 3.0).backward()
    model, _ = after_a_pass(0, FirstOfTwo)
    with pytest.raises(RuntimeError, match=r"by itertools.cycle, or a cache\) have lost their"):
        mean(model, 3.0).backward()


@stages
def test_after_a_pass_weights_may_be_stated_and_other_data_counts_alike(stage, world):
    model, optimizer = after_a_pass(stage, world)
    optimizer.share(2)
    mean(model, 3.0).backward()
    assert optimizer.step().weight == 2.0
    model, optimizer = after_a_pass(stage, world)
    optimizer.forget_batches()
    mean(model, 3.0).backward()
    assert optimizer.step().weight == 1.0
    model, optimizer = after_a_pass(stage, world)
    optimizer.expect_batch(5, 14)
    mean(model, 3.0).backward()
    assert optimizer.step().weight == 5.0


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("launched", [False, True])
def test_after_a_backward_that_failed_nothing_goes_on_by_itself(stage, launched):
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            raise KeyError("in backward")

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = ZeroOptimizer(
        model.named_parameters(),
        torch.optim.SGD,
        FirstOfTwo(),
        stage=stage,
        bucket_bytes=1 if launched else 1 << 20,
    )

    def fail():
        with pytest.raises(KeyError):
            model[1](Failing.apply(model[0](torch.ones(1, 2)))).sum().backward()

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


def test_close_removes_the_hooks():
    chained = Chained()
    chained.optimizer.close()
    chained.loss().backward()
    chained.loss().backward()
    assert chained.launches() == []


@stages
def test_shares_of_micro_batches_add_up(stage, world):
    model, optimizer = linear(stage, world)
    with optimizer.no_sync():
        optimizer.share(2)
        (mean(model, 1.0, 3.0) / 2).backward()
    optimizer.share(2)
    (mean(model, 5.0, 7.0) / 2).backward()
    result = optimizer.step()
    assert (result.grad_norm, result.weight) == (4.0, 4.0)


@stages
def test_a_share_that_no_backward_followed_is_replaced(stage, world):
    model, optimizer = linear(stage, world)
    optimizer.share(7)
    optimizer.share(2)
    mean(model, 3.0).backward()
    assert optimizer.step().weight == 2.0


@stages
def test_a_share_that_a_backward_followed_is_not_taken_back(stage, world):
    model, optimizer = linear(stage, world)
    optimizer.share(7)
    mean(model, 3.0).backward()
    optimizer.share(None)
    assert optimizer.step().weight == 7.0


@stages
def test_a_share_outlives_zero_grad(stage, world):
    model, optimizer = linear(stage, world)
    optimizer.share(7)
    optimizer.zero_grad()
    mean(model, 3.0).backward()
    assert optimizer.step().weight == 7.0


@stages
@pytest.mark.parametrize("how", ["backward", "share"])
def test_zero_grad_drops_the_weight_of_what_it_drops(stage, world, how):
    model, optimizer = linear(stage, world)
    for value in (100.0, 3.0):
        optimizer.zero_grad()
        with optimizer.no_sync():
            if how == "backward":
                optimizer.backward(mean(model, value), weight=4)
            else:
                optimizer.share(4)
                mean(model, value).backward()
    result = optimizer.step()
    assert (result.grad_norm, result.weight) == (3.0, 4.0)


@stages
def test_backward_refuses_what_a_share_stands_for(stage, world):
    model, optimizer = linear(stage, world)
    optimizer.share(2)
    message = r"backward\(loss, weight=...\) follows share\(\) in one accumulation: call"
    with pytest.raises(RuntimeError, match=message):
        optimizer.backward(mean(model, 1.0), weight=2)


@stages
def test_a_share_refuses_what_a_weighted_backward_stands_for(stage, world):
    model, optimizer = linear(stage, world)
    with optimizer.no_sync():
        optimizer.backward(mean(model, 1.0), weight=2)
    message = r"share\(\) follows backward\(loss, weight=...\) in one accumulation: give"
    with pytest.raises(RuntimeError, match=message):
        optimizer.share(2)


@stages
@pytest.mark.parametrize("count", [-1, math.nan, math.inf, "9"])
def test_a_share_that_is_no_count_is_refused(stage, world, count):
    model, optimizer = linear(stage, world)
    with pytest.raises(ValueError, match=str(count)):
        optimizer.share(count)
    with pytest.raises(ValueError, match=str(count)):
        optimizer.backward(mean(model, 1.0), weight=count)


@stages
def test_a_mean_over_no_samples_adds_nothing(stage, world):
    model, optimizer = linear(stage, world)
    with optimizer.no_sync():
        optimizer.backward(mean(model), weight=0)
    optimizer.backward(mean(model, 3.0), weight=2)
    result = optimizer.step()
    assert (result.grad_norm, result.weight) == (3.0, 2.0)


@stages
@pytest.mark.parametrize("how", ["backward", "share"])
def test_a_mean_over_no_samples_at_all_is_refused_and_changes_nothing(stage, world, how):
    model, optimizer = linear(stage, world)
    if how == "share":
        optimizer.share(0)
    backward = {"share": Tensor.backward, "backward": partial(optimizer.backward, weight=0)}[how]
    with pytest.raises(ValueError, match="weights sum to 0"):
        backward(mean(model))
    assert model.weight.item() == 1.0
    optimizer.zero_grad()
    mean(model, 3.0).backward()
    assert optimizer.step().grad_norm == 3.0


def test_a_mean_that_needs_no_division_is_not_written_again():
    model, optimizer = linear()
    for weight in (3, 8, 8):
        optimizer.zero_grad()
        optimizer.share(weight)
        mean(model, 3.0).backward()
        gradient = model.weight.grad
        version = gradient._version
        optimizer.step()
        assert model.weight.grad is gradient
        assert gradient.item() == 3.0
    assert gradient._version == version  # the unit is that of the step before: 8 of 8


def test_in_fp16_addends_are_of_the_size_of_means():
    addends = []

    class Four(SingleProcessCollectives):
        size, slot = 4, lambda self, rank: rank

        def all_reduce(self, tensor, wire=None):
            addends.append(tensor.double().clone())
            return super().all_reduce(tensor, wire)

    for dtype, unit in ((torch.float16, 1.0), (torch.bfloat16, 4.0), (torch.float32, 4.0)):
        model = nn.Linear(1, 1, bias=False).to(dtype)
        ZeroOptimizer(model.named_parameters(), torch.optim.SGD, Four())
        addends.clear()
        model(torch.ones(1, 1, dtype=dtype)).mean().backward()
        assert addends[0].item() == 1.0 / unit


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
    optimizer = ZeroOptimizer(
        model.named_parameters(), torch.optim.SGD, Wired(), stage=stage, wire_dtype=wire
    )
    model(torch.ones(1, 2, dtype=own)).mean().backward()
    optimizer.step()
    assert wires == [given]


def test_a_wire_of_whole_numbers_is_refused():
    with pytest.raises(ValueError, match=r"torch\.int8.*torch\.bfloat16"):
        ZeroOptimizer(
            nn.Linear(1, 1).named_parameters(),
            torch.optim.SGD,
            SingleProcessCollectives(),
            wire_dtype=torch.int8,
        )
