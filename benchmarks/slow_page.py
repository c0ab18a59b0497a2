"""The page and the plots of slow_links.py."""

from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

import figures
from emulated import folders, heading, table, write
from slow_modes import MODES, SYNCHRONOUS, WARM_UP

PALETTE = (*figures.OURS, *figures.OTHERS, figures.BASELINE, "#be185d", "#65a30d", "#0d9488")
RATES = {"0.1gbit": "100 Mbit/s", "1gbit": "1 Gbit/s"}
TITLES = {"slow-links-long": ", in a long run", "slow-links-large": ", with a larger model"}
Points = list[tuple[float, float]]


def publish(page: dict[str, Any], name: str, output: Path) -> None:
    """Write the page and its plots."""
    results, images = folders(output)
    write(results, name, page, report(page, name))
    curves = {mode: curve(runs) for mode, runs in page["runs"].items()}
    draw(images / f"{name}-steps.svg", curves, lambda mode, step: step, "step")
    sent = {mode: cost for mode in curves if (cost := step_bytes(page, mode))}
    draw(
        images / f"{name}-bytes.svg",
        {mode: curves[mode] for mode in sent},
        lambda mode, step: spent(mode, step, sent) / 1e6,
        "MB sent between nodes",
        log=True,
    )
    for link in page["links"]:
        seconds = {mode: s for mode in curves if (s := step_seconds(page, link, mode))}
        draw(
            images / f"{name}-time-{link}.svg",
            {mode: curves[mode] for mode in seconds},
            lambda mode, step, seconds=seconds: spent(mode, step, seconds) / 60,
            f"minutes over a link of {RATES.get(link, link)}",
            log=True,
        )


def draw(
    path: Path,
    curves: dict[str, Points],
    place: Callable[[str, float], float],
    label: str,
    *,
    log: bool = False,
) -> None:
    """Plot losses at the places of their steps on the x axis."""
    if not curves:
        return
    colors = {SYNCHRONOUS: figures.INK}
    others = [mode for mode in MODES if mode != SYNCHRONOUS]
    colors |= dict(zip(others, PALETTE * 2, strict=False))
    figures.line_chart(
        path,
        "Validation loss",
        {mode: [(place(mode, s), loss) for s, loss in points] for mode, points in curves.items()},
        colors=colors,
        x_label=label,
        y_label="loss, nats per byte",
        dashed=[mode for mode in curves if MODES[mode].peer],
        log_x=log,
    )


def curve(runs: dict[str, Any]) -> Points:
    """Return the mean loss over seeds by step, without the first evaluation of a new model."""
    by_seed = [dict(map(tuple, run["evaluations"])) for run in runs.values()]
    steps = sorted(set.intersection(*map(set, by_seed)))
    return [(step, mean(losses[step] for losses in by_seed)) for step in steps if step > 1]


def step_bytes(page: dict[str, Any], mode: str) -> float | None:
    """Return the bytes that both nodes send in a step after the warm-up; of peers, on the link."""
    if mode in page["bytes"]:
        return page["bytes"][mode]
    for timed in page["links"].values():
        if MODES[mode].variant in timed:
            return 2 * timed[MODES[mode].variant]["sent_bytes"]
    return None


def multiple(page: dict[str, Any], link: str, variant: str) -> list[float] | None:
    """Return the time of a step as a multiple of computing alone, in each turn."""
    job = page["links"].get(link, {}).get(variant)
    if job is None:
        return None
    return [step / alone for step, alone in zip(job["step_s"], job["alone_s"], strict=True)]


def alone_seconds(page: dict[str, Any]) -> float:
    """Return the seconds of a step that only computes: the median over all jobs."""
    jobs = [job for timed in page["links"].values() for job in timed.values()]
    return median(seconds for job in jobs for seconds in job["alone_s"])


def step_seconds(page: dict[str, Any], link: str, mode: str) -> float | None:
    """Return the seconds of a step after the warm-up: the multiple of computing alone."""
    turns = multiple(page, link, MODES[mode].variant)
    return median(turns) * alone_seconds(page) if turns else None


def spent(mode: str, steps: float, cost: dict[str, float]) -> float:
    """Return what so many steps cost; those of the warm-up cost what synchronous ones do."""
    warmup = min(steps, MODES[mode].warmup)
    return warmup * cost[SYNCHRONOUS] + (steps - warmup) * cost[mode]


def report(page: dict[str, Any], name: str) -> str:
    """Return the page as Markdown."""
    runs = page["runs"]
    about = (
        f"The built-in task with {page['model'] or 'its default model of 0.9 M parameters'}, on "
        "two nodes of one rank: "
        f"windows of {page['context']} bytes, {page['batch_size']} a step, {page['steps']:,} "
        "steps, AdamW with its default schedule. The validation loss is over "
        f"{page['eval_samples']} windows, in nats per byte, of the mean "
        "of the nodes' parameters. Modes that exchange rarely begin with "
        f"{WARM_UP} synchronous steps. Peers "
        "(*DDP*, *PostLocalSGD*) are torch's own, over gloo, with the same weights, samples, "
        "schedule and clipping."
    )
    title = f"Losses over slow links{TITLES.get(name, '')}"
    lines = [
        *heading(page, title, {"torch": page["torch"]}, about),
        "It runs, for each seed:",
        "",
        *(f"    {command_of(made)}" for made in runs.values()),
        "",
        *([page["note"], ""] if "note" in page else []),
        *loss_table(page),
        "",
        "*kB per step* are those of both nodes together after the warm-up, with the losses and "
        "flags of every step, without evaluations; those of peers are counted on the link, with "
        "headers. *Fewer bytes* is fp32's figure divided by it, and *with the warm-up* the same "
        "for the whole run.",
        "",
        f"![validation loss against step](../img/{name}-steps.svg)",
        "",
        f"![validation loss against bytes sent](../img/{name}-bytes.svg)",
    ]
    for link in page["links"]:
        lines += ["", *time_table(page, link, name)]
    return "\n".join(lines) + "\n"


def command_of(made: dict[str, Any]) -> str:
    """Return the command of a mode's first run, in options that still exist."""
    command: str = next(iter(made.values()))["command"]
    command = command.replace("--comm.compress bf16", "--comm.wire-dtype bf16")
    return command.replace(" --comm.no-tune", "")  # it kept the default algorithm


def loss_table(page: dict[str, Any]) -> list[str]:
    """Return a Markdown table of losses and bytes."""
    head = ["mode", "seeds", "validation loss, mean", "min - max", "vs. fp32", "kB per step"]
    head += ["fewer bytes", "with the warm-up"]
    rows = []
    plain = final_losses(page["runs"][SYNCHRONOUS])
    costs = {mode: step_bytes(page, mode) for mode in page["runs"]}
    for mode, made in page["runs"].items():
        losses, against, sent = final_losses(made), "", ["", "", ""]
        if mode != SYNCHRONOUS and set(losses) <= set(plain):
            against = f"{mean(losses.values()) / mean(plain[seed] for seed in losses) - 1:+.1%}"
        known = {one: cost for one, cost in costs.items() if cost}
        if mode in known and SYNCHRONOUS in known:
            whole = [spent(one, page["steps"], known) for one in (SYNCHRONOUS, mode)]
            fewer = known[SYNCHRONOUS] / known[mode]
            sent = [f"{known[mode] / 1e3:,.1f}", times(fewer), times(whole[0] / whole[1])]
        spread = f"{min(losses.values()):.4f} - {max(losses.values()):.4f}"
        rows.append(
            [mode, f"{len(losses)}", f"{mean(losses.values()):.4f}", spread, against, *sent]
        )
    return table(head, rows)


def time_table(page: dict[str, Any], link: str, name: str) -> list[str]:
    """Return the section about a link."""
    rate = RATES.get(link, link)
    seconds = {mode: s for mode in page["runs"] if (s := step_seconds(page, link, mode))}
    plain = [
        (spent(SYNCHRONOUS, step, seconds), loss) for step, loss in curve(page["runs"][SYNCHRONOUS])
    ]
    lines = [
        f"## At {rate}",
        "",
        f"A step of the same model on two emulated nodes of one rank with links of {rate}, in "
        "turns with computing alone, whole intervals between exchanges at a time: the median over "
        "the turns, the minimum and the maximum. *Minutes* is the time of the whole run without "
        f"evaluations, from these multiples of {alone_seconds(page) * 1e3:.1f} ms, the median of "
        "computing alone; the last column is the loss that synchronous fp32 has reached by then.",
        "",
    ]
    head = ["mode", "× compute only", "min - max", "minutes", "loss"]  # noqa: RUF001
    rows, variant = [], "compute only, barriers"
    if turns := multiple(page, link, variant):
        spread = f"{min(turns):.2f} - {max(turns):.2f}"
        rows.append([variant, f"{median(turns):.3f}", spread, "", "", ""])
    for mode in seconds:
        turns = multiple(page, link, MODES[mode].variant) or []
        end = spent(mode, page["steps"], seconds)
        loss = curve(page["runs"][mode])[-1][1]
        then = figures.value_at(plain, end)
        cells = [
            mode,
            f"{median(turns):.3f}",
            f"{min(turns):.2f} - {max(turns):.2f}",
            f"{end / 60:.2f}",
            f"{loss:.4f}",
            f"{then:.4f}" if then is not None else "",
        ]
        rows.append(cells)
    lines += table([*head, "loss of fp32 by then"], rows)
    if absent := [mode for mode in page["runs"] if mode not in seconds]:
        lines += ["", f"Not timed: {', '.join(absent)}."]
    image = f"../img/{name}-time-{link}.svg"
    return [*lines, "", f"![validation loss against minutes at {rate}]({image})"]


def final_losses(runs: dict[str, Any]) -> dict[str, float]:
    """Return the last validation loss by seed."""
    return {seed: run["evaluations"][-1][1] for seed, run in runs.items()}


def times(ratio: float) -> str:
    """Format a ratio: two digits or more."""
    return f"{ratio:,.0f}" if ratio >= 10 else f"{ratio:.1f}"
