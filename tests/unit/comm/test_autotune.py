"""`auto` by proof: what follows from times, and what is kept of it. Without communication."""

import json
import os
import stat
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mntrain.cli import parse
from mntrain.comm.algorithm_table import CHUNK_BYTES, AlgorithmChoice, AlgorithmTable
from mntrain.comm.topology import Topology
from mntrain.comm.tuning_cache import MOST_ENTRIES, key_of
from mntrain.config import CommConfig
from mntrain.train.summary import without_memory
from mntrain.tuning import Tuning, choosing, untuned
from mntrain.tuning.cache import CACHE
from mntrain.tuning.choosing import Findings

KIB, MIB = 1 << 10, 1 << 20
LANES, LEADER, FLAT = AlgorithmChoice("lanes"), AlgorithmChoice("leader"), AlgorithmChoice("flat")
FINE, COARSE = (AlgorithmChoice("lanes", CHUNK_BYTES * 4 // part) for part in (16, 1))
ONE_NODE = Topology(((0, 1),))
TWO_NODES = Topology(((0, 1), (2, 3)))


def steady(**seconds):
    """Samples without noise, by algorithm."""
    return {AlgorithmChoice(name): [took] * 5 for name, took in seconds.items()}


# Candidates.


@pytest.mark.parametrize(
    ("nodes", "names"),
    [
        ([[0, 1, 2]], ("lanes", "flat")),
        ([[0], [1], [2]], ("lanes",)),
        ([[0, 1], [2]], ("lanes", "flat")),
        ([[0, 1], [2, 3]], ("lanes", "leader", "flat")),
        ([range(40), range(40, 80)], ("lanes", "leader")),
    ],
)
def test_algorithms_that_are_the_same_or_hopeless_here_are_no_candidates(nodes, names):
    assert choosing.algorithms(Topology(tuple(map(tuple, nodes)))) == names


def test_pieces_that_cut_a_tensor_alike_are_one_candidate():
    assert choosing.pieces("lanes", TWO_NODES, 4 * KIB) == [LANES]
    assert set(choosing.pieces("lanes", TWO_NODES, 64 * MIB)) == {LANES, FINE, COARSE}
    assert choosing.pieces("flat", TWO_NODES, 64 * MIB)[0] == FLAT


def test_sizes_ascend_to_that_of_a_bucket():
    assert choosing.sizes(25 * MIB) == (32 * KIB, MIB, 25 * MIB)
    assert choosing.sizes(2 * MIB) == (32 * KIB, 2 * MIB)
    assert choosing.sizes(100) == (100,)
    assert choosing.sizes(1) == (4,)
    assert choosing.sizes(1 << 33) == (32 * KIB, MIB, 32 * MIB)


def test_size_is_halved_until_the_time_suffices():
    assert choosing.affordable(24 * MIB, MIB, seconds=0.01, left=1.0) == 24 * MIB
    assert choosing.affordable(24 * MIB, MIB, seconds=0.1, left=1.0) == 6 * MIB
    assert choosing.affordable(24 * MIB, MIB, seconds=1.0, left=1.0) is None
    # 32 times as many bytes, when so few, are not thought to take 32 times as long.
    assert choosing.affordable(MIB, 32 * KIB, seconds=0.1, left=1.0) == MIB


# The choice.


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({"lanes": 1.0, "leader": 2.0, "flat": 3.0}, LANES),
        ({"lanes": 1.09, "leader": 1.05, "flat": 1.0}, LANES),
        ({"lanes": 1.5, "leader": 1.05, "flat": 1.0}, LEADER),
        ({"lanes": 1.5, "leader": 1.5, "flat": 1.0}, FLAT),
    ],
)
def test_the_fastest_is_chosen_but_ties_go_to_lanes(seconds, chosen):
    assert choosing.best(steady(**seconds)) == chosen


def test_of_one_algorithm_a_tie_goes_to_the_default_piece():
    assert choosing.best({FINE: [1.0] * 5, LANES: [1.05] * 5, COARSE: [1.0] * 5}) == LANES
    assert choosing.best({FINE: [1.0] * 5, LANES: [1.5] * 5}) == FINE


def test_what_the_samples_do_not_tell_apart_is_a_tie():
    noisy = {LANES: [1.0, 3.0, 1.2, 2.0], FLAT: [1.4, 1.3, 1.2, 1.3]}
    assert choosing.best(noisy) == LANES
    assert choosing.best({LANES: [1.4], FLAT: [1.0]}) == LANES
    assert choosing.best({LANES: [4.0], FLAT: [1.0]}) == FLAT


@given(
    st.lists(st.sampled_from([LANES, LEADER, FLAT, FINE, COARSE]), min_size=1, unique=True).flatmap(
        lambda choices: st.fixed_dictionaries(dict.fromkeys(choices, st.floats(1e-6, 10)))
    )
)
def test_nothing_is_chosen_that_is_slower_than_another_by_more_than_noise(times):
    chosen = choosing.best({choice: [took] * 4 for choice, took in times.items()})
    assert times[chosen] <= 1.1001 * min(times.values())


# The table.


def test_every_size_gets_the_choice_of_the_one_it_is_nearest_to():
    table = choosing.table(25 * MIB, [(32 * KIB, FLAT), (MIB, LEADER), (25 * MIB, LANES)])
    expected = {0: FLAT, 64 * KIB: FLAT, 512 * KIB: LEADER, 4 * MIB: LEADER}
    expected |= {6 * MIB: LANES, 25 * MIB: LANES, 1 << 40: LANES}
    assert {nbytes: table.of(nbytes) for nbytes in expected} == expected


def test_one_choice_for_all_sizes_is_one_step():
    found = [(32 * KIB, LANES), (MIB, LANES), (25 * MIB, LANES)]
    assert choosing.table(25 * MIB, found).steps == ((25 * MIB, LANES),)


def test_limits_between_sizes_do_not_depend_on_the_time_there_was():
    found = [(32 * KIB, FLAT), (MIB, LEADER), (25 * MIB, LANES)]
    halved = [*found[:2], (6 * MIB, LANES)]
    assert choosing.table(25 * MIB, halved) == choosing.table(25 * MIB, found)
    assert choosing.table(25 * MIB, found[:1]) == AlgorithmTable(((25 * MIB, FLAT),))


# The line.


@pytest.mark.parametrize(
    ("topology", "samples", "speed", "words"),
    [
        (
            TWO_NODES,
            {25 * MIB: steady(lanes=0.25, flat=0.475)},
            103 * MIB,
            f"{LANES}: 1.9x flat at 25 MiB; 97% of the measured link",
        ),
        (
            ONE_NODE,
            {25 * MIB: steady(lanes=0.01, flat=0.2)},
            5000 * MIB,
            f"{LANES}: 20x flat at 25 MiB; 50% of a memcpy",
        ),
        (
            TWO_NODES,
            {25 * MIB: steady(lanes=2.0, flat=1.0)},
            None,
            f"{FLAT}: 2.0x lanes at 25 MiB",
        ),
        (
            TWO_NODES,
            {MIB: steady(lanes=1.0, flat=8.0), 12 * MIB: steady(lanes=12.0)},
            2 * MIB,
            f"{LANES}: 8.0x flat at 1 MiB; 50% of the measured link at 12 MiB",
        ),
        (
            Topology(((0,), (1,))),
            {100: steady(lanes=1.0)},
            None,
            str(LANES),
        ),
    ],
)
def test_the_line_says_what_and_how_good_it_is(topology, samples, speed, words):
    assert choosing.line(topology, Findings(samples, speed)) == words


def test_without_tuning_auto_is_lanes_and_says_so():
    tuning = untuned()
    assert tuning.table == AlgorithmTable.always("lanes")
    assert tuning.line == f"{LANES}: not tuned"


def test_flags_turn_tuning_off_and_on():
    assert parse([]).comm == CommConfig(tune=True)
    assert parse(["--comm.no-tune"]).comm == CommConfig(tune=False)
    assert parse(["--comm.no-tune", "--comm.tune"]).comm == CommConfig(tune=True)


# Nodes without shared memory.


def test_where_all_nodes_share_memory_nothing_is_of_concern():
    assert without_memory(["", "", "", ""], TWO_NODES) == ""


def test_a_node_without_shared_memory_is_named_with_the_reason_and_the_fix():
    said = without_memory(["", "", "no room", "no room"], TWO_NODES)
    assert "(node 1: no room)" in said
    assert "messages" in said
    assert said.endswith(
        "Run all ranks of a node as one user, in one container, with memory to spare"
    )
    assert "(nodes 0, 1: no room)" in without_memory(["no room"] * 4, TWO_NODES)
    both = without_memory(["no room", "no room", "denied", "denied"], TWO_NODES)
    assert "(node 0: no room; node 1: denied)" in both


# The cache.

TABLE = AlgorithmTable(((256 * KIB, FLAT), (25 * MIB, COARSE)))
KEPT = Tuning(TABLE, "a line")


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Where the cache will be."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "mntrain" / "tuning.json"


def aged(file, key, age):
    """Make an entry older."""
    content = json.loads(file.read_text())
    content[key]["measured"] = (datetime.now(UTC) - age).isoformat()
    file.write_text(json.dumps(content))


def test_what_was_kept_is_found_by_its_key_alone(file):
    assert CACHE.find("a") is None
    CACHE.keep("a", KEPT)
    CACHE.keep("b", Tuning(AlgorithmTable.always("leader"), "another"))
    found = CACHE.find("a")
    assert found.content == KEPT
    assert (found.content.table.of(KIB), found.content.table.of(MIB)) == (FLAT, COARSE)
    assert abs(datetime.now(UTC) - found.measured) < timedelta(minutes=1)
    assert CACHE.find("c") is None
    assert [path.name for path in file.parent.iterdir()] == ["tuning.json"]


def test_a_table_without_sizes_is_kept(file):
    CACHE.keep("a", Tuning(AlgorithmTable.always("lanes"), "a line"))
    assert CACHE.find("a") is not None


def test_a_key_depends_on_every_fact_but_not_on_their_order():
    facts = {"nodes": ((0, 1), (2, 3)), "bucket_bytes": 25}
    key = key_of(facts)
    assert key_of(dict(reversed(facts.items()))) == key
    assert key_of(facts | {"bucket_bytes": 26}) != key
    assert key_of(facts | {"nodes": ((0, 2), (1, 3))}) != key


@pytest.mark.parametrize(
    ("age", "found"),
    [
        (timedelta(days=29), True),
        (timedelta(days=31), False),
        (timedelta(days=-2), False),
    ],
)
def test_an_entry_is_good_for_30_days_from_when_it_was_measured(file, age, found):
    CACHE.keep("a", KEPT)
    aged(file, "a", age)
    assert (CACHE.find("a") is not None) == found


def test_old_entries_go_when_another_comes(file):
    CACHE.keep("a", KEPT)
    aged(file, "a", timedelta(days=31))
    CACHE.keep("b", KEPT)
    assert set(json.loads(file.read_text())) == {"b"}


def test_of_too_many_entries_the_oldest_goes(file):
    CACHE.keep("0", KEPT)
    entry = json.loads(file.read_text())["0"]
    now = datetime.now(UTC)
    entries = {
        str(i): entry | {"measured": (now - timedelta(minutes=i + 1)).isoformat()}
        for i in range(MOST_ENTRIES)
    }
    file.write_text(json.dumps(entries))
    CACHE.keep("new", KEPT)
    left = set(json.loads(file.read_text()))
    assert left == {"new", *map(str, range(MOST_ENTRIES - 1))}


GOOD = {"measured": datetime.now(UTC).isoformat(), "steps": [[9, "lanes", 9]], "line": "a line"}
LATE = {"measured": "0001-01-01T00:00:00+23:59"}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[1, 2]",
        b"null",
        b'"a"',
        b"[" * 100_000,
        *(
            json.dumps({"a": value}).encode()
            for value in (
                None,
                [],
                "text",
                {},
                *(
                    GOOD | change
                    for change in (
                        {"measured": None},
                        {"measured": "yesterday"},
                        {"measured": "2026-01-01T00:00:00"},
                        LATE,
                        {"line": 5},
                        {"line": "two\nlines"},
                        {"steps": 5},
                        {"steps": []},
                        {"steps": [[9, "lanes"]]},
                        {"steps": [[9, "ring", 9]]},
                        {"steps": [[9, ["lanes"], 9]]},
                        {"steps": [[9, "lanes", 0]]},
                        {"steps": [[9, "lanes", True]]},
                        {"steps": [[9, "lanes", 1e9]]},
                        {"steps": [[9, "lanes", 10**400]]},
                        {"steps": [[9, "lanes", 9], [8, "flat", 9]]},
                    )
                ),
            )
        ),
    ],
    ids=lambda content: content[:60].decode(errors="replace"),
)
def test_a_damaged_file_is_no_cache_and_is_replaced(file, content):
    file.parent.mkdir()
    file.write_bytes(content)
    assert CACHE.find("a") is None
    CACHE.keep("b", KEPT)
    assert CACHE.find("b") is not None
    assert set(json.loads(file.read_text())) == {"b"}


def test_a_damaged_entry_spoils_no_other(file):
    CACHE.keep("a", KEPT)
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "b": GOOD | {"steps": 5}, "c": GOOD}))
    assert [CACHE.find(key) is not None for key in "abc"] == [True, False, True]


def test_where_nothing_can_be_written_there_is_no_cache(file):
    file.parent.write_text("in the way")
    CACHE.keep("a", KEPT)
    assert CACHE.find("a") is None
    assert file.parent.read_text() == "in the way"


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(file, monkeypatch):
    CACHE.keep("a", KEPT)
    before = file.read_bytes()

    def full(*_):
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        CACHE.keep("b", KEPT)
    assert file.read_bytes() == before
    assert [path.name for path in file.parent.iterdir()] == ["tuning.json"]


def test_a_reader_with_the_file_open_has_all_of_the_old_one(file):
    CACHE.keep("a", KEPT)
    with file.open() as old:
        CACHE.keep("b", KEPT)
        assert set(json.load(old)) == {"a"}
    assert set(json.loads(file.read_text())) == {"a", "b"}


def test_the_file_is_the_users_alone(file):
    CACHE.keep("a", KEPT)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("given", ["", "relative/folder"])
def test_without_an_absolute_xdg_cache_home_it_is_in_the_home(tmp_path, monkeypatch, given):
    monkeypatch.setenv("XDG_CACHE_HOME", given)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert CACHE.place() == tmp_path / ".cache" / "mntrain" / "tuning.json"
