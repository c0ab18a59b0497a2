"""The state of a communication hook in a checkpoint: what each rank has not sent yet, say.

Its tensors go, by rank, to the file of random states, which like them are restored on the same
ranks only. The rest goes to the manifest, with the name of a tensor in the place of each.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from mntrain.checkpoint.objects import encode_objects, merge, select

NAME = "comm_hook"
_TENSOR = "tensor of the file"  # the only key of what stands for a tensor


class _Given:
    """A `Stateful` object of a given state."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = state


def split_state(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a saved hook's state without tensors, encoded for JSON, and its tensors by name.

    Both are empty for a hook without a state. Raises ValueError for what JSON cannot hold.
    """
    if not (state["state"] or state["used"]):
        return {}, {}
    tensors: dict[str, Tensor] = {}

    def replaced(value: Any) -> Any:
        if isinstance(value, Tensor):
            name = str(len(tensors))
            tensors[name] = value
            return {_TENSOR: name}
        if isinstance(value, dict):
            return {key: replaced(item) for key, item in value.items()}
        if isinstance(value, list):
            return [replaced(item) for item in value]
        return value

    return encode_objects({NAME: _Given(replaced(state))}), tensors


def merge_states(by_rank: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the encoded states of all ranks, of which some may have none, for the manifest."""
    if not any(by_rank):
        return {}
    none = encode_objects({NAME: _Given({"context": [], "state": {}, "used": []})})
    return merge([state or none for state in by_rank])


def join_state(
    merged: Mapping[str, Any], rank: int, size: int, read: Callable[[str], Tensor]
) -> dict[str, Any]:
    """Return a rank's state from what `merge_states` returned; `read` returns a tensor by name."""

    def restored(value: Any) -> Any:
        if isinstance(value, dict):
            if value.keys() == {_TENSOR}:
                return read(value[_TENSOR])
            return {key: restored(item) for key, item in value.items()}
        return [restored(item) for item in value] if isinstance(value, list) else value

    state: dict[str, Any] = restored(select(merged, NAME, rank, size))
    return state


def tensor_name(rank: int, name: str) -> str:
    """Return the name in the file of a rank's tensor."""
    return f"{NAME}/{rank}/{name}"
