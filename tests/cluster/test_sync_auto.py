"""Jobs with --sync.mode auto on emulated nodes, whose links are faster or slower than computing."""

import pytest
from job import completed, configuration, metrics, summary, train, write_corpus

pytestmark = [pytest.mark.cluster, pytest.mark.thorough, pytest.mark.timeout(330)]

# A step computes for about 0.25 s on two cores, and its gradients have 164 KB: 1.3 s at 1 Mbit/s.
STEPS = 12
OPTIONS = [
    *("--train.batch-size", "320", "--train.micro-batch-size", "80", "--train.steps", str(STEPS)),
    *("--sync.mode", "auto"),
]


@pytest.mark.parametrize(
    ("link", "mode", "stage"),
    [
        (None, "every-step", 1),
        pytest.param("1gbit", "every-step", 0, marks=pytest.mark.exhaustive),
        ("1mbit", "streaming", 0),
        pytest.param("1mbit", "streaming", 1, marks=pytest.mark.exhaustive),
    ],
)
def test_the_speed_of_the_links_decides(make_cluster, tmp_path, link, mode, stage):
    write_corpus(tmp_path, windows=1000)
    with make_cluster(ranks=(1, 1), link=link) as cluster:
        options = [*OPTIONS, "--zero.stage", str(stage)]
        result = completed(train(2, tmp_path, *options, timeout=300, cluster=cluster))
    found = summary(tmp_path)["sync_auto"]
    assert f"sync auto: {found['why']}" in " ".join(result.stdout.split())
    chosen = [row for row in found["candidates"] if row["chosen"]]
    assert [row["mode"] for row in chosen] == [configuration(tmp_path)["sync"]["mode"]] == [mode]
    assert len(metrics(tmp_path)) == STEPS
    mbit = 8e-6 / found["seconds"]["s_per_byte"]
    if link == "1mbit":
        assert 0.1 < mbit < 3  # what passes at once, and the first repetition, count a little
        assert chosen[0]["every"] == 10  # the run has 12 steps
        assert "approximates synchronous training" in found["why"]
    else:
        assert mbit > 20
