"""The built-in task: next-token prediction on text or on files of token ids."""

from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own abbreviation
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from mntrain.config import Config
from mntrain.corpus.tokens import Corpus
from mntrain.corpus.training_tokens import TrainingTokens, open_training_tokens
from mntrain.tasks import Loss, Split, Task
from mntrain.tasks.transformer import Transformer

_SCANNED_BYTES = 4 << 30  # of token ids, before training begins
_SAMPLE_TOKENS = 300
_TEMPERATURE = 0.8


class Windows(Dataset[Tensor]):
    """All windows of a corpus; an item is 1-D int64 of context + 1 tokens.

    Window i begins at token i * context. Neighbours share one token, so that every token but the
    first is a target once. Indexing raises ValueError for a token outside the vocabulary.
    """

    def __init__(self, tokens: Corpus, context: int, vocab: int) -> None:
        self._tokens, self._context, self._vocab = tokens, context, vocab

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._context

    def __getitem__(self, index: int) -> Tensor:
        start = index * self._context
        window = self._tokens.read(start, start + self._context + 1)
        for token in (int(window.min()), int(window.max())):
            _check_id(token, self._vocab)
        return torch.from_numpy(window)


class LanguageModel(Task):
    """Next-token prediction over bytes or token ids, by a small transformer.

    The last `data.valid_fraction` of the windows, at least one unless it is 0, are the validation
    split. Raises ValueError for data that is missing, malformed or too short.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        data, context = config.data, config.model.context
        self._data = open_training_tokens(data.path, data.glob, data.tokenizer, data.text_field)
        tokens = self._data.tokens
        both = data.valid_fraction > 0
        needed = (1 + both) * context + 1
        if len(tokens) < needed:
            who = (
                "training and validation need a window each" if both else "training needs a window"
            )
            raise ValueError(
                f"the data has {len(tokens)} tokens, but {who}, {needed} tokens with "
                f"--model.context {context}: give more data, or a shorter context"
            )
        self._vocab = _vocabulary(self._data, config.model.vocab)
        self._windows = Windows(tokens, context, self._vocab)
        count = len(self._windows)
        valid = min(max(round(count * data.valid_fraction), 1), count - 1)
        self._split = count - (valid if data.valid_fraction else 0)

    def model(self) -> Transformer:
        """Return a new transformer of the configured size."""
        shape = self.config.model
        sizes = shape.layers, shape.width, shape.heads, shape.context, self._vocab
        return Transformer(*sizes, kv_heads=shape.kv_heads)

    def dataset(self, split: Split) -> Subset[Tensor]:
        """Return the windows of a split, which are contiguous in the corpus."""
        windows = range(len(self._windows))
        return Subset(
            self._windows, windows[: self._split] if split == "train" else windows[self._split :]
        )

    def loss(self, model: nn.Module, batch: Tensor) -> Loss:
        """Return the mean cross-entropy in nats of windows (b, context + 1), counted in tokens."""
        targets = batch[:, 1:]
        return Loss(model(batch[:, :-1], targets), targets.numel())

    def compared_files(self) -> dict[str, Path]:
        """Return the files of the data, by their path within its folder."""
        return self._data.files

    def compared_values(self) -> dict[str, str]:
        """Return the identity of the tokenizer, if there is one."""
        tokenizer = self._data.tokenizer
        return {"the tokenizer": tokenizer.identity} if tokenizer else {}

    def describe_data(self) -> str:
        """Return the amount of data, its split, and how often the run passes over it."""
        train, steps = self.config.train, self.config.train.steps
        windows, context = self._split, self.config.model.context
        lines = [
            f"data: {self._data.describe()}",
            f"{windows:,} training and {len(self._windows) - windows:,} validation windows of "
            f"{context} tokens; {steps:,} steps of {train.batch_size} windows are "
            f"{steps * train.batch_size / windows:.3g} epochs",
            self._data.sources.describe_skipped(),
        ]
        return "\n".join(line for line in lines if line)

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
    def sample(
        self,
        model: nn.Module,
        prompt: str = "",
        *,
        tokens: int = _SAMPLE_TOKENS,
        temperature: float = _TEMPERATURE,
        seed: int | None = None,
    ) -> str | None:
        """Return the prompt with the text that the model continues it with; None for token ids.

        The model begins behind an end-of-text token, or behind a line break if it was trained on
        joined text, and stops after `tokens` tokens or at an end-of-text token. Temperature 0 takes
        the likeliest tokens. Sampling uses a CPU generator of its own, seeded by the run's seed
        unless `seed` is given, so that training's random state does not change. The model's
        training mode is restored.
        """
        tokenizer, end_of_text = self._data.tokenizer, self._data.end_of_text
        if tokenizer is None:
            return None
        seed = self.config.run.seed if seed is None else seed
        generator = torch.Generator().manual_seed(seed)
        device = next(model.parameters()).device
        start = ord("\n") if end_of_text is None else end_of_text
        ids = [start, *tokenizer.encode([prompt])[0].tolist()]
        was_training = model.training
        model.eval()
        try:
            for _ in range(tokens):
                window = torch.tensor([ids[-self.config.model.context :]], device=device)
                logits = model(window)[0, -1, : tokenizer.size].float().cpu()
                following = _draw(logits, temperature, generator)
                if following == end_of_text:
                    break
                ids.append(following)
        finally:
            model.train(was_training)
        return tokenizer.decode(ids[1:])


def _draw(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    """Return a token id drawn from logits, 1-D; the likeliest at temperature 0."""
    if temperature == 0:
        return int(logits.argmax())
    probabilities = F.softmax(logits / temperature, dim=-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def _vocabulary(data: TrainingTokens, given: int) -> int:
    """Return the vocabulary size: as given, or for 0 that of the tokenizer or of the ids.

    Raises ValueError if it does not hold all ids; of much data, only a part is scanned if the size
    is known.
    """
    tokenizer = data.tokenizer
    if tokenizer and 0 < given < tokenizer.size:
        tokens = "its bytes" if data.tokens.is_text else f"{tokenizer.size} different ones"
        raise ValueError(
            f"--model.vocab {given}: the tokens of the text are {tokens}, so give 0 or at least "
            f"{tokenizer.size}"
        )
    size = given or (tokenizer.size if tokenizer else 0)
    if not data.checked:
        lowest, highest = data.tokens.id_range(*([_SCANNED_BYTES] if size else []))
        _check_id(lowest, size or 1 + highest)
        _check_id(highest, size or 1 + highest)
        size = size or 1 + highest
    return size


def _check_id(token: int, vocabulary: int) -> None:
    """Raise ValueError for a token outside the vocabulary."""
    if token < 0:
        raise ValueError(f"the data has token id {token}, and ids begin at 0: correct the data")
    if token >= vocabulary:
        raise ValueError(
            f"the data has token id {token}, outside the vocabulary of {vocabulary}: "
            "give a --model.vocab above all ids, or 0 to take it from the data"
        )
