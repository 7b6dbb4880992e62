"""Times PyTorch's lowering and simulation of schedules against ours, in one run.

    python scripts/bench_schedules.py [path of the qeffect program, default target/release/qeffect]

PyTorch: from its schedule as read from CSV to the lowered program (`_prepare_schedule_with_comms`), and its dry run
(`_simulate_comms_compute`) of that program. The dry run knows neither UNSHARD, RESHARD, REDUCE_GRAD nor the waits, so
these are taken out for it. Imports, files and process start are not counted.

Ours: the whole process `qeffect --json schedule check FILE`: start, read the same CSV, check everything, simulate at unit
costs (the deadlock test), lower, print; and the same less the start of a process that does nothing
(`qeffect --version`). All are the best of several runs.
"""

import csv
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime, _simulate_comms_compute
from torch.distributed.pipelining.stage import PipelineStage

SIZES = [("Interleaved1F1B", 4, 8, 2), ("Interleaved1F1B", 8, 32, 2), ("ZBVZeroBubble", 8, 32, 2), ("Interleaved1F1B", 16, 64, 2), ("Interleaved1F1B", 32, 256, 2)]
UNKNOWN_TO_THE_DRY_RUN = ("UNSHARD", "RESHARD", "REDUCE_GRAD", "WAIT")


def stages(ranks, per_rank):
    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.submod = 0, ranks, None
    stage.num_stages = ranks * per_rank
    return [stage] * per_rank


def best(run, repeats):
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = run()
        times.append(time.perf_counter() - start)
    return min(times), result


def main():
    program = sys.argv[1] if len(sys.argv) > 1 else "target/release/qeffect"
    print(f"PyTorch {torch.__version__}; best of several runs, milliseconds")
    print(f"{'schedule':18} {'P':>3} {'M':>3} {'actions':>8} {'lower':>9} {'dry run':>9} {'ours, all':>10} {'times':>6} {'less start':>11} {'times':>6}")
    with tempfile.TemporaryDirectory() as folder:
        for name, ranks, microbatches, per_rank in SIZES:
            order = get_schedule_ops(name, ranks, microbatches, per_rank)
            order = [[action for action in program if action is not None] for program in order]
            path = Path(folder) / f"{name}_{ranks}_{microbatches}.csv"
            with open(path, "w", newline="") as file:
                csv.writer(file).writerows([[str(action) for action in actions] for actions in order])

            def lower():
                runtime = _PipelineScheduleRuntime(stages(ranks, per_rank), microbatches)
                start = time.perf_counter()
                runtime._load_csv(str(path))
                return time.perf_counter() - start, runtime

            repeats = 3 if ranks < 16 else 1
            lowering, runtime = min((lower() for _ in range(repeats)), key=lambda pair: pair[0])
            lowered = {
                rank: [a for a in actions if not any(word in str(a.computation_type) for word in UNKNOWN_TO_THE_DRY_RUN)]
                for rank, actions in runtime.pipeline_order_with_comms.items()
            }
            home = runtime.stage_index_to_group_rank
            dry, _ = best(lambda: _simulate_comms_compute(lowered, lambda s: home[s], ranks * per_rank), repeats)
            command = [program, "--json", "schedule", "check", str(path)]
            ours, _ = best(lambda: subprocess.run(command, check=True, capture_output=True), 50)
            start, _ = best(lambda: subprocess.run([program, "--version"], check=True, capture_output=True), 50)
            alone = max(ours - start, 1e-6)
            actions = sum(len(actions) for actions in order)
            print(
                f"{name:18} {ranks:3} {microbatches:3} {actions:8} {lowering * 1e3:9.1f} {dry * 1e3:9.1f} {ours * 1e3:10.2f} "
                f"{(lowering + dry) / ours:6.0f} {alone * 1e3:11.2f} {(lowering + dry) / alone:6.0f}"
            )


if __name__ == "__main__":
    main()
