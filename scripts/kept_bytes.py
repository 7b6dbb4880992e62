#!/usr/bin/env python3
"""What PyTorch's split backward keeps of one GPT block, in bytes per token and element of the hidden size.

    python scripts/kept_bytes.py [--hidden 256] [--heads 4] [--seq 128] [--sequences 2]

The block of `gpt.py` in bfloat16 on the CPU, through the very functions that PyTorch's zero-bubble schedules call,
`stage_backward_input` and `stage_backward_weight`. Counted are distinct storages, parameters aside: what autograd has
saved and still holds after the forward, and after the input gradient that together with the gradients that wait for the
weights. QEffect's side is the test `kept_bytes_of_the_gpt_block` of `qeffect-runtime/tests/models/kept_bytes.rs`.
"""

import argparse
import gc
import weakref

import torch
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from gpt import Block


class Saved:
    """What autograd packs; alive as long as the graph that needs it."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor


def storages(tensors) -> dict[int, int]:
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("hidden", 256), ("heads", 4), ("seq", 128), ("sequences", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    block = Block(args.hidden, args.heads, 4 * args.hidden).to(torch.bfloat16)
    shape = (args.sequences, args.seq, args.hidden)
    x = torch.randn(shape).to(torch.bfloat16).requires_grad_()
    dy = torch.randn(shape).to(torch.bfloat16)
    parameters = storages(block.parameters())
    alive: list[weakref.ref] = []

    def pack(tensor: torch.Tensor) -> Saved:
        saved = Saved(tensor)
        alive.append(weakref.ref(saved))
        return saved

    def kept(more=()) -> int:
        gc.collect()
        held = [saved.tensor for saved in (ref() for ref in alive) if saved is not None]
        found = storages([*held, *more])
        return sum(size for at, size in found.items() if at not in parameters)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
        y = block(x)
    unit = args.sequences * args.seq * args.hidden
    print(f"from F to I: {kept() / unit:.2f} bytes per token and element of the hidden size")
    _, groups = stage_backward_input([y], [dy], [x], block.parameters())
    del y
    waiting = [g for group in groups for grads in group["grads"] for g in (grads if isinstance(grads, tuple) else (grads,))]
    print(f"from I to W: {kept([g for g in waiting if g is not None]) / unit:.2f}")
    stage_backward_weight(block.parameters(), groups)
    assert all(p.grad is not None for p in block.parameters())


if __name__ == "__main__":
    main()
