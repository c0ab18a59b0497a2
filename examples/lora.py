"""An example of a task that trains adapters (LoRA) of a Hugging Face model with peft.

    pip install '.[mpich,hf]' peft
    mpirun -np 4 python -m mntrain --task examples.lora:LoRA --hf.model llama/ --hf.max-length 512 \
        --data.path stories/ --optim.lr 2e-4 --zero.stage 1 --checkpoint.every 500

The weights of the folder --hf.model stay as they are; only the adapters train. `python -m mntrain
ckpt export RUN lora.safetensors` writes both.
"""

from torch import nn

from mntrain.options.config import Config
from mntrain.tasks.hf import HuggingFaceTask


class LoRA(HuggingFaceTask):
    """Adapters of rank 8 in the linear layers that peft chooses for the kind of model."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        try:
            import peft  # noqa: PLC0415 - optional dependency
        except ImportError as error:
            raise ImportError("adapters need peft: pip install peft") from error
        self._peft = peft

    def model(self) -> nn.Module:
        """Return the model of --hf.model with new adapters, which leave its output as it was."""
        adapters = self._peft.LoraConfig(
            r=8, lora_alpha=16, lora_dropout=0.05, task_type="CAUSAL_LM"
        )
        model: nn.Module = self._peft.get_peft_model(super().model(), adapters)
        return model

    def run_files(self) -> dict[str, bytes]:
        """Return no files: `from_pretrained` of transformers alone does not open adapters."""
        return {}
