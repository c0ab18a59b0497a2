"""The ways to train that step.py compares: this project's, torch's, DeepSpeed's and Horovod's."""

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
from gpt import ADAMW, MICRO_BATCH, Batch, loss_of, plain_step
from mpi4py import MPI
from sockets import Ring, exchanged, ring
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import mntrain
from mntrain.bench.measure import rendezvous


class Way(NamedTuple):
    """One way to train: a step on a batch, which returns its loss, and how it is set.

    `state` gives the bytes of the model's state by role, measured and expected; `clocks` the
    seconds so far in which collectives were waited for, and were under way. Where known. `settle`
    waits for what a step has left under way for the next one to wait for. Where it leaves any.
    """

    step: Callable[[Batch], Tensor]
    settings: str
    state: Callable[[], dict[str, dict[str, int]]] | None = None
    clocks: Callable[[], tuple[float, float]] | None = None
    settle: Callable[[], None] | None = None


def alone(model: nn.Module, _: None) -> Way:
    """Forward, backward and update with no communication: what every other way adds to."""
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    return Way(plain_step(model, optimizer), "as many ranks at once, each for itself")


def normed(model: nn.Module, _: None) -> Way:
    """The same, looking at the whole gradient's norm before the update, as who clips does."""
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

    return Way(step, "computing alone that takes the gradient's norm")


def in_step(model: nn.Module, _: None) -> Way:
    """The same, waiting for all ranks after every step: what any training together waits."""
    step = alone(model, None).step

    def step_together(batch: Batch) -> Tensor:
        loss = step(batch)
        rendezvous(MPI.COMM_WORLD)
        return loss

    return Way(step_together, "the same, and after every step all wait for the last one")


def bare_sockets(model: nn.Module, connections: Ring) -> Way:
    """The same, while as many bytes travel as an all-reduce sends: what they alone take."""
    words = "the same, and as many bytes sent and received by blocking sockets, of which nothing is"
    return Way(exchanged(model, connections), f"{words} made or added: TCP's own part")


def own(stage: int) -> Callable[[nn.Module, mntrain.World], Way]:
    """This project as it comes."""

    def make(model: nn.Module, world: mntrain.World) -> Way:
        optimizer = world.optimizer(model, torch.optim.AdamW, stage=stage, **ADAMW)
        return Way(
            plain_step(model, optimizer),
            f"as it comes; {world.tuning or 'nothing to choose'}",
            lambda: {
                "measured": asdict(optimizer.memory()),
                "expected": asdict(optimizer.expected_memory()),
            },
            lambda: (world.collectives.waited_s, world.collectives.busy_s),
            optimizer.wait_for_parameters,
        )

    return make


def ddp(bucket_mb: int, *, sharded: bool = False) -> Callable[[nn.Module, None], Way]:
    """Torch's data parallelism, with AdamW whole or sharded by ZeroRedundancyOptimizer."""

    def make(model: nn.Module, _: None) -> Way:
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
        return Way(plain_step(wrapped, optimizer), f"{bucket_mb} MB buckets, gradients as views")

    return make


def fsdp(*, again: bool) -> Callable[[nn.Module, None], Way]:
    """Torch's fully sharded data parallelism, a group a block.

    again: backward gathers the parameters once more (ZeRO-3), else forward's stay (ZeRO-2).
    """

    def make(model: nn.Module, _: None) -> Way:
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh, reshard_after_forward=again)
        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
        return Way(plain_step(model, optimizer), f"a group a block, reshard_after_forward={again}")

    return make


def deepspeed(stage: int) -> Callable[[nn.Module, Any], Way]:
    """DeepSpeed with torch's AdamW."""

    def make(model: nn.Module, package: Any) -> Way:
        engine, *_ = package.initialize(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), **ADAMW),
            config={
                "train_micro_batch_size_per_gpu": MICRO_BATCH,
                "zero_optimization": {"stage": stage},
                "zero_allow_untested_optimizer": True,
                "gradient_clipping": 0.0,  # nobody else clips, and it does by default
            },
        )

        def step(batch: Batch) -> Tensor:
            loss = loss_of(engine, batch)
            engine.backward(loss)
            engine.step()
            return loss.detach()

        return Way(step, "as it comes, but torch's AdamW and no clipping")

    return make


def horovod(model: nn.Module, hvd: Any) -> Way:
    """Horovod's optimizer around torch's AdamW."""
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), **ADAMW),
        named_parameters=model.named_parameters(),
    )
    return Way(plain_step(model, optimizer), "as it comes, over MPI")


@contextmanager
def gloo() -> Iterator[None]:
    """A gloo group of all ranks."""
    start_gloo(MPI.COMM_WORLD)
    yield
    stop_gloo(MPI.COMM_WORLD)


@contextmanager
def gloo_and_deepspeed() -> Iterator[Any]:
    """The package, on a gloo group. AbsentError where it cannot be imported."""
    comm = MPI.COMM_WORLD
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": str(comm.rank), "WORLD_SIZE": str(comm.size)}
    os.environ["LOCAL_RANK"] = str(comm.Split_type(MPI.COMM_TYPE_SHARED).rank)
    try:
        package = import_module("deepspeed")
    except Exception as error:  # whatever its parts raise where something is missing
        raise absence(error) from error
    # Or it would look for a compiler, for a sum through shared memory that training does not use.
    import_module("deepspeed.ops").__compatible_ops__ = {}
    with gloo():
        package.init_distributed("gloo")
        yield package


@contextmanager
def started_horovod() -> Iterator[Any]:
    """The package. AbsentError where it cannot be had."""
    hvd = start_horovod()
    yield hvd
    hvd.shutdown()


Group = Callable[[], AbstractContextManager[Any]]
Make = Callable[[nn.Module, Any], Way]
STAGES = (0, 1, 2)
bf16_wire = partial(mntrain.init, wire_dtype="bf16")
WAYS: dict[str, tuple[Group, Make]] = {
    "computing alone": (nullcontext, alone),
    "computing in step": (nullcontext, in_step),
    "computing and bare sockets": (ring, bare_sockets),
    **{f"mntrain stage {stage}": (mntrain.init, own(stage)) for stage in STAGES},
    **{f"mntrain stage {stage}, bf16 wire": (bf16_wire, own(stage)) for stage in STAGES},
    "DDP": (gloo, ddp(25)),
    "DDP, 4 MB buckets": (gloo, ddp(4)),
    "DDP, ZeroRedundancyOptimizer": (gloo, ddp(25, sharded=True)),
    "FSDP2, ZeRO-2": (gloo, fsdp(again=False)),
    "FSDP2, ZeRO-3": (gloo, fsdp(again=True)),
    **{f"DeepSpeed stage {stage}": (gloo_and_deepspeed, deepspeed(stage)) for stage in STAGES},
    "Horovod": (started_horovod, horovod),
}
