"""Copies of metrics.jsonl in MLflow and for Prometheus, read by these tools' own readers."""

import math
import os
from pathlib import Path

import pytest
from reports import line, write

from mntrain.metrics import copies
from mntrain.metrics.files import flatten
from mntrain.metrics.writers import MetricsFiles
from mntrain.options.config import LogConfig
from mntrain.run.directory import rewind

MLFLOW, PROMETHEUS = LogConfig(mlflow="digits & <b>"), LogConfig(prometheus=True)


@pytest.fixture(params=["file", pytest.param("sqlite", marks=pytest.mark.exhaustive)])
def store(request, tmp_path, monkeypatch):
    """MLflow's client of a store on this machine."""
    pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)  # the default store is here
    for name in copies._MLFLOW_ENVIRONMENT:
        monkeypatch.setenv(name, os.environ.get(name, ""))  # restored afterwards
        monkeypatch.delenv(name)
    if request.param == "file":
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/mlruns")
    else:
        pytest.importorskip("sqlalchemy")
        monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return copies._load("mlflow").MlflowClient()


def runs(client) -> list:
    experiment = client.get_experiment_by_name("digits & <b>")
    found = client.search_runs([experiment.experiment_id])
    return sorted(found, key=lambda run: run.info.start_time)


def history(client, run, name: str) -> list[tuple[int, float]]:
    return [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)]


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")  # of MLflow and SQLAlchemy
def test_a_resumed_run_is_one_run_of_mlflow_with_every_step_once(tmp_path, store):
    folder = tmp_path / "run-7"
    folder.mkdir()
    (folder / "config.toml").write_text('task = "lm"\n[optim]\nlr = 0.5\n')
    lines = [line(step, metrics={"top 5%": step / 7}) for step in range(1, 7)]
    write(folder, LogConfig(), lines[0])  # a job without MLflow
    assert write(folder, MLFLOW, *lines[1:4], succeeded=False) == []
    [run] = runs(store)
    assert (run.info.run_name, run.info.status) == ("run-7", "FAILED")
    assert run.data.params == {"task": "lm", "optim.lr": "0.5"}
    rewind(folder, 2)
    (folder / "config.toml").write_text('task = "lm"\nnew = true\n')
    again = {"step": 4, "error": "stopped", "loss": math.nan}
    assert write(folder, MLFLOW, lines[2], again, line(5, loss=math.nan), lines[5]) == []
    [run] = runs(store)
    assert run.info.status == "FINISHED"
    assert run.data.params == {"task": "lm", "optim.lr": "0.5", "new": "true"}
    losses = history(store, run, "loss")
    assert [step for step, _ in losses] == [1, 2, 3, 4, 5, 6]
    assert [math.isnan(loss) for _, loss in losses] == [False] * 4 + [True, False]
    assert history(store, run, "metrics/top 5_") == [
        (step, pytest.approx(step / 7)) for step in (1, 2, 3, 4, 6)
    ]
    assert run.data.metrics.keys() == {*flatten(line(1)), "metrics/top 5_"} - {"step"}
    rewind(folder, 0)
    assert write(folder, MLFLOW, lines[0]) == []
    assert [one.info.run_id == run.info.run_id for one in runs(store)] == [True, False]


def samples(folder: Path) -> dict[tuple[str, str], float]:
    """The values of metrics.prom by name and by what a label besides the run's name says."""
    parser = pytest.importorskip("prometheus_client.parser")
    text = (folder / "metrics.prom").read_text()
    found = {}
    for family in parser.text_string_to_metric_families(text):
        assert (family.type, len(family.documentation) > 10) == ("gauge", True)
        for sample in family.samples:
            assert sample.labels.pop("run") == folder.name
            assert sample.timestamp is None  # node_exporter refuses them
            found[sample.name, "".join(sample.labels.values())] = sample.value
    return found


def test_prometheus_reads_the_last_values_with_their_units(tmp_path, clock):
    pytest.importorskip("prometheus_client")
    folder = tmp_path / 'ru"n\n'
    folder.mkdir()
    evaluated = line(1, eval_loss=1.5, eval_metrics={"top5": 0.5}, slow_ranks={"1/data": 2.0})
    memory = {"0": 2.0**30, "1": 2.0**31}
    last = line(2, metrics={"top-5 %": 0.25}, loss=math.inf, rank_memory=memory)
    last |= {"grad_norm": None, "error": "text", "rank_step_s": {"0": 0.5, "1": 0.6}}
    assert write(folder, PROMETHEUS, evaluated, last) == []
    found = samples(folder)
    assert found["mntrain_step", ""] == 2
    assert found["mntrain_loss", ""] == math.inf
    assert found["mntrain_step_seconds", ""] == found["mntrain_rank_step_seconds", "0"] == 0.5
    assert found["mntrain_reduce_wait_seconds", ""] == 0.05
    assert found["mntrain_tokens_per_second", ""] == 12300
    assert found["mntrain_rank_memory_bytes", "1"] == 2**31
    assert found["mntrain_metrics", "top-5 %"] == 0.25
    assert (found["mntrain_eval_loss", ""], found["mntrain_eval_metrics", "top5"]) == (1.5, 0.5)
    names = {name for name, _ in found}
    assert not {"mntrain_slow_ranks", "mntrain_grad_norm", "mntrain_error"} & names
    assert os.listdir(folder).count("metrics.prom") == len(os.listdir(folder)) - 1
    # It is replaced once a second.
    files = MetricsFiles(tmp_path, PROMETHEUS, pytest.fail)
    seen = []
    for step in range(1, 9):
        clock[0] += 0.4
        files.write(line(step))
        seen.append(samples(tmp_path)["mntrain_step", ""])
    assert seen == [1, 1, 1, 4, 4, 4, 7, 7]
    files.close()
    assert samples(tmp_path)["mntrain_step", ""] == 8
