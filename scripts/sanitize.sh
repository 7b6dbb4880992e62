#!/usr/bin/env bash
# NVIDIA's compute-sanitizer over training runs of two ranks on one GPU, and over the tests of single kernels: memcheck, initcheck,
# synccheck, racecheck. All at once; fails if one finds anything. Takes some minutes: the first launch of each kernel is slow.
# Usage: scripts/sanitize.sh [OUT]      OUT keeps the reports
# Environment: QEFFECT and DEVICE, the command and the kernels' tests (`cargo test -p qeffect-kernels --test device --no-run`), if
# they are built already; LIMIT, seconds per tool (900).
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-$(mktemp -d)}
mkdir -p "$out"
PATH=$PATH:/usr/local/cuda/bin
command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is not in PATH nor in /usr/local/cuda/bin" >&2; exit 2; }
if [ -z "${QEFFECT:-}" ]; then
    cargo build --quiet --release --bin qeffect || exit
    QEFFECT=target/release/qeffect
fi
if [ -z "${DEVICE:-}" ]; then
    DEVICE=$(cargo test --quiet -p qeffect-kernels --test device --no-run --message-format=json |
        sed -n 's/.*"name":"device".*"executable":"\([^"]*\)".*/\1/p' | tail -1)
fi

head -c 60000 examples/data/shakespeare.txt >"$out/text.txt"
cat >"$out/small.toml" <<TOML
[model]
layers = 4
hidden = 64
heads = 2
ffn = 128
sequence = 128
sequences = 1
[pipeline]
schedule = "zb_v"
ranks = 2
microbatches = 2
[optimizer]
steps = 2
[data]
path = "$out/text.txt"
[run]
device = "cuda:0"
evaluations = 1
sample = 0
TOML
# Compiles the kernels and finds algorithms, which the tools then need not watch.
"$QEFFECT" train --config "$out/small.toml" --set run.out="'$out/plain'" >"$out/plain.log" 2>&1 ||
    { cat "$out/plain.log" >&2; exit 1; }

check() { # name, tool, command..
    local name=$1 tool=$2 start=$SECONDS code=0
    shift 2
    timeout "${LIMIT:-900}" compute-sanitizer --tool "$tool" --error-exitcode 9 --report-api-errors no --print-limit 5 "$@" \
        >"$out/$name.log" 2>&1 || code=$?
    local verdict=clean
    [ $code -eq 0 ] || verdict="FAILED ($code)"
    grep -q "ERROR SUMMARY: 0 errors\|RACECHECK SUMMARY: 0 hazards" "$out/$name.log" || verdict="FAILED ($code), see $out/$name.log"
    grep -q "^skipped" "$out/$name.log" && verdict="skipped"
    printf '%-28s %-10s %s, %d s\n' "$name" "$tool" "$verdict" $((SECONDS - start)) | tee -a "$out/verdicts"
}
train() { # name, tool, options of the run..
    local name=$1 tool=$2
    shift 2
    check "$name" "$tool" "$QEFFECT" train --config "$out/small.toml" --set run.out="'$out/$name'" "$@"
}
kernels() { # name, tool, tests..
    local name=$1 tool=$2
    shift 2
    check "$name" "$tool" "$DEVICE" --test-threads 1 --nocapture "$@"
}

: >"$out/verdicts"
train race_coalesced racecheck --set pipeline.gradients=coalesced --set optimizer.steps=1 &
train mem_coalesced memcheck --set pipeline.gradients=coalesced &
train init_coalesced initcheck --set pipeline.gradients=coalesced &
train sync_coalesced synccheck --set pipeline.gradients=coalesced &
train mem_direct_tags memcheck --set pipeline.gradients=direct --set run.verify=true &
train init_copied_eager initcheck --set pipeline.gradients=copied --set run.capture=eager &
train mem_copied_action memcheck --set pipeline.gradients=copied --set run.capture=action &
kernels race_attention racecheck attention:: &
kernels race_norm racecheck norm:: &
kernels race_cast racecheck cast::both cast::fused cast::silu cast::the_gradient cast::two &
kernels race_rest racecheck optimizer:: loss:: embedding:: scale:: step:: elementwise:: &
kernels mem_kernels memcheck attention:: norm:: loss:: embedding:: scale:: step:: elementwise:: optimizer:: &
kernels init_kernels initcheck attention:: norm:: loss:: embedding:: scale:: step:: elementwise:: &
kernels sync_kernels synccheck attention:: norm:: cast::both cast::fused loss:: optimizer:: &
wait
! grep -q "FAILED" "$out/verdicts"
