"""A small decoder-only transformer: pre-norm, rotary positions, SwiGLU, tied embedding.

    tokens (b, t) -> embedding -> layers x [ x + attention(norm(x)); x + mlp(norm(x)) ]
                  -> norm -> embedding transposed -> logits (b, t, vocab)

Shapes below: b samples, t positions, w width, h heads, d = w / h.
"""

import math

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own abbreviation
from torch import Tensor, nn

_INIT_STD = 0.02  # GPT-2's


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in fp32.

    The backward of torch.nn.RMSNorm takes eight times as long on a CPU. Compiled, this norm is
    fused with its neighbours into one pass over memory.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized x, in its shape and dtype."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return (wide * scale).to(x.dtype) * self.weight


class Attention(nn.Module):
    """Causal self-attention with rotary positions (Su et al., 2021, arXiv 2104.09864)."""

    cos: Tensor  # (context, 1, d/2)
    sin: Tensor

    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        half = width // heads // 2
        frequencies = 10_000.0 ** -(torch.arange(half) / half)
        angles = torch.outer(torch.arange(context), frequencies)[:, None, :]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (b, t, w) to (b, t, w)."""
        b, t, w = x.shape
        qk, v = self.qkv(x).split([2 * w, w], dim=-1)
        qk = self._rotate(qk.view(b, t, 2 * self.heads, w // self.heads)).transpose(1, 2)
        q, k = qk.chunk(2, dim=1)  # (b, h, t, d)
        v = v.view(b, t, self.heads, w // self.heads).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).reshape(b, t, w))
        return out

    def _rotate(self, x: Tensor) -> Tensor:
        """Rotate the pairs (i, i + d/2) of (b, t, h, d) by the angles of their positions."""
        cos, sin = self.cos[: x.shape[1]], self.sin[: x.shape[1]]
        first, second = x.chunk(2, dim=-1)
        rotated = (first * cos - second * sin, first * sin + second * cos)
        return torch.cat(rotated, dim=-1).to(x.dtype)  # autocast keeps cos and sin in fp32


class MLP(nn.Module):
    """SwiGLU (Shazeer, 2020): silu(gate(x)) * up(x), then down."""

    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = 64 * math.ceil(width * 8 / 3 / 64)  # as many weights as an MLP of 4 * width
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (b, t, w) to (b, t, w)."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        out: Tensor = self.down(F.silu(gate) * up)
        return out


class Block(nn.Module):
    """One layer: attention and MLP, each with a norm before it and a residual connection."""

    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(width)
        self.attention = Attention(width, heads, context)
        self.mlp_norm = RMSNorm(width)
        self.mlp = MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (b, t, w) to (b, t, w)."""
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Head(nn.Module):
    """Output logits, or their loss. A module without weights, so that it can be compiled."""

    def forward(self, x: Tensor, weight: Tensor, targets: Tensor | None) -> Tensor:
        """Return the logits (b, t, vocab) of x (b, t, w) by the embedding's weight (vocab, w).

        With targets (b, t), return the mean cross-entropy, 0-dim, computed in fp32. Compiled, the
        fp32 logits are never written to memory.
        """
        logits = F.linear(x, weight)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Transformer(nn.Module):
    """The language model; `context` is the largest number of positions.

    Initial weights are normal with standard deviation 0.02, and 0.02 / sqrt(2 layers) for the
    projections onto the residual stream, as in GPT-2.
    """

    def __init__(self, layers: int, width: int, heads: int, context: int, vocab: int) -> None:
        super().__init__()
        assert width % (2 * heads) == 0, (width, heads)
        self.context = context
        self.embedding = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, heads, context) for _ in range(layers))
        self.norm = RMSNorm(width)
        self.head = Head()
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                onto_residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
                scale = 1 / math.sqrt(2 * layers) if onto_residual else 1.0
                nn.init.normal_(parameter, std=_INIT_STD * scale)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the next tokens' logits (b, t, vocab) of token ids (b, t), t at most `context`.

        With the next tokens (b, t) as targets, return their mean cross-entropy in nats, 0-dim.
        """
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x), self.embedding.weight, targets)
        return out

    def flops_per_token(self, context: int) -> float:
        """Return the FLOPs of one token's forward and backward, in sequences of `context`.

        6 N + 12 layers * width * context / 2. N counts the weights of all matrices, the embedding
        being one as the output projection; the attention term is halved because it is causal.
        Source: PaLM, appendix B (Chowdhery et al., 2022, arXiv 2204.02311).
        """
        matrices = sum(p.numel() for p in self.parameters() if p.dim() == 2)
        width = self.embedding.embedding_dim
        return 6 * matrices + 12 * len(self.blocks) * width * context / 2
