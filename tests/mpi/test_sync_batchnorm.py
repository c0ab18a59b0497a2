"""BatchNorm over the samples of all ranks, against plain torch in one process."""

import copy
import io
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from mpi4py import MPI
from oracle import PlainTraining, assert_parity
from torch import nn
from torch.utils.checkpoint import checkpoint
from worlds import refusal

import mntrain

pytestmark = pytest.mark.simulated

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
SGD = partial(torch.optim.SGD, lr=0.3, momentum=0.9)
STAGES = pytest.mark.parametrize("stage", [0, 1, 2])

# Parts of one sample, and ranks without any.
BATCHES = [7, 5, 3, 2, 8]


class NormedNet(nn.Module):
    """Layers of every kind; one is called twice in a forward."""

    def __init__(self, *, bias=True, **options):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6, **options)
        self.conv, self.image_norm = nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2, **options)
        self.volume_norm, self.last = nn.BatchNorm3d(2, **options), nn.Linear(4, 3)
        if not bias:
            self.norm.bias = self.image_norm.bias = self.volume_norm.bias = None
        self.save = False  # recompute in backward

    def forward(self, x):
        if self.save:
            return checkpoint(self.layers, x, use_reentrant=False)
        return self.layers(x)

    def layers(self, x):
        hidden = self.norm(torch.tanh(self.norm(self.first(x))) * 2)
        image = self.image_norm(self.conv(hidden.view(-1, 1, 2, 3)))
        volume = self.volume_norm(torch.sigmoid(image[:, :, None]))
        return self.last(volume.flatten(1))


def batches():
    generator = torch.Generator().manual_seed(5)
    for count in BATCHES:
        x = torch.randn(count, 4, generator=generator, dtype=torch.float64)
        yield x, torch.arange(count)[:, None] + x[:, :3]


def loss_of(model, batch):
    x, y = batch
    return (model(x) - y).square().mean()


OPTIONS = {
    "affine": {},
    "not affine": {"affine": False},
    "no bias": {"bias": False},
    "cumulative": {"momentum": None},
    "no running statistics": {"track_running_stats": False},
}


@STAGES
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("how", ["loss.backward", "optimizer.backward", "accumulated", "saved"])
def test_layers_train_as_in_one_process(world, make, stage, options, how):
    model = NormedNet(**OPTIONS[options]).double()
    alone = PlainTraining(model, SGD, 1.0)
    keys = list(model.state_dict())
    norm = model.norm
    assert world.sync_batchnorm(model) is model
    assert list(model.state_dict()) == keys
    assert model.norm is norm
    model.save = alone.model.save = how == "saved"
    optimizer = make(model, SGD, stage=stage, max_grad_norm=1.0)
    for number, (own, whole) in enumerate(
        zip(world.shard(list(batches())), batches(), strict=True)
    ):
        more = how == "accumulated" and number % 2 == 0 and number < 4
        with optimizer.no_sync() if more else nullcontext():
            if how in ("loss.backward", "saved"):
                loss_of(model, own).backward()
            else:
                optimizer.backward(loss_of(model, own), weight=len(own[0]))
        scale = len(whole[0]) if how == "accumulated" else 1
        (loss_of(alone.model, whole) * scale).backward()
        if more:
            continue
        total = len(whole[0]) + BATCHES[number - 1] * (number % 2)
        if how == "accumulated":
            for parameter in alone.model.parameters():
                parameter.grad /= total
        alone.update()
        optimizer.step(), optimizer.zero_grad()
        check_buffers(model, alone.model)
    assert_parity(world, model, alone, 1e-10)
    model.eval(), alone.model.eval()
    if RANK == 0 and options != "no running statistics":  # evaluation is local
        x = next(batches())[0]
        torch.testing.assert_close(model(x), alone.model(x))


class OfTokens(nn.Module):
    """Scores of tokens, above a layer that normalizes all of them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.table, self.norm, self.last = nn.Embedding(9, 6), nn.BatchNorm1d(6), nn.Linear(6, 9)
        self.double()

    def forward(self, tokens):
        return self.last(self.norm(self.table(tokens.flatten())).tanh())


def token_batches():
    """Tokens, and 1 where one counts: in the first batch for the last rank alone."""
    generator = torch.Generator().manual_seed(6)
    for number in range(4):
        tokens = torch.randint(9, (2 * SIZE, 5), generator=generator)
        counted = (torch.rand(2 * SIZE, 5, generator=generator) < 0.4).double()
        if number % 2 == 0:
            counted[:-2] = 0
        counted[-1, 0] = 1
        yield tokens, counted


def mean_over_tokens(model, batch):
    tokens, counted = batch
    losses = nn.functional.cross_entropy(model(tokens), tokens.flatten(), reduction="none")
    return (losses * counted.flatten()).sum() / counted.sum()  # NaN if none counts


@STAGES
def test_samples_without_a_token_enter_the_statistics(world, make, stage):
    model = OfTokens()
    alone = PlainTraining(model, SGD, 1.0)
    world.sync_batchnorm(model)
    optimizer = make(model, SGD, stage=stage, max_grad_norm=1.0)
    whole = token_batches()
    for own in world.shard(list(token_batches())):
        optimizer.backward(mean_over_tokens(model, own), weight=own[1].sum())
        mean_over_tokens(alone.model, next(whole)).backward()
        alone.update()
        optimizer.step(), optimizer.zero_grad()
        check_buffers(model, alone.model)
    assert_parity(world, model, alone, 1e-10)


def test_a_weight_of_nothing_that_would_hide_samples_is_refused(world, make):
    model = OfTokens()
    world.sync_batchnorm(model)
    make(model, SGD)
    batch = next(iter(world.shard(list(token_batches()), weight=lambda batch: batch[1].sum())))
    with pytest.raises(ValueError, match=r"have no token.* optimizer\.backward\(loss, weight=n\)"):
        mean_over_tokens(model, batch)


def test_a_share_of_nothing_after_the_forward_is_refused():
    with mntrain.init(MPI.COMM_SELF, device="cpu") as world:
        model = world.sync_batchnorm(OfTokens())
        optimizer = world.optimizer(model, SGD)
        loss = mean_over_tokens(model, next(token_batches()))
        optimizer.share(0)
        with pytest.raises(RuntimeError, match=r"^share\(0\) follows a forward in which SyncBatch"):
            loss.backward()


def check_buffers(model, alone):
    for (name, ours), theirs in zip(model.named_buffers(), alone.buffers(), strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=1e-10, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_samples_have_wide_statistics(world, make, dtype):
    layer, alone = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    world.sync_batchnorm(layer)
    make(layer, SGD)
    generator = torch.Generator().manual_seed(1)
    x = (torch.randn(4 * SIZE, 3, 5, generator=generator) * 3 + 50).to(dtype)
    y = layer(x[4 * RANK : 4 * RANK + 4])
    expected = alone(x.float())
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), expected[4 * RANK : 4 * RANK + 4], atol=0.02, rtol=0.01)
    torch.testing.assert_close(layer.running_var, alone.running_var, rtol=1e-5, atol=1e-6)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch's tracing
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_compiled_model_trains_as_in_one_process(world, make, stage):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double()
    alone = PlainTraining(model, SGD, 1.0)
    world.sync_batchnorm(model)
    optimizer = make(model, SGD, stage=stage, max_grad_norm=1.0)
    compiled = torch.compile(model, backend="aot_eager")
    some = [next(batches())] * 2  # another size would be compiled anew
    for own, whole in zip(world.shard(some), some, strict=True):
        loss_of(compiled, own).backward()
        loss_of(alone.model, whole).backward()
        optimizer.step(), optimizer.zero_grad()
        alone.update()
    assert_parity(world, model, alone, 1e-10)


def test_copies_share_the_ranks_and_loaded_layers_have_none(world, make):
    model = nn.Sequential(nn.BatchNorm1d(2))
    world.sync_batchnorm(model)
    x = torch.arange(4.0 * SIZE).view(-1, 2)[2 * RANK : 2 * RANK + 2]
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    with pytest.raises(RuntimeError, match=r"0 was loaded .* world\.sync_batchnorm"):
        loaded(x)
    loaded.eval()(x)
    world.sync_batchnorm(loaded.train())
    make(loaded, SGD)
    assert torch.equal(loaded(x), model(x))


class OwnBatchNorm(nn.BatchNorm1d):
    """A layer of a user's own."""


def test_what_cannot_be_converted_or_trained_is_refused(world):
    theirs = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(2)))
    words = refusal(world.optimizer, theirs, SGD)
    assert "0 is a SyncBatchNorm, which asks torch.distributed" in words
    assert "world.sync_batchnorm(model)" in words
    world.optimizer(world.sync_batchnorm(theirs), SGD).close()
    assert "leave world.sync_batchnorm out" in refusal(world.sync_batchnorm, nn.Linear(2, 2))
    assert "0 is a OwnBatchNorm" in refusal(world.sync_batchnorm, nn.Sequential(OwnBatchNorm(2)))
    lazy = nn.Sequential(nn.LazyBatchNorm1d())
    assert "run a forward" in refusal(world.sync_batchnorm, lazy)
    with pytest.raises(ValueError, match="1 values a channel on all ranks together"):
        theirs(torch.ones(1 if RANK == 0 else 0, 2))
