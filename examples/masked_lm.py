"""An example of a task: prediction of masked tokens, by a model and a tokenizer of Hugging Face.

    pip install '.[mpich,data,hf]'
    mpirun -np 4 python -m mntrain --task examples.masked_lm:MaskedLM --hf.model bert/ \
        --data.path texts/

texts/ is a folder that `save_to_disk` of the datasets library has written.
"""

from typing import Any, cast

import torch.nn.functional as F  # noqa: N812 - torch's own abbreviation
from datasets import Dataset, load_from_disk
from torch import nn
from torch.utils.data import Subset
from transformers import AutoModelForMaskedLM, AutoTokenizer, DataCollatorForLanguageModeling

from mntrain.options.config import Config
from mntrain.tasks import Loss, Split, Task


class MaskedLM(Task):
    """Masked language modelling (Devlin et al., 2018). The loss counts masked tokens."""

    items = "masked tokens"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(config.hf.model)
        self._mask = DataCollatorForLanguageModeling(self._tokenizer)  # 15 % of the tokens
        saved = cast(Dataset, load_from_disk(config.data.path))
        self._data: Any = saved.with_transform(self._masked)
        self._train = len(saved) - max(1, round(len(saved) * config.data.valid_fraction))

    def _masked(self, batch: dict[str, list[str]]) -> dict[str, Any]:
        length = self.config.hf.max_length or 128
        texts = batch[self.config.data.text_field]
        ids = self._tokenizer(texts, padding="max_length", truncation=True, max_length=length)
        return dict(self._mask([{"input_ids": one} for one in ids["input_ids"]]))

    def model(self) -> nn.Module:
        """Return the model of the folder --hf.model."""
        return cast(nn.Module, AutoModelForMaskedLM.from_pretrained(self.config.hf.model).train())

    def dataset(self, split: Split) -> Subset[Any]:
        """Return the first texts, or for validation the last, with masks of torch's generator."""
        count = range(len(self._data))
        return Subset(
            self._data, count[: self._train] if split == "train" else count[self._train :]
        )

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> Loss:
        """Return the mean cross-entropy in nats of the masked tokens."""
        logits, labels = model(batch["input_ids"], batch["attention_mask"]).logits, batch["labels"]
        count = int((labels != -100).sum())
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return Loss(total / max(1, count), count)
