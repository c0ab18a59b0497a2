"""Verification of training on several ranks: its first steps, beside those of one process.

    one process          the steps, alone on rank 0
    other orders         the same three times, with the samples of a batch in another order and each
                         gradient off by up to one rounding: what fp32 sums in another order give,
                         or what a 16-bit wire dtype or autocast does
    all ranks            the same at each stage

A loss, gradient or weight of all ranks is right if its distance from one process is at most
`MARGIN` times the largest that other orders made of it by that step, or one rounding makes. Nothing
is right where there was no gradient or no update, where a stage was not made, or where ranks have
trained on the same samples.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from mntrain.alike.naming import by_value, first_names, naming, odd_ranks
from mntrain.comm import mpi
from mntrain.errors import AgreedError, combined_refusals
from mntrain.train.verify.recorded_steps import (
    Distance,
    RecordedRun,
    RecordedWorld,
    Run,
)
from mntrain.world import World, init
from zero.collectives import AllRanksError
from zero.shard import NonFiniteGradientError

if TYPE_CHECKING:
    from mpi4py import MPI

MARGIN = 16  # four bits beyond what three other orders happen to show
ORDERS = 3
STAGES = (0, 1, 2)
# One rounding to the wire dtype, if it is more than that of the parameters' dtype.
_ROUNDING = {"fp32": 0.0, "bf16": 2.0**-7, "fp16": 2.0**-10}

# Of each step of a rank the digests and the inputs (`RecordedStep`); and its samples.
_RankSteps: TypeAlias = tuple[list[tuple[dict[str, int], list[int]]], int]


class Verdict(NamedTuple):
    """The result of a verification. True if all results are right."""

    right: bool
    text: str

    def __bool__(self) -> bool:
        return self.right


class _Outcome(NamedTuple):
    """The result of a stage, as rank 0 knows it: why it is wrong, or was refused."""

    row: tuple[str, ...]
    wrong: str = ""
    refused: str = ""
    uneven: bool = False  # whether parts of batches were of unequal size


def verify(
    train: Callable[..., Iterable[float] | None],
    *,
    comm: "MPI.Intracomm | None" = None,
    **options: Any,
) -> Verdict:
    """Compare the first steps of a loop on all ranks with those of one process. Collective.

    `train(world, stage=...)` makes the model, the optimizer by `world.optimizer(..., stage=stage)`
    and the loader, and runs some steps, three to ten; it is called several times, in worlds of one
    rank and of all. It may return or yield the loss of each step, the mean over all ranks. Stages
    0, 1 and 2 are compared. `options` are those of `mntrain.init`. Layers of dropout do nothing
    meanwhile, random generators begin with the same seeds each time, and the second batch of a
    DataLoader is as short as its last.

    Prints a table, what was compared and left out, and the verdict on rank 0, and returns it on all
    ranks. An error of the loop at a stage is part of the verdict. Raises AgreedError on all ranks
    for a loop that fails on one process, and on fewer than two ranks.
    """

    def run(world: World, stage: int) -> Iterable[float] | None:
        if not callable(train):
            raise ValueError(f"train is {train!r}: give a function, train(world, stage=...)")
        return train(world, stage=stage)

    return examine(run, comm, options)


def examine(
    run: Run,
    comm: "MPI.Intracomm | None",
    options: dict[str, Any],
    *,
    uneven: bool = True,
    hint: str = "",
) -> Verdict:
    """Run and compare all stages, and return the verdict. Collective.

    If parts of batches are to be `uneven`, a line says if none was. A difference in a loss or a
    gradient at stage 0 ends with `hint`.
    """
    options = {**options, "compress": "none", "gather_dtype": "fp32"}
    alone: list[RecordedRun] = []  # on rank 0, of one process: the first run, those in other orders
    wrong = ""
    patient = {**options, "timeout": None, "warn_after": 1e9}  # while rank 0 alone runs
    with init(comm, **patient) as world:
        if world.size == 1:
            raise AgreedError(
                "verify compares several ranks with one process, and there is one rank: start it "
                "under mpirun or srun, with two ranks or more",
                world.rank,
            )
        with world.agreement():
            if world.master:
                alone, wrong = _run_alone(run, options)
        wrong = world.gather(wrong)[0]
    outcomes = [_Outcome(_row("one process, other orders", *alone[1:]))]
    for stage in () if wrong else STAGES:
        outcomes.append(_compare(run, stage, comm, options, alone, hint=hint))
        if stage == 0 and outcomes[-1].refused:
            outcomes[-1] = outcomes[-1]._replace(wrong=outcomes[-1].refused)
    if alone and uneven and not any(outcome.uneven for outcome in outcomes):
        text = "batches that do not divide among the ranks: world.shard gave none"
        alone[0].left_out.append(text)
    if not wrong:
        wrong = "\n".join(
            f"{outcome.row[0]}: {outcome.wrong}" for outcome in outcomes if outcome.wrong
        )
    with World(comm, **options) as world:
        text = world.gather(_text(outcomes, wrong, alone))[0]
        world.print(text)
    return Verdict(not wrong, text)


def _one_process(options: dict[str, Any]) -> RecordedWorld:
    return RecordedWorld(mpi.comm_of_one(), **{**options, "ranks_per_node": None})


def _run_alone(run: Run, options: dict[str, Any]) -> tuple[list[RecordedRun], str]:
    """Run the steps once, and then in other orders; return the runs, and what is wrong. Local."""
    alone = [first := RecordedRun(keeps=True)]
    with _one_process(options) as world:
        try:
            first.record(run, world, 0)
            if wrong := _nothing(first):
                return alone, wrong
            eps = max(first.rounding, _ROUNDING[options.get("wire_dtype", "fp32")])
            for order in range(1, ORDERS + 1):
                world.order = order
                alone.append(other := RecordedRun(first, jitter=eps))
                other.record(run, world, 0)
        except NonFiniteGradientError as error:
            return [first], f"one process alone: {error}"
        for other in alone[1:]:
            distance = other.steps[0].distances.get("whole gradient", Distance(0.0, eps))
            if not distance.relative <= eps**0.5:  # more than half of the digits
                return alone, (
                    "one process alone has other gradients if the samples of a batch are in "
                    f"another order (by {distance.relative:.1g}): random numbers are drawn in "
                    "forward, as functional dropout does, or for samples as they are read; switch "
                    "them off to verify"
                )
        return alone, ""


def _nothing(first: RecordedRun) -> str:
    """Return why a run of one process has nothing to compare; "" if it has."""
    if not first.steps:
        return "one process alone took no step of an optimizer of world.optimizer"
    if not (first.with_gradient or first.closures):
        return (
            "nothing was compared: in one process alone, no parameter has had a gradient other "
            "than zero in any step; call backward of a loss that depends on the model"
        )
    if not first.updated:
        return (
            "nothing was compared: in one process alone, no step has changed a parameter; give a "
            "learning rate above 0"
        )
    return ""


def _limits(alone: Sequence[RecordedRun]) -> Iterator[dict[str, float]]:
    """Yield, for each step, the largest distance by name that is right."""
    largest: dict[str, float] = {}
    for number in range(len(alone[0].steps)):
        steps = [run.steps[number] for run in alone[1:] if number < len(run.steps)]
        for name, distance in (item for step in steps for item in step.distances.items()):
            largest[name] = max(largest.get(name, 0.0), *distance)
        yield {name: MARGIN * value for name, value in largest.items()}


def _compare(
    run: Run,
    stage: int,
    comm: "MPI.Intracomm | None",
    options: dict[str, Any],
    alone: Sequence[RecordedRun],
    *,
    hint: str,
) -> _Outcome:
    """Run a stage on all ranks, and compare it on rank 0. Collective; the same on all ranks."""
    name, recorded = f"stage {stage}", RecordedRun(alone[0] if alone else None)
    try:
        with RecordedWorld(comm, **options) as world:
            try:
                recorded.record(run, world, stage)
                steps = [(step.digests, step.inputs) for step in recorded.steps]
                by_rank = world.gather((steps, recorded.samples))
            except AllRanksError:
                raise
            except Exception as error:
                failure = world.leave(error, refused=not recorded.steps)
            else:
                found = None
                if alone:
                    wrong = (
                        _another_stage(recorded, stage)
                        or _unequal_ranks(by_rank)
                        or _wrong(recorded, _limits(alone), "" if stage else hint)
                    )
                    uneven = len({samples for _, samples in by_rank}) > 1
                    found = _Outcome(_row(name, recorded), wrong, uneven=uneven)
                outcome = world.gather(found)[0]
                assert outcome is not None, "rank 0 has made it"
                return outcome
        with World(comm, **options) as world:
            failures = world.gather((failure, bool(recorded.steps)))
        why = combined_refusals([text for text, _ in failures])
        begun = any(steps for _, steps in failures)
    except AllRanksError as error:
        why, begun = str(error), bool(recorded.steps)
    row = (name, "", "", "")
    return _Outcome(row, wrong=why) if begun else _Outcome(row, refused=why)


def _another_stage(recorded: RecordedRun, stage: int) -> str:
    """Return which stage was made in place of the one that was asked for; "" if it was made."""
    others = sorted(recorded.stages - {stage})
    if not others:
        return ""
    made = " and ".join(f"stage {other}" for other in others)
    return (
        f"stage {stage} was asked for, and an optimizer of {made} was made: give "
        "world.optimizer(..., stage=stage)"
    )


def _wrong(recorded: RecordedRun, limits: Iterator[dict[str, float]], hint: str) -> str:
    """Return what is wrong first, "" if nothing is; of other than weights with the `hint`."""
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
                hints = _batch_norm_hint(recorded)
                hint = "" if name.startswith("weights") else hint
                if abs(step.factor - 1) > 0.01:
                    hints += (
                        f"; the whole gradient is {step.factor:.3g} times as long, in the same "
                        "direction: a sum in place of a mean, or a division by another count?"
                    )
                return (
                    f"in step {number}, the difference in the {name} is {distance.relative:.1e}, "
                    f"and {limit:.1e} is allowed{hints}{hint}"
                )
    return ""


def _batch_norm_hint(recorded: RecordedRun) -> str:
    names = sorted(recorded.batch_norms)
    if not names:
        return ""
    return (
        f"; layers of BatchNorm ({first_names(names, 3)}) normalize the samples of each rank by "
        "themselves: give the model to world.sync_batchnorm"
    )


def _unequal_ranks(by_rank: Sequence[_RankSteps]) -> str:
    """Return how ranks differ in what must be equal, or are equal in their samples; "" if not."""
    for number, steps in enumerate(zip(*(steps for steps, _ in by_rank), strict=False), 1):
        for name in steps[0][0]:
            digests = {rank: found.get(name, 0) for rank, (found, _) in enumerate(steps)}
            if ranks := odd_ranks(digests):
                return (
                    f"after step {number}, {name} of {naming('rank', ranks)} differs from that of "
                    "the others"
                )
    # A rank without a sample of world.shard has stand-ins, as others may have.
    sharded = any(samples for _, samples in by_rank)
    seen = {
        rank: [inputs for _, inputs in steps]
        for rank, (steps, samples) in enumerate(by_rank)
        if samples or not sharded
    }
    if same := _alike(seen):
        return (
            f"{naming('rank', same)} train on the same samples: give each its part, by world.shard"
        )
    return ""


def _alike(by_rank: dict[int, list[Any]]) -> list[int]:
    """Return the first ranks whose lists are equal, and not empty; [] if there are none."""
    groups = by_value(by_rank)
    return next((ranks for digests, ranks in groups if len(ranks) > 1 and any(digests)), [])


def _row(name: str, *runs: RecordedRun) -> tuple[str, ...]:
    """Return the cells of a table: the largest distance by the first word of its name."""
    found: dict[str, float] = {}
    for step in (step for run in runs for step in run.steps):
        for of, distance in step.distances.items():
            kind = of.partition(" ")[0]
            found[kind] = max(found.get(kind, 0.0), distance.relative)
    cells = (f"{found[k]:.1e}" if k in found else "" for k in ("loss", "gradient", "weights"))
    return (name, *cells)


def _compared(first: RecordedRun) -> list[str]:
    """Return lines about what of a run of one process was compared, and what was not."""
    names, with_gradient, updated = set(first.start), first.with_gradient, first.updated
    what = [f"the gradients of {_parameters(len(with_gradient))}"] if with_gradient else []
    what.append(f"the updates of {_parameters(len(updated))}")
    if first.losses:
        what.insert(0, f"{len(first.losses)} losses")
    missing = [*first.left_out]
    if not first.losses:
        missing.append("losses, since train returned none")
    if first.closures:
        missing.append("gradients that closures make in step")
    elif without := sorted(names - with_gradient):
        missing.append(f"{_parameters(len(without))} without a gradient: {first_names(without, 3)}")
    if idle := sorted(with_gradient - updated):
        missing.append(f"{_parameters(len(idle))} without an update: {first_names(idle, 3)}")
    if not any(step.inputs for step in first.steps):
        missing.append("samples of ranks, which may be the same: no module was called to train")
    if first.dropout:
        missing.append(f"layers of dropout, which did nothing meanwhile: {first.dropout}")
    lines = [f"compared in {len(first.steps)} steps: {', '.join(what)}"]
    return [*lines, *(f"left out: {text}" for text in missing)]


def _parameters(count: int) -> str:
    return f"{count} parameter" + "s" * (count != 1)


def _text(outcomes: Sequence[_Outcome], wrong: str, alone: Sequence[RecordedRun]) -> str:
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
    if alone and len(outcomes) > 1:
        lines += _compared(alone[0])
    but = ", where it is not refused" if any(outcome.refused for outcome in outcomes) else ""
    right = f"right: all ranks train as one process does{but}"
    lines.append(f"wrong:\n{wrong}" if wrong else right)
    return "\n".join(lines)
