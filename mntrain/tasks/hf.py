"""Training of Hugging Face models: language models and classifiers."""

from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset

from mntrain.config import Config
from mntrain.tasks import Loss, Split, Task
from mntrain.tasks.hf_heads import HEADS, CausalLM, MaskedLM
from mntrain.tasks.hf_model import ModelFolder
from mntrain.tasks.token_windows import SAMPLE_TOKENS, TEMPERATURE, continue_text


class HuggingFaceTask(Task):
    """A model of the transformers library from a local folder, by the options of --hf.

    Raises ValueError for a folder or for data that do not fit.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._folder = ModelFolder(config.hf)
        self._head = HEADS[config.hf.head](config, self._folder)
        self.collate, self.items = self._head.collate, self._head.items

    def model(self) -> nn.Module:
        """Return a new model in fp32, with the folder's weights if it has some."""
        return self._folder.make()

    def dataset(self, split: Split) -> Dataset[Any] | dict[str, Dataset[Any]]:
        """Return a split of the data; for validation, sets by name if the options name them."""
        return self._head.dataset(split)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """Return the mean cross-entropy in nats over the targets of the head."""
        return self._head.loss(model, batch)

    def compared_files(self) -> dict[str, Path]:
        """Return the files of the data and of the model."""
        return {**self._head.files, **self._folder.files()}

    def compared_values(self) -> dict[str, str]:
        """Return the identities of the tokenizer and of the model's configuration."""
        return {**self._head.values, "the model's config.json": self._folder.identity}

    def run_files(self) -> dict[str, bytes]:
        """Return the files that `ckpt export --hf` puts beside the weights."""
        return self._folder.run_files(self._head.tokenizer)

    def describe_data(self) -> str:
        """Return where the weights come from, and the amount of data."""
        return f"{self._folder.describe()}\n{self._head.describe()}"

    def flops_per_item(self, model: nn.Module) -> float | None:
        """Return 6 FLOPs for each parameter and token, without attention's products.

        Embeddings count only if they also compute the logits. None if the number does not describe
        the model: with frozen parameters, experts, or samples of different lengths.
        """
        frozen = any(not parameter.requires_grad for parameter in model.parameters())
        experts = any("expert" in name for name, _ in model.named_modules())
        if frozen or experts or self._head.tokens_per_item is None:
            return None
        looked_up = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
        computing = {m.weight for m in model.modules() if isinstance(m, nn.Linear)}
        count = sum(p.numel() for p in model.parameters() if p not in looked_up - computing)
        return 6.0 * count * self._head.tokens_per_item

    def sample(
        self,
        model: nn.Module,
        prompt: str = "",
        *,
        tokens: int = SAMPLE_TOKENS,
        temperature: float = TEMPERATURE,
        seed: int | None = None,
    ) -> str | None:
        """Return the prompt with its continuation (`continue_text`), by the run's seed or another.

        None for a model that is no causal one, and for token ids without a tokenizer.
        """
        head = self._head
        if not isinstance(head, CausalLM) or isinstance(head, MaskedLM):
            return None

        def next_logits(window: Tensor) -> Tensor:
            logits: Tensor = model(input_ids=window, use_cache=False).logits
            return logits[0, -1]

        return continue_text(
            model,
            next_logits,
            head.data,
            prompt,
            context=head.length,
            tokens=tokens,
            temperature=temperature,
            seed=self.config.run.seed if seed is None else seed,
        )
