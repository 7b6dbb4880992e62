//! Speed of the path that compiler and program share: interpret, lower, check.
//!
//! `cargo bench -p qeffect-core --bench check`; one thread; throughput is actions per second.
#![allow(missing_docs)]

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use qeffect_core::check::{Options, check};
use qeffect_core::index::Index;
use qeffect_core::lang::{Program, interpret, read};
use qeffect_core::sim::{self, CostModel};

const ZB_H1: &str = "
    zb_h1<P, M>;
    ranks: P;
    microbatches: M;
    stages: P;
    place: |s| s;
    slots: |_| P;
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
";

fn program() -> Program {
    read("zb_h1", ZB_H1).0.unwrap_or_else(|report| panic!("{report}"))
}

fn bench(c: &mut Criterion) {
    let program = program();
    for (ranks, microbatches) in [(8, 64), (64, 512), (1024, 1024)] {
        let params = [ranks, microbatches];
        let actions = (ranks * microbatches * 3) as u64;
        let schedule = interpret(&program, &params).unwrap_or_else(|report| panic!("{report}"));
        let index = Index::new(&schedule);
        let id = format!("{ranks}x{microbatches}");
        let mut group = c.benchmark_group("schedule");
        group.throughput(Throughput::Elements(actions)).sample_size(10);
        group.bench_function(BenchmarkId::new("interpret", &id), |b| b.iter(|| interpret(&program, &params)));
        group.bench_function(BenchmarkId::new("interpret_lower_check", &id), |b| {
            b.iter(|| check(interpret(&program, &params).unwrap_or_else(|r| panic!("{r}")), &Options::AT_START));
        });
        group.bench_function(BenchmarkId::new("simulate", &id), |b| {
            b.iter(|| sim::run(&schedule, &index, &CostModel::unit()));
        });
        group.finish();
    }
}

criterion_group!(benches, bench);
criterion_main!(benches);
