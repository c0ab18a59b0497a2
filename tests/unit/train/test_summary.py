"""The counters of a job."""

from mntrain.train.summary import JobResult


def test_rate_leaves_out_the_first_steps_and_single_slow_ones():
    result = JobResult(flops_per_item=None, skipped_steps=2)
    assert result.items_per_s == 0.0
    result.add(100, 50.0, skipped=True)
    assert result.items_per_s == 2.0
    for seconds in (20.0, 10.0, 1.0, 1.0, 30.0, 1.0):
        result.add(100, seconds, skipped=False)
    assert result.items_per_s == 100.0
    assert (result.items, result.skipped_steps) == (700, 3)
