"""A job in which one rank does something wrong: mpirun -n 3 python fault.py KIND RANK [options]."""

import argparse
import ctypes
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
SYNC = {  # between nodes of one rank, which then communicate in exchanges only
    "diloco": mntrain.sync.DiLoCo(every=1),
    "sparseloco": mntrain.sync.SparseLoCo(every=1),
}
NODES = {"node lost", "link cut", "link cut for 3 s"}
HEALED_S = 8.0  # until a job whose network comes back has gone on for long enough


def parse():
    """The arguments of this script."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind")
    parser.add_argument("rank", type=int)
    parser.add_argument("--stage", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=15.0)
    parser.add_argument("--warn-after", type=float, default=5.0)
    parser.add_argument("--sync", choices=SYNC)
    return parser.parse_args()


class FaultyBatches:
    """Batches, which the faulty rank gets in another way."""

    def __init__(self, kind, faulty):
        self.kind, self.faulty = kind, faulty
        if kind in WORKERS:
            samples = Samples(WORKERS[kind] if faulty else lambda: None)
            self.batches = iter(DataLoader(samples, batch_size=4, num_workers=1))

    def batch(self, step):
        """One batch; in the faulty step of the faulty rank, what the kind says."""
        if self.faulty and step == STEP:
            stamp()
            FAULTS.get(self.kind, lambda: None)()
        return next(self.batches) if self.kind in WORKERS else torch.randn(4, 32)


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
    """Note the time of the fault in the file that the environment names."""
    if name := os.environ.get("FAULT_STAMP"):
        with open(name + suffix, "w", encoding="ascii") as file:
            file.write(str(time.time()))


def fail(error):
    """Raise an error."""
    raise error


def pause(seconds):
    """Stop this process; a child lets it go on."""
    parent = os.getpid()
    if os.fork() == 0:
        time.sleep(seconds)
        os.kill(parent, signal.SIGCONT)
        os._exit(0)
    os.kill(parent, signal.SIGSTOP)


BUG = "a bug of one rank"
FAULTS = {
    "hang": lambda: time.sleep(1000),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "raises": lambda: fail(KeyError(BUG)),
    "exits": lambda: sys.exit(3),
    "exits with 0": lambda: sys.exit(0),
    "held": lambda: ctypes.PyDLL(None).sleep(1000),  # C code that keeps the interpreter
    "slow": lambda: time.sleep(12),
    "paused": lambda: pause(seconds=4),  # by another process, as a debugger or a scheduler does
}

WORKERS = {  # what a process of a DataLoader does
    "dead worker": lambda: os.kill(os.getpid(), signal.SIGKILL),
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


def prepare(kind, rank):
    """Do what a faulty rank does before the job starts."""
    own = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
    if kind in NODES:
        sys.stderr = NotingReports()
    elif kind == "clock shifted" and own == rank:
        right = time.time
        time.time = lambda: right() + 120
    elif kind == "same core" and own in {rank, rank - 1 if rank else 1}:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


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
    optimizer = world.optimizer(
        model, torch.optim.AdamW, stage=options.stage, sync=SYNC.get(options.sync)
    )
    loader = FaultyBatches(kind, faulty)
    for step in range(6):
        now = faulty and step == STEP
        try:
            loss = model(loader.batch(step)).square().mean()
            if now and kind == "continues":
                raise ValueError("of this sample")
            if now and kind == "nan":
                loss = loss * float("nan")
            loss.backward()
        except ValueError:
            continue
        optimizer.step()
        optimizer.zero_grad()
        if not options.sync:
            extra_collectives(world, kind, now=now)


def extra_collectives(world, kind, *, now):
    """Collectives, which the faulty rank calls in another order."""
    first, second = torch.ones(8), torch.ones(3)
    if now and kind == "another order":
        first, second = second, first
    world.collectives.all_reduce(first).wait()
    world.collectives.all_reduce(second).wait()
    world.collectives.broadcast(torch.ones(100_000)).wait()


def main():
    """Run the job, and print what this rank has seen."""
    options = parse()
    prepare(options.kind, options.rank)
    with mntrain.init(
        device="cpu",
        ranks_per_node=1 if options.sync else None,
        timeout=options.timeout,
        warn_after=options.warn_after,
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
