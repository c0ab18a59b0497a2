"""A job in which one rank does something wrong: mpirun -n 3 python fault.py KIND RANK [options]."""

import argparse
import os
import signal
import sys
import time

import torch
import torch._dynamo  # optimizers import it, which takes seconds on a busy machine
from torch import nn
from torch.utils.data import DataLoader, Dataset

import mntrain

STEP = 2  # in which it happens
NODES = {"node lost", "link cut for 3 s"}
HEALED_S = 8.0  # until a job whose network comes back has gone on for long enough


def parse():
    """The arguments of this script."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind")
    parser.add_argument("rank", type=int)
    parser.add_argument("--stage", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=15.0)
    parser.add_argument("--rarely", action="store_true", help="nodes of one rank, which exchange")
    return parser.parse_args()


class FaultyBatches:
    """Batches, which the faulty rank gets in another way."""

    def __init__(self, kind, faulty):
        self.kind, self.faulty = kind, faulty
        self.from_workers = kind == "dead worker"
        if self.from_workers:
            samples = Samples(FAULTS["killed"] if faulty else lambda: None)
            self.batches = iter(DataLoader(samples, batch_size=4, num_workers=1))

    def batch(self, step):
        """One batch; in the faulty step of the faulty rank, what the kind says."""
        if self.faulty and step == STEP:
            FAULTS.get(self.kind, lambda: None)()
        return next(self.batches) if self.from_workers else torch.randn(4, 32)


class Samples(Dataset):
    """Samples that a worker process makes, in whose third batch it acts."""

    def __init__(self, act):
        self.act = act

    def __len__(self):
        return 24

    def __getitem__(self, index):
        if index == 4 * STEP + 1:
            self.act()
        return torch.randn(32)


def stamp(suffix=""):
    """Note the time in the file that the environment names."""
    with open(os.environ["FAULT_STAMP"] + suffix, "w", encoding="ascii") as file:
        file.write(str(time.time()))


def fail(error):
    """Raise an error."""
    raise error


FAULTS = {
    "hang": lambda: time.sleep(1000),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "raises": lambda: fail(KeyError("a bug of one rank")),
}


class NotingReports:
    """A stderr that notes when an error was reported."""

    def write(self, text):
        """Write, and note."""
        if "error: " in text:
            stamp(".reported")
        return sys.__stderr__.write(text)

    def flush(self):
        """Flush."""
        sys.__stderr__.flush()


def train_on_nodes(world):
    """Steps until a while after the first: a node or the network is lost meanwhile."""
    model = nn.Linear(32, 8)
    optimizer = world.optimizer(model, torch.optim.AdamW, stage=1)
    start, goes_on = time.monotonic(), True
    while goes_on:
        model(torch.randn(4, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if world.master and not os.path.exists(os.environ["FAULT_STAMP"]):
            stamp()
        goes_on = world.sum([time.monotonic() - start < HEALED_S])[0] == world.size
        time.sleep(0.02)


def train(world, options):
    """Six steps, of which the faulty rank takes one in another way."""
    kind, faulty = options.kind, world.rank == options.rank
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    sync = mntrain.sync.DiLoCo(every=1) if options.rarely else None
    optimizer = world.optimizer(model, torch.optim.AdamW, stage=options.stage, sync=sync)
    loader = FaultyBatches(kind, faulty)
    for step in range(6):
        try:
            loss = model(loader.batch(step)).square().mean()
            if faulty and step == STEP and kind == "continues":
                raise ValueError("of this sample")
            loss.backward()
        except ValueError:
            continue
        optimizer.step()
        optimizer.zero_grad()
        if not options.rarely:
            world.collectives.all_reduce(torch.ones(8)).wait()
            world.collectives.broadcast(torch.ones(100_000)).wait()


def main():
    """Run the job, and print what this rank has seen."""
    options = parse()
    if options.kind in NODES:
        sys.stderr = NotingReports()
    with mntrain.init(
        device="cpu",
        ranks_per_node=1 if options.rarely else None,
        timeout=options.timeout,
        warn_after=5.0,
        **({"lost_after": 8.0} if options.kind in NODES else {}),
    ) as world:
        try:
            if options.kind in NODES:
                train_on_nodes(world)
            else:
                train(world, options)
        except mntrain.RemoteRankError as error:
            text = error.traceback.strip().splitlines()[-1]
            print(f"rank {world.rank} learns of rank {error.rank}: {text}", flush=True)
            raise
        if world.master:
            print("completed", flush=True)


if __name__ == "__main__":
    main()
