"""Writes the schedules that PyTorch ships as CSV, to compare them with ours.

    python scripts/pytorch_schedules.py [folder, default tests/golden/pytorch]

Per schedule and size two files: NAME_P{ranks}_M{microbatches}[_V{stages per rank}].csv holds the compute actions,
the same name with .comms.csv the program with communication that PyTorch lowers them to. They are written as
PyTorch's own `_dump_csv` does it. No process group and no device is needed.
"""

import csv
import sys
from pathlib import Path

import torch
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

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


if __name__ == "__main__":
    main()
