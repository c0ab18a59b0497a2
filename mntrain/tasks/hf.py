"""Training of Hugging Face models: language models and classifiers."""

import inspect
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own abbreviation
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from mntrain.corpus.text_files import CorpusFiles, find_files
from mntrain.corpus.tokenizer import TOKENIZER_FILE, FileTokenizer, Tokenizer, load_tokenizer
from mntrain.corpus.training_tokens import (
    named_files,
    named_in_errors,
    open_training_tokens,
    refuse_shared,
)
from mntrain.options.config import Config
from mntrain.tasks import Loss, Split, Task
from mntrain.tasks.hf_model import ModelFolder
from mntrain.tasks.token_windows import TextTask, Windows


class HuggingFaceTask(TextTask):
    """A causal language model of the transformers library from a local folder, by --hf.

    A sample is a window of length + 1 tokens. Raises ValueError for a folder or for data that do
    not fit.
    """

    def __init__(self, config: Config) -> None:
        self._folder = folder = _open_folder(config, "causal-lm")
        data, length, given = config.data, folder.length(), _tokenizer_option(config, folder)
        text = open_training_tokens(data.path, data.glob, given, data.text_field)
        _check_fits(text.tokenizer, folder)
        fix = f"the model of {folder.path} has no such token; give tokens of its tokenizer"
        windows = Windows(text.tokens, length, folder.vocabulary, fix)
        super().__init__(config, text, windows, "--hf.max-length")

    def model(self) -> nn.Module:
        """Return a new model in fp32, with the folder's weights if it has some."""
        return self._folder.make()

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """Return the mean cross-entropy in nats of windows (b, length + 1), counted in tokens."""
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        targets = batch[:, 1:]
        return Loss(
            F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()), targets.numel()
        )

    def compared_files(self) -> dict[str, Path]:
        """Return the files of the data and of the model."""
        return {**super().compared_files(), **self._folder.files()}

    def compared_values(self) -> dict[str, str]:
        """Return the identities of the tokenizer and of the model's configuration."""
        return {**super().compared_values(), **self._folder.identities}

    def run_files(self) -> dict[str, bytes]:
        """Return the files that `ckpt export --hf` puts beside the weights."""
        return self._folder.run_files(self.text.tokenizer)

    def describe_data(self) -> str:
        """Return where the weights come from, and the amount of data."""
        return f"{self._folder.describe()}\n{super().describe_data()}"

    def flops_per_item(self, model: nn.Module) -> float | None:
        """Return 6 FLOPs for each parameter of a token, without attention's products.

        Embeddings count only if they also compute the logits. None if the number does not describe
        the model: with frozen parameters or experts.
        """
        frozen = any(not parameter.requires_grad for parameter in model.parameters())
        experts = any("expert" in name for name, _ in model.named_modules())
        if frozen or experts:
            return None
        looked_up = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
        computing = {m.weight for m in model.modules() if isinstance(m, nn.Linear)}
        count = sum(p.numel() for p in model.parameters() if p not in looked_up - computing)
        return 6.0 * count

    def next_logits(self, model: nn.Module, window: Tensor) -> Tensor:
        """Return the logits (vocabulary) of the token behind ids (1, n)."""
        logits: Tensor = model(input_ids=window, use_cache=False).logits
        return logits[0, -1]


class HuggingFaceClassifier(Task):
    """A classifier of the transformers library from a local folder, by --hf.

    A sample of the labelled records is token ids and the index of the label. Raises ValueError for
    a folder or for data that do not fit.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._folder = folder = _open_folder(config, "classification")
        data, fields = config.data, (config.data.text_field, config.hf.label_field)
        tokenizer = load_tokenizer(_tokenizer_option(config, folder))
        _check_fits(tokenizer, folder)
        if not isinstance(tokenizer, FileTokenizer):
            raise ValueError("--hf.head classification: give --data.tokenizer hf:PATH or bpe:FILE")
        self._tokenizer = tokenizer
        with named_in_errors("--data.path") as label:
            sources = find_files(data.path, data.glob)
        length = folder.length()
        texts, labels = read_labelled(sources, *fields)
        names = [str(label) for label in sorted(set(labels))]
        if len(names) < 2:
            raise ValueError(f"{sources.root} has {len(names)} labels: give more records")
        named = {name: index for index, name in (folder.config.id2label or {}).items()}
        if named.keys() == set(names):
            names.sort(key=named.__getitem__)
        folder.config.id2label = dict(enumerate(names))
        ids = folder.config.label2id = {name: index for index, name in enumerate(names)}
        if folder.config.pad_token_id is None:
            folder.config.pad_token_id = tokenizer.end_of_text
        self.collate = partial(pad_batch, padding=folder.config.pad_token_id)
        self._files = sources.by_name(label)
        self._values = {"the tokenizer": tokenizer.identity, "the labels": repr(names)}
        samples = LabelledTokens(texts, labels, ids, tokenizer, length)
        # Files are often sorted by label; both splits should have all labels.
        count, given = len(samples), data.validation_paths
        order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
        valid = min(max(round(count * data.valid_fraction), 1), count - 1)
        valid = valid if data.valid_fraction and not given else 0
        self._train = Subset(samples, order[: count - valid])
        self._valid: dict[str, Dataset[Any]] = {}  # by name; "" is the name of an only one
        if not given:
            self._valid[""] = Subset(samples, order[count - valid :])
        part = "" if given else f", {valid:,} of them for validation,"
        self._lines = [f"data: {count:,} records{part} with {samples.describe()}"]
        for name, path in given.items():
            with named_in_errors("--data.valid-path", name) as label:
                files = find_files(path, data.glob)
                refuse_shared(sources, files)
                texts, labels = read_labelled(files, *fields)
                made = LabelledTokens(texts, labels, ids, tokenizer, length)
            self._valid[name] = made
            self._files |= named_files(files.by_name(label), label)
            self._lines.append(
                f"{f'validation {name}'.strip()}: {len(texts):,} records with {made.describe()}"
            )

    def model(self) -> nn.Module:
        """Return a new model in fp32, with the folder's weights if it has some."""
        return self._folder.make()

    def dataset(self, split: Split) -> Dataset[Any] | dict[str, Dataset[Any]]:
        """Return pairs of token ids and the index of the label."""
        return self._train if split == "train" else self._valid.get("", self._valid)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """Return the mean cross-entropy in nats over records, and the accuracy."""
        ids, attention, labels = batch
        cache = "use_cache" in inspect.signature(model.forward).parameters
        options = {"use_cache": False} if cache else {}
        logits = model(input_ids=ids, attention_mask=attention, **options).logits.float()
        accuracy = (logits.argmax(dim=1) == labels).float().mean()
        return Loss(F.cross_entropy(logits, labels), len(labels), {"accuracy": accuracy})

    def compared_files(self) -> dict[str, Path]:
        """Return the files of the data and of the model."""
        return {**self._files, **self._folder.files()}

    def compared_values(self) -> dict[str, str]:
        """Return the labels, and the identities of the tokenizer and the model's configuration."""
        return {**self._values, **self._folder.identities}

    def run_files(self) -> dict[str, bytes]:
        """Return the files that `ckpt export --hf` puts beside the weights."""
        return self._folder.run_files(self._tokenizer)

    def describe_data(self) -> str:
        """Return where the weights come from, and the numbers of records, labels and tokens."""
        return "\n".join([self._folder.describe(), *self._lines])


class LabelledTokens(Dataset[Any]):
    """Token ids with the indices of labels, in two tensors that worker processes share.

    `ids` are the indices by the labels' names. Raises ValueError for another label.
    """

    def __init__(
        self,
        texts: list[str],
        labels: list[Any],
        ids: dict[str, int],
        tokenizer: FileTokenizer,
        length: int,
    ) -> None:
        if unknown := sorted({str(label) for label in labels} - ids.keys()):
            raise ValueError(f"no record of --data.path has the label {unknown[0]!r}")
        end = torch.tensor([tokenizer.end_of_text])
        encoded = map(torch.from_numpy, tokenizer.encode_samples(texts, length))
        samples = [one if len(one) else end for one in encoded]
        self._ids = torch.cat(samples).to(torch.int32)
        self._ends = torch.tensor([0, *map(len, samples)]).cumsum(0)
        self._labels = torch.tensor([ids[str(label)] for label in labels])
        self._names, self._length = list(ids), length

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        start, stop = self._ends[index : index + 2].tolist()
        return self._ids[start:stop].long(), int(self._labels[index])

    def describe(self) -> str:
        """Return the numbers of labels, of records with the first ones, and of tokens."""
        counts = torch.bincount(self._labels, minlength=len(self._names)).tolist()
        first = zip(self._names[:8], counts, strict=False)
        listed = ", ".join(f"{name} {count:,}" for name, count in first)
        full = int((self._ends.diff() == self._length).sum())
        return (
            f"{len(counts):,} labels: {listed}{', ...' if len(counts) > 8 else ''}\n"
            f"{len(self._ids) / len(self):.1f} tokens each; {full:,} have the most, "
            f"{self._length}, or were cut"
        )


def read_labelled(
    sources: CorpusFiles, text_field: str, label_field: str
) -> tuple[list[str], list[Any]]:
    """Return the texts of all records and their labels, which are all integers or all text.

    Raises ValueError.
    """
    if sources.dataset is None or text_field == label_field:
        raise ValueError(
            f"{sources.root} has no labels: give a folder that the datasets library has saved, "
            "whose --data.text-field and --hf.label-field are two fields"
        )
    sources.expect_fields(text_field, label_field)
    texts, labels = ([*sources.dataset[field]] for field in (text_field, label_field))
    for field, values, kinds in (
        (text_field, texts, [{str}]),
        (label_field, labels, [{str}, {int}]),
    ):
        if values and (found := set(map(type, values))) not in kinds:
            names = ", ".join(sorted(kind.__name__ for kind in found))
            raise ValueError(
                f"{sources.root}: the values of {field!r} are of type {names}: texts must be str, "
                "and labels all str or all int"
            )
    return texts, labels


def pad_batch(samples: list[tuple[Tensor, int]], padding: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids (b, longest), padded at the end, the attention mask, and labels (b,)."""
    ids = nn.utils.rnn.pad_sequence([one for one, _ in samples], True, padding)
    lengths = torch.tensor([len(one) for one, _ in samples])
    attention = torch.arange(ids.shape[1]) < lengths[:, None]
    return ids, attention.long(), torch.tensor([label for _, label in samples])


def _tokenizer_option(config: Config, folder: ModelFolder) -> str:
    """Return the value of --data.tokenizer, in place of auto that of the model's folder.

    Raises ValueError if the folder has none for text.
    """
    path, given, own = config.data.path, config.data.tokenizer, folder.path / TOKENIZER_FILE
    if given != "auto":
        return given
    if own.is_file():
        return f"hf:{own}"
    if path is not None and find_files(path, config.data.glob).holds_ids:
        return "bytes"  # which is not applied
    raise ValueError(
        f"--hf.model {folder.path} has no {TOKENIZER_FILE}: give --data.tokenizer hf:PATH, "
        "bpe:FILE or bytes"
    )


def _check_fits(tokenizer: Tokenizer | None, folder: ModelFolder) -> None:
    """Raise ValueError for a tokenizer with more tokens than the model."""
    if tokenizer is not None and tokenizer.size > folder.vocabulary:
        raise ValueError(
            f"the tokenizer has {tokenizer.size} tokens, and the model of {folder.path} only "
            f"{folder.vocabulary}: give the tokenizer of the model, or a larger vocab_size"
        )


def _open_folder(config: Config, head: str) -> ModelFolder:
    """Return the folder --hf.model. Raises ValueError if --hf.head is not that of the task."""
    if config.hf.head != head:
        raise ValueError(
            f"--hf.head {config.hf.head}: the task {config.task} is of --hf.head {head}; derive it "
            "from HuggingFaceTask of mntrain.tasks.hf for causal-lm, from HuggingFaceClassifier "
            "for classification"
        )
    return ModelFolder(config.hf)
