"""The objectives of Hugging Face models: data and loss of each."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own abbreviation
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from mntrain.config import Config
from mntrain.corpus.labelled import LabelledTexts, read_labelled
from mntrain.corpus.text_files import (
    TRAIN_OPTIONS,
    find_files,
    is_token_ids,
)
from mntrain.corpus.token_folder import is_token_folder, open_token_folder
from mntrain.corpus.tokenizer import TOKENIZER_FILE, FileTokenizer, Tokenizer, load_tokenizer
from mntrain.corpus.training_tokens import open_training_tokens
from mntrain.corpus.validation import named_files, refuse_shared, validation_set
from mntrain.tasks import Loss, Split
from mntrain.tasks.hf_model import ModelFolder
from mntrain.tasks.masking import IGNORED, MaskedWindows, Masking
from mntrain.tasks.token_windows import TokenSplits, Windows


class TaskHead(ABC):
    """An objective, and its data. Raises ValueError for data that do not fit the model."""

    collate: Callable[[list[Any]], Any] | None = None
    items = "samples"  # that the loss counts
    tokenizer: Tokenizer | None
    files: dict[str, Path]
    values: dict[str, str]
    tokens_per_item: float | None  # computed for each item that the loss counts

    @abstractmethod
    def __init__(self, config: Config, folder: ModelFolder) -> None:
        """Read the data; a head may change the configuration of the folder's models."""

    @abstractmethod
    def dataset(self, split: Split) -> Dataset[Any] | dict[str, Dataset[Any]]:
        """Return a split; for validation, sets by name if --data.valid-path names them."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """Return the loss of a micro-batch, computed in fp32 from the logits."""

    @abstractmethod
    def describe(self) -> str:
        """Return lines about the data."""


class TokenHead(TaskHead):
    """An objective on windows of tokens."""

    items = "tokens"

    overlap = 0  # tokens that a window shares with the next one

    def __init__(self, config: Config, folder: ModelFolder) -> None:
        data = config.data
        self.length = folder.length()
        given, tokenizer = _find_tokenizer(config, folder)
        self.around = self.find_around(tokenizer)
        content = self.length - len(self.around)
        if content < 1:
            raise ValueError(f"--hf.max-length {self.length}: leaves no room for a token of text")
        self.data = open_training_tokens(data.path, data.glob, given, data.text_field)
        self.tokenizer = self.data.tokenizer
        fix = f"the model of {folder.path} has no such token; give tokens of its tokenizer"
        windows = Windows(self.data.tokens, content, folder.vocabulary, self.overlap, fix)
        self.splits = TokenSplits(config, self.data, windows, content, "--hf.max-length")
        if not self.data.checked:
            windows.check_ids()
        self.files, self.values = self.splits.files, self.splits.values

    def find_around(self, tokenizer: Tokenizer | None) -> list[int]:
        """Return the tokens that are added to a window: none, or the first and the last."""
        return []

    def describe(self) -> str:
        """Return the amount of data, its split, and how often the run passes over it."""
        return self.splits.describe()


class CausalLM(TokenHead):
    """Next-token prediction; a sample is a window of length + 1 tokens."""

    tokens_per_item = 1.0
    overlap = 1

    def dataset(self, split: Split) -> Dataset[Any] | dict[str, Dataset[Any]]:
        """Return windows (length + 1) of token ids."""
        return self.splits.dataset(split)

    def loss(self, model: nn.Module, batch: Tensor) -> Loss:
        """Return the mean cross-entropy in nats of windows (b, length + 1), counted in tokens."""
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        targets = batch[:, 1:]
        return Loss(
            F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()), targets.numel()
        )


class MaskedLM(TokenHead):
    """Prediction of masked tokens (Devlin et al., 2018).

    A sample is a window between a cls and a sep token, if the tokenizer has both. Its loss counts
    masked tokens.
    """

    def __init__(self, config: Config, folder: ModelFolder) -> None:
        super().__init__(config, folder)
        assert isinstance(self.tokenizer, FileTokenizer)  # it has a mask token
        mask = _mask_token(self.tokenizer)
        fraction = config.hf.mask_fraction
        self._masking = Masking(self.tokenizer, mask, self.around, fraction)
        content = self.length - len(self.around)
        self.tokens_per_item = self.length / max(1, round(fraction * content))

    def find_around(self, tokenizer: Tokenizer | None) -> list[int]:
        """Return the cls and the sep token. Raises ValueError if there is no mask token."""
        _mask_token(tokenizer)
        assert isinstance(tokenizer, FileTokenizer)
        ends = [tokenizer.special_token(kind) for kind in ("cls_token", "sep_token")]
        found = [end for end in ends if end is not None]
        return found if len(found) == len(ends) else []

    def dataset(self, split: Split) -> Dataset[Any] | dict[str, Dataset[Any]]:
        """Return pairs of token ids and labels; those of validation are masked always alike."""
        windows = self.splits.dataset(split)
        masked = partial(MaskedWindows, masking=self._masking, fixed=split == "valid")
        if isinstance(windows, dict):
            return {name: masked(one) for name, one in windows.items()}
        return masked(windows)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Loss:
        """Return the mean cross-entropy in nats of masked tokens, which it counts."""
        ids, labels, masked = batch
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        total = F.cross_entropy(
            logits.float().flatten(0, 1),
            labels.flatten(),
            ignore_index=IGNORED,
            reduction="sum",
        )
        count = int(masked.sum())
        return Loss(total / max(count, 1), count)


class Classification(TaskHead):
    """Classification of labelled records; a sample is token ids and the index of the label."""

    tokens_per_item = None

    def __init__(self, config: Config, folder: ModelFolder) -> None:
        data = config.data
        _, tokenizer = _find_tokenizer(config, folder)
        if data.path is None or not isinstance(tokenizer, FileTokenizer):
            raise ValueError(
                "--hf.head classification: give --data.path of .jsonl, .parquet or .arrow "
                "files, and --data.tokenizer hf:PATH or bpe:FILE"
            )
        self.tokenizer = tokenizer
        sources = find_files(data.path, data.glob)
        named = {name: index for index, name in (folder.config.id2label or {}).items()}
        known = sorted(named, key=named.__getitem__)
        labelled = read_labelled(sources, data.text_field, config.hf.label_field, known)
        folder.config.id2label = dict(enumerate(labelled.names))
        folder.config.label2id = {name: index for index, name in enumerate(labelled.names)}
        if folder.config.pad_token_id is None:
            folder.config.pad_token_id = tokenizer.end_of_text
        self.collate = partial(pad_batch, padding=folder.config.pad_token_id)
        self.files = sources.compared(TRAIN_OPTIONS)
        self.values = {"the tokenizer": tokenizer.identity, "the labels": repr(labelled.names)}
        length = folder.length()
        samples = LabelledTokens(labelled, tokenizer, length)
        # Files are often sorted by label; both splits should have all labels.
        count, given = len(samples), data.validation_paths
        order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
        valid = min(max(round(count * data.valid_fraction), 1), count - 1)
        valid = valid if data.valid_fraction and not given else 0
        self._train = Subset(samples, order[: count - valid])
        self._valid: dict[str, Dataset[Any]] = {}  # by name; "" is the name of an only one
        if not given:
            self._valid[""] = Subset(samples, order[count - valid :])
        self._text = (
            f"data: {count:,} records{'' if given else f', {valid:,} of them for validation,'} "
            f"with {_describe_labels(labelled)}\n{samples.describe(length)}"
        )
        for name, path in given.items():
            with validation_set(name) as options:
                found = find_files(path, data.glob, options)
                refuse_shared(sources, found, options)
                texts = read_labelled(
                    found, data.text_field, config.hf.label_field, labelled.names, only_known=True
                )
                if not texts.texts:
                    raise ValueError(f"{options.given(path)} has no records: give some")
            self._valid[name] = LabelledTokens(texts, tokenizer, length)
            self.files |= named_files(found.compared(options), options)
            self._text += (
                f"\n{options.validation}: {len(texts.texts):,} records with "
                f"{_describe_labels(texts)}"
            )

    def dataset(self, split: Split) -> Dataset[Any] | dict[str, Dataset[Any]]:
        """Return pairs of token ids and the index of the label."""
        return self._train if split == "train" else self._valid.get("", self._valid)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Loss:
        """Return the mean cross-entropy in nats over records, and the accuracy."""
        ids, attention, labels = batch
        cache = "use_cache" in inspect.signature(model.forward).parameters
        options = {"use_cache": False} if cache else {}
        logits = model(input_ids=ids, attention_mask=attention, **options).logits.float()
        accuracy = (logits.argmax(dim=1) == labels).float().mean()
        return Loss(F.cross_entropy(logits, labels), len(labels), {"accuracy": accuracy})

    def describe(self) -> str:
        """Return the number of records, of labels, and of tokens."""
        return self._text


class LabelledTokens(Dataset[Any]):
    """Token ids with labels, in two tensors that worker processes share."""

    def __init__(self, labelled: LabelledTexts, tokenizer: FileTokenizer, length: int) -> None:
        end = torch.tensor([tokenizer.end_of_text])
        samples = [
            torch.from_numpy(one) if len(one) else end
            for one in tokenizer.encode_samples(labelled.texts, length)
        ]
        self._ids = torch.cat(samples).to(torch.int32)
        self._ends = torch.tensor([0, *map(len, samples)]).cumsum(0)
        self._labels = torch.tensor(labelled.labels)

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        start, stop = self._ends[index : index + 2].tolist()
        return self._ids[start:stop].long(), int(self._labels[index])

    def describe(self, length: int) -> str:
        """Return the number of tokens, and of samples that were cut to a length."""
        full = int((self._ends.diff() == length).sum())
        return (
            f"{len(self._ids) / len(self):.1f} tokens each; {full:,} have the most, {length}, or "
            "were cut"
        )


def _describe_labels(labelled: LabelledTexts) -> str:
    """Return the number of labels, and how many records have each of the first ones."""
    counts = torch.bincount(torch.tensor(labelled.labels), minlength=len(labelled.names)).tolist()
    listed = ", ".join(
        f"{name} {count:,}" for name, count in zip(labelled.names[:8], counts, strict=False)
    )
    return f"{len(counts):,} labels: {listed}{', ...' if len(counts) > 8 else ''}"


def pad_batch(samples: list[tuple[Tensor, int]], padding: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids (b, longest), padded at the end, the attention mask, and labels (b,)."""
    ids = nn.utils.rnn.pad_sequence([one for one, _ in samples], True, padding)
    lengths = torch.tensor([len(one) for one, _ in samples])
    attention = torch.arange(ids.shape[1]) < lengths[:, None]
    return ids, attention.long(), torch.tensor([label for _, label in samples])


def _find_tokenizer(config: Config, folder: ModelFolder) -> tuple[str, Tokenizer | None]:
    """Return the tokenizer of --data.tokenizer or of the model's folder, and its option's value.

    It is None for token ids that come without one. Raises ValueError if there is none for text, or
    if it does not fit the model or the data.
    """
    path, given = config.data.path, config.data.tokenizer
    own = folder.path / TOKENIZER_FILE
    tokenizer: Tokenizer | None
    if path is not None and is_token_folder(path):
        tokenizer = open_token_folder(path).tokenizer
        if given == "auto":
            given = "bytes"  # which stands for that of the folder
            known = FileTokenizer(own).sha256 if own.is_file() else None
            if known and isinstance(tokenizer, FileTokenizer) and tokenizer.sha256 != known:
                raise ValueError(
                    f"the tokens of {path} are of another tokenizer than {own}: tokenize the text "
                    f"by `tokenize --tokenizer hf:{folder.path}`"
                )
    elif given == "auto" and own.is_file():
        given = f"hf:{own}"
        tokenizer = load_tokenizer(given)
    elif given != "auto":
        tokenizer = load_tokenizer(given)
    elif path is not None and any(map(is_token_ids, find_files(path, config.data.glob).files)):
        given, tokenizer = "bytes", None
    else:
        raise ValueError(
            f"--hf.model {folder.path} has no {TOKENIZER_FILE}: give --data.tokenizer hf:PATH, "
            "bpe:FILE or bytes"
        )
    if tokenizer is not None and tokenizer.size > folder.vocabulary:
        raise ValueError(
            f"the tokenizer has {tokenizer.size} tokens, and the model of {folder.path} only "
            f"{folder.vocabulary}: give the tokenizer of the model, or a larger vocab_size"
        )
    return given, tokenizer


def _mask_token(tokenizer: Tokenizer | None) -> int:
    """Return the id of the mask token. Raises ValueError if there is none."""
    found = tokenizer.special_token("mask_token") if isinstance(tokenizer, FileTokenizer) else None
    if found is None:
        raise ValueError(
            "--hf.head masked-lm: the tokenizer has no mask token: give --data.tokenizer hf:PATH "
            "of one that has"
        )
    return found


HEADS: dict[str, type[TaskHead]] = {
    "causal-lm": CausalLM,
    "masked-lm": MaskedLM,
    "classification": Classification,
}
