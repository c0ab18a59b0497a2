"""Options of shares by speed, and what is refused."""

import pytest

from mntrain.options.balance import BalanceConfig
from mntrain.options.config import Config, TrainConfig, ZeroConfig
from mntrain.sync import SyncConfig
from mntrain.train.job_data import choose_division

THROUGHPUT = BalanceConfig(mode="throughput")
CADENCE = BalanceConfig(mode="cadence", speed=("2:4",))
NO_EFFECT, BALANCED = r"has no effect in --balance\.mode", ("off", "throughput")


@pytest.mark.parametrize(
    ("mode", "option", "value", "message"),
    [
        *(("cadence", "overhead_target", wrong, "") for wrong in (0.009, 0.51, float("nan"))),
        *(("cadence", "max_rank_grad_norm", wrong, "") for wrong in (0.0, float("nan"))),
        ("cadence", "max_anchor", -1, ""),
        ("cadence", "speed", ("3",), "must be RANK:RATIO with a ratio above 0, such as 3:0.5"),
        *(
            ("cadence", "speed", (wrong,), f"above 0, .* \\('{wrong}' is not")
            for wrong in ("3:x", "3:0", "3:inf", "3:nan", "-1:2")
        ),
        ("cadence", "speed", ("1:2", "1:3"), "rank 1 is there twice"),
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
    speeds = BalanceConfig(mode="throughput", speed=("3:0.5", "0:2")).speeds
    assert (speeds, BalanceConfig().speeds) == ({3: 0.5, 0: 2.0}, {})


def counts(shares):
    return shares.counts(shares.revisions[-1])


def test_shares_are_made_for_several_ranks():
    config = Config(balance=THROUGHPUT)
    shares = choose_division(config, 4, 99)
    assert counts(shares) == [8] * 4
    assert shares.entry(shares.revisions[0]) is None
    hinted = Config(balance=BalanceConfig(mode="throughput", speed=("0:2",)))
    assert counts(choose_division(hinted, 3, 99)) == [16, 8, 8]
    assert choose_division(config, 1, 99) is None
    assert choose_division(Config(), 4, None) is None
    clips = BalanceConfig(mode="throughput", max_rank_grad_norm=0.5)
    assert choose_division(Config(balance=clips, zero=ZeroConfig(stage=1)), 4, 99) is not None
    rarely = Config(balance=THROUGHPUT, sync=SyncConfig(mode="diloco", every=5))
    assert choose_division(rarely, 4, 99) is not None


@pytest.mark.parametrize(("stage", "batch_size", "fast"), [(1, 32, 29), (2, 32, 8), (2, 36, 16)])
def test_at_stage_2_the_share_of_a_rank_is_limited(stage, batch_size, fast):
    """To as many micro-batches of 8 samples as there are with equal shares."""
    balance = BalanceConfig(mode="throughput", speed=("0:99",))
    zero, train = ZeroConfig(stage=stage), TrainConfig(batch_size=batch_size)
    assert (
        counts(choose_division(Config(balance=balance, zero=zero, train=train), 4, 99))[0] == fast
    )


def test_a_cadence_is_made_from_the_options():
    config = Config(balance=CADENCE, train=TrainConfig(micro_batch_size=4))
    cadence = choose_division(config, 3, 10**4, 7)
    assert cadence.latest == ((0, 7), 10, (10, 10, 40), None)
    assert cadence.micro_batch == 4
    assert choose_division(config, 40, 10**4) is not None  # of 32 samples in a batch


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
            Config(
                balance=BalanceConfig(mode="throughput", max_rank_grad_norm=0.5),
                zero=ZeroConfig(stage=2),
            ),
            False,
            "--balance.max-rank-grad-norm 0.5: at --zero.stage 2",
        ),
        (
            Config(balance=BalanceConfig(mode="throughput", speed=("4:2",))),
            False,
            "--balance.speed 4:2: there is no rank 4; give ranks from 0 to 3",
        ),
    ],
)
def test_what_cannot_be_balanced_is_refused(config, stream, message):
    with pytest.raises(ValueError, match=message):
        choose_division(config, 4, None if stream else 99)
