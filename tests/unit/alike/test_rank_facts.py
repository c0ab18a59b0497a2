"""Checks over the facts of all ranks: facts that pass, that warn, and that fail."""

import math
from dataclasses import replace

import pytest
import torch

from mntrain.alike import rank_facts
from mntrain.alike.rank_facts import RankFacts, collect
from mntrain.checks.finding import Finding, passed

VERSIONS = {"mntrain": "0.1.0", "torch": "2.6.0", "MPI": "MPICH 5", "mpi4py": "4", "Python": "3.12"}


def fact(cores=range(4), **changes):
    given = {"host": "n1", "host_key": 0, "cores": frozenset(cores), "physical": len(cores)}
    given |= {"host_cores": 4, "threads": 0, "gpu": "", "versions": VERSIONS}
    given |= {"clock": (100.0, 100.1), "findings": {"limits": passed("fine")}}
    return RankFacts(**{**given, **changes})


def other_host(**changes):
    return fact(host="n2", host_key=1, **changes)


def names(facts):
    return {name for name, found in rank_facts.examine(facts).items() if found.status != "pass"}


@pytest.mark.parametrize(
    "facts",
    [
        [fact()],
        [fact(), fact(), fact(), fact()],  # not bound
        [fact([0]), fact([1])],
        [fact([0, 1]), fact([0, 1]), fact([2, 3]), fact([2, 3])],  # each socket has two
        [fact([0]), other_host(cores=[0])],  # hosts number their cores alike
        [fact(threads=4)],
        [fact([0, 1], threads=2), fact([2, 3], threads=2)],
        [fact([0, 1]), fact([1, 2])],  # a core and a half each
        [fact(gpu="a"), fact(gpu="b"), other_host(gpu="a")],
        [fact(cores=[], host_cores=1, threads=8)] * 2,  # the system does not say which
    ],
)
def test_a_job_in_order_passes_every_check(facts):
    assert names(facts) == set()


@pytest.mark.parametrize(
    ("hosts", "twice"),
    [
        ([(0, "n1"), (0, "n1"), (2, "n1")], True),
        ([(0, "n1"), (1, "n2"), (2, "n2")], True),
        ([(0, "n1"), (1, "n2"), (0, "n1"), (1, "n2")], False),
        ([(0, "n1")], False),
    ],
)
def test_hosts_of_one_name_are_told_apart(hosts, twice):
    facts = [fact([rank % 4], host=name, host_key=key) for rank, (key, name) in enumerate(hosts)]
    told = rank_facts.hosts_apart(facts)
    for rank, host in enumerate(hosts):
        assert [other == told[rank] for other in told] == [other == host for other in hosts]
        assert told[rank].startswith(host[1])
        assert twice or told[rank] == host[1]


def bound(*sets):
    return [fact(cores, threads=1) for cores in sets]


ONE = "2 ranks share the 1 core of n1 that they are bound to (ranks"


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        (bound(*[[0, 1]] * 4), "4 ranks share the 2 cores of n1 that they are bound to (ranks 0"),
        (bound(*[[0, 1, 2, 3]] * 5), "5 ranks share the 4 cores of n1, so each is slower"),
        (bound([1], [1]), f"{ONE} 0, 1; 4 cores in all)"),
        (bound([0], [0], [1, 2]), f"{ONE} 0, 1;"),
        (bound([0, 1], [2], [2], [0, 1, 2]), f"{ONE} 1, 2;"),
        ([fact(quota=2.0)] * 2, ""),
        ([fact(quota=1.5)] * 2, "the cgroup of the 2 ranks on n1 may use 1.5 CPUs"),
        ([fact([0], launcher_cores=1)], ""),
        ([fact([0], launcher_cores=4)], "Open MPI has bound the 1 rank on n1 to 1 of 4 cores, "),
        ([fact([0], launcher_cores=3), fact([1], launcher_cores=3)], ""),
        ([fact([n], launcher_cores=4) for n in range(2)], "Open MPI has bound the 2 ranks on n1 "),
    ],
)
def test_ranks_with_too_few_cores_or_cpus_are_one_warning(facts, text):
    assert names(facts) == ({"cores"} if text else set())
    found = rank_facts.cores(facts)
    assert found.text.startswith(text)
    assert ("mpirun --bind-to" in found.fix) == ("bound" in text)


@pytest.mark.parametrize(
    ("cgroup", "files", "quota"),
    [
        ("0::/\n", {}, math.inf),
        ("0::/\n", {"cpu.max": "800000 100000\n"}, 8.0),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "150000 100000\n"}, 1.5),
        (
            "4:memory:/x\n3:cpu,cpuacct:/x\n",
            {"cpu/x/cpu.cfs_quota_us": "200000\n", "cpu/x/cpu.cfs_period_us": "100000\n"},
            2.0,
        ),
        ("3:cpu:/x\n", {"cpu/x/cpu.cfs_quota_us": "-1\n"}, math.inf),
    ],
)
def test_the_quota_is_the_least_of_the_cgroups(tmp_path, cgroup, files, quota):
    own = tmp_path / "own"
    own.write_text(cgroup)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert rank_facts.cpu_quota(own, tmp_path) == quota
    assert rank_facts.cpu_quota(tmp_path / "none", tmp_path) == math.inf
    allowed = fact(range(8), physical=8, quota=quota)
    assert rank_facts.fair_threads([allowed] * 2, 0) == max(1, int(min(8.0, quota) / 2))


@pytest.mark.parametrize(
    ("facts", "rank", "allowed"),
    [
        ([fact([0], threads=4), fact([1], threads=4)], 0, 1),
        ([fact([0, 1], threads=1), fact([2, 3], threads=3)], 1, 2),
        ([fact(threads=3), fact(threads=3)], 0, 2),
    ],
)
def test_more_threads_than_cores_name_the_rank_and_the_right_number(facts, rank, allowed):
    assert names(facts) == {"threads"}
    found = rank_facts.threads(facts)
    assert found.text.startswith(f"rank {rank} on n1 is set to ")
    assert f"OMP_NUM_THREADS={allowed}," in found.fix


def test_a_shared_gpu_is_reported_with_the_ranks_and_the_fix():
    facts = [fact(gpu="a"), fact(gpu="b"), other_host(gpu="a"), other_host(gpu="a")]
    assert names(facts) == {"gpus"}
    found = rank_facts.gpus(facts)
    assert found.text.startswith("ranks 2, 3 share a GPU of n2")
    assert "srun --gpus-per-task=1 or --gpu-bind=none" in found.fix


@pytest.mark.parametrize(
    ("name", "status"),
    [("mntrain", "fail"), ("torch", "fail"), ("MPI", "fail"), ("Python", "warn")],
)
def test_other_versions_fail_if_they_compute_or_communicate(name, status):
    facts = [fact(), fact(), other_host(versions=VERSIONS | {name: "0"})]
    found = rank_facts.versions(facts)
    assert found.status == status
    usual = f"ranks 0, 1 on n1 have {VERSIONS[name]}"
    assert found.text == f"{name} differs between ranks: {usual}, rank 2 on n2 has 0"


@pytest.mark.parametrize(("shift", "word"), [(3600, "ahead of"), (-3600, "behind")])
def test_a_clock_that_is_off_is_named(shift, word):
    facts = [fact(), other_host(clock=(100.0 + shift, 100.5 + shift))]
    found = rank_facts.clocks(facts)
    assert found.status == "warn"
    off = f"3599.{9 if shift > 0 else 5}"
    assert f"the clock of n2 (rank 1) is {off} s or more {word}" in found.text
    for clock in ((100.9, 100.95), (60.0, 100.05), (100.05, 160.0), (99.5, 99.6)):
        assert rank_facts.clocks([fact(), other_host(clock=clock)]).status == "pass"


def test_a_hosts_own_finding_is_named_by_host():
    bad = Finding("warn", "few files", "ulimit")
    facts = [fact(), other_host(findings={"limits": bad}), other_host(findings={"limits": bad})]
    found = rank_facts.examine(facts)
    assert found["limits"] == Finding("warn", "n2: few files", "ulimit")
    assert {check.__name__ for check in rank_facts.CHECKS} < found.keys()


def test_facts_of_this_process_pass_as_a_job_of_one(monkeypatch):
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    own = collect(host="n", host_key=0, gpu="", library="MPICH 5", size=1, clock=(0.0, 0.0))
    assert own.versions["mntrain"].startswith("0.1.0 (sources ")
    assert own.physical <= len(own.cores) <= own.host_cores
    assert rank_facts.versions([own, own]).status == "pass"
    assert names([replace(own, findings={}, threads=0)]) == set()


# Threads of torch

CORES = 8  # of which two each are hyperthreads of one core


@pytest.fixture
def threads(monkeypatch):
    """Return the threads of a rank among others with the same cores."""
    state = {"count": CORES // 2}
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.setattr(rank_facts.os, "sched_getaffinity", lambda pid: state["cores"])
    monkeypatch.setattr(rank_facts.os, "cpu_count", lambda: CORES)
    monkeypatch.setattr(torch, "get_num_threads", lambda: state["count"])
    monkeypatch.setattr(rank_facts, "_physical_core", lambda core: str(core // 2))

    def threads(ranks, before=CORES // 2, cores=range(CORES)):
        state.update(count=before, cores=set(cores))
        own = rank_facts.collect(
            host="n", host_key=0, gpu="", library="MPICH", size=ranks, clock=(0.0, 0.0)
        )
        return own.threads or rank_facts.fair_threads([own] * ranks, 0)

    return threads


@pytest.mark.parametrize(("ranks", "count"), [(1, 4), (2, 2), (3, 1), (4, 1), (16, 1)])
def test_torch_gets_a_share_of_the_physical_cores(threads, ranks, count):
    assert threads(ranks) == count
    assert threads(ranks, before=CORES) == count  # torch's default without MKL
    assert threads(1, before=2, cores=[0, 2]) == 2  # bound to one hyperthread of each core
    assert threads(2, before=1, cores=[0, 1]) == 1


def test_a_count_that_the_user_has_set_stays(threads, monkeypatch):
    for count in (1, 2, 3, 6):
        assert threads(4, before=count) == threads(1, before=count) == count
    monkeypatch.setenv("MKL_NUM_THREADS", "3")
    assert threads(2, before=3) == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert threads(2, before=1, cores=[0]) == 4  # it counts for more than what torch makes of it
