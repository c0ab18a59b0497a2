"""`mntrain.verify` on loops that are right, and on ones with a fault of each kind."""

import contextlib
import re
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from mpi4py import MPI
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import mntrain
from mntrain.errors import AgreedError
from mntrain.options.config import CommConfig, Config, DataConfig, ModelConfig, TrainConfig
from mntrain.tasks import Loss, Task
from mntrain.tasks.lm import LanguageModel
from mntrain.train.verify.verify_command import parse, run, verify_task

RANK = MPI.COMM_WORLD.rank
STEPS = 3
ADAMW = partial(torch.optim.AdamW, lr=1e-2)
BATCH = 12
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "plan-and-verify.md").read_text()
SCRIPT = PAGE.partition("```python\n")[2].partition("```")[0]


class LinePoints(Dataset):
    """Points and values, the same on all ranks."""

    def __init__(self, count=60):
        draws = torch.Generator().manual_seed(3)
        self.x = torch.randn(count, 6, generator=draws)
        self.y = torch.randn(count, 3, generator=draws)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class AugmentedByReads(LinePoints):
    """Samples that depend on how many this process has read before."""

    reads = 0

    def __getitem__(self, index):
        self.reads += 1
        return self.x[index] * (1 + self.reads % 5), self.y[index]


class ShiftedNet(nn.Module):
    def __init__(self, *more):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 24), *more, nn.Tanh(), nn.Linear(24, 3))
        self.register_buffer("shift", torch.zeros(24))

    def forward(self, x):
        hidden = self.layers[:-1](x) + self.shift
        return self.layers[-1](hidden)


def loop(
    world,
    stage,
    *,
    more=(),
    kind=ADAMW,
    data=LinePoints,
    batches=lambda world, loader: world.shard(loader),
    prepare=lambda world, model: None,
    loss_of=functional.mse_loss,
    micro=1,
    made=None,
    backward=lambda optimizer, loss: loss.backward(),
    before_step=lambda world, model: None,
):
    torch.manual_seed(0)
    model = ShiftedNet(*(layer() for layer in more))
    prepare(world, model)
    stage = stage if made is None else made
    optimizer = world.optimizer(model, kind.func, stage=stage, check_every=1, **kind.keywords)
    samples = data()
    shuffle = not isinstance(samples, IterableDataset)
    loader = DataLoader(samples, batch_size=BATCH // micro, shuffle=shuffle)
    for number, (x, y) in zip(range(STEPS * micro), batches(world, loader), strict=False):
        last = (number + 1) % micro == 0
        with contextlib.nullcontext() if last else optimizer.no_sync():
            loss = loss_of(model(x), y) / micro
            backward(optimizer, loss)
        if last:
            before_step(world, model)
            optimizer.step()
            optimizer.zero_grad()
            yield world.mean(loss.item(), weight=len(x))


def compute_in_bf16(world, model):
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)


@pytest.mark.parametrize(
    "changes",
    [
        {
            "more": [partial(nn.BatchNorm1d, 24), partial(nn.Dropout, 0.3)],
            "prepare": lambda world, model: world.sync_batchnorm(model),
        },
        {"micro": 2, "kind": partial(torch.optim.SGD, lr=0.1, momentum=0.9)},
        {"prepare": compute_in_bf16, "kind": partial(torch.optim.SGD, lr=0.1)},
    ],
    ids=["batch norm of all ranks and dropout", "accumulation", "bf16"],
)
def test_a_loop_that_is_right_passes(capsys, changes):
    verdict = mntrain.verify(partial(loop, **changes), device="cpu")
    assert verdict.right, verdict.text
    assert "stage 2" in verdict.text
    assert verdict.text.endswith("right: all ranks train as one process does")
    count = 4 + 2 * ("more" in changes)
    assert f"compared in {STEPS} steps: " in verdict.text
    assert f"the gradients of {count} parameters, the updates of {count} parameters" in verdict.text
    said = "left out: layers of dropout, which did nothing meanwhile: 1"
    assert (said in verdict.text) == ("more" in changes)
    assert (verdict.text in capsys.readouterr().out) == (RANK == 0)


def clip(world, model):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def log_on_rank_0(world, model):
    if world.master:
        float(model.layers[0].weight.grad.norm())


def compute_by_functions(world, model):
    first, last = model.layers[0], model.layers[-1]
    model.eval().forward = lambda x: functional.linear(
        functional.linear(x, first.weight, first.bias).tanh(), last.weight, last.bias
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"before_step": clip, "made": None},
            ["stage 1  refused: the gradient of layers.0.weight"],
        ),
        pytest.param(
            {"before_step": log_on_rank_0},
            ["stage 1  refused: rank 0: the gradient of layers.0.weight is sharded over ranks"],
            marks=pytest.mark.exhaustive,
        ),
        (
            {"data": lambda: InOrder(LinePoints())},
            ["left out: batches that do not divide among the ranks"],
        ),
        ({"prepare": compute_by_functions}, ["left out: samples of ranks, which may be the same"]),
        pytest.param(
            {"data": partial(LinePoints, 59)},
            ["the updates of 4 parameters\nright: "],
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["torch clips", "rank 0 logs a gradient", "a stream", "no training mode", "a short batch"],
)
def test_a_loop_that_is_right_is_told_what_was_left_out(changes, said):
    verdict = mntrain.verify(partial(loop, **changes), device="cpu")
    assert verdict.right, verdict.text
    # A rank that is late learns of a refusal from the others, which are named then.
    told = re.sub(r"refused: ranks? [\d, ]+: ", "refused: ", verdict.text)
    assert [text for text in said if text not in told and text not in verdict.text] == [], told
    but = ", where it is not refused" if "refused" in said[0] else ""
    assert verdict.text.endswith(f"right: all ranks train as one process does{but}")


class DividedByNorm(torch.optim.Optimizer):
    """Divides by the norm of all gradients of some tensors that it is given."""

    sizes = range(140, 300)  # which no trial has

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            having = [p for p in group["params"] if p.grad is not None]
            large = [p.grad.norm() for p in having if p.numel() in self.sizes]
            norm = torch.stack(large).norm() if large else 1.0
            for parameter in having:
                parameter.sub_(parameter.grad / norm, alpha=group["lr"])


def shift_on_one_rank(world, model):
    """Let a buffer grow on the last rank alone."""

    def grow(*_):
        model.shift += 0.1

    if world.rank and world.rank == world.size - 1:
        model.register_forward_pre_hook(grow)


def skip_on_one_rank(world, model):
    """Leave the bias of a layer out on the last rank."""
    if world.rank and world.rank == world.size - 1:
        first = model.layers[0]
        first.forward = lambda x: functional.linear(x, first.weight, first.bias.detach())


def noise_of_rank(world, model):
    torch.manual_seed(5 + world.rank)
    model.register_forward_hook(lambda module, x, y: y + 0.1 * torch.randn(3))


def fail_on_the_last_rank(world, model):
    if world.rank and world.rank == world.size - 1:
        raise KeyError("no such batch")


def spoil_on_the_last_rank(world, model):
    if world.rank and world.rank == world.size - 1:
        with torch.no_grad():
            model.layers[0].weight.view(-1)[0] += 1.0


FAULTS = {
    "no gradient": (
        {"backward": lambda optimizer, loss: loss.detach().requires_grad_().backward()},
        "nothing was compared: in one process alone, no parameter has had a gradient",
    ),
    "no update": (
        {"kind": partial(torch.optim.SGD, lr=0.0)},
        "nothing was compared: in one process alone, no step has changed a parameter",
    ),
    "another stage": ({"made": 1}, "stage 0: stage 0 was asked for, and an optimizer of stage 1"),
    "a short batch weighs as much": (
        {
            "data": partial(LinePoints, 59),
            "backward": lambda optimizer, loss: optimizer.backward(loss, weight=1),
        },
        "in step 2, the difference in the",
    ),
    "an error on one rank": (
        {"before_step": fail_on_the_last_rank},
        "stage 0: rank {last}: KeyError: 'no such batch'",
    ),
    "weights of one rank": (
        {"before_step": spoil_on_the_last_rank},
        "stage 0: after step 0, the weights differ between ranks",
    ),
    "another seed": ({"prepare": noise_of_rank}, "the difference in the"),
    "functional dropout": (
        {"loss_of": lambda y, t: functional.mse_loss(functional.dropout(y, 0.3), t)},
        "random numbers are drawn in forward",
    ),
    "a buffer on one rank": ({"prepare": shift_on_one_rank}, "the difference in the"),
    "statistics of all parameters": (
        {"kind": partial(DividedByNorm, lr=0.1)},
        "stage 1: in step 1, the difference in the weights of layers.0.",
    ),
    "a sum": ({"loss_of": partial(functional.mse_loss, reduction="sum")}, "a sum in place of a m"),
    "the same samples": ({"batches": lambda world, loader: loader}, "train on the same samples"),
    "a parameter is skipped": ({"prepare": skip_on_one_rank}, "in the gradient of layers.0.bias"),
    "augmentation by rank": ({"data": AugmentedByReads}, "in another order"),
    "batch norm of each rank": (
        {"more": [partial(nn.BatchNorm1d, 24)]},
        "; layers of BatchNorm (layers.1) normalize the samples of each rank by themselves",
    ),
}

QUICK = {
    *("a sum", "a parameter is skipped", "the same samples", "no gradient", "no update"),
    *("another stage", "a short batch weighs as much"),
}


@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.exhaustive) for n in FAULTS],
)
def test_a_fault_is_found(name):
    changes, said = FAULTS[name]
    verdict = mntrain.verify(partial(loop, **changes), device="cpu")
    assert not verdict
    said = said.format(last=MPI.COMM_WORLD.size - 1)
    assert said in verdict.text.partition("wrong:\n")[2], verdict.text


class CountOfOne(LanguageModel):
    """Counts one item in every micro-batch, which is right if all have as many samples."""

    def loss(self, model, batch):
        return Loss(super().loss(model, batch).mean, 1)


class WrongCount(LanguageModel):
    """Divides a sum by the samples of a whole batch, and counts those of a micro-batch."""

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        return Loss(loss.mean * len(batch) / self.config.train.batch_size, loss.count)


class VerifiedPoints(Task):
    """A regression whose loss has the dtype of the model."""

    def model(self):
        return nn.Linear(6, 3)

    def dataset(self, split):
        return LinePoints() if split == "train" else None

    def loss(self, model, batch):
        x, y = (part.to(next(model.parameters()).dtype) for part in batch)
        return Loss(functional.mse_loss(model(x), y), len(x))


class InOrder(IterableDataset):
    """The samples of a dataset, in their order."""

    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return (self.samples[index] for index in range(len(self.samples)))


class Streaming(LanguageModel):
    def dataset(self, split):
        found = super().dataset(split)
        return InOrder(found) if split == "train" else found


def job(folder: Path, task: str, **more) -> Config:
    corpus = folder / "corpus.txt"
    corpus.write_text("".join(f"{i} and {i + 1} make {2 * i + 1}\n" for i in range(90)))
    return Config(
        task=task,
        device="cpu",
        data=DataConfig(path=corpus),
        model=ModelConfig(layers=1, heads=2, width=16, context=16),
        train=TrainConfig(batch_size=10, micro_batch_size=2),
        **more,
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("wire_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("task", ["lm", f"{__name__}:Streaming"], ids=["lm", "stream"])
def test_a_job_that_is_right_passes(tmp_path, task, wire_dtype):
    comm = CommConfig(ranks_per_node=1, wire_dtype=wire_dtype)
    verdict = verify_task(job(tmp_path, task, comm=comm))
    assert verdict.right, verdict.text


@pytest.mark.exhaustive
def test_a_job_whose_losses_are_rounded_to_16_bits_passes():
    train = TrainConfig(batch_size=16, precision="bf16-pure")
    verdict = verify_task(Config(task=f"{__name__}:VerifiedPoints", device="cpu", train=train))
    assert verdict.right, verdict.text


@pytest.mark.exhaustive
def test_the_examples_pass(tmp_path, monkeypatch):
    root = Path(__file__).resolve().parents[2]
    monkeypatch.setattr(sys, "path", [str(root), *sys.path])
    config = Config(task="examples.digits:Digits", device="cpu")
    assert verify_task(config).right


def test_the_command_has_an_exit_code_and_the_page_a_script_that_runs(tmp_path, capsys):
    corpus = job(tmp_path, "lm").data.path
    words = ["--data.path", str(corpus), "--device", "cpu", "--train.steps", "2"]
    words += ["--model.layers", "1", "--model.heads", "2", "--model.width", "16"]
    words += ["--model.context", "16", "--train.batch-size", "10", "--train.micro-batch-size", "2"]
    assert run(parse([*words, "--train.micro-batch-size", "1"])) == 0
    assert run(parse([*words, "--task", f"{__name__}:WrongCount"])) == 1
    hint = "; is Loss.count the number of items of the mean"
    assert (hint in capsys.readouterr().out) == (RANK == 0)
    even = ["--train.batch-size", "12", "--train.micro-batch-size", "2"]
    assert run(parse([*words, *even, "--task", f"{__name__}:CountOfOne"])) == 1
    assert (hint in capsys.readouterr().out) == (RANK == 0)
    assert run(parse([*words, "--balance.mode", "throughput"])) == 2
    said = "--balance.mode throughput: parts follow measured speeds"
    assert (said in capsys.readouterr().err) == (RANK == 0)
    exec(SCRIPT, {})
    out = capsys.readouterr().out
    assert out.count("right: all ranks train as one process does") == (RANK == 0)


def test_a_loop_that_fails_alone_is_bad_input():
    def fails(world, stage):
        raise ValueError("no data")

    with pytest.raises(AgreedError, match="rank 0: no data"):
        mntrain.verify(fails, device="cpu")
    with pytest.raises(AgreedError, match="start it under mpirun or srun, with two ranks or more"):
        mntrain.verify(loop, comm=MPI.COMM_SELF, device="cpu")
    points = TensorDataset(torch.zeros(3, 1))
    nothing = mntrain.verify(lambda world, stage: len(points) and None, device="cpu")
    assert "took no step" in nothing.text
