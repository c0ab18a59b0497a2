"""Streaming DiLoCo: parts of the parameters are exchanged in turn, while later steps compute.

    every 6, 2 fragments, overlap 2:
    step after the warm-up     1   2   3   4   5   6   7   8   9  10  11  12
    fragment 0                         start   finish              start   finish
    fragment 1                                     start   finish              start

Source: Douillard et al., "Streaming DiLoCo with overlapping communication: Towards a Distributed
Free Lunch", 2025 (arXiv 2501.18512). Unlike there, codes are integers of 4 bits with a scale for
each 256 elements of a parameter, not floats, and what they lose is kept (`zero.comm_hooks.codes`).
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor

from zero.collectives import Collectives
from zero.comm_hooks.codes import BlockCode
from zero.exchange.local_sgd import (
    EXCHANGED,
    LEAST_WEIGHT,
    MOMENTUM,
    DiLoCoSchedule,
    ExchangeAgreement,
    LocalSGDSchedule,
    is_finite,
)
from zero.exchange.node_means import Message
from zero.exchange.schedule import Exchanged
from zero.state import ERROR, SYNC

ARRIVING = f"{SYNC}arriving"  # the key of mean outer gradients that are to be applied


class _Sent(NamedTuple):
    """The exchange of a fragment, in flight."""

    messages: list[Message]
    agreement: ExchangeAgreement
    lost: dict[Tensor, Tensor]  # by the codes; kept if all ranks' values are finite

    @property
    def nbytes(self) -> int:
        lost = sum(tensor.nbytes for tensor in self.lost.values())
        return lost + sum(message.nbytes for message in self.messages)


class StreamingSchedule(DiLoCoSchedule):
    """Exchange each of several fragments of the parameters every `every` steps, in the background.

    The starts of the `fragments` are spread evenly over the steps; each has whole parameters, and
    there are no more than steps. The mean outer gradient of the parameters after one step is
    applied after `overlap` further ones: the outer optimizer updates the copy of the exchanged
    parameters, and those of the node become `mix` times themselves, and 1 - mix times the copy.
    `bits` is 4, or 32 for outer gradients that travel as they are. The other arguments are those of
    `DiLoCoSchedule`, which this is with one fragment, overlap 0, mix 0 and 32 bits.

    A manual `exchange` makes the parameters the mean of the nodes', without an outer step.
    """

    def __init__(
        self,
        *groups: Collectives,
        fragments: int,
        overlap: int,
        mix: float,
        bits: int,
        **options: Any,
    ) -> None:
        super().__init__(*groups, **options)
        self._fragments = min(fragments, self._every)
        self._overlap, self._mix = overlap, mix
        self._code = BlockCode(bits) if bits < 32 else None
        self._beside = (MOMENTUM, ERROR) if self._code else (MOMENTUM,)
        self._loads = [0] * self._fragments  # elements
        self._fragment: dict[Tensor, int] = {}
        self._sent: dict[int, _Sent] = {}
        self._arrived: dict[Tensor, Tensor] = {}  # means that are to be applied
        self._peak = 0  # bytes in flight
        # The weight of the steps until the last exchange of each fragment.
        self._counted = [0.0] * self._fragments

    def add(self, sizes: Mapping[str, int], tensors: Mapping[str, Tensor]) -> None:
        """Give each parameter to the fragment that has the fewest elements so far."""
        for name, numel in sizes.items():
            lightest = self._loads.index(min(self._loads))
            self._loads[lightest] += numel
            if name in tensors:
                self._fragment[tensors[name]] = lightest

    def after_update(self, step: int, tensors: Sequence[Tensor]) -> Exchanged:
        """Start the exchange of a fragment, and finish that of one, if they are due. Collective.

        Raises NonFiniteGradientError on all ranks, before anything is applied, for outer gradients
        that are not finite on any of them.
        """
        starting = self._starts_after(step)
        if starting is not None:
            self._apply(starting)  # what a step that raised has left
            self._start(starting, tensors)
        finishing = self._starts_after(step - self._overlap)
        if finishing is None:
            return Exchanged.NOTHING
        self._apply(finishing)
        whole = self._fragments == 1 and not self._overlap and not self._mix
        return Exchanged.ALL if whole else Exchanged.SOME

    def exchange(self, tensors: Sequence[Tensor]) -> None:
        """Finish what is in flight, and replace the parameters by their means. Collective.

        The exchanged parameters become the means, too. The outer momentum and what codes have lost
        stay. Raises NonFiniteGradientError as `after_update` does.
        """
        for fragment in range(self._fragments):
            self._apply(fragment)
        LocalSGDSchedule.exchange(self, tensors)
        for tensor in tensors:
            self._outer[tensor][EXCHANGED].copy_(tensor)

    def settle(self) -> None:
        """Wait for exchanges in flight."""
        for fragment in list(self._sent):
            self._arrived.update(self._receive(fragment))
            self._note_peak()

    def state(self, tensor: Tensor) -> dict[str, Tensor]:
        """Return the outer state, and the mean outer gradient that is to be applied."""
        arrived = self._arrived.get(tensor)
        return super().state(tensor) | ({} if arrived is None else {ARRIVING: arrived})

    def load_state(self, tensor: Tensor, state: Mapping[str, Tensor]) -> None:
        """Restore the outer state, and a mean outer gradient that was to be applied."""
        self._sent.clear()
        self._arrived.pop(tensor, None)
        super().load_state(tensor, state)
        if tensor in self._outer and ARRIVING in state:
            self._arrived[tensor] = self._outer[tensor][EXCHANGED].clone().copy_(state[ARRIVING])

    def nbytes(self) -> int:
        """Return the bytes of the outer state, and of what was in flight at the peak."""
        return super().nbytes() + self._peak

    def expected_nbytes(self, tensors: Sequence[Tensor]) -> int:
        """Return the bytes of the outer state and of the exchanges that are in flight together."""
        of_fragment = [
            self._expected_in_flight([t for t in tensors if self._fragment[t] == fragment])
            for fragment in range(self._fragments)
        ]
        first = self._warmup + self._every
        together = [
            sum(
                of_fragment[fragment]
                for back in range(self._overlap + 1)
                if (fragment := self._starts_after(step - back)) is not None
            )
            for step in range(first, first + self._every)
        ]
        return super().expected_nbytes(tensors) + max(together)

    def _expected_in_flight(self, own: Sequence[Tensor]) -> int:
        """Return the bytes of the exchange of a fragment's tensors."""
        lost = sum(tensor.nbytes for tensor in own) if self._code else 0
        return self._means.nbytes(own, self._code) + lost

    def _starts_after(self, step: int) -> int | None:
        """Return the fragment whose exchange starts after a step, if there is one. Local."""
        taken = step - self._warmup + 1
        if taken < 1:
            return None
        due = [
            fragment
            for fragment in range(self._fragments)
            if (taken - (fragment + 1) * self._every // self._fragments) % self._every == 0
        ]
        return due[0] if due else None

    def _start(self, fragment: int, tensors: Sequence[Tensor]) -> None:
        """Send the outer gradients of a fragment. Collective."""
        finite = True

        def value(tensor: Tensor) -> Tensor:
            nonlocal finite
            sent = self._value(tensor, self._drift(tensor))
            finite = is_finite(sent) and finite
            return sent

        lost: dict[Tensor, Tensor] = {}
        own = [tensor for tensor in tensors if self._fragment[tensor] == fragment]
        keep = lost.__setitem__ if self._code else None
        weight = self._take_weight_of(fragment)
        messages = [*self._means.send(own, value, self._code, keep, weight=weight)]
        agreement = self._agree(weight, finite=finite)
        self._sent[fragment] = _Sent(messages, agreement, lost)
        self._note_peak()

    def weights(self) -> list[float]:
        """Return the weight of the steps since the last exchange of each fragment."""
        since = [self._steps_weight - counted for counted in self._counted]
        return since if self.weighted else []

    def load_weights(self, weights: Sequence[float]) -> None:
        """Continue from the weights of as many fragments; else, all from that of the oldest."""
        super().load_weights(weights)
        since = weights if len(weights) == self._fragments else [self._steps_weight]
        counted = [self._steps_weight - weight for weight in since]
        self._counted = counted * (self._fragments // len(counted))

    def _weight(self) -> float:
        """Return this node's weight in a mean of all fragments: since the oldest exchange."""
        since = self._steps_weight - min(self._counted)
        return max(since, LEAST_WEIGHT) if self.weighted else 1.0

    def _take_weight_of(self, fragment: int) -> float:
        """Return this node's weight in the exchange of a fragment, and count steps anew for it."""
        counted, self._counted[fragment] = self._counted[fragment], self._steps_weight
        return max(self._steps_weight - counted, LEAST_WEIGHT) if self.weighted else 1.0

    def _value(self, tensor: Tensor, drift: Tensor) -> Tensor:
        """Return the outer gradient, with what codes have lost before."""
        return drift.add(self._outer[tensor][ERROR]) if self._code else drift

    def _receive(self, fragment: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the means of a fragment as they arrive, if it is in flight. Collective."""
        sent = self._sent.pop(fragment, None)
        if sent is None:
            return
        scale = sent.agreement.check()
        for tensor, lost in sent.lost.items():
            self._outer[tensor][ERROR].copy_(lost)
        sent.lost.clear()
        for message in sent.messages:
            yield from message.means(scale)

    def _apply(self, fragment: int) -> None:
        """Take the outer step of a fragment that was started before, and mix. Collective."""
        settled = [tensor for tensor in self._arrived if self._fragment[tensor] == fragment]
        arrived = ((tensor, self._arrived.pop(tensor)) for tensor in settled)
        for tensor, mean in chain(arrived, self._receive(fragment)):
            self._outer_step(tensor, mean)
            exchanged = self._outer[tensor][EXCHANGED]
            if self._mix:
                tensor.lerp_(exchanged, 1 - self._mix)
            else:
                tensor.copy_(exchanged)

    def _note_peak(self) -> None:
        sent = sum(sent.nbytes for sent in self._sent.values())
        self._peak = max(self._peak, sent + sum(mean.nbytes for mean in self._arrived.values()))

    def _forget(self) -> None:
        super()._forget()
        self._sent.clear()
        self._arrived.clear()
