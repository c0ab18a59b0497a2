"""The pages and plots of step.py."""

from pathlib import Path
from typing import Any

import figures
from emulated import HEAP, folders, heading, table, write

MIB = 2**20
HEAP_NOTE = (
    "All processes keep freed memory, as glibc does after a program has freed a block of 32 MiB "
    f"({', '.join(f'{name}={value}' for name, value in HEAP.items())}). Otherwise the time of "
    "compute only varies by up to 4 %, depending on what its process has freed before."
)
COLUMNS = (
    "× compute only",  # noqa: RUF001 - a multiplication sign
    *("min - max", "exposed, s", "CPU beyond compute, s", "vs. best peer", "step, s"),
    "waited (busy), s",
    *("sent per node, MB", "memory per node, MiB", "mean per rank, MiB"),
)


def publish(page: dict[str, Any], name: str, output: Path) -> None:
    """Write the page of a layout, or of several regimes, as Markdown and JSON, and its plot."""
    results, images = folders(output)
    if "regimes" in page:
        write(results, name, page, regimes_report(page["regimes"]))
        return
    if "ways" in page:
        write(results, name, page, solo_report(page))
        return
    write(results, name, page, report(page, name))
    plot(page, images / f"{name}.svg")


def report(page: dict[str, Any], name: str) -> str:
    """Return the page of a layout as Markdown."""
    present = [row for row in page["rows"] if "absent" not in row]
    title, about = f"A training step, {page['layout']}", f"{model(page)}. {HEAP_NOTE}"
    rows = [
        [row["what"], *cells(row)]
        if "absent" not in row
        else [row["what"], f"not available: {row['absent']}", *[""] * (len(COLUMNS) - 1)]
        for row in page["rows"]
    ]
    if page["floor_s"]:
        floor = f"{page['floor_s']:.3f}"
        rows.append(["all-reduce at line rate", *[""] * 5, floor, *[""] * 4])
    lines = [
        *heading(page, title, page["versions"], about),
        "The machine's speed differs between jobs. So in the job of each variant, its steps "
        "alternate with those of as many ranks that only compute, without communication: "
        f"{page['turns']} turns each, of {page['steps']} steps{intervals(page)} after a warm-up "
        "step. The step time is given as a multiple of theirs: the median over the turns, the "
        "minimum and the maximum.",
        "",
        "- *compute only* is measured against itself: its difference from 1 is noise.",
        "- *compute only, barriers* waits for the slowest rank after every step, as any "
        "synchronous training must.",
        "- *exposed* is the part of a step above that of compute only, and *CPU beyond compute* "
        "the same of the CPU seconds of all threads of a rank, the mean over ranks.",
        f"- *step, s* is the multiple of {page['alone_s']:.3f} s, the median of compute only over "
        "all jobs.",
        "- *waited* is the time per step in which the program waited for collectives, and *busy* "
        "the time in which any collective was in progress, as the program itself reports them, in "
        "its own job's seconds, on the rank with the highest value.",
        "- *memory* is the peak above that of the finished model, summed over the ranks of the "
        "node with the highest sum. A page that k ranks share counts 1/k for each (VmHWM - "
        "RssShmem + Pss_Shmem of /proc), so the sum is physical memory.",
        "",
        loss_agreement(page),
        *([page["note"]] if "note" in page else []),
        "",
        *table(["", *COLUMNS], rows),
    ]
    if page["floor_s"]:
        lines += [
            "",
            "The last row is the time of an fp32 all-reduce over the nodes at line rate; with the "
            "bf16 wire it is half of it. *compute, raw sockets* sends and receives as many bytes "
            "over blocking sockets without using them, which is the cost of TCP alone.",
        ]
    lines += ["", f"![seconds per step and peak memory of each variant](../img/{name}.svg)"]
    lines += state_table([row for row in present if row["state"]])
    lines += ["", "Settings:", ""]
    lines += [f"- {row['what']}: {row['settings']}." for row in present]
    return "\n".join(lines) + "\n"


def regimes_report(pages: list[dict[str, Any]]) -> str:
    """Return one page for several multiples of the time in which gradients travel."""
    first = pages[0]
    title = "A training step where computing takes longer than sending"
    about = (
        f"A GPT of {first['gradient_bytes'] / 4e6:.1f} M parameters (gradient "
        f"{first['gradient_bytes'] / 1e6:.1f} MB) in fp32, AdamW, one thread per rank. {HEAP_NOTE}"
    )
    lines = [
        *heading(first, title, first["versions"], about),
        "Larger micro-batches compute for longer, and send as much. In the job of each row, its "
        "steps alternate with those of as many ranks that only compute: "
        f"{first['turns']} turns each, of {first['steps']} steps after a warm-up step. *exposed* "
        "is what a step takes beyond compute only, and *CPU beyond compute* what all threads of a "
        "rank compute beyond it. The best peer is the fastest row of DDP in the same table.",
    ]
    for page in pages:
        lines += ["", f"## {page['layout']}, {regime(page)}", ""]
        present = (row for row in page["rows"] if "absent" not in row)
        lines += table(["", *COLUMNS[:5]], ([row["what"], *cells(row)[:5]] for row in present))
    return "\n".join(lines) + "\n"


def regime(page: dict[str, Any]) -> str:
    """Describe how long a step computes, beside the time in which its gradients travel."""
    computes = f"micro-batches of {page['sequences']} sequences: computing takes "
    computes += f"{page['alone_s']:.2f} s"
    if page["floor_s"]:
        computes += f", {page['alone_s'] / page['floor_s']:.1f} times the all-reduce at line rate"
    return computes


def intervals(page: dict[str, Any]) -> str:
    """Say that variants which exchange rarely take more steps in a turn, if there are any."""
    longer = any(job.get("steps", 0) > page["steps"] for job in page["jobs"].values())
    return ", rounded up to whole intervals between exchanges," if longer else ""


def model(page: dict[str, Any]) -> str:
    """Describe the model."""
    return (
        f"A GPT of {page['gradient_bytes'] / 4e6:.1f} M parameters (gradient "
        f"{page['gradient_bytes'] / 1e6:.1f} MB) in fp32, AdamW, micro-batches of "
        f"{page.get('sequences', 4)} sequences, one thread per rank"
    )


def loss_agreement(page: dict[str, Any]) -> str:
    """Describe how closely the losses of the variants agree."""
    losses, wired, sentences = page["losses"], page["wired_losses"], []
    if losses:
        sentences.append(
            f"All variants that communicate in fp32 end at a loss of {losses[0]:.4f} and differ by "
            f"at most {max(losses) - min(losses):.1g}."
        )
    if losses and wired:
        largest = max(abs(loss - losses[0]) for loss in wired)
        sentences.append(f"With the bf16 wire the loss differs by at most {largest:.1g}.")
    return " ".join(sentences)


def cells(row: dict[str, Any]) -> list[str]:
    """Format the figures of a row, in the order of COLUMNS."""
    to_best = waited = ""
    if "to_best_peer" in row:
        to_best = f"{row['to_best_peer']:.2f}"
    if row["waited_s"] is not None:
        waited = f"{row['waited_s']:.3f} ({row['busy_s']:.3f})"
    memory = [f"{row[key] / MIB:.0f}" for key in ("node_peak_bytes", "rank_peak_bytes")]
    low, high = row["ratios"]
    exposed_s = row["scaled_s"] * (1 - 1 / row["ratio"])
    turns = [f"{row['ratio']:.3f}", f"{low:.2f} - {high:.2f}", f"{exposed_s:.3f}"]
    # Pages of before this was measured have no CPU seconds.
    turns.append(f"{row['extra_cpu_s']:.3f}" if "extra_cpu_s" in row else "")
    sent = f"{row['sent_bytes'] / 1e6:.1f}"
    return [*turns, to_best, f"{row['scaled_s']:.3f}", waited, sent, *memory]


def state_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return a Markdown table of the model state by role."""
    if not rows:
        return []
    roles = list(rows[0]["state"]["measured"])
    lines = ["", "Model state on the rank that holds most, MiB:", ""]
    cells = (
        [row["what"], *(f"{row['state']['measured'][role] / MIB:.1f}" for role in roles)]
        for row in rows
    )
    return lines + table(["", *roles], cells)


def solo_report(page: dict[str, Any]) -> str:
    """Return the page of a single process as Markdown."""
    title = "A training step in a single process, compared with a plain torch loop"
    rows = (
        [name, f"{way['median_s']:.4f}", f"{way['ratio']:.4f}"]
        for name, way in page["ways"].items()
    )
    lines = [
        *heading(page, title, page["versions"], f"{model(page)}. {HEAP_NOTE}"),
        "All variants take turns in one process: each takes a step on the same batch, in random "
        f"order, {page['steps']} times. The columns are the median time of a step, and the median "
        "ratio to the plain loop's step on the same batch. The plain loop runs twice; the "
        "difference is noise. mntrain computes the gradient norm in every step, as training with "
        "clipping does, so one plain loop computes it as well.",
        "",
        *table(["", "step, s", "× plain torch"], rows),  # noqa: RUF001 - a multiplication sign
    ]
    return "\n".join(lines) + "\n"


def plot(page: dict[str, Any], path: Path) -> None:
    """Plot bars of time and memory, one per variant."""
    rows = [row for row in page["rows"] if "absent" not in row]
    panels = {
        "seconds per step": [row["scaled_s"] for row in rows],
        "peak memory per node above the model, MiB": [row["node_peak_bytes"] / MIB for row in rows],
    }
    figures.bar_charts(path, page["layout"], [row["what"] for row in rows], panels)
