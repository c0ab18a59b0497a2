"""Expected times of the ways in which nodes communicate, against closed forms, and the choice."""

from dataclasses import replace

import pytest

from mntrain.train.sync_choice import (
    INTERVALS,
    OVERLAP,
    SMALL_COLLECTIVES,
    Measurement,
    Situation,
    Volumes,
    choose,
    explain,
    list_candidates,
    to_table,
)

PARAMETERS = 10_000_000
VOLUMES = Volumes(
    gradients=4 * PARAMETERS,
    bf16=2 * PARAMETERS,
    int8=PARAMETERS + PARAMETERS // 64,
    gathered=0,
    exchanged=4 * PARAMETERS,
    streamed=PARAMETERS // 2 + PARAMETERS // 64,
)
SITUATION = Situation(nodes=2, stage=0, volumes=VOLUMES, bucket_bytes=25 << 20, steps=1000)
MEASURED = Measurement(
    computing_s=1.0, backward_s=0.6, micro_batches=1, latency_s=0.0, s_per_byte=1e-9
)


def at(mbit, **changes):
    """The measurement of links of so many Mbit/s."""
    return replace(MEASURED, s_per_byte=8e-6 / mbit, **changes)


def chosen(measured, **changes):
    return str(choose(list_candidates(replace(SITUATION, **changes), measured), measured))


def by_name(measured, **changes):
    return {str(c): c for c in list_candidates(replace(SITUATION, **changes), measured)}


@pytest.mark.parametrize("nodes", [2, 3, 8])
@pytest.mark.parametrize(("stage", "micro_batches"), [(0, 1), (0, 3), (1, 3), (2, 3)])
def test_times_are_those_of_the_bytes_that_the_documentation_states(nodes, stage, micro_batches):
    n, latency_s, s_per_byte, codec_s = PARAMETERS, 0.002, 1e-7, {"bf16": 0.01, "int8": 0.05}
    measured = Measurement(2.0, 0.4, micro_batches, latency_s, s_per_byte, codec_s)
    gathered = 4 * n if stage else 0
    situation = {"nodes": nodes, "stage": stage, "volumes": replace(VOLUMES, gathered=gathered)}
    found = by_name(measured, **situation)
    rounds = 3 if stage == 2 else 1
    reduced = {  # docs/compression.md
        "every-step": (nodes - 1) / nodes * 4 * n,
        "every-step with bf16 gradients": (nodes - 1) / nodes * 2 * n,
        "every-step with int8 gradients": (nodes - 1) * n * 260 / 256,
    }
    buckets = 2  # 40 MB in buckets of 25 MiB
    for name, nbytes in reduced.items():
        if stage == 0 and "int8" not in name:
            nbytes *= 2  # noqa: PLW2901 - an all-reduce is a reduce-scatter and an all-gather
        gather = (nodes - 1) / nodes * gathered
        assert found[name].sent_bytes == pytest.approx(rounds * nbytes + gather)
        sending = rounds * (buckets * latency_s + nbytes * s_per_byte)
        after = gather * s_per_byte + (buckets * latency_s if stage else 0)
        assert found[name].wire_s == pytest.approx(sending + after)
        coding = rounds * codec_s.get(found[name].compress, 0.0)
        exposed = max(0, sending - rounds * OVERLAP * 0.4) + after + coding
        expected = (2.0 + exposed + SMALL_COLLECTIVES * latency_s) / 2.0
        assert found[name].expected == pytest.approx(expected)
    for every in INTERVALS:
        part_s = 2 * latency_s + (nodes - 1) * n * 132 / 256 / 4 * s_per_byte
        streamed = found[f"streaming every {every} steps"]
        assert streamed.sent_bytes == pytest.approx((nodes - 1) * n * 132 / 256 / every)
        assert streamed.exposed_s == pytest.approx((4 * max(0, part_s - 0.5) + 0.05) / every)
        rare = found[f"diloco every {every} steps"]
        exchange = 2 * (nodes - 1) / nodes * 4 * n
        assert rare.sent_bytes == pytest.approx(exchange / every)
        exposed = (buckets * latency_s + exchange * s_per_byte) / every
        expected = (2.0 + exposed + SMALL_COLLECTIVES * latency_s) / 2.0
        assert rare.expected == pytest.approx(expected)


@pytest.mark.parametrize(
    ("mbit", "name"),
    [
        (100_000, "every-step"),
        (1300, "every-step"),  # 0.246 s, of which 0.15 s overlap with backward
        (1200, "every-step with bf16 gradients"),
        (650, "every-step with bf16 gradients"),
        (600, "every-step with int8 gradients"),
        (330, "every-step with int8 gradients"),
        (320, "streaming every 10 steps"),  # a part travels for 32 ms
        (28, "streaming every 10 steps"),  # 0.37 s, of which 0.25 s are hidden
        (27, "streaming every 20 steps"),
        (12, "streaming every 50 steps"),
        (11, "streaming every 100 steps"),
        (2, "streaming every 500 steps"),
        (1, "streaming every 500 steps"),  # nothing is nearly free: the fastest
    ],
)
def test_the_most_exact_way_that_is_nearly_free_is_chosen(mbit, name):
    assert chosen(at(mbit)) == name


def test_slower_links_never_give_a_more_exact_way():
    names = [str(c) for c in list_candidates(SITUATION, MEASURED)]
    ranks = [names.index(chosen(at(10 ** (6 - step / 20)))) for step in range(140)]
    assert ranks == sorted(ranks)
    assert (ranks[0], names[ranks[-1]]) == (0, "streaming every 500 steps")


def test_encoding_counts_in_full():
    slow = {"bf16": 0.02, "int8": 0.2}
    assert chosen(at(600)) == "every-step with int8 gradients"
    assert chosen(at(600, codec_s=slow)) == "streaming every 10 steps"
    assert chosen(at(600, codec_s={"bf16": 0.02, "int8": 0.8})) == "streaming every 20 steps"


def test_the_latency_of_what_every_way_sends_decides_nothing_but_is_expected():
    measured = at(100_000, latency_s=0.5, backward_s=4.0)
    first = by_name(measured)["every-step"]
    assert first.exposed_s == pytest.approx(2 * 0.5 + 0.0032 - 1.0)  # two buckets behind backward
    assert chosen(measured) == "every-step"
    assert first.expected == pytest.approx(1 + 0.0032 + 1.0)


def test_codes_that_take_more_bytes_than_sums_are_not_chosen():
    few, many = (by_name(at(100), nodes=nodes) for nodes in (7, 9))
    plain, coded = "every-step", "every-step with int8 gradients"
    assert few[coded].sent_bytes < few[plain].sent_bytes
    assert many[coded].sent_bytes > many[plain].sent_bytes
    excluded = {"rare": "reason", "bf16": "reason"}
    assert chosen(at(100), nodes=7, excluded=excluded) == coded
    assert chosen(at(100), nodes=9, excluded=excluded) == plain


def test_an_interval_of_the_user_is_the_only_one_and_may_exceed_the_run():
    assert chosen(at(100), every=7) == "streaming every 7 steps"
    assert chosen(at(100), every=1) == "every-step with int8 gradients"  # faster than every step
    assert chosen(at(100), every=5000) == "streaming every 5000 steps"
    assert chosen(at(100_000), every=5000) == "every-step"
    assert [c.every for c in list_candidates(replace(SITUATION, every=7), MEASURED)][3:] == [7, 7]


def test_an_exchange_needs_as_many_steps_as_it_travels():
    alone = by_name(at(100), every=1)["streaming every 1 step"]
    assert alone.excluded == "an exchange travels for 1 step, so they need at least 2"
    assert not by_name(at(100), every=2)["streaming every 2 steps"].excluded


def test_on_many_nodes_codes_take_more_bytes_than_sums():
    assert chosen(at(1), nodes=8) == "streaming every 500 steps"
    assert chosen(at(1), nodes=64) == "diloco every 500 steps"


def test_intervals_longer_than_the_run_are_excluded():
    rows = by_name(at(1), steps=60)
    assert chosen(at(1), steps=60) == "streaming every 50 steps"
    for mode in ("streaming", "diloco"):
        assert rows[f"{mode} every 100 steps"].excluded == "the run has 60 steps left"
    assert not rows["diloco every 50 steps"].excluded
    assert chosen(at(1), steps=9) == "every-step with int8 gradients"


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("warmup", [1, 250, 1000, 3000])
def test_the_steps_of_a_warm_up_cost_what_every_step_costs(stage, warmup):
    volumes = replace(VOLUMES, gathered=4 * PARAMETERS if stage else 0)
    situation = {"stage": stage, "volumes": volumes}
    without = by_name(at(100, latency_s=0.001), **situation)
    found = by_name(at(100, latency_s=0.001), warmup=warmup, **situation)
    part = min(1.0, warmup / 1000)
    for name in ("streaming every 20 steps", "diloco every 20 steps"):
        for field in ("sent_bytes", "wire_s", "exposed_s", "expected"):
            plain, rare = (getattr(without[of], field) for of in ("every-step", name))
            expected = part * plain + (1 - part) * rare
            assert getattr(found[name], field) == pytest.approx(expected)
    for name in ("every-step", "every-step with int8 gradients"):
        assert found[name] == without[name]


def test_an_interval_is_compared_with_the_steps_after_the_warm_up():
    rows = by_name(at(1), steps=60, warmup=30)
    for mode in ("streaming", "diloco"):
        reason = "the run has 30 steps left after the warm-up"
        assert rows[f"{mode} every 50 steps"].excluded == reason
        assert not rows[f"{mode} every 20 steps"].excluded
    assert chosen(at(1), steps=60, warmup=55) == "every-step with int8 gradients"
    over = by_name(at(1), steps=60, warmup=70)["diloco every 10 steps"]
    assert over.excluded == "the run has 0 steps left after the warm-up"


@pytest.mark.parametrize(("stage", "times"), [(0, 4), (1, 1), (2, 1)])
def test_each_rank_of_a_node_encodes_all_that_streaming_sends_at_stage_0(stage, times):
    measured = at(1e6, codec_s={"int8": 0.05})
    streamed = by_name(measured, stage=stage, ranks_per_node=4)["streaming every 10 steps"]
    assert streamed.exposed_s == pytest.approx(times * 0.05 / 10)


def test_what_is_excluded_is_not_chosen_and_says_why():
    reason = "the nodes have 2+1 ranks"
    assert chosen(at(1), excluded={"rare": reason}) == "every-step with int8 gradients"
    rows = by_name(at(1), excluded={"rare": reason})
    assert {c.excluded for c in rows.values() if c.every is not None} == {reason}
    assert chosen(at(650), excluded={"bf16": "16 bits"}) == "every-step with int8 gradients"


def test_the_reason_is_one_sentence_that_names_an_approximation():
    candidates = list_candidates(SITUATION, at(100))
    choice = choose(candidates, at(100))
    assert explain(choice, candidates[0], at(100)) == (
        "1.0 s of computing a step, 3.2 s for its gradients between nodes (100 Mbit/s): "
        "streaming every 10 steps, expected 1.00 x computing; this approximates synchronous "
        "training, and its effect on the loss is not measured"
    )
    fast = at(100_000, computing_s=0.01)
    assert explain(candidates[0], candidates[0], fast).startswith(
        "10 ms of computing a step, 3.2 s for its gradients between nodes (100.0 Gbit/s): every-st"
    )
    assert "approximates" not in explain(candidates[0], candidates[0], fast)
    assert "gradients are rounded" in explain(candidates[2], candidates[0], at(500))


def test_the_table_has_a_row_for_each_candidate_and_one_choice():
    candidates = list_candidates(SITUATION, at(100))
    rows = to_table(candidates, candidates[4])
    assert [row["name"] for row in rows] == [*map(str, candidates)]
    assert [row["chosen"] for row in rows].index(True) == 4
    assert sum(row["chosen"] for row in rows) == 1
    assert rows[4]["mode"] == "diloco"
    assert rows[4]["every"] == 10
