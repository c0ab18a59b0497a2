"""The report of `doctor`: a table, or one JSON object."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mntrain.checks.finding import Finding, worst
from mntrain.comm.links import LinkSpeed

_STYLES = {"pass": "green", "warn": "yellow", "fail": "bold red"}


def to_json(
    findings: Mapping[str, Finding],
    hosts: Sequence[str],
    links: Mapping[str, Sequence[LinkSpeed]],
    slowest: int | None,
) -> str:
    """Return one JSON object; `hosts` is by rank, `slowest` a rank of the slowest node."""
    measured: dict[str, Any] = {}
    for where, pairs in links.items():
        rows = [
            {
                **asdict(pair),
                "mb_per_s": pair.mb_per_s,
                "hosts": [hosts[pair.one], hosts[pair.other]],
            }
            for pair in pairs
        ]
        measured[where.replace(" ", "_")] = rows
    document = {
        "status": worst(list(findings.values())),
        "ranks": len(hosts),
        "hosts": list(dict.fromkeys(hosts)),
        "checks": [{"name": name, **asdict(found)} for name, found in findings.items()],
        "links": measured,
        "slowest_node": None if slowest is None else hosts[slowest],
    }
    return json.dumps(document, indent=1)


def show(findings: Mapping[str, Finding], title: str, console: Console) -> None:
    """Print a table of all findings, and the verdict."""
    table = Table(title=title, title_justify="left", show_lines=False)
    table.add_column("check", no_wrap=True)
    table.add_column("")
    table.add_column("finding, and the fix")
    for name, found in findings.items():
        text = Text(found.text)
        if found.fix:
            text.append(f"\nfix: {found.fix}", style="bold")
        table.add_row(name, Text(found.status, style=_STYLES[found.status]), text)
    console.print(table)
    status = worst(list(findings.values()))
    verdict = {
        "pass": "fit to train",
        "warn": "fit to train, with warnings",
        "fail": "not fit to train",
    }
    console.print(Text(verdict[status], style=_STYLES[status]))
