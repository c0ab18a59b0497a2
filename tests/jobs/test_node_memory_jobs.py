"""Jobs with checkpoints in the memory of virtual nodes."""

import shutil

import pytest
from dying_jobs import assert_goes_on


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_a_job_that_lost_a_node_goes_on_from_what_the_other_one_has_in_memory(tmp_path):
    local = tmp_path / "local"

    def lose():
        (run,) = local.iterdir()
        assert [path.name for path in sorted(run.iterdir())] == ["node-0", "node-1"]
        shutil.rmtree(run / "node-0")

    assert_goes_on(tmp_path, local, lose, "--comm.ranks-per-node", "2")
    assert not list(local.iterdir())
