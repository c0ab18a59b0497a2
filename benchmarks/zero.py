"""A training step of one GPT, in time and memory: every stage beside torch's and DeepSpeed's.

    sudo python benchmarks/zero.py [--layouts 2 2,2] [--link 1gbit] [--steps 8] [--rounds 2]

A layout is the ranks of each node: nodes are network namespaces joined by links of the given rate,
one node has no network. Every way to train is a job of its own, with a peak of memory of its own;
the whole list runs `--rounds` times, so that noise falls on all alike. The wire's floor is that of
an all-reduce: 2 (M - 1) / M of the gradient's bytes a node, at the payload rate of the link. Prints
tables; writes them and every figure to docs/results/, and a picture to docs/img/.
"""

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from html import escape
from pathlib import Path

from all_reduce import PAYLOAD_BYTES_PER_GBIT
from nodes import Cluster, available  # found where all_reduce looks for it

HERE = Path(__file__).resolve().parent
MIB = 2**20
LIMIT_S = 300  # for one job
ALONE = "computing alone"
WAYS = (
    ALONE,
    *(f"mntrain stage {stage}" for stage in (0, 1, 2)),
    *("DDP", "DDP, 4 MB buckets", "DDP, ZeroRedundancyOptimizer"),
    *("FSDP2, ZeRO-2", "FSDP2, ZeRO-3"),
    *(f"DeepSpeed stage {stage}" for stage in (0, 1, 2)),
)


def main() -> int:
    """Measure every way in every layout, and write what came out."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--layouts", nargs="+", default=["2", "2,2"], metavar="N,N")
    options.add_argument("--link", default="1gbit", help="rate of each node's link, in gbit")
    options.add_argument("--steps", type=int, default=8, help="measured, after 2 that warm up")
    options.add_argument("--rounds", type=int, default=2)
    options.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, metavar="WAY")
    options.add_argument("--output", type=Path, default=HERE.parent / "docs", metavar="DIR")
    given = options.parse_args()
    if reason := available():
        sys.exit(f"zero.py: emulated nodes cannot be made here: {reason}")
    results, images = given.output / "results", given.output / "img"
    results.mkdir(parents=True, exist_ok=True)
    images.mkdir(parents=True, exist_ok=True)
    pages = []
    for layout in given.layouts:
        page = measure([int(number) for number in layout.split(",")], given)
        report = table(page)
        print(report, flush=True)
        name = f"zero-{layout.replace(',', '+')}"
        (results / f"{name}.json").write_text(json.dumps(page, indent=1) + "\n")
        (results / f"{name}.md").write_text(report)
        pages.append(page)
    (images / "zero.svg").write_text(picture(pages))
    return 0


def measure(ranks: list[int], given: argparse.Namespace) -> dict:
    """Every way on nodes of these ranks: a page of figures, one row a way."""
    nodes, link = len(ranks), given.link if len(ranks) > 1 else None
    jobs: dict[str, list[dict]] = {what: [] for what in given.ways}
    with Cluster(ranks=ranks, link=link) as cluster:
        for number in range(given.rounds):
            for what in given.ways:
                start = time.perf_counter()
                jobs[what].append(job(cluster, what, given.steps))
                check(jobs)
                took = f"{time.perf_counter() - start:.1f} s"
                print(f"{ranks} round {number + 1}: {what}, {took}", file=sys.stderr)
    any_job = next(iter(jobs.values()))[0]
    gradient = any_job["gradient_bytes"]
    page = {
        "layout": f"{sum(ranks)} ranks on "
        + (f"{nodes} nodes, links of {link}" if link else "one node"),
        "date": date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.release()}",
        "command": shlex.join(["python", "benchmarks/zero.py", *sys.argv[1:]]),
        "library": any_job["library"],
        "versions": any_job["versions"],
        "steps": given.steps,
        "rounds": given.rounds,
        "gradient_bytes": gradient,
        "floor_s": None,
        "rows": [row_of(what, runs) for what, runs in jobs.items()],
        "jobs": jobs,
    }
    if link:
        rate = float(link.removesuffix("gbit")) * PAYLOAD_BYTES_PER_GBIT
        page["floor_s"] = 2 * (nodes - 1) / nodes * gradient / rate
    return page


def job(cluster: Cluster, what: str, steps: int) -> dict:
    """Run one way under mpirun: what its ranks printed. What they said goes out if they fail."""
    command = [sys.executable, str(HERE / "ranks" / "steps.py")]
    command += ["--what", what, "--steps", str(steps)]
    line, environment = cluster.mpirun(command)
    done = subprocess.run(
        line, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}zero.py: {what} failed: exit code {done.returncode}")
    return json.loads(next(x for x in done.stdout.splitlines() if x.startswith('{"what"')))


def check(jobs: dict[str, list[dict]]) -> None:
    """A way that learns something else has no speed: losses agree to 4 decimals."""
    found = losses(jobs)
    assert not found or max(found) - min(found) < 0.5e-4, {
        what: [run.get("loss") for run in runs] for what, runs in jobs.items()
    }


def losses(jobs: dict[str, list[dict]]) -> list[float]:
    """The final losses of every way that communicates."""
    runs = [run for what, some in jobs.items() if what != ALONE for run in some]
    return [run["loss"] for run in runs if "loss" in run]


def row_of(what: str, runs: list[dict]) -> dict:
    """One way over all rounds: medians of time, extremes of memory."""
    if "absent" in runs[0]:
        return {"what": what, "absent": runs[0]["absent"]}
    peaks = [peak for run in runs for peak in run["peak_bytes"]]
    return {
        "what": what,
        "step_s": statistics.median(statistics.median(run["step_s"]) for run in runs),
        "sent_bytes": statistics.median(run["sent_bytes"] for run in runs),
        "peak_bytes": [min(peaks), max(peaks)],
        "settings": runs[0]["settings"],
        "state": most_state(runs[0]["state"]),
    }


def most_state(ranks: list[dict] | None) -> dict | None:
    """The state of the rank that holds most of it, totals added."""
    if ranks is None:
        return None
    most = max(ranks, key=lambda rank: sum(rank["measured"].values()))
    return {kind: sizes | {"total": sum(sizes.values())} for kind, sizes in most.items()}


def table(page: dict) -> str:
    """The results as a page of Markdown."""
    rows = page["rows"]
    present = [row for row in rows if "absent" not in row]
    alone = next((row["step_s"] for row in rows if row["what"] == ALONE), None)
    found = losses(page["jobs"])
    versions = ", ".join(f"{name} {number}" for name, number in page["versions"].items())
    lines = [
        f"# A training step, {page['layout']}",
        "",
        f"{page['date']}; {page['machine']}; {page['library']}, {versions}. A GPT of "
        f"{page['gradient_bytes'] / 4e6:.1f} M parameters (gradient "
        f"{page['gradient_bytes'] / 1e6:.1f} MB) in fp32, AdamW, a micro-batch of 4 sequences and "
        f"one thread a rank; medians over {page['steps']} steps, then {page['rounds']} rounds; by:",
        "",
        f"    {page['command']}",
        "",
        "Peak memory is a rank's resident memory above that of the finished model, least to most "
        "of all ranks. Exposed is what a step takes beyond computing alone. "
        + (
            f"All ways that communicate end at the loss {found[0]:.4f} and differ by at most "
            f"{max(found) - min(found):.1g}."
            if found
            else ""
        ),
        "",
        "| | step, s | exposed, s | sent by a node, MB a step | peak memory, MiB |",
        "|---|--:|--:|--:|--:|",
    ]
    for row in rows:
        if "absent" in row:
            lines.append(f"| {row['what']} | absent: {row['absent']} | | | |")
            continue
        least, most = (round(peak / MIB) for peak in row["peak_bytes"])
        exposed = "" if alone is None or row["what"] == ALONE else f"{row['step_s'] - alone:.3f}"
        sent = f"{row['sent_bytes'] / 1e6:.1f}"
        lines.append(
            f"| {row['what']} | {row['step_s']:.3f} | {exposed} | {sent} | {least} to {most} |"
        )
    if page["floor_s"]:
        lines.append(f"| the wire's floor | {page['floor_s']:.3f} | | | |")
    lines += state_table([row for row in present if row["state"]])
    lines += ["", *(f"- {row['what']}: {row['settings']}." for row in present)]
    return "\n".join(lines) + "\n"


def state_table(rows: list[dict]) -> list[str]:
    """Lines of Markdown: the model's state by role, measured and expected."""
    if not rows:
        return []
    roles = list(rows[0]["state"]["measured"])
    lines = ["", "State of the model on the rank that holds most, MiB, measured (expected):", ""]
    lines += ["| | " + " | ".join(roles) + " |", "|---|" + "--:|" * len(roles)]
    for row in rows:
        measured, expected = row["state"]["measured"], row["state"]["expected"]
        cells = (f"{measured[role] / MIB:.1f} ({expected[role] / MIB:.1f})" for role in roles)
        lines.append(f"| {row['what']} | " + " | ".join(cells) + " |")
    return lines


def picture(pages: list[dict]) -> str:
    """Bars of time and memory, a row a way and a block a layout, as SVG on a ground of its own."""
    bars, top = [], 20
    for page in pages:
        rows = [row for row in page["rows"] if "absent" not in row]
        if not rows:
            continue
        bars.append(_text(30, top + 18, page["layout"], size=14, weight="bold"))
        panels: list[tuple[int, str, Callable[[dict], float], str]] = [
            (230, "seconds a step (dashed: computing alone)", lambda row: row["step_s"], "{:.2f}"),
            (
                560,
                "peak MiB a rank, above the model",
                lambda row: row["peak_bytes"][1] / MIB,
                "{:.0f}",
            ),
        ]
        for left, title, value, form in panels:
            bars.append(_text(left, top + 40, title, color="#475569"))
            scale = 210 / max(map(value, rows))
            for number, row in enumerate(rows):
                y, width = top + 50 + 22 * number, scale * value(row)
                bars.append(
                    f'<rect x="{left}" y="{y}" width="{width:.1f}" height="16" rx="3" '
                    f'fill="{_color(row["what"])}"/>'
                )
                bars.append(_text(left + width + 6, y + 13, form.format(value(row))))
        for number, row in enumerate(rows):
            bars.append(_text(30, top + 63 + 22 * number, row["what"]))
        bottom = top + 50 + 22 * len(rows)
        if rows[0]["what"] == ALONE:
            x = 230 + 210 * rows[0]["step_s"] / max(row["step_s"] for row in rows)
            bars.append(
                f'<line x1="{x:.1f}" y1="{top + 48}" x2="{x:.1f}" y2="{bottom}" '
                'stroke="#d97706" stroke-width="1.5" stroke-dasharray="4 3"/>'
            )
        top = bottom + 26
    label = "Seconds a training step and peak memory of each way to train, by layout"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 {top}" '
        f'font-family="system-ui, sans-serif" role="img" aria-label="{label}">'
        f'<rect x="1" y="1" width="858" height="{top - 2}" rx="8" fill="#ffffff" '
        'stroke="#cbd5e1" stroke-width="1.5"/>\n' + "\n".join(bars) + "</svg>\n"
    )


def _text(
    x: float,
    y: float,
    words: str,
    *,
    size: int = 12,
    weight: str = "normal",
    color: str = "#0f172a",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y}" font-size="{size}" font-weight="{weight}" fill="{color}">'
        f"{escape(words)}</text>"
    )


def _color(what: str) -> str:
    colors = {"mntrain": "#2563eb", "computing": "#d97706"}
    return colors.get(what.partition(" ")[0], "#94a3b8")


if __name__ == "__main__":
    sys.exit(main())
