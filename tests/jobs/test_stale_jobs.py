"""Jobs whose nodes do not wait for each other within a bound: their ends, and how they go on."""

import pytest
from job import LATE, completed, metrics, summary, train, write_corpus

TASKS = (
    LATE
    + """
class Preempted(Late):
    def broken(self, model, batch):
        os.kill(os.getpid(), signal.SIGTERM)
        return LanguageModel.loss(self, model, batch)

class NotANumber(Late):
    def broken(self, model, batch):
        loss = LanguageModel.loss(self, model, batch)
        return Loss(loss.mean * float("nan"), loss.count)
"""
)
STALE = ["--sync.mode", "diloco", "--sync.every", "5", "--sync.max-staleness", "2"]
EVALUATED = ["--train.steps", "30", "--train.eval-every", "12"]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "own.py").write_text(TASKS)
    write_corpus(tmp_path, windows=200)
    return tmp_path


@pytest.mark.exhaustive
def test_a_job_that_a_scheduler_ends_goes_on_and_has_the_record_of_every_step(folder):
    nodes = ["--comm.ranks-per-node", "2", "--zero.stage", "2"]
    options = [*STALE, *EVALUATED, *nodes, "--task", "own:Preempted"]
    ended = train(4, folder, *options)
    assert ended.returncode == 75, ended.report()
    # The signal arrives in one of the first steps, and counts at the next point where all meet.
    assert [line["step"] for line in metrics(folder)] == [*range(1, 13)]
    assert summary(folder)["reason"] == "SIGTERM on rank 1"
    completed(train(4, folder, *options, env={"FIXED": "1"}))
    lines = metrics(folder)
    assert [line["step"] for line in lines] == [*range(1, 31)]
    assert [line["step"] for line in lines if "eval_loss" in line] == [12, 24, 30]
    assert lines[-1]["loss"] < 0.8 * lines[0]["loss"]
    assert lines[-1]["eval_loss"] < 0.8 * lines[0]["loss"]
    assert summary(folder)["final_loss"] == lines[-1]["loss"]


@pytest.mark.exhaustive
def test_a_loss_of_one_node_that_is_not_finite_ends_the_job_with_one_error(folder):
    nodes = ["--comm.ranks-per-node", "1", "--task", "own:NotANumber"]
    result = train(2, folder, *STALE, *EVALUATED, *nodes)
    # All ranks meet for the evaluation after step 12, before its round has to have arrived.
    said = (
        "in step 12, a gradient or loss since the last exchange is not finite on rank 1 of node 1"
    )
    assert result.returncode == 1, result.report()
    assert "UserWarning: in step 2, the loss is nan on rank 1: the next exchange" in result.stderr
    assert result.stderr.count(f"mntrain: error: {said}") == 1
    ended = summary(folder)
    assert ended["status"] == "failed"
    assert ended["error"] == said
