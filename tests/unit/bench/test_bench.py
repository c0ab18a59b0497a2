"""`python -m mntrain bench`: its options, limits, checks, tables and files; and real jobs."""

import contextlib
import io
import json
import re
import subprocess
import sys
from itertools import pairwise, permutations
from pathlib import Path

import pytest
import torch
from launch import mpirun
from rich.console import Console

from mntrain.bench import limits
from mntrain.bench.bench_options import (
    ALGORITHMS,
    VERBS,
    BenchCommOptions,
    BenchOptions,
    parse,
    size_label,
)
from mntrain.bench.candidates import LibraryCandidate
from mntrain.bench.pattern import Pattern, holds, write
from mntrain.bench.plot import missing, plot
from mntrain.bench.printing import footer, header, short_time, show, speed
from mntrain.bench.results import BenchResults, SkippedCase, TimedCase, WrongCase
from mntrain.bench.run import files_problem
from mntrain.bench.timing import in_turns
from mntrain.comm.algorithms import selection
from mntrain.comm.link_speed import copy_speed, link_speed
from mntrain.comm.topology import Topology
from zero.collectives import SingleProcessCollectives

COMMAND = [sys.executable, "-m", "mntrain", "bench"]
MIB = 2**20
TERMINAL = {"force_terminal": True, "color_system": "truecolor"}


def refused(*argv):
    """What `parse` says on stderr of a command line that it refuses."""
    with contextlib.redirect_stderr(io.StringIO()) as err, pytest.raises(SystemExit) as exit_:
        parse(argv)
    assert exit_.value.code == 2
    return err.getvalue()


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], BenchOptions()),
        (
            ["--sizes", "1G", "64k", "1M", "1024K", "40"],
            BenchOptions(sizes=(40, 65536, MIB, 2**30)),
        ),
        (["--verbs", "broadcast", "all_reduce"], BenchOptions(verbs=("broadcast", "all_reduce"))),
        (["--algorithms", "naive", "naive"], BenchOptions(algorithms=("naive",))),
        (["--dtype", "bf16"], BenchOptions(dtype="bf16")),
        (["--repeats", "9", "--seconds", "1e2"], BenchOptions(repeats=9, seconds=100.0)),
        (
            ["--json", "a.json", "--plot", "b.PNG"],
            BenchOptions(json=Path("a.json"), plot=Path("b.PNG")),
        ),
        (["--json", "a.json", "--json", "none"], BenchOptions()),
        (["--device=cpu"], BenchOptions(device="cpu")),
        (["--comm.ranks-per-node", "2"], BenchOptions(comm=BenchCommOptions(ranks_per_node=2))),
    ],
)
def test_options_of_the_command_line(argv, expected):
    assert parse(argv) == expected


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            "--sizes 64K 4Q",
            "--sizes 64K 4Q: '4Q' must be a positive multiple of 8 bytes, such as 64K "
            "(sizes of the tensor in bytes, such as 64K or 1M)",
        ),
        (
            "--sizes 12",
            "--sizes 12: '12' must be a positive multiple of 8 bytes, such as 64K "
            "(sizes of the tensor in bytes, such as 64K or 1M)",
        ),
        ("--sizes", "--sizes: expected at least one argument"),
        (
            "--verbs gather",
            "--verbs gather: must be 'all_reduce', 'reduce_scatter', 'all_gather' or 'broadcast' "
            "(verbs to measure, of all_reduce, reduce_scatter, all_gather, broadcast)",
        ),
        (
            "--dtype fp8",
            "--dtype fp8: must be 'fp32', 'bf16', 'fp16' or 'fp64' (dtype of the tensor)",
        ),
        (
            "--repeats 0",
            "--repeats 0: must be greater than or equal to 1 (repetitions of each measurement)",
        ),
        ("--repeats 1 2", "2: no option takes it; see python -m mntrain bench --help"),
        (
            "--seconds nan",
            "--seconds nan: must be a finite number (time limit in seconds)",
        ),
        (
            "--comm.ranks-per-node 0",
            "--comm.ranks-per-node 0: must be greater than or equal to 1 or none "
            "(ranks per virtual node)",
        ),
        ("--plot a.pdf", "--plot a.pdf: must end in .png or none (PNG file for a plot)"),
        ("--size 1M", "--size: no such option; did you mean --sizes?"),
        (
            "--train.steps 5",
            "--train.steps: no such option; python -m mntrain bench --help lists all",
        ),
        ("1M", "1M: no option takes it; see python -m mntrain bench --help"),
    ],
)
def test_bad_options_are_refused_in_one_line(argv, message):
    assert refused(*argv.split()) == f"mntrain: {message}\n"


def test_help_is_printed_without_importing_torch_or_mpi():
    command = [sys.executable, "-X", "importtime", *COMMAND[1:], "--help"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.startswith("usage: python -m mntrain bench")
    for name in ("sizes", "verbs", "algorithms", "json", "plot", "comm.ranks-per-node"):
        assert f"--{name} " in result.stdout
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "mntrain.bench.bench_options" in imported
    assert not imported & {"torch", "mpi4py", "matplotlib"}


def test_help_of_training_mentions_the_command():
    command = [sys.executable, "-m", "mntrain", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "python -m mntrain bench\n" in result.stdout


def test_every_algorithm_there_is_can_be_measured():
    assert set(ALGORITHMS) == set(selection.ALGORITHMS)


@pytest.mark.parametrize("nbytes", [8, 1000, 1024, 1536, 3 * 2**10, MIB, 5 * 2**30])
def test_a_size_reads_as_it_is_typed(nbytes):
    assert parse(["--sizes", size_label(nbytes)]).sizes == (nbytes,)


def test_sizes_are_labelled_with_the_largest_unit_that_divides_them():
    assert [size_label(n) for n in (1000, 1536, 65536, 3 * MIB)] == ["1000", "1536", "64K", "3M"]


def test_every_candidate_goes_once_a_turn_and_after_every_other_one_in_some():
    turns = [in_turns(4, turn) for turn in range(40)]
    assert all(sorted(turn) == [0, 1, 2, 3] for turn in turns)
    assert turns == [in_turns(4, turn) for turn in range(40)]  # on every rank
    assert {pair for turn in turns for pair in pairwise(turn)} == set(permutations(range(4), 2))


@pytest.mark.parametrize(
    ("verb", "ranks", "expected"),
    [
        ("all_reduce", (2, 2), 1.0),
        ("all_reduce", (1, 1, 1, 1), 1.5),
        ("all_reduce", (3, 1), 1.0),
        ("reduce_scatter", (2, 2), 0.5),
        ("reduce_scatter", (3, 1), 0.75),  # what the rank alone has of the others' shards
        ("all_gather", (1, 1, 1, 1), 0.75),
        ("all_gather", (2, 1, 3), 5 / 6),  # what the rank alone lacks
        ("broadcast", (1, 1, 1, 1), 1.0),
        ("broadcast", (2,), 0.0),
        ("all_reduce", (2,), 0.0),
        ("all_gather", (2,), 0.0),
    ],
)
def test_what_must_cross_the_link_of_some_node(verb, ranks, expected):
    assert limits.crossing_at_least(verb, ranks) == pytest.approx(expected)


def test_the_limit_says_what_it_is_where_nodes_are_unequal():
    equal, unequal = (
        limits.HardwareLimits(ranks, 100e6, {}).meaning for ranks in ((2, 2), (2, 1, 3))
    )
    assert equal.endswith("reduce_scatter and all_gather (M-1)/M S")
    assert "M = 3 nodes" in unequal
    assert "reduce_scatter and all_gather 5/6 S" in unequal


def test_the_limit_is_the_link_between_nodes_and_a_copy_within_one():
    link = limits.HardwareLimits(ranks=(1, 1, 1, 1), link=100e6, copy={MIB: 1e9})
    assert link.seconds("all_reduce", 10_000_000) == pytest.approx(0.15)
    assert link.seconds("broadcast", 10_000_000) == pytest.approx(0.1)
    memory = limits.HardwareLimits(ranks=(2,), link=None, copy={MIB: 1e9, 2 * MIB: 2e9})
    for verb in VERBS:
        assert memory.seconds(verb, 2 * MIB) == pytest.approx(2 * MIB / 2e9)


@pytest.mark.parametrize(
    ("once_s", "allowed_s", "expected"),
    [
        (1.0, 100.0, 5),  # as asked for
        (1.0, 3.5, 3),  # as there is time for
        (1.0, 0.1, 1),
        (1.0, -1.0, 1),
        (0.01, 100.0, 10),  # short: more often, for a tenth of a second
        (1e-5, 100.0, 100),  # but not more than twenty times as often
        (0.01, 0.07, 7),
    ],
)
def test_repeats(once_s, allowed_s, expected):
    assert limits.repeats(once_s, allowed_s, wanted=5) == expected


@pytest.mark.parametrize(
    ("once_s", "nbytes", "larger", "expected"),
    [
        (0.5, 4096, 10**6, 0.5),  # latency, which does not grow
        (0.02, 2 * 10**6, 8 * 10**6, 0.08),  # in proportion
        (0.5, 2 * 10**6, 8 * 10**6, 0.5 + 2 * 0.06),  # at half the speed of the link
    ],
)
def test_predictions(once_s, nbytes, larger, expected):
    hardware = limits.HardwareLimits(ranks=(2, 2), link=100e6, copy={})
    assert limits.predicted(hardware, "all_reduce", once_s, nbytes, larger) == pytest.approx(
        expected
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 16, 90])
def test_every_partial_sum_of_the_pattern_is_exact(size, dtype):
    patterns = [Pattern(rank, size, dtype, torch.device("cpu")) for rank in range(size)]
    total = torch.zeros_like(patterns[0].mine)
    for pattern in patterns:
        total += pattern.mine  # rounds to dtype
    backwards = torch.zeros_like(total)
    for pattern in reversed(patterns):
        backwards += pattern.mine
    for pattern in patterns:
        assert torch.equal(total, pattern.total)
        assert torch.equal(backwards, pattern.total)


def test_a_missing_rank_and_data_in_the_wrong_place_are_seen():
    size = 4
    patterns = [Pattern(r, size, torch.float32, torch.device("cpu")) for r in range(size)]
    numel = 1_000_003  # more than a tile, and no multiple of it
    total = torch.empty(numel)
    write(total, patterns[0].total)
    assert holds(total, patterns[0].total)
    for pattern in patterns:
        assert (pattern.total - pattern.mine)[:100].ne(pattern.total[:100]).any()
    for shift in (1, 2, 1024, 2**18):
        assert not holds(total.roll(shift), patterns[0].total)
    total[-1] += 1
    assert not holds(total, patterns[0].total)


@pytest.mark.parametrize(("at", "length"), [(0, 10), (7, 300_000), (225_279, 2), (400_000, 0)])
def test_a_part_of_the_pattern_is_that_part_of_the_whole(at, length):
    pattern = Pattern(1, 3, torch.float32, torch.device("cpu"))
    whole = torch.empty(800_000)
    write(whole, pattern.total)
    part = torch.empty(length)
    write(part, pattern.total, at)
    assert torch.equal(part, whole[at : at + length])
    assert holds(part, pattern.total, at)


def test_the_probe_of_memory_copies_so_many_bytes_a_second():
    assert 1e6 < copy_speed(MIB, 0.01) < 1e13


def test_a_single_node_has_no_link_to_probe():
    comm, alone = None, Topology(((0, 1),))
    with pytest.raises(ValueError, match="2 ranks on 1 node of 2: a single node has no link"):
        link_speed(comm, alone, 1.0)


@pytest.mark.parametrize("verb", VERBS)
def test_a_result_with_one_wrong_element_is_no_result(verb):
    tensor = torch.empty(1000)
    pattern = Pattern(0, 1, torch.float32, torch.device("cpu"))
    candidate = LibraryCandidate("alone", verb, SingleProcessCollectives(), tensor, pattern)
    candidate.prepare()
    candidate.run()
    assert candidate.right()
    tensor[777] += 1
    assert not candidate.right()


def results(**changes):
    """Results of one verb at two sizes: one algorithm wrong, one left out, at the larger."""
    small, large = 65536, 16 * MIB
    common = {"dtype": "fp32", "times_s": (0.002, 0.001, 0.004)}
    given = {
        "facts": {
            "topology": "4 ranks on 2 nodes of 2",
            "library": "MPICH 5.0.2",
            "versions": {"mntrain": "1.2.3", "torch": "2.13.0"},
            "date": "2026-01-02T03:04:05+00:00",
            "dtype": "fp32",
        },
        "limits": limits.HardwareLimits(ranks=(2, 2), link=118e6, copy={large: 9.5e9}),
        "timed": (
            TimedCase("all_reduce", "lanes", small, limit_s=0.0005, **common),
            TimedCase("all_reduce", "lanes", large, limit_s=0.0018, **common),
            TimedCase("all_reduce", "flat", small, "fp32", 0.0005, (0.1,)),
        ),
        "skipped": (SkippedCase("all_reduce", "flat", large, predicted_s=2.0, allowed_s=1.0),),
        "wrong": (WrongCase("all_reduce", "leader", large, ranks=(1, 3)),),
    }
    return BenchResults(**(given | changes))


def shown(width, **changes):
    """What `show` prints to a terminal of this width, without styles, and with them."""
    console = Console(file=io.StringIO(), width=width, record=True, **TERMINAL)
    show(results(**changes), console)
    return console.export_text(clear=False), console.export_text(styles=True)


def test_tables_show_the_median_and_the_share_and_the_best_in_bold():
    text, styled = shown(80)
    rows = [line.split() for line in text.splitlines()]
    assert ["all_reduce", "64K", "16M"] in rows
    assert ["lanes", "2", "ms", "(25%)", "2", "ms", "(90%)"] in rows
    assert ["flat", "0.10", "s", "(0.5%)", "-"] in rows
    assert ["leader", "-", "wrong"] in rows
    assert re.findall(r"\x1b\[1m *([^\x1b]*)", styled) == ["2 ms (25%)", "2 ms (90%)"]


def test_sizes_that_do_not_fit_go_into_another_table():
    text, _ = shown(30)
    heads = [line.split() for line in text.splitlines() if line.split()[:1] == ["all_reduce"]]
    assert heads[:2] == [["all_reduce", "64K"], ["all_reduce", "16M"]]
    assert "…" not in text


def test_the_header_says_what_was_measured_where():
    text = "\n".join(header(results()))
    for fact in ("4 ranks on 2 nodes of 2, MPICH 5.0.2", "mntrain 1.2.3, torch 2.13.0", "2026"):
        assert fact in text
    assert "link 118 MB/s each way, memcpy 9.5 GB/s a rank" in text
    assert "all_reduce 2(M-1)/M S" in text
    alone = results(limits=limits.HardwareLimits(ranks=(2,), link=None, copy={MIB: 9.5e9}))
    assert "link" not in "\n".join(header(alone))
    assert "memory" in "\n".join(header(alone))


def test_the_footer_says_what_is_wrong_and_what_was_left_out():
    assert footer(results())[1:] == [
        "all_reduce 16M by leader: a wrong result on rank 1, 3",
        "-: left out, since it would have taken too long; give more --seconds",
    ]
    assert footer(results(wrong=(), skipped=())) == []


def test_times_and_speeds_have_three_digits():
    times = [short_time(s) for s in (4.56e-6, 21.34e-6, 0.99949e-3, 0.99951e-3, 12.345e-3, 1.234)]
    assert times == ["4.56 us", "21.3 us", "999 us", "1 ms", "12.3 ms", "1.23 s"]
    assert [speed(s) for s in (118.4e6, 999.6e6, 12.54e9)] == ["118 MB/s", "1 GB/s", "12.5 GB/s"]


def test_files_are_refused_before_the_work(tmp_path):
    assert (
        files_problem(BenchOptions()) == files_problem(BenchOptions(json=tmp_path / "a.json")) == ""
    )
    lost = tmp_path / "none" / "a.json"
    told = f"--json {lost}: there is no folder {lost.parent}; make it first"
    assert files_problem(BenchOptions(json=lost)) == told
    taken = tmp_path / "a.png"
    taken.mkdir()
    told = f"--plot {taken}: is a folder; name a file in it"
    assert files_problem(BenchOptions(plot=taken)) == told


def test_a_picture_without_matplotlib_is_refused_with_the_fix(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert files_problem(BenchOptions(plot=tmp_path / "a.png")) == (
        f"--plot {tmp_path / 'a.png'}: a picture needs matplotlib, which is not installed: "
        "pip install 'mntrain[plot]'"
    )


def test_the_picture_is_a_png_on_transparent_paper(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    plot(results(), tmp_path / "a.png")
    pixels = image.imread(tmp_path / "a.png")
    assert pixels.shape[2] == 4
    assert (pixels[0, :, 3] == 0).all()
    assert pixels[:, :, 3].any()


def bench(ranks, folder, *words):
    """Run the command, and return the launch and what it wrote as JSON."""
    words = ["--device", "cpu", "--json", folder / "bench.json", *words]
    result = mpirun(ranks, [*COMMAND, *words], timeout=60, cwd=folder)
    assert result.returncode == 0, result.report()
    return result, json.loads((folder / "bench.json").read_text())


def test_a_file_that_cannot_be_is_told_by_one_rank():
    words = ["--device", "cpu", "--json", "/no/such/folder/a.json"]
    result = mpirun(2, [*COMMAND, *words], timeout=60, per_rank=True)
    assert result.returncode != 0, result.report()
    message = "--json /no/such/folder/a.json: there is no folder /no/such/folder; make it first"
    assert result.outputs == [f"mntrain: error: {message}\n", ""], result.report()


def test_a_job_measures_every_verb_by_every_algorithm(tmp_path):
    picture = ["--plot", "bench.png"] if not missing() else []
    sizes = ["--sizes", "24", "8K"]  # 24 bytes: shards of 3 and 3 elements; naive too
    result, found = bench(
        2, tmp_path, *sizes, "--algorithms", *ALGORITHMS, "--repeats", "1", *picture
    )
    cases = {(case["verb"], case["algorithm"], case["size_bytes"]) for case in found["results"]}
    native = ["MPI_Allreduce", "MPI_Reduce_scatter", "MPI_Allgather", "MPI_Bcast"]
    assert cases == {
        (verb, algorithm, size)
        for verb, mpi in zip(VERBS, native, strict=True)
        for algorithm in (*ALGORITHMS, mpi)
        for size in (24, 8192)
    }
    assert found["skipped"] == found["wrong"] == []
    for case in found["results"]:
        assert min(case["times_s"]) <= case["median_s"] <= max(case["times_s"])
        assert case["bandwidth_bytes_per_s"] == pytest.approx(case["size_bytes"] / case["median_s"])
        assert case["share_of_limit"] == pytest.approx(case["limit_s"] / case["median_s"])
    assert found["link_bytes_per_s"] is None
    assert [copy["size_bytes"] for copy in found["copy"]] == [24, 8192]
    assert found["topology"] == "2 ranks on 1 node of 2"
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    assert result.stdout.count("2 ranks on 1 node of 2") == 1  # one rank speaks
    assert result.stdout.count("MPI_Bcast") == 1
    assert result.stderr.count("mntrain: all_reduce 8K: lanes ") == 1
    if picture:
        assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_a_job_between_nodes_is_held_against_the_link_and_leaves_out_what_takes_too_long(tmp_path):
    words = ["--comm.ranks-per-node", "1", "--dtype", "bf16", "--verbs", "reduce_scatter"]
    result, found = bench(2, tmp_path, *words, "--sizes", "4K", "1M", "--seconds", "0.01")
    assert found["virtual_ranks_per_node"] == 1
    link = found["link_bytes_per_s"]
    assert 1e6 < link < 1e12
    names = [*BenchOptions().algorithms, "MPI_Reduce_scatter"]
    assert [(case["algorithm"], case["size_bytes"]) for case in found["results"]] == [
        (name, 4096) for name in names
    ]
    for case in found["results"]:
        assert case["limit_s"] == pytest.approx(0.5 * 4096 / link)
    assert [case["dtype"] for case in found["results"]] == ["bf16", "bf16", "bf16", "fp32"]
    assert [(case["algorithm"], case["size_bytes"]) for case in found["skipped"]] == [
        (name, MIB) for name in names
    ]
    assert "left out, since it would have taken too long; give more --seconds" in result.stdout
