"""Scripts whose models are of a kind of their own."""

import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD, AdamW

from contract.script import backwards, batches, make, net, script, train


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
    data = [(tokens[:, :-1], tokens[:, 1:]) for tokens in sentences()]

    def loss(model, x, y):
        return functional.cross_entropy(model(x).flatten(0, 1), y.flatten())

    return train(kit, TiedLanguageModel(), AdamW, data=data, loss=loss, lr=0.01)


@script()
def dropout(kit):
    """Every rank draws what it draws under DDP: mntrain draws nothing."""
    model = nn.Sequential(net(), nn.Dropout(0.5))
    torch.manual_seed(kit.rank)
    return {**train(kit, model), "local draw": torch.rand(1)}


class ResidualBlock(nn.Module):
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
        ResidualBlock(4),
        nn.MaxPool2d(2),
        ResidualBlock(4),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )
    model = model.double().to(memory_format=torch.channels_last)
    generator = torch.Generator().manual_seed(2)
    images = [torch.randn(12, 3, 6, 6, generator=generator).double() for _ in range(4)]
    data = [(x, y) for x, (_, y) in zip(images, batches(), strict=True)]
    return train(kit, model, SGD, data=data, lr=0.1, momentum=0.9, weight_decay=1e-4)


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
    tokens = sentences(vocabulary=50)
    data = [(x, y) for x, (_, y) in zip(tokens, batches(), strict=True)]
    return train(kit, Bag(), SGD, data=data, lr=0.5)


@script()
def lstm(kit):
    """The module keeps its weights in a list, too."""

    def loss(model, x, y):
        out, _ = model(x[:, None, :])
        return functional.cross_entropy(out[:, 0], y)

    torch.manual_seed(13)
    return train(kit, nn.LSTM(5, 3, batch_first=True).double(), loss=loss)


@script()
def spectral_norm(kit):
    """A parametrized weight, whose buffers change in each forward."""
    model = net()
    spectral = nn.utils.parametrizations.spectral_norm
    model[0], model[2] = spectral(model[0]), spectral(model[2])
    return train(kit, model)


@script(reference="alone")  # DDP must run the forward itself
def functional_call(kit):
    """The forward gets the parameters as a dictionary, which was made once."""
    model, optimizer = make(kit)
    parameters = dict(model.named_parameters())

    def loss(model, x, y):
        return functional.cross_entropy(torch.func.functional_call(model, parameters, (x,)), y)

    for _ in backwards(kit, model, optimizer, loss=loss):
        pass
    return {"model": model}


@script(needs="g++", thorough=True)  # the compiler takes its time
def compiled(kit):
    model, optimizer = make(kit)
    for _ in backwards(kit, torch.compile(model), optimizer):
        pass
    return {"model": model}
