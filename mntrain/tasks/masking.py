"""Masked tokens, which a model of language predicts."""

from collections.abc import Sequence, Sized
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import Dataset

from mntrain.corpus.tokenizer import FileTokenizer
from mntrain.data.randomness import mixed_seed

IGNORED = -100  # label of a token that is no target
_RANDOM, _KEPT = 0.1, 0.1  # of the tokens to predict; the others become mask tokens


class Masking:
    """The choice of tokens to predict, of which 80 % become the mask token and 10 % another token.

    As in BERT's own code, so many tokens are chosen as the fraction gives, at least one. Special
    tokens are neither chosen nor drawn.
    """

    def __init__(
        self, tokenizer: FileTokenizer, mask: int, around: Sequence[int], fraction: float
    ) -> None:
        special = tokenizer.special_ids() | {mask, *around}
        self._special = torch.tensor(sorted(special))
        everything = torch.arange(tokenizer.size)
        self._others = everything[~torch.isin(everything, self._special)]
        self._mask, self._fraction = mask, fraction
        self._around = [torch.tensor([one]) for one in around]

    def __call__(self, window: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Return the masked ids and the labels of a window, 1-D int64.

        Draws from `generator`, or from torch's default one.
        """
        candidates = (~torch.isin(window, self._special)).nonzero()[:, 0]
        wanted = min(max(1, round(len(window) * self._fraction)), len(candidates))
        order = torch.randperm(len(candidates), generator=generator)[:wanted]
        chosen = candidates[order]
        labels = torch.full_like(window, IGNORED)
        labels[chosen] = window[chosen]
        draw = torch.rand(wanted, generator=generator)
        others = torch.randint(len(self._others), (wanted,), generator=generator)
        ids = window.clone()
        ids[chosen[draw >= _RANDOM + _KEPT]] = self._mask
        random = draw < _RANDOM
        ids[chosen[random]] = self._others[others[random]]
        if self._around:
            first, last = self._around
            none = torch.tensor([IGNORED])
            ids = torch.cat((first, ids, last))
            labels = torch.cat((none, labels, none))
        return ids, labels


class MaskedWindows(Dataset[Any]):
    """Windows with some tokens masked; an item is ids, labels, and the number of masked tokens.

    `fixed`: an item is always the same. Otherwise it is drawn by torch's default generator.
    """

    def __init__(self, windows: Dataset[Tensor], masking: Masking, *, fixed: bool) -> None:
        self._windows, self._masking, self._fixed = windows, masking, fixed

    def __len__(self) -> int:
        return len(cast(Sized, self._windows))

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        seeded = torch.Generator().manual_seed(mixed_seed(index)) if self._fixed else None
        ids, labels = self._masking(self._windows[index], seeded)
        return ids, labels, int((labels != IGNORED).sum())
