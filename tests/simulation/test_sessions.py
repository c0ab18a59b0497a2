"""Sessions of pytest on simulated ranks: each rank has what belongs to a process for itself."""

from textwrap import dedent

import pytest
import sessions

from mntrain.comm import engine

HEAD = """
    import warnings
    from contextlib import nullcontext

    import pytest
    import torch
    from mpi4py import MPI

    from mntrain.comm import engine

    COMM = MPI.COMM_WORLD
    RANK = COMM.rank
"""


@pytest.fixture
def run(tmp_path, monkeypatch, request):
    """Run a file of tests on three ranks."""

    def run_file(text):
        path = tmp_path / "test_of_ranks.py"
        path.write_text(dedent(HEAD) + dedent(text))
        monkeypatch.setitem(sessions.FILES, "test_of_ranks", path)
        return dict(sessions.run([2, 1], [str(path)], request.config))

    return run_file


def test_ranks_have_modules_patches_warnings_output_and_random_numbers_of_their_own(run):
    before = engine.STALL_S
    outcomes = run("""
        @pytest.mark.parametrize("turn", [0, 1])
        def test_of_one_rank(monkeypatch, capsys, turn):
            assert COMM.allgather(RANK) == [0, 1, 2]
            if RANK == 1:
                monkeypatch.setattr(engine, "STALL_S", 77.0)
            print("rank", RANK)
            with pytest.warns(UserWarning) if RANK == 2 else nullcontext():
                COMM.Barrier()
                assert (engine.STALL_S == 77.0) == (RANK == 1)
                if RANK == 2:
                    warnings.warn("of rank 2")
                COMM.Barrier()
            drawn = torch.rand(1).item()
            assert COMM.allgather(drawn) == 3 * [drawn]
            assert capsys.readouterr().out == f"rank {RANK}\\n"
    """)
    assert outcomes == {"passed": 2}
    assert before == engine.STALL_S


def test_a_failure_names_its_rank_and_what_the_others_wait_for(run):
    with pytest.raises(AssertionError) as caught:
        run("""
            def test_that_fails_on_one_rank():
                assert 2 * RANK != 2
                COMM.Barrier()
        """)
    text = str(caught.value)
    assert text.startswith("rank 1: ")
    assert "test_that_fails_on_one_rank (call)" in text
    assert "assert (2 * 1) != 2" in text
    assert "DeadlockError: seed 1: " in text
    assert "ranks [0, 2] of (0, 1, 2): Barrier" in text


@pytest.mark.thorough
def test_a_file_of_which_nothing_runs_fails(run):
    with pytest.raises(AssertionError, match="rank 0: pytest ends with 5"):
        run("""
            @pytest.mark.processes
            def test_that_needs_processes():
                pass
        """)
    with pytest.raises(AssertionError, match=r"rank 0: pytest ends with 0, and \{'skipped': 1\}"):
        run("""
            @pytest.mark.mpi(min_size=4)
            def test_of_four_ranks():
                pass
        """)
