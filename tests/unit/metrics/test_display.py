"""Output of the master's display, on real rich consoles."""

import io
import math
import re
import sys
from dataclasses import replace

import pytest
from reports import (
    console,
    finish,
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

from mntrain.metrics.display import Display
from mntrain.rank_info import Usage
from mntrain.run.final_report import final_lines
from mntrain.run.job_resources import memory_by_role
from mntrain.train.description import place_lines
from zero.memory import Memory

UP = "A\r"  # the cursor returns to the beginning of the live lines
NASTY = "n[0] [red]a[/red] [/] :smile: \x1b[2J\x1b]0;title\x07"
NASTY_SHOWN = "n[0] [red]a[/red] [/] :smile: \N{REPLACEMENT CHARACTER}[2J"


def strip(text: str) -> str:
    """A text without escape sequences."""
    return re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", text)


# Where the ranks run


def test_ranks_that_are_alike_share_a_line_and_the_first_16_lines_are_shown():
    first, second, *_, last = lines = place_lines(places(1000, 8))
    of_rank = "cpu, 24 GiB, 4 CPUs, threads 2"
    assert first == f"ranks 0 to 7: node 0 on n0: {of_rank}"
    assert second == f"ranks 8 to 15: node 1 on n1: {of_rank}"
    assert len(lines) == 17
    assert last == "... and 109 more lines"
    model = "NVIDIA H100 80GB HBM3"
    where = places(2, 2, device="cuda:0")
    gpus = [replace(one, gpu=f"{one.rank}f6d1c2a-4000", model=model) for one in where]
    assert place_lines(gpus) == [
        f"rank {n}: node 0 on n0: cuda:0 {model} {n}f6d1c2a, 24 GiB, 4 CPUs, threads 2"
        for n in (0, 1)
    ]


# Steps in a log


@pytest.mark.parametrize(
    ("steps", "of", "step_s", "said"),
    [
        (range(1, 204), 203, 0.5, [1, *range(11, 203, 11), 203]),  # the first, parts, the last
        (range(1, 6), 5, 0.5, [1, 2, 3, 4, 5]),
        (range(1, 11), 1000, 12.0, [1, 4, 7, 10]),  # of slow steps, a line every 30 seconds
        (range(57, 62), 200, 0.5, [57, 60]),  # a resumed run
    ],
)
def test_a_log_has_a_line_now_and_then(steps, of, step_s, said):
    on = console(False)
    run_steps(on, steps, of, step_s=step_s)
    text = on.file.getvalue()
    assert [int(step) for step in re.findall(r"^step +(\d+)/", text, re.MULTILINE)] == said
    assert "\x1b" not in text


@pytest.mark.parametrize("terminal", [True, False])
def test_a_loss_that_is_not_finite_is_shown_and_a_skipped_step_has_no_norm(terminal):
    changes = {"loss": math.nan, "grad_norm": math.inf, "eval_loss": -math.inf}
    odd = record(2, **changes, eval_metrics={"accuracy": 0.93})
    shown = []
    for second in (odd, skipped(2)):
        on = console(terminal)
        with reporting(on) as display:
            display.step(record(1))
            display.step(second)
        shown.append(screen(on))
    assert "step 2  eval loss -inf  accuracy 0.93" in shown[0]
    assert any("loss nan  lr 2.9e-03  norm inf" in line for line in shown[0])
    assert any("loss 2.4312  lr 2.9e-03" in line and "norm" not in line for line in shown[1])


def test_a_line_tells_loss_rate_norm_speed_and_time_left_and_rates_leave_out_the_warm_up():
    on = console(False, width=200)
    with reporting(on, 174) as display:
        for step, step_s in zip(range(41, 46), (60.0, 30.0, 31.0, 1.0, 3.0), strict=True):
            rate = {"tokens_per_s": 1.0} if step_s > 3 else {}
            display.step(record(step, step_s=step_s, metrics={"accuracy": 0.31}, **rate))
    first, *others, last = on.file.getvalue().splitlines()
    values = "loss 2.4312  accuracy 0.31  lr 2.9e-03  norm 0.81"
    assert first == f"step  41/174  {values}  warm-up, 60.00 s"
    assert not any("items/s" in line or "left" in line for line in others)
    assert last == f"step  45/174  {values}  left 0:04:18  12,300 items/s  2.00 s/step"


def test_dumb_terminal_gets_a_log_and_one_without_utf8_plain_characters():
    dumb = console(True, _environ={"TERM": "dumb"})
    ascii_file = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    latin = console(True, file=ascii_file)
    for on in (dumb, latin):
        with reporting(on) as display:
            for number in (1, 4):
                display.step(record(number, eval_loss=1.0, metrics={"é": 1.0}))
            display.note("café")
            finish(display)
    output = ascii_file.buffer.getvalue().decode("ascii")
    assert "step 1/4  loss 2.4312" in dumb.file.getvalue()
    assert "loss 2.4312  ? 1  lr 2.9e-03  norm 0.81\n" in strip(output)
    assert "caf?" in output
    assert UP not in dumb.file.getvalue()


# Steps on a terminal


@pytest.mark.parametrize(
    ("width", "absent"),
    [
        (140, []),
        (80, []),
        (50, ["s/step", "other", "optimizer", "bar"]),
        (40, ["s/step", "items/s", "norm", "other", "optimizer", "wait"]),
        (27, ["s/step", "items/s", "lr", "norm", "wait", "backward", "other", "optimizer", "bar"]),
    ],
)
def test_live_display_ends_with_one_frame_that_fits(width, absent):
    on = console(True, width=width)
    with reporting(on, 200) as display:
        for number in range(1, 151):
            display.step(record(number, loss=4 - number / 50, metrics={"accuracy": 0.31}))
    assert on.file.getvalue().count("loss") < 75  # it is not redrawn at every step
    lines = screen(on)
    assert len(lines) == 4
    assert max(map(cell_len, lines)) < width
    parts = ["left 0:00:25", "12,300 items/s", "0.50 s/step", "norm 0.81", "lr 2.9e-03"]
    parts += ["accuracy 0.31", "data 10%", "forward 20%", "backward 40%", "optimizer 10%"]
    parts += ["other 10%", "step 150/200", "loss 1.0000", "wait 10%"]
    bar = "\N{BOX DRAWINGS HEAVY HORIZONTAL}"
    missing = [part for part in [*parts, bar] if part not in "\n".join(lines)]
    assert len(missing) == len(absent)
    assert all(any(name in part for part in missing) for name in absent if name != "bar")
    assert (bar in missing) == ("bar" in absent)


@pytest.mark.parametrize("height", [5, 4, 3, 2, 1])
def test_live_display_of_a_low_terminal_leaves_no_repeated_lines(height):
    on = console(True, height=height)
    run_steps(on, range(1, 21), 20)
    assert on.file.getvalue().count("step ") > 1
    lines = [line for line in screen(on) if line]
    assert [line.split()[0] for line in lines] == ["step", "loss", "data"][: min(3, height)]
    assert "step 20/20" in lines[0]


def test_lines_stay_above_the_live_display():
    on = console(True)
    with reporting(on, 200) as display:
        display.step(record(1))
        display.step(record(2, eval_loss=2.31, eval_metrics={"accuracy": 0.93}))
        display.warn("rank 3 is slow")
        display.note("one\n  two")
        display.step(record(3))
    lines = screen(on)
    assert lines[:4] == [
        "step 2  eval loss 2.3100  accuracy 0.93",
        "warning: rank 3 is slow",
        "one",
        "  two",
    ]
    assert lines[5].startswith("step   3/200")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_exception_stops_the_live_display_and_passes_through(error):
    on = console(True)
    stdout, stderr = sys.stdout, sys.stderr

    def fail() -> None:
        with reporting(on) as display:
            display.step(record(1))
            on.print("live")
            assert on.file.getvalue().endswith(UP)
            raise error

    with pytest.raises(error):
        fail()
    assert on.file.getvalue().endswith("\n")
    assert (sys.stdout, sys.stderr) == (stdout, stderr)
    after = len(on.file.getvalue())
    on.print("next")
    assert on.file.getvalue()[after:] == "next\n"  # no display is drawn again below it


# Text from outside


@pytest.mark.parametrize("terminal", [True, False])
def test_markup_and_escape_sequences_are_shown_not_interpreted(terminal):
    on = console(terminal, width=200)
    with reporting(on, 2) as display:
        display.step(record(2, metrics={NASTY: 1.0}, eval_loss=1.0, eval_metrics={NASTY: 1.0}))
        display.warn(NASTY)
        display.note(NASTY)
        finish(display, eval_metrics={NASTY: 1.0}, run_dir=NASTY)
    # The line, evaluation, warning, news, statistics, directory.
    assert "\n".join(screen(on)).count(NASTY_SHOWN) == 6
    assert "\x1b[2J" not in on.file.getvalue()
    assert "\x1b]0" not in on.file.getvalue()


def test_warnings_go_to_stderr_and_a_long_line_of_a_log_is_not_cut(capsys):
    with Display(True, 4) as display:
        display.warn("careful, " * 20 + "please")
        display.note("x" * 200 + "\n\n  indented [b]y[/b]")
    out, err = capsys.readouterr()
    assert out == f"{'x' * 200}\n\n  indented [b]y[/b]\n"
    assert err.splitlines() == ["warning: " + "careful, " * 20 + "please"]


# The statistics at the end


def facts_of(lines: list[str]) -> dict[str, str]:
    """The name and the rest of each line of several columns."""
    rows = [re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in lines]
    return {row[0]: row[1] for row in rows if len(row) == 2}


def test_statistics_tell_result_memory_and_traffic_and_end_with_the_directory():
    changes = {"model_flops_per_s": 3.124e14, "utilisation": 0.4146, "computes_in": "bf16"}
    sent = {"node_messages": 1800, "node_bytes": 15 * 10**8}
    sent |= {"cross_messages": 21, "cross_bytes": 300}
    changes["compression"] = {"before_bytes": 3000, "sent_bytes": 750, "ratio": 4.0}
    changes |= {"run_dir": "runs/" + "long/" * 30, "skipped_steps": 3, "traffic": sent}
    lines = final_lines(summary(**changes), 4, "items")
    expected = {"steps": "4 of 4, 3 skipped", "final loss": "1.5000", "eval loss": "1.6000"}
    expected |= {"accuracy": "0.93", "wall time": "0:01:07"}
    expected["items/s"] = "12,345; in a step, without evaluation and saves, 13,456"
    expected |= {"samples/s": "11.9", "ranks": "1 rank, flat, MPICH"}
    expected["computing"] = "312 TFLOP/s of the model, 41% of the dense bf16 peak"
    facts = facts_of(lines)
    assert expected.items() <= facts.items()
    assert "memory of a rank" in facts
    assert facts["sent within nodes"] == "1,800 messages, 1.5 GB"
    assert "sent between nodes  21 messages, 300 bytes" in lines
    assert "communication 2.0 s, of which exposed 0.5 s" in lines
    said = "compression between nodes: 750 bytes sent in place of 3.0 kB, a ratio of 4"
    assert said in lines
    assert "weights compared 2 times, in 12.3 ms, 0.02% of the wall time" in lines
    assert "compression off: no message between nodes was compressed" in final_lines(summary())
    assert lines[-1] == "runs/" + "long/" * 30


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "stage 0, fp32"),
        (
            {"stage": 2, "partition": "parameter", "precision": "bf16"},
            "stage 2, by parameter, bf16",
        ),
        ({"wire_dtype": "bf16"}, "stage 0, fp32, gradients travel in bf16"),
        ({"stage": [0, 2]}, "stage 0 and 2, by element, fp32"),
        (
            {"compress": "int8", "gather_dtype": "fp16", "sync": "diloco"},
            "stage 0, fp32, parameters travel in fp16, compressed by int8, exchanges by diloco",
        ),
    ],
)
def test_statistics_tell_how_a_job_was_sharded_and_what_was_narrowed(changes, said):
    assert facts_of(final_lines(summary(**changes), 4, "items"))["sharding"] == said


def memory_rows(measured: list[Memory], *usage: Usage, **predicted) -> list[list[str]]:
    """The cells of the table of memory, without its head."""
    memory = memory_by_role(measured, usage, **predicted)
    lines = final_lines(summary(memory=memory), 4, "items")
    start = next(i for i, line in enumerate(lines) if line.startswith("memory of a rank"))
    return [re.split(r"\s{2,}", row) for row in lines[start + 1 : lines.index("", start)]]


def test_memory_has_least_most_the_rank_that_peaks_and_what_was_predicted_and_saved():
    measured = [Memory(0, 0, 0, 0, state=mb * 10**6) for mb in (300, 500, 400, 2048)]
    usage = [used(mb * 10**6) for mb in (310, 510, 410, 400)]
    spread, process = ["300.0 MB", "2.0 GB", "3"], ["process peak", "310.0 MB", "510.0 MB", "1"]
    unknown = [[name, *spread, "?"] for name in ("optimizer state", "total of these")]
    assert memory_rows(measured, *usage) == [*unknown, process]
    at_0 = [Memory(0, 0, 0, 0, state=8192 * 10**6)] * 4
    told = [*spread, "2.0 GB", "8.2 GB", "6.1 GB, 75%"]
    known = [[name, *told] for name in ("optimizer state", "total of these")]
    assert memory_rows(measured, *usage, predicted=measured, at_stage_0=at_0) == [*known, process]
    # Where a stage takes more than stage 0, nothing is saved; what only stage 0 has is shown.
    more = [Memory(0, 0, 3 * 10**6, 0, 0)]
    rows = memory_rows(more, used(0), predicted=more, at_stage_0=[Memory(0, 10**6, 0, 0, 0)])
    assert rows == [
        ["gradients", "0 bytes", "0 bytes", "0", "0 bytes", "1.0 MB", "1.0 MB, 100%"],
        ["working buckets", *["3.0 MB"] * 2, "0", "3.0 MB", "0 bytes", "-3.0 MB"],
        ["total of these", *["3.0 MB"] * 2, "0", "3.0 MB", "1.0 MB", "-2.0 MB"],
    ]
    every = [Memory(*(10**6 * n for n in range(1, 6)))]
    rows = memory_rows(every, used(10**9, 10**6, pinned_memory=1))
    names = ["parameters", "gradients", "working buckets", "master weights", "optimizer state"]
    names += ["total of these", "process peak", "device peak", "pinned host memory"]
    assert [row[0] for row in rows] == names


@pytest.mark.parametrize("loss", [math.nan, None])  # None: of a run that made no step
@pytest.mark.parametrize("status", ["interrupted", "failed"])
def test_statistics_of_a_run_that_did_not_complete(status, loss):
    changes = {"final_loss": loss, "eval_loss": None, "eval_metrics": None, "ranks": []}
    lines = finished(status=status, **changes)
    assert lines[1] == status
    assert facts_of(lines).get("final loss") == (None if loss is None else "nan")
    assert "eval loss" not in facts_of(lines)
    assert lines[-1] == "runs/a"
