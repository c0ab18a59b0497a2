"""Windows of tokens for training and validation, and tasks whose models continue texts."""

from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own abbreviation
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from mntrain.corpus.training_tokens import (
    Corpus,
    TrainingTokens,
    named_files,
    named_in_errors,
    open_validation_tokens,
)
from mntrain.options.config import Config
from mntrain.tasks import Split, Task, evaluating

_SCANNED = 1 << 31  # token ids that are checked before training begins


class Windows(Dataset[Tensor]):
    """All windows of a corpus; an item is 1-D int64 of context + 1 tokens.

    Window i begins at token i * context: they overlap by one token, and every token but the first
    is a target of next-token prediction once. Indexing raises ValueError for a token outside the
    vocabulary; `fix` says what to do then.
    """

    def __init__(
        self,
        tokens: Corpus,
        context: int,
        vocab: int,
        fix: str = "give a --model.vocab above all ids, or 0 to take it from the data",
    ) -> None:
        self._tokens, self.context, self.vocab = tokens, context, vocab
        self._fix = fix

    def __len__(self) -> int:
        return max(0, len(self._tokens) - 1) // self.context

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.context
        window = self._tokens.read(start, start + self.context + 1)
        self._check(int(window.min()), int(window.max()))
        return torch.from_numpy(window)

    def check_ids(self) -> None:
        """Scan the ids; of much data, a part. Raises ValueError for one outside the vocabulary."""
        self._check(*self._tokens.id_range(_SCANNED))

    def _check(self, lowest: int, highest: int) -> None:
        for token in (lowest, highest):
            if not 0 <= token < self.vocab:
                raise ValueError(
                    f"the data has token id {token}, outside the vocabulary of {self.vocab}, whose "
                    f"ids begin at 0: {self._fix}"
                )


class TextTask(Task):
    """A task whose model continues texts: its samples are windows of tokens.

    Those to validate on are of `data.valid_path`; without it, the last `data.valid_fraction` of the
    windows, at least one unless it is 0. Raises ValueError for data that are missing, malformed or
    too short, and names `option`, which has set the windows' length; for ids outside the
    vocabulary; and for validation data that do not fit.
    """

    items = "tokens"  # that the loss counts

    def __init__(self, config: Config, text: TrainingTokens, windows: Windows, option: str) -> None:
        super().__init__(config)
        given = config.data.validation_paths
        self.text, self.context = text, windows.context
        self._windows, self._option = windows, option
        self._given_train = config.train  # whose epochs a job then replaces by steps
        both = not given and config.data.valid_fraction > 0
        who = "training and validation need a window each" if both else "training needs a window"
        self._check(text, windows, who, 1 + both)
        count = len(windows)
        valid = min(max(round(count * config.data.valid_fraction), 1), count - 1)
        self._split = count - (valid if both else 0)
        self._files: dict[str, Path] = dict(text.files)
        self._lines: list[str] = []  # about the validation data
        self._valid: dict[str, Dataset[Tensor]] = {}  # of data.valid_path
        fix = "give data of the tokenizer of --data.path, or a larger vocabulary"
        for name, path in given.items():
            with named_in_errors("--data.valid-path", name) as label:
                found = open_validation_tokens(
                    path, config.data.glob, config.data.text_field, text, label
                )
                made = Windows(found.tokens, windows.context, windows.vocab, fix)
                self._check(found, made, "validation needs a window", 1)
            self._valid[name] = made
            self._files |= named_files(found.files, label)
            skipped = found.sources.describe_skipped()
            self._lines += [
                f"{f'validation {name}'.strip()}: {found.describe()}, {len(made):,} windows",
                skipped and f"{label}: {skipped}",
            ]

    def _check(self, data: TrainingTokens, windows: Windows, who: str, count: int) -> None:
        """Raise ValueError for data without `count` windows, or with ids that do not fit."""
        if len(windows) < count:
            length = windows.context
            raise ValueError(
                f"the data has {len(data.tokens)} tokens, but {who}, "
                f"{count * length + 1} tokens with {self._option} {length}: give "
                "more data, or a shorter context"
            )
        if data.sources.holds_ids:
            windows.check_ids()

    def dataset(self, split: Split) -> Dataset[Tensor] | dict[str, Dataset[Tensor]]:
        """Return the windows of a split, in the order of the corpus.

        For validation, a mapping by name if --data.valid-path names sets.
        """
        if split == "valid" and self._valid:
            return self._valid.get("", self._valid)
        all_windows = range(len(self._windows))
        chosen = all_windows[: self._split] if split == "train" else all_windows[self._split :]
        return Subset(self._windows, chosen)

    def compared_files(self) -> dict[str, Path]:
        """Return the files of the data, by their path within its folder."""
        return self._files

    def compared_values(self) -> dict[str, str]:
        """Return the identity of the tokenizer, if there is one."""
        tokenizer = self.text.tokenizer
        return {"the tokenizer": tokenizer.identity} if tokenizer else {}

    def describe_data(self) -> str:
        """Return the amount of data, its split, and how often the run passes over it."""
        train, windows = self._given_train, self._split
        valid = "" if self._valid else f" and {len(self._windows) - windows:,} validation"
        epochs = f"; {train.epochs} epochs"
        if train.steps is not None:
            size, drop_last = train.batch_size, self.config.data.drop_last
            of_epoch = windows // size if drop_last else -(-windows // size)
            epochs = (
                f"; {train.steps:,} steps of {size} windows are "
                f"{train.steps / max(1, of_epoch):.3g} epochs"
            )
        if self.config.balance.mode == "cadence":
            epochs = ""  # their batches follow the speeds of ranks
        ids = f"; ids are below {self._windows.vocab:,}" if self.text.tokenizer is None else ""
        lines = [
            f"data: {self.text.describe()}{ids}",
            f"{windows:,} training{valid} windows of {self._windows.context} tokens{epochs}",
            self.text.sources.describe_skipped(),
            *self._lines,
        ]
        return "\n".join(line for line in lines if line)

    def next_logits(self, model: nn.Module, window: Tensor) -> Tensor:
        """Return the logits (vocabulary) of the token behind ids (1, n), at most `context`."""
        raise NotImplementedError

    def sample(
        self,
        model: nn.Module,
        prompt: str = "",
        *,
        tokens: int = 300,
        temperature: float = 0.8,
    ) -> str | None:
        """Return the prompt with the text that the model continues it with; None for token ids.

        The text begins behind an end-of-text token, or behind a line break if the model was trained
        on joined text, and stops after `tokens` tokens or at an end-of-text token. Temperature 0
        takes the likeliest tokens. A CPU generator of its own, with the run's seed, draws the
        tokens: training's random state does not change. The modes of the modules are restored.
        """
        if self.text.tokenizer is None:
            return None
        tokenizer, end_of_text = self.text.tokenizer, self.text.end_of_text
        generator = torch.Generator().manual_seed(self.config.run.seed)
        device = next(model.parameters()).device
        start = ord("\n") if end_of_text is None else end_of_text
        ids = [start, *tokenizer.encode([prompt])[0].tolist()]
        with evaluating(model):
            for _ in range(tokens):
                window = torch.tensor([ids[-self.context :]], device=device)
                logits = self.next_logits(model, window)[: tokenizer.size].float().cpu()
                if temperature == 0:
                    following = int(logits.argmax())
                else:
                    probabilities = F.softmax(logits / temperature, dim=-1)
                    following = int(torch.multinomial(probabilities, 1, generator=generator))
                if following == end_of_text:
                    break
                ids.append(following)
        return tokenizer.decode(ids[1:])
