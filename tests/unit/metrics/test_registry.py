"""Declared metrics: how their values are formatted, and where they are shown."""

import math
from dataclasses import fields

import pytest
from reports import record, skipped

from mntrain.metrics.registry import (
    METRICS,
    PHASES,
    StepRecord,
    clock_text,
    count_text,
    short_time,
    size_text,
)


def test_every_field_of_a_record_is_a_declared_metric():
    assert list(METRICS) == [field.name for field in fields(StepRecord)]
    assert all(metric.label for metric in METRICS.values())


def test_phases_are_declared_in_order():
    assert PHASES == ("data", "forward", "backward", "reduce_wait", "optimizer")


def test_each_row_shows_the_metrics_that_declare_it():
    complete = record(1, metrics={"accuracy": 0.5}, eval_loss=2.31, eval_metrics={"top5": 0.93})
    assert complete.pairs("line") == [("loss", "2.4312"), ("lr", "2.9e-03"), ("norm", "0.81")]
    assert complete.pairs("losses") == [("loss", "2.4312"), ("accuracy", "0.5")]
    rates = [("lr", "2.9e-03"), ("norm", "0.81"), ("clip", "1.00")]
    assert complete.pairs("rates") == rates
    assert complete.pairs("evaluation") == [("eval loss", "2.3100"), ("top5", "0.93")]


def test_absent_values_are_not_shown():
    assert record(1).pairs("evaluation") == []
    assert skipped(2).pairs("rates") == [("lr", "2.9e-03"), ("skipped", "gradient not finite")]


def test_keys_of_the_summary_are_unique():
    keys = [metric.summary for metric in METRICS.values() if metric.summary]
    assert len(keys) == len(set(keys))
    assert {"final_loss", "eval_loss", "eval_metrics"} <= set(keys)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (7, "7"),
        (3.7, "3.70"),
        (812, "812"),
        (999.7, "1.00k"),
        (12_345, "12.3k"),
        (99_960, "100k"),
        (1_200_000, "1.20M"),
        (math.nan, "nan"),
    ],
)
def test_count(value, text):
    assert count_text(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (512, "512 B"), (1023, "1.00 KiB"), (5 * 2**18, "1.25 MiB"), (2**60, "1024 PiB")],
)
def test_bytes(value, text):
    assert size_text(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (66.6, "1:07"), (3599.6, "1:00:00"), (43267, "12:01:07"), (360000, "100:00:00")],
)
def test_clock(seconds, text):
    assert clock_text(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 us"),
        (2.13e-5, "21.3 us"),
        (0.01234, "12.3 ms"),
        (0.42, "0.42 s"),
        (75.0, "75.00 s"),
    ],
)
def test_short_time(seconds, text):
    assert short_time(seconds) == text
