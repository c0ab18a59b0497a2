"""The variants that step.py compares: baselines, mntrain, torch and DeepSpeed."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from common import AbsentError, start_gloo, stop_gloo
from gpt import ADAMW, MICRO_BATCH, Batch, loss_of, plain_step
from mpi4py import MPI
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import mntrain.sync
from mntrain.bench.candidates import rendezvous
from zero.comm_hooks.between_nodes import Int8Hook


class Variant(NamedTuple):
    """One way to train."""

    step: Callable[[Batch], Tensor]  # returns the loss
    settings: str
    finish: Callable[[], None] | None = None  # waits for what a step leaves in progress


def compute_only(model: nn.Module, _: None) -> Variant:
    """Forward, backward and update without communication."""
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    return Variant(plain_step(model, optimizer), "as many ranks, each for itself")


def compute_with_barriers(model: nn.Module, _: None) -> Variant:
    """The same, with a barrier after every step, as any synchronous training needs."""
    step = compute_only(model, None).step

    def step_with_barrier(batch: Batch) -> Tensor:
        loss = step(batch)
        rendezvous(MPI.COMM_WORLD)
        return loss

    return Variant(step_with_barrier, "the same, with a barrier after every step")


def mntrain_stage(
    stage: int, **options: Callable[[], Any]
) -> Callable[[nn.Module, mntrain.World], Variant]:
    """Return a maker of mntrain with default settings but for `options`, which are made anew."""
    usual = f"defaults, except {' and '.join(options)}" if options else "defaults"

    def make(model: nn.Module, world: mntrain.World) -> Variant:
        made = {name: option() for name, option in options.items()}
        optimizer = world.optimizer(model, torch.optim.AdamW, stage=stage, **made, **ADAMW)
        return Variant(plain_step(model, optimizer), usual, optimizer.wait_for_parameters)

    return make


def ddp(bucket_mb: int, hook: str = "", *, sharded: bool = False) -> Callable[..., Variant]:
    """Return a maker of DDP, with a hook of torch's, or with ZeroRedundancyOptimizer."""

    def make(model: nn.Module, _: None) -> Variant:
        # gloo does not bear the order in which PowerSGD's hook starts collectives of several.
        cap = 1000 if hook == "PowerSGD" else bucket_mb
        wrapped = DistributedDataParallel(model, bucket_cap_mb=cap, gradient_as_bucket_view=True)
        if hook == "PowerSGD":
            rank = {"matrix_approximation_rank": 4, "min_compression_rate": 1}
            state = PowerSGDState(None, start_powerSGD_iter=2, **rank)
            wrapped.register_comm_hook(state, powerSGD_hook)
        elif hook == "bf16":
            wrapped.register_comm_hook(None, summed_in_bf16)
        parameters, adamw = model.parameters(), torch.optim.AdamW
        optimizer = (
            ZeroRedundancyOptimizer(parameters, adamw, parameters_as_bucket_view=True, **ADAMW)
            if sharded
            else adamw(parameters, **ADAMW)
        )
        return Variant(plain_step(wrapped, optimizer), f"{cap} MB buckets, gradients as views")

    return make


def summed_in_bf16(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Call torch's hook, which DDP itself refuses without NCCL by its name; gloo can sum bf16."""
    return bf16_compress_hook(group, bucket)


def fsdp(*, reshard: bool) -> Callable[[nn.Module, None], Variant]:
    """Return a maker of FSDP2 with one group per block.

    reshard: backward gathers the parameters again (ZeRO-3); otherwise they stay (ZeRO-2).
    """

    def make(model: nn.Module, _: None) -> Variant:
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh, reshard_after_forward=reshard)
        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
        settings = f"one group per block, reshard_after_forward={reshard}"
        return Variant(plain_step(model, optimizer), settings)

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
        raise AbsentError(f"{type(error).__name__}: {' '.join(str(error).split())}") from error
    # Otherwise it looks for a compiler, for a shared-memory all-reduce that training does not use.
    import_module("deepspeed.ops").__compatible_ops__ = {}
    with gloo():
        package.init_distributed("gloo")
        yield package


Group = Callable[[], AbstractContextManager[Any]]
STAGES = (0, 1, 2)
RARE = {  # modes that exchange parameters after so many steps
    "local SGD": (mntrain.sync.LocalSGD, 20),
    "DiLoCo": (mntrain.sync.DiLoCo, 20),
    "SparseLoCo": (mntrain.sync.SparseLoCo, 20),
    "SparseLoCo (1/16)": (partial(mntrain.sync.SparseLoCo, density=1 / 16), 5),
}
overlapped = partial(mntrain_stage, overlap_forward=lambda: True)
bf16_wire = partial(mntrain.init, wire_dtype="bf16")
VARIANTS: dict[str, tuple[Group, Callable[..., Variant]]] = {
    "compute only": (nullcontext, compute_only),
    "compute only, barriers": (nullcontext, compute_with_barriers),
    **{f"mntrain stage {stage}": (mntrain.init, mntrain_stage(stage)) for stage in STAGES},
    **{f"mntrain stage {it}, overlap_forward": (mntrain.init, overlapped(it)) for it in (1, 2)},
    **{f"mntrain stage {stage}, bf16 wire": (bf16_wire, mntrain_stage(stage)) for stage in STAGES},
    "mntrain stage 0, int8": (mntrain.init, mntrain_stage(0, comm_hook=Int8Hook)),
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
    "DDP, bf16 hook": (gloo, ddp(25, "bf16")),
    "DDP, PowerSGD hook": (gloo, ddp(25, "PowerSGD")),
    "FSDP2, ZeRO-2": (gloo, fsdp(reshard=False)),
    "FSDP2, ZeRO-3": (gloo, fsdp(reshard=True)),
    **{f"DeepSpeed stage {stage}": (gloo_and_deepspeed, deepspeed(stage)) for stage in STAGES},
    "DDP over mntrain": (backend, ddp(25)),
    "DDP over mntrain, 4 MB buckets": (backend, ddp(4)),
    "FSDP2 over mntrain, ZeRO-2": (backend, fsdp(reshard=False)),
    "FSDP2 over mntrain, ZeRO-3": (backend, fsdp(reshard=True)),
}
