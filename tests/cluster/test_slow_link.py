"""A link that becomes slow while a job trains is named, and so is its recovery."""

import re

import pytest
from job import completed, metrics, summary, train

pytestmark = pytest.mark.cluster

# Samples take 50 ms. Node n2, whose rank is 1, shapes what it sends: from steps on, to rates.
THROTTLED = """
import os, subprocess, time
from mntrain.tasks.lm import LanguageModel

RANK = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
SHAPE = "tc qdisc change dev eth0 root tbf rate {} burst 16kb latency 50ms"

class Throttled(LanguageModel):
    def loss(self, model, batch):
        time.sleep(0.05 * len(batch))
        return super().loss(model, batch)
    def on_step(self, record):
        rate = {25: "8mbit", 55: "1gbit"}.get(record.step)
        if RANK == 1 and rate:
            subprocess.run(SHAPE.format(rate).split(), check=True)
"""


@pytest.mark.thorough
@pytest.mark.timeout(240)
def test_a_link_that_becomes_slow_is_named_until_it_recovers(make_cluster, tmp_path):
    (tmp_path / "throttled.py").write_text(THROTTLED)
    options = ["--train.steps", "90", "--train.eval-every", "0", "--task", "throttled:Throttled"]
    with make_cluster(ranks=(1, 1, 1), link="1gbit") as cluster:
        result = completed(train(3, tmp_path, *options, timeout=200, cluster=cluster))
    (found,) = summary(tmp_path)["stragglers"]
    assert (found["rank"], found["phase"]) == (1, "communication")
    assert found["ratio"] > 1.5
    assert found["since"] <= 31
    assert 50 <= found["until"] <= 70
    named = r"communication takes .* times as long as before: the link of node 1 \(n2\) carries"
    assert len(re.findall(named, result.stderr)) == 1, result.report()
    assert "communication is no longer slow after step" in result.stdout
    slow = [
        line["step"]
        for line in metrics(tmp_path)
        if "1/communication" in line.get("slow_ranks", {})
    ]
    assert 40 <= slow[0] <= 50
