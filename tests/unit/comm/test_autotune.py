"""Autotuning: the choice that follows from measured times, and the cache. No communication."""

import json
import os
import stat
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mntrain.cli import parse
from mntrain.comm import autotune
from mntrain.comm.algorithm_table import AlgorithmChoice, AlgorithmTable
from mntrain.comm.autotune import affordable_size, choose, explain, make_table, sizes, untuned
from mntrain.comm.topology import Topology
from mntrain.comm.tuning_cache import MAX_ENTRIES, Tuning, cache_path, find, key_of, store
from mntrain.config import CommConfig

KIB, MIB = 1 << 10, 1 << 20
LANES, LEADER, FLAT = AlgorithmChoice("lanes"), AlgorithmChoice("leader"), AlgorithmChoice("flat")
FASTEST = {
    LANES: {"lanes": 1.0, "leader": 2.0, "flat": 2.0},
    LEADER: {"lanes": 2.0, "leader": 1.0, "flat": 2.0},
    FLAT: {"lanes": 2.0, "leader": 2.0, "flat": 1.0},
}
TWO_NODES = Topology(((0, 1), (2, 3)))


def test_every_algorithm_but_the_oracle_is_a_candidate():
    assert set(autotune.candidates()) == {"lanes", "leader", "flat"}


def test_sizes_ascend_to_that_of_a_bucket():
    assert sizes(25 * MIB) == (32 * KIB, MIB, 25 * MIB)
    assert sizes(2 * MIB) == (32 * KIB, 2 * MIB)
    assert sizes(100) == (100,)
    assert sizes(1) == (4,)
    assert sizes(1 << 33) == (32 * KIB, MIB, 32 * MIB)


def test_size_is_halved_until_the_time_suffices():
    assert affordable_size(32 * KIB, {}, left_s=0.0) == 32 * KIB
    timed = {MIB: {"lanes": 0.01, "flat": 0.01}}
    assert affordable_size(24 * MIB, timed, left_s=1.0) == 24 * MIB
    assert affordable_size(24 * MIB, timed, left_s=0.5) == 12 * MIB
    assert affordable_size(24 * MIB, timed, left_s=0.05) is None


# The choice.


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ({"lanes": 1.0, "leader": 2.0, "flat": 3.0}, "lanes"),
        ({"lanes": 1.09, "leader": 1.05, "flat": 1.0}, "lanes"),
        ({"lanes": 1.5, "leader": 1.05, "flat": 1.0}, "flat"),
        ({"lanes": 1.5, "leader": 1.0, "flat": 1.5}, "leader"),
    ],
)
def test_lanes_is_kept_unless_another_algorithm_is_clearly_faster(times, chosen):
    assert choose(times) == chosen


@given(st.fixed_dictionaries(dict.fromkeys(("lanes", "leader", "flat"), st.floats(1e-6, 10))))
def test_the_choice_is_never_slower_than_another_by_more_than_the_margin(times):
    assert times[choose(times)] <= 1.1001 * min(times.values())


# The table.


def test_every_size_gets_the_choice_of_the_nearest_timed_size():
    measured = {32 * KIB: FASTEST[FLAT], MIB: FASTEST[LEADER], 25 * MIB: FASTEST[LANES]}
    table = make_table(25 * MIB, measured)
    expected = {0: FLAT, 64 * KIB: FLAT, 512 * KIB: LEADER, 4 * MIB: LEADER}
    expected |= {6 * MIB: LANES, 25 * MIB: LANES, 1 << 40: LANES}
    assert {nbytes: table.of(nbytes) for nbytes in expected} == expected


def test_one_choice_for_all_sizes_is_one_step():
    measured = dict.fromkeys((32 * KIB, MIB, 25 * MIB), FASTEST[LANES])
    assert make_table(25 * MIB, measured).steps == ((25 * MIB, LANES),)


def test_limits_between_sizes_do_not_depend_on_the_time_available():
    measured = {32 * KIB: FASTEST[FLAT], MIB: FASTEST[LEADER], 25 * MIB: FASTEST[LANES]}
    halved = {32 * KIB: FASTEST[FLAT], MIB: FASTEST[LEADER], 6 * MIB: FASTEST[LANES]}
    assert make_table(25 * MIB, halved) == make_table(25 * MIB, measured)
    first = {32 * KIB: FASTEST[FLAT]}
    assert make_table(25 * MIB, first) == AlgorithmTable(((25 * MIB, FLAT),))


# The explanation.


@pytest.mark.parametrize(
    ("measured", "line"),
    [
        ({25 * MIB: {"lanes": 0.25, "flat": 0.475}}, "lanes: 1.9x flat at 25 MiB"),
        ({25 * MIB: {"lanes": 0.01, "flat": 0.2}}, "lanes: 20x flat at 25 MiB"),
        ({512 * KIB: {"lanes": 2.0, "flat": 1.0}}, "flat: 2.0x lanes at 0.5 MiB"),
        (
            {MIB: {"lanes": 1.0, "flat": 8.0}, 12 * MIB: {"lanes": 12.0, "flat": 24.0}},
            "lanes: 2.0x flat at 12 MiB",
        ),
        ({100: {"lanes": 1.0}}, "lanes"),
    ],
)
def test_the_line_names_the_choice_and_its_advantage(measured, line):
    assert explain(measured) == line


def test_without_tuning_auto_is_lanes_and_the_line_states_it():
    assert untuned() == Tuning(AlgorithmTable.always("lanes"), "lanes: not tuned")


def test_flags_turn_tuning_off_and_on():
    assert parse([]).comm == CommConfig(tune=True)
    assert parse(["--comm.no-tune"]).comm == CommConfig(tune=False)
    assert parse(["--comm.no-tune", "--comm.tune"]).comm == CommConfig(tune=True)


# Nodes without shared memory.


# The cache.

TABLE = AlgorithmTable(((256 * KIB, FLAT), (25 * MIB, LEADER)))
TUNING = Tuning(TABLE, "a line")


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Return the path of a cache that does not exist yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "mntrain" / "tuning.json"


def aged(file, key, age):
    """Make an entry older."""
    content = json.loads(file.read_text())
    content[key]["measured"] = (datetime.now(UTC) - age).isoformat()
    file.write_text(json.dumps(content))


def test_an_entry_is_found_by_its_key_only(file):
    assert find("a") is None
    store("a", TUNING)
    store("b", Tuning(AlgorithmTable.always("leader"), "another"))
    entry = find("a")
    assert entry.tuning == TUNING
    assert (entry.tuning.table.of(KIB), entry.tuning.table.of(MIB)) == (FLAT, LEADER)
    assert abs(datetime.now(UTC) - entry.measured) < timedelta(minutes=1)
    assert find("c") is None
    assert [path.name for path in file.parent.iterdir()] == ["tuning.json"]


def test_a_table_of_one_choice_is_stored(file):
    store("a", Tuning(AlgorithmTable.always("lanes"), "a line"))
    assert find("a") is not None


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
def test_an_entry_is_valid_for_30_days_after_its_measurement(file, age, found):
    store("a", TUNING)
    aged(file, "a", age)
    assert (find("a") is not None) == found


def test_storing_drops_stale_entries(file):
    store("a", TUNING)
    aged(file, "a", timedelta(days=31))
    store("b", TUNING)
    assert set(json.loads(file.read_text())) == {"b"}


def test_the_oldest_of_too_many_entries_is_dropped(file):
    store("0", TUNING)
    entry = json.loads(file.read_text())["0"]
    now = datetime.now(UTC)
    entries = {
        str(i): entry | {"measured": (now - timedelta(minutes=i + 1)).isoformat()}
        for i in range(MAX_ENTRIES)
    }
    file.write_text(json.dumps(entries))
    store("new", TUNING)
    left = set(json.loads(file.read_text()))
    assert left == {"new", *map(str, range(MAX_ENTRIES - 1))}


GOOD = {"measured": datetime.now(UTC).isoformat(), "steps": [[9, "lanes"]], "line": "a line"}
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
                        {"steps": [[9]]},
                        {"steps": [[9, "lanes", 9]]},
                        {"steps": [[9, "ring"]]},
                        {"steps": [[9, ["lanes"]]]},
                        {"steps": [[-1, "lanes"]]},
                        {"steps": [[True, "lanes"]]},
                        {"steps": [[1e9, "lanes"]]},
                        {"steps": [[10**400, "lanes"]]},
                        {"steps": [[9, "lanes"], [8, "flat"]]},
                    )
                ),
            )
        ),
    ],
    ids=lambda content: f"{len(content)} bytes",
)
def test_a_damaged_file_counts_as_empty_and_is_replaced(file, content):
    file.parent.mkdir()
    file.write_bytes(content)
    assert find("a") is None
    store("b", TUNING)
    assert find("b") is not None
    assert set(json.loads(file.read_text())) == {"b"}


def test_a_damaged_entry_does_not_affect_others(file):
    store("a", TUNING)
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "b": GOOD | {"steps": 5}, "c": GOOD}))
    assert [find(key) is not None for key in "abc"] == [True, False, True]


def test_an_unwritable_cache_is_ignored(file):
    file.parent.write_text("in the way")
    store("a", TUNING)
    assert find("a") is None
    assert file.parent.read_text() == "in the way"


def test_a_failed_write_leaves_only_the_old_file(file, monkeypatch):
    store("a", TUNING)
    before = file.read_bytes()

    def full(*_):
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        store("b", TUNING)
    assert file.read_bytes() == before
    assert [path.name for path in file.parent.iterdir()] == ["tuning.json"]


def test_a_reader_with_an_open_file_sees_the_whole_old_content(file):
    store("a", TUNING)
    with file.open() as old:
        store("b", TUNING)
        assert set(json.load(old)) == {"a"}
    assert set(json.loads(file.read_text())) == {"a", "b"}


def test_only_the_user_may_read_the_file(file):
    store("a", TUNING)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("given", ["", "relative/folder"])
def test_the_cache_is_in_the_home_without_an_absolute_xdg_cache_home(tmp_path, monkeypatch, given):
    monkeypatch.setenv("XDG_CACHE_HOME", given)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_path() == tmp_path / ".cache" / "mntrain" / "tuning.json"
