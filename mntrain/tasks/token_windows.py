"""Windows of tokens for training and validation, and texts that a model continues."""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own abbreviation
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from mntrain.config import Config
from mntrain.corpus.text_files import TRAIN_OPTIONS, OptionNames
from mntrain.corpus.tokens import Corpus
from mntrain.corpus.training_tokens import TrainingTokens, open_validation_tokens
from mntrain.corpus.validation import named_files, validation_set
from mntrain.tasks import Split

SAMPLE_TOKENS = 300
TEMPERATURE = 0.8
_SCANNED_BYTES = 4 << 30  # of token ids, before training begins


class Windows(Dataset[Tensor]):
    """All windows of a corpus; an item is 1-D int64 of context + overlap tokens.

    Window i begins at token i * context. With an overlap of one token, every token but the first
    is a target of next-token prediction once. Indexing raises ValueError for a token outside the
    vocabulary; `fix` says what to do then.
    """

    def __init__(
        self,
        tokens: Corpus,
        context: int,
        vocab: int,
        overlap: int = 1,
        fix: str = "give a --model.vocab above all ids, or 0 to take it from the data",
    ) -> None:
        self._tokens, self._context, self._vocab = tokens, context, vocab
        self.overlap, self._fix = overlap, fix

    def tokens_of(self, count: int) -> int:
        """Return the number of tokens of so many windows."""
        return count * self._context + self.overlap

    def over(self, tokens: Corpus, fix: str) -> "Windows":
        """Return windows of other tokens, of the same length, overlap and vocabulary."""
        return Windows(tokens, self._context, self._vocab, self.overlap, fix)

    def __len__(self) -> int:
        return max(0, len(self._tokens) - self.overlap) // self._context

    def __getitem__(self, index: int) -> Tensor:
        start = index * self._context
        window = self._tokens.read(start, start + self._context + self.overlap)
        for token in (int(window.min()), int(window.max())):
            _check_id(token, self._vocab, self._fix)
        return torch.from_numpy(window)

    def check_ids(self) -> None:
        """Scan the ids; of much data, a part. Raises ValueError for one outside the vocabulary."""
        for token in self._tokens.id_range(_SCANNED_BYTES):
            _check_id(token, self._vocab, self._fix)


class TokenSplits:
    """The windows of a job's tokens, and those that it validates on.

    These are the data of `data.valid_path`; without it, the last `data.valid_fraction` of the
    windows, at least one unless it is 0. Raises ValueError for data that are too short, and names
    `option`, which has set the windows' length, and for validation data that do not fit.
    """

    def __init__(
        self, config: Config, data: TrainingTokens, windows: Windows, length: int, option: str
    ) -> None:
        given = config.data.validation_paths
        both = not given and config.data.valid_fraction > 0
        count = len(windows)
        if count < 1 + both:
            who = (
                "training and validation need a window each" if both else "training needs a window"
            )
            raise ValueError(_too_short(data, who, windows, 1 + both, f"{option} {length}"))
        valid = min(max(round(count * config.data.valid_fraction), 1), count - 1)
        self._split = count - (valid if both else 0)
        self._config, self._data, self._windows, self._length = config, data, windows, length
        self._files = dict(data.files)
        self._lines: list[str] = []  # about the validation data
        self._valid: dict[str, Dataset[Tensor]] = {}  # of data.valid_path
        for name, path in given.items():
            with validation_set(name) as options:
                self._open_set(name, path, options, f"{option} {length}")

    def _open_set(self, name: str, path: Path, options: OptionNames, option: str) -> None:
        """Open the validation data at a path. Raises ValueError for data that do not fit."""
        given = self._config.data
        found = open_validation_tokens(path, given.glob, given.text_field, self._data, options)
        fix = f"give data of the tokenizer of {TRAIN_OPTIONS.path}, or a larger vocabulary"
        windows = self._windows.over(found.tokens, fix)
        if not len(windows):
            who = "validation needs a window"
            raise ValueError(_too_short(found, who, windows, 1, option))
        if not found.checked:
            windows.check_ids()
        self._valid[name] = windows
        self._files |= named_files(found.files, options)
        skipped = found.sources.describe_skipped()
        self._lines += [
            f"{options.validation}: {found.describe()}, {len(windows):,} windows",
            skipped and f"{options.label}: {skipped}",
        ]

    def dataset(self, split: Split) -> Dataset[Tensor] | dict[str, Dataset[Tensor]]:
        """Return the windows of a split, in the order of the corpus.

        For validation, a mapping by name if --data.valid-path names sets.
        """
        if split == "valid" and self._valid:
            return self._valid.get("", self._valid)
        all_windows = range(len(self._windows))
        chosen = all_windows[: self._split] if split == "train" else all_windows[self._split :]
        return Subset(self._windows, chosen)

    @property
    def files(self) -> dict[str, Path]:
        """The files of the data, by their path within its folder; then those for validation."""
        return self._files

    @property
    def values(self) -> dict[str, str]:
        """The identity of the tokenizer, if there is one."""
        tokenizer = self._data.tokenizer
        return {"the tokenizer": tokenizer.identity} if tokenizer else {}

    def describe(self) -> str:
        """Return the amount of data, its split, and how often the run passes over it."""
        train, windows = self._config.train, self._split
        valid = "" if self._valid else f" and {len(self._windows) - windows:,} validation"
        epochs = (
            f"; {train.steps:,} steps of {train.batch_size} windows are "
            f"{train.steps * train.batch_size / windows:.3g} epochs"
        )
        if self._config.balance.mode == "cadence":
            epochs = ""  # their batches follow the speeds of ranks
        lines = [
            f"data: {self._data.describe()}",
            f"{windows:,} training{valid} windows of {self._length} tokens{epochs}",
            self._data.sources.describe_skipped(),
            *self._lines,
        ]
        return "\n".join(line for line in lines if line)


def _too_short(data: TrainingTokens, who: str, windows: Windows, count: int, option: str) -> str:
    """Return the error for data without `count` windows, which `option` has set the length of."""
    needed = windows.tokens_of(count)
    return (
        f"the data has {len(data.tokens)} tokens, but {who}, {needed} tokens with {option}: give "
        "more data, or a shorter context"
    )


@torch.no_grad()
def continue_text(
    model: nn.Module,
    next_logits: Callable[[Tensor], Tensor],
    data: TrainingTokens,
    prompt: str,
    *,
    context: int,
    tokens: int,
    temperature: float,
    seed: int,
) -> str | None:
    """Return the prompt with the text that the model continues it with; None for token ids.

    `next_logits` maps ids (1, n), at most `context` of them, to the logits (vocabulary) of the next
    token. The text begins behind an end-of-text token, or behind a line break if the model was
    trained on joined text, and stops after `tokens` tokens or at an end-of-text token. Temperature
    0 takes the likeliest tokens. Sampling uses a CPU generator of its own, so that training's
    random state does not change. The model's training mode is restored.
    """
    tokenizer, end_of_text = data.tokenizer, data.end_of_text
    if tokenizer is None:
        return None
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    start = ord("\n") if end_of_text is None else end_of_text
    ids = [start, *tokenizer.encode([prompt])[0].tolist()]
    was_training = model.training
    model.eval()
    try:
        for _ in range(tokens):
            window = torch.tensor([ids[-context:]], device=device)
            logits = next_logits(window)[: tokenizer.size].float().cpu()
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


def scan_vocabulary(data: TrainingTokens) -> int:
    """Return a vocabulary size that holds all ids of data without a tokenizer.

    Raises ValueError for negative ids.
    """
    lowest, highest = data.tokens.id_range()
    _check_id(lowest, 1 + highest, "")
    return 1 + highest


def _check_id(token: int, vocabulary: int, fix: str) -> None:
    """Raise ValueError for a token outside the vocabulary."""
    if token < 0:
        raise ValueError(f"the data has token id {token}, and ids begin at 0: correct the data")
    if token >= vocabulary:
        raise ValueError(
            f"the data has token id {token}, outside the vocabulary of {vocabulary}: {fix}"
        )
