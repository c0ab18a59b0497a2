"""Finding, verifying and loading checkpoints, by any number of ranks and at any stage."""

import math
import os
import shutil
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from stat import S_ISREG
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor, nn

from mntrain.checkpoint.format import (
    ABSENT,
    FILE,
    FILES,
    MODEL,
    OPTIMIZER,
    RANDOM,
    REPLICAS,
    ChecksummedRange,
    Manifest,
    ParameterState,
    checkpoint_name,
    open_tensors,
    read_manifest,
    replica_name,
    step_of,
)
from mntrain.checkpoint.model_state import (
    copies_in,
    load_values,
    parameters_in,
    why_not_taken,
)
from mntrain.checkpoint.node_folders import NOT_WRITTEN, NodeFolders
from mntrain.checkpoint.objects import (
    HOOK,
    UNNAMED,
    Stateful,
    decode_options,
    hook_tensor,
    other_tensor,
    select,
)
from mntrain.checkpoint.snapshots import set_random_states
from mntrain.checkpoint.state_values import decode_values
from mntrain.errors import AgreedError, combined_refusals
from mntrain.ranks import Ranks
from zero.optimizer import ZeroOptimizer
from zero.param_groups import hyperparameters
from zero.shard import update_alone
from zero.state import EXACT, LOCAL, MASTER, PER_REPLICA, SYNC, UNSENT

T = TypeVar("T")

RETRY_AFTER_S = (0.5, 2.0)  # a read error, such as ESTALE, at a resume

# Options of parameter groups that are never restored, since they depend on the device.
DEVICE_OPTIONS = ("fused", "foreach", "capturable", "differentiable")


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Return the checkpoint folders of a run, complete or not, by step, the newest first.

    Raises OSError if it has some, or may have, and they cannot be listed.
    """
    folder, names = run_dir / "checkpoints", list[str]()
    with suppress(*ABSENT):
        names = os.listdir(folder)  # Path.glob would hide an error: a run that seems to have none
    steps = {path: step for name in names if (step := step_of(path := folder / name)) is not None}
    return sorted(steps, key=steps.__getitem__, reverse=True)


def set_aside(run_dir: Path, step: int) -> None:
    """Rename a run's checkpoints after `step` to step-*.aside.

    They are damaged, or of steps that will be repeated, and would otherwise be the newest.
    """
    for path in list_checkpoints(run_dir):
        if (step_of(path) or 0) > step:
            aside = path.with_name(f"{path.name}.aside")
            if aside.exists():
                shutil.rmtree(aside)
            path.rename(aside)


def scores(paths: Iterable[Path], metric: str) -> dict[Path, float]:
    """Return the scores by a metric of the checkpoints that have one; the lowest, oldest first.

    Those without a sound manifest are left out. Raises OSError for one that cannot be read.
    """
    found: dict[Path, float] = {}
    for path in paths:
        with suppress(ValueError):
            if (score := read_manifest(path).score_by(metric)) is not None:
                found[path] = score
    return dict(sorted(found.items(), key=lambda item: (item[1], item[0].name)))


def inspect(path: Path) -> Manifest:
    """Return the manifest of a checkpoint whose files are all present and of the right length.

    Local. Raises ValueError for an incomplete checkpoint, and OSError for one that cannot be read.
    Checksums are left to `verify`.
    """
    content = read_manifest(path)
    for name in FILES:
        about = None
        with suppress(*ABSENT):  # not Path.is_file: with an error, a file would seem missing
            about = (path / name).stat()
        if about is None or not S_ISREG(about.st_mode):
            raise ValueError(f"{name} is missing")
        length = 0
        for part in content.checksums[name]:
            if part.start != length:
                raise ValueError(f"{FILE} has no checksum of byte {length} of {name}")
            length += part.length
        if about.st_size != length:
            raise ValueError(f"{name} has {about.st_size} bytes, and was written with {length}")
    return content


def inspected(run_dir: Path) -> Iterator[tuple[Path, Manifest | str]]:
    """Yield each checkpoint of a run, the newest first, with its manifest or what is wrong.

    Without those that the run removes meanwhile. Raises OSError as `list_checkpoints`.
    """
    for path in list_checkpoints(run_dir):
        try:
            yield path, inspect(path)
        except (OSError, ValueError) as error:
            if path.exists():
                yield path, str(error)


def verify(
    path: Path, content: Manifest, files: Sequence[str] = FILES, rank: int = 0, size: int = 1
) -> None:
    """Compare the bytes of a checkpoint's files with their checksums. Local.

    Each of `size` callers verifies a different part. Raises ValueError for damaged bytes.
    """
    for name in files:
        compare(path / name, content.checksums[name][rank::size])


def compare(path: Path, parts: Sequence[ChecksummedRange]) -> None:
    """Compare ranges of a file, which is opened anew, with their checksums. Local.

    Raises ValueError for damaged bytes.
    """
    buffer = memoryview(bytearray(max((part.length for part in parts), default=0)))
    with path.open("rb") as file:
        for start, length, checksum in parts:
            data = buffer[:length]
            file.seek(start)
            if file.readinto(data) != length or zlib.crc32(data) != checksum:
                stop = start + length
                raise ValueError(f"{path.name} is damaged between bytes {start} and {stop}")


def find_sound(path: Path, files: Sequence[str] = ()) -> tuple[Path, Manifest]:
    """Return the checkpoint at a path, or a run's newest, once it is verified. Local.

    Of some of its files the bytes are compared. If the run removes its checkpoint meanwhile, the
    newer one is returned. Raises ValueError, which begins with the path.
    """
    while True:
        found = path
        try:
            if not (path / FILE).exists():
                paths = list_checkpoints(path)
                if not paths:
                    problem = "neither a checkpoint nor a run that has one"
                    raise ValueError(
                        f"{problem if path.exists() else 'there is no such folder'}; give the "
                        "folder of a run, or one of its folders checkpoints/step-*"
                    )
                found = paths[0]
            content = inspect(found)
            verify(found, content, files)
            return found, content
        except (OSError, ValueError) as error:
            if found == path or found.exists():
                raise ValueError(f"{found}: {error}") from error


@dataclass(frozen=True)
class FoundCheckpoint:
    """A verified checkpoint, and the newer ones that were damaged. Equal on all ranks."""

    path: Path
    manifest: Manifest
    skipped: Mapping[Path, str]  # damaged checkpoints, with the reason
    # Of a step from the nodes' memory, whose path is that on this rank's node: where it came from.
    from_nodes: str = ""


def newest(world: Ranks, where: Path, local: NodeFolders | None = None) -> FoundCheckpoint | None:
    """Return the newest undamaged checkpoint of a run, or verify one given by its path. Collective.

    Of a run, also one that is whole over the nodes' memory, if it is newer than those in its
    directory; then each node has all of it. Returns None for a run without checkpoints. Raises
    AgreedError if all those in its directory are damaged, if a rank cannot read one that it comes
    to, or rank 0 cannot list them: they may be sound; and as `make_whole`.
    """
    paths: list[Path] = []
    with world.agreement():
        if world.master:
            paths = _tried_again(
                where, lambda: [where] if (where / FILE).exists() else list_checkpoints(where)
            )
    paths = world.gather(paths)[0]
    skipped: dict[Path, str] = {}
    steps: list[tuple[int, str]] = []
    if local:
        local.passed_over.clear()
        steps = sorted(set(chain(*world.gather(local.steps()))), reverse=True)
    for path in [*paths, None]:
        while local and steps and (path is None or steps[0][0] > (step_of(path) or 0)):
            step, attempt = steps.pop(0)
            manifest, told = local.make_whole(step, attempt)
            found = local.own / attempt / checkpoint_name(step)
            if manifest is not None:
                return FoundCheckpoint(found, manifest, skipped, told)
            local.passed_over[found] = f"in the nodes' memory, {told}"
            if told != NOT_WRITTEN:  # as of each job that ends while it saves
                skipped[found] = local.passed_over[found]
        if path is None:
            break
        with world.agreement():
            content = _read_all(path, world.rank, world.size)
        damages = world.gather(content if isinstance(content, str) else None)
        if isinstance(content, Manifest) and not any(damages):
            return FoundCheckpoint(path, content, skipped)
        skipped[path] = combined_refusals(damages)
    if not paths:
        return None  # `passed_over` tells what the nodes had
    reasons = "; ".join(f"{path.name}: {why}" for path, why in skipped.items())
    raise AgreedError(f"no checkpoint in {where} is sound: {reasons}", world.rank)


def _read_all(path: Path, rank: int, size: int) -> Manifest | str:
    """Return the manifest of a checkpoint, or what is damaged in the part that a rank verifies.

    Raises OSError as `_tried_again`.
    """

    def read() -> Manifest | str:
        try:
            content = inspect(path)
            verify(path, content, FILES, rank, size)
        except ValueError as error:
            return str(error)
        return content

    return _tried_again(path, read)


def _tried_again(path: Path, read: Callable[[], T]) -> T:
    """Return what `read` returns of a path. Raises OSError, after some tries, if it cannot."""
    for wait in (*RETRY_AFTER_S, None):
        try:
            return read()
        except OSError as error:
            if wait is None:
                raise OSError(
                    f"{path} cannot be read ({error}), which does not tell whether it is sound: "
                    "start the job again when it can, or give --run.resume another checkpoint"
                ) from error
            time.sleep(wait)
    raise AssertionError


@torch.no_grad()
def load(
    found: FoundCheckpoint,
    model: nn.Module,
    optimizer: ZeroOptimizer,
    world: Ranks,
    *,
    objects: Mapping[str, Stateful] | None = None,
    kept_options: Collection[str] = (),
) -> None:
    """Load the state of a model, its optimizer and objects from a checkpoint. Collective.

    In place. Every rank reads only the optimizer state of its own shard. `kept_options` of the
    parameter groups, and those that depend on the device, keep their present values. A
    communication hook starts anew, with a warning, if its state is of other ranks or shards.
    Replicas of a sync schedule continue with states of their own; if the checkpoint has another
    number of them, with the mean of the parameters and of what was not sent yet, and replica i with
    the other optimizer state of replica i modulo that number. Where the next step is synchronous,
    all continue with the mean and the state of replica 0. Raises
    AgreedError if the checkpoint is of another model or another class of optimizer, or lacks an
    object or what the optimizer was told to keep (amsgrad); the model is unchanged then.
    """
    manifest, present = found.manifest, [dict(group) for group in optimizer.param_groups]
    kept_options = (*DEVICE_OPTIONS, *kept_options)
    own = _has_replicas(manifest, optimizer)
    numbers, groups = list[list[float]](), manifest.param_groups
    if _same_replicas(manifest, optimizer):
        numbers, replica = manifest.sync_weights, optimizer.sync_schedule.replica
        if own_options := manifest.replica_options:
            pairs = zip(groups, own_options[replica], strict=True)
            groups = [{**group, **options} for group, options in pairs]
    with world.agreement():
        _check_optimizer(found, optimizer)
        states = {
            name: select(manifest.objects, name, world.rank, world.size) for name in objects or {}
        }
        with open_tensors(found.path / MODEL) as file:
            load_model(file, model)
        with open_tensors(found.path / OPTIMIZER) as file:
            optimizer.load_state_dict(
                {
                    "slices": _read_slices(file, manifest, optimizer),
                    "param_groups": list(map(decode_options, groups)),
                    "loss_scale": manifest.loss_scale,
                    "steps": manifest.optimizer_steps,  # the phase of the sync schedule
                    "in_sync": not own,
                    "sync_weights": numbers[optimizer.sync_schedule.replica] if numbers else [],
                    "comm_hook": _read_hook_state(found, world),
                    "unnamed_state": select(manifest.objects, UNNAMED, world.rank, world.size),
                }
            )
        for group, before in zip(optimizer.param_groups, present, strict=True):
            group.update({key: before[key] for key in kept_options if key in before})
            for key, value in before.items():
                if isinstance(value, tuple):  # earlier versions saved tuples as lists
                    group[key] = tuple(group[key])
                if isinstance(value, Tensor) and isinstance(group[key], Tensor):
                    group[key] = group[key].to(value.device)
        for name, state in states.items():
            (objects or {})[name].load_state_dict(state)
    masters = any(MASTER in state.tensor_keys for state in manifest.parameter_states.values())
    if optimizer.sync_schedule.replicas > 1 or (optimizer.sharded and masters):
        optimizer.publish_loaded()


def _check_optimizer(found: FoundCheckpoint, optimizer: ZeroOptimizer) -> None:
    """Raise ValueError for another class, and for options that need state which is lacking. Local.

    Such as amsgrad, which it was saved without. Of classes that are not torch's nothing is known.
    """
    manifest, name = found.manifest, optimizer.class_name
    if manifest.optimizer_class and manifest.optimizer_class != name:
        raise ValueError(
            f"{found.path} was saved with the optimizer {manifest.optimizer_class}, and this one "
            f"is {name}: give the same class, or another run directory"
        )
    if not optimizer.known:
        return
    kind = getattr(torch.optim, name)
    for group, saved in zip(optimizer.param_groups, manifest.param_groups, strict=False):
        options = {k: v for k, v in hyperparameters(group).items() if k not in DEVICE_OPTIONS}
        states = [manifest.parameter_states.get(of) for of in saved["params"]]
        kinds = {(s.tensor_keys, tuple(s.others)): s for s in states if s}
        for state in kinds.values():
            if lacking := _lacking(kind, options, state):
                raise ValueError(
                    f"{found.path} has no {lacking} in the optimizer's state, which {name} needs "
                    "with these options: give those with which it was saved, or begin another run "
                    "with the weights of this one (--init.from, or load_state_dict of the model)"
                )


def _lacking(kind: Any, options: Mapping[str, Any], state: ParameterState) -> str:
    """Return what a class of torch looks for in a step and a saved state lacks; "" if nothing.

    Local. It takes a step of one element.
    """
    element = torch.zeros((), dtype=torch.float32, device="cpu")
    element.grad = torch.zeros_like(element)
    own = [key for key in state.tensor_keys if key != MASTER and not key.startswith(SYNC)]
    others = decode_values(state.others, lambda name: element)
    numbers = {  # also the state by element, of a parameter without a dimension
        key: value.to(element) if isinstance(value, Tensor) and value.is_floating_point() else value
        for key, value in others.items()
    }
    try:
        trial = kind([{**options, "params": [element]}])
        trial.state[element] = numbers | {key: torch.zeros_like(element) for key in own}
        update_alone(trial)
    except KeyError as error:
        return str(error.args[0])
    except Exception:
        return ""  # of this trial alone
    return ""


def _read_hook_state(found: FoundCheckpoint, world: Ranks) -> dict[str, Any] | None:
    """Return the state of this rank's communication hook, or what stands for one of other ranks."""
    merged, ranks, rank = found.manifest.objects, found.manifest.world["ranks"], world.rank
    if HOOK not in merged:
        return None
    if ranks != world.size:
        return {"context": f"{ranks} ranks", "state": merged[HOOK]}
    with open_tensors(found.path / RANDOM) as file:
        return select(
            merged, HOOK, rank, ranks, lambda name: file.get_tensor(hook_tensor(rank, name))
        )


def restore_randomness(found: FoundCheckpoint, world: Ranks) -> None:
    """Restore this rank's random generators if the checkpoint is of as many ranks. Local."""
    if found.manifest.world["ranks"] != world.size:
        return
    prefix = f"{world.rank}/"
    with open_tensors(found.path / RANDOM) as file:
        states = {
            name.removeprefix(prefix): file.get_tensor(name)
            for name in file.keys()  # noqa: SIM118 - not a mapping
            if name.startswith(prefix)
        }
    set_random_states(states, world.device)


def load_model(file: safe_open, model: nn.Module) -> None:
    """Load parameters, buffers and what modules have put into the state dict. Local.

    Buffers of other shapes and names are taken if the model's `load_state_dict` takes them. Raises
    ValueError for the file of another model, which leaves this one unchanged, and as `load_values`.
    """
    state: dict[str, Tensor] = model.state_dict()
    copies = copies_in(model, state)  # whose shapes may change in a run
    saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    present = {name: tuple(tensor.shape) for name, tensor in state.items()}
    wrong = {
        name: f"{name} is {saved.get(name, 'absent')} in the checkpoint, "
        f"{present.get(name, 'absent')} in the model"
        for name in {**present, **saved}
        if saved.get(name) != present.get(name) and not (name in saved and name in copies)
    }
    if wrong:
        fixed = set(parameters_in(model, state))
        others = {name: file.get_tensor(name) for name in saved if name not in fixed}
        if not fixed.isdisjoint(wrong) or why_not_taken(model, others):
            raise ValueError(f"the checkpoint is of another model: {'; '.join(wrong.values())}")
    load_values(model, {name: file.get_tensor(name) for name in saved})


def is_shared(key: str) -> bool:
    """Return whether the optimizer state under a key is the same in all replicas."""
    return key == MASTER or (key.startswith(SYNC) and key not in PER_REPLICA)


def _trains_alone(content: Manifest, optimizer: ZeroOptimizer) -> bool:
    """Return whether the step after a checkpoint is averaged over a replica, not over several."""
    sync_schedule, steps = optimizer.sync_schedule, content.optimizer_steps
    assert steps is not None
    return sync_schedule.group(steps).size == sync_schedule.sharding.size


def _has_replicas(content: Manifest, optimizer: ZeroOptimizer) -> bool:
    """Return whether replicas are to continue with parameters of their own.

    The checkpoint has those of as many replicas, and the next step is not averaged over all ranks.
    """
    has_own = any(LOCAL in state.tensor_keys for state in content.parameter_states.values())
    return has_own and _same_replicas(content, optimizer)


def _same_replicas(content: Manifest, optimizer: ZeroOptimizer) -> bool:
    """Return whether the next step is taken alone by as many replicas as the checkpoint has."""
    same = content.world.get(REPLICAS, 1) == optimizer.sync_schedule.replicas
    return same and _trains_alone(content, optimizer)


def _read_slices(
    file: safe_open, content: Manifest, optimizer: ZeroOptimizer
) -> Iterator[dict[str, Any]]:
    """Yield this rank's slices of the optimizer state, one at a time to bound the memory used."""
    replicas, states = content.world.get(REPLICAS, 1), content.parameter_states
    # Replicas that take the same steps need the same state.
    replica = optimizer.sync_schedule.replica if _trains_alone(content, optimizer) else 0
    own = _has_replicas(content, optimizer)
    for piece in optimizer.slices():
        name = replica_name(piece.name, replica % replicas)
        if piece.name not in states or name not in states:
            continue  # the optimizer raises for the missing slice
        saved = states[name]
        names = {key: [piece.name] for key in states[piece.name].tensor_keys if is_shared(key)}
        names |= {key: [name] for key in saved.tensor_keys if not is_shared(key)}
        if not own:
            names.pop(LOCAL, None)
        if replicas != optimizer.sync_schedule.replicas:  # each gets the mean of what was not sent
            everyone = [replica_name(piece.name, r) for r in range(replicas)]
            names |= dict.fromkeys(names.keys() & {UNSENT}, everyone)
        low, high = piece.low, piece.high
        if saved.order != piece.order:  # this rank's elements may lie anywhere
            low, high = 0, math.prod(piece.shape)
        tensors: dict[str, Tensor] = {}
        for key, of in names.items() if saved.shape == piece.shape else ():
            parts = [states[one].elements(file, one, key, low, high) for one in of]
            tensors[key] = parts[0] if len(parts) == 1 else torch.stack(parts).mean(0)
        if MASTER in tensors and not own:  # the parameters are loaded, too
            tensors[EXACT] = tensors.pop(MASTER)
        yield piece._replace(
            shape=saved.shape,
            order=saved.order,
            low=low,
            high=high,
            tensors=tensors,
            others=decode_values(saved.others, partial(_read_other, file, name)),
            places={key: tuple(path) for key, path in saved.places.items()},
        )._asdict()


def _read_other(file: safe_open, parameter: str, name: str) -> Tensor:
    tensor: Tensor = file.get_tensor(other_tensor(parameter, name))
    return tensor
