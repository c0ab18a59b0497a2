"""Options of shares by speed, and what is refused."""

import pytest

from mntrain.balance_config import BalanceConfig
from mntrain.config import Config, TrainConfig
from mntrain.sync import SyncConfig
from mntrain.train.hardware import Speeds
from mntrain.train.job_data import Refusal, choose_shares, most_samples, refusal_of_shares
from mntrain.zero_config import ZeroConfig

EQUAL = [1e9] * 4
STREAM = Refusal("the training data is a stream", "leave it out")
THROUGHPUT = BalanceConfig(mode="throughput")


def test_speeds_are_by_rank():
    config = BalanceConfig(mode="throughput", speed=("3:0.5", "0:2"))
    assert config.speeds == {3: 0.5, 0: 2.0}
    assert BalanceConfig().speeds == {}


@pytest.mark.parametrize(
    ("speed", "message"),
    [
        (("3",), r"RANK:RATIO with a ratio above 0, such as 3:0.5 \('3' is not\)"),
        (("3:x",), "such as 3:0.5"),
        (("3:0",), "above 0"),
        (("-1:2",), "RANK:RATIO"),
        (("3:inf",), "above 0"),
        (("3:nan",), "above 0"),
        (("1:2", "1:3"), "rank 1 is there twice"),
    ],
)
def test_wrong_speeds_are_refused(speed, message):
    with pytest.raises(ValueError, match=message):
        BalanceConfig(mode="throughput", speed=speed)


@pytest.mark.parametrize("mode", ["off", "auto"])
def test_speeds_without_a_use_are_refused(mode):
    with pytest.raises(ValueError, match=rf"has no effect in --balance\.mode {mode}"):
        BalanceConfig(mode=mode, speed=("1:2",))


def test_shares_are_made_for_several_ranks():
    config = Config(balance=THROUGHPUT)
    shares = choose_shares(config, Speeds(EQUAL), None, 1.0)
    assert shares is not None
    assert shares.counts(32) == [8] * 4
    assert not shares.planned
    assert choose_shares(config, Speeds([1e9]), None, 1.0) is None
    assert choose_shares(Config(), Speeds(EQUAL), STREAM, 1.0) is None


def test_shares_by_speed_are_chosen_if_ranks_are_unequal():
    config = Config(balance=BalanceConfig(mode="auto"))
    speeds = Speeds([4e9, 2e9, 1e9, 1e9])
    shares = choose_shares(config, speeds, None, 2.0)
    assert shares is not None
    assert shares.planned
    assert shares.counts(32) == [16, 8, 4, 4]
    assert choose_shares(config, speeds, None, 1.1) is None
    assert choose_shares(config, speeds, STREAM, 2.0) is None


def test_the_share_of_a_rank_is_limited_at_stage_2():
    assert most_samples(Config(), 4) is None
    assert most_samples(Config(zero=ZeroConfig(stage=2)), 4) == 8  # 32 samples, in parts of 8
    config = Config(zero=ZeroConfig(stage=2), train=TrainConfig(batch_size=36))
    assert most_samples(config, 4) == 16


@pytest.mark.parametrize("sync", [SyncConfig(mode="diloco", every=5), SyncConfig(mode="auto")])
def test_nodes_may_be_meant_to_train_alone_if_there_is_one(sync):
    config = Config(balance=THROUGHPUT, sync=sync)
    assert refusal_of_shares(config, 4, nodes=1, stream=False) is None


@pytest.mark.parametrize(
    ("config", "stream", "message"),
    [
        (Config(balance=THROUGHPUT), True, "IterableDataset, whose samples are divided equally"),
        (
            Config(balance=THROUGHPUT, sync=SyncConfig(mode="diloco", every=5)),
            False,
            "with --sync.mode diloco, nodes may train alone, and each counts the same",
        ),
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
    refusal = refusal_of_shares(config, 4, nodes=2, stream=stream)
    with pytest.raises(ValueError, match=message):
        choose_shares(config, Speeds(EQUAL), refusal, 1.0)
