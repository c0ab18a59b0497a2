"""`python -m mntrain bench`: its options, limits, checks, tables and files; and real jobs."""

import io
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from launch import mpirun
from rich.console import Console

from mntrain.__main__ import main
from mntrain.bench.bench_options import (
    ALGORITHMS,
    VERBS,
    BenchCommOptions,
    BenchOptions,
    parse,
    size_label,
)
from mntrain.bench.candidates import (
    Pattern,
    fill,
    library_candidate,
    matches,
)
from mntrain.bench.hardware_limits import HardwareLimits, minimum_traffic
from mntrain.bench.results import BenchCase, advice, show
from mntrain.bench.run import file_problem
from zero.collectives import SingleProcessCollectives

COMMAND = [sys.executable, "-m", "mntrain", "bench"]
MIB = 2**20
TERMINAL = {"force_terminal": True, "color_system": "truecolor"}


def test_options_of_the_command_line():
    words = "--sizes 1G 64k 1M 1024K 40 --verbs broadcast all_reduce --algorithms naive naive"
    words += " --seconds 1e2 --json a.json --comm.ranks-per-node 2"
    assert parse(words.split()) == BenchOptions(
        sizes=(40, 65536, MIB, 2**30),
        verbs=("broadcast", "all_reduce"),
        algorithms=("naive",),
        seconds=100.0,
        json=Path("a.json"),
        comm=BenchCommOptions(ranks_per_node=2),
    )
    assert parse([]) == parse(["--json", "a.json", "--json", "none"]) == BenchOptions()
    for nbytes in (8, 1000, 1024, 1536, 3 * 2**10, MIB, 5 * 2**30):
        assert parse(["--sizes", size_label(nbytes)]).sizes == (nbytes,)


def test_bad_sizes_are_refused_in_one_line(capsys):
    for sizes, bad in (("64K 4Q", "4Q"), ("12", "12")):
        with pytest.raises(SystemExit) as exit_:
            parse(["--sizes", *sizes.split()])
        assert exit_.value.code == 2
        message = f"--sizes: must be a positive multiple of 8 bytes, such as 64K, not '{bad}'"
        assert capsys.readouterr().err == f"mntrain: {message}\n"


@pytest.mark.parametrize(
    ("verb", "ranks", "expected"),
    [
        ("all_reduce", (2, 2), 1.0),
        ("all_reduce", (1, 1, 1, 1), 1.5),
        ("all_reduce", (3, 1), 1.0),
        ("reduce_scatter", (2, 2), 0.5),
        ("reduce_scatter", (3, 1), 0.75),  # all shards but that of the node of one rank
        ("all_gather", (1, 1, 1, 1), 0.75),
        ("all_gather", (2, 1, 3), 5 / 6),  # the same
        ("broadcast", (1, 1, 1, 1), 1.0),
        ("broadcast", (2,), 0.0),
        ("all_reduce", (2,), 0.0),
        ("all_gather", (2,), 0.0),
    ],
)
def test_the_minimum_traffic_of_a_collective(verb, ranks, expected):
    assert minimum_traffic(verb, ranks) == pytest.approx(expected)


def test_the_limit_is_the_link_between_nodes_and_a_copy_within_one():
    link = HardwareLimits(ranks=(1, 1, 1, 1), link=100e6, copy={MIB: 1e9})
    assert link.seconds("all_reduce", 10_000_000) == pytest.approx(0.15)
    assert link.seconds("broadcast", 10_000_000) == pytest.approx(0.1)
    memory = HardwareLimits(ranks=(2,), link=None, copy={MIB: 1e9, 2 * MIB: 2e9})
    for verb in VERBS:
        assert memory.seconds(verb, 2 * MIB) == pytest.approx(2 * MIB / 2e9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_partial_sum_of_the_pattern_is_exact(dtype):
    for size in (1, 2, 3, 4, 5, 24):
        patterns = [Pattern(rank, size, dtype, torch.device("cpu")) for rank in range(size)]
        for order in (patterns, patterns[::-1]):
            total = torch.zeros_like(patterns[0].contribution)
            for pattern in order:
                total += pattern.contribution  # rounds to dtype
            assert all(torch.equal(total, pattern.total) for pattern in patterns)


def test_a_missing_rank_and_misplaced_data_are_detected():
    size = 4
    patterns = [Pattern(r, size, torch.float32, torch.device("cpu")) for r in range(size)]
    numel = 1_000_003  # more than a tile, and no multiple of it
    total = torch.empty(numel)
    fill((total, 0), patterns[0].total)
    assert matches((total, 0), patterns[0].total)
    for pattern in patterns:
        assert (pattern.total - pattern.contribution)[:100].ne(pattern.total[:100]).any()
    for shift in (1, 2, 1024, 2**18):
        assert not matches((total.roll(shift), 0), patterns[0].total)
    for at, length in [(0, 10), (7, 300_000), (225_279, 2), (400_000, 0)]:
        part = torch.empty(length)
        fill((part, at), patterns[0].total)
        assert torch.equal(part, total[at : at + length])
        assert matches((part, at), patterns[0].total)
    total[-1] += 1
    assert not matches((total, 0), patterns[0].total)


def test_one_wrong_element_is_detected():
    tensor = torch.empty(1000)
    pattern = Pattern(0, 1, torch.float32, torch.device("cpu"))
    for verb in VERBS:
        candidate = library_candidate("alone", verb, SingleProcessCollectives(), tensor, pattern)
        candidate.prepare()
        candidate.run()
        assert candidate.is_correct()
        tensor[777] += 1
        assert not candidate.is_correct()


FACTS = {
    "topology": "4 ranks on 2 nodes of 2",
    "library": "MPICH 5.0.2",
    "versions": {"mntrain": "1.2.3", "torch": "2.13.0"},
    "date": "2026-01-02T03:04:05+00:00",
    "dtype": "fp32",
    "link_bytes_per_s": 118e6,
    "copy": [{"size_bytes": 16 * MIB, "bytes_per_s": 9.5e9}],
    "limit": "so many bytes",
    "advice": "",
}
TIMES = (0.002, 0.001, 0.004)
CASES = [  # at the larger size, one algorithm is skipped and one is wrong
    BenchCase("all_reduce", "lanes", 65536, "fp32", 0.0005, TIMES),
    BenchCase("all_reduce", "flat", 65536, "fp32", 0.0005, (0.1,)),
    BenchCase("all_reduce", "leader", 65536, "fp32", 0.0005),
    BenchCase("all_reduce", "lanes", 16 * MIB, "fp32", 0.0018, TIMES),
    BenchCase("all_reduce", "flat", 16 * MIB, "fp32", 0.0018),
    BenchCase("all_reduce", "leader", 16 * MIB, "fp32", 0.0018, TIMES, wrong_ranks=(1, 3)),
]


def shown(facts=FACTS, cases=CASES):
    """Return what `show` prints on a terminal, without and with styles."""
    console = Console(file=io.StringIO(), width=80, record=True, **TERMINAL)
    show(facts, cases, console)
    return console.export_text(clear=False), console.export_text(styles=True)


def test_tables_show_median_and_percentage_with_the_best_in_bold_between_facts_and_notes():
    text, styled = shown()
    rows = [line.split() for line in text.splitlines()]
    assert ["all_reduce", "lanes", "flat", "leader"] in rows
    assert ["64K", "2", "ms", "(25.0%)", "0.10", "s", "(0.5%)", "-"] in rows
    assert ["16M", "2", "ms", "(90.0%)", "-", "wrong"] in rows
    assert re.findall(r"\x1b\[1m *([^\x1b]*)", styled) == ["2 ms (25.0%)", "2 ms (90.0%)"]
    for fact in ("4 ranks on 2 nodes of 2, MPICH 5.0.2", "mntrain 1.2.3, torch 2.13.0", "2026"):
        assert fact in text
    assert "link 0.118 GB/s each way, memcpy 9.5 GB/s a rank" in text
    assert "limit: so many bytes" in text
    assert text.splitlines()[-2:] == [
        "all_reduce 16M by leader: a wrong result on rank 1, 3",
        "-: left out 64K, 16M for lack of time; give more --seconds",
    ]
    alone, _ = shown(FACTS | {"link_bytes_per_s": None}, CASES[:2])
    assert not any(words in alone for words in ("link", "rank 1", "left out"))


def measured(algorithm, seconds, nbytes=16 * MIB, verb="all_reduce", dtype="fp32"):
    limit_s = nbytes / FACTS["link_bytes_per_s"]
    return BenchCase(verb, algorithm, nbytes, dtype, limit_s, (seconds,))


def test_the_advice_names_the_fastest_algorithms_and_the_cost_of_a_step():
    rivals = [measured("lanes", 0.16777216), measured("leader", 0.17), measured("flat", 0.3)]
    rivals.append(measured("flat", 0.001, verb="broadcast"))
    assert advice(FACTS, [measured("flat", 1e-5, 65536), *rivals]) == (
        "At 16M, lanes and leader are the fastest algorithms of all_reduce measured here: "
        "--comm.algorithm lanes, the default. Per step, the gradients of 100 million fp32 "
        "parameters (400 MB) take about 4.00 s by lanes, part of which is hidden behind backward; "
        "--comm.wire-dtype bf16 sends half the bytes between nodes, and takes "
        "about 2.00 s, and --comm.compress int8 1.00 s; where a step computes for less than that, "
        "--sync.mode sparseloco --sync.every 20 exchanges parameters rarely instead."
    )
    assert advice(FACTS, rivals[2:]).startswith("Per step, the gradients of 100 million")
    rivals[0] = measured("lanes", 0.2)
    assert advice(FACTS, rivals).startswith(
        "At 16M, leader is the fastest algorithm of all_reduce measured here: --comm.algorithm "
        "leader. Per step,"
    )


@pytest.mark.parametrize(
    ("facts", "dtype"),
    [
        ({"link_bytes_per_s": None}, "fp32"),
        ({"copy": [{"size_bytes": 16 * MIB, "bytes_per_s": 200e6}]}, "fp32"),
        ({}, "bf16"),
    ],
)
def test_gradients_are_to_be_rounded_only_if_the_link_is_the_bottleneck(facts, dtype):
    assert "bf16" not in advice(FACTS | facts, [measured("lanes", 0.2, dtype=dtype)])
    # Nor is there any advice without evidence.
    wrong = BenchCase("all_reduce", "lanes", 16 * MIB, dtype, 0.1, TIMES, wrong_ranks=(1,))
    skipped = BenchCase("all_reduce", "lanes", 16 * MIB, dtype, 0.1)
    small, other = measured("lanes", 1e-3, 65536), measured("lanes", 1, verb="broadcast")
    assert advice(FACTS | facts, [wrong, skipped, small, other]) == ""


def bench(ranks, folder, *words):
    """Run the command, and return the launch and what it wrote as JSON."""
    words = ["--device", "cpu", "--json", folder / "bench.json", *words]
    result = mpirun(ranks, [*COMMAND, *words], timeout=250, cwd=folder)
    assert result.returncode == 0, result.report()
    return result, json.loads((folder / "bench.json").read_text())


def test_an_unwritable_file_is_refused_before_the_measurement(tmp_path, capsys):
    said = "must be a file in a directory that exists"
    assert file_problem(None) == file_problem(tmp_path / "a.json") == ""
    assert file_problem(tmp_path) == f"--json {tmp_path}: {said}"
    assert main(["bench", "--device", "cpu", "--json", "/no/a.json"]) == 2
    assert capsys.readouterr() == ("", f"mntrain: error: --json /no/a.json: {said}\n")


@pytest.mark.thorough
def test_a_job_measures_every_collective_by_every_algorithm(tmp_path):
    sizes = ["--sizes", "24", "8K"]  # 24 bytes: shards of 3 and 3 elements; naive too
    result, found = bench(2, tmp_path, *sizes, "--algorithms", *ALGORITHMS, "--repeats", "1")
    cases = {(case["verb"], case["algorithm"], case["size_bytes"]) for case in found["results"]}
    assert cases == {
        (verb, algorithm, size) for verb in VERBS for algorithm in ALGORITHMS for size in (24, 8192)
    }
    assert found["skipped"] == found["wrong"] == []
    for case in found["results"]:
        assert min(case["times_s"]) <= case["median_s"] <= max(case["times_s"])
        assert case["bandwidth_bytes_per_s"] == pytest.approx(case["size_bytes"] / case["median_s"])
        share = case["limit_s"] / case["median_s"]
        assert case["share_of_limit"] == (pytest.approx(share) if share <= 1 else None)
    assert found["link_bytes_per_s"] is None
    assert [copy["size_bytes"] for copy in found["copy"]] == [24, 8192]
    assert found["topology"] == "2 ranks on 1 node of 2"
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    assert result.stdout.count("2 ranks on 1 node of 2") == 1  # one rank prints
    assert result.stdout.count("broadcast") == 1
    assert result.stderr.count("mntrain: measured all_reduce 8K\n") == 1
