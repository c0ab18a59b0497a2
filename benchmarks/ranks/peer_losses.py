"""A rank script of slow_links.py: the built-in task, trained by torch's DDP over gloo.

The model, its initial weights, the order of samples, the optimizer with its schedule, clipping, and
the validation windows are those of `python -m mntrain` with the same seed. Each rank counts as a
node. Prints one JSON object with the validation losses.
"""

import argparse
import os
from contextlib import ExitStack

os.environ["OMP_NUM_THREADS"] = "1"  # before torch and mntrain count the cores
import torch
from common import report, start_gloo, stop_gloo
from ddp_peers import PEERS, POST_LOCAL, TORCHFT, average, torchft_diloco, wrapped
from mpi4py import MPI
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from mntrain.config import Config, ModelConfig, RunConfig, TrainConfig
from mntrain.data.sampling import (
    LoaderOptions,
    SamplingPlan,
    batches,
    spread,
    validation_batches,
)
from mntrain.tasks.lm import LanguageModel
from mntrain.train.optimization import lr_factor, weight_decay_groups


def main() -> None:
    """Train, and report the validation losses."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--peer", choices=PEERS, required=True)
    for name in ("seed", "steps", "batch-size", "context", "eval-every", "eval-samples"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--warmup", type=int, default=0)
    parser.add_argument("--every", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    comm = MPI.COMM_WORLD
    start_gloo(comm)
    evaluations = train(options, comm)
    if comm.rank == 0:
        report({"evaluations": evaluations})
    stop_gloo(comm)


def train(options: argparse.Namespace, comm: MPI.Intracomm) -> list[tuple[int, float]]:
    """Train with a peer, and return steps with their validation losses. Collective."""
    config = Config(
        model=ModelConfig(context=options.context),
        run=RunConfig(seed=options.seed),
        train=TrainConfig(steps=options.steps, batch_size=options.batch_size),
    )
    task = LanguageModel(config)
    torch.manual_seed(options.seed)
    model = task.model()
    groups = weight_decay_groups(model, config.optim.weight_decay)
    adamw = torch.optim.AdamW(groups, lr=config.optim.lr)
    ddp, optimizer = wrapped(
        options.peer, model, adamw, warmup=options.warmup, every=options.every, node=comm.rank
    )
    scheduler = LambdaLR(adamw, lr_factor(config.optim, options.steps))
    data = task.dataset("train")
    plan = SamplingPlan(len(data), options.batch_size, options.seed)
    evaluations = []
    stack = ExitStack()
    steps = batches(data, plan, loading(task, comm), range(options.steps))
    for step, (batch,) in enumerate(steps, 1):  # of one micro-batch
        if options.peer == TORCHFT and step == options.warmup + 1:
            stack.enter_context(torchft_diloco(model, adamw, every=options.every, comm=comm))
        task.loss(ddp, batch).mean.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.optim.max_grad_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % options.eval_every == 0 or step == options.steps:
            evaluations.append((step, validation_loss(task, model, options, comm)))
    stack.close()
    return evaluations


@torch.no_grad()
def validation_loss(
    task: LanguageModel, model: nn.Module, options: argparse.Namespace, comm: MPI.Intracomm
) -> float:
    """Return the loss of the mean of the ranks' parameters, which stay as they are. Collective."""
    own = {name: value.clone() for name, value in model.state_dict().items()}
    if options.peer in (POST_LOCAL, TORCHFT):
        average(model)
    valid = task.dataset("valid")
    pieces = validation_batches(
        valid, spread(len(valid), options.eval_samples), loading(task, comm)
    )
    losses = [task.loss(model, batch) for _, batch in pieces]
    total = sum(loss.mean.item() * loss.count for loss in losses)
    model.load_state_dict(own)
    return comm.allreduce(total) / comm.allreduce(sum(loss.count for loss in losses))


def loading(task: LanguageModel, comm: MPI.Intracomm) -> LoaderOptions:
    """Return the options of this rank's data loading."""
    size = task.config.train.micro_batch_size
    return LoaderOptions(rank=comm.rank, size=comm.size, micro_batch_size=size)


if __name__ == "__main__":
    main()
