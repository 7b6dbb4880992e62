#!/usr/bin/env python3
"""Writes the golden files that QEffect's ops and model are tested against, computed by PyTorch.

    python scripts/goldens.py [--out qeffect-runtime/tests/golden] [--dtype float32|float64]

Six files: `ops` and `llama_ops` (inputs, outputs and gradients of every op), `model`, `llama` and `llama_tied` (parameters,
loss and every gradient of one step over several microbatches) and `curve` (a 20-step training run: initial and final
parameters, batches, learning rates, losses, norms). Inputs are drawn in float32 from fixed seeds whatever --dtype says, so that float64 answers the very same
question; the committed files are float32.
"""

import argparse
import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from gpt import GPT, LAYER_NORM_EPS, adamw, causal_attention, clip, learning_rate, set_lr
from llama import Llama, grouped_attention, rotate

CONFIG = {"vocab": 64, "hidden": 32, "heads": 4, "ffn": 64, "layers": 4, "seq": 16}
LLAMA = {"vocab": 64, "hidden": 24, "heads": 6, "kv_heads": 2, "ffn": 40, "layers": 3, "rotary_base": 500.0}
LLAMA_TIED = LLAMA | {"layers": 2, "tied": True}
LLAMA_SEQ = 13
MICROBATCHES = 4
SEQUENCES = 2
STEPS = 20
PEAK_LR, FLOOR_LR, WARMUP = 4e-3, 4e-4, 4
DECAY, BETAS, EPS, CLIP = 0.1, (0.9, 0.95), 1e-8, 1.0

TEXT = """\
Shall I compare thee to a summer's day?
Thou art more lovely and more temperate:
Rough winds do shake the darling buds of May,
And summer's lease hath all too short a date;
Sometime too hot the eye of heaven shines,
And often is his gold complexion dimm'd;
And every fair from fair sometime declines,
By chance or nature's changing course untrimm'd;
But thy eternal summer shall not fade,
Nor lose possession of that fair thou ow'st;
Nor shall death brag thou wander'st in his shade,
When in eternal lines to time thou grow'st:
So long as men can breathe or eyes can see,
So long lives this, and this gives life to thee.
"""


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Ops:
    """Collects the tensors of the op goldens under `op/name`."""

    def __init__(self, dtype: torch.dtype, seed: int):
        self.dtype = dtype
        self.tensors: dict[str, torch.Tensor] = {}
        self.random = generator(seed)

    def normal(self, *shape: int, std: float = 1.0, mean: float = 0.0) -> torch.Tensor:
        x = torch.randn(*shape, generator=self.random) * std + mean
        return x.to(self.dtype).requires_grad_()

    def integers(self, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=self.random)

    def record(self, op: str, inputs: dict[str, torch.Tensor], output: torch.Tensor, **constants: torch.Tensor) -> None:
        """Runs the backward pass from a random output gradient and keeps everything."""
        dy = torch.randn(output.shape, generator=self.random).to(self.dtype) if output.dim() else torch.ones_like(output)
        grads = torch.autograd.grad(output, list(inputs.values()), dy)
        self.keep(op, y=output, dy=dy, **inputs, **constants)
        self.keep(op, **{f"d{name}": g for name, g in zip(inputs, grads)})

    def keep(self, op: str, **tensors: torch.Tensor) -> None:
        for name, t in tensors.items():
            t = t.detach().clone().contiguous()
            self.tensors[f"{op}/{name}"] = t if t.is_floating_point() else t.to(torch.int32)


def op_goldens(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    ops = Ops(dtype, 1)

    x, w, b = ops.normal(24, 32), ops.normal(48, 32, std=0.2), ops.normal(48, std=0.3)
    ops.record("linear", {"x": x, "w": w, "b": b}, F.linear(x, w, b))

    x, w, b = ops.normal(24, 32, std=1.5, mean=0.7), ops.normal(32, std=0.3, mean=1.0), ops.normal(32, std=0.3)
    ops.record("layer_norm", {"x": x, "w": w, "b": b}, F.layer_norm(x, (32,), w, b, LAYER_NORM_EPS))

    # Wide enough to reach both flat ends.
    x = (torch.linspace(-9.0, 9.0, 257).to(dtype)).requires_grad_()
    ops.record("gelu", {"x": x}, F.gelu(x, approximate="tanh"))

    heads = 4
    qkv = ops.normal(2, 16, 96)
    ops.record("attention", {"qkv": qkv}, causal_attention(qkv, heads), heads=torch.tensor([heads]))

    # 32 draws from 20 tokens: some repeat within and across sequences, some never occur.
    wte, wpe, tokens = ops.normal(20, 32), ops.normal(16, 32), ops.integers(20, 2, 16)
    ops.record("embedding", {"wte": wte, "wpe": wpe}, wte[tokens] + wpe, tokens=tokens)

    logits, targets = ops.normal(32, 64, std=3.0), ops.integers(64, 32)
    ops.record("cross_entropy", {"logits": logits}, F.cross_entropy(logits, targets), targets=targets)

    matrix, vector = ops.normal(6, 8), ops.normal(10)
    ops.keep("adamw", matrix=matrix, vector=vector)
    optimizer = torch.optim.AdamW(
        [{"params": [matrix], "weight_decay": DECAY}, {"params": [vector], "weight_decay": 0.0}],
        lr=0.0, betas=BETAS, eps=EPS, foreach=False,
    )  # fmt: skip
    lrs = [1e-3, 2e-3, 3e-3, 2e-3, 5e-4]
    for step, lr in enumerate(lrs):
        # Gradients from 1e-6 to 1: eps matters for the smallest.
        for p in (matrix, vector):
            scale = torch.logspace(-6, 0, p.numel()).reshape(p.shape)
            p.grad = (torch.randn(p.shape, generator=ops.random) * scale).to(dtype)
        set_lr(optimizer, lr)
        ops.keep(f"adamw/{step}", matrix_grad=matrix.grad, vector_grad=vector.grad)
        optimizer.step()
        state = {"matrix": matrix, "vector": vector}
        for name, p in list(state.items()):
            state |= {f"{name}_m": optimizer.state[p]["exp_avg"], f"{name}_v": optimizer.state[p]["exp_avg_sq"]}
        ops.keep(f"adamw/{step}", **state)
    ops.keep("adamw", lr=torch.tensor(lrs, dtype=dtype))
    return ops.tensors


def llama_op_goldens(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    ops = Ops(dtype, 6)
    for rows, columns in ((1, 33), (24, 32), (70, 130)):
        x, w = ops.normal(rows, columns, std=1.5, mean=0.7), ops.normal(columns, std=0.3, mean=1.0)
        ops.record(f"rms_norm/{rows}x{columns}", {"x": x, "w": w}, F.rms_norm(x, (columns,), w, LAYER_NORM_EPS))

    # [batch, sequence, heads, elements of a head]
    for base, shape in ((1e4, (2, 1, 3, 2)), (1e4, (2, 17, 3, 6)), (5e5, (1, 100, 2, 34))):
        x = ops.normal(*shape)
        name = "rotary/" + "x".join(map(str, shape))
        ops.record(name, {"x": x}, rotate(x, base), base=torch.tensor([base], dtype=dtype))

    # batch, sequence, heads, heads of keys and values, elements of a head
    for batch, seq, heads, kv_heads, dim in ((2, 1, 2, 1, 5), (2, 17, 6, 2, 3), (1, 70, 4, 1, 8)):
        qkv = ops.normal(batch, seq, (heads + 2 * kv_heads) * dim)
        counts = torch.tensor([batch, seq, heads, kv_heads, dim])
        output = grouped_attention(qkv, heads, kv_heads)
        ops.record(f"attention/{batch}x{seq}x{heads}x{kv_heads}x{dim}", {"qkv": qkv}, output, counts=counts)

    # Wide enough to reach both flat ends.
    x = (torch.linspace(-20.0, 20.0, 257).to(dtype)).requires_grad_()
    ops.record("silu", {"x": x}, F.silu(x))
    for rows, columns in ((1, 1), (7, 33)):
        x = ops.normal(rows, 2 * columns, std=3.0)
        gate, up = x.chunk(2, dim=-1)
        ops.record(f"swiglu/{rows}x{columns}", {"x": x}, F.silu(gate) * up)
    return ops.tensors


def windows(count: int, seed: int, seq: int = CONFIG["seq"]) -> tuple[torch.Tensor, torch.Tensor]:
    """`count` random windows of the text as symbols (the rank of a character among those that occur) and the next ones."""
    alphabet = sorted(set(TEXT))
    assert len(alphabet) <= CONFIG["vocab"]
    symbols = torch.tensor([alphabet.index(c) for c in TEXT])
    starts = torch.randint(len(symbols) - seq, (count,), generator=generator(seed)).tolist()
    return torch.stack([symbols[s : s + seq] for s in starts]), torch.stack([symbols[s + 1 : s + seq + 1] for s in starts])


def backward(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
    """Leaves in .grad the microbatches' gradients summed and multiplied by 1/M once; returns the loss of each."""
    model.zero_grad(set_to_none=True)
    losses = []
    for x, y in zip(tokens, targets):
        loss = model.loss(x, y)
        loss.backward()
        losses.append(loss.detach())
    for p in model.parameters():
        p.grad.mul_(1.0 / len(tokens))
    return losses


def parameters(model: nn.Module, prefix: str) -> dict[str, torch.Tensor]:
    return {f"{prefix}/{name}": p.detach().clone() for name, p in model.named_parameters()}


def model_goldens(model: nn.Module, dtype: torch.dtype, seeds: tuple[int, int], seq: int) -> dict[str, torch.Tensor]:
    random = generator(seeds[0])
    # Larger than GPT-2's initialisation, and no zero or unit vectors: every term has weight in every gradient.
    with torch.no_grad():
        for name, p in model.named_parameters():
            layer = name.split(".")[-2:][0]
            norm = (layer.startswith("ln") or layer.endswith("norm")) and name.endswith("weight")
            p.normal_(1.0 if norm else 0.0, 0.5 if name in ("wte", "wpe") else 0.2, generator=random)
    model.to(dtype)
    shape = (MICROBATCHES, SEQUENCES, seq)
    tokens, targets = (t.reshape(shape) for t in windows(MICROBATCHES * SEQUENCES, seeds[1], seq))
    losses = backward(model, tokens, targets)
    norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()]))
    return {
        **parameters(model, "param"),
        **{f"grad/{name}": p.grad.clone() for name, p in model.named_parameters()},
        "logits": model(tokens[0]).detach(),
        "losses": torch.stack(losses),
        "loss": torch.stack(losses).mean().reshape(1),
        "norm": norm.reshape(1),
        "tokens": tokens.to(torch.int32),
        "targets": targets.to(torch.int32),
    }


def curve_goldens(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    model = GPT(**CONFIG).init_gpt2(generator(4)).to(dtype)
    first = parameters(model, "param")
    optimizer = adamw(model, decay=DECAY, betas=BETAS, eps=EPS)
    shape = (STEPS, MICROBATCHES, SEQUENCES, CONFIG["seq"])
    tokens, targets = (t.reshape(shape) for t in windows(math.prod(shape[:3]), 5))
    losses, norms, lrs = [], [], []
    for step in range(STEPS):
        losses.append(torch.stack(backward(model, tokens[step], targets[step])).mean())
        norms.append(clip(model, CLIP))
        # The learning rate that is stored is the one used: a float32 value.
        lr = learning_rate(step, peak=PEAK_LR, floor=FLOOR_LR, warmup=WARMUP, steps=STEPS)
        lrs.append(torch.tensor(lr, dtype=torch.float32))
        set_lr(optimizer, lrs[-1].item())
        optimizer.step()
    print("loss", [round(x.item(), 4) for x in losses], "norm", [round(x.item(), 3) for x in norms])
    return {
        **first,
        **parameters(model, "final"),
        "loss": torch.stack(losses),
        "norm": torch.stack(norms),
        "lr": torch.stack(lrs),
        "tokens": tokens.to(torch.int32),
        "targets": targets.to(torch.int32),
    }


def main() -> None:
    root = Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=root / "qeffect-runtime/tests/golden")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    args = parser.parse_args()
    torch.set_num_threads(1)  # one order of summation
    torch.use_deterministic_algorithms(True)
    dtype = getattr(torch, args.dtype)

    made = {"made_by": f"scripts/goldens.py, PyTorch {torch.__version__}, {args.dtype}"}
    adam = {"decay": DECAY, "beta1": BETAS[0], "beta2": BETAS[1], "eps": EPS}
    model = CONFIG | {"microbatches": MICROBATCHES, "sequences": SEQUENCES}
    llama = LLAMA | {"seq": LLAMA_SEQ, "microbatches": MICROBATCHES, "sequences": SEQUENCES}
    tied = llama | LLAMA_TIED
    curve = model | adam | {"steps": STEPS, "clip": CLIP}

    args.out.mkdir(parents=True, exist_ok=True)
    for name, tensors, config in (
        ("ops", op_goldens(dtype), adam),
        ("llama_ops", llama_op_goldens(dtype), {"eps": LAYER_NORM_EPS}),
        ("model", model_goldens(GPT(**CONFIG), dtype, (2, 3), CONFIG["seq"]), model),
        ("llama", model_goldens(Llama(**LLAMA), dtype, (7, 8), LLAMA_SEQ), llama),
        ("llama_tied", model_goldens(Llama(**LLAMA_TIED), dtype, (9, 10), LLAMA_SEQ), tied),
        ("curve", curve_goldens(dtype), curve),
    ):
        path = args.out / f"{name}.safetensors"
        # One metadata entry: with several, their order in the file would differ from run to run.
        save_file(tensors, path, metadata={"config": json.dumps(config | made)})
        print(f"{path}: {len(tensors)} tensors, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
