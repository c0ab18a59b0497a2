"""The Hugging Face Trainer, in a script for torchrun but for the two lines that name mntrain.

    mpirun -np 2 python examples/torch_backend/hf_trainer.py

A tiny GPT-2 from a configuration learns to count. Needs transformers and accelerate.
"""

import tempfile

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import mntrain.torch_backend  # noqa: F401 - registers the backend


class Counting(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences that count up modulo 50, from every start."""

    def __len__(self) -> int:
        """Return the number of sequences."""
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return a sequence, which is also its own target."""
        tokens = torch.arange(index, index + 17) % 50
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    """Train, and print the loss of an evaluation."""
    dist.init_process_group("mntrain")
    set_seed(0)
    config = GPT2Config(
        vocab_size=50,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        num_train_epochs=6,
        per_device_train_batch_size=16,
        learning_rate=1e-2,
        logging_steps=1000,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=Counting())
    trainer.train()
    result = trainer.evaluate(Counting())
    if dist.get_rank() == 0:
        print(f"loss {result['eval_loss']:.4f} on {arguments.world_size} ranks", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
