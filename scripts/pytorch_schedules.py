"""Writes the schedules that PyTorch ships as CSV, to compare them with ours, and loads what we write for it.

    python scripts/pytorch_schedules.py [folder, default tests/golden/pytorch]

Per schedule and size two files: NAME_P{ranks}_M{microbatches}[_V{stages per rank}].csv holds the compute actions,
the same name with .comms.csv the program with communication that PyTorch lowers them to. They are written as
PyTorch's own `_dump_csv` does it. No process group and no device is needed.

Then every file beside that folder, in pytorch_comms, is loaded with PyTorch's `_load_csv(format="compute_comms")`: these are
QEffect's own programs, as `qeffect schedule convert --to pytorch-comms` writes them. PyTorch must take each, its dry run must
come to the end of it, and its own lowering of the same compute actions must hold the same actions, cell for cell but for
their order. The exit code is 1 if one of this fails.
"""

import csv
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch
from bench_schedules import stages, stripped
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime, _simulate_comms_compute

# Class, our short name, [(ranks, microbatches, stages per rank)].
SCHEDULES = [
    ("GPipe", "gpipe", [(2, 4, 1), (4, 8, 1)]),
    ("1F1B", "1f1b", [(2, 4, 1), (4, 8, 1)]),
    ("LoopedBFS", "looped_bfs", [(2, 4, 2), (4, 8, 2)]),
    ("Interleaved1F1B", "interleaved_1f1b", [(2, 4, 2), (4, 8, 2), (4, 8, 3), (4, 10, 2)]),
    ("InterleavedZeroBubble", "interleaved_zb", [(2, 4, 2), (4, 8, 2)]),
    ("ZBVZeroBubble", "zb_v", [(2, 4, 2), (4, 8, 2), (4, 4, 2)]),
    ("DualPipeV", "dualpipe_v", [(2, 4, 2), (4, 8, 2)]),
]


def write(path, ranks):
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        for actions in ranks:
            writer.writerow(["" if action is None else str(action) for action in actions])


def load(path):
    """One line on a program of ours, loaded by PyTorch; raises if PyTorch refuses it."""
    microbatches = int(re.search(r"_M(\d+)", path.stem)[1])
    text = path.read_text()
    ranks = len(text.splitlines())
    per_rank = (max(int(stage) for stage in re.findall(r"(\d+)F\d", text)) + 1) // ranks

    def runtime(file, format):
        runtime = _PipelineScheduleRuntime(stages(ranks, per_rank), microbatches)
        runtime._load_csv(str(file), format=format)
        return runtime.pipeline_order_with_comms, runtime.stage_index_to_group_rank

    ours, home = runtime(path, "compute_comms")
    _simulate_comms_compute({rank: list(stripped(row)) for rank, row in ours.items()}, lambda s: home[s], ranks * per_rank)
    with tempfile.TemporaryDirectory() as folder:
        compute = Path(folder) / path.name
        write(compute, [[action for action in row if action.is_compute_op] for row in ours.values()])
        theirs, _ = runtime(compute, "compute_only")
    for rank, row in ours.items():
        # PyTorch's lowering shards and unshards by need; ours once.
        cells, expected = (Counter(str(a) for a in row if "SHARD" not in str(a)) for row in (row, theirs[rank]))
        if cells != expected:
            raise ValueError(f"rank {rank} differs: {cells - expected} here, {expected - cells} in PyTorch's lowering")
    return f"{path.stem}: loaded, {sum(map(len, ours.values()))} actions, the dry run ends, the same actions as PyTorch's lowering"


def main():
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "tests/golden/pytorch")
    folder.mkdir(parents=True, exist_ok=True)
    for name, short, sizes in SCHEDULES:
        for ranks, microbatches, stages in sizes:
            stem = f"{short}_P{ranks}_M{microbatches}" + (f"_V{stages}" if stages > 1 else "")
            write(folder / f"{stem}.csv", get_schedule_ops(name, ranks, microbatches, stages))
            try:
                lowered = get_schedule_ops(name, ranks, microbatches, stages, with_comms=True)
            except Exception as fault:  # the schedule is wrong, and PyTorch finds out here
                print(f"{stem}: not lowered: {type(fault).__name__}: {str(fault).splitlines()[0][:90]}")
            else:
                write(folder / f"{stem}.comms.csv", lowered)
    (folder / "README.md").write_text(
        f"Written by `scripts/pytorch_schedules.py` with PyTorch {torch.__version__.split('+')[0]}: "
        "schedules as its pipelining package exports them.\n"
    )
    paths = sorted((folder.parent / "pytorch_comms").glob("*.csv"))
    refused = 0
    for path in paths:
        try:
            print(load(path))
        except Exception as fault:
            refused += 1
            print(f"{path.stem}: refused: {type(fault).__name__}: {str(fault).splitlines()[0]}")
    print(f"PyTorch {torch.__version__.split('+')[0]} loads {len(paths) - refused} of {len(paths)} programs of ours")
    sys.exit(1 if refused or not paths else 0)


if __name__ == "__main__":
    main()
