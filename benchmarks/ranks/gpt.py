"""The GPT that every variant of step.py trains, its data, and a plain training step."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own abbreviation
from torch import Tensor, nn

from mntrain.tasks.transformer import Transformer

MODELS = {  # by millions of parameters; the small one is that of slow_links.py
    "10.9M": {"layers": 6, "width": 384, "heads": 6, "context": 64, "vocab": 704},
    "0.9M": {"layers": 4, "width": 128, "heads": 4, "context": 64, "vocab": 256},
}
LARGE = "10.9M"
MICRO_BATCH = 4
ADAMW = {"lr": 1e-3, "weight_decay": 0.01}

Batch = tuple[Tensor, Tensor]  # inputs and targets, (b, t) each


def gpt(model: str = LARGE) -> Transformer:
    """Return a model of MODELS, always with the same parameters."""
    torch.manual_seed(0)
    return Transformer(**MODELS[model])


def data(
    rank: int, count: int, model: str = LARGE, sequences: int = MICRO_BATCH
) -> Iterator[Batch]:
    """Yield this rank's batches, the same for every variant. Each token nearly fixes the next."""
    draw = torch.Generator().manual_seed(rank)
    vocab, length = MODELS[model]["vocab"], MODELS[model]["context"] + 1
    for _ in range(count):
        tokens = torch.randint(vocab, (sequences, length), generator=draw)
        for t in range(1, length):
            tokens[:, t] = (5 * tokens[:, t - 1] + tokens[:, t] % 2) % vocab
        yield tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of the next tokens."""
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Batch], Tensor]:
    """Return the step that all variants but DeepSpeed share.

    It frees the gradients, so that variants that take turns find the same memory.
    """

    def step(batch: Batch) -> Tensor:
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
