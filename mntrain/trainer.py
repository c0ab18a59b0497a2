"""The training job: a task, trained by all ranks of a world, reported by the master.

data -> forward -> backward (buckets leave) -> wait for the sums -> update -> report
"""

import math
import os
import shutil
import time
from collections.abc import Sized
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from mntrain import data, device, optimizers, sameness, tasks
from mntrain.config import Config
from mntrain.failures import AgreedError
from mntrain.interrupts import Interrupts
from mntrain.options import to_toml
from mntrain.report import make_reporter
from mntrain.stats import Phases, StepRecord, Tally
from mntrain.world import World, init
from zero.optimizer import NonFiniteGradientError

INTERRUPTED = 130  # as a shell says of a command that Ctrl-C ended


class TrainingStoppedError(AgreedError):
    """Training cannot go on; all ranks know why."""


def run(config: Config) -> int:
    """Train as the configuration says, on all ranks of the job. Collective; gives the exit code.

    What all ranks agree is wrong is printed once, by the master: 2 is returned for what was given,
    1 for training that had to stop. An exception of one rank alone ends the job with a traceback.
    """
    try:
        with init(
            device=config.device,
            algorithm=config.comm.algorithm,
            bucket_mb=config.comm.bucket_mb,
            ranks_per_node=config.comm.ranks_per_node,
        ) as world:
            return Trainer(world, config).fit()
    except AgreedError as error:
        error.tell()
        return 1 if isinstance(error, TrainingStoppedError) else 2


class Trainer:
    """One training run.

    Construction is collective, and does everything that can refuse before any work starts: it
    raises AgreedError on all ranks alike. The run directory is made last.
    """

    def __init__(self, world: World, config: Config) -> None:
        self._world, self._config = world, config
        with world.agreement():
            self._task = tasks.load(config.task, config)
            train, valid = self._task.dataset("train"), self._task.dataset("valid")
            self._valid = data.spread(valid, config.train.eval_samples)
            samples = len(cast(Sized, train))
            self._plan = data.Plan(samples, config.train.batch_size, config.run.seed)
            torch.manual_seed(config.run.seed)
            self._model = self._task.model().to(world.device)
            optimizer_class, options = optimizers.find(config.optim)
            if config.train.compile:
                _check_compiler(world.device)
        self._check_same_data([samples, len(cast(Sized, valid))])
        self._optimizer = world.optimizer(
            self._model,
            optimizer_class,
            stage=config.zero.stage,
            max_grad_norm=config.optim.max_grad_norm,
            groups=optimizers.decayed_and_not(self._model, config.optim.weight_decay),
            **options,
        )
        schedule = optimizers.warmup_then_cosine(config.optim, config.train.steps)
        self._scheduler = LambdaLR(self._optimizer, schedule)
        self._compute = self._model
        if config.train.compile:
            self._compute = cast(nn.Module, torch.compile(self._model))
        torch.manual_seed(data.mixed_seed(config.run.seed, world.rank))  # for dropout, by rank
        self._batches = data.batches(
            train, self._plan, start=0, stop=config.train.steps, **self._dealing()
        )
        self._metrics: list[str] | None = None  # the names of the task's means, once known
        self._items = 0  # tokens, or samples, that the job has trained on
        self._run_dir = self._make_run_dir()

    def fit(self) -> int:
        """Train to the last step, or to the step in which somebody interrupts. Collective.

        Gives the exit code: 0 when completed. Raises TrainingStoppedError when a loss or a gradient
        is not finite or the ranks' weights differ; the summary says so too.
        """
        steps = self._config.train.steps
        start = time.perf_counter()
        reporter = make_reporter(master=self._world.master, run_dir=self._run_dir, steps=steps)
        status, problem, record = "completed", None, None
        with reporter, Interrupts() as interrupts:
            reporter.start(self._world.places, **self._introduction())
            for step in range(1, steps + 1):
                try:
                    record = self._step(step)
                except TrainingStoppedError as error:
                    status, problem = "failed", error
                    break
                reporter.step(record)
                if self._anyone(interrupts.requested):
                    status = "interrupted"
                    break
            if status == "completed" and self._world.master:
                reporter.text("sample", self._task.sample(self._model) or "")
            summary = self._summary(status, record, time.perf_counter() - start)
            reporter.finish({**summary, "error": str(problem)} if problem else summary)
        if problem:
            raise problem
        return 0 if status == "completed" else INTERRUPTED

    def _step(self, step: int) -> StepRecord:
        """Take one step: 1 for the first. Collective."""
        start, phases = time.perf_counter(), Phases()
        with phases("data"):
            micro_batches = next(self._batches)
        tally = Tally()
        for left, batch in zip(reversed(range(len(micro_batches))), micro_batches, strict=True):
            with phases("forward"), self._autocast():
                loss = self._task.loss(self._compute, device.move(batch, self._world.device))
            with phases("backward"), self._optimizer.no_sync() if left else nullcontext():
                self._optimizer.backward(loss.mean, weight=loss.count)
            tally.add(loss.count, {"loss": loss.mean, **loss.metrics})
        if not micro_batches:
            self._optimizer.share(0)
        with phases("reduce_wait"):
            self._optimizer.synchronize()
            means, count = self._means(tally, f"in step {step}")
        lr = float(self._scheduler.get_last_lr()[0])
        with phases("optimizer"):
            try:
                update = self._optimizer.step()
            except NonFiniteGradientError as error:
                raise self._stopped(f"in step {step}, {error}") from None
            self._optimizer.zero_grad()
            self._scheduler.step()
        self._items += count
        seconds = time.perf_counter() - start
        record = StepRecord(
            step=step,
            loss=means.pop("loss"),
            lr=lr,
            grad_norm=update.grad_norm,
            clip_coef=update.clip_coef,
            clipped_norm=update.clipped_norm,
            samples=len(self._plan.indices(step - 1)),
            tokens_per_s=count / seconds,
            step_s=seconds,
            **cast(dict[str, Any], phases.seconds),
            metrics=means,
        )
        if _due(self._config.train.check_every, step):
            self._check_sameness(step)
        if step == self._config.train.steps or _due(self._config.train.eval_every, step):
            evaluated = self.evaluate()
            record = replace(record, eval_loss=evaluated.pop("loss"), eval_metrics=evaluated)
        return record

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Loss and metrics over the validation samples: exact means. Collective."""
        self._model.eval()
        tally = Tally()
        for batch in data.validation_batches(self._valid, **self._dealing()):
            with self._autocast():
                loss = self._task.loss(self._compute, device.move(batch, self._world.device))
            tally.add(loss.count, {"loss": loss.mean, **loss.metrics})
        self._model.train()
        return self._means(tally, "in evaluation")[0]

    def _means(self, tally: Tally, where: str) -> tuple[dict[str, float], int]:
        """Exact means over all ranks, and the items that they are over. Collective."""
        if self._metrics is None:
            everyone = self._world.gather(tally.names())
            self._metrics = sorted({name for names in everyone for name in names})
        mine = tally.sums(self._metrics)
        *sums, count = self._world.sum([*mine, tally.count])
        if not count:
            raise self._stopped(f"{where}, no rank has anything to take a mean over")
        means = {name: total / count for name, total in zip(self._metrics, sums, strict=True)}
        if not math.isfinite(means["loss"]):
            losses = self._world.gather(mine[self._metrics.index("loss")])
            odd = [
                f"{loss} on rank {r}" for r, loss in enumerate(losses) if not math.isfinite(loss)
            ]
            raise self._stopped(f"{where}, the loss is {', '.join(odd)}")
        return means, int(count)

    def _anyone(self, flag: bool) -> bool:
        return self._world.sum([flag])[0] > 0

    def _check_sameness(self, step: int) -> None:
        odd = sameness.odd_ranks(self._world.gather(sameness.digest(self._model)))
        if odd:
            raise self._stopped(
                f"after step {step}, the weights differ between ranks: "
                f"rank {', '.join(map(str, odd))} against the others"
            )

    def _stopped(self, why: str) -> TrainingStoppedError:
        return TrainingStoppedError(why, self._world.rank)

    def _check_same_data(self, lengths: list[int]) -> None:
        everyone = self._world.gather(lengths)
        for rank, theirs in enumerate(everyone):
            if theirs != everyone[0]:
                raise AgreedError(
                    f"the data differs between ranks: {everyone[0]} training and validation "
                    f"samples on rank 0, {theirs} on rank {rank}; give all nodes the same files",
                    self._world.rank,
                )

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._config.train.precision == "fp32":
            return nullcontext()
        return torch.autocast(self._world.device.type, dtype=torch.bfloat16)

    def _dealing(self) -> dict[str, Any]:
        """How samples are dealt to ranks and loaded."""
        return {
            "rank": self._world.rank,
            "size": self._world.size,
            "micro_batch_size": self._config.train.micro_batch_size,
            "workers": self._config.data.workers,
            "start_method": self._config.data.worker_start,
            "collate": self._task.collate,
        }

    def _make_run_dir(self) -> Path:
        """Agree on the run directory; the master makes it. Collective."""
        default = Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}"
        path: Path = self._world.gather(self._config.run.dir or default)[0]
        with self._world.agreement():
            if self._world.master:
                if (path / "config.toml").exists():
                    raise ValueError(f"{path} holds a run already: give another --run.dir")
                path.mkdir(parents=True, exist_ok=True)
                (path / "config.toml").write_text(to_toml(self._config))
        return path

    def _introduction(self) -> dict[str, str]:
        count = sum(parameter.numel() for parameter in self._model.parameters())
        return {
            "library": self._world.library.name,
            "thread_level": self._world.library.threads,
            "topology": str(self._world.topology),
            "algorithm": self._world.algorithm,
            "model": f"{self._config.task}: {count / 1e6:.2f} M parameters",
        }

    def _summary(self, status: str, last: StepRecord | None, seconds: float) -> dict[str, Any]:
        """What summary.json holds. Collective."""
        world = self._world
        ranks = zip(world.places, world.usage(), strict=True)
        return {
            "status": status,
            "steps": last.step if last else 0,
            "final_loss": last.loss if last else None,
            "eval_loss": last.eval_loss if last else None,
            "eval_metrics": last.eval_metrics if last else None,
            "wall_s": seconds,
            "tokens_per_s": self._items / seconds,
            "run_dir": str(self._run_dir),
            "world": {
                "size": world.size,
                "nodes": len(world.topology.nodes),
                "topology": str(world.topology),
                "algorithm": world.algorithm,
                "library": world.library.name,
            },
            "ranks": [{**asdict(place), **asdict(usage)} for place, usage in ranks],
        }


def _due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


def _check_compiler(where: torch.device) -> None:
    """torch.compile makes C++ for the CPU: refuse early where nothing can compile it."""
    compiler = os.environ.get("CXX", "g++")
    if where.type == "cpu" and shutil.which(compiler) is None:
        raise ValueError(
            f"--train.compile: on the CPU torch.compile needs a C++ compiler, and there is no "
            f"{compiler}: install one, name it in CXX, or leave the option out"
        )
