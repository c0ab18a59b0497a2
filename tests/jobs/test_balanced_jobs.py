"""Jobs whose ranks differ in speed: shares follow it, and nothing else changes."""

import re
from importlib.util import find_spec

import pytest
from job import RANKED, completed, losses, losses_alone, metrics, summary, train, write_corpus

from mntrain.report import report_command

# A language model whose loss takes longer on rank 1.
SLOW = f"""{RANKED}
class Slow(LanguageModel):
    def loss(self, model, batch):
        time.sleep(0.01 * (SLOWER if RANK == 1 else 1) * len(batch))
        return super().loss(model, batch)
"""
STEPS = ["--train.steps", "25", "--train.eval-every", "0"]
BALANCED = [*STEPS, "--balance.mode", "throughput"]


def train_slow(ranks, folder, *options, slower=5):
    """Train with samples that take 10 ms, and so many times as long on rank 1."""
    (folder / "slow_task.py").write_text(f"SLOWER = {slower}\n{SLOW}")
    return completed(train(ranks, folder, *options, "--task", "slow_task:Slow"))


def expect_losses(folder, expected):
    assert losses(folder) == pytest.approx(expected, rel=2e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(3, ["--zero.stage", "2"], marks=pytest.mark.thorough),
        pytest.param(2, ["--data.workers", "2"], marks=pytest.mark.exhaustive),
    ],
)
def test_a_slow_rank_gets_fewer_samples_and_the_losses_stay(tmp_path, ranks, options):
    result = train_slow(ranks, tmp_path, *BALANCED, *options)
    plans = summary(tmp_path)["shares"]
    assert plans[0]["step"] > 10
    assert all(sum(plan["samples"]) == 8 for plan in plans)
    assert all(plan["samples"][1] < min(plan["samples"][::2]) for plan in plans)
    assert "balance: from step" in result.stdout
    expect_losses(tmp_path, losses_alone(*STEPS))


@pytest.mark.exhaustive
def test_a_slow_rank_is_named_with_its_phase_if_shares_are_equal(tmp_path):
    result = train_slow(2, tmp_path, *STEPS)
    found = summary(tmp_path)["stragglers"]
    assert [(one["rank"], one["phase"]) for one in found] == [(1, "forward")]
    assert found[0]["ratio"] > 1.5
    assert "times as long for a sample as the other ranks (median), mostly in forward" in (
        result.stderr
    )
    assert "--balance.mode throughput would" in result.stderr
    assert "shares" not in summary(tmp_path)
    named = [line.get("slow_ranks") for line in metrics(tmp_path)]
    assert named[-1] == {"1/forward": pytest.approx(found[0]["ratio"], abs=0.01)}
    assert named[0] is None
    if find_spec("matplotlib"):
        assert report_command.run([str(tmp_path / "run")]) == 0
        page = (tmp_path / "run" / "report.html").read_text()
        bars = re.findall(r"fill: (#d62728|#1f77b4)", page.partition("own time for a sample")[2])
        assert bars[:2] == ["#1f77b4", "#d62728"]  # the slow one is red


# Of which the mean of updates is the update by the mean.
PLAIN = ["--optim.name", "SGD", "--optim.max-grad-norm", "none", "--optim.weight-decay", "0"]
NODES = ["--comm.ranks-per-node", "1"]


@pytest.mark.exhaustive
def test_a_slow_node_gets_fewer_samples_and_counts_less_in_an_exchange(tmp_path):
    options = ["--balance.mode", "throughput", "--sync.mode", "local-sgd", "--sync.every", "1"]
    train_slow(2, tmp_path, *STEPS, *PLAIN, *NODES, *options)
    (plan, *_) = summary(tmp_path)["shares"]
    assert plan["samples"][1] < plan["samples"][0]
    found = [line["round_loss"] for line in metrics(tmp_path)]
    expected = losses_alone(*STEPS, *PLAIN)
    assert [*found, losses(tmp_path)[-1]] == pytest.approx(expected, rel=2e-4)


@pytest.mark.exhaustive
def test_nodes_that_do_not_wait_keep_the_shares_of_the_warm_up(tmp_path):
    sync = ["--sync.mode", "local-sgd", "--sync.every", "2", "--sync.warmup", "15"]
    sync += ["--sync.max-staleness", "2", "--balance.mode", "throughput"]
    result = train_slow(2, tmp_path, *STEPS, *NODES, *sync)
    assert "max_staleness=2, weighted=True" in result.stdout
    (plan,) = summary(tmp_path)["shares"]
    assert plan["samples"][1] < plan["samples"][0]
    assert plan["step"] <= 16
    # Of the last step of all: within a few percent of synchronous training.
    assert losses(tmp_path)[-1] == pytest.approx(losses_alone(*STEPS)[-1], rel=0.05)


# SMALL has a batch size, which a cadence does not use: 32 is the default.
CADENCE = ["--train.steps", "24", "--train.eval-every", "0", "--balance.mode", "cadence"]
CADENCE += ["--train.batch-size", "32"]


@pytest.mark.exhaustive
def test_a_slow_rank_ends_with_a_quarter_of_the_micro_batches(tmp_path):
    write_corpus(tmp_path, 3000)
    result = train_slow(2, tmp_path, *CADENCE, "--data.workers", "2", slower=4)
    plans, records = summary(tmp_path)["cadence"], metrics(tmp_path)
    first, last = plans[0], plans[-1]
    assert first == {"step": 1, "anchor": 10, "batch_counts": [10, 10], "overhead": None}
    assert [record["samples"] for record in records[:10]] == [40] * 10
    # They share cores with other jobs, so their speeds are not exactly 4 to 1.
    fast, slow = last["batch_counts"][0], last["batch_counts"][1]
    assert 2.5 <= fast / slow <= 5
    assert 1 <= slow <= 10
    assert last["step"] > 10
    assert records[-1]["samples"] == 2 * sum(last["batch_counts"])
    counts = ", ".join(map(str, last["batch_counts"]))
    assert f"ranks have {counts} micro-batches of 2 samples in a step" in result.stdout
    samples = [rank["samples"] for rank in summary(tmp_path)["ranks"]]
    assert sum(samples) == sum(record["samples"] for record in records)
    assert "balance.mode throughput would" not in result.stderr
