"""The built-in task: next-token prediction on text or on files of token ids."""

from torch import Tensor, nn

from mntrain.corpus.tokenizer import FileTokenizer
from mntrain.corpus.training_tokens import TrainingTokens, open_training_tokens
from mntrain.options.config import Config
from mntrain.options.huggingface import RUN_FOLDER
from mntrain.tasks import Loss
from mntrain.tasks.token_windows import TextTask, Windows
from mntrain.tasks.transformer import Transformer

_MOST = 1 << 31  # ids of a vocabulary that is taken from the data


class LanguageModel(TextTask):
    """Next-token prediction over bytes or token ids, by a small transformer.

    Without `data.valid_path`, the last `data.valid_fraction` of the windows, at least one unless it
    is 0, are the validation split. Raises ValueError for data that is missing, malformed or too
    short.
    """

    def __init__(self, config: Config) -> None:
        data = config.data
        tokenizer = "bytes" if data.tokenizer == "auto" else data.tokenizer
        text = open_training_tokens(data.path, data.glob, tokenizer, data.text_field)
        self._vocab = _vocabulary(text, config.model.vocab)
        windows = Windows(text.tokens, config.model.context, self._vocab)
        super().__init__(config, text, windows, "--model.context")

    def model(self) -> Transformer:
        """Return a new transformer of the configured size."""
        shape = self.config.model
        return Transformer(shape.layers, shape.width, shape.heads, shape.context, self._vocab)

    def loss(self, model: nn.Module, batch: Tensor) -> Loss:
        """Return the mean cross-entropy in nats of windows (b, context + 1), counted in tokens."""
        targets = batch[:, 1:]
        return Loss(model(batch[:, :-1], targets), targets.numel())

    def run_files(self) -> dict[str, bytes]:
        """Return the files of the tokenizer, which `ckpt export --hf` puts beside the weights."""
        tokenizer = self.text.tokenizer
        files = tokenizer.exported_files() if isinstance(tokenizer, FileTokenizer) else {}
        return {f"{RUN_FOLDER}/{name}": content for name, content in files.items()}

    def flops_per_item(self, model: nn.Module) -> float | None:
        """Return the FLOPs of a token, if the model is a `Transformer`."""
        if not isinstance(model, Transformer):  # in a derived task
            return None
        return model.flops_per_token(self.context)

    def regions(self, model: nn.Module) -> list[nn.Module]:
        """Return the layers, the final norm and the head."""
        if not isinstance(model, Transformer):
            return super().regions(model)
        return [*model.blocks, model.norm, model.head]

    def next_logits(self, model: nn.Module, window: Tensor) -> Tensor:
        """Return the logits (vocabulary) of the token behind ids (1, n)."""
        logits: Tensor = model(window)[0, -1]
        return logits


def _vocabulary(data: TrainingTokens, given: int) -> int:
    """Return the vocabulary size: as given, or for 0 that of the tokenizer or of the ids.

    Raises ValueError if it is less than the tokenizer's, or of ids that are none.
    """
    least = data.tokenizer.size if data.tokenizer else 0
    if 0 < given < least:
        raise ValueError(
            f"--model.vocab {given}: the tokens of the text have ids below {least}: give 0 or at "
            f"least {least}"
        )
    if given or least:
        return given or least
    if (highest := data.tokens.id_range()[1]) >= _MOST:
        raise ValueError(
            f"the data has token id {highest}, and the vocabulary would have as many ids: give a "
            f"file of token ids below {_MOST:,}, or a --model.vocab"
        )
    return 1 + highest
