"""A communication hook that compresses what crosses nodes, and nothing within a node.

    reduce-scatter in the node   | encode, exchange, decode  | all-gather in the node, if a rank
    each lane owner has the sum  | with the lane's owners on | needs other parts of the sum
    of its node                  | the other nodes           |

The owner of a lane encodes its node's sum together with what it has not sent before
(`Residual`), and receives the codes of all other nodes. All nodes decode the same
bytes and add in the order of nodes, in fp32 or wider, so all ranks have the same bits. What is sent
depends on lanes alone, so the stages agree.

A NaN or an infinity makes the gradients of at least its own parameter not finite, on every node.

Sources: Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes",
ICML 2019, arXiv 1901.09847; Seide et al., "1-Bit Stochastic Gradient Descent and its Application to
Data-Parallel Distributed Training of Speech DNNs", Interspeech 2014.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero.collectives import Collectives, CompletedWork, Work
from zero.comm_hooks import ChainedWork, CommHook, ReducibleBucket
from zero.comm_hooks.codes import BlockCode, Code, aligned
from zero.kernels import sum_dtype


class Unsent(NamedTuple):
    """The part of a lane's sums that was not sent; a mean is a sum times multiplier / divisor."""

    residual: Tensor  # flat, not changed in place
    multiplier: float
    divisor: float  # 0 if nothing was reduced yet


class Residual:
    """The part of its sums that a lane's owner has not sent. Takes twice its size.

    A step that is skipped must leave nothing: its gradients are dropped, with all that was sent of
    earlier ones. So what is left of the last step that was taken (`of_step`) is kept beside what is
    left of the last reduction.

    Sums are in units that change: gradients are multiplied by their batch's weight and by the loss
    scale, and divided by a number that all ranks know only when the reduction ends. Residuals are
    added in units of means, so that all means together are those without compression: what is added
    is scaled as if the divisor were that of the last reduction, and `reduced` moves what the actual
    one adds or lacks into the residual.
    """

    def __init__(self, of_step: Unsent) -> None:
        self.of_step = self._latest = of_step
        self._open: Tensor | None = None  # of the reduction in progress
        self._multiplier = 1.0  # of its sums

    def add(self, lane: Tensor, multiplier: float) -> Tensor:
        """Return a lane's sums plus the residual, to be overwritten by what is not sent of them.

        `multiplier` is that of the sums, the same in all calls of a reduction.
        """
        if self._open is not None:  # another micro-batch of the same reduction
            return self._open.add_(lane)
        base, self._multiplier = self._latest, multiplier
        base_on_lane = base.residual.to(lane.device)  # a loaded one is on the CPU
        self._open = (base_on_lane * (base.multiplier / multiplier)).add_(lane)
        return self._open

    def reduced(self, divisor: float) -> None:
        """End a reduction whose sums are divided by `divisor`."""
        if self._open is None:
            return
        # An infinity or a NaN has been sent, and is not sent again.
        total, base = self._open.nan_to_num_(0.0, 0.0, 0.0), self._latest
        if base.divisor not in (0.0, divisor):
            ratio = base.multiplier / self._multiplier
            more = ratio * (divisor / base.divisor - 1.0)
            total.add_(base.residual.to(total.device), alpha=more)
        self._latest, self._open = Unsent(total, self._multiplier, divisor), None

    def end_step(self, *, taken: bool) -> None:
        """End a step, or drop it: what its reductions have left counts, or never was."""
        self._open = None
        self.of_step = self._latest = self._latest if taken else self.of_step


class Int8Hook(CommHook):
    """Exchanges node sums as integers of 8 bits with a scale for each block: 1.016 bytes each.

    A block with a NaN or an infinity is decoded to NaN. So are fp64 sums beyond the range of fp32.
    A subclass with another `code` sends that.

    With M nodes, the owner of a lane receives M - 1 codes. An all-reduce without compression sends
    2 (M - 1) / M times the lane, and a reduce-scatter half of it, so this is for few nodes. On a
    single node, and for complex gradients, sums travel as they are. An instance serves one
    optimizer.
    """

    between_nodes = True
    code: Code = BlockCode()  # of the sums, in fp32 or fp64

    def __init__(self) -> None:
        self._residuals: dict[int, Residual] = {}  # by bucket

    def __call__(self, bucket: ReducibleBucket) -> Work:
        """Start to sum a bucket; what crosses nodes is compressed."""
        if not self.several_nodes or bucket.gradients.is_complex():
            return super().__call__(bucket)
        return ChainedWork(self._steps(bucket))

    def note(self, nodes: int, *, sharded: bool) -> str:
        """Say where nothing is compressed, or codes take more bytes than the sums."""
        name, sample = type(self).__name__, 1 << 20
        if nodes == 1:
            return (
                f"all ranks are on one node, and {name} compresses between nodes: gradients travel "
                "as they are"
            )
        plain = sample * torch.float32.itemsize * (1 if sharded else 2) / nodes
        if (coded := self.code.nbytes(sample)) < plain:
            return ""
        return (
            f"{name} sends {coded / plain:.2g} times the bytes of fp32 gradients between {nodes} "
            "nodes, since each receives the codes of all others: it is for fewer nodes"
        )

    def end_reduction(self, divisor: float) -> None:
        """Let residuals take part in the means that `divisor` makes."""
        for residual in self._residuals.values():
            residual.reduced(divisor)

    def end_step(self, *, taken: bool) -> None:
        """Keep the residuals of a step that was taken, and drop those of one that was not."""
        for residual in self._residuals.values():
            residual.end_step(taken=taken)

    def nbytes(self) -> int:
        """Return the bytes of the residuals."""
        return sum(2 * kept.of_step.residual.nbytes for kept in self._residuals.values())

    def state_dict(self) -> dict[str, Any]:
        """Return the residuals of the last step, by bucket."""
        states = {str(i): kept.of_step._asdict() for i, kept in self._residuals.items()}
        return {"residuals": states} if states else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the residuals; those of an empty state are forgotten."""
        states = state.get("residuals", {})
        self._residuals = {int(i): Residual(Unsent(**kept)) for i, kept in states.items()}

    def _steps(self, bucket: ReducibleBucket) -> Iterator[Work]:
        levels = self.levels
        assert levels is not None, "there are several nodes"
        label = f"gradient bucket {bucket.index}"
        node = levels.node.named(label)
        gradients, bounds = bucket.gradients, levels.lane_bounds(bucket.layout)
        yield node.reduce_scatter(gradients, bounds)
        own = node.slot(node.rank)
        lane = gradients[bounds[own] : bounds[own + 1]]
        if len(lane):
            yield from self._exchange(bucket, lane, levels.cross, label)
        else:  # so that chains keep in step with those of the node's other ranks
            yield CompletedWork()
        if not bucket.sharded or node.size > levels.lanes:  # or the shard of a rank lies elsewhere
            yield node.all_gather(gradients, bounds)

    def _exchange(
        self, bucket: ReducibleBucket, lane: Tensor, cross: Collectives, label: str
    ) -> Iterator[Work]:
        if bucket.index not in self._residuals:
            none = torch.zeros_like(lane, dtype=sum_dtype(lane.dtype))
            self._residuals[bucket.index] = Residual(Unsent(none, 1.0, 0.0))
        sums = self._residuals[bucket.index].add(lane, bucket.multiplier)
        nbytes = aligned(self.code.nbytes(len(sums)))
        codes = torch.zeros(cross.size * nbytes, dtype=torch.uint8, device=lane.device)
        by_node = [codes[slot * nbytes :][:nbytes] for slot in map(cross.slot, range(cross.size))]
        self.code.encode(sums, by_node[cross.rank])
        ratio = lane.nbytes * (1 if bucket.sharded else 2) / cross.size / nbytes
        yield cross.named(label, ratio).all_gather(codes)
        total = lane if lane.dtype == sums.dtype else torch.empty_like(sums)
        total.zero_()
        for code in by_node:
            self.code.decode(code, total)
        if total is not lane:
            lane.copy_(total)
