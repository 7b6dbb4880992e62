"""Times PyTorch's lowering and simulation of schedules against ours, in one run.

    cargo build --release -p qeffect-core --example time_schedules
    python scripts/bench_schedules.py [path of that program, default target/release/examples/time_schedules]

PyTorch: from its schedule as read from CSV to the lowered program (`_prepare_schedule_with_comms`, and reading the CSV),
and its dry run (`_simulate_comms_compute`) of that program. The dry run knows neither UNSHARD, RESHARD, REDUCE_GRAD, the
waits nor OVERLAP_F_B and raises on them: the first four are taken out for it, and an overlap is replaced by its parts.

Ours, in one process as PyTorch's is: read the same CSV, check everything, simulate at unit costs (the deadlock test), lower.
Imports, files and process start are not counted on either side. All are the best of several runs; one thread.
"""

import csv
import json
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

SIZES = [("Interleaved1F1B", 2, 4, 2), ("Interleaved1F1B", 4, 8, 2), ("ZBVZeroBubble", 4, 8, 2), ("DualPipeV", 4, 8, 2), ("Interleaved1F1B", 8, 32, 2), ("ZBVZeroBubble", 8, 32, 2), ("Interleaved1F1B", 16, 64, 2), ("Interleaved1F1B", 32, 256, 2)]
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
    program = sys.argv[1] if len(sys.argv) > 1 else "target/release/examples/time_schedules"
    print(f"PyTorch {torch.__version__}; best of several runs, milliseconds")
    print(f"{'schedule':18} {'P':>3} {'M':>3} {'actions':>8} {'lower':>9} {'dry run':>9} {'ours':>9} {'times':>6}")
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

            repeats = 20 if ranks < 8 else 3 if ranks < 16 else 1
            lowering, runtime = min((lower() for _ in range(repeats)), key=lambda pair: pair[0])
            home = runtime.stage_index_to_group_rank
            simulated = {rank: list(stripped(actions)) for rank, actions in runtime.pipeline_order_with_comms.items()}
            dry, _ = best(lambda: _simulate_comms_compute(simulated, lambda s: home[s], ranks * per_rank), repeats)
            ours = json.loads(subprocess.run([program, str(path)], check=True, capture_output=True, text=True).stdout)
            ours = ours["all"] * 1e-6
            actions = sum(len(actions) for actions in order)
            print(
                f"{name:18} {ranks:3} {microbatches:3} {actions:8} {lowering * 1e3:9.2f} {dry * 1e3:9.2f} {ours * 1e3:9.4f} "
                f"{(lowering + dry) / ours:6.0f}"
            )


def stripped(actions):
    """What PyTorch's dry run can take of a lowered program."""
    for action in actions:
        if action.sub_actions:
            yield from stripped(action.sub_actions)
        elif not any(word in str(action.computation_type) for word in UNKNOWN_TO_THE_DRY_RUN):
            yield action


if __name__ == "__main__":
    main()
