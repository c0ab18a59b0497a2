"""Reduction of values by name over ranks, of which each may lack some."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

from torch import Tensor

from zero.collectives import Collectives, gather_objects
from zero.step_message import StepMessage, Value

Kind: TypeAlias = Literal["mean", "sum", "max"]
Reduce: TypeAlias = Literal["sum", "max"]


class NamedValue(NamedTuple):
    """A value of a rank, or of all: a sum or maximum; of a mean, a rank has the sum over items."""

    kind: Kind
    value: Tensor | float
    items: float


class NamedSums:
    """The names of values that a group of ranks reduces, step after step.

    A message has those that all ranks know. If a rank has another one, names are gathered, and the
    values are sent once more.
    """

    def __init__(self) -> None:
        self._known: dict[str, Kind] = {}  # on all ranks of the group, sorted

    def terms(self, own: Mapping[str, NamedValue]) -> dict[str, tuple[Value, Reduce]]:
        """Return what a message is to have, of this rank's values when it is sent. Local."""
        known = self._known  # of which `take` makes another one
        terms: dict[str, tuple[Value, Reduce]] = {
            "unknown names": (lambda: any(known.get(n) != own[n].kind for n in own), "sum")
        }
        for name, kind in known.items():
            nothing = NamedValue(kind, -math.inf if kind == "max" else 0.0, float(kind == "sum"))
            reduce: Reduce = "max" if kind == "max" else "sum"
            terms[f"value of {name}"] = partial(_value, own, name, nothing), reduce
            terms[f"items of {name}"] = partial(_items, own, name, nothing), "sum"
        return terms

    def take(
        self,
        several: Sequence[Mapping[str, NamedValue]],
        found: Sequence[Mapping[str, float]],
        group: Collectives,
    ) -> list[dict[str, NamedValue]]:
        """Return the values of some steps over all ranks, as far as any rank has items. Collective.

        `several` are this rank's, and `found` what the messages with their terms had. Raises
        ValueError on all ranks for a name that they reduce in two ways.
        """
        if any(sums["unknown names"] for sums in found):
            self._learn(several, group)
            message = StepMessage()
            for number, own in enumerate(several):
                for name, term in self.terms(own).items():
                    message.put(f"{number} {name}", *term)
            message.send(group)
            sent = message.read()
            found = [
                {name: sent[f"{number} {name}"] for name in self.terms(own)}
                for number, own in enumerate(several)
            ]
        return [self._reduced(sums) for sums in found]

    def _reduced(self, sums: Mapping[str, float]) -> dict[str, NamedValue]:
        reduced = {}
        for name, kind in self._known.items():
            if items := sums.get(f"items of {name}"):
                value = sums[f"value of {name}"] / (1.0 if kind in ("sum", "max") else items)
                reduced[name] = NamedValue(kind, value, items)
        return reduced

    def _learn(self, several: Sequence[Mapping[str, NamedValue]], group: Collectives) -> None:
        """Gather the names of the ranks. Collective."""
        own = [{name: value.kind for name, value in values.items()} for values in several]
        known = dict(self._known)
        for kinds in gather_objects(group, own):
            for name, kind in (item for step in kinds for item in step.items()):
                if (before := known.setdefault(name, kind)) != kind:
                    raise ValueError(
                        f"the metric {name} is a {kind}, and was a {before}: reduce it in one way"
                    )
        self._known = dict(sorted(known.items()))


def _value(own: Mapping[str, NamedValue], name: str, nothing: NamedValue) -> Tensor | float:
    return own.get(name, nothing).value


def _items(own: Mapping[str, NamedValue], name: str, nothing: NamedValue) -> float:
    return own.get(name, nothing).items
