"""Train nanoGPT's recipe in plain torch: one process, the tokens of `python -m mntrain`.

    python benchmarks/nanogpt.py --run.dir RUN --steps N [--data.path PATH] [--eval-every N]

The recipe is that of karpathy/nanoGPT (`model.py`, `train.py`, `config/train_shakespeare_char.py`,
MIT license), with its rates for small models and without dropout: GPT-2 with learned positions,
LayerNorm and GELU, no biases; random windows; AdamW. Sizes, batch and text are the defaults of
`python -m mntrain`, and the loss is measured on the same validation windows. Writes a line of JSON
per step into RUN/metrics.jsonl: step, loss, step_s, and eval_loss after an evaluation.
"""

import argparse
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own abbreviation
from torch import Tensor, nn

from mntrain.config import Config, DataConfig
from mntrain.corpus.training_tokens import open_training_tokens
from mntrain.data.sampling import spread
from mntrain.tasks.lm import LanguageModel

VOCAB = 256
LR, LEAST_LR, WARM_UP, BETAS, WEIGHT_DECAY, CLIP = 1e-3, 1e-4, 100, (0.9, 0.99), 0.1, 1.0


class Block(nn.Module):
    """A layer of GPT-2, without biases."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.norm_2 = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (b, t, width) to (b, t, width)."""
        b, t, width = x.shape
        parts = self.qkv(self.norm_1(x)).split(width, dim=2)
        q, k, v = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(y.transpose(1, 2).reshape(b, t, width))
        out: Tensor = x + self.mlp_out(F.gelu(self.up(self.norm_2(x))))
        return out


class GPT(nn.Module):
    """GPT-2 with tied embeddings."""

    def __init__(self, layers: int, heads: int, width: int, context: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                scale = 1 / math.sqrt(2 * layers) if name.endswith("_out.weight") else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, windows: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats of windows (b, t + 1) of tokens."""
        inputs, targets = windows[:, :-1], windows[:, 1:]
        x = self.tokens(inputs) + self.positions(torch.arange(inputs.shape[1]))
        logits = F.linear(self.norm(self.blocks(x)), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def learning_rate(step: int, steps: int) -> float:
    """Return the learning rate of a step, 0 for the first: warm-up, then half a cosine."""
    if step < WARM_UP:
        return LR * (step + 1) / (WARM_UP + 1)
    progress = (step - WARM_UP) / max(1, steps - WARM_UP)
    return LEAST_LR + (LR - LEAST_LR) * (1 + math.cos(math.pi * progress)) / 2


@torch.no_grad()
def evaluate(model: GPT, windows: Sequence[Tensor], batch: int) -> float:
    """Return the mean loss over windows."""
    model.eval()
    total = 0.0
    for start in range(0, len(windows), batch):
        part = torch.stack(list(windows[start : start + batch]))
        total += model(part).item() * len(part)
    model.train()
    return total / len(windows)


def main() -> None:
    """Train, and write the losses."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--run.dir", dest="run", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--data.path", dest="data", type=Path)
    parser.add_argument("--eval-every", type=int, default=100)
    parser.add_argument("--eval-samples", type=int, default=256)
    options = parser.parse_args()
    config = Config(data=DataConfig(path=options.data))
    shape, train = config.model, config.train
    task = LanguageModel(config)
    valid = task.dataset("valid")
    valid = [valid[index] for index in spread(len(valid), options.eval_samples)]
    tokens = open_training_tokens(options.data, config.data.glob, "bytes", "text").tokens
    # Up to the first validation window.
    text = torch.from_numpy(tokens.read(0, len(task.dataset("train")) * shape.context))
    torch.manual_seed(config.run.seed)
    model = GPT(shape.layers, shape.heads, shape.width, shape.context)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS)
    with (options.run / "metrics.jsonl").open("w") as log:
        for step in range(options.steps):
            start = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, options.steps)
            begins = torch.randint(len(text) - shape.context - 1, (train.batch_size,))
            windows = torch.stack([text[i : i + shape.context + 1] for i in begins.tolist()])
            loss = model(windows)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            record = {"step": step + 1, "loss": loss.item()}
            record["step_s"] = time.perf_counter() - start
            if (step + 1) % options.eval_every == 0 or step + 1 == options.steps:
                record["eval_loss"] = evaluate(model, valid, train.batch_size)
            print(json.dumps(record), file=log, flush=True)
    print(json.dumps({"parameters": sum(p.numel() for p in model.parameters())}))


if __name__ == "__main__":
    main()
