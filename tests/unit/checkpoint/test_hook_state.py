import json

import pytest
import torch

from mntrain.checkpoint.objects import decode_hook, encode_hook, merge_hooks


def state_of(rank):
    parts = {"0": {"residual": torch.arange(3.0) + rank, "divisor": 8.0}}
    factors = [torch.ones(2, 2) * rank, torch.zeros(0)]
    return {
        "context": ["Hook", rank, [[4, 0, 2]]],
        "state": {"parts": parts, "factors": factors},
        "used": ["0"],
    }


def test_each_rank_gets_its_state_back():
    nothing = {"context": ["Hook", 1, []], "state": {}, "used": []}
    several = [state_of(0), nothing, state_of(2)]
    split = [encode_hook(state) for state in several]
    merged = json.loads(json.dumps(merge_hooks([values for values, _ in split])))
    for rank in (0, 2):
        joined = decode_hook(merged, rank, 3, split[rank][1].__getitem__)
        assert repr(joined) == repr(several[rank])
    assert not decode_hook(merged, 1, 3, {}.__getitem__)["state"]


def test_hooks_without_state_leave_nothing():
    values, tensors = encode_hook({"context": ["Hook", 0], "state": {}, "used": []})
    assert tensors == {}
    assert merge_hooks([values, values]) == {}


def test_what_json_cannot_hold_is_refused():
    with pytest.raises(ValueError, match=r"comm_hook\.state\.odd, a object"):
        encode_hook({"context": [], "state": {"odd": object()}, "used": []})
