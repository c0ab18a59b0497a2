"""States of schedulers and other small objects, as a checkpoint holds them."""

import json
import math
from collections import Counter, OrderedDict, defaultdict
from enum import IntEnum

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lr

from mntrain.checkpoint.objects import (
    HOOK,
    decode_options,
    encode_hook,
    encode_objects,
    encode_options,
    merge,
    select,
)


class Holder:
    def __init__(self, state=None):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def through_json(value):
    return json.loads(json.dumps(value))


def restored(state, *, rank=0, size=1):
    return select(through_json(merge([encode_objects({"it": Holder(state)})])), "it", rank, size)


SCHEDULERS = {
    "LambdaLR": lambda o: lr.LambdaLR(o, lambda step: 0.9**step),
    "MultiStepLR": lambda o: lr.MultiStepLR(o, [2, 4, 4], gamma=0.5),
    "CosineAnnealingLR": lambda o: lr.CosineAnnealingLR(o, 7),
    "OneCycleLR": lambda o: lr.OneCycleLR(o, 0.1, total_steps=12),
    "CyclicLR": lambda o: lr.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "ReduceLROnPlateau": lambda o: lr.ReduceLROnPlateau(o, patience=1),
    "Warmup": lambda o: lr.SequentialLR(
        o, [lr.LinearLR(o, 0.1, total_iters=3), lr.CosineAnnealingWarmRestarts(o, 4)], [3]
    ),
    "ChainedScheduler": lambda o: lr.ChainedScheduler(
        [lr.ExponentialLR(o, 0.9), lr.PolynomialLR(o, 8)]
    ),
}


def step(optimizer, scheduler, times):
    rates = []
    for _ in range(times):
        optimizer.step()
        scheduler.step(*([1.0] if isinstance(scheduler, lr.ReduceLROnPlateau) else []))
        group = optimizer.param_groups[0]
        rates.append((group["lr"], group.get("momentum")))
    return rates


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_of_torch_continue_as_uninterrupted(name):
    def make():
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1, momentum=0.9)
        return optimizer, SCHEDULERS[name](optimizer)

    optimizer, scheduler = make()
    step(optimizer, scheduler, 4)
    again, resumed = make()
    again.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(restored(scheduler.state_dict()))
    assert step(again, resumed, 5) == step(optimizer, scheduler, 5)


def test_containers_numbers_and_tensors_come_back_as_they_were():
    state = {
        "type": "dict",
        "nested": [(1, 2.5), {"a", "b"}, OrderedDict(z=1, a=2), Counter({30: 2})],
        7: {None: True, (1, 2): "x"},
        "numbers": [math.inf, -0.0, 2**70, False],
        "bytes": b"\x00\xff",
        "scalars": [np.float32(0.1), np.int64(3)],
    }
    again = restored(state)
    assert again == state
    assert list(map(type, again["nested"])) == [tuple, set, OrderedDict, Counter]
    assert list(map(type, again["scalars"])) == [np.float32, np.int64]
    assert math.copysign(1, again["numbers"][1]) == -1
    assert math.isnan(restored({"x": math.nan})["x"])


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.arange(6).view(2, 3).t(),
        torch.tensor([True, False]),
        torch.zeros(0, 3),
        torch.get_rng_state(),
        np.arange(6, dtype=np.int16).reshape(2, 3),
    ],
)
def test_small_tensors_and_arrays_come_back_bit_for_bit(value):
    again = restored({"it": value})["it"]
    assert type(again) is type(value)
    assert (again.dtype, again.shape) == (value.dtype, value.shape)
    assert (again == value).all()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda: 0, r"the state has it\.a\[1\], a function: a checkpoint holds numbers, strings"),
        (defaultdict(int), r"the state has it\.a\[1\], a defaultdict:"),
        (torch.zeros(1 << 19), r"it\.a\[1\], of 2\.1 MB: make it a buffer of the model"),
        (torch.zeros(2, dtype=torch.complex64), r"it\.a\[1\], a Tensor:"),
    ],
)
def test_what_cannot_be_saved_is_named(value, message):
    with pytest.raises(ValueError, match=message):
        encode_objects({"it": Holder({"a": [0, value]})})


def test_a_state_that_differs_between_ranks_returns_to_its_rank_only():
    by_rank = [encode_objects({"it": Holder({"x": rank, "y": math.nan})}) for rank in range(3)]
    merged = through_json(merge(by_rank))
    assert [select(merged, "it", rank, 3)["x"] for rank in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="between the 3 ranks that saved it, so 2 cannot restore"):
        select(merged, "it", 0, 2)
    with pytest.raises(ValueError, match=r"no state of data \(it has that of it\)"):
        select(merged, "data", 0, 3)
    same = merge([encode_objects({"it": Holder({"y": math.nan})})] * 3)
    assert math.isnan(select(through_json(same), "it", 6, 7)["y"])


@pytest.mark.parametrize(
    "rate", [torch.tensor(1e-2), torch.tensor(0.25, dtype=torch.float64), np.float32(0.1), 0.1]
)
def test_rates_of_any_kind_are_saved_in_a_group(rate):
    group = {"params": ["a", "b"], "lr": rate, "betas": (0.9, 0.95), "fused": None}
    found = decode_options(through_json(encode_options(group)))
    assert type(found["lr"]) is type(rate)
    assert getattr(found["lr"], "dtype", None) == getattr(rate, "dtype", None)
    assert found["lr"] == rate
    assert found | {"lr": 0} == group | {"lr": 0}


OPTIONS = [
    (0.9, (0.95, [1, 2])),
    {3: 0.1, "a": (1, 2), None: [(1,)]},
    {"type": "cosine", "data": 1},
    [({1: 2},), {4}],
    frozenset({1, (2, 3)}),
    OrderedDict({2: 1}),
    b"bytes",
    np.arange(3),
    True,
    math.inf,
    {"nested": {1: {2: torch.tensor([1.5])}}},
]


@pytest.mark.parametrize("option", OPTIONS, ids=repr)
def test_an_option_of_any_type_comes_back_as_it_was(option):
    found = decode_options(through_json(encode_options({"params": ["a"], "it": option})))
    assert (type(found["it"]), repr(found)) == (type(option), repr({"params": ["a"], "it": option}))


class Kind(IntEnum):
    FAST = 1


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"kind": Kind.FAST}, "the state has kind of a parameter group, a Kind: a checkpoint"),
        ({"rates": [1, np.str_("a")]}, r"rates of a parameter group\[1\], a str_"),
        ({"lr": 0.1, 7: 0.2}, "a parameter group has the option 7, a int: a checkpoint holds"),
        ({"run": lambda: 0}, "run of a parameter group, a function"),
        ({"dtype": torch.float32}, "dtype of a parameter group, a dtype"),
    ],
)
def test_an_option_that_would_come_back_as_another_is_refused(group, message):
    with pytest.raises(ValueError, match=message):
        encode_options(group)


def test_options_in_files_of_earlier_versions_are_read_as_they_are():
    group = {"betas": [0.9, 0.999], "lr": 0.1, "table": {"3": {"type": "a"}}, "none": None}
    assert decode_options(group) == group


def test_each_rank_gets_its_state_of_a_hook_back():
    def state_of(rank):
        parts = {"0": {"residual": torch.arange(3.0) + rank, "divisor": 8.0}}
        state = {"parts": parts, "factors": [torch.ones(2, 2) * rank, torch.zeros(0)]}
        return {"context": ["Hook", rank, [[4, 0, 2]]], "state": state, "used": ["0"]}

    nothing = {"context": ["Hook", 1, []], "state": {}, "used": []}
    several = [state_of(0), nothing, state_of(2)]
    split = [encode_hook(state) for state in several]
    merged = through_json(merge([values for values, _ in split]))
    for rank in (0, 2):
        joined = select(merged, HOOK, rank, 3, split[rank][1].__getitem__)
        assert repr(joined) == repr(several[rank])
    assert select(merged, HOOK, 1, 3, {}.__getitem__) == {}
    assert split[1] == ({}, {})
    with pytest.raises(ValueError, match=r"comm_hook\.state\.odd, a object"):
        encode_hook({"context": [], "state": {"odd": object()}, "used": []})
