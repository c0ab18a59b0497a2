"""Options of shares by speed, and what is refused."""

import pytest

from mntrain.balance_config import BalanceConfig
from mntrain.config import Config, TrainConfig
from mntrain.sync import SyncConfig
from mntrain.train.job_data import choose_shares

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


def test_speeds_without_a_mode_are_refused():
    with pytest.raises(ValueError, match=r"has no effect in --balance\.mode off"):
        BalanceConfig(speed=("1:2",))


def test_shares_are_made_for_several_ranks():
    config = Config(balance=THROUGHPUT)
    shares = choose_shares(config, 4, stream=False)
    assert shares is not None
    assert shares.counts(32) == [8] * 4
    assert choose_shares(config, 1, stream=False) is None
    assert choose_shares(Config(), 4, stream=True) is None


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
    with pytest.raises(ValueError, match=message):
        choose_shares(config, 4, stream=stream)
