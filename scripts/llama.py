"""The second reference model in PyTorch: a byte-level Llama whose parameter names and shapes are QEffect's.

Parameters: wte, blocks.{i}.{attention_norm,mlp_norm}.weight, blocks.{i}.{qkv,proj,gate_up,down}.weight, norm.weight,
head.weight, which a tied model has not: its head is wte. Matrices are [out, in], row-major; `qkv` is packed [q; k; v],
`gate_up` [gate; up]; nothing has a bias.
"""

import torch
import torch.nn.functional as F
from torch import nn

from gpt import LAYER_NORM_EPS


def rotate(x: torch.Tensor, base: float) -> torch.Tensor:
    """Turns pairs (j, j + dim / 2) of [batch, seq, heads, dim] by position * base^(-2j / dim)."""
    _, seq, _, dim = x.shape
    frequencies = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.outer(torch.arange(seq, dtype=torch.float64), frequencies)
    cos, sin = (t.to(x.dtype)[None, :, None, :] for t in (angles.cos(), angles.sin()))
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def grouped_attention(qkv: torch.Tensor, heads: int, kv_heads: int, base: float | None = None) -> torch.Tensor:
    """Causal attention of rows packed as q, k, v where several heads share a key and a value; with `base`, turned."""
    batch, seq, width = qkv.shape
    dim = width // (heads + 2 * kv_heads)
    parts = qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=-1)
    q, k, v = (part.reshape(batch, seq, -1, dim) for part in parts)
    if base is not None:
        q, k = rotate(q, base), rotate(k, base)
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    k, v = (part.repeat_interleave(heads // kv_heads, dim=1) for part in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, seq, heads * dim)


class Block(nn.Module):
    """Pre-norm block: grouped attention over turned queries and keys, and a gated MLP."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, ffn: int, rotary_base: float):
        super().__init__()
        self.heads, self.kv_heads, self.base = heads, kv_heads, rotary_base
        self.attention_norm = nn.RMSNorm(hidden, eps=LAYER_NORM_EPS)
        self.qkv = nn.Linear(hidden, (heads + 2 * kv_heads) * (hidden // heads), bias=False)
        self.proj = nn.Linear(hidden, hidden, bias=False)
        self.mlp_norm = nn.RMSNorm(hidden, eps=LAYER_NORM_EPS)
        self.gate_up = nn.Linear(hidden, 2 * ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attended = grouped_attention(self.qkv(self.attention_norm(x)), self.heads, self.kv_heads, self.base)
        x = x + self.proj(attended)
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    """Embedding, `layers` blocks, final norm and a head, of its own or with the weight of the embedding."""

    def __init__(
        self,
        *,
        vocab: int,
        hidden: int,
        heads: int,
        kv_heads: int,
        ffn: int,
        layers: int,
        rotary_base: float,
        tied: bool = False,
    ):
        super().__init__()
        self.wte = nn.Parameter(torch.empty(vocab, hidden))
        self.blocks = nn.ModuleList(Block(hidden, heads, kv_heads, ffn, rotary_base) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden, eps=LAYER_NORM_EPS)
        self.head = nn.Linear(hidden, vocab, bias=False)
        if tied:
            self.head.weight = self.wte

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte[tokens]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Cross-entropy in nats, averaged over all tokens of the microbatch."""
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())
