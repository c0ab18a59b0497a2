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
def test_what_fails_on_one_node_ends_the_job_and_names_the_rank(folder):
    nodes = ["--comm.ranks-per-node", "1", "--task", "own:NotANumber"]
    result = train(2, folder, *STALE, *EVALUATED, *nodes)
    said = "NonFiniteReplicaError: in step 2, the loss is nan on rank 1"
    assert result.returncode not in (0, 75), result.report()
    assert "rank 1 of 2 on" in result.stderr
    assert said in result.stderr
    assert "rank 0 of 2 on" not in result.stderr
    ended = summary(folder)
    assert ended["status"] == "crashed"
    assert said in ended["reason"]
    assert ended["reason"].startswith("rank 1 on ")
