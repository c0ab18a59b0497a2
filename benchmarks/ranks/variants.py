"""The variants that step.py compares: baselines, mntrain, torch, DeepSpeed and Horovod."""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from common import absence, start_gloo, start_horovod, stop_gloo
from ddp_peers import BF16, POST_LOCAL, POWERSGD, wrapped
from gpt import ADAMW, MICRO_BATCH, Batch, loss_of, plain_step
from mpi4py import MPI
from sockets import Ring, exchanged, ring
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import mntrain.sync
from mntrain.bench.candidates import rendezvous
from mntrain.compression.int8 import Int8Hook


class Variant(NamedTuple):
    """One way to train."""

    step: Callable[[Batch], Tensor]  # returns the loss
    settings: str
    # Bytes of the model state by role, as "measured".
    state: Callable[[], dict[str, dict[str, int]]] | None = None
    # Seconds so far in which the caller waited for collectives, and any was in progress.
    clocks: Callable[[], tuple[float, float]] | None = None
    # Waits for communication that a step leaves in progress.
    finish: Callable[[], None] | None = None


def compute_only(model: nn.Module, _: None) -> Variant:
    """Forward, backward and update without communication."""
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    return Variant(plain_step(model, optimizer), "as many ranks, each for itself")


def compute_with_norm(model: nn.Module, _: None) -> Variant:
    """The same, computing the gradient norm before the update, as for clipping."""
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    parameters = list(model.parameters())

    def step(batch: Batch) -> Tensor:
        loss = loss_of(model, batch)
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if not math.isfinite(float(norm)):
            raise ArithmeticError(f"the gradient's norm is {norm}")
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Variant(step, "compute only, with the gradient norm")


def compute_with_barriers(model: nn.Module, _: None) -> Variant:
    """The same, with a barrier after every step, as any synchronous training needs."""
    step = compute_only(model, None).step

    def step_with_barrier(batch: Batch) -> Tensor:
        loss = step(batch)
        rendezvous(MPI.COMM_WORLD)
        return loss

    return Variant(step_with_barrier, "the same, with a barrier after every step")


def compute_with_sockets(model: nn.Module, connections: Ring) -> Variant:
    """The same, sending as many bytes as an all-reduce over raw sockets."""
    settings = "the same, sending and receiving as many bytes over blocking sockets, unused"
    return Variant(exchanged(model, connections), settings)


def mntrain_stage(
    stage: int, **options: Callable[[], Any]
) -> Callable[[nn.Module, mntrain.World], Variant]:
    """Return a maker of mntrain with default settings but for `options`, which are made anew."""
    usual = f"defaults, except {' and '.join(options)}" if options else "defaults"

    def make(model: nn.Module, world: mntrain.World) -> Variant:
        made = {name: option() for name, option in options.items()}
        optimizer = world.optimizer(model, torch.optim.AdamW, stage=stage, **made, **ADAMW)
        return Variant(
            plain_step(model, optimizer),
            usual,
            lambda: {"measured": asdict(optimizer.memory())},
            lambda: (world.collectives.waited_s, world.collectives.busy_s),
            optimizer.wait_for_parameters,
        )

    return make


def ddp(bucket_mb: int, *, sharded: bool = False) -> Callable[[nn.Module, None], Variant]:
    """Return a maker of DDP, with AdamW or with ZeroRedundancyOptimizer."""

    def make(model: nn.Module, _: None) -> Variant:
        wrapped = DistributedDataParallel(
            model, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True
        )
        if sharded:
            optimizer = ZeroRedundancyOptimizer(
                model.parameters(),
                torch.optim.AdamW,
                parameters_as_bucket_view=True,
                **ADAMW,
            )
        else:
            optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
        return Variant(
            plain_step(wrapped, optimizer), f"{bucket_mb} MB buckets, gradients as views"
        )

    return make


def ddp_peer(name: str) -> Callable[[nn.Module, None], Variant]:
    """Return a maker of one of DDP's own ways to send less."""

    def make(model: nn.Module, _: None) -> Variant:
        comm = MPI.COMM_WORLD
        leader = comm.Split_type(MPI.COMM_TYPE_SHARED).bcast(comm.rank)
        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
        step = plain_step(*wrapped(name, model, optimizer, warmup=0, every=EVERY, node=leader))
        return Variant(step, "25 MB buckets, gradients as views, over gloo")

    return make


def fsdp(*, reshard: bool) -> Callable[[nn.Module, None], Variant]:
    """Return a maker of FSDP2 with one group per block.

    reshard: backward gathers the parameters again (ZeRO-3); otherwise they stay (ZeRO-2).
    """

    def make(model: nn.Module, _: None) -> Variant:
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh, reshard_after_forward=reshard)
        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
        return Variant(
            plain_step(model, optimizer), f"one group per block, reshard_after_forward={reshard}"
        )

    return make


def deepspeed(stage: int) -> Callable[[nn.Module, Any], Variant]:
    """Return a maker of DeepSpeed with torch's AdamW."""

    def make(model: nn.Module, package: Any) -> Variant:
        engine, *_ = package.initialize(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), **ADAMW),
            config={
                "train_micro_batch_size_per_gpu": MICRO_BATCH,
                "zero_optimization": {"stage": stage},
                "zero_allow_untested_optimizer": True,
                "gradient_clipping": 0.0,  # on by default, unlike in the other variants
            },
        )

        def step(batch: Batch) -> Tensor:
            loss = loss_of(engine, batch)
            engine.backward(loss)
            engine.step()
            return loss.detach()

        return Variant(step, "defaults, except torch's AdamW and no clipping")

    return make


def horovod(model: nn.Module, hvd: Any) -> Variant:
    """Horovod's optimizer around torch's AdamW."""
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), **ADAMW),
        named_parameters=model.named_parameters(),
    )
    return Variant(plain_step(model, optimizer), "defaults, over MPI")


@contextmanager
def gloo() -> Iterator[None]:
    """Use a gloo group of all ranks."""
    start_gloo(MPI.COMM_WORLD)
    yield
    stop_gloo(MPI.COMM_WORLD)


@contextmanager
def backend() -> Iterator[None]:
    """Use a group of backend mntrain of all ranks."""
    import_module("mntrain.torch_backend")
    dist.init_process_group("mntrain")
    yield
    dist.destroy_process_group()


@contextmanager
def gloo_and_deepspeed() -> Iterator[Any]:
    """Yield DeepSpeed, on a gloo group. Raises AbsentError if it cannot be imported."""
    comm = MPI.COMM_WORLD
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": str(comm.rank), "WORLD_SIZE": str(comm.size)}
    os.environ["LOCAL_RANK"] = str(comm.Split_type(MPI.COMM_TYPE_SHARED).rank)
    try:
        package = import_module("deepspeed")
    except Exception as error:  # its modules raise all kinds of errors
        raise absence(error) from error
    # Otherwise it looks for a compiler, for a shared-memory all-reduce that training does not use.
    import_module("deepspeed.ops").__compatible_ops__ = {}
    with gloo():
        package.init_distributed("gloo")
        yield package


@contextmanager
def started_horovod() -> Iterator[Any]:
    """Yield Horovod. Raises AbsentError if it is not available."""
    hvd = start_horovod()
    yield hvd
    hvd.shutdown()


Group = Callable[[], AbstractContextManager[Any]]
Make = Callable[[nn.Module, Any], Variant]
STAGES = (0, 1, 2)
COMPRESSED = {"int8": Int8Hook}  # for slow links
EVERY = 20  # steps between exchanges, where nothing else is said
RARE = {
    "local SGD": (mntrain.sync.LocalSGD, EVERY),
    "DiLoCo": (mntrain.sync.DiLoCo, EVERY),
    "SparseLoCo": (mntrain.sync.SparseLoCo, EVERY),
    "SparseLoCo (1/16)": (partial(mntrain.sync.SparseLoCo, density=1 / 16), 5),
}
bf16_wire = partial(mntrain.init, wire_dtype="bf16")
VARIANTS: dict[str, tuple[Group, Make]] = {
    "compute only": (nullcontext, compute_only),
    "compute only, barriers": (nullcontext, compute_with_barriers),
    "compute, raw sockets": (ring, compute_with_sockets),
    **{f"mntrain stage {stage}": (mntrain.init, mntrain_stage(stage)) for stage in STAGES},
    **{
        f"mntrain stage {stage}, overlap_forward": (
            mntrain.init,
            mntrain_stage(stage, overlap_forward=lambda: True),
        )
        for stage in (1, 2)
    },
    **{f"mntrain stage {stage}, bf16 wire": (bf16_wire, mntrain_stage(stage)) for stage in STAGES},
    **{
        f"mntrain stage 0, {name}": (mntrain.init, mntrain_stage(0, comm_hook=hook))
        for name, hook in COMPRESSED.items()
    },
    **{
        f"mntrain stage 0, {name} every {every}": (
            mntrain.init,
            mntrain_stage(0, sync=partial(sync, every=every)),
        )
        for name, (sync, every) in RARE.items()
    },
    "DDP": (gloo, ddp(25)),
    "DDP, 4 MB buckets": (gloo, ddp(4)),
    "DDP, ZeroRedundancyOptimizer": (gloo, ddp(25, sharded=True)),
    "FSDP2, ZeRO-2": (gloo, fsdp(reshard=False)),
    "FSDP2, ZeRO-3": (gloo, fsdp(reshard=True)),
    **{f"DeepSpeed stage {stage}": (gloo_and_deepspeed, deepspeed(stage)) for stage in STAGES},
    "Horovod": (started_horovod, horovod),
    "DDP over mntrain": (backend, ddp(25)),
    "DDP over mntrain, 4 MB buckets": (backend, ddp(4)),
    "FSDP2 over mntrain, ZeRO-2": (backend, fsdp(reshard=False)),
    "FSDP2 over mntrain, ZeRO-3": (backend, fsdp(reshard=True)),
    BF16: (gloo, ddp_peer(BF16)),
    POWERSGD: (gloo, ddp_peer(POWERSGD)),
    f"{POST_LOCAL} every {EVERY}": (gloo, ddp_peer(POST_LOCAL)),
}
INTERVALS = {  # steps between exchanges
    name: int(every)
    for name in VARIANTS
    for _, found, every in [name.rpartition(" every ")]
    if found
}
