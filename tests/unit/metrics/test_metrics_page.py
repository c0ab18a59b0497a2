"""docs/metrics.md documents every figure."""

import re
from dataclasses import fields
from pathlib import Path

from reports import summary

from mntrain.metrics.registry import METRICS
from mntrain.rank_info import Place, Usage

PAGE = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()


def rows(title: str) -> list[list[str]]:
    """The cells of the table whose first header is `title`."""
    [table] = re.findall(rf"^\| {title} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()]


def names(title: str, cell: int = 0) -> set[str]:
    return {name for row in rows(title) for name in re.findall(r"`(\w+)`", row[cell])}


def test_every_metric_has_its_unit_its_reduction_and_a_formula():
    table = rows("name \\| unit \\| over ranks")
    documented = {row[0].strip("`"): (row[1], row[2]) for row in table}
    declared = {name: (metric.unit, metric.reduction) for name, metric in METRICS.items()}
    assert documented == declared
    assert all(len(row) == 4 and len(row[3]) > 5 for row in table)


def test_every_figure_of_a_rank_is_documented():
    declared = {field.name for kind in (Place, Usage) for field in fields(kind)}
    assert names("name in `ranks`") == declared | {
        *("samples", "own_s", "checks_s", "memory_by_role", "predicted_by_role")
    }


def test_every_metric_of_the_summary_is_documented():
    of_ends = {"reason", "error", "resumed_from", "checkpoint", "checkpoints"}
    of_ends |= {"stragglers", "shares", "cadence", "not_written"}
    assert names("name \\| unit \\| formula") == set(summary()) | of_ends


def test_every_role_of_memory_is_documented():
    assert names("role") == set(summary()["memory"])


def test_the_final_report_names_figures_of_the_summary():
    nested = {"communication_s", "exposed_s"}
    assert names("line", 1) <= set(summary()) | nested
