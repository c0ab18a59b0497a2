import textwrap

import pytest
from launch import TESTS, run_suite


@pytest.fixture
def suite(tmp_path):
    """A function that writes a test file and runs it, with reports as the suites have them."""

    def run(ranks, source, **limits):
        reports = (TESTS / "helpers" / "rank_reports.py").read_text()
        (tmp_path / "conftest.py").write_text(reports)
        header = "import pytest\nfrom mpi4py import MPI\nworld = MPI.COMM_WORLD\n"
        (tmp_path / "test_sample.py").write_text(header + textwrap.dedent(source))
        return run_suite(ranks, [tmp_path], **{"timeout": 60, **limits})

    return run


@pytest.mark.thorough
def test_hanging_suite_shows_where_every_rank_is(suite):
    result = suite(
        2,
        """
        def wait_in_barrier():
            world.Barrier()

        def wait_for_a_message():
            world.recv(source=0)

        def test_rank_one_goes_another_way():
            print("printed before the hang by", world.rank)
            (wait_for_a_message if world.rank else wait_in_barrier)()
        """,
        test_timeout=1,
    )
    assert not result.timed_out
    assert result.returncode != 0
    for rank, function in enumerate(["wait_in_barrier", "wait_for_a_message"]):
        assert "::test_rank_one_goes_another_way ran past its limit of 1 s" in result.outputs[rank]
        assert f"in {function}" in result.outputs[rank]
        assert f"printed before the hang by {rank}" in result.outputs[rank]
        assert f"in {function}" in result.report()
