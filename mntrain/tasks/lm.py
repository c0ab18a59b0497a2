"""The built-in task: next-token prediction on a text or on files of token ids."""

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own abbreviation
from torch import Tensor, nn
from torch.utils.data import Dataset

from mntrain.config import Config
from mntrain.tasks import corpus
from mntrain.tasks.base import Loss, Split, Task
from mntrain.tasks.transformer import Transformer

_SAMPLE_BYTES = 300
_TEMPERATURE = 0.8


class Windows(Dataset[Tensor]):
    """Windows [first, last) of a corpus; an item is 1-D int64 of context + 1 tokens.

    Window i begins at token i * context. Neighbours share one token, so that every token but the
    first is a target once. Indexing raises ValueError for a token outside the vocabulary.
    """

    def __init__(
        self, tokens: corpus.Corpus, context: int, first: int, last: int, vocab: int
    ) -> None:
        self._tokens = tokens
        self._context = context
        self._first = first
        self._last = last
        self._vocab = vocab

    def __len__(self) -> int:
        return self._last - self._first

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = (self._first + index) * self._context
        window = self._tokens.read(start, start + self._context + 1)
        outside = window[(window < 0) | (window >= self._vocab)]
        if len(outside):
            raise ValueError(
                f"the data has token id {outside[0]}, outside the vocabulary of {self._vocab}: "
                "give a --model.vocab above all ids, or 0 to take it from the data"
            )
        return torch.from_numpy(window)


class LanguageModel(Task):
    """Next-token prediction over bytes or token ids, by a small transformer.

    The last `data.valid_fraction` of the windows, at least one, are the validation split. Raises
    ValueError for data that is missing, malformed or too short.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        data, context = config.data, config.model.context
        self._tokens = corpus.Corpus(corpus.find(data.path, data.glob))
        self._windows = (len(self._tokens) - 1) // context
        if self._windows < 2:
            raise ValueError(
                f"the data has {len(self._tokens)} tokens, but training and validation need a "
                f"window each, {2 * context + 1} tokens with --model.context {context}: "
                "give more data, or a shorter context"
            )
        self._vocab = self._vocabulary(config.model.vocab)
        valid = round(self._windows * data.valid_fraction)
        self._split = self._windows - min(max(valid, 1), self._windows - 1)

    def _vocabulary(self, given: int) -> int:
        """Return the vocabulary size: as given, or for 0 from a scan of the token ids."""
        if not self._tokens.is_text:
            return given or self._tokens.highest() + 1
        if 0 < given < corpus.BYTE_VALUES:
            raise ValueError(
                f"--model.vocab {given}: the tokens of a text are its bytes, so give 0 "
                f"or at least {corpus.BYTE_VALUES}"
            )
        return given or corpus.BYTE_VALUES

    def model(self) -> Transformer:
        """Return a new transformer of the configured size."""
        shape = self.config.model
        return Transformer(shape.layers, shape.width, shape.heads, shape.context, self._vocab)

    def dataset(self, split: Split) -> Windows:
        """Return the windows of a split, which are contiguous in the corpus."""
        first, last = (0, self._split) if split == "train" else (self._split, self._windows)
        return Windows(self._tokens, self.config.model.context, first, last, self._vocab)

    def loss(self, model: nn.Module, batch: Tensor) -> Loss:
        """Return the mean cross-entropy in nats of windows (b, context + 1), counted in tokens."""
        targets = batch[:, 1:]
        return Loss(model(batch[:, :-1], targets), targets.numel())

    def flops_per_item(self, model: nn.Module) -> float | None:
        """Return the FLOPs of a token, if the model is a `Transformer`."""
        if not isinstance(model, Transformer):  # in a derived task
            return None
        return model.flops_per_token(self.config.model.context)

    def regions(self, model: nn.Module) -> list[nn.Module]:
        """Return the layers, the final norm and the head."""
        if not isinstance(model, Transformer):
            return super().regions(model)
        return [*model.blocks, model.norm, model.head]

    @torch.no_grad()
    def sample(self, model: nn.Module) -> str | None:
        """Return text that the model generates after a line break; None for token ids.

        Sampling uses a CPU generator of its own, seeded by the run's seed, so that training's
        random state does not change. The model's training mode is restored.
        """
        if not self._tokens.is_text:
            return None
        generator = torch.Generator().manual_seed(self.config.run.seed)
        device = next(model.parameters()).device
        text = list(b"\n")
        was_training = model.training
        model.eval()
        try:
            for _ in range(_SAMPLE_BYTES):
                window = torch.tensor([text[-self.config.model.context :]], device=device)
                logits = model(window)[0, -1, : corpus.BYTE_VALUES].float().cpu()
                probabilities = F.softmax(logits / _TEMPERATURE, dim=-1)
                text.append(int(torch.multinomial(probabilities, 1, generator=generator)))
        finally:
            model.train(was_training)
        return bytes(text[1:]).decode("utf-8", errors="replace")
