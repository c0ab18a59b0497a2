"""The ranks of a job: how they start together, and the values that they exchange.

MPI -> topology -> devices -> checks and threads -> engine -> transport -> collectives -> places
"""

import os
import secrets
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, fields
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from mntrain import device as devices
from mntrain import errors
from mntrain.alike import rank_facts
from mntrain.alike.rank_facts import RankFacts, collect
from mntrain.alike.values import compare
from mntrain.checks.finding import Finding
from mntrain.comm import mpi, transport
from mntrain.comm.disagreement import DisagreementWatch
from mntrain.comm.engine import Future, ProgressEngine
from mntrain.comm.forked import call_in_child
from mntrain.comm.link import Link
from mntrain.comm.links import measure_link
from mntrain.comm.messages import Messages
from mntrain.comm.shared_memory import NodeSharedMemory
from mntrain.comm.staging import DeviceCopy
from mntrain.comm.ticket import AlgorithmChoice, digest_of
from mntrain.comm.topology import Topology
from mntrain.comm.waits import OwnClock
from mntrain.comm.world_collectives import WorldCollectives
from mntrain.device_kernels import DeviceKernels
from mntrain.errors import AgreedError, ExceptionWatch, RemoteRankError, start_mpi
from mntrain.options.config import WorldConfig
from mntrain.options.types import construct, port_numbers
from mntrain.output import Output
from mntrain.rank_info import Place, Usage, describe_device, device_memory, memory_room, peak_memory
from mntrain.recorder.events import INTERNAL, Recorder
from mntrain.recorder.launch_notes import LaunchNotes
from mntrain.watchdog.monitor import MONITORS, Limits
from mntrain.watchdog.side_channel import (
    LOST_S,
    SideChannel,
    address_towards,
    allow_files,
    listen,
    own_addresses,
)
from mntrain.watchdog.start_timer import TIMEOUT_S, limited_start
from mntrain.watchdog.thread import Watchdog
from zero.comm_hooks import NodeLevels

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")
Number = TypeVar("Number", float, Tensor)
REAL = "give real ones, such as torch.view_as_real of them"

TRAVEL_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}  # None: their own

MEETING_TAGS = 1 << 15  # that every MPI library has


def _select_gpu(device: torch.device) -> None:
    """Make a GPU the current one of the calling thread; nothing for the CPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def is_complex(values: Any) -> bool:
    """Return whether a number, tensor, array or list has complex values."""
    if isinstance(values, list | tuple):
        return any(map(is_complex, values))
    return values.is_complex() if isinstance(values, Tensor) else bool(np.iscomplexobj(values))


def dense(tensor: Tensor) -> Tensor:
    """Return a tensor without gradient, and dense if it is sparse. May be a view."""
    own = tensor.detach()
    return own if own.layout is torch.strided else own.to_dense()


def named_by_shape(name: str, value: object) -> str:
    """Return the name of a call, with the shape of a tensor whose order of elements it decides."""
    if isinstance(value, Tensor) and value.ndim > 1:
        return f"{name} of shape {tuple(value.shape)}"
    return name


class Ranks:
    """All ranks of a job, as checkpoints and reports see them; `World` adds the tools of training.

    Made on all ranks together. Starts MPI if necessary; `comm` (default: all ranks) is duplicated
    and stays the caller's. `options` are those of `WorldConfig`, equal on all ranks but for the
    device. Raises AgreedError on all ranks for an argument that any of them cannot accept or a
    check that fails, with everything freed; also if MPI cannot start, or the launcher started more
    ranks than MPI sees. Any other exception leaves an ExceptionWatch installed, which ends the job
    if nobody catches the exception. After a world was abandoned, fewer ranks can make another one.

    Attributes, all local facts:
        rank, size: of this rank, and of the world.
        master: True on rank 0, which reports for all ranks.
        local_rank, local_size: within the node group, the ranks that share a node's memory.
        cross_rank, cross_size: within the cross group, the ranks with this local rank.
        device: the torch device of this rank.
        topology: the node of every rank.
        hosts: a key of every rank's host.
        places: the host, device and threads of every rank, by rank.
        collectives: a `zero.Collectives` over all ranks.
        kernels: sums on the device (`mntrain.device_kernels.DeviceKernels`).
        algorithm: name of the algorithm that reduces full buckets.
        link: between two nodes, measured or given (`mntrain.comm.link.Link`); None of one node.
        settings: the options (`mntrain.options.config.WorldConfig`).
        waits: the clock of this rank without its waits for others (`mntrain.comm.waits.OwnClock`).
        recorder: of this rank's events (`mntrain.recorder.events.Recorder`).
        output: notes and warnings for the user (`mntrain.output.Output`).
        transport, transport_line: of GPU tensors, and the reason; empty on CPUs and for one rank.
        facts, findings: of the checks at the start (`mntrain.alike.rank_facts`), by rank and name.
        library: name, thread level and build of the MPI library.
        watchdog: the thread that finds hangs and lost ranks (`mntrain.watchdog.thread`).
    """

    def __init__(self, comm: "MPI.Intracomm | None", options: Mapping[str, Any]) -> None:
        if unknown := options.keys() - {field.name for field in fields(WorldConfig)}:
            raise TypeError(f"mntrain.init() got an unexpected argument {min(unknown)!r}")
        with ExitStack() as meeting:
            limits = options.get("timeout", TIMEOUT_S), options.get("lost_after", LOST_S)
            meeting.enter_context(limited_start(*limits))
            self._comm, self.library = start_mpi(comm)
            self.rank, self.size = self._comm.rank, self._comm.size
            self.master = self.rank == 0
            self.output = Output(self.master)
            self._watch = ExceptionWatch(self.rank, self.size, socket.gethostname())
            self._watch.install()
            self.recorder = Recorder(self.rank, self.size)
            call_in_child(self.recorder.leave_to_parent)
            self._watch.on_error = self.recorder.error_raised
            self._resources, self._groups = ExitStack(), ExitStack()  # free, collectively
            for callback in (self.recorder.close, self._watch.uninstall, self._comm.free):
                self._resources.callback(callback)
            self._resources.enter_context(self._groups)
            try:
                self._find_topology(options)
                self._assign_device()
                self._check()
                self._tell_launch()
                self._start_engine()
                meeting.close()  # from here on the watchdog watches
                self._make_collectives()
                self._gather_places()
            except AgreedError:
                self._resources.close()
                self._watch.install()  # lets rank 0 alone print the error if nobody catches it
                raise

    def _find_topology(self, options: Mapping[str, Any]) -> None:
        """Check the options on all ranks, and group the ranks by node."""
        comm, rank = self._comm, self.rank
        before = time.time()
        self.hosts = comm.node_keys()
        self._met = before, time.time()  # around a collective, by this host's clock
        mpi.unlink_segments(comm.size)
        with errors.agreement(comm.gather, rank):
            self.settings: WorldConfig = construct(WorldConfig, options, {n: n for n in options})
            self.topology = Topology.from_hosts(self.hosts, self.settings.ranks_per_node)
        shared = {name: value for name, value in asdict(self.settings).items() if name != "device"}
        compare(comm, shared)
        group, cross = self.topology.node_group(rank), self.topology.cross_group(rank)
        self.local_rank, self.local_size = self.topology.local_rank(rank), len(group)
        self.cross_rank, self.cross_size = cross.index(rank), len(cross)
        self._node = comm.split(self.topology.node(rank), self.local_rank, "node")
        self._resources.callback(self._node.free)
        comm.levels = ["node" if other in group else "cross" for other in range(comm.size)]

    def _assign_device(self) -> None:
        """Distribute the GPUs of every host over its ranks."""
        gather = self._comm.gather
        with errors.agreement(gather, self.rank):
            visible = devices.visible_gpus(self.settings.device)
        visible_gpus = gather(visible)
        with errors.agreement(gather, self.rank):
            indices = devices.assign(self.hosts, visible_gpus)
        self._gpus = [  # identifier of each rank's GPU, by rank; empty for a CPU
            "" if index is None else names[index]
            for index, names in zip(indices, visible_gpus, strict=True)
        ]
        index = indices[self.rank]
        self.device = torch.device("cpu") if index is None else torch.device("cuda", index)
        _select_gpu(self.device)
        self.kernels = DeviceKernels(self.device)

    def _check(self) -> None:
        """Gather the facts of all ranks, check them, and set the number of threads.

        Raises AgreedError for what fails.
        """
        local = collect(
            host=self._watch.host,
            host_key=self.hosts[self.rank],
            gpu=self._gpus[self.rank],
            library=self.library.build,
            size=mpi.job_size(),
            clock=self._met,
        )
        self.facts: list[RankFacts] = self._comm.gather(local)
        self.findings: dict[str, Finding] = rank_facts.examine(self.facts)
        if failed := [str(one) for one in self.findings.values() if one.status == "fail"]:
            raise AgreedError("; ".join(failed), self.rank)
        if local.cores and not local.threads:
            torch.set_num_threads(rank_facts.fair_threads(self.facts, self.rank))

    def _tell_launch(self) -> None:
        """Note the steps of all optimizers of rank 0 for `mntrain launch`, if it has started it."""
        notes = LaunchNotes.of(os.environ) if self.master else None
        if notes is not None:
            hook = register_optimizer_step_post_hook(lambda *_: notes.take_step())
            self._resources.callback(hook.remove)

    def _start_engine(self) -> None:
        """Start the communication thread, which makes all MPI calls from here on."""
        rank, comm = self.rank, self._comm
        own = own_addresses(), secrets.token_bytes(32)
        interfaces, keys = zip(*comm.gather(own), strict=True)
        listener, address, towards = None, None, ""
        if rank in MONITORS and rank < comm.size - 1:
            others = {
                host: found
                for host, found in zip(self.hosts, interfaces, strict=True)
                if host != self.hosts[rank]
            }
            towards = address_towards(others.values())
        with errors.agreement(comm.gather, rank):
            if towards:
                allow_files(comm.size)
                listener = listen(towards, port_numbers(self.settings.port_range))
                address = listener.getsockname()[:2]
        addresses = {r: a for r, a in enumerate(comm.gather(address)) if a is not None}
        engine = self._engine = ProgressEngine(partial(_select_gpu, self.device))
        engine.main.observer = self.recorder
        self.watchdog = self._watch.others = Watchdog(
            rank,
            self.facts,
            engine,
            Limits(self.settings.warn_after, self.settings.timeout),
            channel=SideChannel(rank, keys[0], listener, lost_after=self.settings.lost_after),
            addresses=addresses,
            fail=lambda report: engine.stop(RemoteRankError(**report)),
            recorder=self.recorder,
        )
        self._resources.callback(self.watchdog.leave_world)
        engine.watch = DisagreementWatch(comm, engine.streams, partial(AgreedError, rank=rank))
        self._resources.callback(engine.close)
        engine.observe = self.recorder.span

    def _make_collectives(self) -> None:
        """Choose how tensors on GPUs travel, and make the collectives over all ranks."""
        comm, node, engine = self._comm, self._node, self._engine
        self._copier = None
        if self.device.type == "cuda":
            self._copier = DeviceCopy(self.device, self.kernels.add)
        self.waits = OwnClock(engine, self._copier)
        context = transport.TransportContext(
            comm, node, self.topology, engine, self._copier, self._gpus, self._resources
        )
        try:
            selected = transport.select_transport(self.settings.transport, context)
        except ValueError as error:
            raise AgreedError(str(error), self.rank) from None
        warning = self._copier.warning if self._copier else ""
        self.transport: str = selected.name
        self.transport_line = "; ".join(filter(None, [selected.line, warning]))
        self.algorithm = self.settings.algorithm
        given = self.settings.link
        self.link = (
            Link.of(given)
            if given
            else engine.call(partial(measure_link, comm, self.topology)).wait()
        )

        def make() -> WorldCollectives:
            return WorldCollectives(
                comm,
                node,
                self.topology,
                engine,
                self._copier,
                choice=AlgorithmChoice(self.algorithm, link=self.link),
            ).replace(transport=selected.name or "host", node_first=selected.node_first)

        self.collectives = engine.call(make).wait()

    def _gather_places(self) -> None:
        """Gather the place of every rank on all ranks."""
        place = Place(
            rank=self.rank,
            host=self._watch.host,
            node=self.topology.node(self.rank),
            local_rank=self.local_rank,
            gpu=self._gpus[self.rank],
            **describe_device(self.device),
        )
        gathered = self._engine.call(lambda: self._comm.gather(place))
        self.places: list[Place] = gathered.wait()

    def group_collectives(
        self, level: Literal["node", "cross"], user: str = ""
    ) -> WorldCollectives:
        """Make collectives over this rank's node or cross group. Collective over the world.

        All messages count for `level`. Tensors on GPUs are staged in host memory where the world's
        go through NCCL. The node group has the world's shared memory. `user` names what the
        collectives are for, the same on all ranks, if they are not the world's own.
        """
        rank, topology, world = self.rank, self.topology, self.collectives
        group = topology.node_group(rank) if level == "node" else topology.cross_group(rank)
        memory = world.memory if level == "node" else None
        name = f"the {level} group of rank {group[0]}{user and f' of {user}'}"

        def make() -> WorldCollectives:
            # With all ranks: one that fails later must not leave others alone in a call of MPI.
            comm = self._comm.split(group[0], group.index(rank), name)
            comm.traffic, comm.levels = self._comm.traffic, [level] * comm.size
            return self._over(comm, group, name, memory=memory)

        return world.call_together(make, f"world.{level}_collectives").wait()

    def subgroup(
        self,
        ranks: Sequence[int],
        name: str,
        meetings: Messages,
        timeout_s: float | None = None,
    ) -> tuple[WorldCollectives, Messages]:
        """Make what some ranks of the world communicate by, in this order. Collective over these.

        `name` is new to the world; `meetings` are messages between all of its ranks; `timeout_s`:
        seconds of a wait without progress that end the job, if other than the world's.
        """

        def make() -> tuple[WorldCollectives, Messages]:
            comm = self._comm.of_members(ranks, tag, name)
            collectives = self._over(comm, ranks, name, timeout_s=timeout_s)
            label = f"messages of {name}"
            messages = Messages(comm.duplicate(label), self._engine, label, ranks, timeout_s)
            return collectives, messages

        tag = digest_of(name) % MEETING_TAGS
        return meetings.meet([r for r in ranks if r != self.rank], tag, make).wait()

    def _over(
        self,
        comm: mpi.Communicator,
        ranks: Sequence[int],
        name: str,
        *,
        memory: NodeSharedMemory | None = None,
        timeout_s: float | None = None,
    ) -> WorldCollectives:
        """Make collectives of some ranks, with the world's algorithm. Collective over these.

        In the engine. `memory` is that of their nodes, by default new.
        """
        topology, world, rank = self.topology, self.collectives, self.rank
        groups = [[r for r in node if r in ranks] for node in topology.nodes]
        nodes = sorted(tuple(sorted(map(ranks.index, group))) for group in groups if group)
        node = comm
        self._groups.callback(comm.free)
        if len(nodes) > 1:
            node = comm.split(topology.node(rank), ranks.index(rank), f"{name}, node")
            self._groups.callback(node.free)
        mates = topology.node_group(rank)
        local_ranks = [mates.index(r) for r in ranks if r in mates]
        return WorldCollectives(
            comm,
            node,
            Topology(tuple(nodes)),
            self._engine,
            self._copier,
            stream=self._engine.add_stream(name, ranks, timeout_s),
            choice=world.choice,
            memory=memory or world.memory.among(node, local_ranks),
        ).replace(transport="host" if world.transport == "nccl" else world.transport)

    def messages(self, name: str) -> Messages:
        """Make messages between two ranks of the world. Collective. `name` is new to it."""

        def make() -> Messages:
            return Messages(self._comm.duplicate(name), self._engine, name)

        return self.collectives.call_together(make, f"the start of {name}").wait()

    def node_levels(self, user: str) -> NodeLevels:
        """Make the groups of a communication hook. Collective. `user` names the optimizer."""
        node = self.group_collectives("node", user)
        cross = self.group_collectives("cross", user)
        choice = cross.choice.among_others()
        return NodeLevels(
            node.replace(choice=choice),
            cross.replace(choice=choice),
            self.topology.nodes,
            self.topology.lane_slots,
        )

    def memory_room(self) -> float:
        """Return by what factor the peak of this rank's GPU memory may grow; inf on a CPU. Local.

        Ranks of one GPU share what is free on it.
        """
        own = self.places[self.rank]
        mates = [place for place in self.places if (place.host, place.gpu) == (own.host, own.gpu)]
        return memory_room(self.device, len(mates))

    def usage(self) -> list[Usage]:
        """Return the resources that each rank has used so far, by rank. Collective."""
        traffic, busy_s = self._comm.traffic, self.collectives.busy_s
        own = Usage(
            peak_memory=peak_memory(),
            node_messages=traffic.messages["node"],
            node_bytes=traffic.bytes["node"],
            cross_messages=traffic.messages["cross"],
            cross_bytes=traffic.bytes["cross"],
            communication_s=busy_s,
            exposed_s=min(self.collectives.waited_s, busy_s),
            pinned_memory=self._copier.pinned_bytes if self._copier else 0,
            buffer_memory=traffic.buffer_bytes,
            before_bytes=round(traffic.before_bytes),
            compressed_bytes=traffic.compressed_bytes,
            **device_memory(self.device),
        )
        return self.gather(own)

    def agreement(self) -> AbstractContextManager[None]:
        """Return the context of `errors.agreement` over all ranks. Its end is collective."""
        self._engine.check_open()
        return errors.agreement(partial(self._gather, "a check on all ranks"), self.rank)

    def barrier(self) -> None:
        """Wait until all ranks are here. Collective."""
        self._gather("world.barrier", None)

    def gather(self, value: T) -> list[T]:
        """Return every rank's object, by rank. Collective; for small picklable objects.

        Tensors among them arrive as new ones, on a device of the name that they had.
        """
        caller, name = sys._getframe(1), "world.gather"
        if caller.f_code.co_filename.startswith(INTERNAL):  # beside the user's, an error of ranks
            name = f"a gather in {caller.f_globals['__name__']}"
        return self._gather(name, value)

    def _gather(self, name: str, value: T) -> list[T]:
        """Return every rank's object, for a call of this name, which ranks compare. Collective."""
        return self.collectives.gather_objects(value, name).wait()

    def gather_later(self, value: T) -> Future[list[T]]:
        """Start a `gather`, and return a future whose `wait` returns its result. Collective.

        The value is taken as it is now, and may change at once.
        """
        return self.collectives.gather_objects(value, "world.gather")

    def broadcast(self, value: T) -> T:
        """Return rank 0's picklable object, or tensor, on every rank. Collective.

        Rank 0 gets its own back, and others a copy, whose tensors are on their own `device` if
        rank 0's are on a GPU. What other ranks give is not used.
        """
        packed: bytes | None = None
        if self.master:
            stream = BytesIO()
            torch.save(value, stream)
            packed = stream.getvalue()
        received = self._gather("world.broadcast", packed)[0]
        if self.master:
            return value
        assert received is not None

        def place(storage: Any, location: str) -> Any:
            return storage if location == "cpu" else storage.to(device=self.device)

        loaded: T = torch.load(BytesIO(received), map_location=place, weights_only=False)
        return loaded

    def print(self, *values: object, **options: Any) -> None:
        """Print on rank 0, as `print` does, and flush. Local; nothing on other ranks."""
        if self.master:
            print(*values, **{"flush": True, **options})

    @overload
    def sum(self, values: Number) -> Number: ...

    @overload
    def sum(self, values: Sequence[float]) -> list[float]: ...

    def sum(self, values: float | Tensor | Sequence[float]) -> Any:
        """Return the sum over all ranks, in fp64. Collective.

        Of a number a float; of a list, of the same length on all ranks, a list, elementwise; of a
        tensor, of the same shape on all ranks, a new one, elementwise, and dense. Raises TypeError
        for anything else, such as complex numbers.
        """
        if is_complex(values):
            raise TypeError(f"world.sum of complex numbers: {REAL}")
        if isinstance(values, Tensor):
            totals = dense(values).to(torch.float64, copy=True).contiguous()
        else:
            try:
                totals = torch.tensor(values, dtype=torch.float64, device="cpu")
            except (TypeError, ValueError) as error:
                raise TypeError(
                    f"world.sum of {values!r}: give a number, a list of numbers or a tensor"
                ) from error
        name = named_by_shape("world.sum", values)
        self.collectives.named(name).all_reduce(totals.view(-1)).wait()
        return totals if isinstance(values, Tensor) else totals.tolist()
