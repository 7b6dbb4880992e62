#!/usr/bin/env bash
# The main command and its PyTorch counterpart, one after the other: training time to a held-out loss.
# Usage: scripts/time_to_loss.sh [python with scripts/requirements.txt installed] [loss]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
loss=${2:-2.4}
out=$(mktemp -d)
trap 'rm -r "$out"' EXIT

cargo build --quiet --release --example pretrain
cargo run --quiet --release --example pretrain -- --evaluations 20 --sample 0 --out "$out" >/dev/null
"$python" - "$out"/*/metrics.jsonl "$loss" <<'PY'
import json, sys
seconds = tokens = 0
for line in map(json.loads, open(sys.argv[1])):
    if line["kind"] == "step":
        seconds, tokens = seconds + line["seconds"], line["tokens"]
    elif line["kind"] == "eval" and line["loss"] < float(sys.argv[2]):
        print(f"QEffect              {seconds:6.1f} s  {tokens} tokens  held out {line['loss']:.3f}")
        break
PY
for fold in 8 1; do
    "$python" scripts/pretrain_torch.py --fold "$fold" --threads 2 --target "$loss" --stop --evaluate-every 25 | tail -1 |
        "$python" -c "
import json, sys
r = json.load(sys.stdin)
print(f'PyTorch, --fold $fold    {r[\"seconds\"]:6.1f} s  {r[\"tokens\"]} tokens  held out {r[\"held_out\"]:.3f}')"
done
