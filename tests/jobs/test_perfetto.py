"""The timeline of a job, by Perfetto's own parser: phases, collectives, overlap, and its end."""

import re

import perfetto_reader
import pytest
from job import completed, metrics, summary, train
from launch import TESTS

RANKS, STEPS = 4, (2, 3, 4)
OPTIONS = [
    *("--comm.ranks-per-node", "2", "--comm.bucket-mb", "0.02", "--train.steps", "9"),
    *("--checkpoint.every", "3", "--train.eval-every", "2"),
]
PHASES = ["data", "forward", "backward", "reduce_wait", "optimizer"]
(OVERLAP,) = re.findall(
    r"```sql\n(.*?)```", (TESTS.parent / "docs" / "metrics.md").read_text(), re.S
)
SLICES = """
    include perfetto module slices.with_context;
    select pid as rank, thread_name as thread, name, ts, dur, depth
    from thread_slice
"""
TRACKS = """
    select process.pid as rank, process.name as process, thread.name as name
    from thread join process using (upid)
"""
BYTES = """
    select process.pid as rank, sum(extract_arg(slice.arg_set_id, 'args.cross_bytes')) as cross,
      sum(extract_arg(slice.arg_set_id, 'args.node_bytes')) as node
    from slice join thread_track on slice.track_id = thread_track.id
    join thread using (utid) join process using (upid)
    where thread.name = 'communication' group by rank order by rank
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """The folder of a job that stops within the steps of its timeline, and what it prints."""
    folder = tmp_path_factory.mktemp("timeline")
    done = completed(
        train(RANKS, folder, *OPTIONS, "--log.timeline", "2:6", "--run.stop-after", "4")
    )
    return folder, done.stdout


@pytest.mark.exhaustive
def test_perfetto_reads_the_trace_of_a_job_that_stopped_within_its_steps(job):
    folder, output = job
    trace = folder / "run" / "timeline.json.gz"
    assert str(trace) in output
    assert summary(folder)["status"] == "stopped"
    slices, tracks, sent, overlap = perfetto_reader.query(trace, SLICES, TRACKS, BYTES, OVERLAP)
    for rank in range(RANKS):
        (process,) = {row["process"] for row in tracks if row["rank"] == rank and row["process"]}
        assert re.fullmatch(rf"rank {rank} on .*, node {rank // 2}", process)
        threads = {row["name"] for row in tracks if row["rank"] == rank}
        assert {"training", "communication", "within the node", "between nodes"} <= threads
        own = [row for row in slices if row["rank"] == rank and row["thread"] == "training"]
        steps = [row for row in own if row["depth"] == 0]
        assert [row["name"] for row in steps] == [f"step {step}" for step in STEPS]
        assert [row["name"] for row in own].count("evaluate") == 2
        assert "checkpoint" in [row["name"] for row in own]
    compare_with_metrics(slices, {line["step"]: line for line in metrics(folder)})
    assert all(row["cross"] > 0 and row["node"] > 0 for row in sent)
    assert len(sent) == len(overlap) == RANKS


def compare_with_metrics(slices, lines):
    """The phases of rank 0 are those of metrics.jsonl; backward there has no reduce_wait."""
    own = [row for row in slices if row["rank"] == 0 and row["thread"] == "training"]
    steps = [row for row in own if row["depth"] == 0]
    for step, whole in zip(STEPS, steps, strict=True):
        found = dict.fromkeys(PHASES, 0.0)
        for row in own:
            if row["name"] in PHASES and 0 <= row["ts"] - whole["ts"] < whole["dur"]:
                found[row["name"]] += row["dur"] / 1e9
                if row["name"] == "reduce_wait" and row["depth"] == 2:
                    found["backward"] -= row["dur"] / 1e9
        expected = {name: lines[step][name] for name in PHASES}
        assert found == pytest.approx(expected, rel=0.05, abs=0.02)
