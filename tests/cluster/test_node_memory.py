"""Jobs with checkpoints in the memory of emulated nodes, each with a /dev/shm of its own."""

import subprocess
from pathlib import Path

import pytest
from dying_jobs import assert_goes_on

pytestmark = [pytest.mark.cluster, pytest.mark.thorough]


@pytest.mark.timeout(600)
def test_a_job_goes_on_from_copies_after_a_node_was_started_anew(make_cluster, tmp_path):
    local = Path("/dev/shm/mntrain-test")
    with make_cluster(ranks=(2, 2), link=None) as cluster:

        def on(host: str, *command: object) -> str:
            words = [*cluster.enter(host), *map(str, command)]
            return subprocess.run(words, check=True, capture_output=True, text=True).stdout

        first, second = cluster.hosts
        assert_goes_on(tmp_path, local, lambda: on(first, "rm", "-r", local), cluster=cluster)
        for host in (first, second):
            assert on(host, "find", local).split() == [str(local)]
