"""The description of a job at its start."""

from collections.abc import Sequence

from mntrain.alike.compared_task import changed_data
from mntrain.alike.naming import by_value, naming
from mntrain.balance.cadence import Cadence
from mntrain.balance.shares import CALIBRATION
from mntrain.rank_info import Place
from mntrain.train.job import Job
from mntrain.train.resumption import changed_options
from mntrain.world import World

_MAX_PLACES = 16  # lines about where ranks run


def describe_job(world: World, job: Job) -> None:
    """Show what runs where, and where a resumed run continues. Collective."""
    config, note, warn = job.config, world.output.note, world.output.warn
    _describe_model_and_data(world, job)
    library, stage = world.library, config.zero.stage
    note(f"{world.topology}, {world.algorithm}, {library.name} (thread level {library.threads})")
    for line in transport_lines(world):
        note(line)
    sharding = f"stage {stage}, by {job.optimizer.partition}" if stage else "stage 0"
    note(f"zero: {sharding}; precision {config.train.precision}")
    if job.sync:
        note(f"between nodes: {job.sync}")
    elif config.sync.mode != "every-step":
        warn(f"--sync.mode {config.sync.mode}: there is one node, so every step is synchronous")
    note("optimizer: {}, schedule {}".format(*job.names))
    reasons = world.gather(world.collectives.no_shared_memory_reason)
    nodes = {f"node {world.topology.node(r)}: {why}" for r, why in enumerate(reasons) if why}
    if nodes:
        warn(
            "ranks of a node share no memory and send each other messages instead, which is slower "
            f"({'; '.join(sorted(nodes))}). Run all ranks of a node as one user, in one container, "
            "with memory to spare"
        )
    for line in place_lines(world.places):
        note(line)
    _describe_balance(world, job)
    if config.train.compile:
        note("compiling: the first step takes longer")
    _describe_resumption(world, job)
    if job.last_step < job.steps:
        note(f"this job ends after step {job.last_step} of {job.steps} (--run.stop-after)")


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


def transport_lines(world: World) -> list[str]:
    """Return how tensors on GPUs travel, and what adds them there, if anything does. Local."""
    lines = [f"transport: {world.transport_line}"] if world.transport_line else []
    if world.device.type == "cuda" and world.transport != "host":  # which adds in host memory
        lines.append(f"kernels: {world.kernels.why}")
    return lines


def _describe_model_and_data(world: World, job: Job) -> None:
    parameters = list(job.model.parameters())
    counts = [sum(p.numel() for p in parameters)]
    counts += [sum(p.numel() for p in parameters if not p.requires_grad)]
    size, fixed = (f"{count / 1e6:.2f} M" if count >= 1e6 else f"{count:,}" for count in counts)
    frozen = f", of which {fixed} are frozen" if counts[1] else ""
    job.display.note(f"{job.config.task}: {size} parameters{frozen}", "bold")
    if job.weights:
        text, problems = job.weights
        world.output.note(f"weights: {text}")
        for problem in problems:
            world.output.warn(problem)
    data = job.task.describe_data() or job.data.describe(job.steps)
    for line in data.splitlines():
        world.output.note(line)


def _describe_balance(world: World, job: Job) -> None:
    division, sync, config = job.data.division, job.sync, job.config
    if isinstance(division, Cadence):
        counts = ", ".join(map(str, division.latest.counts))
        world.output.note(
            f"balance cadence: at first, ranks have {counts} micro-batches of "
            f"{division.micro_batch} samples in a step, {division.samples(-1)} in all"
        )
        if config.zero.stage == 2:
            world.output.warn(
                "--balance.mode cadence: at stage 2, ranks reduce the gradients of every "
                "micro-batch together, so faster ranks wait for slower ones; give --zero.stage 1 "
                "for less communication"
            )
        return
    unmeasured = sync and sync.max_staleness and sync.warmup - job.done < CALIBRATION
    if division and unmeasured and not config.balance.speed:
        world.output.warn(
            "--balance.mode throughput: nodes that do not wait for each other compare no speeds, "
            "so parts stay equal; give --balance.speed, or 10 or more steps of --sync.warmup"
        )


def _describe_resumption(world: World, job: Job) -> None:
    resumed, note, warn = job.resumed, world.output.note, world.output.warn
    if resumed is None:
        return
    manifest = resumed.manifest
    note(f"resumed after step {manifest.step}, from {resumed.path} (saved by {manifest.writers})")
    if manifest.position is None:
        warn("the version that saved it took samples in another order: an epoch begins")
    if changes := changed_options(resumed, job.config):
        note(f"changed since then: {'; '.join(changes)}")
    if changed := changed_data(manifest.data, job.data_facts):
        warn(changed)
    if job.data.stream and not job.data_facts["files"]:
        warn(
            "the training data is a stream, whose content is not compared with that of the "
            "checkpoint: be sure that it is the same, and give its files in "
            "compared_files() of the task to have their sizes compared"
        )
