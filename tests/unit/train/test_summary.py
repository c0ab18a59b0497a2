"""The description of a job at its start, its counters, and what its summary adds up."""

from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from reports import places, used
from torch import nn

from mntrain.balance_config import BalanceConfig
from mntrain.comm.topology import Topology
from mntrain.config import Config, RunConfig, TrainConfig, ZeroConfig
from mntrain.rank_info import Usage, device_memory
from mntrain.run.job_resources import memory_by_role
from mntrain.sync import SyncConfig
from mntrain.train.summary import (
    JobResult,
    describe_job,
    peak_flops,
    resume_command,
    slow_links,
)
from zero.memory import Memory


class Recorder:
    """A reporter that writes down what it is told."""

    def __init__(self):
        self.notes, self.warnings, self.shown = [], [], None

    def note(self, text, style=""):
        self.notes.append(text)

    def warn(self, message):
        self.warnings.append(message)

    def places(self, places, links):
        self.shown = places, links


def described(
    *,
    device="cpu",
    reasons=("", "", "", ""),
    compiles=False,
    nodes=2,
    balance="off",
    planned=False,
    max_staleness=0,
    data="data: 3 files\n2 windows",
    resumed=None,
    stream=None,
    files=None,
    links=(1e8, 9e7),
):
    mode = SyncConfig(mode="local-sgd", every=7, max_staleness=max_staleness)
    world = SimpleNamespace(
        topology=Topology(((0, 1), (2, 3))),
        algorithm="lanes",
        library=SimpleNamespace(name="MPICH 5.0.2", threads="multiple"),
        collectives=SimpleNamespace(no_shared_memory_reason=reasons[0]),
        gather=lambda value: list(reasons),
        transport_line="host: by any MPI" if device == "cuda" else "",
        kernels=SimpleNamespace(why="torch: CuPy is absent"),
        device=torch.device(device),
        places=places(4, 2),
        size=4,
    )
    train = TrainConfig(precision="bf16-pure", compile=compiles)
    mode_of_work = BalanceConfig(mode=balance)
    config = Config(train=train, zero=ZeroConfig(stage=2), sync=mode, balance=mode_of_work)
    reporter = Recorder()
    job = SimpleNamespace(
        model=nn.Linear(99, 100),
        resumed=resumed,
        last_step=200,
        changed_data=list,
        data_facts={"files": files or {}},
        reporter=reporter,
        run_dir=Path("run"),
        task=SimpleNamespace(describe_data=lambda: data),
        initial_weights=None,
        frozen=0,
        choice="AdamW",
        schedule="cosine",
        sync=mode.description if nodes > 1 else None,
        done=0,
        links=links,
        data=SimpleNamespace(
            stream=stream,
            cadence=None,
            shares=SimpleNamespace(planned=planned) if balance == "throughput" else None,
            full_batch=32,
            describe=lambda steps: f"data of {steps} steps",
        ),
    )
    describe_job(world, config, job)
    return reporter


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_description_has_model_place_and_sharding(device):
    reporter = described(device=device)
    of_gpu = ["transport: host: by any MPI", "kernels: torch: CuPy is absent"]
    assert reporter.notes == [
        "lm: 10,000 parameters",
        "data: 3 files",
        "2 windows",
        "4 ranks on 2 nodes of 2, lanes, MPICH 5.0.2 (thread level multiple)",
        *(of_gpu if device == "cuda" else []),
        "zero: stage 2, by element; precision bf16-pure",
        "between nodes: LocalSGD(every=7, warmup=0)",
        "optimizer: AdamW, schedule cosine",
    ]
    assert reporter.warnings == []
    assert reporter.shown == (places(4, 2), (1e8, 9e7))


def test_data_that_the_task_does_not_describe_are_described_by_their_numbers():
    notes = described(data=None).notes
    assert notes[:2] == ["lm: 10,000 parameters", "data of 200 steps"]
    assert "data: 3 files" not in notes


def test_one_node_that_is_to_exchange_rarely_is_told_that_it_has_no_peer():
    (said,) = described(nodes=1).warnings
    assert said == "--sync.mode local-sgd: there is one node, so every step is synchronous"


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({}, ""),
        ({"stop_after": 5}, " --run.stop-after none"),
        ({"max_minutes": 9.0, "resume": "never"}, " --run.resume auto --run.max-minutes none"),
    ],
)
def test_the_command_that_continues_a_run_leaves_out_what_has_ended_it(monkeypatch, options, more):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    world, job = SimpleNamespace(size=3), SimpleNamespace(run_dir=Path("a"))
    command = resume_command(world, Config(run=RunConfig(**options)), job)
    start = f"mpirun -n 3 python -m mntrain --config {Path('a/config.toml')} --run.dir a"
    assert command == start + more


def test_nodes_that_cannot_compare_their_speeds_are_told_so():
    [said] = described(balance="throughput", max_staleness=2).warnings
    assert said.endswith(
        "so parts stay equal; give --balance.speed, or 10 or more steps of --sync.warmup"
    )
    assert described(balance="throughput", max_staleness=2, planned=True).warnings == []
    assert described(balance="throughput").warnings == []


def checkpoint_of(config):
    manifest = SimpleNamespace(step=4, writers="2 ranks", position=(0, 8), config=config)
    return SimpleNamespace(skipped={}, path=Path("run/step-4"), manifest=manifest)


@pytest.mark.parametrize(
    ("resumed", "stream", "files", "warned"),
    [
        (True, True, {}, True),
        (True, True, {"a": "12 bytes"}, False),
        (True, False, {}, False),  # their number is compared
        (False, True, {}, False),
    ],
)
def test_a_resumed_stream_without_files_to_compare_is_warned_of_once(
    resumed, stream, files, warned
):
    resumed = checkpoint_of({}) if resumed else None
    reporter = described(resumed=resumed, stream=object() if stream else None, files=files)
    said = [line for line in reporter.warnings if "the training data is a stream, whose" in line]
    assert len(said) == warned
    assert reporter.warnings == said


def test_compiling_is_announced_before_the_first_step():
    assert described(compiles=True).notes[-1] == "compiling: the first step takes longer"


def test_a_node_without_shared_memory_is_named_with_the_reason_and_the_fix():
    (said,) = described(reasons=("", "", "no room", "no room")).warnings
    assert "messages" in said
    assert "(node 1: no room). Run all ranks of a node as one user, in one container" in said
    (both,) = described(reasons=("no room", "no room", "denied", "denied")).warnings
    assert "(node 0: no room; node 1: denied)" in both


def test_a_result_counts_items_and_its_rate_leaves_out_single_slow_steps():
    result = JobResult(flops_per_item=None, skipped_steps=2)
    assert result.items_per_s == 0.0
    result.add(100, 50.0, skipped=True)
    assert result.items_per_s == 2.0
    for seconds in (20.0, 1.0, 1.0, 1.0):
        result.add(100, seconds, skipped=False)
    assert result.items_per_s == 100.0
    assert (result.items, result.skipped_steps) == (500, 3)


def test_memory_has_least_median_and_most_over_ranks_and_what_the_peak_was_expected_to_be():
    measured = [Memory(10, 20, 0, 0, state) for state in (300, 500, 401, 100)]
    expected = [Memory(10, 20, 0, 0, state) for state in (1, 2, 3, 4)]
    report = memory_by_role(measured, expected, [used(1)] * 4)
    state = {"expected": 2, "least": 100, "median": 350, "most": 500, "peak_rank": 1}
    assert report["state"] == state
    assert report["total"] == {key: n + (key != "peak_rank") * 30 for key, n in state.items()}
    assert report["buckets"] == dict.fromkeys(state, 0)


def test_every_role_has_its_own_peak():
    measured = [Memory(1, 2, 3, 4, 5), Memory(5, 4, 3, 2, 1)]
    first = used(7, 1, device_memory=2, reserved_memory=8, peak_reserved_memory=8)
    second = used(6, 2, device_memory=1, reserved_memory=4, peak_reserved_memory=9, pinned_memory=1)
    report = memory_by_role(measured, measured[::-1], [first, second])
    peaks = {role: (sizes["peak_rank"], sizes["most"]) for role, sizes in report.items()}
    assert peaks == {
        "parameters": (1, 5),
        "gradients": (1, 4),
        "buckets": (0, 3),
        "master": (0, 4),
        "state": (0, 5),
        "hook": (0, 0),
        "total": (0, 15),
        "process_peak": (0, 7),
        "device_peak": (1, 2),
        "device_now": (0, 2),
        "reserved_peak": (1, 9),
        "reserved_now": (0, 8),
        "pinned": (1, 1),
    }


def test_of_equal_ranks_the_first_is_named():
    report = memory_by_role([Memory(1, 1, 1, 1, 1)] * 3, [Memory(2, 2, 2, 2, 2)] * 3, [used(9)] * 3)
    assert {sizes["peak_rank"] for sizes in report.values()} == {0}


def test_what_a_process_needs_is_not_predicted():
    report = memory_by_role([Memory(1, 1, 1, 1, 1)], [Memory(1, 1, 1, 1, 1)], [used(9)])
    assert {role for role, sizes in report.items() if "expected" not in sizes} == {
        "process_peak",
        "device_peak",
        "device_now",
        "reserved_peak",
        "reserved_now",
        "pinned",
    }


def test_on_the_cpu_there_is_no_memory_of_a_gpu():
    memory = device_memory(torch.device("cpu"))
    assert set(memory.values()) == {0}
    assert set(memory) < {field.name for field in fields(Usage)}


H100 = ("uuid-1", "NVIDIA H100 80GB HBM3")


@pytest.mark.parametrize(
    ("model", "dtype", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100 80GB PCIe", "bf16", 312),
        ("NVIDIA A100-PCIE-40GB", "fp32", 19.5),
        ("NVIDIA H100 80GB HBM3", "bf16", 989),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H200", "fp16", 989),
        ("NVIDIA H200 NVL", "bf16", 836),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA A10G", "bf16", 70),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
    ],
)
def test_a_gpu_has_the_peak_of_its_data_sheet(model, dtype, tera):
    assert peak_flops([("", model)], dtype) == pytest.approx(tera * 1e12)


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16"),  # a seventh of one
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16"),  # another chip
        ("NVIDIA GeForce RTX 4090 D", "bf16"),
        ("AMD Instinct MI300X", "bf16"),
        ("", "fp32"),
    ],
)
def test_what_is_not_known_has_none(model, dtype):
    assert peak_flops([("", model)], dtype) is None


def test_peaks_add_up_over_gpus_and_a_shared_one_counts_once():
    one = peak_flops([H100], "bf16")
    assert peak_flops([H100, H100], "bf16") == one
    assert peak_flops([H100, ("uuid-2", H100[1])], "bf16") == 2 * one
    assert peak_flops([H100, ("", "")], "bf16") is None


def test_a_node_with_a_slow_link_is_warned_of():
    assert described().warnings == []
    [said] = described(links=(1e8, 1e7)).warnings
    assert said.startswith("the link of node 1 (n1) carries 10 MB/s")


@pytest.mark.parametrize(
    ("links", "said"),
    [
        ([], ""),
        ([1e9, 0.51e9, 0.9e9], ""),
        (
            [117e6, 11.6e6, 115e6],
            "the link of node 1 (n1) carries 12 MB/s, where the fastest carries 117: "
            "every exchange between nodes waits for it",
        ),
        (
            [1e9, 2e8, 1e8],
            "the links of nodes 1, 2 (n1, n2) carry 100 MB/s, where the fastest carries 1,000: "
            "every exchange between nodes waits for it",
        ),
    ],
)
def test_nodes_with_slow_links_are_named(links, said):
    assert slow_links(links, places(6, 2)) == said


def test_nodes_of_one_host_have_no_links_of_their_own():
    assert slow_links([1e9, 1e8], places(4, 2, host="n")) == ""
