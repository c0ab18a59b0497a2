"""Saving a run: all ranks write one checkpoint in parallel, while training continues.

begin      the folder is made, all ranks take a snapshot, and exchange what each holds
           training may change the tensors from then on (on a GPU, the copies are enqueued before)
           a thread of each rank writes its part and waits for the disk
advance    when every part is on the disk, all ranks exchange the checksums of what they wrote
           at the first save, if wanted, each node reads what another one wrote
           threads publish the checkpoint: it becomes valid
advance    all ranks learn that the checkpoint is complete

`directory_saver` and `local_saver` say where it is written, and how it becomes valid.

A rank writes the optimizer state of its own shard, its random generators, the state of its
communication hook, and an equal part of what all ranks hold in full: parameters, and at stage 0 the
optimizer state. The master writes the other entries of the model's state dict, such as buffers,
which a forward may have changed on each rank apart. Replicas of a sync schedule save states of
their own, and replica 0 what all share.

All messages are sent by the calling thread.
"""

import atexit
import os
import secrets
import shutil
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from mntrain._version import __version__
from mntrain.checkpoint.format import (
    FILES,
    MODEL,
    OPTIMIZER,
    RANDOM,
    REPLICAS,
    ChecksummedRange,
    FileLayout,
    Manifest,
    ParameterState,
    Shapes,
    part_name,
    replica_name,
    row_major,
)
from mntrain.checkpoint.model_state import MadeModel, check_restorable, parameters_in
from mntrain.checkpoint.objects import (
    UNNAMED,
    Stateful,
    encode,
    encode_hook,
    encode_objects,
    encode_options,
    hook_tensor,
    merge,
    other_tensor,
)
from mntrain.checkpoint.reader import compare, is_shared
from mntrain.checkpoint.snapshots import SnapshotBuffer, TensorRange, random_states
from mntrain.checkpoint.state_values import check_values, encode_values
from mntrain.checks.storage import is_visible
from mntrain.errors import AgreedError, TrainingStoppedError
from mntrain.ranks import Ranks
from zero.layout import split
from zero.optimizer import ZeroOptimizer
from zero.param_groups import hyperparameters
from zero.state import StateSlice, unnamed_state

Checksums = dict[str, list[ChecksummedRange]]  # of what was written, by file
T = TypeVar("T")

_NEW_FILE = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
EXIT_S = 30.0  # for a checkpoint that all ranks have written, at the end of the script
_SEEN_S = 60.0  # in which a new folder must be visible on all nodes


class ShardOutline(NamedTuple):
    """Description of what one rank saves, without the tensors. Exchanged between ranks."""

    replica: int
    sync_weights: list[float]  # of the replica
    options: list[dict[str, Any]]  # likewise, of each parameter group, encoded
    shapes: dict[str, Shapes]  # of the tensors that it alone writes, by file
    states: dict[str, ParameterState]
    objects: dict[str, Any]  # encoded states, also of the communication hook, without tensors


@dataclass(eq=False)
class Save:
    """One checkpoint, while it is written and when it is complete."""

    path: Path
    folder: Path  # where it is written
    manifest: Manifest  # completed as the save proceeds
    start: float
    seconds: float = 0.0  # from the snapshot until it was complete
    nbytes: int = 0  # of all files but the manifest
    # What this rank's thread has written, and then what it has read of another node's.
    written: Future[Checksums] = field(default_factory=Future)
    by_rank: list[Checksums] = field(default_factory=list)  # what all have written
    published: Future[None] | None = None  # once all have written
    process: int = field(default_factory=os.getpid)
    mode: int = 0o666  # of new files, less what the umask takes
    made_here: bool = False  # this rank has made the folder
    told: bool = True  # the end of the script waits for it, and the user is told if it comes before

    def described(self) -> Manifest:
        """Return the manifest with the checksums of what all ranks have written."""
        checksums = {
            name: sorted(part for written in self.by_rank for part in written[name])
            for name in FILES
        }
        return replace(self.manifest, checksums=checksums)

    def end(self, *, warns: bool) -> None:
        """Let the threads end with the script; say if the checkpoint will then not be complete."""
        if os.getpid() != self.process:
            return
        with suppress(Exception):  # it took too long, or failed
            self.written.result(EXIT_S)
            if self.published is not None and self.told:
                self.published.result(EXIT_S)
                return
        if warns and self.told:
            print(
                f"mntrain: warning: {self.path} was not saved, since the script has ended before "
                "it was complete: close the world at the end, as `with mntrain.init() as world:` "
                "does, or save the last step with now=True",
                file=sys.stderr,
            )


class Saved(NamedTuple):
    """The objects of a run that a checkpoint has the state of."""

    model: nn.Module
    optimizer: ZeroOptimizer
    objects: Mapping[str, Stateful] = MappingProxyType({})  # by name


class Saver(ABC):
    """Saves a run, one checkpoint at a time. Created by all ranks.

    From the first `begin` on, it keeps host memory for a snapshot of this rank's part. Over all
    ranks this is the size of a checkpoint. Where replicas differ, the model is their mean, and each
    replica's own parameters are part of the optimizer's state.
    """

    def __init__(self, world: Ranks, saved: Saved, *, reads_back: bool) -> None:
        self._world, self._reads_back = world, reads_back
        self.model, self.optimizer, self.objects = saved
        self._buffer = SnapshotBuffer(world.device)
        self._pending: Save | None = None
        self._made, self._stepped = MadeModel(saved.model), False

    def check(self) -> None:
        """Raise ValueError for a model, options, state or an object that cannot be restored. Local.

        From then on, `check_state`, `begin` and `save` raise TrainingStoppedError if a model as
        this one is now could not be given the state of then.
        """
        groups = self.optimizer.param_groups
        check_restorable(self.model, (p for group in groups for p in group["params"]))
        for group in groups:
            encode_options(hyperparameters(group))
        self._check_values()
        encode_objects(self.objects)
        encode_hook(self.optimizer.accumulation.hook_state())
        FileLayout(_shapes_of(self.model.state_dict()))
        self._made = MadeModel(self.model)

    def check_state(self) -> None:
        """Raise ValueError for optimizer state that cannot be saved. The first call is collective.

        Known optimizers have none. Called after every step, since it may appear later. What is
        wrong with the model is mostly seen after the first one.
        """
        self._check_values()
        if not self._stepped:
            self._stepped = True
            self._check_model()

    def _check_values(self) -> None:
        if not self.optimizer.known:
            check_values(self.optimizer.state)

    def _check_model(self) -> None:
        """Raise TrainingStoppedError if the master's model could not be restored. Collective."""
        self.optimizer.wait_for_parameters()
        try:
            with self._world.agreement():
                if self._world.master:
                    self._made.check(self.model)
        except AgreedError as error:
            raise TrainingStoppedError(str(error), self._world.rank) from error

    @property
    def saving(self) -> bool:
        """True while a save is in progress. Equal on all ranks."""
        return self._pending is not None

    def begin(self, progress: Manifest) -> None:
        """Begin a save, while no other is in progress. Collective.

        `progress` is what is known of the run, equal on all ranks. Raises TrainingStoppedError as
        `check` says; other errors are raised by `advance`.
        """
        with self.optimizer.averaged():
            self._begin(progress, in_background=True)

    def save(self, progress: Manifest) -> Save:
        """Save synchronously, without a snapshot. Collective. Raises AgreedError as `advance`."""
        with self.optimizer.averaged():
            self._begin(progress, in_background=False)
            return self.finish()

    def ready(self) -> bool:
        """Return True if this rank is ready for `advance`, which waits unless all are. Local."""
        save = self._pending
        return save is not None and (save.published or save.written).done()

    def advance(self) -> Save | None:
        """Wait for the present phase of a save; return None before the last one. Collective.

        Raises AgreedError, which names the rank and the cause, if the save failed; earlier
        checkpoints are unchanged.
        """
        save = self._pending
        assert save is not None, "no save is in progress"
        try:
            if save.published is None:
                with self._world.agreement():
                    own = save.written.result()
                if not save.by_rank:
                    save.by_rank = self._world.gather(own)
                    if self._reads_back:
                        save.written = in_thread(partial(_read_back, save, self._world))
                        return None
                self._reads_back = False
                save.published = in_thread(partial(self._publish, save))
                return None
            with self._world.agreement():
                save.published.result()
        except AgreedError as error:
            self._end(save)
            if save.made_here:
                shutil.rmtree(save.folder, ignore_errors=True)
            raise AgreedError(f"{save.path} was not saved: {error}", self._world.rank) from error
        self._end(save)
        return save

    def finish(self) -> Save:
        """Wait until the save in progress is complete. Collective. Raises as `advance`."""
        while (saved := self.advance()) is None:
            pass
        return saved

    def _begin(self, progress: Manifest, *, in_background: bool) -> None:
        assert self._pending is None, "a save is in progress: call finish first"
        world, start = self._world, time.perf_counter()
        ranges: Iterable[TensorRange]
        self._check_model()
        own = (secrets.token_hex(4), self._shapes()) if world.master else ("", {})
        token, shapes = world.gather(own)[0]
        save = self._new(progress, start, token)
        try:
            with world.agreement():
                save.manifest = self._describe(progress)
                outline, ranges = self._own_shard(shapes)
                if save.made_here:  # before the others, which have to open files in it
                    self._make_folder(save)
                if in_background:  # training continues while they are written
                    ranges = self._buffer.copy(ranges)
                elif world.device.type == "cuda":  # which may still be computing them
                    torch.cuda.current_stream(world.device).synchronize()
        except AgreedError as error:  # such as no memory for the snapshot
            save.written.set_exception(AgreedError(str(error), world.rank))
        else:
            outlines = world.gather(outline)
            save.written = in_thread(partial(_write, save, world, outlines, shapes, ranges))
        self._pending = save
        atexit.register(save.end, warns=world.master)

    @abstractmethod
    def _new(self, progress: Manifest, start: float, token: str) -> Save:
        """Return a save that begins. `token` is unique, and the same on all ranks."""

    @abstractmethod
    def _make_folder(self, save: Save) -> None:
        """Make the folder of a save, on the ranks that do. Raises OSError."""

    @abstractmethod
    def _publish(self, save: Save) -> None:
        """Make a checkpoint valid whose files all ranks have written. In a thread of each rank."""

    def _shapes(self) -> Shapes:
        """Return the shapes of the model's entries, parameters first."""
        entries = self.model.state_dict()
        order = dict.fromkeys([*parameters_in(self.model, entries), *entries])
        return _shapes_of({name: entries[name] for name in order})

    def _own_shard(self, of_model: Shapes) -> tuple[ShardOutline, list[TensorRange]]:
        """Return what this rank saves: a description, with copies of all that is not a tensor.

        Of the model, whose shapes on the master are `of_model`, ranks write parameters together.
        The master writes all else, such as extra states, which may differ between ranks. Ranges are
        views, except for parameters that are not contiguous. Raises ValueError for what cannot be
        saved.
        """
        world, model, optimizer = self._world, self.model, self.optimizer
        shapes: dict[str, Shapes] = {OPTIMIZER: {}, RANDOM: {}}
        states: dict[str, ParameterState] = {}
        ranges: list[TensorRange] = []
        for piece in _own_slices(optimizer):
            others, kept = encode_values(piece.others)
            places = {name: list(path) for name, path in piece.places.items()}
            cuts = () if piece.whole else (piece.low,)
            state = ParameterState(
                piece.shape, piece.order, tuple(piece.tensors), others, places, cuts
            )
            states[piece.name] = states.get(piece.name, state).merged(state)
            for key, tensor in kept.items() if piece.low == 0 else ():  # of the whole parameter
                name = other_tensor(piece.name, key)
                shapes[OPTIMIZER][name] = (tensor.dtype, tuple(tensor.shape))
                flat = tensor.detach().contiguous().reshape(-1)
                ranges.append(TensorRange(OPTIMIZER, name, flat, 0))
            # A whole row-major tensor gets the parameter's shape; others stay flat.
            plain = piece.whole and row_major(piece.order)
            shape = piece.shape if plain else (piece.high - piece.low,)
            for key, tensor in piece.tensors.items():
                name = f"{piece.name}/{key}"
                if not piece.whole:
                    name = part_name(piece.name, key, piece.low, piece.high)
                shapes[OPTIMIZER][name] = (tensor.dtype, shape)
                ranges.append(TensorRange(OPTIMIZER, name, tensor, 0))
        hook, tensors = encode_hook(optimizer.accumulation.hook_state())
        entries = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        shared = set(parameters_in(model, entries))
        for name, low, high in FileLayout(of_model).part(world.rank, world.size, shared):
            ranges.append(TensorRange(MODEL, name, entries[name].reshape(-1)[low:high], low))
        own = {f"{world.rank}/{key}": state for key, state in random_states(world.device).items()}
        own |= {hook_tensor(world.rank, key): tensor.detach() for key, tensor in tensors.items()}
        shapes[RANDOM] = _shapes_of(own)
        ranges += [TensorRange(RANDOM, name, tensor.reshape(-1), 0) for name, tensor in own.items()]
        replica, replicas = optimizer.sync_schedule.replica, optimizer.replicas
        weights = [] if replicas is None else replicas.numbers()
        objects = encode_objects(self.objects) | hook
        if unnamed := unnamed_state(optimizer.state):
            objects[UNNAMED] = encode(unnamed, UNNAMED)
        options = [encode_options(hyperparameters(group)) for group in optimizer.param_groups]
        return ShardOutline(replica, weights, options, shapes, states, objects), ranges

    def _end(self, save: Save) -> None:
        self._pending = None
        atexit.unregister(save.end)

    def _describe(self, progress: Manifest) -> Manifest:
        """Return the manifest of the present state, to be completed by what all ranks write."""
        state, replicas = self.optimizer.state_dict(), self.optimizer.sync_schedule.replicas
        world = {"ranks": self._world.size, "nodes": len(self._world.topology.nodes)}
        return replace(
            progress,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            versions={"mntrain": __version__, "torch": torch.__version__},
            world=world | ({REPLICAS: replicas} if replicas > 1 else {}),
            param_groups=list(map(encode_options, state["param_groups"])),
            loss_scale=state["loss_scale"],
            optimizer_steps=state["steps"],
            optimizer_class=self.optimizer.class_name,
        )


def _own_slices(optimizer: ZeroOptimizer) -> Iterator[StateSlice]:
    """Yield the slices that this rank saves, of its replica, under the names in the file."""
    sync_schedule, slices = optimizer.sync_schedule, list(optimizer.slices())
    parts = [(index, piece.low, piece.high) for index, piece in enumerate(slices)]
    if not optimizer.sharded:
        group = sync_schedule.sharding
        parts = list(_equal_part([piece.high for piece in slices], group.rank, group.size))
    for index, low, high in parts:
        piece = slices[index]
        tensors = {
            key: tensor[low - piece.low : high - piece.low]
            for key, tensor in piece.tensors.items()
            if not (sync_schedule.replica and is_shared(key))
        }
        name = replica_name(piece.name, sync_schedule.replica)
        yield piece._replace(name=name, low=low, high=high, tensors=tensors)


def _equal_part(lengths: Sequence[int], rank: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Yield (index, low, high) of a rank's equal part of items, laid end to end."""
    first, last = split(sum(lengths), size)[rank : rank + 2]
    start = 0
    for index, length in enumerate(lengths):
        low, high = max(first - start, 0), min(last - start, length)
        if low < high:
            yield index, low, high
        start += length


def _shapes_of(tensors: Mapping[str, Tensor]) -> Shapes:
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


# In the writing thread.


def in_thread(function: Callable[[], T]) -> Future[T]:
    """Run a function in a thread, which keeps no process from its end.

    Where the system gives no more threads, it has run when this returns. When the future is done,
    the thread holds no tensor: freed in it while the interpreter ends, one would abort the process.
    """
    future: Future[T] = Future()
    functions = [function]
    del function

    def run() -> None:
        try:
            result = functions[0]()
        except BaseException as error:
            functions.clear()
            future.set_exception(error)
        else:
            functions.clear()
            future.set_result(result)

    try:
        threading.Thread(target=run, name="mntrain checkpoint", daemon=True).start()
    except RuntimeError:  # a limit of threads, or the end of the interpreter
        run()
    return future


def _write(
    save: Save,
    world: Ranks,
    outlines: Sequence[ShardOutline],
    model: Shapes,
    ranges: Iterable[TensorRange],
) -> Checksums:
    """Write ranges, on the master also the files' headers. The `model` has shapes of the master's.

    Returns the written ranges by file, after they are on the disk. Raises OSError, and ValueError
    for a dtype that the files lack.
    """
    start = time.perf_counter()
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)  # of this thread
    layouts = _lay_out(save, model, outlines)
    save.nbytes = sum(layout.nbytes for layout in layouts.values())
    files: dict[str, int] = {}
    written: Checksums = {name: [] for name in layouts}
    with ExitStack() as stack:
        for name, layout in layouts.items():
            path = save.folder / name
            files[name] = file = _open(path, made_here=save.made_here, mode=save.mode)
            stack.callback(os.close, file)
            # No posix_fallocate: where the file system lacks it, glibc writes zeros over the parts
            # of ranks that are ahead. Every node sets the length, which clients may not ask for
            # while they know the end of what they wrote themselves.
            os.ftruncate(file, layout.nbytes)
            if world.master:
                written[name] += layout.write_header(file)
        for name, tensor, flat, low in ranges:
            written[name] += layouts[name].write(files[name], tensor, flat.cpu(), low)
        for name, file in files.items():
            if name != MODEL:
                written[name] += layouts[name].write_padding(file, world.rank)
            os.fsync(file)
    world.recorder.span("write checkpoint", start)
    return written


def _read_back(save: Save, world: Ranks) -> Checksums:
    """Read a part of what the next node has written; return {}. Raises ValueError if it differs."""
    nodes = world.topology.nodes
    number = next(number for number, node in enumerate(nodes) if world.rank in node)
    own, there = nodes[number], nodes[(number + 1) % len(nodes)]
    for rank in there[own.index(world.rank) :: len(own)]:
        for name, parts in save.by_rank[rank].items():
            try:
                compare(save.folder / name, parts)
            except ValueError as error:
                here, writer = (world.places[which].host for which in (world.rank, rank))
                raise ValueError(
                    f"what {writer} wrote, {here} reads otherwise: {error}. Give a run directory "
                    "on a file system that keeps what several nodes write into one file"
                ) from error
    return {}


def _lay_out(save: Save, model: Shapes, outlines: Sequence[ShardOutline]) -> dict[str, FileLayout]:
    """Complete the manifest by what the ranks have described, and return the layout of files."""
    states: dict[str, ParameterState] = {}
    for outline in outlines:
        for name, state in outline.states.items():
            states[name] = states.get(name, state).merged(state)
    weights = {outline.replica: outline.sync_weights for outline in outlines}
    options = {outline.replica: outline.options for outline in outlines}
    save.manifest = replace(
        save.manifest,
        parameter_states=states,
        objects=merge([outline.objects for outline in outlines]),
        sync_weights=[weights[replica] for replica in sorted(weights)],
        replica_options=[options[replica] for replica in sorted(options) if len(options) > 1],
    )
    return {MODEL: FileLayout(model)} | {
        file: FileLayout(*(outline.shapes[file] for outline in outlines))
        for file in (OPTIMIZER, RANDOM)
    }


def _open(path: Path, *, made_here: bool, mode: int = 0o666) -> int:
    """Open a file in the new folder, which other ranks see late on some network file systems.

    Raises OSError: at once if this rank has made the folder, and it was removed or moved since, and
    later if only the master sees the folder.
    """
    above, deadline = path.parents[1], time.monotonic() + _SEEN_S
    while True:
        try:
            return os.open(path, _NEW_FILE, mode)
        except FileNotFoundError as error:
            if made_here:
                raise FileNotFoundError(f"{above} was removed or moved") from error
            left = deadline - time.monotonic()
            if left < 0 or not (is_visible(above, left) and is_visible(path.parent, left)):
                raise FileNotFoundError(
                    f"{above} is not what rank 0 sees: is it on a file system that all nodes share?"
                ) from error
            time.sleep(0.05)  # a client may know by its cache that the folder is not there
