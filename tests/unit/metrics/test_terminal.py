"""What is drawn of a run, printed on real rich consoles."""

import math
import re

import pytest
from reports import console, places, rank, record, skipped, summary, used
from rich.cells import cell_len
from rich.console import RenderableType

from mntrain.metrics import terminal, units
from mntrain.metrics.step import StepRecord, memory_by_role
from mntrain.metrics.terminal import (
    ProgressPanel,
    memory_table,
    place_table,
    plain,
    result_table,
    traffic_table,
)
from mntrain.rank_info import Usage
from zero.memory import Memory


def printed(renderable: RenderableType, width: int = 80) -> list[str]:
    """The lines that it takes on a console."""
    on = console(False, width=width)
    on.print(renderable)
    return [line.rstrip() for line in on.file.getvalue().splitlines()]


def cells(renderable: RenderableType) -> list[list[str]]:
    """The cells of a table, without its head."""
    lines = printed(renderable)
    rules = [i for i, line in enumerate(lines) if "───" in line]
    return [re.split(r"\s{2,}", line.strip()) for line in lines[rules[0] + 1 :]]


def after(steps: int, *records: StepRecord) -> ProgressPanel:
    """The progress of a run of `steps` steps after those recorded."""
    progress = ProgressPanel(steps)
    for one in records:
        progress.add(one)
    return progress


# Where the ranks run


def test_up_to_16_ranks_have_a_row_each():
    rows = cells(place_table(places(16, 8, "cuda:3"), "utf-8"))
    assert len(rows) == 16
    assert rows[9] == ["1", "9", "1", "n1", "cuda:3", "2"]


def test_more_ranks_have_a_row_a_node_with_devices_counted():
    assert cells(place_table(places(18, 9, "cuda:3"), "utf-8")) == [
        ["0", "0-8", "0-8", "n0", "9 cuda", "2"],
        ["1", "9-17", "0-8", "n1", "9 cuda", "2"],
    ]


def test_a_thousand_ranks_stay_a_short_table_that_tells_what_it_leaves_out():
    host = "a-rather-long-node-name-{}.cluster.example.org"
    table = place_table(places(1000, 8, host=host), "utf-8")
    rows = cells(table)
    assert len(rows) == 16
    assert rows[13][1] == "104-111"
    assert rows[14] == ["...", "110 more nodes"]
    assert rows[15][:3] == ["124", "992-999", "0-7"]
    assert max(map(cell_len, printed(table))) <= 80


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([4], "4"),
        ([4, 4, 4], "4"),
        ([0, 1, 2, 3], "0-3"),
        ([8, 0, 1, 9, 5], "0-1, 5, 8-9"),
        (range(0, 1000, 2), "0, ..., 998"),
    ],
)
def test_ranges(numbers, text):
    assert terminal._ranges(numbers) == text


# Steps


def test_line_tells_loss_rate_norm_speed_and_time_left():
    assert after(174, record(40)).line() == (
        "step  40/174  loss 2.4312  lr 2.9e-03  norm 0.81  12.3k tokens/s  0.50 s/step  left 1:07"
    )


def test_line_of_a_skipped_step_tells_why_it_has_no_norm():
    assert after(174, skipped(40, loss=math.nan)).line() == (
        "step  40/174  loss nan  lr 2.9e-03  skipped gradient not finite"
        "  12.3k tokens/s  0.50 s/step  left 1:07"
    )


def test_speed_is_that_of_the_last_ten_steps():
    steps = (record(n, step_s=1.0, tokens_per_s=100.0 * n) for n in range(1, 21))
    assert "1.55k tokens/s" in after(20, *steps).line()


def test_samples_are_called_samples():
    line = after(4, record(1, samples=32, tokens_per_s=64.0, step_s=0.5)).line()
    assert "64.0 samples/s" in line


def test_time_left_does_not_count_on_another_warm_up():
    progress = after(102, record(1, step_s=60.0))
    assert progress.line().endswith("left 1:41:00")
    progress.add(record(2, step_s=1.0))
    assert progress.line().endswith("left 1:40")
    progress.add(record(102, step_s=1.0))
    assert progress.line().endswith("left 0:00")


def test_frame_tells_progress_loss_speed_and_shares_of_the_phases():
    steps = (record(n, loss=4 - n / 50, metrics={"accuracy": 0.31}) for n in range(1, 151))
    lines = printed(after(200, *steps).frame(80))
    expected = [
        ("step 150/200", "left 0:25"),
        ("loss 1.0000", "█▇", "▁", "accuracy 0.31"),
        ("12.3k tokens/s", "0.50 s/step", "lr 2.9e-03", "norm 0.81", "clip 1.00"),
        ("━" * 80,),
        ("data 10%  forward 20%  backward 40%  wait 10%  optimizer 10%  other 10%",),
    ]
    for line, texts in zip(lines, expected, strict=True):
        assert [text for text in texts if text not in line] == []


@pytest.mark.parametrize("width", [30, 60, 80, 200])
def test_frame_is_five_lines_at_any_width(width):
    metrics = {"accuracy": 0.31, "top5": 0.9}
    steps = (record(n, step_s=60.0, metrics=metrics) for n in range(100_001, 100_051))
    lines = printed(after(200_000, *steps).frame(width), width)
    assert len(lines) == 5
    assert max(map(cell_len, lines)) <= min(width, 100)


@pytest.mark.parametrize("shares", [(0.2,) * 5, (1 / 3, 1 / 3, 1 / 3, 0, 0), (0.3,) * 5])
@pytest.mark.parametrize("width", [-5, 0, 1, 7, 80])
def test_bar_is_as_wide_as_told(shares, width):
    assert terminal._bar([(share, "") for share in shares], width).cell_len == max(0, width)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([], ""),
        ([2.0, 2.0], "▁▁"),
        ([8.0, 1.0, math.nan, 4.0], "█▁x▄"),
        ([math.inf], "x"),
    ],
)
def test_sparkline(values, line):
    assert terminal._sparkline(values) == line


# The statistics at the end


def test_result_has_losses_time_and_speed():
    lines = printed(result_table(summary(), 5, "samples", "utf-8"))
    assert [re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in lines] == [
        ["steps", "4 of 5"],
        ["final loss", "1.5000"],
        ["eval loss", "1.6000  accuracy 0.93"],
        ["wall time", "1:07"],
        ["samples/s", "12.3k on average"],
    ]


def memory_rows(measured: list[Memory], *usage: Usage, expected: list[Memory] | None = None):
    return cells(memory_table(memory_by_role(measured, expected or measured, usage)))


def test_memory_has_expected_least_median_most_and_the_rank_that_peaks():
    measured = [Memory(0, 0, 0, 0, state=mib * 2**20) for mib in (300, 500, 400, 2048)]
    expected = [Memory(0, 0, 0, 0, state=2**30)] * 4
    usage = [used(mib * 2**20) for mib in (310, 510, 410, 400)]
    assert memory_rows(measured, *usage, expected=expected) == [
        ["optimizer state", "1.00 GiB", "300 MiB", "450 MiB", "2.00 GiB", "3"],
        ["total of these", "1.00 GiB", "300 MiB", "450 MiB", "2.00 GiB", "3"],
        ["process peak", "310 MiB", "405 MiB", "510 MiB", "1"],
    ]


def test_memory_has_a_row_for_every_role_that_takes_any():
    rows = memory_rows([Memory(*(2**20 * n for n in range(1, 6)))], used(2**30, 2**20))
    assert [row[0] for row in rows] == [
        "parameters",
        "gradients",
        "working buckets",
        "master weights",
        "optimizer state",
        "total of these",
        "process peak",
        "GPU peak",
    ]
    assert max(map(cell_len, printed(memory_table(summary()["memory"])))) <= 80


def test_memory_that_was_expected_but_not_taken_is_shown():
    rows = memory_rows([Memory(0, 0, 0, 0, 0)], used(2**20), expected=[Memory(0, 0, 0, 64, 0)])
    assert rows[0] == ["master weights", "64 B", "0 B", "0 B", "0 B", "0"]


def test_memory_of_devices_is_shown_where_there_are_any():
    rows = memory_rows([Memory(0, 0, 0, 0, 0)] * 3, *(used(2**20, r * 2**30) for r in range(3)))
    assert rows[1:] == [["GPU peak", "0 B", "1.00 GiB", "2.00 GiB", "2"]]


def test_skipped_steps_are_counted_beside_the_others():
    lines = printed(result_table(summary(skipped_steps=2), 5, "samples", "utf-8"))
    assert lines[0].split(maxsplit=1)[1] == "4 of 5, 2 skipped"


def test_traffic_is_the_sum_over_ranks_by_level():
    node = {"node_messages": 600, "node_bytes": 2**29}
    ranks = [rank(r, **node, cross_messages=7, cross_bytes=100) for r in range(3)]
    expected = [["within nodes", "1.80k", "1.50 GiB"], ["between nodes", "21", "300 B"]]
    assert cells(traffic_table(ranks)) == expected


# Text


@pytest.mark.parametrize(
    ("text", "encoding", "shown"),
    [
        ("n[0] [red]a[/red] :smile:", "utf-8", "n[0] [red]a[/red] :smile:"),
        (
            "a\x1b[2J\tb\nc\x07",
            "utf-8",
            "a\N{REPLACEMENT CHARACTER}[2J\tb\nc\N{REPLACEMENT CHARACTER}",
        ),
        ("caf\N{LATIN SMALL LETTER E WITH ACUTE}", "ascii", "caf?"),
    ],
)
def test_plain_text_neither_styles_nor_controls(text, encoding, shown):
    assert plain(text, encoding).plain == shown
    assert plain(text, encoding).spans == []


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (7, "7"),
        (3.7, "3.70"),
        (812, "812"),
        (999.7, "1.00k"),
        (12_345, "12.3k"),
        (99_960, "100k"),
        (1_200_000, "1.20M"),
        (math.nan, "nan"),
    ],
)
def test_count(value, text):
    assert units.count(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (512, "512 B"), (1023, "1.00 KiB"), (5 * 2**18, "1.25 MiB"), (2**60, "1024 PiB")],
)
def test_bytes(value, text):
    assert units.size(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (66.6, "1:07"), (3599.6, "1:00:00"), (43267, "12:01:07"), (360000, "100:00:00")],
)
def test_clock(seconds, text):
    assert units.clock(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0 us"), (0.01234, "12.3 ms"), (0.42, "0.42 s"), (75.0, "75.00 s")]
)
def test_short_time(seconds, text):
    assert units.short_time(seconds) == text
