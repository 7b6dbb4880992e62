#!/usr/bin/env python3
"""The main command's counterpart in PyTorch: the same GPT, data split, optimizer and schedule of learning rates, in
float32 and one process, without a pipeline.

    python scripts/pretrain_torch.py --threads 2 --target 2.4

Prints one JSON object per evaluation (seconds of training, evaluation excluded; tokens; losses) and a last one with the
time and tokens at which the held-out loss first fell below each target.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch

from gpt import GPT, adamw, clip, learning_rate, set_lr


class Data:
    """Bytes of a text: the first 90 % for training, the last 10 % held out."""

    def __init__(self, path: Path, seq: int, held_out_bytes: int, device: torch.device):
        text = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()
        cut = len(text) * 9 // 10
        self.train, held_out = text[:cut].to(device), text[cut:].to(device)
        # The first whole windows of the held-out part, as the main command takes them: a fixed sample.
        available = (len(held_out) - 1) // seq
        count = min(available, -(-held_out_bytes // seq))
        starts = torch.arange(count, device=device) * seq
        self.inputs, self.targets = windows(held_out, starts, seq)
        self.seq = seq

    def batch(self, random: torch.Generator, sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(self.train) - self.seq, (sequences,), generator=random).to(self.train.device)
        return windows(self.train, starts, self.seq)


def windows(text: torch.Tensor, starts: torch.Tensor, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
    at = starts[:, None] + torch.arange(seq, device=text.device)
    return text[at], text[at + 1]


@torch.no_grad()
def evaluate(model: GPT, data: Data, rows: int = 256) -> float:
    total = 0.0
    for x, y in zip(data.inputs.split(rows), data.targets.split(rows)):
        total += model.loss(x, y).item() * len(x)
    return total / len(data.inputs)


def train(args: argparse.Namespace, emit) -> dict:
    device = torch.device(args.device)
    data = Data(args.data, args.seq, args.held_out_bytes, device)
    random = torch.Generator().manual_seed(args.seed)
    model = GPT(vocab=256, hidden=args.hidden, heads=args.heads, ffn=args.ffn, layers=args.layers, seq=args.seq)
    std = args.init_std or 0.02 * (768 / args.hidden) ** 0.5
    model = model.init_gpt2(random, std).to(device)
    optimizer = adamw(model, decay=args.decay, betas=(args.beta1, args.beta2), fused=device.type == "cuda" or args.fused)
    emit({"parameters": sum(p.numel() for p in model.parameters()), "held_out_bytes": data.targets.numel()})

    reached: dict[str, dict] = {}
    best, seconds, tokens = float("inf"), 0.0, 0
    per_step = args.microbatches * args.sequences * args.seq
    for step in range(args.steps):
        begin = time.perf_counter()
        floor = args.lr * args.floor
        set_lr(optimizer, learning_rate(step, peak=args.lr, floor=floor, warmup=args.warmup, steps=args.steps))
        model.zero_grad(set_to_none=True)
        # Equal microbatches: the mean over all of them is the mean of their means.
        for _ in range(args.microbatches // args.fold):
            loss = model.loss(*data.batch(random, args.sequences * args.fold))
            (loss * args.fold / args.microbatches).backward()
        clip(model, args.clip)
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds += time.perf_counter() - begin
        tokens += per_step
        last = step + 1 == args.steps
        if (step + 1) % args.evaluate_every == 0 or last:
            held_out = evaluate(model, data)
            best = min(best, held_out)
            line = {"step": step + 1, "seconds": round(seconds, 3), "tokens": tokens}
            emit(line | {"loss": round(loss.item(), 4), "held_out": round(held_out, 4)})
            for target in args.target:
                if held_out < target:
                    reached.setdefault(str(target), line)
            if args.stop and len(reached) == len(args.target):
                break
    return {"reached": reached, "held_out": round(held_out, 4), "best": round(best, 4), "seconds": round(seconds, 3),
            "tokens": tokens, "tokens_per_second": round(tokens / seconds)}  # fmt: skip


def arguments() -> argparse.ArgumentParser:
    root = Path(__file__).resolve().parent.parent
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--data", type=Path, default=root / "examples/data/shakespeare.txt")
    p.add_argument("--hidden", type=int, default=128)
    p.add_argument("--heads", type=int, default=4)
    p.add_argument("--ffn", type=int, default=512)
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--seq", type=int, default=64)
    p.add_argument("--microbatches", type=int, default=8)
    p.add_argument("--sequences", type=int, default=2, help="sequences of a microbatch")
    p.add_argument("--fold", type=int, default=1, help="microbatches computed together (the same gradient, fewer calls)")
    p.add_argument("--steps", type=int, default=500)
    p.add_argument("--lr", type=float, default=4.5e-3, help="peak learning rate")
    p.add_argument("--floor", type=float, default=0.1, help="last learning rate as a fraction of the peak")
    p.add_argument("--warmup", type=int, default=50, help="steps of linear warm-up")
    p.add_argument("--decay", type=float, default=0.1, help="decoupled weight decay of matrices")
    p.add_argument("--beta1", type=float, default=0.9)
    p.add_argument("--beta2", type=float, default=0.95)
    p.add_argument("--clip", type=float, default=1.0)
    p.add_argument("--init-std", type=float, help="default: GPT-2's 0.02, which is for hidden 768, times sqrt(768 / hidden)")
    p.add_argument("--fused", action="store_true", help="PyTorch's fused AdamW")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--target", type=float, action="append", help="held-out loss to time; may be repeated")
    p.add_argument("--stop", action="store_true", help="end at the last target instead of after all steps")
    p.add_argument("--evaluate-every", type=int, default=25, help="steps between evaluations")
    p.add_argument("--held-out-bytes", type=int, default=65536, help="size of the fixed held-out sample")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--device", default="cpu")
    return p


def main() -> None:
    args = arguments().parse_args()
    args.target = args.target or [2.4]
    if args.hidden % args.heads or args.microbatches % args.fold:
        sys.exit("--heads must divide --hidden and --fold must divide --microbatches")
    torch.set_num_threads(args.threads)
    emit = lambda line: print(json.dumps(line), flush=True)
    emit(train(args, emit))


if __name__ == "__main__":
    main()
