"""Declared metrics: how their values are formatted, and where they are shown."""

import math
from dataclasses import fields

import pytest
from reports import record, skipped

from mntrain.metrics.registry import METRICS, StepRecord, count_text, short_time


def test_every_field_of_a_record_is_a_declared_metric():
    assert list(METRICS) == [field.name for field in fields(StepRecord)]
    assert all(metric.label for metric in METRICS.values())


def test_each_row_shows_the_metrics_that_declare_it():
    complete = record(1, metrics={"accuracy": 0.5}, eval_loss=2.31, eval_metrics={"top5": 0.93})
    line = [("loss", "2.4312"), ("accuracy", "0.5"), ("lr", "2.9e-03"), ("norm", "0.81")]
    assert complete.pairs("line") == line
    assert complete.pairs("evaluation") == [("eval loss", "2.3100"), ("top5", "0.93")]
    assert record(1).pairs("evaluation") == []  # absent values are not shown
    assert skipped(2).pairs("line") == [line[0], line[2]]


def test_keys_of_the_summary_are_unique():
    keys = [metric.summary for metric in METRICS.values() if metric.summary]
    assert len(keys) == len(set(keys))
    assert {"final_loss", "eval_loss", "eval_metrics"} <= set(keys)


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (METRICS["loss"].format, math.nan, "nan"),
        (METRICS["loss"].format, 1e-7, "1.0000e-07"),
        (METRICS["loss"].format, 12.5, "12.500"),
        (count_text, 0, "0"),
        (count_text, 3.71234, "3.71"),
        (count_text, 812, "812"),
        (count_text, 1.2e6, "1,200,000"),
        (short_time, 0.0, "0 us"),
        (short_time, 2.13e-5, "21.3 us"),
        (short_time, 0.01234, "12.3 ms"),
        (short_time, 0.42, "0.42 s"),
        (short_time, 75.0, "75.00 s"),
    ],
)
def test_numbers_are_short(function, value, text):
    assert function(value) == text
