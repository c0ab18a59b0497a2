"""Steps of an own loop that logs, saves by the clock and asks to stop, on nodes far apart: ranks.

Prints the seconds of the first rank's synchronous steps, of those between two exchanges, and of
those with an exchange.
"""

import tempfile
import time

import torch
from common import report, versions
from gpt import data, gpt, loss_of

import mntrain

EVERY, WARMUP, ROUNDS = 20, 10, 4


def main() -> None:
    """Time the steps of a run of a few rounds."""
    torch.set_num_threads(1)
    steps = WARMUP + ROUNDS * EVERY
    kinds: dict[str, list[float]] = {"synchronous": [], "between": [], "exchange": []}
    with tempfile.TemporaryDirectory() as folder, mntrain.init(device="cpu") as world:
        model = gpt("0.9M")
        sync = mntrain.sync.DiLoCo(every=EVERY, warmup=WARMUP)
        optimizer = world.optimizer(model, torch.optim.AdamW, lr=1e-3, sync=sync)
        saves = world.checkpoints(folder, model=model, optimizer=optimizer, every="60min")
        saves.restore()
        with world.metrics(folder) as metrics:
            for step, batch in enumerate(data(world.rank, steps, "0.9M"), 1):
                start = time.perf_counter()
                loss = loss_of(model, batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                metrics.log(step, loss=loss)
                saves.save(step)
                assert not world.stop_requested()
                taken = step - WARMUP
                kind = "between" if taken % EVERY else "exchange"
                if taken <= 0:
                    kind = "synchronous"
                # The sums of the first round's lines tell their names; the first steps are slow.
                if step > 2 and (taken <= 0 or taken > EVERY + 1):
                    kinds[kind].append(time.perf_counter() - start)
        if world.master:
            report({"seconds": kinds, "versions": versions()})


main()
