#!/usr/bin/env bash
# Trains one model with FP8 and with bf16, everything else the same, from several seeds, and compares the means of the held-out losses:
# fails if that of FP8 is more than TOLERANCE percent (1 by default) above that of bf16.
# Usage: scripts/compare_recipes.sh [CONFIG] [TOLERANCE]      CONFIG is examples/gpt_100m.toml unless given
# Environment: SEEDS (1 2 3); QEFFECT, a command that is built already; OUT, a folder in which the runs are kept.
set -euo pipefail
cd "$(dirname "$0")/.."
config=${1:-examples/gpt_100m.toml}
tolerance=${2:-1}
if [ -z "${OUT:-}" ]; then
    OUT=$(mktemp -d)
    trap 'rm -r "$OUT"' EXIT
fi
if [ -z "${QEFFECT:-}" ]; then
    cargo build --quiet --release --bin qeffect
    QEFFECT=target/release/qeffect
fi

for seed in ${SEEDS:-1 2 3}; do
    for recipe in fp8-delayed bf16; do
        "$QEFFECT" train --config "$config" --set model.recipe=$recipe --set run.seed="$seed" \
            --set run.out="'$OUT/$recipe'" >>"$OUT/$recipe.log"
    done
done
python3 - "$OUT" "$tolerance" <<'PY'
import glob, json, statistics, sys
out, tolerance = sys.argv[1], float(sys.argv[2])
means = {}
for recipe in ("fp8-delayed", "bf16"):
    losses, seconds = [], []
    for path in sorted(glob.glob(f"{out}/{recipe}/*/metrics.jsonl")):
        lines = [json.loads(line) for line in open(path)]
        losses.append([line["loss"] for line in lines if line["kind"] == "eval"][-1])
        seconds.append(sum(line["seconds"] for line in lines if line["kind"] == "step"))
    means[recipe] = statistics.mean(losses)
    each = ", ".join(f"{loss:.4f}" for loss in losses)
    print(f"{recipe:12} held out {means[recipe]:.4f} nats ({each}); {statistics.median(seconds):.1f} s in steps")
above = (means["fp8-delayed"] / means["bf16"] - 1) * 100
print(f"FP8 is {above:+.2f} % of bf16; at most {tolerance:+g} %")
sys.exit(above > tolerance)
PY
