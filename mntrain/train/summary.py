"""The description of a run at its start, and its summary at the end."""

import json
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from mntrain.alike.compared_task import changed_data
from mntrain.alike.naming import by_value, naming
from mntrain.balance.cadence import Cadence
from mntrain.balance.shares import CALIBRATION
from mntrain.metrics.files import json_text
from mntrain.metrics.registry import METRICS
from mntrain.rank_info import Place
from mntrain.run.final_report import final_lines
from mntrain.run.job_resources import resources
from mntrain.run.local_saving import passed_over, restored_from
from mntrain.train.forward import uncompiled
from mntrain.train.job import TrainingJob
from mntrain.train.resumption import changed_options
from mntrain.world import World

_MAX_PLACES = 16  # lines about where ranks run
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


def describe_job(world: World, job: TrainingJob) -> None:
    """Show what runs where, and where a resumed run continues. Collective."""
    config, reporter = job.config, job.reporter
    _describe_model_and_data(job)
    library, stage = world.library, config.zero.stage
    where = f"{world.topology}, {world.algorithm}"
    reporter.note(f"{where}, {library.name} (thread level {library.threads})")
    if world.transport_line:
        reporter.note(f"transport: {world.transport_line}")
    if world.device.type == "cuda" and world.kernels.why:
        reporter.note(f"kernels: {world.kernels.why}")
    sharding = f"stage {stage}, by {job.optimizer.partition}" if stage else "stage 0"
    reporter.note(f"zero: {sharding}; precision {config.train.precision}")
    if job.sync:
        reporter.note(f"between nodes: {job.sync}")
    elif config.sync.mode != "every-step":
        reporter.warn(
            f"--sync.mode {config.sync.mode}: there is one node, so every step is synchronous"
        )
    reporter.note(f"optimizer: {job.optimizer_name}, schedule {job.learning_rates}")
    reasons = world.gather(world.collectives.no_shared_memory_reason)
    nodes = {f"node {world.topology.node(r)}: {why}" for r, why in enumerate(reasons) if why}
    if nodes:
        reporter.warn(
            "ranks of a node share no memory and send each other messages instead, which is slower "
            f"({'; '.join(sorted(nodes))}). Run all ranks of a node as one user, in one container, "
            "with memory to spare"
        )
    for line in place_lines(world.places):
        reporter.note(line)
    _describe_balance(job)
    if config.train.compile:
        reporter.note("compiling: the first step takes longer")
    _describe_resumption(job)
    if job.last_step < job.steps:
        reporter.note(f"this job ends after step {job.last_step} of {job.steps} (--run.stop-after)")


def place_lines(places: Sequence[Place]) -> list[str]:
    """Return where the ranks run, and on which devices: a line for those that are alike. Pure."""
    texts = {}
    for place in places:
        device = f"{place.device} {place.model} {place.gpu[:8]}".strip()
        texts[place.rank] = (
            f"node {place.node} on {place.host}: {device}, {place.memory / 2**30:.0f} GiB, "
            f"{place.cpus} CPUs, threads {place.threads}"
        )
    lines = [f"{naming('rank', ranks)}: {text}" for text, ranks in by_value(texts)]
    more = len(lines) - _MAX_PLACES
    return [*lines[:_MAX_PLACES], *([f"... and {more} more lines"] if more > 0 else [])]


def _describe_model_and_data(job: TrainingJob) -> None:
    reporter, parameters = job.reporter, list(job.model.parameters())
    counts = [sum(p.numel() for p in parameters)]
    counts += [sum(p.numel() for p in parameters if not p.requires_grad)]
    size, fixed = (f"{count / 1e6:.2f} M" if count >= 1e6 else f"{count:,}" for count in counts)
    frozen = f", of which {fixed} are frozen" if counts[1] else ""
    reporter.note(f"{job.config.task}: {size} parameters{frozen}", "bold")
    if job.initial_weights:
        text, problems = job.initial_weights
        reporter.note(f"weights: {text}")
        for problem in problems:
            reporter.warn(problem)
    data = job.task.describe_data() or job.data.describe(job.steps)
    for line in data.splitlines():
        reporter.note(line)


def _describe_balance(job: TrainingJob) -> None:
    plans, sync, config = job.data.plans, job.sync, job.config
    if isinstance(plans, Cadence):
        counts = ", ".join(map(str, plans.latest.counts))
        job.reporter.note(
            f"balance cadence: at first, ranks have {counts} micro-batches of "
            f"{plans.micro_batch} samples in a step, {plans.samples(-1)} in all"
        )
        if config.zero.stage == 2:
            job.reporter.warn(
                "--balance.mode cadence: at stage 2, ranks reduce the gradients of every "
                "micro-batch together, so faster ranks wait for slower ones; give --zero.stage 1 "
                "for less communication"
            )
        return
    unmeasured = sync and sync.max_staleness and sync.warmup - job.done < CALIBRATION
    if plans and unmeasured and not config.balance.speed:
        job.reporter.warn(
            "--balance.mode throughput: nodes that do not wait for each other compare no speeds, "
            "so parts stay equal; give --balance.speed, or 10 or more steps of --sync.warmup"
        )


def _describe_resumption(job: TrainingJob) -> None:
    reporter, resumed = job.reporter, job.resumed
    looked = job.directory.local and job.config.run.resume == "auto"
    passed = passed_over(resumed, job.directory.local)
    if looked and (resumed or passed or job.last_step_before):
        reporter.note(restored_from(resumed, job.last_step_before))
    for path, reason in passed.items():
        reporter.warn(f"{path.name} was passed over: {reason}")
    if resumed is None:
        return
    manifest = resumed.manifest
    reporter.note(
        f"resumed after step {manifest.step}, from {resumed.path} (saved by {manifest.writers})"
    )
    if manifest.position is None:
        reporter.warn("the version that saved it took samples in another order: an epoch begins")
    if changes := changed_options(resumed, job.config):
        reporter.note(f"changed since then: {'; '.join(changes)}")
    if changed := changed_data(manifest.data, job.data_facts):
        reporter.warn(changed)
    if job.data.stream and not job.data_facts["files"]:
        reporter.warn(
            "the training data is a stream, whose content is not compared with that of the "
            "checkpoint: be sure that it is the same, and give its files in "
            "compared_files() of the task to have their sizes compared"
        )


def show_sample(job: TrainingJob) -> None:
    """Show what the task generates with the trained model, if anything. Local.

    An error is shown, too: the run is complete.
    """
    try:
        with uncompiled():
            sample = job.task.sample(job.model)
    except Exception as error:
        job.reporter.warn(f"no sample: {type(error).__name__}: {error}")
        return
    if sample:
        job.reporter.note("sample", "bold")
        job.reporter.note(textwrap.indent(sample, "  "))


def finish_report(world: World, job: TrainingJob) -> dict[str, Any]:
    """Print the final report, and write summary.json and report.html. Collective.

    Returns the content of summary.json, with what the master could not write to the run's directory
    as "not_written", a text for each file.
    """
    config, reporter, result = job.config, job.reporter, job.result
    by_option = result.status == "stopped" and not result.reason
    if by_option:
        result.reason = f"--run.stop-after {config.run.stop_after}"
    summary = summarize(world, job)
    lines = final_lines(summary, job.steps, job.task.items)
    reporter.finish(summary["status"], lines)
    missing = job.metrics.finish(summary)
    early = by_option or result.status in ("interrupted", "preempted")
    if early and result.last and job.checkpoints.has(result.last.step):
        later = " and --run.stop-after none" if by_option else ""
        reporter.note(f"to continue: the same command with --run.dir {job.run_dir}{later}")
    elif result.status == "interrupted" and not job.saves:
        reporter.note(
            "the steps of this job were not saved: with --checkpoint.every auto, for example, an "
            "interrupted job saves at its end"
        )
    if missing:
        summary["not_written"] = missing
    content: dict[str, Any] = json.loads(world.gather(json_text(summary))[0])
    return content


def summarize(world: World, job: TrainingJob) -> dict[str, Any]:
    """Return the content of summary.json. Collective."""
    # Recomputation in backward does not count: PaLM, appendix B (2022, arXiv 2204.02311).
    result, config, per_item = job.result, job.config, job.result.flops_per_item
    flops_per_s = per_item * result.items_per_s if per_item else None
    dtype = config.train.precision.removesuffix("-pure")  # in which matrices are multiplied
    peak = peak_flops([(place.gpu, place.model) for place in world.places], dtype)
    last = result.last
    return {
        "status": result.status,
        "steps": last.step if last else job.done,
        "skipped_steps": result.skipped_steps,
        **{
            metric.summary: getattr(
                result.evaluated if metric.row == "evaluation" else last, name, None
            )
            for name, metric in METRICS.items()
            if metric.summary
        },
        "wall_s": result.seconds,
        "items": job.task.items,
        "tokens_per_s": result.items / result.seconds,
        "step_tokens_per_s": result.items_per_s,
        "model_flops_per_s": flops_per_s,
        "computes_in": dtype,
        "utilisation": flops_per_s / peak if flops_per_s is not None and peak else None,
        "run_dir": str(job.run_dir),
        "precision": config.train.precision,
        **resources(world, [job.optimizer], job.balancing.figures(), result.seconds),
        "reason": result.reason,
        **job.checkpoints.summary(),
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
