"""Scripts whose models are of a kind of their own."""

import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD, AdamW

from contract.script import batches, loss_of, net, script


class TiedLanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(8)
        self.tokens, self.body, self.head = (
            nn.Embedding(7, 6),
            nn.Linear(6, 6),
            nn.Linear(6, 7, bias=False),
        )
        self.head.weight = self.tokens.weight
        self.double()

    def forward(self, tokens):
        return self.head(self.body(self.tokens(tokens)).tanh())


def sentences(count=4, samples=12, vocabulary=7):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(vocabulary, (samples, 9), generator=generator) for _ in range(count)]


@script()
def tied_weights(kit):
    model = kit.ddp(TiedLanguageModel())
    optimizer = kit.optimizer(model, AdamW, lr=0.01)
    for tokens in kit.shard(sentences()):
        out = model(tokens[:, :-1])
        functional.cross_entropy(out.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model}


@script()
def dropout(kit):
    """Every rank draws what it draws under DDP: mntrain draws nothing."""
    model = kit.ddp(nn.Sequential(net(), nn.Dropout(0.5)))
    optimizer = kit.optimizer(model, SGD, lr=0.5)
    torch.manual_seed(kit.rank)
    for x, y in kit.shard(batches()):
        loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "local draw": torch.rand(1)}


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x):
        out = self.norm1(self.conv1(x)).relu()
        return (self.norm2(self.conv2(out)) + x).relu()


@script()
def resnet(kit):
    """Running statistics are those of rank 0."""
    torch.manual_seed(9)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        Residual(4),
        nn.MaxPool2d(2),
        Residual(4),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )
    model = kit.ddp(model.double().to(memory_format=torch.channels_last))
    optimizer = kit.optimizer(model, SGD, lr=0.1, momentum=0.9, weight_decay=1e-4)
    generator = torch.Generator().manual_seed(2)
    images = [torch.randn(12, 3, 6, 6, generator=generator).double() for _ in range(4)]
    labels = [y for _, y in batches()]
    for x, y in kit.shard(list(zip(images, labels, strict=True))):
        loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model}


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(10)
        self.tokens, self.head = nn.Embedding(50, 4, sparse=True), nn.Linear(4, 3)
        self.double()

    def forward(self, tokens):
        return self.head(self.tokens(tokens).mean(dim=1))


@script()
def sparse_embedding(kit):
    model = kit.ddp(Bag())
    optimizer = kit.optimizer(model, SGD, lr=0.5)
    labels = [y for _, y in batches()]
    for tokens, y in kit.shard(list(zip(sentences(vocabulary=50), labels, strict=True))):
        loss_of(model, tokens, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model}


@script()
def lstm(kit):
    """The module keeps its weights in a list, too."""
    torch.manual_seed(13)
    model = kit.ddp(nn.LSTM(5, 3, batch_first=True).double())
    optimizer = kit.optimizer(model, SGD, lr=0.5)
    for x, y in kit.shard(batches()):
        out, _ = model(x[:, None, :])
        functional.cross_entropy(out[:, 0], y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model}


@script()
def spectral_norm(kit):
    """A parametrized weight, whose buffers change in each forward."""
    model = net()
    spectral = nn.utils.parametrizations.spectral_norm
    model[0], model[2] = spectral(model[0]), spectral(model[2])
    model = kit.ddp(model)
    optimizer = kit.optimizer(model, SGD, lr=0.5)
    for x, y in kit.shard(batches()):
        loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model}


@script(reference="alone")  # DDP must run the forward itself
def functional_call(kit):
    """The forward gets the parameters as a dictionary, which was made once."""
    model = kit.ddp(net())
    optimizer = kit.optimizer(model, SGD, lr=0.5)
    parameters = dict(model.named_parameters())
    for x, y in kit.shard(batches()):
        out = torch.func.functional_call(model, parameters, (x,))
        functional.cross_entropy(out, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model}


@script(needs="g++", thorough=True)  # the compiler takes its time
def compiled(kit):
    model = net()
    optimized = torch.compile(kit.ddp(model))
    optimizer = kit.optimizer(model, SGD, lr=0.5)
    for x, y in kit.shard(batches()):
        loss_of(optimized, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model}
