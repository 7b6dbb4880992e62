#!/usr/bin/env bash
# What one `schedule!` (ZB-H1, P = 8, M = 64: 1,536 actions), and what one `#[stage]` of 100 ops, adds to `cargo check` and
# `cargo build` of a crate.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
crate=$(mktemp -d)
trap 'rm -r "$crate"' EXIT
mkdir "$crate/src"
cp "$root/Cargo.lock" "$crate/"
cat >"$crate/Cargo.toml" <<TOML
[package]
name = "compile-time"
version = "0.0.0"
edition = "2024"

[dependencies]
qeffect-schedules = { path = "$root/schedules" }
qeffect-runtime = { path = "$root/qeffect-runtime" }

[profile.dev]
incremental = false
TOML
schedule='qeffect_schedules::schedule! {
    pub zb_h1<P, M> for (8, 64);
    ranks: P; microbatches: M; stages: P; place: |s| s; slots: |_| P;
    rank |r| {
        let warm = min(P - 1 - r, M);
        for m in 0..warm { F(r, m); }
        for m in 0..M {
            if m + warm < M { F(r, m + warm); }
            I(r, m);
            if m >= r { W(r, m - r); }
        }
        for m in M - min(r, M)..M { W(r, m); }
    }
}
fn main() { println!("{}", zb_h1::<8, 64>().plan.nodes.len()); }'
no_schedule='fn main() { println!("{}", qeffect_schedules::library().len()); }'
params='use qeffect_runtime::prelude::*;
#[derive(Params)]
#[params(crate = qeffect_runtime)]
struct Layer { norm: LayerNorm, up: Linear }
'
ops=$(for _ in $(seq 25); do echo 'let x = add(x, gelu(linear(layer_norm(x, &w.norm), &w.up)));'; done)
stage="$params #[stage(crate = qeffect_runtime)] fn hundred(x: Act, w: &Layer) -> Act { $ops x }
fn main() { println!(\"{:p}\", Built::<hundred, Layer>::new as *const ()); }"
no_stage="$params fn main() { println!(\"{:p}\", <Layer as Params>::register as *const ()); }"
cd "$crate"
median() { sort -n | sed -n 4p; }
for what in no_schedule schedule no_stage stage; do
    for command in check build; do
        printf '%s\n' "${!what}" >src/main.rs
        cargo "$command" --quiet
        for _ in 1 2 3 4 5 6 7; do
            touch src/main.rs
            begin=$(date +%s%N)
            cargo "$command" --quiet
            echo $((($(date +%s%N) - begin) / 1000000))
        done | median | sed "s/^/cargo $command, $what: /; s/\$/ ms/"
    done
done
