"""Numbers that the ranks of a step establish together, in one small message."""

from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from zero.collectives import Collectives, CompletedWork, Work

Value: TypeAlias = float | Tensor | Callable[[], float | Tensor]


class StepMessage:
    """Numbers by name, each a sum or a maximum over ranks: one all-reduce in fp64.

        put ... put -> send -> read

    All ranks put the same names in the same order. A value may be a function, which is called when
    the message is sent, or a tensor of one element, which is read then. A maximum is NaN if any
    rank's value is: every rank has a place of its own in the sum.
    """

    def __init__(self) -> None:
        self._values: dict[str, tuple[Value, bool]] = {}  # with True for a maximum
        self._numbers = torch.zeros(0, dtype=torch.float64, device="cpu")  # on their way
        self._work: Work = CompletedWork()
        self._parts: dict[str, Tensor] = {}  # of what has arrived, by name
        self._sums: dict[str, float] = {}
        self.sent = False
        """True if the message was sent: no name may be put any more."""
        self.ranks = 0
        """Number of the ranks that it was sent to."""

    @property
    def arrived(self) -> bool:
        """True if `read` would not wait."""
        return self.sent and self._work.done()

    def take_back(self, name: str) -> None:
        """Remove a number that was put. Local; not once the message was sent."""
        assert not self.sent, f"{name} is taken out of a message that was sent"
        del self._values[name]

    def put(self, name: str, value: Value, reduce: Literal["sum", "max"] = "sum") -> None:
        """Add a number. Local."""
        assert not self.sent, f"{name} is put into a message that was sent"
        assert name not in self._values, f"{name} is put twice"
        self._values[name] = value, reduce == "max"

    def put_same(self, name: str, value: Callable[[], float | None]) -> None:
        """Add an integer of at most 16 bits, which is exact in `same`; None for a rank without one.

        Local.
        """
        self.put(f"ranks with {name}", lambda: value() is not None)
        self.put(name, lambda: value() or 0.0)
        self.put(f"squared {name}", lambda: (value() or 0.0) ** 2)

    def announce(self, group: Collectives, name: str) -> None:
        """Send 1 for a name and 0 for all others, where other ranks may send the whole message.

        Collective; does not wait.
        """
        if group.size > 1:
            group.all_reduce(self._pack(group, [float(name == other) for other in self._values]))

    def send(self, group: Collectives) -> None:
        """Send the numbers to the ranks of a group, once more if called again. Collective."""
        asked = [value() if callable(value) else value for value, _ in self._values.values()]
        tensors = [value.detach().double() for value in asked if isinstance(value, Tensor)]
        on_device = iter(_read(tensors))
        numbers = [next(on_device) if isinstance(v, Tensor) else float(v) for v in asked]
        self.sent, self.ranks, self._numbers = True, group.size, self._pack(group, numbers)
        self._parts = {}
        self._work = group.all_reduce(self._numbers) if group.size > 1 else CompletedWork()

    def read(self) -> dict[str, float]:
        """Return the reduced numbers by name. Waits for the ranks that it was sent to.

        The same dictionary each time, since several may read a message of many numbers.
        """
        assert self.sent, "the message was not sent"
        self._work.wait()
        if not self._parts:
            widths = [self.ranks if maximum else 1 for _, maximum in self._values.values()]
            self._parts = dict(zip(self._values, self._numbers.split(widths), strict=True))
            self._sums = {name: float(part.max()) for name, part in self._parts.items()}
        return self._sums

    def same(self, name: str) -> bool:
        """Return whether all ranks that have a number of `put_same` have the same. After `read`."""
        ranks, squares = self._sums[f"ranks with {name}"], self._sums[f"squared {name}"]
        return ranks * squares == self._sums[name] ** 2

    def by_rank(self, name: str) -> dict[str, float]:
        """Return the numbers that a maximum is taken of, by rank. After `read`."""
        return {str(rank): number for rank, number in enumerate(self._parts[name].tolist())}

    def _pack(self, group: Collectives, numbers: list[float]) -> Tensor:
        """Return what is summed: a maximum has a place for each rank."""
        packed: list[float] = []
        for number, (_, maximum) in zip(numbers, self._values.values(), strict=True):
            places = [0.0] * (group.size if maximum else 1)
            places[group.rank if maximum else 0] = number
            packed += places
        return torch.tensor(packed, dtype=torch.float64, device="cpu")


def _read(tensors: list[Tensor]) -> list[float]:
    if not tensors:
        return []
    device = tensors[0].device
    values: list[float] = torch.stack([t.reshape(()).to(device) for t in tensors]).tolist()
    return values
