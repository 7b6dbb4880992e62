#!/usr/bin/env bash
# Trains one model with FP8 and with bf16, everything else the same, and compares the held-out losses: fails if that of FP8 is more
# than TOLERANCE percent (1 by default) above that of bf16.
# Usage: scripts/compare_recipes.sh [CONFIG] [TOLERANCE]      CONFIG is examples/gpt_100m.toml unless given
# Environment: QEFFECT, a command that is built already; OUT, a folder in which the runs are kept.
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

for recipe in fp8-delayed bf16; do
    "$QEFFECT" train --config "$config" --set model.recipe=$recipe --set run.out="'$OUT/$recipe'" >"$OUT/$recipe.log"
done
python3 - "$OUT" "$tolerance" <<'PY'
import glob, json, sys
out, tolerance = sys.argv[1], float(sys.argv[2])
losses = {}
for recipe in ("fp8-delayed", "bf16"):
    (path,) = glob.glob(f"{out}/{recipe}/*/metrics.jsonl")
    lines = [json.loads(line) for line in open(path)]
    last = [line for line in lines if line["kind"] == "eval"][-1]
    seconds = sum(line["seconds"] for line in lines if line["kind"] == "step")
    steps = sum(line["kind"] == "step" for line in lines)
    losses[recipe] = last["loss"]
    print(f"{recipe:12} held out {last['loss']:.4f} nats after {steps} steps, {seconds:.1f} s in them")
above = (losses["fp8-delayed"] / losses["bf16"] - 1) * 100
print(f"FP8 is {above:+.2f} % of bf16; at most {tolerance:+g} %")
sys.exit(above > tolerance)
PY
