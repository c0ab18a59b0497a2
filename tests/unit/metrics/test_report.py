"""What the master's reporter says, on real rich consoles."""

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
from dataclasses import replace

import pytest
from reports import (
    console,
    finished,
    places,
    record,
    reporting,
    run_steps,
    screen,
    skipped,
    summary,
    used,
)
from rich.cells import cell_len
from rich.console import Console

from mntrain.metrics.report import ConsoleReporter, Reporter, make_reporter
from mntrain.metrics.step import memory_by_role
from mntrain.rank_info import Place
from zero.memory import Memory

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"
NASTY = "n[0] [red]a[/red] [/] :smile: \x1b[2J\x1b]0;title\x07"
NASTY_SHOWN = "n[0] [red]a[/red] [/] :smile: \N{REPLACEMENT CHARACTER}[2J"


def start(reporter: Reporter, where: list[Place]) -> None:
    reporter.start(
        [("lm: 0.83 M parameters", "bold"), ("warning: ranks share GPUs", "yellow")], where
    )


def shown(on: Console) -> str:
    """All that was printed, without styles."""
    return re.sub(r"\x1b\[[\d;]*m", "", on.file.getvalue())


def call_everything(reporter: Reporter) -> None:
    with reporter:
        start(reporter, places(2, 2))
        reporter.step(record(1, eval_loss=1.0))
        reporter.text("sample", "text")
        reporter.warn("careful")
        reporter.note("news")
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
    assert "news" in text
    files = sorted(path.name for path in (tmp_path / "deep" / "run").iterdir())
    assert files == ["metrics.jsonl", "summary.json"]


def test_both_reporters_have_the_same_methods(tmp_path):
    public = {name for name in vars(Reporter) if not name.startswith("_")}
    assert public == {name for name in vars(ConsoleReporter) if not name.startswith("_")}


# Where the ranks run


def test_start_shows_lines_then_places(tmp_path):
    on = console(False)
    with reporting(tmp_path, on) as reporter:
        start(reporter, places(4, 2))
    lines = on.file.getvalue().splitlines()
    assert lines[:2] == ["lm: 0.83 M parameters", "warning: ranks share GPUs"]
    assert lines[3].split() == ["node", "rank", "local", "rank", "host", "device", "threads"]


# Steps in a log


def said_steps(on: Console) -> list[int]:
    return [int(step) for step in re.findall(r"^step +(\d+)/", on.file.getvalue(), re.MULTILINE)]


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


@pytest.mark.parametrize("loss", [1.25, math.nan])
@pytest.mark.parametrize("terminal", [True, False])
def test_skipped_step_says_so_and_why(tmp_path, loss, terminal):
    on = console(terminal)
    with reporting(tmp_path, on) as reporter:
        reporter.step(record(1))
        reporter.step(skipped(2, loss=loss))
    shown = "\n".join(screen(on))
    assert "skipped gradient not finite" in shown
    assert f"loss {'nan' if math.isnan(loss) else '1.2500'}" in shown


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


# Text from outside


@pytest.mark.parametrize("terminal", [True, False])
def test_markup_and_escape_sequences_are_shown_not_interpreted(tmp_path, terminal):
    on = console(terminal, width=200)
    with reporting(tmp_path, on, 2) as reporter:
        lines = [(NASTY, "bold"), (NASTY, ""), (NASTY, "yellow")]
        reporter.start(lines, places(2, 2, host=NASTY))
        reporter.step(record(2, metrics={NASTY: 1.0}, eval_loss=1.0, eval_metrics={NASTY: 1.0}))
        reporter.warn(NASTY)
        reporter.note(NASTY)
        reporter.text(NASTY, NASTY)
        reporter.finish(summary(eval_metrics={NASTY: 1.0}, run_dir=NASTY))
    # Three lines of the start, two hosts, evaluation, warning, news, title, body, statistics,
    # directory; the live display has them once more.
    assert "\n".join(screen(on)).count(NASTY_SHOWN) == 12 + terminal
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


def test_warnings_go_to_stderr(tmp_path, capsys):
    with make_reporter(True, tmp_path, 4) as reporter:
        reporter.warn("careful, " * 20 + "please")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == ["warning: " + "careful, " * 20 + "please"]


# The statistics at the end


def test_statistics_tell_result_memory_and_traffic_and_end_with_the_directory(tmp_path):
    lines = finished(tmp_path, run_dir="runs/" + "long/" * 30)
    expected = {"steps": "4 of 4", "final loss": "1.5000", "eval loss": "1.6000  accuracy 0.93"}
    expected |= {"wall time": "1:07", "tokens/s": "12.3k on average"}
    shown = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in lines[2:7])
    assert shown == expected
    assert lines[1] == "completed"
    assert {"memory of a rank", "sent"} < {line.partition("  ")[0] for line in lines}
    assert lines[-1] == "runs/" + "long/" * 30


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "2.40 GFLOP/s of the model"),
        (
            {"model_flops_per_s": 3.124e14, "utilisation": 0.4146, "computes_in": "bf16"},
            "312 TFLOP/s of the model, 41% of the dense bf16 peak",
        ),
        ({"model_flops_per_s": 812.0}, "812 FLOP/s of the model"),
    ],
)
def test_statistics_tell_what_the_model_computed(tmp_path, changes, text):
    lines = finished(tmp_path, **({"model_flops_per_s": 2.4e9} | changes))
    assert re.sub(r"\s+", " ", lines[7]) == f"computing {text}"


def test_statistics_tell_the_memory_of_gpus_where_there_are_any(tmp_path):
    roles = [Memory(1, 1, 1, 1, 1)]
    usage = used(2**20, 3 * 2**30, device_memory=2**30, peak_reserved_memory=2**32)
    text = "\n".join(finished(tmp_path, memory=memory_by_role(roles, roles, [usage])))
    for name, size in (
        ("GPU peak", "3.00"),
        ("GPU at the end", "1.00"),
        ("reserved, peak", "4.00"),
    ):
        assert re.search(rf"{name} +{size} GiB", text)
    assert "pinned" not in text
    assert "GPU" not in "\n".join(finished(tmp_path))


def test_start_tells_which_gpu_a_rank_has(tmp_path):
    on = console(False, width=120)
    gpus = [
        replace(place, gpu=f"{place.rank}f6d1c2a-4000", model="NVIDIA H100 80GB HBM3")
        for place in places(2, 2, device="cuda:0")
    ]
    with reporting(tmp_path, on) as reporter:
        start(reporter, gpus)
    for rank in (0, 1):
        assert f"cuda:0 H100 80GB HBM3 {rank}f6d1c2a  " in on.file.getvalue()


def test_start_counts_the_gpus_of_many_ranks_by_model(tmp_path):
    on = console(False, width=120)
    many = [replace(place, model="NVIDIA H200") for place in places(24, 8, device="cuda:0")]
    with reporting(tmp_path, on) as reporter:
        start(reporter, many)
    assert on.file.getvalue().count("8 H200") == 3


def test_statistics_count_skipped_steps(tmp_path):
    assert "steps       4 of 4, 3 skipped" in finished(tmp_path, skipped_steps=3)


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
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 0
