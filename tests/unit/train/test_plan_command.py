"""`python -m mntrain plan`: its options, activations, and tables."""

import subprocess
import sys

import pytest
import torch
from rich.filesize import decimal
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import IterableDataset, TensorDataset

from mntrain.__main__ import main
from mntrain.options.config import Config
from mntrain.tasks import Loss, Task
from mntrain.tasks.transformer import Transformer
from mntrain.train.forward import PRECISIONS, recompute_regions
from mntrain.train.plan import activations, plan_command, plan_options
from mntrain.train.plan.job_plan import JobPlan, smallest


class Tokens(Task):
    """The built-in model on random tokens."""

    layers, width, context, vocab = 3, 64, 64, 300

    def model(self):
        return Transformer(self.layers, self.width, 2, self.context, self.vocab)

    def dataset(self, split):
        rows = torch.randint(self.vocab, (20, self.context + 1))
        return TensorDataset(rows) if split == "train" else None

    def loss(self, model, batch):
        (rows,) = batch
        return Loss(model(rows[:, :-1], rows[:, 1:]), rows[:, 1:].numel())


class WithoutWidth(Tokens):
    def model(self):
        raise KeyError("width")


class Stubborn(Tokens):
    """Reads values while the model is made, and in the loss; gives a stream."""

    def model(self):
        model = nn.Linear(self.context + 1, 3)
        model.norm = float(model.weight.norm())
        return model

    def dataset(self, split):
        class RandomRows(IterableDataset):
            def __iter__(self):
                return iter(torch.randn(30, Tokens.context + 1))

        return RandomRows() if split == "train" else None

    def loss(self, model, batch):
        out = model(batch / model.norm)
        scale = 1.0 if out.sum() > 0 else 2.0
        return Loss(out.square().mean() * scale + out.mean(), 3)


def peak_of_allocator(task, model, batch, precision, *, recompute):
    """The most bytes that torch's profiler has seen allocated at a time on the CPU."""
    if recompute:
        recompute_regions(task.regions(model))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as made:
        precision.loss(task, model, batch, torch.device("cpu")).mean.backward()
    events = [e for e in made.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


FURTHER = [("fp32", False, 8), ("bf16", False, 3), ("bf16", True, 8), ("bf16-pure", True, 3)]


@pytest.mark.parametrize(
    ("precision", "recompute", "samples"),
    [
        ("fp32", True, 3),
        *(pytest.param(*case, marks=pytest.mark.thorough) for case in FURTHER),
    ],
)
def test_activations_are_what_the_allocator_has_at_its_peak(precision, recompute, samples):
    task, dtypes = Tokens(Config()), PRECISIONS[precision]
    with torch.device("meta"):
        model = task.model().to(dtypes.parameters)
    rows = task.dataset("train").tensors[0][:samples]
    found = activations.activation_bytes(task, model, [rows], dtypes, recompute=recompute)
    real = task.model().to(dtypes.parameters)
    expected = peak_of_allocator(task, real, [rows], dtypes, recompute=recompute)
    assert found == pytest.approx(expected, rel=0.1)
    assert all(parameter.is_meta and parameter.grad is None for parameter in model.parameters())


def jobs_of(*words, precision="fp32"):
    plan = JobPlan(plan_options.parse(words))
    return list(plan.jobs(precision)), plan.notes


def test_a_task_that_needs_memory_is_made_on_the_cpu_and_its_activations_are_unknown():
    jobs, notes = jobs_of("--task", f"{__name__}:Stubborn", "--ranks", "1")
    assert [job.most.parameters for job in jobs] == [4 * (65 * 3 + 3)]
    assert jobs[0].activations is None
    assert notes[0].startswith("the model was made on the CPU, since it needs memory: ")
    assert notes[1].startswith("activations are unknown, without memory for tensors: ")


@pytest.mark.thorough
def test_the_smallest_job_that_fits_has_the_fewest_ranks_and_then_the_lowest_stage():
    jobs, notes = jobs_of("--task", f"{__name__}:Tokens", "--ranks", "4", "1", "2")
    assert not notes
    by_shape = {(job.topology.size, job.stage): job for job in jobs}
    assert list(by_shape) == [(1, 0), *((n, stage) for n in (2, 4) for stage in (0, 1, 2))]
    assert smallest(jobs, by_shape[1, 0].total).topology.size == 1
    found = smallest(jobs, by_shape[4, 1].total)
    assert (found.topology.size, found.stage) == (4, 1)
    assert smallest(jobs, 1000) is None
    # Micro-batches become smaller where ranks have fewer samples than one.
    assert by_shape[4, 0].activations == by_shape[1, 0].activations
    jobs, _ = jobs_of(
        "--task", f"{__name__}:Tokens", "--ranks", "1", "8", "--train.batch-size", "8"
    )
    assert jobs[1].activations < jobs[0].activations / 4


class Frozen(Tokens):
    """The built-in model with a buffer, of which only the head trains."""

    def model(self):
        model = super().model()
        model.register_buffer("counts", torch.zeros(1000, dtype=torch.int64))
        model.blocks.requires_grad_(False)
        return model


@pytest.mark.parametrize("precision", ["fp32", "bf16-pure"])
def test_frozen_parameters_and_buffers_are_in_the_total(precision):
    (job, *_), _ = jobs_of("--task", f"{__name__}:Frozen", "--ranks", "2", precision=precision)
    model = Frozen(Config()).model()
    if precision == "bf16-pure":
        model.to(torch.bfloat16)
    sizes = {t: t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()]}
    trained = sum(size for t, size in sizes.items() if t.requires_grad)
    assert job.most.parameters == trained
    assert job.untrained == sum(sizes.values()) - trained
    assert job.total == job.most.total + job.untrained + job.activations
    frozen, _ = jobs_of(
        *("--task", f"{__name__}:Tokens", "--init.freeze", "blocks.*", "--ranks", "1"),
        precision=precision,
    )
    assert frozen[0].untrained >= sum(
        s for t, s in sizes.items() if t in {*model.blocks.parameters()}
    )
    assert smallest(frozen, frozen[0].untrained) is None


@pytest.mark.thorough
def test_the_command_prints_tables_and_starts_no_mpi():
    words = ["--task", "test_plan_command:Tokens", "--precisions", "bf16-pure", "--ranks", "1", "2"]
    words += ["--memory", "40G", "--ranks-per-node", "1", "--checkpoint.local", "/dev/shm/a"]
    program = (
        "import sys; from mntrain.__main__ import main; code = main(sys.argv[1:]); "
        "assert 'mpi4py' not in sys.modules; sys.exit(code)"
    )
    command = [sys.executable, "-W", "error", "-c", program, "plan", *words]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd="tests/unit/train", timeout=250
    )
    assert (done.returncode, done.stderr) == (0, "")
    rows = [line.split() for line in done.stdout.splitlines()]
    assert rows[0][:5] == ["bf16-pure", "stage", "parameters", "gradients", "buckets"]
    assert [row[:3] for row in rows if row[1:2] == ["rank"]] == [["1", "rank", "any"]]
    assert sum(row[2:4] == ["2", "nodes"] for row in rows) == 3
    assert (
        "the smallest that fits into 40 GiB (42.9 GB): 1 rank on 1 node of 1, with" in done.stdout
    )
    local = [line for line in done.stdout.splitlines() if line.startswith("--checkpoint.local on")]
    assert [line.split()[2:6] for line in local] == [
        ["1", "rank", "on", "1"],
        ["2", "ranks", "on", "2"],
    ]


def test_a_plan_of_checkpoints_in_the_nodes_memory_has_their_bytes():
    """A weight and two numbers of Adam's for each parameter, and the buffers."""
    words = ["--task", f"{__name__}:Tokens", "--ranks", "4", "--ranks-per-node", "2"]
    jobs, _ = jobs_of(*words)
    model = Tokens(Config()).model()
    parameters, buffers = (
        sum(t.numel() * 4 for t in tensors) for tensors in (model.parameters(), model.buffers())
    )
    for job in jobs:
        assert job.checkpoint == pytest.approx(3 * parameters + buffers, rel=0.01)
        text = plan_command.local_text(job)
        assert f"a node keeps up to {decimal(2 * job.checkpoint)} there (two steps, and" in text
        assert f"a save sends {decimal(job.checkpoint)} between nodes" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--memory", "lots"], "--memory: must be a size such as 40G or 512M"),
        (["--ranks", "0"], "--ranks: Input should be greater than or equal to 1, not 0"),
        (
            ["--task", f"{__name__}:WithoutWidth"],
            f"--task {__name__}:WithoutWidth: model() fails: KeyError: 'width' (test_plan_command",
        ),
        (["--task", "no:Task"], "--task no:Task: module 'no' does not import"),
        (["--optim.name", "Nothing"], "--optim.name Nothing: is no torch.optim.Optimizer"),
    ],
)
def test_bad_input_is_one_error(capsys, words, said):
    task = [] if "--task" in words else ["--task", f"{__name__}:Tokens"]
    try:
        code = main(["plan", *task, "--ranks", "2", *words])
    except SystemExit as exited:
        code = exited.code
    printed = capsys.readouterr()
    assert code == 2
    assert said in printed.err
