"""Options of shares by speed, and what is refused."""

import pytest

from mntrain.balance_config import BalanceConfig
from mntrain.config import Config, TrainConfig, ZeroConfig
from mntrain.sync import SyncConfig
from mntrain.train.job_data import (
    choose_cadence,
    choose_shares,
    measures_speeds,
    most_samples,
    refusal_of_balance,
)

THROUGHPUT = BalanceConfig(mode="throughput")
CADENCE = BalanceConfig(mode="cadence", speed=("2:4",))
NO_EFFECT, BALANCED = r"has no effect in --balance\.mode", ("off", "throughput")


@pytest.mark.parametrize(
    ("speed", "message"),
    [
        (("3",), r"RANK:RATIO with a ratio above 0, such as 3:0.5 \('3' is not\)"),
        (("3:x",), "such as 3:0.5"),
        *(((wrong,), "above 0") for wrong in ("3:0", "3:inf", "3:nan", "-1:2")),
        (("1:2", "1:3"), "rank 1 is there twice"),
    ],
)
def test_wrong_speeds_are_refused(speed, message):
    with pytest.raises(ValueError, match=message):
        BalanceConfig(mode="throughput", speed=speed)
    speeds = BalanceConfig(mode="throughput", speed=("3:0.5", "0:2")).speeds
    assert (speeds, BalanceConfig().speeds) == ({3: 0.5, 0: 2.0}, {})


@pytest.mark.parametrize(
    ("mode", "option", "value", "message"),
    [
        *(("cadence", "overhead_target", wrong, "") for wrong in (0.009, 0.51, float("nan"))),
        *(("cadence", "max_rank_grad_norm", wrong, "") for wrong in (0.0, float("nan"))),
        ("cadence", "max_anchor", -1, ""),
        ("fast", "mode", "fast", ""),
        *((mode, "max_anchor", 5, f"max-anchor 5.*{NO_EFFECT} {mode}") for mode in BALANCED),
        *((mode, "overhead_target", 0.2, f"target 0.*{NO_EFFECT} {mode}") for mode in BALANCED),
        ("off", "speed", ("1:2",), f"{NO_EFFECT} off"),
        ("off", "max_rank_grad_norm", 1.0, r"give --balance\.mode throughput or cadence, or leave"),
    ],
)
def test_wrong_options_and_those_without_a_use_are_refused(mode, option, value, message):
    with pytest.raises(ValueError, match=message or option):
        BalanceConfig(**{"mode": mode, option: value})
    for target in (0.01, 0.5):
        BalanceConfig(mode="cadence", overhead_target=target, max_anchor=0)


def test_shares_are_made_for_several_ranks():
    config = Config(balance=THROUGHPUT)
    shares = choose_shares(config, 4, stream=False)
    assert shares is not None
    assert shares.counts(32) == [8] * 4
    assert not shares.planned
    hinted = Config(balance=BalanceConfig(mode="throughput", speed=("0:2",)))
    assert choose_shares(hinted, 3, stream=False).counts(32) == [16, 8, 8]
    assert choose_shares(config, 1, stream=False) is None
    assert choose_shares(Config(), 4, stream=True) is None
    rarely = Config(balance=THROUGHPUT, sync=SyncConfig(mode="diloco", every=5))
    assert refusal_of_balance(rarely, 4, stream=False) == ""


def test_at_stage_2_the_share_of_a_rank_is_limited_and_it_cannot_clip_its_gradients():
    assert most_samples(Config(), 4) is None
    assert most_samples(Config(zero=ZeroConfig(stage=2)), 4) == 8  # 32 samples, in parts of 8
    config = Config(zero=ZeroConfig(stage=2), train=TrainConfig(batch_size=36))
    assert most_samples(config, 4) == 16
    balance = BalanceConfig(mode="throughput", max_rank_grad_norm=0.5)
    choose_shares(Config(balance=balance, zero=ZeroConfig(stage=1)), 4, stream=False)
    with pytest.raises(ValueError, match=r"--balance\.max-rank-grad-norm 0\.5: at --zero\.stage 2"):
        choose_shares(Config(balance=balance, zero=ZeroConfig(stage=2)), 4, stream=False)


def test_a_cadence_is_made_from_the_options():
    config = Config(balance=CADENCE, train=TrainConfig(micro_batch_size=4))
    assert choose_shares(config, 40, stream=False) is None  # of 32 samples in a batch
    cadence = choose_cadence(config, 3, 10**4, 7)
    assert cadence is not None
    assert cadence.latest == (7, 10, (10, 10, 40), None)
    assert cadence.micro_batch == 4
    assert choose_cadence(Config(balance=THROUGHPUT), 3, 10**4, 7) is None
    with pytest.raises(ValueError, match=r"--balance\.speed 2:4: speed 4 is of rank 2"):
        choose_shares(config, 2, stream=False)


@pytest.mark.parametrize(
    ("config", "stream", "message"),
    [
        (Config(balance=CADENCE), True, "cadence: the training data is an IterableDataset"),
        (
            Config(balance=CADENCE, sync=SyncConfig("local-sgd", 5)),
            False,
            "--balance.mode cadence: --sync.mode local-sgd exchanges parameters every few steps",
        ),
        (
            Config(balance=CADENCE, train=TrainConfig(batch_size=64)),
            False,
            "--train.batch-size 64 is not used, .*; leave it out, and give --train.micro-batch",
        ),
        (Config(balance=THROUGHPUT), True, "IterableDataset, whose samples are divided equally"),
        (
            Config(balance=THROUGHPUT, train=TrainConfig(batch_size=3)),
            False,
            "--train.batch-size 3 has no sample for each of the 4 ranks; give at least 4",
        ),
        (
            Config(balance=BalanceConfig(mode="throughput", speed=("4:2",))),
            False,
            "--balance.speed 4:2: speed 2 is of rank 4: give ranks from 0 to 3",
        ),
    ],
)
def test_what_cannot_be_balanced_is_refused(config, stream, message):
    with pytest.raises(ValueError, match=message):
        choose_shares(config, 4, stream=stream)


@pytest.mark.parametrize(
    ("warmup", "done", "nodes", "measured"),
    [(10, 0, 2, True), (9, 0, 2, False), (20, 15, 2, False), (0, 0, 1, True)],
)
def test_nodes_that_do_not_wait_compare_speeds_in_the_warm_up_or_not_at_all(
    warmup, done, nodes, measured
):
    sync = SyncConfig("local-sgd", every=5, warmup=warmup, max_staleness=1)
    config = Config(balance=THROUGHPUT, sync=sync)
    assert measures_speeds(config, nodes, done) == measured
    assert measures_speeds(Config(balance=THROUGHPUT), nodes, done)
