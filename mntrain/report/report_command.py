"""`python -m mntrain report`: one HTML page about runs, without scripts and network.

One process, without MPI.
"""

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from markupsafe import Markup

from mntrain.metrics.files import REPORT_FILE, flat_options, write_whole
from mntrain.metrics.registry import METRICS, PER_RANK, PHASES, WARMUP_STEPS
from mntrain.options.arguments import CommandParser
from mntrain.options.command_line import to_toml
from mntrain.options.config import Config
from mntrain.report import charts
from mntrain.report.charts import Curve, colours_of
from mntrain.report.page import Section, Table, render, side_by_side, table_of, text_of, words
from mntrain.report.run_files import RunFiles, differing, panel_of, read_runs

_TIMES = {"tokens_per_s": "items a second", "step_s": "seconds of a step"}  # with their titles
_PHASE_NAMES = {
    **{name: METRICS[name].label for name in PHASES},
    "step_s": "step",
    "communication": "communication in the step",
    "exposed": "exposed communication",
}  # in the table of a step's seconds
_MANY_RANKS = 8  # that do not get a curve each
# Entries of a summary that are objects of single values, and what their names begin with.
_NESTED = {"world": "", "eval_metrics": "eval_", "compression": "compression_", "checks": "checks_"}
_LEVELS = {"node": "within nodes", "cross": "between nodes"}


def run(words: Sequence[str]) -> int:
    """Run a command line, and return exit code 0.

    Raises ValueError and OSError for bad input, and SystemExit with code 0 after --help.
    """
    parser = CommandParser(
        prog="python -m mntrain report",
        description="Write one HTML page about one or several runs: curves, throughput, memory, "
        "communication, slow ranks, checkpoints, events and options.",
    )
    add = parser.add_argument
    add("runs", metavar="RUN_DIR", type=Path, nargs="+", help="the folder of a run")
    add(
        "--output",
        metavar="FILE",
        type=Path,
        help=f"file to write (default: {REPORT_FILE} in the folder of the run, or in this folder "
        "for several runs)",
    )
    add("--svg", metavar="FOLDER", type=Path, help="also write each chart, as 01.svg and so on")
    options = parser.read(words)
    folder = options.runs[0] if len(options.runs) == 1 else Path()
    output = options.output or folder / REPORT_FILE
    runs = read_runs(options.runs)
    if find_spec("matplotlib") is None:
        raise ValueError(
            "report needs matplotlib, which is not installed: pip install jinja2 matplotlib"
        )
    if not output.parent.is_dir():
        raise ValueError(f"--output {output}: there is no folder {output.parent}")
    page = page_of(runs)
    write_whole(output, page.encode())
    if options.svg:
        options.svg.mkdir(parents=True, exist_ok=True)
        for number, chart in enumerate(re.findall("<svg.*?</svg>", page, re.DOTALL), 1):
            content = chart.replace("<svg", f'<svg xmlns="{charts.SVG}"', 1)
            write_whole(options.svg / f"{number:02}.svg", content.encode())
    print(output)
    return 0


def page_of(runs: Sequence[RunFiles]) -> str:
    """Return the page about runs."""
    from matplotlib.colors import to_hex  # noqa: PLC0415 - an extra

    labels = [run.label for run in runs]
    title = f"Run {labels[0]}" if len(runs) == 1 else f"{len(runs)} runs"
    parts: dict[str, Callable[[Section, RunFiles, str], None]] = {
        "Memory": _add_memory,
        "Communication": _add_communication,
        "Speed of ranks": _add_ranks,
        "Checkpoints and events": _add_history,
    }
    sections = [
        _result(runs),
        Section("Curves", [*_curves(runs)]),
        _speed(runs),
        *(_of_each(title, add, runs) for title, add in parts.items()),
        _options(runs),
    ]
    legend = list(zip(labels, map(to_hex, colours_of(len(runs))), strict=False))
    notes = [f"{f'{r.label}: ' * (len(runs) > 1)}{text}" for r in runs for text in r.missing]
    return render(title, notes, legend, sections)


def _of_each(
    title: str,
    add: Callable[[Section, RunFiles, str], None],
    runs: Sequence[RunFiles],
) -> Section:
    """Return a section to which each run adds its own; titles name the run if there are several."""
    section = Section(title)
    for run in runs:
        add(section, run, f"{run.label}: " if len(runs) > 1 else "")
    return section


def _result(runs: Sequence[RunFiles]) -> Section:
    """Return what a summary has that is one value, with those of the world and the data."""
    section = Section("Result")
    by_run = []
    for run in runs:
        facts: dict[str, Any] = {"status": run.status}
        if not run.summary and run.lines:
            facts["steps"] = run.lines[-1]["step"]
        for name, value in run.summary.items():
            if name in _NESTED:
                facts |= {_NESTED[name] + inner: item for inner, item in (value or {}).items()}
                facts |= {"ranks": facts.pop("size")} if "size" in facts else {}
            else:  # of several optimizers, a list such as of their stages
                parts = value if isinstance(value, list) else [value]
                if not any(isinstance(part, Mapping) for part in parts):
                    facts.setdefault(name, value)
        items = facts.pop("items", "items")  # what the loss counts
        rates = {n: n.replace("tokens", items) for n in ("tokens_per_s", "step_tokens_per_s")}
        facts = {rates.get(name, name): value for name, value in facts.items()}
        hidden = ("reason", "error")  # in the status
        shown = {n: v for n, v in facts.items() if v not in (None, "", []) and n not in hidden}
        by_run.append(shown)
        if run.end:
            section.texts.append("\n".join([*([run.label] if len(runs) > 1 else []), *run.end]))
    section.add(side_by_side([run.label for run in runs], by_run))
    return section


def _curves(runs: Sequence[RunFiles]) -> Iterator[tuple[str, Markup]]:
    """Yield the curves of what the display shows of a step, and of what own loops log."""
    names = dict.fromkeys(n.removeprefix("eval_") for run in runs for n in run.names)
    for name in names:
        declared = METRICS.get(name.partition("/")[0])
        shown = declared is None or declared.row == "line"
        if shown and (panel := panel_of(runs, name)):
            yield words(name.removeprefix("metrics/")), charts.curves(panel)


def _speed(runs: Sequence[RunFiles]) -> Section:
    """Return the throughput, and where the time of a step goes."""
    section = Section("Speed")
    for name, title in _TIMES.items():
        if panel := panel_of(runs, name):
            section.charts.append((title, charts.curves(panel)))
    # A page about one run names it once.
    named = {run.label if len(runs) > 1 else "": phase_means(run.lines) for run in runs}
    timed = {label: means for label, means in named.items() if means}
    if timed:
        parts = {
            METRICS[name].label if name in METRICS else name: [m[name] for m in timed.values()]
            for name in (*PHASES, "other")
        }
        chart = charts.by_rank(parts, "s", labels=list(timed))
        section.charts.append(("mean seconds of a step, by phase", chart))
        cells = [
            {_PHASE_NAMES.get(n, n): text_of("_s", s) for n, s in means.items()}
            for means in timed.values()
        ]
        of = f"{next(iter(timed))}: " if len(timed) == 1 < len(runs) else ""
        title = f"{of}mean of a step, without the first {WARMUP_STEPS}"
        section.add(side_by_side(list(timed), cells, title))
    return section


def phase_means(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean seconds of each phase of a step after the warm-up, the rest, and their sum.

    Then those of communication, which goes on during the phases. Empty where no line has phases, as
    in a user's own loop.
    """
    timed = [line for line in lines if all(name in line for name in (*PHASES, "step_s"))]
    timed = timed[WARMUP_STEPS:] or timed
    if not timed:
        return {}
    names = (*PHASES, "step_s", "communication", "exposed")
    means = {name: fmean(line[name] for line in timed) for name in names}
    phases = {name: means.pop(name) for name in PHASES}
    return {**phases, "other": max(0.0, means["step_s"] - sum(phases.values())), **means}


def _add_memory(section: Section, run: RunFiles, of: str) -> None:
    ranks = run.summary.get("ranks", [])
    for name, where in (("peak_memory", "of the process"), ("peak_device_memory", "on the GPU")):
        if any(rank.get(name) for rank in ranks):
            chart = charts.by_rank({name: [rank[name] for rank in ranks]}, "B")
            section.charts.append((f"{of}peak memory {where}, by rank", chart))
    by_role = [rank.get("memory_by_role", {}) for rank in ranks]
    roles = [role for role in dict(*by_role[:1]) if any(sizes[role] for sizes in by_role)]
    if roles:
        parts = {words(role): [sizes[role] for sizes in by_role] for role in roles}
        section.charts.append((f"{of}memory by role and rank", charts.by_rank(parts, "B")))
    rows = []
    for role, sizes in run.summary.get("memory", {}).items():
        if any(size for size in sizes.values()):
            others = ("peak_rank", "saved_share")
            cells = {n: text_of(n if n in others else "bytes", size) for n, size in sizes.items()}
            rows.append({"role": words(role), **cells})
    section.add(table_of(rows, f"{of}memory of a rank"))


def _add_communication(section: Section, run: RunFiles, of: str) -> None:
    ranks = run.summary.get("ranks", [])
    sent = {where: [rank[f"{level}_bytes"] for rank in ranks] for level, where in _LEVELS.items()}
    if any(map(any, sent.values())):
        section.charts.append((f"{of}sent, by rank", charts.by_rank(sent, "B")))
    if any(rank["communication_s"] for rank in ranks):
        exposed = [rank["exposed_s"] for rank in ranks]
        rest = [max(0.0, rank["communication_s"] - rank["exposed_s"]) for rank in ranks]
        parts = {"exposed": exposed, "overlapped": rest}
        section.charts.append((f"{of}communication, by rank", charts.by_rank(parts, "s")))
    rows = [
        {
            "sent": where,
            "messages": sum(rank[f"{level}_messages"] for rank in ranks),
            "bytes": sum(sent[where]),
        }
        for level, where in _LEVELS.items()
    ]
    if ranks:
        section.add(table_of(rows, f"{of}all ranks"))


def _add_ranks(section: Section, run: RunFiles, of: str) -> None:
    """Add the speed of each rank, and which are slow."""
    ranks, slow = run.summary.get("ranks", []), run.summary.get("stragglers", [])
    if ranks and all(rank.get("own_s") and rank.get("samples") for rank in ranks):
        values = [rank["own_s"] / rank["samples"] for rank in ranks]
        chart = charts.by_rank({"": values}, "s", [one["rank"] for one in slow])
        section.charts.append((f"{of}own time for a sample, by rank; slow ranks red", chart))
    for name in PER_RANK:
        if curves := _rank_curves(run, name):
            chart = charts.by_rank_and_step(curves, "s" if METRICS[name].unit == "s" else "B")
            section.charts.append((f"{of}{words(name)}", chart))
    section.add(table_of(slow, f"{of}slow ranks: time for a sample / median of the others"))
    for name in ("cadence", "shares"):
        section.add(table_of(run.summary.get(name, []), of + name))
    section.add(table_of(ranks, folded=f"{of}all figures of {len(ranks)} ranks"))


def _rank_curves(run: RunFiles, name: str) -> dict[str, Curve]:
    """Return the curve of each rank of a metric; of many ranks the least, median and most."""
    names = [known for known in run.names if known.startswith(f"{name}/")]
    curves = {n.rpartition("/")[2]: curve for n in names if (curve := run.curve(n))}
    if len(curves) <= _MANY_RANKS:
        return {f"rank {rank}": curve for rank, curve in curves.items()}
    rows = [dict(zip(*curve, strict=True)) for curve in curves.values()]  # jobs had other ranks
    steps = sorted({step for row in rows for step, value in row.items() if np.isfinite(value)})
    filled = [[row.get(step, np.nan) for step in steps] for row in rows]
    spread = np.nanquantile(filled, [0, 0.5, 1], axis=0)
    places = np.array(steps)
    return dict(zip(("least", "median", "most"), ((places, part) for part in spread), strict=True))


def _add_history(section: Section, run: RunFiles, of: str) -> None:
    if saves := run.summary.get("checkpoints"):
        section.add(table_of([saves], f"{of}saves of the last job"))
    section.add(table_of([*run.checkpoints()], f"{of}checkpoints in the run's folder"))
    section.add(Table(f"{of}events", ["when", "what"], list(run.events())))


def _options(runs: Sequence[RunFiles]) -> Section:
    """Return the options that differ, or that are not the default, and all of them."""
    section, labels = Section("Configuration"), [run.label for run in runs]
    every = [run.options for run in runs]
    if len(runs) > 1:
        section.add(side_by_side(labels, differing(runs), "options that differ"))
    defaults = flat_options(tomllib.loads(to_toml(Config())))
    if len(runs) == 1 and every[0].keys() <= defaults.keys() | {"config"}:
        own = {n: v for n, v in every[0].items() if v != defaults.get(n)}
        section.add(side_by_side(labels, [own], "options that are not the default"))
    if any(every):
        section.add(side_by_side(labels, every, folded="all options"))
    return section
