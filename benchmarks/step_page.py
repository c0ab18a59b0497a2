"""What step.py says of its figures: pages of Markdown, and a picture."""

from collections.abc import Callable
from typing import Any

import svg
from emulated import HEAP, imprint

MIB = 2**20
HEAP_WORDS = (
    "Every process keeps what it frees, as glibc does once a program has freed 32 MiB at once "
    f"({', '.join(f'{name}={value}' for name, value in HEAP.items())}): else computing alone takes "
    "up to 4 % longer or not, by what its process has freed before."
)


def report(page: dict[str, Any]) -> str:
    """A layout's page: every way to train."""
    present = [row for row in page["rows"] if "absent" not in row]
    lines = [
        f"# A training step, {page['layout']}",
        "",
        f"{imprint(page, page['versions'])}. {model(page)}. {HEAP_WORDS} By:",
        "",
        f"    {page['command']}",
        "",
        "The machine's speed changes from one job to the next. So each way's job takes turns with "
        "as many ranks that only compute, each for itself: "
        f"{page['turns']} turns each, of {page['steps']} steps after one that is not counted; and "
        "a step is told as a multiple of that: the median over the turns, the least and the most. "
        "In the row of computing alone both do the same: what it differs from 1 by is chance. "
        "Computing in step waits for the slowest rank after every step: so much any training "
        "together takes before anything is sent. "
        "Exposed is what a multiple has beyond 1; the seconds are the multiple of "
        f"{page['alone_s']:.3f} s, the median of computing alone over all jobs. Waited is how long "
        "a step waited for collectives, and busy how long any was under way, as the program itself "
        "counts, in its job's own seconds; of the rank that has most.",
        "",
        "Memory is above that of the finished model: the peaks of a node's ranks, added up. In a "
        "rank's peak a page that k ranks share counts 1/k (VmHWM - RssShmem + Pss_Shmem of /proc), "
        "and so the sum is what is physically there. Of the node that needs most; and the mean of "
        "its ranks.",
        "",
        agreement(page),
        "",
        "| | of computing alone | from - to | exposed | to the best peer | step, s | "
        "waited (busy), s | sent by a node, MB | memory of a node, MiB | mean of its ranks |",
        f"|---|{'--:|' * 9}",
    ]
    for row in page["rows"]:
        if "absent" in row:
            lines.append(f"| {row['what']} | absent: {row['absent']} |{' |' * 8}")
            continue
        lines.append("| " + " | ".join([row["what"], *cells(row)]) + " |")
    if page["floor_s"]:
        lines.append(f"| the wire's floor | | | | | {page['floor_s']:.3f} |{' |' * 4}")
        lines += ["", "The wire's floor is that of an all-reduce of fp32 over the nodes; with the "]
        lines[-1] += "bf16 wire half of it. Bare sockets send and receive as many bytes as that, "
        lines[-1] += "and nothing is made of them: so much it takes over TCP, whoever asks for it."
    lines += ["", "![seconds a step and peak memory of each way to train](../img/step.svg)"]
    lines += state_table([row for row in present if row["state"]])
    lines += ["", *(f"- {row['what']}: {row['settings']}." for row in present)]
    return "\n".join(lines) + "\n"


def model(page: dict[str, Any]) -> str:
    """What is trained, in words."""
    return (
        f"A GPT of {page['gradient_bytes'] / 4e6:.1f} M parameters (gradient "
        f"{page['gradient_bytes'] / 1e6:.1f} MB) in fp32, AdamW, a micro-batch of 4 sequences and "
        "one thread a rank"
    )


def agreement(page: dict[str, Any]) -> str:
    """How far the losses agree."""
    found, wired = page["losses"], page["wired_losses"]
    words = []
    if found:
        words.append(
            f"All ways that communicate in fp32 end at the loss {found[0]:.4f} and differ by at "
            f"most {max(found) - min(found):.1g}."
        )
    if found and wired:
        furthest = max(abs(loss - found[0]) for loss in wired)
        words.append(f"The bf16 wire ends {furthest:.1g} from it at most.")
    return " ".join(words)


def cells(row: dict[str, Any]) -> list[str]:
    """A row's figures."""
    to_best = waited = ""
    if "to_best_peer" in row:
        to_best = f"{row['to_best_peer']:.2f}"
    if row["waited_s"] is not None:
        waited = f"{row['waited_s']:.3f} ({row['busy_s']:.3f})"
    memory = [f"{row[of] / MIB:.0f}" for of in ("node_peak_bytes", "rank_peak_bytes")]
    sent = f"{row['sent_bytes'] / 1e6:.1f}"
    low, high = row["ratios"]
    turns = [f"{row['ratio']:.3f}", f"{low:.2f} - {high:.2f}", f"{row['ratio'] - 1:.1%}"]
    return [*turns, to_best, f"{row['scaled_s']:.3f}", waited, sent, *memory]


def state_table(rows: list[dict[str, Any]]) -> list[str]:
    """Lines of Markdown: the model's state by role, measured and expected."""
    if not rows:
        return []
    roles = list(rows[0]["state"]["measured"])
    lines = ["", "State of the model on the rank that holds most, MiB, measured (expected):", ""]
    lines += ["| | " + " | ".join(roles) + " |", "|---|" + "--:|" * len(roles)]
    for row in rows:
        measured, expected = row["state"]["measured"], row["state"]["expected"]
        figures = (f"{measured[role] / MIB:.1f} ({expected[role] / MIB:.1f})" for role in roles)
        lines.append(f"| {row['what']} | " + " | ".join(figures) + " |")
    return lines


def solo_report(page: dict[str, Any]) -> str:
    """The page of a world of one."""
    lines = [
        "# A training step in a world of one, beside bare torch",
        "",
        f"{imprint(page, page['versions'])}. {model(page)}. {HEAP_WORDS} By:",
        "",
        f"    {page['command']}",
        "",
        "All take turns in one process: each in its turn takes a step on the same batch, in an "
        f"order that changes, {page['steps']} times. The median of a step, and the median of what "
        "it took as a multiple of the bare loop's step on the same batch. The bare loop runs a "
        "second time beside itself: what that differs by is chance. In every step mntrain looks at "
        "the gradient's norm, as who clips does: so there is a bare loop that does, too.",
        "",
        "| | step, s | of bare torch |",
        "|---|--:|--:|",
    ]
    for name, way in page["ways"].items():
        lines.append(f"| {name} | {way['median_s']:.4f} | {way['ratio']:.4f} |")
    return "\n".join(lines) + "\n"


def picture(pages: list[dict[str, Any]]) -> str:
    """Bars of time and memory, a row a way and a block a layout."""
    parts, top = [], 20
    for page in pages:
        rows = [row for row in page["rows"] if "absent" not in row]
        if not rows:
            continue
        parts.append(svg.text(30, top + 18, page["layout"], size=14, weight="bold"))
        panels: list[tuple[int, str, Callable[[dict[str, Any]], float], str]] = [
            (
                230,
                "seconds a step (dashed: computing alone)",
                lambda row: row["scaled_s"],
                "{:.2f}",
            ),
            (
                560,
                "MiB of a node at the peak, above the model",
                lambda row: row["node_peak_bytes"] / MIB,
                "{:.0f}",
            ),
        ]
        bottom = top + 50 + 22 * len(rows)
        for left, title, value, form in panels:
            parts.append(svg.text(left, top + 40, title, color=svg.FAINT))
            scale = 210 / max(map(value, rows))
            for number, row in enumerate(rows):
                y, width = top + 50 + 22 * number, scale * value(row)
                parts.append(svg.bar(left, y, width, color(row["what"])))
                parts.append(svg.text(left + width + 6, y + 13, form.format(value(row))))
        for number, row in enumerate(rows):
            parts.append(svg.text(30, top + 63 + 22 * number, row["what"]))
            if row["what"] == "computing alone":
                x = 230 + 210 * row["scaled_s"] / max(other["scaled_s"] for other in rows)
                parts.append(svg.line(x, top + 48, x, bottom, color=svg.ALONE, dash="4 3"))
        top = bottom + 26
    label = "Seconds a training step and a node's peak memory of each way to train, by layout"
    return svg.document(860, top, label, parts)


def color(what: str) -> str:
    """This project's, what all add to, or another's."""
    if what.startswith("mntrain"):
        return svg.OURS[3 if "wire" in what else 0]
    return svg.ALONE if what.startswith("computing") else svg.OTHERS[0]
