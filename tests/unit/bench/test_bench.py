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
from mntrain.bench.candidates import Pattern, library_candidate
from mntrain.bench.hardware_limits import minimum_traffic
from mntrain.bench.results import BenchCase, show
from mntrain.bench.run import file_problem
from zero.collectives import SingleProcessCollectives

COMMAND = [sys.executable, "-m", "mntrain", "bench"]
MIB = 2**20
TERMINAL = {"force_terminal": True, "color_system": "truecolor"}


def test_options_of_the_command_line():
    words = "--sizes 1G 64k 1M 1024K 40 --algorithms naive naive"
    words += " --seconds 1e2 --json a.json --comm.ranks-per-node 2"
    assert parse(words.split()) == BenchOptions(
        sizes=(40, 65536, MIB, 2**30),
        algorithms=("naive",),
        seconds=100.0,
        json=Path("a.json"),
        comm=BenchCommOptions(ranks_per_node=2),
    )
    assert parse([]) == parse(["--json", "a.json", "--json", "none"]) == BenchOptions()
    for nbytes in (8, 1000, 1024, 1536, 3 * 2**10, MIB, 5 * 2**30):
        assert parse(["--sizes", size_label(nbytes)]).sizes == (nbytes,)


def test_bad_sizes_are_refused_in_one_line(capsys):
    few = "must be a positive multiple of 4 bytes, such as 64K"
    much = "must be less than 8G"
    for sizes, bad, rule in (("64K 4Q", "4Q", few), ("10", "10", few), ("64K 8G", "8G", much)):
        with pytest.raises(SystemExit) as exit_:
            parse(["--sizes", *sizes.split()])
        assert exit_.value.code == 2
        message = f"--sizes: {rule}, not '{bad}'"
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


def test_every_partial_sum_of_the_pattern_is_exact_and_data_in_a_wrong_place_differs():
    like = torch.empty(1000, dtype=torch.bfloat16)
    for size in (1, 2, 3, 4, 5, 24):
        patterns = [Pattern(rank, size, like) for rank in range(size)]
        for order in (patterns, patterns[::-1]):
            total = torch.zeros_like(like)
            for pattern in order:
                total += pattern.contribution  # rounds to the dtype
            assert all(torch.equal(total, pattern.total) for pattern in patterns)
        for pattern in patterns[: size if size > 1 else 0]:
            assert pattern.contribution[:100].ne(0).any()  # of a missing rank
    for shift in (1, 2, 64, 256):
        assert not torch.equal(total.roll(shift), total)


def test_one_wrong_element_is_detected():
    tensor = torch.empty(1000)
    pattern = Pattern(0, 1, tensor)
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
    "link_bytes_per_s": 118e6,
    "limit": "so many bytes",
}
TIMES = (0.002, 0.001, 0.004)
CASES = [  # at the larger size, one algorithm is wrong
    BenchCase("all_reduce", "lanes", 65536, 0.0005, TIMES),
    BenchCase("all_reduce", "flat", 65536, 0.0005, (0.1,)),
    BenchCase("all_reduce", "lanes", 16 * MIB, 0.0018, TIMES),
    BenchCase("all_reduce", "flat", 16 * MIB, 0.0018, TIMES, wrong_ranks=(1, 3)),
]


def shown(facts=FACTS, cases=CASES):
    """Return what `show` prints on a terminal, without and with styles."""
    console = Console(file=io.StringIO(), width=80, record=True, **TERMINAL)
    show(facts, cases, console)
    return console.export_text(clear=False), console.export_text(styles=True)


def test_tables_show_median_and_percentage_with_the_best_in_bold():
    text, styled = shown()
    rows = [line.split() for line in text.splitlines()]
    assert ["all_reduce", "lanes", "flat"] in rows
    assert ["64K", "2", "ms", "(25.0%)", "0.10", "s", "(0.5%)"] in rows
    assert ["16M", "2", "ms", "(90.0%)", "wrong"] in rows
    assert re.findall(r"\x1b\[1m *([^\x1b]*)", styled) == ["2 ms (25.0%)", "2 ms (90.0%)"]
    for fact in ("4 ranks on 2 nodes of 2, MPICH 5.0.2", "mntrain 1.2.3, torch 2.13.0", "2026"):
        assert fact in text
    assert "link 0.118 GB/s each way" in text
    assert "limit: so many bytes" in text
    assert text.splitlines()[-1] == "all_reduce 16M by flat: a wrong result on rank 1, 3"
    alone, _ = shown(
        FACTS | {"link_bytes_per_s": None}, [BenchCase("all_reduce", "lanes", 65536, None, TIMES)]
    )
    assert not any(words in alone for words in ("link", "limit", "%", "rank 1"))


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
    sizes = ["--sizes", "20", "8K"]  # 20 bytes: shards of 3 and 2 elements; naive too
    result, found = bench(2, tmp_path, *sizes, "--algorithms", *ALGORITHMS)
    cases = {(case["verb"], case["algorithm"], case["size_bytes"]) for case in found["results"]}
    assert cases == {
        (verb, algorithm, size) for verb in VERBS for algorithm in ALGORITHMS for size in (20, 8192)
    }
    assert found["wrong"] == []
    for case in found["results"]:
        assert min(case["times_s"]) <= case["median_s"] <= max(case["times_s"])
        assert case["bandwidth_bytes_per_s"] == pytest.approx(case["size_bytes"] / case["median_s"])
        assert case["share_of_limit"] is case["limit_s"] is None
    assert found["link_bytes_per_s"] is None
    assert found["topology"] == "2 ranks on 1 node of 2"
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    assert result.stdout.count("2 ranks on 1 node of 2") == 1  # one rank prints
    assert result.stdout.count("broadcast") == 1
    assert result.stderr.count("mntrain: measured all_reduce 8K\n") == 1
