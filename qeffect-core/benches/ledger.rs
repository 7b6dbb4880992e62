//! What the contract costs at run time: a step checked action by action, and a replayed step checked as one transaction.
//!
//! `cargo bench -p qeffect-core --bench ledger`; one thread; time per step of one rank, which is one of several: its
//! stages have messages on both sides. The gradient arenas go along as in a run: 16 parameters per stage, one write each
//! for every microbatch.
#![allow(missing_docs)]

use std::error::Error;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use qeffect_core::arena::{ArenaError, Declared, Destination, GradArena, Places};
use qeffect_core::dtype::Dtype;
use qeffect_core::ids::{Microbatch, Rank, Stage};
use qeffect_core::ledger::{Ledger, Rolls, StageContract, Verdict};
use qeffect_core::plan::Direction;

/// Parameters of a stage: those of a transformer block with biases.
const PARAMS: usize = 16;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Refresh, then F, I and W of every microbatch with their messages, stage after stage; each W writes all gradients.
fn step(ledger: &mut Ledger, arenas: &mut [GradArena], microbatches: u32) -> Result<u64> {
    let stages = || (0..).map(Stage);
    ledger.begin_step()?;
    for (stage, arena) in stages().zip(arenas.iter_mut()) {
        arena.reset();
        ledger.begin_refresh(stage)?.finish();
        for m in (0..microbatches).map(Microbatch) {
            ledger.begin_wait(Direction::Forward, stage, m)?.finish();
            let (pending, token) = ledger.begin_forward(stage, m, 0)?;
            let tape = pending.finish(token.rolled())?;
            ledger.begin_send(Direction::Forward, stage, m)?.finish();
            ledger.begin_wait(Direction::Backward, stage, m)?.finish();
            let (pending, token) = ledger.begin_input_grad(stage, m, tape)?;
            let work = pending.finish(token.rolled())?;
            ledger.begin_send(Direction::Backward, stage, m)?.finish();
            let pending = ledger.begin_weight_grad(stage, m, work)?;
            (0..PARAMS).try_for_each(|param| write(arena, param, m))?;
            pending.finish()?;
        }
        let pending = ledger.begin_reduce(stage)?;
        (0..PARAMS).try_for_each(|param| arena.complete(param))?;
        pending.finish();
    }
    let rolls: Vec<Rolls> = stages().take(arenas.len()).map(|stage| ledger.rolls(stage).unwrap_or_default()).collect();
    ledger.begin_agree(|stage| rolls[stage.index()])?.finish();
    let pending = ledger.begin_commit()?;
    arenas.iter().try_for_each(GradArena::all_final)?;
    pending.finish();
    Ok(ledger.settle(Verdict::Good)?)
}

fn write(arena: &mut GradArena, param: usize, m: Microbatch) -> std::result::Result<(), ArenaError> {
    let write = arena.begin(param, m.0)?;
    arena.initialises(&write);
    arena.finish(write, &destination(param))
}

fn destination(param: usize) -> Destination {
    Destination { device: 0, buffer: param as u64, offset: 0, dtype: Dtype::F32, rows: 1024, cols: 1024 }
}

fn arena(microbatches: u32) -> Result<GradArena> {
    let declared = |param| Declared {
        name: format!("blocks.0.p{param}"),
        dtype: Dtype::F32,
        rows: 1024,
        cols: 1024,
        places: Places::One,
    };
    let mut arena = GradArena::new(0, microbatches, (0..PARAMS).map(declared));
    (0..PARAMS).try_for_each(|param| arena.bind(param, 0, destination(param)))?;
    Ok(arena)
}

fn ledger(stages: u32, microbatches: u32) -> Result<(Ledger, Vec<GradArena>)> {
    let contract = |stage| StageContract { stage: Stage(stage), forward_rolls: 1, backward_rolls: 1 };
    let contracts: Vec<StageContract> = (0..stages).map(contract).collect();
    let mut ledger = Ledger::new(Rank(0), &contracts, microbatches, 4);
    (0..stages).try_for_each(|stage| ledger.fill(Stage(stage)))?;
    let arenas = (0..stages).map(|_| arena(microbatches)).collect::<Result<_>>()?;
    Ok((ledger, arenas))
}

fn measure(c: &mut Criterion, stages: u32, microbatches: u32) -> Result<()> {
    let mut group = c.benchmark_group("ledger");
    let size = format!("{stages} stages, {microbatches} microbatches");
    let (mut eager, mut arenas) = ledger(stages, microbatches)?;
    step(&mut eager, &mut arenas, microbatches)?;
    group.throughput(Throughput::Elements(u64::from(stages * microbatches * 3)));
    group.bench_function(BenchmarkId::new("action by action", &size), |b| {
        b.iter(|| step(&mut eager, &mut arenas, microbatches).map_err(|error| error.to_string()));
    });
    let (mut replayed, mut arenas) = ledger(stages, microbatches)?;
    let mut rehearsal = replayed.rehearsal()?;
    step(&mut rehearsal, &mut arenas, microbatches)?;
    let effects = replayed.effects_of(&rehearsal)?;
    let mut rolls = vec![Rolls::default(); stages as usize];
    let mut replay = || -> Result<u64> {
        replayed.begin_replay(&effects, |stage| rolls[stage.index()])?;
        for arena in &mut arenas {
            arena.reset();
            arena.replay()?;
        }
        let epoch = replayed.settle(Verdict::Good)?;
        for (stage, rolls) in (0..).map(Stage).zip(&mut rolls) {
            *rolls = replayed.rolls(stage).unwrap_or_default();
        }
        Ok(epoch)
    };
    replay()?;
    group.throughput(Throughput::Elements(1));
    group.bench_function(BenchmarkId::new("replayed step", &size), |b| {
        b.iter(|| replay().map_err(|error| error.to_string()));
    });
    group.finish();
    Ok(())
}

fn bench(c: &mut Criterion) {
    for (stages, microbatches) in [(1, 8), (2, 8), (4, 64)] {
        measure(c, stages, microbatches).unwrap_or_else(|error| panic!("{error}"));
    }
}

criterion_group!(benches, bench);
criterion_main!(benches);
