"""The backend "mntrain" of torch.distributed: its process groups over MPI.

    mpirun -np 4 python script.py

    import torch.distributed as dist
    import mntrain.torch_backend

    dist.init_process_group("mntrain")

The import starts MPI, and sets the variables of torchrun, for torch and for scripts that read them:
RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK (the node) and others to MPI's numbers,
MASTER_ADDR and MASTER_PORT unless all ranks have the same. Collective over all ranks of the job.
Raises AgreedError if MPI cannot start, and for ranks of torchrun without MPI.
"""

import os
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing import current_process, parent_process
from typing import Any, ClassVar
from urllib.parse import parse_qsl, urlparse

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import _rendezvous_handlers

from mntrain.checks import launcher
from mntrain.comm.messages import Messages
from mntrain.comm.mpi import Communicator
from mntrain.errors import AgreedError, start_mpi
from mntrain.torch_backend.process_group import NAME, MpiProcessGroup, refuse_fp16_hook_in_cpp
from mntrain.torch_backend.work import keep_works_of_join
from mntrain.watchdog.side_channel import address_towards, own_addresses
from mntrain.world import World, init

_OLDEST_TORCH = (2, 9)
_RANKS = "start the script with mpirun -n or srun, and call its function without mp.spawn"
# Torch's sharded tensors communicate from a GPU if the backend takes any.
_DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
_TORCHRUN = "TORCHELASTIC_RUN_ID"  # torchrun sets it for its processes


class _Default:
    """The default group's world, and the messages between its ranks that make other groups.

    The world stays open when the group is destroyed, which ranks may do at any time, and ends with
    the process, or when all ranks make another default group.
    """

    world: World | None = None
    meetings: Messages | None = None
    made: ClassVar[Counter[str]] = Counter()  # other groups so far, by torch's name


def create(opts: Any, _: object) -> MpiProcessGroup:
    """Make a group: the default one on all ranks, any other on its members. Collective there."""
    ranks: list[int] = opts.global_ranks_in_group
    if not ranks:
        return _make_default(opts.group_rank, opts.group_size, opts.timeout, opts.store)
    world, meetings = _Default.world, _Default.meetings
    if world is None or meetings is None:
        raise RuntimeError(f"a group of backend {NAME} needs a default group of backend {NAME}")
    _Default.made[opts.group_id] += 1  # torch gives the name of a destroyed group again
    name = f"torch's group {opts.group_id}, number {_Default.made[opts.group_id]}"
    # Torch gives its default where the script has named none: then the world's counts.
    own_s = None if opts.timeout == default_pg_timeout else opts.timeout.total_seconds()
    collectives, messages = world.subgroup(ranks, name, meetings, own_s)
    return MpiProcessGroup(collectives, messages, opts.store, opts.timeout)


def _make_default(rank: int, size: int, timeout: timedelta, store: Store) -> MpiProcessGroup:
    if _is_child():
        raise RuntimeError(f"a process that a rank has started cannot be a rank itself: {_RANKS}")
    if _Default.world is not None:  # of a group that was destroyed
        _Default.world.close()
    world = init(timeout=timeout.total_seconds())
    if world.size == 1 and not _launched():
        _warn("the group has one rank, since neither mpirun -n nor srun has started the script")
    with world.agreement():
        if size > world.size == 1:
            raise ValueError(f"init_process_group is for {size} ranks, and MPI has one: {_RANKS}")
        if (rank, size) != (world.rank, world.size):
            raise ValueError(
                f"init_process_group is for rank {rank} of {size}, and MPI has rank {world.rank} "
                f"of {world.size}: unset RANK and WORLD_SIZE, and leave rank and world_size out"
            )
    _Default.world = world
    _Default.made.clear()  # torch numbers the groups of each default group from 0
    _Default.meetings = world.messages("meetings of torch's groups")
    messages = world.messages("messages of torch's world")
    return MpiProcessGroup(world.collectives, messages, store, timeout)


def _is_child() -> bool:
    """Return whether this is a process of multiprocessing, such as a data-loader worker.

    A spawned one imports the script, and is still inheriting from its parent then.
    """
    return parent_process() is not None or getattr(current_process(), "_inheriting", False)


def _launched() -> bool:
    """Return whether a launcher of MPI has started this process."""
    return launcher.first_number(os.environ, launcher.RANK_VARIABLES) is not None


def _start() -> None:
    """Start MPI, and set what torch and scripts read of a job."""
    if tuple(map(int, torch.__version__.split(".")[:2])) < _OLDEST_TORCH:
        # Its C++ code waits forever for works of Python that Python has let go.
        raise AgreedError(
            f"backend {NAME} needs torch 2.9 or newer, and this is {torch.__version__}: update it, "
            "or take world.optimizer, which has no use for torch.distributed",
            int(os.environ.get("RANK", "0")),
        )
    if _TORCHRUN in os.environ and not _launched():
        raise AgreedError(
            f"torchrun has started this process, and backend {NAME} needs ranks of MPI: start the "
            "script with mpirun or srun in place of torchrun, or take backend gloo or nccl",
            int(os.environ.get("RANK", "0")),
        )
    comm, _ = start_mpi()
    hosts, interfaces = comm.node_keys(), comm.gather(own_addresses())
    mates = [rank for rank, host in enumerate(hosts) if host == hosts[comm.rank]]
    others = [found for found, host in zip(interfaces, hosts, strict=True) if host]
    nodes = sorted(set(hosts))  # a node is torchrun's group
    numbers = {
        ("RANK", "ROLE_RANK"): comm.rank,
        ("WORLD_SIZE", "ROLE_WORLD_SIZE"): comm.size,
        ("LOCAL_RANK",): mates.index(comm.rank),
        ("LOCAL_WORLD_SIZE",): len(mates),
        ("GROUP_RANK",): nodes.index(hosts[comm.rank]),
        ("GROUP_WORLD_SIZE",): len(nodes),
    }
    values = {name: str(number) for names, number in numbers.items() for name in names}
    left = [name for name, value in values.items() if os.environ.get(name, value) != value]
    os.environ.update(values)
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # there is no agent of torchrun
    given = {name: os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")}
    found = comm.gather((given, left))
    same = [name for name in given if all(of[name] == given[name] for of, _ in found)]
    differ = given.keys() - same
    for name in differ:
        os.environ.pop(name, None)
    if comm.rank == 0 and (names := sorted(differ.union(*(left for _, left in found)))):
        _warn(f"{', '.join(names)} of the environment were not this job's, and are replaced")
    address = comm.gather(address_towards(others))[0]
    os.environ.setdefault("MASTER_ADDR", address)
    if "MASTER_PORT" not in os.environ:
        _Stores(comm, address).install()


def _warn(text: str) -> None:
    print(f"mntrain: warning: {text}", file=sys.stderr, flush=True)


class _Stores:
    """Torch's stores of a job whose user names no port: rank 0 takes a free one for each.

    Each default group has a store of its own, so ranks may start the next group while others still
    end the one before. `comm` is of all ranks, and `address` is rank 0's.
    """

    def __init__(self, comm: Communicator, address: str) -> None:
        self._comm, self._address = comm, address
        self._port = ""  # that the environment has from here

    def install(self) -> None:
        """Let `init_process_group` without a method make its store here. Collective."""
        port = 0
        if self._comm.rank == 0:  # also for scripts that read it before the group starts
            with socket.create_server((self._address, 0)) as probe:
                port = probe.getsockname()[1]
        self._set_port(port)
        self._of_torch = _rendezvous_handlers["env"]
        _rendezvous_handlers["env"] = self._meet

    def _set_port(self, port: int) -> None:
        self._port = os.environ["MASTER_PORT"] = str(self._comm.gather(port)[0])

    def _meet(
        self, url: str, timeout: timedelta = default_pg_timeout, **more: Any
    ) -> Iterator[tuple[Any, int, int]]:
        """Yield a new store, this rank and the number of ranks. Collective."""
        if os.environ.get("MASTER_PORT") != self._port:  # the user has set one since
            yield from self._of_torch(url, timeout=timeout, **more)
            return
        given = dict(parse_qsl(urlparse(url).query))  # the arguments of init_process_group
        rank, size, store = self._comm.rank, self._comm.size, None
        host = os.environ["MASTER_ADDR"]
        if rank == 0:
            store = TCPStore(host, 0, size, is_master=True, timeout=timeout, wait_for_workers=False)
        self._set_port(store.port if store else 0)
        if store is None:
            store = TCPStore(host, int(self._port), size, is_master=False, timeout=timeout)
        yield store, int(given.get("rank", rank)), int(given.get("world_size", size))


dist.Backend.register_backend(NAME, create, extended_api=True, devices=_DEVICES)
keep_works_of_join()
refuse_fp16_hook_in_cpp()
if not _is_child():
    _start()
