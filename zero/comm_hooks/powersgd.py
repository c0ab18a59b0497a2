"""PowerSGD: matrices of gradients travel between nodes as products of two thin ones.

A matrix M of m x n sums is approximated by P Q^T, where P has m x r elements and Q n x r. In every
step, one iteration of a power method improves the Q of the step before:

    P = sum over nodes of M Q  | orthonormal columns  | Q = sum over nodes of M^T P  | P Q^T

What each node's own P Q^T lacks is added to its next step's sums. Lanes cut parameters, so a matrix
consists of the whole rows of one parameter in one lane: each lane finds the factors of its own
rows, with no message between lanes. A parameter of more than two dimensions is a matrix of its
first one and of all others. Vectors, cut rows, and matrices that would save less than
`least_ratio` travel as they are.

Source: Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for
Distributed Optimization", NeurIPS 2019, arXiv 1905.13727.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from zero.between_nodes import BetweenNodesHook, sum_dtype
from zero.codes import RUN
from zero.collectives import Collectives, Work
from zero.comm_hooks import ReducibleBucket
from zero.layout import Bucket
from zero.node_levels import NodeLevels

DEPENDENT = 1e-10  # the part of a column's square below which it counts as a sum of others


@dataclass(frozen=True)
class Block:
    """A matrix in a lane, row by row from element `start` on."""

    start: int
    rows: int
    columns: int

    @property
    def stop(self) -> int:
        """The element after the last one."""
        return self.start + self.rows * self.columns


@dataclass(frozen=True)
class LanePlan:
    """The matrices of a lane, in order; the elements between them travel as they are."""

    numel: int
    blocks: tuple[Block, ...]

    @cached_property
    def rest(self) -> list[tuple[int, int]]:
        """The ranges of elements that lie in no matrix."""
        ends = [0, *(end for block in self.blocks for end in (block.start, block.stop)), self.numel]
        return [(low, high) for low, high in list(pairwise(ends))[::2] if low < high]


def plan_lane(layout: Bucket, start: int, stop: int, rank: int, least_ratio: float) -> LanePlan:
    """Return the matrices between two elements of a bucket. Pure."""
    blocks = []
    for piece in layout.pieces(start, stop):
        if len(piece.spec.shape) < 2:
            continue
        columns = piece.spec.numel // piece.spec.shape[0]
        first, last = -(-piece.low // columns), piece.high // columns
        rows = last - first
        if rows > 0 and rows * columns >= least_ratio * rank * (rows + columns):
            at = piece.start + first * columns - piece.low - start
            blocks.append(Block(at, rows, columns))
    return LanePlan(stop - start, tuple(blocks))


class PowerSGDHook(BetweenNodesHook):
    """Exchanges factors of rank `rank`, with error feedback, from step `start_step` on.

    Steps before, which are few, reduce without compression: gradients change fast at first. The
    factors are in fp32, of fp64 gradients in fp64. Products beyond their range are not finite.
    """

    collectives_per_lane = 2

    def __init__(
        self, rank: int = 4, start_step: int = 100, least_ratio: float = 2.0, seed: int = 0
    ) -> None:
        super().__init__()
        if rank < 1 or start_step < 0 or not least_ratio >= 1:
            raise ValueError(
                f"rank {rank}, start_step {start_step}, least_ratio {least_ratio}: give a rank and "
                "a ratio of at least 1, and a step of at least 0"
            )
        self.rank, self.start_step = rank, start_step
        self.least_ratio, self.seed = float(least_ratio), seed
        self._taken = 0  # that were taken
        self._plans: dict[int, LanePlan] = {}  # by bucket
        self._factors: dict[int, list[Tensor]] = {}  # Q of each matrix, of the last step taken
        self._next_factors: dict[int, list[Tensor]] = {}

    def __call__(self, bucket: ReducibleBucket) -> Work:
        """Start to sum a bucket."""
        return bucket.reduce() if self._taken < self.start_step else super().__call__(bucket)

    def end_step(self, *, taken: bool) -> None:
        """Keep what a step that was taken has left."""
        super().end_step(taken=taken)
        if taken:
            self._taken += 1
            self._factors |= self._next_factors
        self._next_factors.clear()

    def nbytes(self) -> int:
        """Return the bytes of residuals and factors."""
        return super().nbytes() + sum(q.nbytes for qs in self._factors.values() for q in qs)

    def expected_nbytes(self, plan: Sequence[Bucket], levels: NodeLevels | None) -> int:
        """Return what `nbytes` will be after a step with compression."""
        total = super().expected_nbytes(plan, levels)
        if total and levels is not None:
            for bucket in plan:
                lane = plan_lane(bucket, *levels.own_range(bucket), self.rank, self.least_ratio)
                columns = sum(block.columns for block in lane.blocks)
                if not bucket.dtype.is_complex:
                    total += columns * self.rank * sum_dtype(bucket.dtype).itemsize
        return total

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps, the residuals and the factors."""
        factors = {str(index): list(qs) for index, qs in self._factors.items()}
        return {"residuals": {}, **super().state_dict(), "steps": self._taken, "factors": factors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore them; factors of another rank are found anew."""
        super().load_state_dict(state)
        self._taken = int(state["steps"])
        self._factors = {int(index): list(qs) for index, qs in state["factors"].items()}

    def reset(self) -> None:
        """Forget the residuals, the factors and the number of steps."""
        super().reset()
        self._taken = 0
        self._factors.clear()
        self._next_factors.clear()

    def _exchange(
        self, bucket: ReducibleBucket, lane: Tensor, cross: Collectives
    ) -> Iterator[Work]:
        plan = self._plan(bucket)
        sums = self._residual(bucket, lane).add(lane, bucket.multiplier)
        matrices = [sums[b.start : b.stop].view(b.rows, b.columns) for b in plan.blocks]
        shapes = [(sum(high - low for low, high in plan.rest), 1)]
        shapes += [(block.rows, self.rank) for block in plan.blocks]
        message, (rest, *lefts) = _message(shapes, sums)
        torch.cat([sums[low:high] for low, high in plan.rest] or [sums[:0]], out=rest.view(-1))
        for low, high in plan.rest:
            sums[low:high] = 0.0  # nothing of it remains
        for matrix, right, left in zip(
            matrices, self._right_factors(bucket.index, plan, sums), lefts, strict=True
        ):
            torch.mm(matrix, right, out=left)
        yield cross.all_reduce(message)
        lefts = [orthonormal(left) for left in lefts]
        second, rights = _message([(block.columns, self.rank) for block in plan.blocks], sums)
        for matrix, left, right in zip(matrices, lefts, rights, strict=True):
            torch.mm(matrix.t(), left, out=right)
            multiply(left, right, matrix, subtract=True)  # as it is decoded, to the bit
        yield cross.all_reduce(second)
        parts = rest.view(-1).split([high - low for low, high in plan.rest])
        for (low, high), part in zip(plan.rest, parts, strict=True):
            lane[low:high] = part
        for block, left, right in zip(plan.blocks, lefts, rights, strict=True):
            multiply(left, right, lane[block.start : block.stop].view(block.rows, block.columns))
        self._next_factors[bucket.index] = [
            self._refilled(right, bucket.index, number) for number, right in enumerate(rights)
        ]

    def _plan(self, bucket: ReducibleBucket) -> LanePlan:
        if bucket.index not in self._plans:
            assert bucket.levels is not None
            ends = bucket.levels.own_range(bucket.layout)
            self._plans[bucket.index] = plan_lane(bucket.layout, *ends, self.rank, self.least_ratio)
        return self._plans[bucket.index]

    def _right_factors(self, index: int, plan: LanePlan, like: Tensor) -> list[Tensor]:
        """Return the Q of each matrix from the last step, or a random one."""
        known = self._next_factors.get(index) or self._factors.get(index, [])
        shapes = [(block.columns, self.rank) for block in plan.blocks]
        if [tuple(right.shape) for right in known] == shapes:
            return [right.to(like) for right in known]
        return [
            self._refilled(like.new_zeros(shape), index, number)
            for number, shape in enumerate(shapes)
        ]

    def _refilled(self, right: Tensor, index: int, number: int) -> Tensor:
        """Return a Q in which columns of zeros, which would stay so, or of NaN are random."""
        empty = (right == 0).all(0) | ~right.isfinite().all(0)
        if bool(empty.any()):
            place = self.seed, self._taken, index, number
            generator = torch.Generator().manual_seed(hash(place) % 2**63)
            filling = torch.randn(right.shape, generator=generator)
            right = torch.where(empty, filling.to(right), right)
        return right


def orthonormal(matrix: Tensor) -> Tensor:
    """Return a matrix whose columns are an orthonormal basis of those of `matrix`, or zeros.

    A column that others span up to rounding becomes zeros; one that is not finite gives NaN. Bits
    do not depend on the number of threads or the instruction set: sums are made of elementwise
    operations, in fp64.
    """
    wide = matrix.double()
    count = wide.shape[1]
    pairs = [(i, j) for i in range(count) for j in range(i, count)]
    products = wide[:, [i for i, _ in pairs]] * wide[:, [j for _, j in pairs]]
    while len(products) > 1:
        half = len(products) // 2
        total = products[:half] + products[half : 2 * half]
        total[:1] += products[2 * half :].sum(0)  # of one row or none
        products = total
    gram = dict(zip(pairs, products[0].tolist(), strict=True))
    basis: list[Tensor] = []
    upper: dict[tuple[int, int], float] = {}  # the Cholesky factor of the Gram matrix
    for j in range(count):
        column, square = wide[:, j].clone(), gram[j, j]
        for i in range(j):
            inner = gram[i, j] - sum(upper[k, i] * upper[k, j] for k in range(i))
            upper[i, j] = inner / upper[i, i] if upper[i, i] else 0.0
            square -= upper[i, j] ** 2
            column -= basis[i] * upper[i, j]
        if not math.isfinite(square):
            upper[j, j] = math.nan
        else:
            upper[j, j] = math.sqrt(square) if square > DEPENDENT * gram[j, j] else 0.0
        basis.append(column / upper[j, j] if upper[j, j] else torch.zeros_like(column))
    return torch.stack(basis, dim=1).to(matrix.dtype)


def multiply(left: Tensor, right: Tensor, out: Tensor, *, subtract: bool = False) -> None:
    """Write left times the transpose of `right`, or subtract it from `out`.

    The same bits for any rows and threads, and whatever precision torch has for matrix products.
    """
    rows = max(1, RUN // out.shape[1]) if out.device.type == "cpu" else len(out)
    for part, target in zip(left.split(rows), out.split(rows), strict=True):
        total = torch.outer(part[:, 0], right[:, 0])
        for column in range(1, left.shape[1]):
            total += torch.outer(part[:, column], right[:, column])
        if subtract:
            target.sub_(total)
        else:
            target.copy_(total)


def _message(shapes: Sequence[tuple[int, int]], like: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return a flat tensor, and views of it with these shapes, end to end."""
    flat = like.new_empty(sum(rows * columns for rows, columns in shapes))
    parts = flat.split([rows * columns for rows, columns in shapes]) if shapes else ()
    return flat, [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


HOOKS = {"powersgd": PowerSGDHook}
