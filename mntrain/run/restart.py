"""The checkpoint from which a start of a run goes on, and what is told of it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from mntrain import checkpoint
from mntrain.checkpoint import FoundCheckpoint
from mntrain.ranks import Ranks
from mntrain.run.directory import RunDirectory


def find_restart(
    world: Ranks, directory: RunDirectory, origin: FoundCheckpoint | None = None
) -> FoundCheckpoint | None:
    """Return the newest sound checkpoint of a run, also in the nodes' memory. Collective.

    The same on all ranks. `origin`, with which the run has begun, counts unless the run has a later
    step. Warns of newer ones that are not taken, and if nodes may have some in memory, tells what
    was used, and how many steps are lost. Raises AgreedError as `checkpoint.newest`.
    """
    local = directory.local
    found = checkpoint.newest(world, directory.path, local)
    if origin is not None and (found is None or found.manifest.step <= origin.manifest.step):
        return origin
    passed = passed_over(found.skipped if found else local.passed_over if local else {})
    for text in passed:
        world.output.warn(text)
    if local and (told := restored_from(found, directory.last_step, passed)):
        world.print(told)
    return found


def passed_over(skipped: Mapping[Path, str]) -> list[str]:
    """Return warnings of checkpoints that were not taken, with their reasons. Pure."""
    return [f"{path.name} was passed over: {reason}" for path, reason in skipped.items()]


def restored_from(found: FoundCheckpoint | None, last_step: int, passed: Sequence[str] = ()) -> str:
    """Return what is told of a restart: what was used, and how many steps are lost. Pure.

    `last_step` is that in metrics.jsonl, and `passed` is from `passed_over`. Empty where a run
    begins: without a checkpoint, a step, and any that was passed over.
    """
    if not (found or last_step or passed):
        return ""
    step = found.manifest.step if found else 0
    source = "nothing: no step is whole in the nodes' memory, and the run has no checkpoint"
    if found:
        source = f"the run's checkpoint of step {step}: no newer step is whole in the nodes' memory"
        if found.from_nodes:
            source = f"step {step} in the nodes' memory, {found.from_nodes}"
    lost = last_step - step
    again = "the steps after it are taken again"  # of a run without metrics, nobody knows how many
    if lost >= 0:
        again = f"{lost} step{'s' * (lost != 1)} of metrics.jsonl after it"
        again += f" {'is' if lost == 1 else 'are'} taken again"
    return f"restored {source}; {again}"
