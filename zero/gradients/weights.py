"""Weights of the ranks in the mean gradient."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, SupportsFloat

_SHOWN = 5  # parts of batches in an error
DIGEST_BITS = 16  # squares of digests, summed over ranks in fp64, stay exact


@dataclass(eq=False)
class BatchSource:
    """A loader: how many batches were drawn from it, and used by a backward of any optimizer.

    Several optimizers learn of its batches, and not each of them uses all. With `balanced`, ranks
    get unequal parts, which other loaders do not divide alike.
    """

    drawn: int = 0
    used: int = 0  # number of the latest one that was used, from 1
    revision: int = 0  # of the ranks' parts, by which the latest one that was drawn is divided
    balanced: bool = False
    samples: float = 0.0  # of this rank in the latest one that was drawn, whatever they weigh

    def latest(self, own: float, total: float | None, digest: int | None = None) -> "DrawnBatch":
        """Return this rank's part of the latest batch, which was counted in `drawn` before."""
        return DrawnBatch(own, total, digest, self, self.drawn, self.revision, self.samples)


class DrawnBatch(NamedTuple):
    """This rank's part of a global batch that was drawn for training; or a stated weight alone."""

    own: float  # weight of this rank's part; 0 for a stand-in, and for samples without a token
    total: float | None = None  # of the whole batch; None if only its ranks know their parts
    digest: int | None = None  # 16 bits, of the samples of the whole batch, alike on all ranks
    source: BatchSource = BatchSource()
    number: int = 0  # of its source's batches, from 1
    revision: int = 0  # of the ranks' parts, by which it is divided
    samples: float = 0.0  # of this rank's part, if it weighs nothing


@dataclass
class Mean:
    """The parts of batches that a mean is over, so far."""

    begun: bool = False  # a backward of it has begun
    absent: bool = False  # it ends without a backward, a batch and a statement
    averages: bool = False  # it is over all samples of the accumulation
    first: DrawnBatch | None = None  # part
    count: int = 0  # of parts
    samples: float = 0.0  # in them
    latest: float = 1.0  # weight of the latest part, beside those of other ranks
    base: float = 1.0  # of the first part that has one
    digest: int | None = None  # of the batches


class BatchWeight:
    """This rank's weight in a mean over ranks, in samples or tokens. Local.

    A mean is over one backward, or over all of an accumulation. The gradient of each backward is a
    mean over n samples, by one of three statements. `state(n)`: of the coming backward.
    `state(n, multiplier)`: the same, in a mean over all samples of the accumulation.
    `expect(batch)`: if none is stated; a batch holds for every backward until one follows the next
    batch. A backward uses the oldest batch of each source, and batches that wait must not differ.
    Without any, each rank has weight 1.

    Without a `multiplier`, the gradient of an accumulation is the sum of its micro-batches' means
    over ranks, as in a loop of one process. So a rank weighs in each by its part of that batch, n
    of a total, which is taken to the total of the first one. Where the total of this mean's ranks
    is not known, in a group that is not `whole` too, the weight must not change.

    Weights multiply gradients, never losses: a loss may train other optimizers' parameters too, and
    hooks of backward see its gradients. With `every_micro_batch` the gradient of each micro-batch
    is summed over ranks by itself, times `scale`. Without, it is multiplied by `factor` as it
    arrives, and their sum by `scale`.

    Multipliers are divided by `unit`, the power of two nearest above the weight that the ranks of a
    group had together in the last mean. With equal weights that are powers of two, as the number of
    ranks, the sum is the mean, and no pass over memory is left to divide it. A power of two changes
    no bits in the range of a dtype, so `unit` is not part of the state of a run. One rank alone
    never multiplies: its unit is its weight. The range of fp16 is small, so there ranks `agree_on`
    the unit when a mean begins: the sum over ranks is no larger than the mean, and does not vanish
    beside it. With `in_fp16` micro-batches of a mean over all samples are taken to the weight that
    a rank had in the one before, since that of the whole is not known yet.
    """

    def __init__(
        self,
        ranks: int,
        *,
        every_micro_batch: bool = False,
        alone: bool = False,
        whole: bool = True,
    ) -> None:
        self._alone = alone
        self._every_micro_batch = every_micro_batch
        self._unit: float
        self.begin_group(ranks, whole=whole)
        self.in_fp16 = False  # whether gradients accumulate in fp16
        self._stated: float | None = None  # for the backward to come
        self._multiplier: float | None = None  # of its gradient, in a mean over all samples
        self._current: DrawnBatch | None = None  # what the latest statement or batch says
        self._batch: DrawnBatch | None = None  # of the latest backward
        self._drawn: list[DrawnBatch] = []  # that no backward has followed yet
        self._over = False  # a pass over batches has ended, and all of them were used
        self.mean = Mean()
        self.unweighted = 0  # means so far in which no batch and no statement was
        # The weight of the mean over all samples that is held; 0 for a sum of means, or None.
        self.held: float | None = None

    @property
    def stated(self) -> bool:
        """True if the weight of the coming backward was stated."""
        return self._stated is not None

    @property
    def unit(self) -> float:
        """The divisor of multipliers."""
        return self.multiplied or 1.0 if self._alone else self._unit

    @property
    def weight(self) -> float:
        """This rank's weight so far, in samples."""
        if self.mean.absent:
            return 0.0
        return self.mean.samples if self.mean.count else 1.0

    @property
    def multiplied(self) -> float:
        """Factor of this rank's sum of gradients, before it is divided by `unit`."""
        return self.mean.base * self._means

    @property
    def divisor(self) -> float:
        """This rank's addend of what the sum over ranks is divided by."""
        if self.mean.averages or self.mean.absent:
            return self.mean.samples
        return self.multiplied if self.mean.first is None else self.mean.first.own * self._means

    @property
    def micro_batches(self) -> int | None:
        """The number of them in a sum of means, which must be that of other ranks; else None.

        Where each is reduced by itself, their number comes too late to weigh in it, as it does in
        `_means`. A rank without samples has any number.
        """
        if not self._every_micro_batch or self.mean.averages or not self.mean.base:
            return None
        return max(self.mean.count, 1)

    @property
    def _means(self) -> int:
        """Number of micro-batches by which losses that were accumulated were divided already."""
        return 1 if self._every_micro_batch or self.mean.averages else max(self.mean.count, 1)

    @property
    def scale(self) -> float:
        """The multiplier of this rank's gradient before the sum over ranks."""
        return (self.mean.latest if self._every_micro_batch else self.multiplied) / self.unit

    @property
    def factor(self) -> float:
        """The multiplier of a gradient that is added to those of earlier micro-batches."""
        return self.mean.latest / self.mean.base if self.mean.base else 0.0

    @property
    def may_change(self) -> bool:
        """True if `factor` may not be 1 in the coming backward, by what is known of it."""
        if self._every_micro_batch:
            return False
        if self._multiplier is not None:
            base = self._base_of(self._multiplier, averages=True)
            return not self._multiplier or self._multiplier != base
        if self._alone or not self._drawn:
            return False
        batch, first = self._drawn[-1], self.mean.first
        return not batch.own or (first is not None and batch[:2] != first[:2])

    @property
    def coming(self) -> float:
        """The multiplier of the coming backward, as far as it is stated: 0 for a stand-in."""
        if self._multiplier is not None:
            return self._multiplier
        drawn = self._next
        batch = drawn or self._batch
        if batch is not None and not batch.own:
            return 0.0
        if self._stated is not None:
            return self._stated
        part = drawn or self._current
        return 1.0 if part is None else self._relative(part)

    @property
    def lacks_tokens(self) -> bool:
        """True if this rank has samples in the coming backward, and their weight is 0."""
        batch = self._next or self._batch
        return batch is not None and not batch.own and batch.samples > 0

    @property
    def _next(self) -> DrawnBatch | None:
        return next((b for b in self._drawn if b.number >= b.source.used), None)

    def state(self, count: float | None, multiplier: float | None = None) -> None:
        """State the weight of the coming backward; None takes back what no backward has followed.

        Weights of accumulated micro-batches add up. With a `multiplier`, the step is a mean over
        all samples, and the gradient that comes is multiplied by it. Raises RuntimeError if the
        step has other gradients, and ValueError for a negative or infinite count.
        """
        if multiplier is not None:
            self._check_alike(averages=True)
        self._stated = None if count is None else _checked(count)
        self._multiplier = multiplier

    def counted(self, weight: float) -> float:
        """Return the weight of a loss whose samples are those of the coming backward.

        0 for a stand-in. Raises RuntimeError if it is not certain that they are one.
        """
        weight = _checked(weight)
        self._drop_outdated()
        if len({drawn.own > 0 for drawn in self._drawn}) > 1:
            raise _ambiguous(self._drawn)
        batch = self._drawn[0] if self._drawn else self._batch
        return 0.0 if batch is not None and not batch.own else weight

    def _check_alike(self, *, averages: bool) -> None:
        """Raise RuntimeError for a mean over all samples beside a sum of means."""
        held = None if self.held is None else self.held > 0
        if (before := self.mean.averages if self.mean.begun else held) not in (None, averages):
            names = "loss.backward()", "optimizer.backward(loss, weight=...)"
            now, earlier = names if before else reversed(names)
            raise RuntimeError(
                f"{now} follows {earlier} before a step or zero_grad(): call "
                "optimizer.backward(loss, weight=n) for all micro-batches, or loss.backward(), "
                "after optimizer.share(n) if ranks weigh unequally, for all"
            )

    def expect(self, batch: DrawnBatch) -> None:
        """Note the latest batch of a source, which was drawn for a coming backward.

        Batches that another optimizer has used are not for this backward, unless this source has
        more that wait: then it draws ahead, and the other optimizer came first.
        """
        self._over, source = False, batch.source
        ahead = source if source.used < batch.number - 1 else None
        self._drawn = [b for b in self._drawn if b.source is ahead or b.number > b.source.used]
        self._drawn.append(batch)

    def assume(self, batch: DrawnBatch) -> None:
        """Let the latest batch of a source hold until a backward follows the next one."""
        self._batch = self._current = batch

    def _drop_outdated(self) -> None:
        """Drop batches that this optimizer has left out: another one has used a later one."""
        self._drawn = [batch for batch in self._drawn if batch.number >= batch.source.used]

    def forget(self, *, drawn: bool) -> None:
        """Forget the batch of the latest backward; with `drawn` also those not used yet.

        Without `drawn`, the next backward must follow a batch or a statement.
        """
        self._over = not drawn and (self._over or self._batch is not None)
        self._batch = self._current = None
        if drawn:
            self._drawn.clear()

    def drop(self, source: BatchSource) -> None:
        """Drop the batches of a source that no backward has followed yet."""
        self._drawn = [batch for batch in self._drawn if batch.source is not source]

    def begin_backward(self) -> None:
        """Give the backward that begins its weight. RuntimeError if that is not certain."""
        stated, multiplier = self._stated, self._multiplier
        self._check_alike(averages=multiplier is not None)
        self._drop_outdated()
        fresh = bool(self._drawn)
        if self._over and not (self._alone or fresh or self.mean.count or stated is not None):
            raise RuntimeError(
                "this backward follows no batch, since the pass over world.shard has ended: batches"
                " that were kept from it (by itertools.cycle, or a cache) have lost their weights. "
                "Iterate over the shard anew, or state the weight by optimizer.share(n); before a "
                "loss of other data, call optimizer.forget_batches()"
            )
        self.mean.begun, self.mean.averages = True, multiplier is not None
        self._stated = self._multiplier = None
        if fresh:
            if stated is None:
                _expect_like(self._drawn)
            self._batch = self._current = self._drawn[0]
            self._use_oldest()
        part = self._current
        if stated is not None:  # a stand-in counts nothing
            part = DrawnBatch(0.0 if self._batch is not None and not self._batch.own else stated)
            self._current = part if multiplier is None else self._current
        begins = fresh or stated is not None or self.mean.first is None  # another micro-batch
        if begins and part is not None:
            self._take_part(part, multiplier)

    def _take_part(self, part: DrawnBatch, multiplier: float | None) -> None:
        """Weigh another micro-batch. Raises RuntimeError if its weight changes without a total."""
        first = self.mean.first = self.mean.first or part
        self.mean.latest = self._relative(part) if multiplier is None else multiplier
        known = first.total is not None and part.total is not None
        if multiplier is None and not known and self._alone and part.own and first.own:
            self.mean.latest = first.own  # this rank has all of both
        uncertain = multiplier is None and not (known and self._whole)
        if uncertain and self.mean.latest != first.own:
            raise RuntimeError(
                f"this rank weighs {first.own:g} in one micro-batch of an accumulation, and "
                f"{part.own:g} in another, and what the ranks of this step weigh together in each "
                "is not known (share(n), world.shard(weight=) and sync= do not say it): call "
                "optimizer.backward(loss, weight=n) for every micro-batch"
            )
        self.mean.base = self._base_of(self.mean.latest, averages=self.mean.averages)
        self.mean.count += 1
        self.mean.samples += part.own

    def _base_of(self, latest: float, *, averages: bool) -> float:
        """Return the weight to which that of another micro-batch is taken."""
        if self.mean.count and self.mean.base:
            return self.mean.base
        return max(latest, self._usual) if latest and averages and self.in_fp16 else latest

    def agree_on(self, divisor: float) -> None:
        """Take the unit of the sum of the ranks' divisors. The same on all ranks."""
        self._unit, self.agreed = _power_of_two(divisor or 1.0), True

    def _relative(self, part: DrawnBatch) -> float:
        """Return this rank's weight in a micro-batch, taken to the total of the first one."""
        first = self.mean.first
        if first is None or first.total is None or part.total is None:
            return part.own
        return part.own * first.total / part.total

    def _use_oldest(self) -> None:
        """Take the oldest batch of each source from those that were drawn."""
        oldest: dict[int, DrawnBatch] = {}
        for batch in self._drawn:
            oldest.setdefault(id(batch.source), batch)
        for batch in oldest.values():
            self._drawn.remove(batch)
            batch.source.used = max(batch.source.used, batch.number)
            if batch.digest is not None:
                before = self.mean.digest or 0
                self.mean.digest = (before * 31 + batch.digest) % (1 << DIGEST_BITS)

    def finish(self) -> None:
        """Note that nothing more is added to this mean: a rank may have had no backward in it."""
        if not self.mean.begun:
            held, self.held, self._over = self.held, None, False
            self.begin_backward()
            self.held = held
            self.mean.absent = self.mean.first is None
        self._stated = self._multiplier = None  # of a backward that did not follow

    def begin_group(self, ranks: int, *, whole: bool) -> None:
        """Begin to count the weights of a group of `ranks`.

        It is `whole` if a batch is divided between its ranks only.
        """
        self._ranks, self._unit, self._whole = ranks, _power_of_two(ranks), whole
        self.agreed = False  # whether the unit is that of this mean
        self._usual = 0.0  # mean weight of a rank in the last mean over all samples, or 0

    def discard(self) -> None:
        """Forget what was stated for gradients that have arrived."""
        self.mean = Mean()
        self.end_step()

    def reset(self, usual: float, held: float | None) -> None:
        """Begin another mean; `usual` is the mean weight of a rank in the last one, `held` is."""
        if usual:
            self.agree_on(usual * self._ranks)
            self._usual = _power_of_two(usual) if self.mean.averages else self._usual
        self.agreed = False
        self.unweighted += self.mean.first is None and not self.mean.absent
        self.mean = Mean()
        self.held = held

    def end_step(self) -> None:
        """Begin another step: statements hold for one step, a batch until the next one."""
        self._current, self.held = self._batch, None


def _expect_like(drawn: Sequence[DrawnBatch]) -> None:
    """Raise RuntimeError unless a rank has one part of batches: of balanced loaders, on all."""
    sources = {id(batch.source) for batch in drawn}
    if len(sources) > 1 and any(batch.source.balanced for batch in drawn):
        raise RuntimeError(
            f"batches of {len(sources)} loaders were drawn before this backward, and "
            "world.shard with balance=True or divided=True gives a rank another part of each, so "
            "its weight is not certain: state the weight by optimizer.share(n), draw from one "
            "loader at a time, or leave the option out"
        )
    if len({(b.own / (b.total or 1.0), b.total is None, b.revision) for b in drawn}) > 1:
        raise _ambiguous(drawn)


def _ambiguous(drawn: Sequence[DrawnBatch]) -> RuntimeError:
    texts = [f"{b.own:g}" if b.total is None else f"{b.own:g} of {b.total:g}" for b in drawn]
    counts = Counter(texts)
    shown = [f"{text} (in {count})" if count > 1 else text for text, count in counts.items()]
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    parts = ", ".join(shown[:_SHOWN]) + more
    revised = len({batch.revision for batch in drawn}) > 1
    why = " (balance=True has revised its parts)" if revised else ""
    return RuntimeError(
        f"{len(drawn)} batches were drawn before this backward, of which this rank has {parts} "
        f"samples{why}, so its weight is not certain: draw one batch at a time, leave out the last "
        "incomplete one (drop_last=True), call optimizer.forget_batches() where a batch is not "
        "trained (world.shard(train=False) where none of a loader is), or state the weight by "
        "optimizer.share(n)"
    )


def _power_of_two(count: float) -> float:
    return 2.0 ** math.ceil(math.log2(count))


def _checked(count: SupportsFloat) -> float:
    """Return a count, of any type, as a float. Raises ValueError."""
    if not (isinstance(count, SupportsFloat) and 0 <= float(count) < math.inf):
        raise ValueError(f"a share of {count!r} samples: give a finite number, 0 or more")
    return float(count)
