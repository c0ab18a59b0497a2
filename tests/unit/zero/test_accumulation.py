"""The sums and weights of gradients in an accumulation, and refusals."""

import math
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from first_of_two import STAGES, WORLDS, FirstOfTwo, zero
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from mntrain.data.loader import ShardOptions, ShardRegistry
from mntrain.data.source import Alone
from zero import SingleProcessCollectives
from zero.gradients.weights import BatchSource

SOURCES = weakref.WeakKeyDictionary()  # of batches, by optimizer


def one_weight(stage=0, world=SingleProcessCollectives, dtype=torch.float32, **options):
    """One weight of 1, whose gradient is the mean of the inputs, and its optimizer."""
    model = nn.Linear(1, 1, bias=False, dtype=dtype)
    nn.init.ones_(model.weight)
    # By parameter, so it is the first rank's to update.
    options = {"stage": stage, "partition": "parameter", "lr": 1.0, **options}
    return model, zero(model, world=world, **options)


def mean(model, *inputs):
    return model(torch.tensor(inputs, dtype=model.weight.dtype).view(-1, 1)).mean()


def expect(optimizer, own, total):
    """State the next batch of the only loader."""
    source = SOURCES.setdefault(optimizer, BatchSource())
    source.drawn += 1
    optimizer.accumulation.expect(source.latest(own, total))


def play(model, optimizer, steps):
    """Run backward of means, or call a method of the optimizer, with what follows its name."""
    for what, *given in steps:
        match what:
            case "backward":
                mean(model, *given).backward()
            case "kept":
                with optimizer.no_sync():
                    mean(model, *given).backward()
            case "half kept":
                with optimizer.no_sync():
                    (mean(model, *given) / 2).backward()
            case "half":
                (mean(model, *given) / 2).backward()
            case "weighted":
                weight, *inputs = given
                optimizer.backward(mean(model, *inputs), weight=weight)
            case "weighted kept":
                weight, *inputs = given
                with optimizer.no_sync():
                    optimizer.backward(mean(model, *inputs), weight=weight)
            case "elsewhere kept":  # a loss of none of this optimizer's parameters
                with optimizer.no_sync():
                    optimizer.backward(torch.zeros((), requires_grad=True), weight=given[0])
            case "expect":
                expect(optimizer, *given)
            case "model.zero_grad":
                model.zero_grad()
            case _:
                getattr(optimizer, what)(*given)


# The calls of a step, the norm of its gradient, and its weight.
STEPS = {
    "shares of micro-batches": (
        [("share", 2), ("half kept", 1, 3), ("share", 2), ("half", 5, 7)],
        (4, 4),
    ),
    "a share that no backward followed": ([("share", 7), ("share", 2), ("backward", 3)], (3, 2)),
    "a share taken back too late": ([("share", 8), ("backward", 3), ("share", None)], (3, 8)),
    "a share outlives zero_grad": ([("share", 8), ("zero_grad",), ("backward", 3)], (3, 8)),
    "a share of nothing at the end": ([("share", 4), ("kept", 6), ("share", 0)], (6, 4)),
    "a mean over no samples": ([("weighted kept", 0), ("weighted", 2, 3)], (3, 2)),
    "a stand-in": (
        [
            ("expect", 0, 1),
            ("weighted kept", 8, math.nan),
            ("expect", 1, 1),
            ("weighted", 2, 3),
        ],
        (3, 2),
    ),
    "a batch that is forgotten": (
        [("expect", 7, 14), ("forget_batches",), ("backward", 3)],
        (3, 1),
    ),
    "no_sync behind a synchronized pass": ([("backward", 3), ("kept", 5)], (8, 2)),
    "weights of micro-batches": ([("weighted kept", 6, 3), ("weighted", 2, 7)], (4, 8)),
    "a loss of other parameters": ([("elsewhere kept", 4), ("weighted", 4, 3)], (1.5, 8)),
    "every micro-batch synchronized": (
        [("weighted", 6, 3), ("weighted", 2, 7), ("weighted", 8, 8)],
        (6, 16),
    ),
    "means that are read between": (
        [
            ("weighted kept", 6, 2),
            ("synchronize",),
            ("weighted kept", 4, 5),
            ("clip_grad_norm_", 1e9),
            ("share", 0),
            ("synchronize",),
            ("weighted kept", 6, 6),
        ],
        (4.25, 16),
    ),
    "a first micro-batch of no samples, read": (
        [("weighted kept", 0), ("weighted", 6, 3), ("weighted kept", 0), ("weighted", 2, 7)],
        (4, 8),
    ),
    "a weighted step whose gradients the model has dropped": (
        [("weighted", 6, 100), ("model.zero_grad",), ("weighted", 2, 7)],
        (7, 2),
    ),
    "a sum of means behind a dropped mean": (
        [("weighted", 6, 100), ("model.zero_grad",), ("backward", 3), ("backward", 3)],
        (6, 2),
    ),
    "dropped by the model, by weight": (
        [("weighted kept", 6, 100), ("model.zero_grad",), ("weighted", 2, 3)],
        (3, 2),
    ),
}


@pytest.mark.parametrize(("steps", "expected"), STEPS.values(), ids=STEPS)
@WORLDS
@STAGES
def test_a_step_has_the_norm_and_the_weight_of_what_it_adds(stage, world, steps, expected):
    model, optimizer = one_weight(stage, world)
    play(model, optimizer, steps)
    result = optimizer.step()
    assert (result.grad_norm, result.weight) == expected
    assert model.weight.item() == 1 - expected[0]
    optimizer.zero_grad()
    mean(model, 3).backward()  # nothing of it is left
    assert optimizer.step().grad_norm == 3


@pytest.mark.parametrize("syncs", [True, False])
@WORLDS
@STAGES
def test_a_layer_of_several_reentrant_checkpoints_counts_by_the_weight_of_each_micro_batch(
    stage, world, syncs
):
    model, optimizer = one_weight(stage, world)
    for weight, value in ((6, 3.0), (2, 7.0), (8, 8.0)):
        with nullcontext() if syncs or weight == 8 else optimizer.no_sync():
            x = torch.full((1, 1), value, requires_grad=True)
            twice = [checkpoint(model, x, use_reentrant=True) for _ in range(2)]
            optimizer.backward(torch.cat(twice).mean(), weight=weight)
    assert optimizer.step().grad_norm == pytest.approx(6.0, rel=1e-5)


@WORLDS
@STAGES
def test_a_dropped_accumulation_is_no_part_of_the_step(stage, world):
    model, optimizer = one_weight(stage, world, weight_decay=0.5)
    play(model, optimizer, [("share", 4), ("kept", 100), ("model.zero_grad",), ("step",)])
    assert model.weight.item() == 1.0


@WORLDS
@STAGES
def test_one_batch_weighs_every_backward_until_the_next(stage, world):
    model, optimizer = one_weight(stage, world)
    for batch in (5, 2):
        expect(optimizer, batch, 2 * batch)
        for _ in range(2):
            mean(model, 3).backward()
            assert optimizer.step().weight == batch
            optimizer.zero_grad()


PASS = [("expect", 7, 14), ("backward", 3), ("step",), ("zero_grad",)]


@pytest.mark.parametrize(
    ("steps", "weight"),
    [([("share", 2)], 2), ([("forget_batches",)], 1), ([("expect", 5, 14)], 5)],
)
@WORLDS
@STAGES
def test_after_a_pass_weights_may_be_stated_and_other_data_counts_alike(
    stage, world, steps, weight
):
    model, optimizer = one_weight(stage, world)
    play(model, optimizer, PASS)
    optimizer.forget_batches(drawn=False)
    play(model, optimizer, [*steps, ("backward", 3)])
    assert optimizer.step().weight == weight


def test_a_batch_that_was_kept_after_its_pass_is_refused_unless_there_is_one_rank():
    for world in (SingleProcessCollectives, FirstOfTwo):
        model, optimizer = one_weight(0, world)
        play(model, optimizer, PASS)
        optimizer.forget_batches(drawn=False)
        if world is SingleProcessCollectives:
            mean(model, 3).backward()
            continue
        with pytest.raises(RuntimeError, match=r"by itertools.cycle, or a cache\) have lost their"):
            mean(model, 3).backward()


# What is refused: the calls before, the one that raises, and its words.
MIXED = r" follows optimizer\.backward\(loss, weight=\.\.\.\) before a step or zero_grad\(\): call "
REFUSED = {
    "a share after a weight": (
        [("weighted kept", 2, 1), ("share", 2)],
        ("backward", 3),
        r"^loss\.backward\(\)" + MIXED,
    ),
    "no weight after one": ([("weighted kept", 4, 3)], ("backward", 3), MIXED),
    "no weight after one, read between": ([("weighted", 4, 3)], ("kept", 3), MIXED),
    "a weight after none": (
        [("kept", 3)],
        ("weighted", 4, 3),
        r"^optimizer\.backward\(loss, weight=\.\.\.\) follows loss\.backward\(\) before",
    ),
    "a weight after a mean": ([("share", 2), ("backward", 3)], ("weighted", 4, 3), "before a step"),
    "no samples, by a share": ([("share", 0)], ("backward",), "weights sum to 0"),
    "no samples, by a weight": ([], ("weighted", 0), "weights sum to 0"),
    **{
        f"{how} {count}": ([], (how, count, *inputs), str(count))
        for how, inputs in (("share", ()), ("weighted", (1,)))
        for count in (-1, math.nan, math.inf, "9")
    },
}


@pytest.mark.parametrize(("before", "call", "words"), REFUSED.values(), ids=REFUSED)
@WORLDS
@STAGES
def test_what_has_no_weight_or_two_is_refused_and_changes_nothing(
    stage, world, before, call, words
):
    model, optimizer = one_weight(stage, world)
    play(model, optimizer, before)
    with pytest.raises((RuntimeError, ValueError), match=words):
        play(model, optimizer, [call])
    assert model.weight.item() == 1.0
    optimizer.zero_grad()
    mean(model, 3).backward()
    assert optimizer.step().grad_norm == 3.0


@WORLDS
@STAGES
def test_an_assigned_gradient_is_not_weighed_and_zero_grad_forgets_it(stage, world):
    model, optimizer = one_weight(stage, world)
    model.weight.grad = torch.full((1, 1), 10.0)
    with pytest.raises(RuntimeError, match="assigned before"):
        optimizer.backward(mean(model, 1), weight=8)
    model, optimizer = one_weight(stage, world)
    model.weight.grad = torch.full((1, 1), 10.0)
    optimizer.zero_grad()
    assert model.weight.grad is None


@pytest.mark.parametrize(
    ("before", "steps", "value"),
    [
        (8, [("share", 2), ("backward", 3)], 3.0),
        (8, [("expect", 2, 4), ("backward", 3)], 3.0),
        (2**20, [("backward", 1e-3)], 1e-3),
        (1, [("weighted", 2**20, 3.0)], 3.0),
    ],
)
@WORLDS
@STAGES
def test_a_mean_in_fp16_neither_vanishes_nor_overflows_by_the_weight_of_the_one_before(
    stage, world, before, steps, value
):
    model, optimizer = one_weight(stage, world, torch.float16)
    play(model, optimizer, [("weighted", before, 3), ("step",), ("zero_grad",), *steps])
    assert optimizer.step().grad_norm == pytest.approx(value, rel=1e-3)


@WORLDS
@STAGES
@pytest.mark.parametrize("how", ["share", "tokens"])
def test_a_weight_that_changes_without_a_total_is_refused(stage, world, how):
    model, optimizer = one_weight(stage, world)

    def weigh(count):
        return ("share", count) if how == "share" else ("expect", count, None)

    play(model, optimizer, [weigh(8), ("kept", 3), weigh(8), ("kept", 3), weigh(5)])
    if world is SingleProcessCollectives:  # one rank has the whole of every batch
        mean(model, 1).backward()
        assert optimizer.step().grad_norm == 7.0
        return
    message = r"weighs 8 in one micro-batch .*, and 5 in another, .*backward\(loss, weight=n\)"
    with pytest.raises(RuntimeError, match=message):
        mean(model, 5).backward()


@WORLDS
@STAGES
def test_a_loss_that_cannot_run_backward_leaves_no_half_of_a_step(stage, world):
    model, optimizer = one_weight(stage, world)
    optimizer.backward(mean(model, 3), weight=1)
    with pytest.raises(RuntimeError, match="does not require grad"):
        optimizer.backward(torch.ones(()), weight=1)
    with pytest.raises(RuntimeError, match="did not end"):
        optimizer.step()
    optimizer.zero_grad()
    mean(model, 3).backward()
    assert optimizer.step().grad_norm == 3.0


@STAGES
def test_one_rank_goes_on_after_a_hook_of_backward_has_raised(stage):
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    expected = [layer.weight.item() for layer in reversed(model)]
    optimizer = zero(model, stage=stage, lr=1.0, bucket_bytes=4)

    def fail(_):
        raise KeyError("after the last layer's bucket")

    handle = model[0].weight.register_hook(fail)
    with pytest.raises(KeyError):
        model(torch.ones(1, 1)).backward()
    handle.remove()
    optimizer.zero_grad()
    model(torch.ones(1, 1)).backward()
    assert [layer.weight.grad.item() for layer in model] == pytest.approx(expected)
    optimizer.step()


@STAGES
def test_clipping_hides_no_overflow(stage):
    model, optimizer = one_weight(stage)
    mean(model, math.inf).backward()
    assert optimizer.clip_grad_norm_(1.0).isinf()
    with pytest.raises(ArithmeticError):
        optimizer.step()


# With a limit of 2 for each rank's own: the calls of a step, and the norm.
CLIPPED = [
    ([("kept", 3), ("backward", 1)], 2),
    ([("backward", 3), ("backward", 1)], 3),
    ([("backward", 3), ("kept", 3), ("backward", 1)], 4),
    ([("backward", 3), ("step",), ("backward", 1)], 3),
    ([("weighted", 6, 3), ("weighted", 2, 1)], 1.75),
]


@pytest.mark.parametrize(("steps", "norm"), CLIPPED)
@WORLDS
@pytest.mark.parametrize("stage", [0, 1])
def test_what_each_reduction_adds_is_clipped_by_itself(stage, world, steps, norm):
    model, optimizer = one_weight(stage, world)
    optimizer.clip_each_rank(2.0)
    play(model, optimizer, steps)
    assert optimizer.step().grad_norm == pytest.approx(norm, rel=1e-5)
    if stage == 0:  # what is done to a mean between counts
        optimizer.zero_grad()
        mean(model, 3).backward()
        model.weight.grad.mul_(2)
        mean(model, 1).backward()
        assert model.weight.grad.item() == pytest.approx(5, rel=1e-5)


# Weights act on gradients as they are taken, and on nothing before.


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
@WORLDS
@STAGES
def test_hooks_inputs_and_losses_of_few_bits_know_no_weight(stage, world, kind):
    """A clamp sees what plain torch has, and a mean over an odd number of samples stays one."""
    model, optimizer = one_weight(stage, world)
    seen = []
    model.weight.register_hook(lambda g: seen.append(g.item()) or g.clamp(-2, 2))
    for weight in (1027, 300001):
        inputs = torch.full((1, 1), 3.0, requires_grad=True)
        optimizer.backward(model(inputs).mean().to(kind), weight=weight)
        assert inputs.grad.item() == 1.0 - 2.0 * (weight > 1027)
        assert optimizer.step().grad_norm == pytest.approx(2.0, rel=1e-6)
        optimizer.zero_grad()
    assert seen == [3.0, 3.0]


@WORLDS
@STAGES
def test_a_weight_is_of_one_optimizer_of_a_loss(stage, world):
    model, optimizer = one_weight(stage, world)
    other, second = one_weight(stage, world)
    for weight in (500, 7, 300):
        if world is FirstOfTwo:  # whose other rank has no sample
            second.share(weight)
        optimizer.backward(mean(model, 3) + mean(other, 5), weight=weight)
        norms = optimizer.step().grad_norm, second.step().grad_norm
        assert norms == pytest.approx((3.0, 5.0), rel=1e-6)
        optimizer.zero_grad()
        second.zero_grad()


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("turns", [1, 2])
@WORLDS
@STAGES
def test_a_loss_that_another_optimizer_weighs_otherwise_is_refused(stage, world, turns, share):
    model, optimizer = one_weight(stage, world)
    other, second = one_weight(stage, world)
    for dropped in (False, True):
        for turn in range(turns):
            if share:
                second.share(6)
            with nullcontext() if turn == turns - 1 else second.no_sync():
                optimizer.backward(mean(model, 3) + mean(other, 5), weight=6)
        if dropped:
            other.zero_grad()
            mean(other, 4).backward()
        if dropped or (turns == 1 and (share or world is SingleProcessCollectives)):
            assert second.step().grad_norm == (4.0 if dropped else 5.0)
        else:
            with pytest.raises(
                RuntimeError, match=r"^the loss was weighed by backward\(loss, weig"
            ):
                second.step()
        optimizer.zero_grad()
        second.zero_grad()


@pytest.mark.parametrize("syncs", [True, False])
@WORLDS
@STAGES
def test_a_loss_scale_of_others_is_refused_behind_a_gradient_that_was_dropped(stage, world, syncs):
    (model, optimizer), (other, second) = (
        one_weight(stage, world, loss_scale=8.0),
        one_weight(stage, world),
    )
    with nullcontext() if syncs else second.no_sync():
        mean(other, 5).backward()
    other.zero_grad()
    optimizer.scale(mean(model, 3) + mean(other, 5)).backward()
    with pytest.raises(RuntimeError, match="the loss scale of another optimizer"):
        second.step()


@WORLDS
@STAGES
def test_the_loss_scale_of_another_optimizer_is_refused_where_the_gradient_is_used(stage, world):
    model, optimizer = one_weight(stage, world, loss_scale=1024.0)
    other, second = one_weight(stage, world)
    alike = one_weight(stage, world, loss_scale=1024.0)
    total = mean(model, 3) + mean(other, 5) + mean(alike[0], 7)
    with optimizer.no_sync(), second.no_sync(), alike[1].no_sync():
        optimizer.scale(total).backward()
    second.zero_grad()  # a gradient that nobody uses, as in adversarial training
    mean(other, 1).backward()
    scaled = optimizer.scale(mean(model, 3) + mean(alike[0], 7))
    scaled.backward()
    for one in (optimizer, alike[1], second):
        assert one.step().grad_norm > 0
        one.zero_grad()
    optimizer.backward(mean(model, 3) + mean(other, 5), weight=2)
    for use in (second.step, lambda: second.full_gradient(other.weight)):
        with pytest.raises(RuntimeError, match=r"another optimizer, .* this one \(1\): give all"):
            use()
    second.zero_grad()
    mean(other, 4).backward()
    assert second.step().grad_norm == 4.0


@STAGES
def test_two_threads_that_train_two_models_weigh_each_loss_by_its_own_loader(stage):
    barrier = threading.Barrier(2, timeout=60)
    shards = ShardRegistry(Alone(), optimizers := [], lambda *_: None)
    pairs = [one_weight(stage, FirstOfTwo) for _ in range(2)]
    optimizers += [optimizer for _, optimizer in pairs]

    def meet(_):
        barrier.wait()

    def body(number):
        (model, optimizer), norms = pairs[number], []
        size = [4, 6][number]
        data = torch.arange(1.0, 2 * size + 1).view(-1, 1)
        for inputs in shards.shard(DataLoader(data, size), ShardOptions(number, train=True)):
            loss = model(inputs).mean()
            loss.register_hook(meet)  # both are in backward now
            if number:
                optimizer.backward(loss, weight=len(inputs))
            else:
                loss.backward()
            norms.append(optimizer.step().grad_norm)
            optimizer.zero_grad()
        return norms

    with ThreadPoolExecutor(2) as threads:
        assert [*threads.map(body, range(2))] == [[2.5, 6.5], [3.5, 9.5]]


@WORLDS
@STAGES
def test_changes_of_a_loss_are_known_behind_reentrant_checkpoints(stage, world):
    """The first gradient comes in a backward that is nested in that of the loss."""
    x = torch.ones(1, 1, requires_grad=True)
    for how in ("scaled", "weighed"):
        scale = {"loss_scale": 8.0} if how == "scaled" else {}
        (model, optimizer), (other, second) = (
            one_weight(stage, world, **scale),
            one_weight(stage, world),
        )
        inner = nn.Sequential(model, other)
        for _ in range(2):  # of one, a single rank has the mean whatever it weighs
            loss = checkpoint(inner, x, use_reentrant=True).mean()
            with optimizer.no_sync(), second.no_sync():
                if how == "scaled":
                    optimizer.scale(loss).backward()
                else:
                    optimizer.backward(loss, weight=6)
        match = "the loss scale of another" if how == "scaled" else "the loss was weighed by"
        with pytest.raises(RuntimeError, match=match):
            second.step()


# Batches that several optimizers, or several loaders, have a part in.


def draw(source, own, total, *optimizers):
    source.drawn += 1
    for optimizer in optimizers:
        optimizer.accumulation.expect(source.latest(own, total))


@STAGES
@pytest.mark.parametrize("turns", [(0, 1), (0, 0, 1), (1, 0)])
def test_models_may_take_the_batches_of_a_loader_in_turn(stage, turns):
    pairs, source = [one_weight(stage, FirstOfTwo) for _ in range(2)], BatchSource()
    for number, (own, total) in enumerate([(4, 8)] * 4 + [(1, 3), (4, 8)]):
        draw(source, own, total, *(optimizer for _, optimizer in pairs))
        model, optimizer = pairs[turns[number % len(turns)]]
        mean(model, 3).backward()
        assert optimizer.step().weight == own
        optimizer.zero_grad()


@STAGES
def test_models_may_share_a_batch_and_leave_others_out(stage):
    """A discriminator, and a generator that trains rarely; batches may be drawn ahead."""
    (first, often), (second, rarely) = pairs = [one_weight(stage, FirstOfTwo) for _ in range(2)]
    source, both = BatchSource(), [optimizer for _, optimizer in pairs]
    for number, own in enumerate((5, 5, 2, 7)):
        draw(source, own, 2 * own, *both)
        mean(first, 3).backward()
        assert often.step().weight == own
        if number % 2:
            mean(second, 3).backward()
            assert rarely.step().weight == own
        for optimizer in both:
            optimizer.zero_grad()
    for own in (6, 6, 6):  # drawn ahead: the first waits for both
        draw(source, own, 12, *both)
    mean(first, 3).backward()
    draw(source, 3, 6, *both)
    mean(second, 3).backward()
    assert (often.step().weight, rarely.step().weight) == (6, 6)


@STAGES
@pytest.mark.parametrize(
    ("parts", "refused"),
    [
        ([(4, 8), (12, 24)], False),
        ([(4, 8), (12, 24), (1, 2)], False),
        ([(4, 8), (12, 25)], True),
        ([(0, 1), (1, 2)], True),
        ([(4, None), (12, None)], True),
        ([(4, None), (4, 8)], True),
    ],
)
def test_loaders_of_unequal_batches_count_where_a_rank_has_one_part_of_each(stage, parts, refused):
    model, optimizer = one_weight(stage, FirstOfTwo)
    for own, total in parts:
        draw(BatchSource(), own, total, optimizer)
    if refused:
        with pytest.raises(RuntimeError, match="so its weight is not certain"):
            mean(model, 3).backward()
        return
    mean(model, 3).backward()
    assert optimizer.step().weight == parts[0][0]


def test_the_error_about_batches_that_wait_has_each_part_once():
    model, optimizer = one_weight(0, FirstOfTwo)
    source = BatchSource()
    for own in [*[4] * 90, *range(9)]:
        draw(source, own, 8, optimizer)
    with pytest.raises(
        RuntimeError, match=r"^99 batches were .* has 4 of 8 \(in 91\), 0 of 8,"
    ) as error:
        mean(model, 3).backward()
    assert "3 of 8 and 4 more samples, so its weight" in str(error.value)


# Gradients between steps.


@STAGES
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_leaves_none_or_zeros(stage, set_to_none):
    model, optimizer = one_weight(stage)
    for _ in range(2):
        play(model, optimizer, [("backward", 3), ("step",), ("zero_grad", set_to_none)])
        gradient = model.weight.grad
        assert gradient is None if set_to_none else gradient.item() == 0.0
    assert model.weight.item() == 1.0 - 3.0 - 3.0


@WORLDS
def test_a_gradient_that_the_user_keeps_is_not_overwritten(world):
    model, optimizer = one_weight(0, world)
    kept = []
    for number in (3, 5, 7):
        play(model, optimizer, [("zero_grad",), ("backward", number)])
        kept.append(model.weight.grad)
    assert [gradient.item() for gradient in kept] == [3.0, 5.0, 7.0]
    mean(model, 1).backward()
    assert kept[-1] is model.weight.grad
    assert kept[-1].item() == 8.0


@WORLDS
def test_zeros_are_only_for_gradients_that_there_were_and_gradients_may_be_exchanged(world):
    model = nn.ModuleList([nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)])
    first, second = model.parameters()
    for parameter in (first, second):
        nn.init.ones_(parameter)
    optimizer = zero(model, world=world, lr=1.0, weight_decay=0.5)
    optimizer.zero_grad(set_to_none=False)
    mean(model[0], 3).backward()
    optimizer.step()
    assert (first.item(), second.item()) == (1.0 - 3.5, 1.0)
    optimizer.zero_grad()
    optimizer.param_groups[0]["weight_decay"] = 0.0
    (first * 3 + second * 5).sum().backward()
    first.grad, second.grad = second.grad, first.grad
    optimizer.step()
    assert (first.item(), second.item()) == (-2.5 - 5.0, 1.0 - 3.0)
