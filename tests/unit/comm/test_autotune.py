"""Autotuning: the choice that follows from measured times, and the cache. No communication."""

import json
import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mntrain.cli import parse
from mntrain.comm.autotune import MARGIN, cache_path, choose, explain, find, key_of, store
from mntrain.comm.topology import Topology
from mntrain.config import CommConfig

MIB = 1 << 20
DAY_S = 24 * 3600
TWO_NODES = Topology(((0, 1), (2, 3)))


# The choice.


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ({"lanes": 1.0, "leader": 2.0, "flat": 3.0}, "lanes"),
        ({"lanes": 1.45, "leader": 1.05, "flat": 1.0}, "lanes"),
        ({"lanes": 1.55, "leader": 1.05, "flat": 1.0}, "flat"),
        ({"lanes": 1.6, "leader": 1.0, "flat": 1.5}, "leader"),
    ],
)
def test_lanes_is_kept_unless_another_algorithm_is_clearly_faster(times, chosen):
    assert choose(times) == chosen


@given(st.fixed_dictionaries(dict.fromkeys(("lanes", "leader", "flat"), st.floats(1e-6, 10))))
def test_the_choice_is_never_slower_than_another_by_more_than_the_margin(times):
    assert times[choose(times)] <= MARGIN * 1.0001 * min(times.values())


@pytest.mark.parametrize(
    ("nbytes", "times", "line"),
    [
        (4 * MIB, {"lanes": 0.25, "flat": 0.475}, "lanes: 1.9x flat at 4 MiB"),
        (MIB, {"lanes": 0.01, "flat": 0.2}, "lanes: 20.0x flat at 1 MiB"),
        (MIB // 2, {"lanes": 2.0, "flat": 1.0}, "flat: 2.0x lanes at 0.5 MiB"),
    ],
)
def test_the_line_names_the_choice_and_its_advantage(nbytes, times, line):
    assert explain(times, nbytes) == line


def test_flags_turn_tuning_off_and_on():
    assert parse([]).comm == CommConfig(tune=True)
    assert parse(["--comm.no-tune"]).comm == CommConfig(tune=False)
    assert parse(["--comm.no-tune", "--comm.tune"]).comm == CommConfig(tune=True)


# Nodes without shared memory.


# The cache.


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Return the path of a cache that does not exist yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "mntrain" / "tuning.json"


def age(file, key, days):
    """Make an entry older."""
    content = json.loads(file.read_text())
    content[key][2] = time.time() - days * DAY_S
    file.write_text(json.dumps(content))


def test_an_entry_is_found_by_its_key_only(file):
    assert find("a") is None
    store("a", ("flat", "a line"))
    store("b", ("lanes", "another"))
    today = time.strftime("%Y-%m-%d", time.gmtime())
    assert find("a") == ("flat", f"a line (measured {today})")
    assert find("c") is None
    assert [path.name for path in file.parent.iterdir()] == ["tuning.json"]


def test_a_key_depends_on_every_fact():
    key = key_of(((0, 1), (2, 3)), 25)
    assert key_of(((0, 1), (2, 3)), 25) == key
    assert key_of(((0, 1), (2, 3)), 26) != key
    assert key_of(((0, 2), (1, 3)), 25) != key


@pytest.mark.parametrize(("days", "found"), [(29, True), (31, False), (-2, False)])
def test_an_entry_is_valid_for_30_days_after_its_measurement(file, days, found):
    store("a", ("flat", "a line"))
    age(file, "a", days)
    assert (find("a") is not None) == found
    store("b", ("flat", "a line"))  # drops what is not valid
    assert ("a" in json.loads(file.read_text())) == found


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[1, 2]",
        b"null",
        b"[" * 100_000,
        b'{"a": 5}',
        b'{"a": [1, 2, "x"]}',
    ],
    ids=lambda content: f"{len(content)} bytes",
)
def test_a_damaged_file_counts_as_empty_and_is_replaced(file, content):
    file.parent.mkdir()
    file.write_bytes(content)
    assert find("a") is None
    store("b", ("flat", "a line"))
    assert find("b") is not None
    assert set(json.loads(file.read_text())) == {"b"}


def test_an_algorithm_that_there_is_not_is_not_chosen(file):
    store("a", ("ring", "a line"))
    assert find("a") is None


def test_an_unwritable_cache_is_ignored(file):
    file.parent.write_text("in the way")
    store("a", ("flat", "a line"))
    assert find("a") is None
    assert file.parent.read_text() == "in the way"


def test_a_reader_with_an_open_file_sees_the_whole_old_content(file):
    store("a", ("flat", "a line"))
    with file.open() as old:
        store("b", ("flat", "a line"))
        assert set(json.load(old)) == {"a"}
    assert set(json.loads(file.read_text())) == {"a", "b"}


@pytest.mark.parametrize("given", ["", os.path.join("relative", "folder")])
def test_the_cache_is_in_the_home_without_an_absolute_xdg_cache_home(tmp_path, monkeypatch, given):
    monkeypatch.setenv("XDG_CACHE_HOME", given)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_path() == tmp_path / ".cache" / "mntrain" / "tuning.json"
