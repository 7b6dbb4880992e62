"""The reference model in PyTorch: a byte-level GPT whose parameter names, shapes and initialisation are QEffect's.

Parameters: wte, wpe, blocks.{i}.{ln1,ln2}.{weight,bias}, blocks.{i}.{qkv,proj,fc1,fc2}.{weight,bias},
ln_f.{weight,bias}, head.weight. Matrices are [out, in], row-major; `qkv` is packed [q; k; v]; the head has no bias
and is not tied to wte.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

LAYER_NORM_EPS = 1e-5


def causal_attention(qkv: torch.Tensor, heads: int) -> torch.Tensor:
    """Causal multi-head attention of [batch, seq, 3 * hidden] rows packed as q, k, v."""
    batch, seq, width = qkv.shape
    hidden = width // 3
    q, k, v = (
        part.reshape(batch, seq, heads, hidden // heads).transpose(1, 2) for part in qkv.split(hidden, dim=-1)
    )
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(1, 2).reshape(batch, seq, hidden)


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, hidden: int, heads: int, ffn: int):
        super().__init__()
        self.heads = heads
        self.ln1 = nn.LayerNorm(hidden, eps=LAYER_NORM_EPS)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.proj = nn.Linear(hidden, hidden)
        self.ln2 = nn.LayerNorm(hidden, eps=LAYER_NORM_EPS)
        self.fc1 = nn.Linear(hidden, ffn)
        self.fc2 = nn.Linear(ffn, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.proj(causal_attention(self.qkv(self.ln1(x)), self.heads))
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x)), approximate="tanh"))


class GPT(nn.Module):
    """Embedding, `layers` blocks, final norm and an untied head."""

    def __init__(self, *, vocab: int, hidden: int, heads: int, ffn: int, layers: int, seq: int):
        super().__init__()
        self.layers = layers
        self.wte = nn.Parameter(torch.empty(vocab, hidden))
        self.wpe = nn.Parameter(torch.empty(seq, hidden))
        self.blocks = nn.ModuleList(Block(hidden, heads, ffn) for _ in range(layers))
        self.ln_f = nn.LayerNorm(hidden, eps=LAYER_NORM_EPS)
        self.head = nn.Linear(hidden, vocab, bias=False)

    @torch.no_grad()
    def init_gpt2(self, generator: torch.Generator, std: float = 0.02) -> "GPT":
        """GPT-2's initialisation: normal matrices, residual projections scaled by depth, zero biases, unit norms."""
        residual = std / math.sqrt(2 * self.layers)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                p.normal_(0.0, residual if name.endswith(("proj.weight", "fc2.weight")) else std, generator=generator)
            else:
                p.fill_(1.0 if name.split(".")[-2].startswith("ln") and name.endswith("weight") else 0.0)
        return self

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte[tokens] + self.wpe[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Cross-entropy in nats, averaged over all tokens of the microbatch."""
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())


def adamw(model: nn.Module, *, decay: float, betas=(0.9, 0.95), eps: float = 1e-8, fused: bool = False):
    """AdamW with decoupled decay on matrices only; the learning rate is set step by step with `set_lr`."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps, **({"fused": True} if fused else {"foreach": False}))


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets one learning rate on every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def clip(model: nn.Module, limit: float) -> torch.Tensor:
    """Scales all gradients by min(1, limit / (norm + 1e-6)) and returns the norm before."""
    return nn.utils.clip_grad_norm_(model.parameters(), limit, foreach=False)


def learning_rate(step: int, *, peak: float, floor: float, warmup: int, steps: int) -> float:
    """Linear warm-up to `peak` over `warmup` steps, then half a cosine down to `floor` at the last step."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup + 1) / max(1, steps - warmup)
    return floor + 0.5 * (peak - floor) * (1.0 + math.cos(math.pi * min(1.0, progress)))
