"""Torch's own ways to train over slow links: communication hooks of DDP, and post-local SGD."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

PLAIN, BF16, POWERSGD, POST_LOCAL = "DDP", "DDP, bf16 hook", "DDP, PowerSGD hook", "PostLocalSGD"
TORCHFT = "torchft DiLoCo"
PEERS = (PLAIN, BF16, POWERSGD, POST_LOCAL, TORCHFT)
RANK = 4  # of PowerSGD's factors


def wrapped(
    name: str, model: nn.Module, optimizer: Optimizer, *, warmup: int, every: int, node: int
) -> tuple[DistributedDataParallel, Optimizer]:
    """Return a model and its optimizer as the peer `name` trains them, on a gloo group. Collective.

    warmup: the first steps, without compression or exchanges of parameters.
    every: steps between PostLocalSGD's averages. node: the number of this rank's node.
    """
    state: Any
    # In one bucket: of several, PowerSGD's hook starts collectives in an order that may differ
    # between ranks, which gloo does not bear.
    cap = {"bucket_cap_mb": 1000} if name == POWERSGD else {}
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, **cap)
    if name == BF16:
        ddp.register_comm_hook(None, _bf16)
    elif name == POWERSGD:
        # All matrices that become smaller are compressed; the hook needs two steps before.
        state = PowerSGDState(
            None,
            matrix_approximation_rank=RANK,
            start_powerSGD_iter=max(2, warmup),
            min_compression_rate=1,
        )
        ddp.register_comm_hook(state, powerSGD_hook)
    elif name in (POST_LOCAL, TORCHFT):  # torchft averages no gradients
        state = PostLocalSGDState(None, _subgroup(node), warmup)
        ddp.register_comm_hook(state, post_localSGD_hook)
    if name == POST_LOCAL:
        averager = PeriodicModelAverager(period=every, warmup_steps=warmup)
        return ddp, PostLocalSGDOptimizer(optimizer, averager)
    return ddp, optimizer


def _bf16(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Call torch's hook, which DDP itself refuses without NCCL by its name; gloo can sum bf16."""
    return bf16_compress_hook(group, bucket)


@contextmanager
def torchft_diloco(
    model: nn.Module, optimizer: Optimizer, *, every: int, comm: MPI.Intracomm
) -> Iterator[None]:
    """Let torchft's DiLoCo exchange parameters after steps of `optimizer`. Collective.

    Each rank is a replica group, with the outer optimizer of the paper, as mntrain has it.
    """
    from torchft import Manager, ProcessGroupGloo  # noqa: PLC0415 - rarely installed
    from torchft.coordination import LighthouseServer  # noqa: PLC0415
    from torchft.local_sgd import DiLoCo  # noqa: PLC0415

    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=comm.size) if comm.rank == 0 else None
    address = comm.bcast(lighthouse.address() if lighthouse else None)
    host = socket.gethostbyname(socket.gethostname())
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=comm.size,
        use_async_quorum=False,
        rank=0,
        world_size=1,
        store_addr=host,
        store_port=store.port,
        lighthouse_addr=address,
        replica_id=f"node{comm.rank}",
        hostname=host,
        init_sync=False,
    )
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    try:
        with DiLoCo(manager, [model], optimizer, outer, sync_every=every):
            yield
    finally:
        comm.Barrier()
        manager.shutdown(wait=False)
        if lighthouse:
            lighthouse.shutdown()


def average(model: nn.Module) -> None:
    """Replace parameters by their means over all ranks. Collective."""
    with torch.no_grad():
        for parameter in model.parameters():
            dist.all_reduce(parameter)
            parameter.div_(dist.get_world_size())


def _subgroup(node: int) -> dist.ProcessGroup:
    """Return the gloo group of this rank's node. Collective."""
    nodes = MPI.COMM_WORLD.allgather(node)
    members = [[r for r, at in enumerate(nodes) if at == one] for one in sorted(set(nodes))]
    group, _ = dist.new_subgroups_by_enumeration(members)
    return group
