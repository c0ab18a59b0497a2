"""The plan of a job against what jobs measure: bytes of memory, and bytes that a step sends."""

import shutil
from dataclasses import replace

import pytest
import torch
from cases import RANK
from job import summary
from torch import nn
from torch.utils.data import TensorDataset
from worlds import RANKS, meet

from mntrain.options.config import CommConfig, Config, OptimConfig, ZeroConfig
from mntrain.tasks import Loss, Task
from mntrain.train.entry import run_command
from mntrain.train.plan.job_plan import JobPlan
from mntrain.train.plan.plan_options import PlanOptions

pytestmark = pytest.mark.simulated

ROLES = ("parameters", "gradients", "buckets", "master", "state", "hook")
STEPS = 2, 5


class TiedAndFrozen(Task):
    """A model with a tied parameter, two frozen ones, and layers that no bucket divides evenly."""

    def model(self):
        model = nn.Sequential(
            nn.Linear(37, 301), nn.Tanh(), nn.Linear(301, 301), nn.Linear(301, 37)
        )
        model[3].weight = nn.Parameter(model[0].weight.detach().t().contiguous())
        model[3].register_parameter("tied", model[3].weight)
        model[0].requires_grad_(False)
        return model

    def dataset(self, split):
        rows = torch.randn(50, 37, generator=torch.Generator().manual_seed(1))
        return TensorDataset(rows) if split == "train" else None

    def loss(self, model, batch):
        (x,) = batch
        return Loss((model(x) - x).float().square().mean(), len(x))


def options(task, folder, *, steps=STEPS[0], optim=(), zero=(), comm=(), **train):
    values = {
        "steps": steps,
        "batch_size": 2 * RANKS,
        "micro_batch_size": 1,
        "eval_every": 0,
        "eval_samples": 2,
        **train,
    }
    config = Config(task=task, device="cpu")
    return replace(
        config,
        train=replace(config.train, **values),
        optim=OptimConfig(**dict(optim)),
        zero=ZeroConfig(**dict(zero)),
        comm=CommConfig(**dict(comm)),
        model=replace(config.model, layers=2, width=64, heads=2, context=32),
        run=replace(config.run, dir=folder / "run" if folder else None),
    )


def planned(config):
    """The line of the plan for this job."""
    fields = {name: getattr(config, name) for name in Config.__dataclass_fields__}
    made = PlanOptions(**fields, ranks=(RANKS,), precisions=(config.train.precision,))
    jobs = {job.stage: job for job in JobPlan(made).jobs(config.train.precision)}
    return jobs[config.zero.stage if len(jobs) > 1 else 0]


def measured(config, folder):
    """The summary.json of a job, whose directory is empty at first."""
    if RANK == 0:
        shutil.rmtree(folder / "run", ignore_errors=True)
    meet()
    assert run_command(config) == 0
    meet()
    found = summary(folder)
    meet()
    return found


SGD = {"name": "SGD", "weight_decay": 0.0}
MOMENTUM = {**SGD, "options": {"momentum": 0.9}}
ADAFACTOR, MUON = {"name": "Adafactor"}, {"name": "Muon"}
DIGITS, OWN = "examples.digits:Digits", "test_plan:TiedAndFrozen"
LM = "small_jobs:Silent"
thorough = pytest.mark.thorough
# Task, stage, and other options.
CASES = [
    (LM, 2, {"optim": MUON, "precision": "bf16-pure"}),
    (OWN, 1, {"comm": {"gather_dtype": "bf16", "ranks_per_node": 2}}),
    *(
        pytest.param(*case, marks=thorough)
        for case in [
            (LM, 0, {}),
            (LM, 1, {"precision": "bf16"}),
            (LM, 2, {"optim": SGD}),
            (LM, 2, {"precision": "fp16", "optim": MOMENTUM}),
            (LM, 1, {"precision": "bf16-pure", "comm": {"bucket_mb": 0.1}}),
            (LM, 2, {"optim": ADAFACTOR}),
            (DIGITS, 0, {"optim": SGD}),
            (DIGITS, 2, {"optim": MOMENTUM}),
            (DIGITS, 1, {"precision": "bf16-pure"}),
            (OWN, 0, {"comm": {"wire_dtype": "bf16", "ranks_per_node": 1}}),
            (OWN, 2, {"comm": {"compress": "int8", "ranks_per_node": 1}}),
            (OWN, 1, {"comm": {"compress": "int8", "ranks_per_node": 2}}),
            (
                OWN,
                2,
                {"precision": "bf16-pure", "comm": {"algorithm": "leader", "ranks_per_node": 2}},
            ),
            (OWN, 2, {"comm": {"algorithm": "flat", "ranks_per_node": 2}}),
        ]
    ),
]


@pytest.mark.parametrize(("task", "stage", "more"), CASES, ids=str)
def test_a_job_takes_the_memory_of_its_plan_to_the_byte_and_sends_what_it_says(
    folder, task, stage, more
):
    more = {**more, "zero": {"stage": stage, **more.get("zero", {})}}
    sent = []
    for steps in STEPS:
        config = options(task, folder, steps=steps, **more)
        found = measured(config, folder)
        sent.append((found["traffic"]["node_bytes"], found["traffic"]["cross_bytes"]))
    job = planned(config)
    for role in ROLES:
        memory = found["memory"][role]
        plan = getattr(job.most, role)
        assert memory["most"] == plan, role
        if not (role == "buckets" and "compress" in more.get("comm", {})):  # of one micro-batch
            assert memory["predicted"] == plan, role
            assert memory["predicted_least"] == memory["least"], role
    if not found["skipped_steps"]:  # which send no parameters
        assert job.sent is not None
        a_step = [(last - first) / (STEPS[1] - STEPS[0]) for first, last in zip(*sent, strict=True)]
        for counted, plan in zip(a_step, (job.sent.node, job.sent.cross), strict=True):
            # Besides, means, norms and what ranks compare: a few kilobytes.
            assert plan - 1 <= counted <= plan + 30_000 * RANKS
