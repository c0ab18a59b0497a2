"""The end of a job: its last checkpoint, its counters, and its summary."""

import json
import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from mntrain.checkpoint import Manifest
from mntrain.errors import AgreedError, TrainingStoppedError
from mntrain.metrics.files import json_text
from mntrain.metrics.registry import RecentSteps, StepRecord
from mntrain.run.final_report import final_lines
from mntrain.train.forward import uncompiled
from mntrain.train.job import Job
from mntrain.train.shared_step import errors_stop
from mntrain.world import World

# Peak dense TFLOP/s by torch's name of the GPU: 16-bit matrices summed in fp32, then fp32 without
# TF32, which is torch's default. From NVIDIA's data sheets (halved where they state figures with
# sparsity) and, for the RTX 4090, its white paper.
_PEAKS = {
    r"(NVIDIA )?A100-.*|(NVIDIA )?A100 .*PCIe": (312, 19.5),
    r"NVIDIA H100 PCIe": (756, 51),
    r"NVIDIA H100 NVL": (835, 60),
    r"NVIDIA H100( \d+GB HBM[23]e?)?": (989, 67),
    r"NVIDIA H200 NVL": (836, 60),
    r"NVIDIA (H200|GH200 .*)": (989, 67),
    r"NVIDIA B200": (2250, 75),
    r"NVIDIA L40S": (362, 91.6),
    r"NVIDIA A10G": (70, 35),
    r"NVIDIA GeForce RTX 4090": (165.2, 82.6),
}


@dataclass
class JobResult:
    """The end of a job, and its counters: the same on all ranks except for times."""

    flops_per_item: float | None  # of the model, if the task knows it
    skipped_steps: int  # earlier jobs of the run included
    status: str = "running"  # until the end
    last: StepRecord | None = None  # the last completed step of this job, if any
    error: AgreedError | None = None
    reason: str | None = None  # of an early end
    items: int = 0  # tokens or samples that this job has trained on
    seconds: float = 0.0  # of this job
    _rates: RecentSteps[float] = field(default_factory=lambda: RecentSteps(1000))

    def add(self, items: int, seconds: float, *, skipped: bool) -> None:
        """Count a step."""
        self.items += items
        self.skipped_steps += skipped
        self._rates.add(items / seconds)

    @property
    def items_per_s(self) -> float:
        """Median over the last 1000 steps after the warm-up; 0 before the first step."""
        return median(self._rates.values) if self._rates.values else 0.0


def progress_of(job: Job, result: JobResult) -> Manifest:
    """Return what a checkpoint after the last step records of the run. Local."""
    record = result.last
    assert record is not None, "a step was taken"
    return Manifest(
        step=record.step,
        config=job.saved_config,
        samples=job.data.samples,
        skipped_steps=result.skipped_steps,
        eval_loss=record.eval_loss,
        data=job.data_facts,
        scored_by=job.best.text,
        position=job.data.position(record.step),
        score=job.best.score(record),
    )


def save_at_end(world: World, job: Job, result: JobResult) -> None:
    """Save the last completed step, if that is wanted and not done. Collective.

    A failure is the job's result.
    """
    last, wanted = result.last, job.saves or result.status == "preempted"
    error = None
    if last is None or result.error or not wanted:
        job.checkpoints.wait()
    else:
        try:
            with errors_stop(world, last.step):
                job.checkpoints.save_progress(progress_of(job, result), now=True)
        except AgreedError as failure:
            error = failure
    job.checkpoints.end_local(in_order=not (error or result.error))
    if error and result.status != "interrupted":
        result.status, result.error = "failed", TrainingStoppedError(str(error), world.rank)
    elif error:
        world.output.warn(str(error))


def show_sample(world: World, job: Job) -> None:
    """Show what the task generates with the trained model, if anything. Local.

    An error is shown, too: the run is complete.
    """
    try:
        with uncompiled():
            sample = job.task.sample(job.model)
    except Exception as error:
        world.output.warn(f"no sample: {type(error).__name__}: {error}")
        return
    if sample:
        job.display.note("sample", "bold")
        world.output.note(textwrap.indent(sample, "  "))


def finish_report(world: World, job: Job, result: JobResult) -> dict[str, Any]:
    """Print the final report, and write summary.json and report.html. Collective.

    Returns the content of summary.json, with what the master could not write to the run's directory
    as "not_written", a text for each file.
    """
    by_option = result.status == "stopped" and not result.reason
    if by_option:
        result.reason = f"--run.stop-after {job.config.run.stop_after}"
    summary = summarize(world, job, result)
    lines = final_lines(summary, job.steps, job.task.items)
    job.display.finish(summary["status"], lines)
    missing = job.metrics.finish(summary)
    early = by_option or result.status in ("interrupted", "preempted")
    if early and result.last and job.checkpoints.has(result.last.step):
        later = " and --run.stop-after none" if by_option else ""
        path = job.directory.path
        world.output.note(f"to continue: the same command with --run.dir {path}{later}")
    elif result.status == "interrupted" and not job.saves:
        world.output.note(
            "the steps of this job were not saved: with --checkpoint.every auto, for example, an "
            "interrupted job saves at its end"
        )
    if missing:
        summary["not_written"] = missing
    content: dict[str, Any] = json.loads(world.gather(json_text(summary))[0])
    return content


def summarize(world: World, job: Job, result: JobResult) -> dict[str, Any]:
    """Return the content of summary.json. Collective."""
    # Recomputation in backward does not count: PaLM, appendix B (2022, arXiv 2204.02311).
    config, per_item = job.config, result.flops_per_item
    flops_per_s = per_item * result.items_per_s if per_item else None
    dtype = config.train.precision.removesuffix("-pure")  # in which matrices are multiplied
    peak = peak_flops([(place.gpu, place.model) for place in world.places], dtype)
    return {
        **job.metrics.summarize(result.seconds, **job.balancing.figures()),
        "status": result.status,
        "reason": result.reason,
        "steps": result.last.step if result.last else job.done,
        "skipped_steps": result.skipped_steps,
        "items": job.task.items,
        "tokens_per_s": result.items / result.seconds,
        "step_tokens_per_s": result.items_per_s,
        "model_flops_per_s": flops_per_s,
        "computes_in": dtype,
        "utilisation": flops_per_s / peak if flops_per_s is not None and peak else None,
        "precision": config.train.precision,
        **job.balancing.summary(),
        **({"error": str(result.error)} if result.error else {}),
    }


def peak_flops(gpus: Iterable[tuple[str, str]], dtype: str) -> float | None:
    """Return the sum of the peak dense FLOP/s of GPUs in "fp32", "bf16" or "fp16".

    `gpus` has (UUID, torch's name of the model) by rank. A GPU that several ranks share counts
    once. None on CPUs and if any model is unknown, as a part of a GPU (MIG) is.
    """
    total = 0.0
    for _, model in set(gpus):
        known = [flops for pattern, flops in _PEAKS.items() if re.fullmatch(pattern, model)]
        if not known or "MIG" in model:
            return None
        total += known[0][dtype == "fp32"] * 1e12
    return total
