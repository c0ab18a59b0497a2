"""Checks of a host and of a file system, on real folders, limits and processes."""

import os
import resource

import pytest

from mntrain.checks import host, storage
from mntrain.checks.finding import Finding, merge, passed

MPICH, OPEN_MPI = "MPICH Version:      5.0.2\n", "Open MPI v5.0.11"


def fake_space(monkeypatch, free, size):
    values = list(os.statvfs("/"))
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(
        [1, 1, size, free, free, *values[5:8], 0, *values[9:]]
    ))  # fmt: skip


@pytest.mark.parametrize(
    ("free", "size", "creates", "status"),
    [
        (5_000_000, 8_000_000, True, "pass"),
        (3_000_000, 8_000_000, True, "fail"),
        (3_000_000, 8_000_000, False, "pass"),  # rank 0's segment may lie there already
        (3_000_000, 3_000_000, False, "fail"),
    ],
)
def test_little_shared_memory_is_refused_without_a_false_alarm(
    monkeypatch, tmp_path, free, size, *, creates, status
):
    for library, absent in ((MPICH, "fail"), (OPEN_MPI, "warn")):  # where MPI would end
        assert host.shared_memory(library, 4, folder=tmp_path).status == "pass"
        found = host.shared_memory(library, 4, folder=tmp_path / "none")
        assert (found.status, "No such file" in found.text) == (absent, True)
    fake_space(monkeypatch, free, size)
    (tmp_path / "mpich_shm_1_0").touch()
    found = host.shared_memory(MPICH, 4, creates=creates, folder=tmp_path)
    assert found.status == status
    if status == "fail":
        assert "MPI needs 4.4 MB for the 4 ranks of this host" in found.text
        assert found.fix.startswith("remove the mpich_shm_* there that no running job uses, or ")


@pytest.mark.parametrize(
    ("limits", "status"),
    [((1024, 4096), "pass"), ((-1, -1), "pass"), ((128, 4096), "warn"), ((40, 40), "fail")],
)
def test_too_few_open_files_are_reported_with_what_helps(limits, status, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    found = host.open_files(2)
    assert found.status == status
    if status != "pass":
        assert f"may open {limits[0]} files" in found.text
        assert (
            f"ulimit -n 260 before the job is started; if the hard limit ({limits[1]})" in found.fix
        )


def test_the_worst_finding_of_all_hosts_counts_and_names_them():
    warn, fail = Finding("warn", "slow", "faster"), Finding("fail", "gone", "come")
    assert merge([("a", passed("1")), ("b", passed("2"))]) == passed("1")
    assert merge([("a", warn), ("b", fail), ("b", fail), ("c", fail)]) == Finding(
        "fail", "b, c: gone", "come"
    )
    assert merge([("a", warn), ("b", warn)]) == warn
    many = [*((f"n{i}", warn) for i in range(6)), ("n7", passed("fine"))]
    assert merge(many).text == "n0, n1, n2, n3 and 2 more: slow"


def examine(folder, hosts=("n1",), seen=None):
    """The findings of rank 0; `seen` says which ranks see the file, if not all as this process."""

    def gather(own):
        return seen if seen and isinstance(own, bool) else [own] * len(hosts)

    return storage.examine(gather, 0, folder, hosts)


def test_a_folder_is_written_seen_and_left_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "write_together", lambda *_: None)
    found = examine(tmp_path, ("n1", "n1", "n2"))
    assert {one.status for one in found.values()} == {"pass"}
    same = f"{tmp_path} is the same on 2 hosts, which can write one file together"
    assert found["shared files"].text == same
    monkeypatch.setattr(storage, "write_together", lambda *_: ("n2", "n1"))
    found = examine(tmp_path, ("n1", "n1", "n2"))["shared files"]
    assert found.status == "fail"
    assert "what n2 writes into a file while others write" in found.text
    found = examine(tmp_path, ("n1", "n2", "n2"), [True, False, False])["shared files"]
    assert found.status == "fail"
    assert found.text.startswith("n2 does not see the files that rank 0 writes")
    assert list(tmp_path.iterdir()) == []
    assert storage.existing_folder(tmp_path / "a" / "b") == tmp_path
    (found,) = examine(storage.Path("/proc/self")).values()
    assert found.status == "fail"
    assert "/proc/self cannot be written (" in found.text


def test_a_file_that_is_not_there_is_not_waited_for_long(tmp_path):
    for folder in (tmp_path, tmp_path / "none"):
        assert not storage.is_visible(folder / "file", 0.1)
