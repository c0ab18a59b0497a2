"""Communication hooks that compress what crosses nodes, and nothing within a node.

    reduce-scatter in the node   | encode, exchange, decode  | all-gather in the node, or
    each lane owner has the sum  | with the lane's owners on | delivery to the ranks whose shards
    of its node                  | the other nodes           | these are

The owner of a lane encodes its node's sum together with what it has not sent before
(`Residual`), and receives the codes of all other nodes. All nodes decode the same
bytes and add in the order of nodes, in fp32 or wider, so all ranks have the same bits. What is sent
depends on lanes alone, so the stages agree.

A NaN or an infinity makes the gradients of at least its own parameter not finite, on every node.

Sources: Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes",
ICML 2019, arXiv 1901.09847; Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR
2022, arXiv 2110.02861; Seide et al., "1-Bit Stochastic Gradient Descent and its Application to
Data-Parallel Distributed Training of Speech DNNs", Interspeech 2014.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from zero.collectives import Collectives, CompletedWork, Work
from zero.comm_hooks import ChainedWork, CommHook, NodeLevels, ReducibleBucket
from zero.comm_hooks.codes import BlockCode, Code, aligned
from zero.kernels import sum_dtype
from zero.layout import Bucket


class Residual:
    """The part of its sums that a lane's owner has not sent, in `dtype`. Takes twice its size.

    A step that is skipped must leave nothing: its gradients are dropped, with all that was sent of
    earlier ones. So the residual of the last step that was taken is kept until the next one is:

        settled    of the last step that was taken
        latest     of the last reduction; the same tensor, unless a step is open
        open       of the reduction in progress

    Sums are in units that change: gradients are multiplied by their batch's weight and by the loss
    scale, and divided by a number that all ranks know only when the reduction ends. A mean is a sum
    times `multiplier` / `divisor`. Residuals are added in units of means, so that all means
    together are those without compression: what is added is scaled as if the divisor were that of
    the last reduction, and `reduced` moves what the actual one adds or lacks into the residual.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        # Each a tensor, its multiplier and its divisor; a divisor of 0 stands for none.
        self._settled = self._latest = torch.zeros(numel, dtype=dtype, device=device), 1.0, 0.0
        self._spare: Tensor | None = torch.empty_like(self._settled[0])
        self._open: Tensor | None = None
        self._multiplier = 1.0

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors."""
        return 2 * self._settled[0].nbytes

    def add(self, lane: Tensor, multiplier: float) -> Tensor:
        """Return a lane's sums plus the residual, to be overwritten by what is not sent of them.

        `multiplier` is that of the sums, the same in all calls of a reduction.
        """
        if self._open is not None:  # another micro-batch of the same reduction
            return self._open.add_(lane)
        (base, base_multiplier, _), self._multiplier = self._latest, multiplier
        total = torch.empty_like(base) if self._spare is None else self._spare
        torch.mul(base, base_multiplier / multiplier, out=total).add_(lane)
        self._open, self._spare = total, None
        return total

    def reduced(self, divisor: float) -> None:
        """End a reduction whose sums are divided by `divisor`."""
        total, base, self._open = self._open, self._latest, None
        if total is None:
            return
        # An infinity or a NaN has been sent, and is not sent again.
        total.nan_to_num_(0.0, 0.0, 0.0)
        tensor, multiplier, before = base
        if before not in (0.0, divisor):
            ratio = multiplier / self._multiplier
            total.add_(tensor, alpha=ratio * (divisor / before - 1.0))
        self._latest = total, self._multiplier, divisor
        if base is not self._settled:
            self._spare = tensor

    def settle(self, *, taken: bool) -> None:
        """End a step, or drop it: what its reductions have left counts, or never was."""
        if self._open is not None:  # a reduction that has not ended
            self._spare, self._open = self._open, None
        if self._latest is self._settled:
            return
        self._spare = (self._settled if taken else self._latest)[0]
        self._settled = self._latest = self._latest if taken else self._settled

    def state_dict(self) -> dict[str, Any]:
        """Return the residual of the last step that was taken."""
        return dict(zip(("residual", "multiplier", "divisor"), self._settled, strict=True))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. Raises ValueError for one of another length."""
        tensor, saved = self._settled[0], state["residual"]
        if saved.shape != tensor.shape:
            raise ValueError(f"the residual has {saved.numel()} elements, not {tensor.numel()}")
        multiplier, divisor = float(state["multiplier"]), float(state["divisor"])
        self._settled = self._latest = tensor.copy_(saved), multiplier, divisor


class BetweenNodesHook(CommHook):
    """Base class of hooks that send codes between nodes. An instance serves one optimizer.

    With M nodes, the owner of a lane receives M - 1 codes. An all-reduce without compression sends
    2 (M - 1) / M times the lane, and a reduce-scatter half of it, so these hooks are for few nodes.
    On a single node, and for complex gradients, sums travel as they are.
    """

    between_nodes = True
    code: Code  # of the sums, in fp32 or fp64

    def __init__(self) -> None:
        self._residuals: dict[int, Residual] = {}  # by bucket
        self._saved: dict[int, dict[str, Any]] = {}  # states of residuals that are not in use yet

    def __call__(self, bucket: ReducibleBucket) -> Work:
        """Start to sum a bucket; what crosses nodes is compressed."""
        levels = bucket.levels
        assert levels is not None, "the optimizer gives them to hooks that are between_nodes"
        if levels.count == 1 or bucket.gradients.is_complex():
            return bucket.reduce()
        return ChainedWork(self._steps(bucket, levels))

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
            residual.settle(taken=taken)

    def reset(self) -> None:
        """Forget the residuals."""
        self._residuals.clear()
        self._saved.clear()

    def nbytes(self) -> int:
        """Return the bytes of the residuals."""
        return sum(residual.nbytes for residual in self._residuals.values())

    def expected_nbytes(self, plan: Sequence[Bucket], levels: NodeLevels | None) -> int:
        """Return what `nbytes` will be after a step."""
        if levels is None or levels.count == 1:
            return 0
        total = 0
        for bucket in plan:
            start, stop = levels.own_range(bucket)
            if not bucket.dtype.is_complex:
                total += 2 * (stop - start) * sum_dtype(bucket.dtype).itemsize
        return total

    def state_dict(self) -> dict[str, Any]:
        """Return the residuals of the last step, by bucket."""
        used = {index: residual.state_dict() for index, residual in self._residuals.items()}
        residuals = {str(index): state for index, state in (self._saved | used).items()}
        return {"residuals": residuals} if residuals else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the residuals."""
        self._residuals.clear()
        self._saved = {int(index): saved for index, saved in state["residuals"].items()}

    def _steps(self, bucket: ReducibleBucket, levels: NodeLevels) -> Iterator[Work]:
        label = f"gradient bucket {bucket.index}"
        node, cross = levels.node.named(label), levels.cross.named(label)
        layout, gradients = bucket.layout, bucket.gradients
        bounds = levels.lane_bounds(layout)
        yield node.reduce_scatter(gradients, bounds)
        start, stop = levels.own_range(layout)
        if start < stop:
            yield from self._exchange(bucket, gradients[start:stop], cross)
        else:  # so that chains keep in step with those of the node's other ranks
            yield CompletedWork()
        if not bucket.sharded:
            yield node.all_gather(gradients, bounds)
        elif node.size > levels.lanes:
            yield from self._deliver(bucket, levels, node)

    def _exchange(
        self, bucket: ReducibleBucket, lane: Tensor, cross: Collectives
    ) -> Iterator[Work]:
        sums = self._residual(bucket, lane).add(lane, bucket.multiplier)
        nbytes = aligned(self.code.nbytes(len(sums)))
        codes = torch.zeros(cross.size * nbytes, dtype=torch.uint8, device=lane.device)
        by_node = [codes[slot * nbytes :][:nbytes] for slot in map(cross.slot, range(cross.size))]
        self.code.encode(sums, by_node[cross.rank])
        yield cross.all_gather(codes, [slot * nbytes for slot in range(cross.size + 1)])
        total = lane if lane.dtype == sums.dtype else torch.empty_like(sums)
        total.zero_()
        for code in by_node:
            self.code.decode(code, total)
        if total is not lane:
            lane.copy_(total)

    def _residual(self, bucket: ReducibleBucket, lane: Tensor) -> Residual:
        residual = self._residuals.get(bucket.index)
        if residual is None:
            residual = Residual(lane.numel(), sum_dtype(lane.dtype), lane.device)
            if saved := self._saved.pop(bucket.index, None):
                residual.load_state_dict(saved)
            self._residuals[bucket.index] = residual
        return residual

    def _deliver(
        self, bucket: ReducibleBucket, levels: NodeLevels, node: Collectives
    ) -> Iterator[Work]:
        """Bring each rank its shard, on a node where some ranks own no lane."""
        layout, gradients = bucket.layout, bucket.gradients
        ranges = [levels.node_range(layout, lane) for lane in range(levels.lanes)]
        bounds = [0]
        for start, stop in ranges:
            bounds.append(bounds[-1] + stop - start)
        packed = torch.empty(bounds[-1], dtype=gradients.dtype, device=gradients.device)
        if (own := levels.lane) is not None:
            start, stop = ranges[own]
            packed[bounds[own] : bounds[own + 1]] = gradients[start:stop]
        yield node.all_gather(packed, bounds + bounds[-1:] * (node.size - levels.lanes))
        start, stop = layout.shard(bucket.collectives.slot(bucket.collectives.rank))
        for lane, (low, high) in enumerate(ranges):
            if low <= start and stop <= high:
                bucket.shard.copy_(packed[bounds[lane] + start - low :][: stop - start])


class Int8Hook(BetweenNodesHook):
    """Exchanges node sums as integers of 8 bits with a scale for each block: 1.016 bytes each.

    A block with a NaN or an infinity is decoded to NaN. So are fp64 sums beyond the range of fp32.
    """

    code = BlockCode(8)


HOOKS = {"int8": Int8Hook}
