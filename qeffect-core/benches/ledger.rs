//! What the contract costs at run time: a step checked action by action, and a replayed step checked as one transaction.
//!
//! `cargo bench -p qeffect-core --bench ledger`; one thread; time per step of one rank.
#![allow(missing_docs)]

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use qeffect_core::ids::{Microbatch, Rank, Stage};
use qeffect_core::ledger::{Ledger, LedgerError, Rolls, StageContract, Verdict};

/// F, I and W of every microbatch, stage after stage.
fn step(ledger: &mut Ledger, stages: u32, microbatches: u32) -> Result<u64, LedgerError> {
    ledger.begin_step()?;
    for stage in (0..stages).map(Stage) {
        ledger.begin_refresh(stage)?.finish();
        for m in (0..microbatches).map(Microbatch) {
            let (pending, token) = ledger.begin_forward(stage, m, 0)?;
            let tape = pending.finish(token.rolled())?;
            let (pending, token) = ledger.begin_input_grad(stage, m, tape)?;
            let work = pending.finish(token.rolled())?;
            ledger.begin_weight_grad(stage, m, work)?.finish()?;
        }
        ledger.begin_reduce(stage)?.finish();
    }
    let rolls: Vec<Rolls> = (0..stages).map(|stage| ledger.rolls(Stage(stage)).unwrap_or_default()).collect();
    ledger.begin_agree(|stage| rolls[stage.index()])?.finish();
    ledger.begin_commit()?.finish();
    ledger.settle(Verdict::Good)
}

fn ledger(stages: u32, microbatches: u32) -> Result<Ledger, LedgerError> {
    let contract = |stage| StageContract { stage: Stage(stage), forward_rolls: 1, backward_rolls: 1 };
    let contracts: Vec<StageContract> = (0..stages).map(contract).collect();
    let mut ledger = Ledger::new(Rank(0), &contracts, microbatches, 4);
    (0..stages).try_for_each(|stage| ledger.fill(Stage(stage)))?;
    Ok(ledger)
}

fn bench(c: &mut Criterion) {
    let mut group = c.benchmark_group("ledger");
    for (stages, microbatches) in [(1, 8), (2, 8), (4, 64)] {
        let size = format!("{stages} stages, {microbatches} microbatches");
        let mut eager = ledger(stages, microbatches).unwrap_or_else(|error| panic!("{error}"));
        group.throughput(Throughput::Elements(u64::from(stages * microbatches * 3)));
        group.bench_function(BenchmarkId::new("action by action", &size), |b| {
            b.iter(|| step(&mut eager, stages, microbatches));
        });
        let mut replayed = ledger(stages, microbatches).unwrap_or_else(|error| panic!("{error}"));
        let mut rehearsal = replayed.rehearsal().unwrap_or_else(|error| panic!("{error}"));
        step(&mut rehearsal, stages, microbatches).unwrap_or_else(|error| panic!("{error}"));
        let effects = replayed.effects_of(&rehearsal).unwrap_or_else(|error| panic!("{error}"));
        let mut rolls = vec![Rolls::default(); stages as usize];
        group.throughput(Throughput::Elements(1));
        group.bench_function(BenchmarkId::new("replayed step", &size), |b| {
            b.iter(|| {
                replayed.begin_replay(&effects, |stage| rolls[stage.index()])?;
                let epoch = replayed.settle(Verdict::Good)?;
                for (stage, rolls) in (0..).map(Stage).zip(&mut rolls) {
                    *rolls = replayed.rolls(stage).unwrap_or_default();
                }
                Ok::<u64, LedgerError>(epoch)
            });
        });
    }
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
