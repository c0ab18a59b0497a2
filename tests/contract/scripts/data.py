"""Scripts that load, weight and evaluate in a way of their own."""

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from contract.script import backwards, batches, loss_of, make, script, step, train


def dataset(samples=48):
    [(x, y)] = batches(1, samples)
    return TensorDataset(x, y)


@script(reference="alone")  # DDP gives every rank the same weight
def unequal_shares(kit):
    """Batches of 11 samples, the last of 1, of which most ranks have none."""
    return train(kit, data=DataLoader(dataset(34), batch_size=11))


@script(reference="alone")
def accumulate_unequal_shares(kit):
    """Each pass adds the mean of its batch, of 11 samples or 1."""
    model, optimizer = make(kit)
    for turn, (x, y) in enumerate(kit.shard(DataLoader(dataset(34), batch_size=11))):
        loss_of(model, x, y).backward()
        if turn % 2:
            step(optimizer)
    return {"model": model}


@script(reference="alone")
def several_losses_of_unequal_shares(kit):
    """Two passes over one batch add two means."""
    model, optimizer = make(kit, lr=0.1)
    data = DataLoader(dataset(34), batch_size=11)
    for x, _ in backwards(kit, model, optimizer, data):
        model(x).square().mean().backward()
    return {"model": model}


@script()
def dictionaries(kit):
    model, optimizer = make(kit)
    data = [{"x": x, "more": {"y": y}, "names": ["a"] * len(y)} for x, y in batches()]
    for batch in kit.shard(data):
        assert len(batch["names"]) == len(batch["x"])
        loss_of(model, batch["x"], batch["more"]["y"]).backward()
        step(optimizer)
    return {"model": model}


@script()
def token_means(kit):
    """Sequences differ in length; the loss is the mean over the tokens of all ranks."""
    model, optimizer = make(kit)
    generator = torch.Generator().manual_seed(5)
    data = []
    for _ in range(4):
        x = torch.randn(12, 6, 5, generator=generator, dtype=torch.float64)
        y = torch.randint(3, (12, 6), generator=generator)
        y[torch.arange(6) >= torch.randint(1, 7, (12, 1), generator=generator)] = -100
        data.append((x, y))
    for x, y in kit.shard(data):
        loss = functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        kit.backward(optimizer, loss, weight=int((y != -100).sum()))
        step(optimizer)
    return {"model": model}


def train_ahead(kit, data):
    """Load the next batch before the present one is used."""
    model, optimizer = make(kit)
    source = iter(kit.shard(data))
    following = next(source)
    while following is not None:
        (x, y), following = following, next(source, None)
        loss_of(model, x, y).backward()
        step(optimizer)
    return {"model": model}


@script()
def drawn_ahead(kit):
    return train_ahead(kit, batches())


@script(refused=dict.fromkeys(range(3), "drawn before this backward"), refused_alone=True)
def drawn_ahead_unequal(kit):
    """The last batch is smaller, and drawn before the last but one is used: which is weighted?"""
    return train_ahead(kit, DataLoader(dataset(37), batch_size=12))


class SampleStream(IterableDataset):
    """Samples in a fixed order, as from a file."""

    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


@script()
def stream(kit):
    return train(kit, data=DataLoader(SampleStream(list(dataset())), batch_size=12))


@script(thorough=True)  # every worker imports torch
def workers_by_spawn(kit):
    options = {"num_workers": 1, "multiprocessing_context": "spawn"}
    return train(kit, data=DataLoader(dataset(), batch_size=12, **options))


@script()
def persistent_workers(kit):
    options = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "fork"}
    model, optimizer = make(kit)
    shard = kit.shard(DataLoader(dataset(24), batch_size=12, **options))
    for _ in range(3):
        for x, y in shard:
            loss_of(model, x, y).backward()
            step(optimizer)
    return {"model": model}


@script(reference="alone")
def evaluation(kit):
    """Each sample of the validation set counts once, though 13 do not divide by the ranks."""
    model, optimizer = make(kit)
    validation = DataLoader(dataset(13), batch_size=5)
    means = []
    for x, y in kit.shard(batches()):
        loss_of(model, x, y).backward()
        step(optimizer)
        total, count = 0.0, 0
        model.eval()
        with torch.no_grad():
            for x_valid, y_valid in kit.shard(validation):
                total += functional.cross_entropy(model(x_valid), y_valid, reduction="sum").item()
                count += len(y_valid)
        model.train()
        means.append(kit.mean(total / max(count, 1), count))
    return {"model": model, "means": means}
