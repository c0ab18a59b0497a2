"""What the reporter shows and writes, on real rich consoles."""

import contextlib
import fcntl
import io
import json
import math
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from mntrain import report
from mntrain.report import ConsoleReporter, Reporter, make_reporter
from mntrain.stats import Place, StepRecord

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"
NASTY = "n[0] [red]a[/red] [/] :smile: \x1b[2J\x1b]0;title\x07"
NASTY_SHOWN = "n[0] [red]a[/red] [/] :smile: \N{REPLACEMENT CHARACTER}[2J"


def console(terminal: bool, **options) -> Console:
    environment = {"TERM": "xterm", "COLUMNS": "80"}
    defaults = {"width": 80, "_environ": environment, "file": io.StringIO()}
    return Console(force_terminal=terminal, **(defaults | options))


def record(step: int, **changes) -> StepRecord:
    fields = {"loss": 2.4312, "lr": 2.9e-3, "grad_norm": 0.81, "clip_coef": 1.0}
    fields |= {"clipped_norm": 0.81, "samples": 32, "tokens_per_s": 12300.0, "step_s": 0.5}
    fields |= {"data": 0.05, "forward": 0.1, "backward": 0.2, "reduce_wait": 0.05}
    fields |= {"optimizer": 0.05, "metrics": {}}
    return StepRecord(step=step, **(fields | changes))


def places(size: int, per_node: int, device: str = "cpu", host: str = "n{}") -> list[Place]:
    return [
        Place(r, host.format(r // per_node), r // per_node, r % per_node, device, threads=2)
        for r in range(size)
    ]


def start(reporter: Reporter, where: list[Place], model: str = "lm: 0.83 M parameters") -> None:
    reporter.start(
        where,
        library="MPICH 5.0.2",
        thread_level="multiple",
        topology="4 ranks on 2 nodes of 2",
        algorithm="lanes",
        model=model,
    )


def rank(number: int, **changes) -> dict:
    fields = {"rank": number, "host": "n0", "node": 0, "local_rank": number, "device": "cpu"}
    fields |= {"threads": 1, "peak_memory": 2**20, "peak_device_memory": 0}
    fields |= {"node_messages": 0, "node_bytes": 0, "cross_messages": 0, "cross_bytes": 0}
    return fields | changes


def summary(**changes) -> dict:
    world = {"size": 1, "nodes": 1, "topology": "1 rank", "algorithm": "flat", "library": "MPICH"}
    fields = {"status": "completed", "steps": 4, "final_loss": 1.5, "eval_loss": 1.6}
    fields |= {"eval_metrics": {"accuracy": 0.93}, "wall_s": 67.2, "tokens_per_s": 12345.0}
    return fields | {"run_dir": "runs/a", "world": world, "ranks": [rank(0)]} | changes


def shown(on: Console) -> str:
    """All that was printed, without styles."""
    return re.sub(r"\x1b\[[\d;]*m", "", on.file.getvalue())


def screen(on: Console) -> list[str]:
    """The lines that a terminal is left with."""
    lines, row = [""], 0
    for part in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", on.file.getvalue()):
        if part == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif part.startswith("\x1b"):
            number, command = re.fullmatch(r"\x1b\[\??([\d;]*)(.)", part).groups()
            assert command in "mKAhl"
            if command == "K":
                lines[row] = ""
            elif command == "A":
                row -= int(number)
        elif part != "\r":
            lines[row] += part
    return [line.rstrip() for line in lines]


@contextlib.contextmanager
def reporting(directory: Path, on: Console, steps: int = 4) -> Iterator[Reporter]:
    with make_reporter(True, directory, steps, on) as reporter:
        yield reporter


def call_everything(reporter: Reporter) -> None:
    with reporter:
        start(reporter, places(2, 2))
        reporter.step(record(1, eval_loss=1.0))
        reporter.text("sample", "text")
        reporter.warn("careful")
        reporter.error("broken")
        reporter.finish(summary())


def test_silent_reporter_prints_and_writes_nothing(tmp_path, capfd):
    on = console(True)
    call_everything(make_reporter(False, tmp_path / "run", 4, on))
    call_everything(make_reporter(False, tmp_path / "run", 4))
    assert on.file.getvalue() == ""
    assert capfd.readouterr() == ("", "")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("terminal", [True, False])
def test_master_shows_everything_and_writes_two_files(tmp_path, terminal):
    on = console(terminal)
    call_everything(make_reporter(True, tmp_path / "deep" / "run", 4, on))
    text = "\n".join(screen(on))
    for expected in ("lm: 0.83", "step 1", "eval loss 1.0000", "sample", "  text", "completed"):
        assert expected in text
    assert "warning: careful" in text
    assert "error: broken" in text
    files = sorted(path.name for path in (tmp_path / "deep" / "run").iterdir())
    assert files == ["metrics.jsonl", "summary.json"]


def test_both_reporters_have_the_same_methods(tmp_path):
    public = {name for name in vars(Reporter) if not name.startswith("_")}
    assert public == {name for name in vars(ConsoleReporter) if not name.startswith("_")}


# Where the ranks run


def table_rows(on: Console) -> list[list[str]]:
    """The cells of the table of places, below its rule."""
    lines = on.file.getvalue().splitlines()
    rule = next(i for i, line in enumerate(lines) if "───" in line)
    body = lines[rule + 1 : lines.index("", rule)]
    return [re.split(r"\s{2,}", line.strip()) for line in body]


def test_start_tells_library_thread_level_topology_algorithm_and_model(tmp_path):
    on = console(False)
    with reporting(tmp_path, on) as reporter:
        start(reporter, places(4, 2))
    facts = "4 ranks on 2 nodes of 2, lanes, MPICH 5.0.2 (thread level multiple)"
    assert on.file.getvalue().splitlines()[:2] == ["lm: 0.83 M parameters", facts]


def test_up_to_16_ranks_have_a_row_each(tmp_path):
    on = console(False)
    with reporting(tmp_path, on) as reporter:
        start(reporter, places(16, 8, "cuda:3"))
    rows = table_rows(on)
    assert len(rows) == 16
    assert rows[9] == ["1", "9", "1", "n1", "cuda:3", "2"]


def test_more_ranks_have_a_row_a_node_with_devices_counted(tmp_path):
    on = console(False)
    with reporting(tmp_path, on) as reporter:
        start(reporter, places(18, 9, "cuda:3"))
    assert table_rows(on) == [
        ["0", "0-8", "0-8", "n0", "9 cuda", "2"],
        ["1", "9-17", "0-8", "n1", "9 cuda", "2"],
    ]


def test_a_thousand_ranks_stay_a_short_table_that_tells_what_it_leaves_out(tmp_path):
    on = console(False)
    with reporting(tmp_path, on) as reporter:
        start(reporter, places(1000, 8, host="a-rather-long-node-name-{}.cluster.example.org"))
    rows = table_rows(on)
    assert len(rows) == 16
    assert rows[13][1] == "104-111"
    assert rows[14] == ["...", "110 more nodes"]
    assert rows[15][:3] == ["124", "992-999", "0-7"]
    assert max(map(cell_len, on.file.getvalue().splitlines())) <= 80


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
    assert report._ranges(numbers) == text


# Steps in a log


def said_steps(on: Console) -> list[int]:
    return [int(step) for step in re.findall(r"^step +(\d+)/", on.file.getvalue(), re.MULTILINE)]


def run_steps(directory: Path, on: Console, numbers: range, steps: int, **changes) -> None:
    with reporting(directory, on, steps) as reporter:
        for number in numbers:
            reporter.step(record(number, **changes))


def test_log_has_the_first_step_then_every_twentieth_part_and_the_last(tmp_path):
    on = console(False)
    run_steps(tmp_path, on, range(1, 204), 203)
    assert said_steps(on) == [1, *range(11, 203, 11), 203]
    assert "\x1b" not in on.file.getvalue()


def test_log_has_every_step_of_a_short_run(tmp_path):
    on = console(False)
    run_steps(tmp_path, on, range(1, 6), 5)
    assert said_steps(on) == [1, 2, 3, 4, 5]


def test_log_of_slow_steps_has_a_line_every_30_seconds(tmp_path):
    on = console(False)
    run_steps(tmp_path, on, range(1, 11), 1000, step_s=12.0)
    assert said_steps(on) == [1, 4, 7, 10]


def test_log_of_a_resumed_run_begins_with_its_first_step(tmp_path):
    on = console(False)
    run_steps(tmp_path, on, range(57, 62), 200)
    assert said_steps(on) == [57, 60]


def test_log_line_tells_loss_rate_norm_speed_and_time_left_without_wrapping(tmp_path):
    on = console(False)
    run_steps(tmp_path, on, range(40, 41), 174)
    assert on.file.getvalue() == (
        "step  40/174  loss 2.4312  lr 2.9e-03  norm 0.81  12.3k tokens/s  0.50 s/step  left 1:07\n"
    )


def test_speed_is_that_of_the_last_ten_steps(tmp_path):
    on = console(False)
    with reporting(tmp_path, on, 20) as reporter:
        for number in range(1, 21):
            reporter.step(record(number, step_s=1.0, tokens_per_s=100.0 * number))
    assert "1.55k tokens/s" in on.file.getvalue().splitlines()[-1]


def test_samples_are_called_samples(tmp_path):
    on = console(False)
    run_steps(tmp_path, on, range(1, 2), 4, samples=32, tokens_per_s=64.0, step_s=0.5)
    assert "64.0 samples/s" in on.file.getvalue()


def test_time_left_does_not_count_on_another_warm_up(tmp_path):
    on = console(False)
    with reporting(tmp_path, on, 102) as reporter:
        reporter.step(record(1, step_s=60.0))
        reporter.step(record(2, step_s=1.0))
        reporter.warn("done")
        reporter.step(record(102, step_s=1.0))
    lines = on.file.getvalue().splitlines()
    assert lines[0].endswith("left 1:41:00")
    assert lines[-1].endswith("left 0:00")


def test_evaluation_has_a_line_of_its_own(tmp_path):
    on = console(False)
    with reporting(tmp_path, on, 200) as reporter:
        reporter.step(record(49))
        reporter.step(record(50, eval_loss=2.31, eval_metrics={"accuracy": 0.93}))
    line = "step 50  eval loss 2.3100  accuracy 0.93"
    assert on.file.getvalue().splitlines()[-1] == line


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("terminal", [True, False])
def test_loss_that_is_not_finite_is_shown(tmp_path, loss, terminal):
    on = console(terminal)
    with reporting(tmp_path, on) as reporter:
        reporter.step(record(1))
        reporter.step(record(2, loss=loss, grad_norm=loss, eval_loss=loss))
    lines = screen(on)
    assert f"step 2  eval loss {loss}" in lines
    assert any(f"loss {loss}  " in line for line in lines)


def test_dumb_terminal_and_one_without_utf8_get_a_log(tmp_path):
    dumb = console(True, _environ={"TERM": "dumb"})
    ascii_file = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    latin = console(True, file=ascii_file)
    for on in (dumb, latin):
        with reporting(tmp_path, on) as reporter:
            start(reporter, places(2, 2, host="n\N{LATIN SMALL LETTER E WITH ACUTE}"))
            reporter.step(record(1, eval_loss=1.0))
            reporter.text("sample", "caf\N{LATIN SMALL LETTER E WITH ACUTE}")
            reporter.finish(summary())
    plain = "step 1/4  loss 2.4312"
    assert plain in dumb.file.getvalue()
    assert plain in ascii_file.buffer.getvalue().decode()
    assert "caf?" in ascii_file.buffer.getvalue().decode()
    assert HIDE not in dumb.file.getvalue() + ascii_file.buffer.getvalue().decode()


def read_all(end: io.FileIO, marker_to: int) -> str:
    """What a pseudo-terminal got; it hands over a piece at a time."""
    os.write(marker_to, b"<end>")
    output = b""
    while not output.endswith(b"<end>"):
        output += end.read(65536)
    return output.decode()


@pytest.mark.parametrize(("columns", "redrawn"), [(0, False), (100, True)])
def test_pseudo_terminal_without_a_size_gets_a_log(tmp_path, monkeypatch, capsys, columns, redrawn):
    # Such a one is what Open MPI gives its ranks where its own output is no terminal.
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = pty.openpty()
    with open(ours, "rb", buffering=0) as end, open(theirs, "w", encoding="utf-8") as stdout:
        size = struct.pack("HHHH", 30 if columns else 0, columns, 0, 0)
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, size)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stdout)
            with make_reporter(True, tmp_path, 4) as reporter:
                reporter.step(record(1))
                reporter.warn("careful")
        output = read_all(end, theirs)
    assert "2.4312" in output
    assert ("\x1b" in output) == redrawn
    # Into the live display nothing may print but itself, and stderr may be the same terminal.
    assert ("careful" in output) == redrawn
    assert ("careful" in capsys.readouterr().err) != redrawn


# Steps on a terminal


def test_live_display_ends_with_one_frame_that_fits(tmp_path):
    on = console(True)
    with reporting(tmp_path, on, 200) as reporter:
        for number in range(1, 151):
            reporter.step(record(number, loss=4 - number / 50, metrics={"accuracy": 0.31}))
    lines = screen(on)
    text = "\n".join(lines)
    assert text.count("loss") == 1
    for expected in ("step 150/200", "left 0:25", "loss 1.0000", "accuracy 0.31"):
        assert expected in text
    for expected in ("12.3k tokens/s", "0.50 s/step", "lr 2.9e-03", "norm 0.81", "clip 1.00"):
        assert expected in text
    assert "data 10%  forward 20%  backward 40%  wait 10%  optimizer 10%  other 10%" in text
    assert max(map(cell_len, lines)) <= 80
    assert on.file.getvalue().count(HIDE) == on.file.getvalue().count(SHOW) == 1


@pytest.mark.parametrize("width", [30, 60, 80, 200])
def test_frame_is_five_lines_at_any_width(tmp_path, width):
    on = console(True, width=width)
    with reporting(tmp_path, on, 200_000) as reporter:
        for number in range(100_001, 100_051):
            reporter.step(record(number, step_s=60.0, metrics={"accuracy": 0.31, "top5": 0.9}))
    lines = [line for line in screen(on) if line]
    assert len(lines) == 5
    assert max(map(cell_len, lines)) <= min(width, 100)


def test_lines_stay_above_the_live_display(tmp_path):
    on = console(True)
    with reporting(tmp_path, on, 200) as reporter:
        reporter.step(record(1))
        reporter.step(record(2, eval_loss=2.31, eval_metrics={"accuracy": 0.93}))
        reporter.warn("rank 3 is slow")
        reporter.text("sample", "one\n  two")
        reporter.step(record(3))
    lines = screen(on)
    assert lines[:5] == [
        "step 2  eval loss 2.3100  accuracy 0.93",
        "warning: rank 3 is slow",
        "sample",
        "  one",
        "    two",
    ]
    assert lines[5].startswith("step   3/200")


def test_live_display_is_not_redrawn_at_every_step(tmp_path):
    on = console(True)
    run_steps(tmp_path, on, range(1, 101), 100)
    assert on.file.getvalue().count("loss") < 50


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_exception_stops_the_live_display_and_passes_through(tmp_path, error):
    on = console(True)
    stdout, stderr = sys.stdout, sys.stderr

    def fail() -> None:
        with reporting(tmp_path, on) as reporter:
            reporter.step(record(1))
            assert SHOW not in on.file.getvalue()
            raise error

    with pytest.raises(error):
        fail()
    assert on.file.getvalue().count(HIDE) == on.file.getvalue().count(SHOW) == 1
    assert on.file.getvalue().rindex(SHOW) > on.file.getvalue().rindex("loss")
    assert (sys.stdout, sys.stderr) == (stdout, stderr)
    after = len(on.file.getvalue())
    on.print("next")
    assert on.file.getvalue()[after:] == "next\n"  # no display is drawn again below it


@pytest.mark.parametrize("shares", [(0.2,) * 5, (1 / 3, 1 / 3, 1 / 3, 0, 0), (0.3,) * 5])
@pytest.mark.parametrize("width", [-5, 0, 1, 7, 80])
def test_bar_is_as_wide_as_told(shares, width):
    assert report._bar([(share, "") for share in shares], width).cell_len == max(0, width)


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
    assert report._sparkline(values) == line


# Text from outside


@pytest.mark.parametrize("terminal", [True, False])
def test_markup_and_escape_sequences_are_shown_not_interpreted(tmp_path, terminal):
    on = console(terminal, width=200)
    with reporting(tmp_path, on, 2) as reporter:
        start(reporter, places(2, 2, host=NASTY), model=NASTY)
        reporter.step(record(2, metrics={NASTY: 1.0}, eval_loss=1.0, eval_metrics={NASTY: 1.0}))
        reporter.warn(NASTY)
        reporter.error(NASTY)
        reporter.text(NASTY, NASTY)
        reporter.finish(summary(eval_metrics={NASTY: 1.0}, run_dir=NASTY))
    # Model, two hosts, evaluation, warning, error, title, body, statistics, directory; the live
    # display has them once more.
    assert "\n".join(screen(on)).count(NASTY_SHOWN) == 10 + terminal
    assert "\x1b[2J" not in on.file.getvalue()
    assert "\x1b]0" not in on.file.getvalue()


def test_text_is_shown_as_it_is_line_by_line(tmp_path):
    on = console(False)
    body = "x" * 200 + "\n\n  indented [b]y[/b]"
    with reporting(tmp_path, on) as reporter:
        reporter.text("sample", body)
    assert on.file.getvalue() == f"sample\n  {'x' * 200}\n\n    indented [b]y[/b]\n"


def test_empty_text_shows_nothing(tmp_path):
    on = console(False)
    with reporting(tmp_path, on) as reporter:
        reporter.text("sample", "")
    assert on.file.getvalue() == ""


def test_warnings_and_errors_go_to_stderr(tmp_path, capsys):
    with make_reporter(True, tmp_path, 4) as reporter:
        reporter.warn("careful, " * 20 + "please")
        reporter.error("broken")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == ["warning: " + "careful, " * 20 + "please", "error: broken"]


# metrics.jsonl


def strict(text: str) -> dict:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_each_step_is_on_disk_at_once_as_a_line_of_json(tmp_path):
    with reporting(tmp_path, console(False)) as reporter:
        for number in (1, 2, 3):
            reporter.step(record(number))
            lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
            assert [strict(line)["step"] for line in lines] == list(range(1, number + 1))
    assert strict(lines[0]) == record(1).to_json()


def test_metrics_are_appended_to_those_of_an_earlier_run(tmp_path):
    run_steps(tmp_path, console(False), range(1, 3), 4)
    run_steps(tmp_path, console(False), range(3, 5), 4)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [strict(line)["step"] for line in lines] == [1, 2, 3, 4]


def test_numbers_that_json_lacks_become_null(tmp_path):
    nan, inf = math.nan, math.inf
    with reporting(tmp_path, console(False)) as reporter:
        reporter.step(record(1, loss=nan, grad_norm=inf, metrics={"a": -inf, "b": 1.0}))
        reporter.finish(summary(final_loss=nan, ranks=[rank(0, share=nan)]))
    line = strict((tmp_path / "metrics.jsonl").read_text())
    assert line["loss"] is line["grad_norm"] is line["metrics"]["a"] is None
    assert line["metrics"]["b"] == 1.0
    written = strict((tmp_path / "summary.json").read_text())
    assert written["final_loss"] is written["ranks"][0]["share"] is None


def test_step_after_close_raises(tmp_path):
    reporter = make_reporter(True, tmp_path, 4, console(False))
    reporter.close()
    reporter.close()
    with pytest.raises(RuntimeError, match="step 3 was reported after"):
        reporter.step(record(3))


# The statistics at the end


def finished(directory: Path, **changes) -> list[str]:
    on = console(False)
    with reporting(directory, on) as reporter:
        reporter.step(record(4))
        reporter.finish(summary(**changes))
    return [line.strip() for line in on.file.getvalue().splitlines()[1:]]


def test_statistics_tell_the_result_and_end_with_the_directory(tmp_path):
    lines = finished(tmp_path, run_dir="runs/" + "long/" * 30)
    expected = {"steps": "4 of 4", "final loss": "1.5000", "eval loss": "1.6000  accuracy 0.93"}
    expected |= {"wall time": "1:07", "tokens/s": "12.3k on average"}
    shown = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in lines[2:7])
    assert shown == expected
    assert lines[1] == "completed"
    assert lines[-1] == "runs/" + "long/" * 30


@pytest.mark.parametrize(("loss", "text"), [(None, "-"), (math.nan, "nan"), (1e-7, "1.000e-07")])
@pytest.mark.parametrize("status", ["interrupted", "failed"])
def test_statistics_of_a_run_that_did_not_complete(tmp_path, loss, text, status):
    changes = {"final_loss": loss, "eval_loss": None, "eval_metrics": None, "ranks": []}
    lines = finished(tmp_path, status=status, **changes)
    assert lines[1] == status
    assert f"final loss  {text}" in lines
    assert "eval loss   -" in lines
    assert lines[-1] == "runs/a"


def test_run_that_ended_before_its_first_step_has_statistics(tmp_path):
    on = console(True)
    with reporting(tmp_path, on) as reporter:
        reporter.finish(summary(status="interrupted", steps=0, final_loss=None, tokens_per_s=0.0))
    assert "interrupted" in shown(on)
    assert strict((tmp_path / "summary.json").read_text())["steps"] == 0


def test_memory_has_least_median_most_and_the_rank_that_peaks(tmp_path):
    peaks = {0: 300, 1: 500, 2: 400, 3: 2048}
    ranks = [rank(r, peak_memory=mib * 2**20) for r, mib in peaks.items()]
    lines = finished(tmp_path, ranks=ranks)
    row = next(line for line in lines if line.startswith("host"))
    assert re.split(r"\s{2,}", row) == ["host", "300 MiB", "450 MiB", "2.00 GiB", "3"]
    assert not any(line.startswith("device") for line in lines)


def test_memory_of_devices_is_shown_where_there_are_any(tmp_path):
    ranks = [rank(r, peak_device_memory=r * 2**30) for r in range(3)]
    row = next(line for line in finished(tmp_path, ranks=ranks) if line.startswith("device"))
    assert re.split(r"\s{2,}", row) == ["device", "0 B", "1.00 GiB", "2.00 GiB", "2"]


def test_traffic_is_the_sum_over_ranks_by_level(tmp_path):
    node = {"node_messages": 600, "node_bytes": 2**29}
    ranks = [rank(r, **node, cross_messages=7, cross_bytes=100) for r in range(3)]
    lines = finished(tmp_path, ranks=ranks)
    assert any(re.fullmatch(r"within nodes +1\.80k +1\.50 GiB", line) for line in lines)
    assert any(re.fullmatch(r"between nodes +21 +300 B", line) for line in lines)


# summary.json


def test_summary_is_written_after_all_else(tmp_path):
    written = tmp_path / "summary.json"

    class Watched(io.StringIO):
        def write(self, text: str) -> int:
            assert not written.exists()
            return super().write(text)

    on = console(True, file=Watched())
    reporter = make_reporter(True, tmp_path, 4, on)
    reporter.step(record(1))
    reporter.finish(summary())
    assert strict(written.read_text()) == summary()
    with pytest.raises(RuntimeError):  # metrics.jsonl was closed before
        reporter.step(record(2))


def test_summary_replaces_an_old_one_as_a_whole(tmp_path):
    path = tmp_path / "summary.json"
    path.write_text("old")
    with path.open() as reader:
        finished(tmp_path)
        assert reader.read() == "old"  # who had it open keeps the old file
    assert strict(path.read_text())["status"] == "completed"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl", "summary.json"]


def test_failed_write_leaves_the_old_summary_and_nothing_else(tmp_path, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError("no space left")

    (tmp_path / "summary.json").write_text("old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        finished(tmp_path)
    assert (tmp_path / "summary.json").read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl", "summary.json"]


def test_summary_takes_paths(tmp_path):
    finished(tmp_path, run_dir=tmp_path)
    assert strict((tmp_path / "summary.json").read_text())["run_dir"] == str(tmp_path)


# Units


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
    assert report._count(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (512, "512 B"), (1023, "1.00 KiB"), (5 * 2**18, "1.25 MiB"), (2**60, "1024 PiB")],
)
def test_bytes(value, text):
    assert report._bytes(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (66.6, "1:07"), (3599.6, "1:00:00"), (43267, "12:01:07"), (360000, "100:00:00")],
)
def test_clock(seconds, text):
    assert report._clock(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0 ms"), (0.01234, "12.3 ms"), (0.42, "0.42 s"), (75.0, "75.00 s")]
)
def test_short_time(seconds, text):
    assert report._short_time(seconds) == text
