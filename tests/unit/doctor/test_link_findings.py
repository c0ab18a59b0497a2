"""The judgement of measured links."""

import pytest

from mntrain.comm.links import LinkSpeed
from mntrain.doctor.doctor_options import mb_per_s, parse
from mntrain.doctor.link_findings import judge, slowest_node
from mntrain.options.command_line import RefusedOptionsError

HOSTS = ["n1", "n1", "n2", "n3"]
GBIT = "1gbit", 125.0


def links(*speeds):
    """Links of three nodes; a speed is one for both directions, or (there, back)."""
    pairs = [(0, 2), (0, 3), (2, 3)]
    both = [speed if isinstance(speed, tuple) else (speed, speed) for speed in speeds]
    return [LinkSpeed(*pair, 50.0, *speed) for pair, speed in zip(pairs, both, strict=False)]


SLOW_NODE = links(1000.0, 90.0, 100.0)
ONE_WAY = links((118.0, 1.2), 118.0, 118.0)
BACK, THERE = links((118.0, 1.2)), links((1.2, 118.0))


@pytest.mark.parametrize(
    ("measured", "words", "fix"),
    [
        (
            SLOW_NODE,
            [
                "slowest of 6 directions is from n1 to n3: 50 us, 90 MB/s",
                "the slowest node is n3, by what it receives and sends",
                "the fastest is from n1 to n2: 50 us, 1000 MB/s",
            ],
            "srun --exclude=n3",
        ),
        (  # it only sends slowly
            links((118.0, 1.2), 118.0, (1.3, 118.0)),
            ["from n2 to n1: 50 us, 1.2 MB/s", "the slowest node is n2, by what it sends;"],
            "srun --exclude=n2",
        ),
        (ONE_WAY, ["from n2 to n1"], "have the way from n2 to n1 checked"),
        # Of two nodes, the two directions are compared.
        (BACK, ["is from n2 to n1: 50 us, 1.2 MB/s"], "have the way from n2 to n1 checked"),
        (THERE, ["is from n1 to n2: 50 us, 1.2 MB/s"], "have the way from n1 to n2 checked"),
    ],
)
def test_the_slowest_node_or_direction_is_named(measured, words, fix):
    found = judge(measured, HOSTS)
    assert found.status == "warn"
    assert all(word in found.text for word in words)
    assert ("slowest node" in found.text) == fix.startswith("srun")
    assert fix in found.fix


def test_links_that_are_alike_pass():
    for measured in (links(100.0, 90.0, 80.0), links(1.0), []):
        found = judge(measured, HOSTS)
        assert found.status == "pass"
        assert "slowest node" not in found.text
    assert judge(links(100.0, 90.0, 110.0), HOSTS, GBIT).status == "pass"
    assert (slowest_node(SLOW_NODE), slowest_node(links(1.0))) == (3, None)
    assert LinkSpeed(0, 1, 5.0, 100.0, 300.0).mb_per_s == pytest.approx(150.0)


@pytest.mark.parametrize(
    ("speed", "status", "words"),
    [
        (1.25, "fail", "that is 1 % of the expected 1gbit (125 MB/s), and 2 of 2 directions are"),
        ((80.0, 100.0), "warn", "that is 64 % of the expected 1gbit (125 MB/s), and 1 of 2"),
        ((90.0, 100.0), "pass", "is from n1 to n2: 50 us, 90 MB/s"),
    ],
)
def test_every_direction_is_judged_against_the_expected_rate(speed, status, words):
    found = judge(links(speed), HOSTS, GBIT)
    assert found.status == status
    assert words in found.text
    assert bool(found.fix) == (status != "pass")


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"segments": 612, "resent": 9}, "packets are lost: 9 of 612 TCP"),
        ({"segments": 612, "resent": 1}, ""),
        ({"segments": 90000, "resent": 9}, ""),  # of other programs
    ],
)
def test_a_link_that_loses_packets_is_named(facts, words):
    good = LinkSpeed(0, 3, 50.0, 100.0, 100.0, segments=604)
    bad = LinkSpeed(0, 2, 50.0, 100.0, 100.0, **facts)
    found = judge([good, bad], HOSTS)
    assert found.status == ("warn" if words else "pass")
    assert words in found.text
    assert ("between n1 and n2" in found.text) == bool(words)


@pytest.mark.parametrize(
    ("rate", "expected"),
    [("10gbit", 1250.0), ("100Mbit", 12.5), ("2.5gbit", 312.5), ("800kbit", 0.1), ("8bit", 1e-6)],
)
def test_rates_are_written_as_tc_writes_them(rate, expected):
    assert mb_per_s(parse(["--expect", rate]).expect) == pytest.approx(expected)


RATES = ["10", "0gbit", "10GB", "-1gbit", "1e3mbit", "gbit", "10 gbit", ""]


@pytest.mark.parametrize(
    ("option", "said"),
    [
        *((f"--expect={rate}", "must be a rate such as 10gbit, 100mbit or 50") for rate in RATES),
        *((f"--timeout={seconds}", "Input should be ") for seconds in ("0", "-3", "soon", "nan")),
    ],
)
def test_another_rate_or_timeout_is_refused_in_one_sentence(option, said, capsys):
    with pytest.raises(RefusedOptionsError):
        parse([option])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"mntrain: {option.partition('=')[0]}: {said}")
    assert (parse([]).expect, parse(["--expect", "none"]).expect) == (None, None)
