"""Verification of training on several ranks: its first steps, beside those of one process.

    one process          the steps, alone on rank 0
    other orders         the same three times, with the samples of a batch in another order and each
                         gradient off by up to one rounding: what fp32 sums in another order give
    all ranks            the same at each stage, and more by request

A loss, gradient or weight of all ranks is right if its distance from one process is at most
`MARGIN` times the largest that other orders made of it by that step, or one rounding makes.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from mntrain.checks.finding import naming
from mntrain.comm import algorithms, mpi
from mntrain.config import CommConfig
from mntrain.data.source import rebuilt
from mntrain.errors import AgreedError
from mntrain.train.verify.recorded_steps import Distance, RecordedRun, Run
from mntrain.world import World, init
from zero.agreement import differing
from zero.norms import NonFiniteGradientError

if TYPE_CHECKING:
    from mpi4py import MPI

MARGIN = 16  # four bits beyond what three other orders happen to show
ORDERS = 3
# One rounding to the wire dtype of a variant, beside that of the parameters' dtype.
_JITTER = {"fp32": 0.0, "bf16": 2.0**-7, "fp16": 2.0**-10}


class Variant(NamedTuple):
    """One way to run the steps on all ranks."""

    name: str
    options: dict[str, Any]  # of the steps, such as the stage
    comm: dict[str, Any] = {}  # noqa: RUF012 - of the world; never changed


class Verdict(NamedTuple):
    """The result of a verification. True if all results are right."""

    right: bool
    text: str

    def __bool__(self) -> bool:
        return self.right


class _Outcome(NamedTuple):
    """The result of a variant, as rank 0 knows it: why it is wrong, or was refused."""

    row: tuple[str, ...]
    wrong: str = ""
    refused: str = ""


def verify(
    train: Callable[..., Iterable[float] | None],
    *,
    comm: "MPI.Intracomm | None" = None,
    all: bool = False,
    **options: Any,
) -> Verdict:
    """Compare the first steps of a loop on all ranks with those of one process. Collective.

    `train(world, stage=...)` makes the model, the optimizer by `world.optimizer(..., stage=stage)`
    and the loader, and runs some steps, three to ten; it is called several times, in worlds of one
    rank and of all. It may return or yield the loss of each step, the mean over all ranks. Stages
    0, 1 and 2 are compared; with `all` the other algorithms and wire dtypes, too. `options` are
    those of `mntrain.init`. Layers of dropout do nothing meanwhile, and random generators begin
    with the same seeds each time.

    Prints a table and the verdict on rank 0, and returns it on all ranks. Raises AgreedError on all
    ranks for a loop that fails on one process, and on fewer than two ranks.
    """

    def run(world: World, given: dict[str, Any], order: int) -> Iterable[float] | None:
        if not callable(train):
            raise ValueError(f"train is {train!r}: give a function, train(world, stage=...)")
        return train(world, **given)

    return examine(run, variants(all=all), comm, options)


def variants(*, all: bool) -> list[Variant]:
    """Return what is compared with one process: the stages, or `all`."""
    found = [Variant(f"stage {stage}", {"stage": stage}) for stage in (0, 1, 2)]
    if all:
        found += [
            Variant(f"stage 0, {name}", {"stage": 0}, {"algorithm": name})
            for name in algorithms.names()
            if name != CommConfig().algorithm
        ]
        found += [
            Variant(f"stage {s}, {dtype} between nodes", {"stage": s}, {"wire_dtype": dtype})
            for dtype in ("bf16", "fp16")
            for s in (0, 2)
        ]
    return found


def examine(
    run: Run,
    chosen: Sequence[Variant],
    comm: "MPI.Intracomm | None",
    options: dict[str, Any],
    also: Callable[[World, RecordedRun], str] | None = None,
) -> Verdict:
    """Run and compare all variants, and return the verdict. Collective.

    `also` is called on rank 0 in the world of one process with the first run, and returns what is
    wrong there.
    """
    options = {**options, "compress": "none", "gather_dtype": "fp32"}
    alone: _Alone | None = None  # on rank 0
    wrong = ""
    patient = {**options, "timeout": None, "warn_after": 1e9}  # while rank 0 alone runs
    with init(comm, **patient) as world:
        if world.size == 1:
            raise AgreedError(
                "verify compares several ranks with one process, and there is one rank: start it "
                "under mpirun or srun, with two ranks or more",
                world.rank,
            )
        if len(world.topology.nodes) == 1:
            chosen = [variant for variant in chosen if "wire_dtype" not in variant.comm]
        with world.agreement():
            if world.master:
                alone, wrong = _run_alone(run, options, chosen, also)
        wrong = world.gather(wrong)[0]
    orders = alone.others[0.0] if alone else ()
    outcomes = [_Outcome(_row("one process, other orders", *orders))]
    for variant in () if wrong else chosen:
        outcomes.append(_compare(run, variant, comm, options, alone))
        if variant is chosen[0] and outcomes[-1].refused:
            outcomes[-1] = outcomes[-1]._replace(wrong=outcomes[-1].refused)
    if not wrong:
        wrong = "\n".join(
            f"{outcome.row[0]}: {outcome.wrong}" for outcome in outcomes if outcome.wrong
        )
    with World(comm, **options) as world:
        text = world.gather(_text(outcomes, wrong, alone))[0]
        world.print(text)
    return Verdict(not wrong, text)


class _Alone(NamedTuple):
    """The runs of one process, on rank 0."""

    first: RecordedRun
    divided: dict[int, RecordedRun]  # the same with other micro-batches, by size
    others: dict[float, list[RecordedRun]]  # in other orders, by further jitter


def _jitter(options: dict[str, Any], variant: Variant) -> float:
    """Return one rounding to the dtype in which gradients travel."""
    return _JITTER[{**options, **variant.comm}.get("wire_dtype", "fp32")]


def _run_alone(
    run: Run,
    options: dict[str, Any],
    chosen: Sequence[Variant],
    also: Callable[[World, RecordedRun], str] | None,
) -> tuple[_Alone, str]:
    """Run the steps once, and then in other orders; return the runs, and what is wrong. Local."""
    alone = _Alone(RecordedRun(keeps=True), {}, {0.0: []})
    with _OneProcess(mpi.comm_of_one(), **{**options, "ranks_per_node": None}) as world:
        alone.first.record(run, world, {"stage": 0})
        if not alone.first.steps:
            return alone, "one process alone took no step of an optimizer of world.optimizer"
        for size in {v.options["micro"] for v in chosen if "micro" in v.options}:
            alone.divided[size] = RecordedRun(keeps=True)
            alone.divided[size].record(run, world, {"stage": 0, "micro": size})
        eps = max(torch.finfo(p.dtype).eps for p in alone.first.start.values())
        for jitter in {0.0, *(_jitter(options, variant) for variant in chosen)}:
            alone.others[jitter] = []
            for order in range(1, ORDERS + 1):
                world.order = order
                other = RecordedRun(alone.first, jitter=max(jitter, eps))
                other.record(run, world, {"stage": 0}, order)
                alone.others[jitter].append(other)
        world.order = 0
        for other in alone.others[0.0]:
            distance = other.steps[0].distances.get("whole gradient", Distance(0.0, eps))
            if not distance.relative <= eps**0.5:  # more than half of the digits
                return alone, (
                    "one process alone has other gradients if the samples of a batch are in "
                    f"another order (by {distance.relative:.1g}): random numbers are drawn in "
                    "forward, as functional dropout does, or for samples as they are read; switch "
                    "them off to verify"
                )
        return alone, "" if also is None else also(world, alone.first)


def _limits(alone: _Alone, jitter: float) -> Iterator[dict[str, float]]:
    """Yield, for each step, the largest distance by name that is right."""
    largest: dict[str, float] = {}
    for number in range(len(alone.first.steps)):
        steps = [run.steps[number] for run in alone.others[jitter] if number < len(run.steps)]
        for name, distance in (item for step in steps for item in step.distances.items()):
            largest[name] = max(largest.get(name, 0.0), *distance)
        yield {name: MARGIN * value for name, value in largest.items()}


class _OneProcess(World):
    """A world of one rank, whose shards hand out the samples of a batch in another `order`."""

    order = 0

    def shard(self, loader: Iterable[Any], *args: Any, **options: Any) -> Any:
        """Return the shard of a loader, as `World.shard`."""
        if not self.order or getattr(loader, "batch_sampler", None) is None:
            return super().shard(loader, *args, **options)
        if type(loader) is not DataLoader:
            return super().shard(loader, *args, **options)
        reordered = self.__dict__.setdefault("_reordered", {})
        key = id(loader), self.order
        if key not in reordered:  # the same loader in each epoch
            shuffled = _Shuffled(loader.batch_sampler, self.order)
            reordered[key] = loader, rebuilt(loader, batch_sampler=shuffled)
        return super().shard(reordered[key][1], *args, **options)


class _Shuffled:
    """A batch sampler whose batches are those of another one, in another order each."""

    def __init__(self, batches: Any, order: int) -> None:
        self._batches, self._draws = batches, random.Random(order)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._batches, name)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[Any]]:
        for batch in self._batches:
            yield self._draws.sample(list(batch), len(batch))


def _compare(
    run: Run,
    variant: Variant,
    comm: "MPI.Intracomm | None",
    options: dict[str, Any],
    alone: _Alone | None,
) -> _Outcome:
    """Run a variant on all ranks, and compare it on rank 0. Collective; the same on all ranks."""
    micro = variant.options.get("micro", 0)
    recorded = RecordedRun(alone.divided.get(micro, alone.first) if alone else None)
    try:
        with World(comm, **{**options, **variant.comm}) as world:
            recorded.record(run, world, variant.options)
            by_rank = world.gather([(step.digests, step.inputs) for step in recorded.steps])
            found = None
            if alone:
                limits = _limits(alone, _jitter(options, variant))
                wrong = _unequal_ranks(by_rank) or _wrong(recorded, limits)
                found = _Outcome(_row(variant.name, recorded), wrong)
            outcome = world.gather(found)[0]
            assert outcome is not None, "rank 0 has made it"
            return outcome
    except (AgreedError, NonFiniteGradientError) as error:
        why = {"wrong" if recorded.steps else "refused": str(error)}
        return _Outcome((variant.name, "", "", ""), **why)


def _wrong(recorded: RecordedRun, limits: Iterator[dict[str, float]]) -> str:
    """Return what is wrong first; "" if nothing is."""
    first = recorded.first
    assert first is not None, "rank 0 has run alone"
    if len(recorded.steps) != len(first.steps):
        return (
            f"{len(recorded.steps)} steps were taken, and {len(first.steps)} by one process alone"
        )
    for number, (step, allowed) in enumerate(zip(recorded.steps, limits, strict=True), 1):
        for name, distance in step.distances.items():
            limit = allowed.get(name, MARGIN * distance.rounding)
            if not distance.relative <= limit:
                hint = ""
                if abs(step.factor - 1) > 0.01:
                    hint = (
                        f"; the whole gradient is {step.factor:.3g} times as long, in the same "
                        "direction: a sum in place of a mean, or a division by another count?"
                    )
                return (
                    f"in step {number}, the difference in the {name} is {distance.relative:.1e}, "
                    f"and {limit:.1e} is allowed{hint}"
                )
    return ""


def _unequal_ranks(by_rank: Sequence[Sequence[tuple[dict[str, int], list[int]]]]) -> str:
    """Return how ranks differ in what must be equal, or are equal in their samples; "" if not."""
    for number, steps in enumerate(zip(*by_rank, strict=False), 1):
        for name in steps[0][0]:
            digests = {rank: digests.get(name, 0) for rank, (digests, _) in enumerate(steps)}
            if ranks := differing(digests):
                return (
                    f"after step {number}, {name} of {naming('rank', ranks)} differs from that of "
                    "the others"
                )
    inputs = [[seen for _, seen in steps] for steps in by_rank]
    for rank, seen in enumerate(inputs):
        same = [other for other, its in enumerate(inputs) if its == seen and any(seen)]
        if len(same) > 1 and same[0] == rank:
            return (
                f"{naming('rank', same)} train on the same samples: give each its part, by "
                "world.shard"
            )
    return ""


def _row(name: str, *runs: RecordedRun) -> tuple[str, ...]:
    """Return the cells of a table: the largest distance by the first word of its name."""
    found: dict[str, float] = {}
    for step in (step for run in runs for step in run.steps):
        for of, distance in step.distances.items():
            kind = of.partition(" ")[0]
            found[kind] = max(found.get(kind, 0.0), distance.relative)
    cells = (f"{found[k]:.1e}" if k in found else "" for k in ("loss", "gradient", "weights"))
    return (name, *cells)


def _text(outcomes: Sequence[_Outcome], wrong: str, alone: _Alone | None) -> str:
    """Return the table and the verdict."""
    head = ("largest difference, relative", "loss", "gradients", "weights")
    rows = [head, *(outcome.row for outcome in outcomes)]
    width = max(len(row[0]) for row in rows)
    lines = [f"{row[0]:<{width}}  {row[1]:>9}  {row[2]:>9}  {row[3]:>9}".rstrip() for row in rows]
    for outcome, index in zip(outcomes, range(1, len(rows)), strict=True):
        if outcome.refused:
            lines[index] += f"  refused: {outcome.refused}"
        elif outcome.wrong:
            lines[index] += "  wrong"
    lines.append(
        f"allowed is {MARGIN} times what {ORDERS} other orders make of each parameter, or one "
        "rounding"
    )
    if alone and alone.first.dropout:
        lines.append(f"layers of dropout that did nothing meanwhile: {alone.first.dropout}")
    but = ", where it is not refused" if any(outcome.refused for outcome in outcomes) else ""
    right = f"right: all ranks train as one process does{but}"
    lines.append(f"wrong:\n{wrong}" if wrong else right)
    return "\n".join(lines)
