"""The built-in task: next-token prediction on a text or on files of token ids."""

import bisect
import functools
import itertools
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own abbreviation
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from mntrain.config import Config
from mntrain.tasks import Loss, Split, Task
from mntrain.tasks.transformer import Transformer

_BYTE_VALUES = 256  # the vocabulary of a text, whose tokens are its bytes
_ID_SUFFIXES = (".bin", ".npy")
_NOT_SOURCES = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
_SAMPLE_BYTES = 300
_TEMPERATURE = 0.8


def find_files(path: Path | None, glob: str) -> list[Path]:
    """Return the files of a corpus: one file, those of a folder that match, or Python's library.

    They are sorted by path, so that the order is the same on every node. Raises ValueError if
    there are none.
    """
    if path is None:
        return _python_sources()
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(f"--data.path {path}: must be a file or a folder; give one that exists")
    try:
        files = sorted(file for file in path.glob(glob) if file.is_file())
    except (ValueError, NotImplementedError) as error:
        raise ValueError(
            f"--data.glob {glob!r} is not a pattern of files within a folder: {error}"
        ) from error
    if not files:
        raise ValueError(
            f"--data.glob {glob!r} matches no file in {path}: give another pattern, such as '**/*'"
        )
    return files


def _python_sources() -> list[Path]:
    """Return the modules of this Python's standard library, without its tests."""
    files = []
    for folder, subfolders, names in os.walk(_python_library()):
        subfolders[:] = set(subfolders) - _NOT_SOURCES  # skips site-packages, which may be large
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(files)


def _python_library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


class Corpus:
    """The concatenated tokens of some files, in the files' order. Picklable.

    A .npy file holds token ids as a 1-D array of integers, a .bin file as little-endian uint16.
    Any other file is text, whose bytes are the tokens. Raises ValueError for a malformed file, and
    for text mixed with token ids.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        texts = [path for path in files if path.suffix not in _ID_SUFFIXES]
        self.is_text = len(texts) == len(files)
        if texts and not self.is_text:
            raise ValueError(
                f"{texts[0]} is text, other files hold token ids (.bin, .npy): "
                "let --data.glob match only one kind"
            )
        _map_tokens.cache_clear()  # files may have changed since an earlier corpus of this process
        lengths = {path: length for path in files if (length := _count_tokens(path))}
        self._files = tuple(lengths)
        self._ends = tuple(itertools.accumulate(lengths.values()))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return a copy of the tokens [start, stop), which must not be empty; 1-D int64."""
        assert 0 <= start < stop <= len(self), (start, stop, len(self))
        parts = []
        file = bisect.bisect_right(self._ends, start)
        while start < stop:
            end = min(stop, self._ends[file])
            begin = self._ends[file - 1] if file else 0
            tokens = _map_tokens(self._files[file])
            parts.append(tokens[start - begin : end - begin].astype(np.int64))
            start, file = end, file + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def highest(self) -> int:
        """Return the highest token id, by scanning all files."""
        return max(int(_map_tokens(path).max()) for path in self._files)


@functools.lru_cache(maxsize=64)  # a map holds a file descriptor; a process may have only 256
def _map_tokens(path: Path) -> npt.NDArray[Any]:
    """Map the tokens of a file, 1-D. Raises ValueError for a malformed .npy file."""
    if path.suffix != ".npy":
        return np.asarray(np.memmap(path, dtype="<u2" if path.suffix == ".bin" else "u1", mode="r"))
    try:
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is not a .npy file of token ids: {error}") from error
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(
            f"{path} holds {ids.dtype} of shape {ids.shape}: "
            "save the token ids as a 1-D array of integers"
        )
    return np.asarray(ids)


def _count_tokens(path: Path) -> int:
    """Return the number of tokens in a file, from its size or its header."""
    if path.suffix == ".npy":
        return len(_map_tokens(path))
    size = path.stat().st_size
    if path.suffix != ".bin":
        return size
    if size % 2:
        raise ValueError(
            f"{path} has {size} bytes, an odd number: "
            "a .bin file holds token ids as little-endian uint16, two bytes each"
        )
    return size // 2


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
        outside = window[(window < 0) | (window >= self._vocab)]
        if len(outside):
            raise ValueError(
                f"the data has token id {outside[0]}, outside the vocabulary of {self._vocab}: "
                "give a --model.vocab above all ids, or 0 to take it from the data"
            )
        return torch.from_numpy(window)


class LanguageModel(Task):
    """Next-token prediction over bytes or token ids, by a small transformer.

    The last `data.valid_fraction` of the windows, at least one unless it is 0, are the validation
    split. Raises ValueError for data that is missing, malformed or too short.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        data, context = config.data, config.model.context
        self._corpus_files = find_files(data.path, data.glob)
        tokens = Corpus(self._corpus_files)
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
        self._is_text = tokens.is_text
        self._vocab = _vocabulary(tokens, config.model.vocab)
        self._windows = Windows(tokens, context, self._vocab)
        count = len(self._windows)
        valid = min(max(round(count * data.valid_fraction), 1), count - 1)
        self._split = count - (valid if data.valid_fraction else 0)

    def model(self) -> Transformer:
        """Return a new transformer of the configured size."""
        shape = self.config.model
        return Transformer(shape.layers, shape.width, shape.heads, shape.context, self._vocab)

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
        """Return the corpus: one file, or files by their path within its folder."""
        root = self.config.data.path or _python_library()
        if root.is_file():
            return {"--data.path": root}
        return {os.path.relpath(file, root): file for file in self._corpus_files}

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
        if not self._is_text:
            return None
        generator = torch.Generator().manual_seed(self.config.run.seed)
        device = next(model.parameters()).device
        text = list(b"\n")
        was_training = model.training
        model.eval()
        try:
            for _ in range(_SAMPLE_BYTES):
                window = torch.tensor([text[-self.config.model.context :]], device=device)
                logits = model(window)[0, -1, :_BYTE_VALUES].float().cpu()
                probabilities = F.softmax(logits / _TEMPERATURE, dim=-1)
                text.append(int(torch.multinomial(probabilities, 1, generator=generator)))
        finally:
            model.train(was_training)
        return bytes(text[1:]).decode("utf-8", errors="replace")


def _vocabulary(tokens: Corpus, given: int) -> int:
    """Return the vocabulary size: as given, or for 0 from a scan of the token ids."""
    if not tokens.is_text:
        return given or tokens.highest() + 1
    if 0 < given < _BYTE_VALUES:
        raise ValueError(
            f"--model.vocab {given}: the tokens of a text are its bytes, so give 0 "
            f"or at least {_BYTE_VALUES}"
        )
    return given or _BYTE_VALUES
