#!/usr/bin/env bash
# What one `schedule!` (ZB-H1, P = 8, M = 64: 1,536 actions) adds to `cargo check` and `cargo build` of a crate.
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

[profile.dev]
incremental = false
TOML
with='qeffect_schedules::schedule! {
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
without='fn main() { println!("{}", qeffect_schedules::library().len()); }'
cd "$crate"
median() { sort -n | sed -n 4p; }
for command in check build; do
    for what in without with; do
        printf '%s\n' "${!what}" >src/main.rs
        cargo "$command" --quiet
        for _ in 1 2 3 4 5 6 7; do
            touch src/main.rs
            begin=$(date +%s%N)
            cargo "$command" --quiet
            echo $((($(date +%s%N) - begin) / 1000000))
        done | median | sed "s/^/cargo $command, $what schedule!: /; s/\$/ ms/"
    done
done
