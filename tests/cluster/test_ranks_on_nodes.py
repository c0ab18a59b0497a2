"""The tests of tests/mpi, and whole jobs, on real emulated nodes."""

import sys

import pytest
from job import completed, losses, losses_alone, summary, train
from launch import MPI_TESTS, mpirun, run_suite

pytestmark = pytest.mark.cluster


@pytest.mark.exhaustive
@pytest.mark.timeout(330)
@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        ((2, 2), "wire"),
        ((2, 2), "parity"),
        ((1,) * 8, "levels"),
    ],
)
def test_mpi_suite_passes_on_nodes(make_cluster, ranks, name):
    with make_cluster(ranks=ranks, link=None) as cluster:
        files = [MPI_TESTS / f"test_{name}.py"]
        result = run_suite(sum(ranks), files, timeout=300, cluster=cluster)
    if result.returncode != 0:
        pytest.fail(result.report(), pytrace=False)


@pytest.mark.exhaustive  # continuous integration runs the first case with Open MPI
@pytest.mark.parametrize(("ranks", "algorithm"), [((2, 2), "lanes"), ((2, 1), "leader")])
def test_a_job_on_nodes_gives_the_losses_of_one_process(make_cluster, tmp_path, ranks, algorithm):
    options = ["--comm.algorithm", algorithm, "--zero.stage", "2", "--train.check-every", "1"]
    with make_cluster(ranks=ranks, link="1gbit") as cluster:
        before = [cluster.sent(host) for host in cluster.hosts]
        completed(train(sum(ranks), tmp_path, *options, cluster=cluster))
        crossed = [
            cluster.sent(host) - sent for host, sent in zip(cluster.hosts, before, strict=True)
        ]
    # Sums in another order: fp32 rounding, grown over six steps.
    assert losses(tmp_path) == pytest.approx(losses_alone(), rel=2e-5)
    whole = summary(tmp_path)
    assert [rank["host"] for rank in whole["ranks"]] == [
        host for host, count in zip(cluster.hosts, ranks, strict=True) for _ in range(count)
    ]
    assert whole["world"]["nodes"] == len(ranks)
    # What the job says it sent between nodes has crossed the links, with headers and the launch.
    counted = sum(rank["cross_bytes"] for rank in whole["ranks"])
    assert counted <= sum(crossed) <= 1.5 * counted + 5 * 2**20


@pytest.mark.exhaustive
@pytest.mark.parametrize(  # of the second, shards are in another order
    "ranks", [(2, 1), (2, 2)]
)
def test_every_verb_of_the_torch_backend_has_its_result_between_nodes(make_cluster, ranks):
    script = MPI_TESTS.parent / "backend" / "scripts" / "torch_verbs.py"
    with make_cluster(ranks=ranks, link="1gbit") as cluster:
        result = completed(
            mpirun(sum(ranks), [sys.executable, script], timeout=250, cluster=cluster)
        )
    assert result.stdout.count(" tests passed") == sum(ranks)
