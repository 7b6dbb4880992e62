//! The automatic scheduler against the schedules of this crate, under the memory limit of each.

use std::time::{Duration, Instant};

use qeffect_core::ids::Rank;
use qeffect_core::index::Index;
use qeffect_core::schedule::Costs;
use qeffect_core::sim::{CostModel, peak_memory, run};
use qeffect_core::synth::{Objective, Request, Shape, synthesize};
use qeffect_schedules::{Entry, further, library};

/// A request with the sizes of a schedule and the memory that it takes.
fn request(entry: &Entry, ranks: i64, microbatches: i64, costs: CostModel, objective: Objective) -> Request {
    let checked = entry.checked(ranks, microbatches).expect("the library is right");
    let schedule = &checked.schedule;
    let limit = (0..schedule.ranks).map(|rank| peak_memory(schedule, Rank(rank), 2, 1)).max().expect("a rank");
    Request {
        ranks: schedule.ranks,
        stages: schedule.stages,
        microbatches: schedule.microbatches,
        costs,
        tape: 2,
        work: 1,
        limit,
        shape: Shape::Any,
        objective,
    }
}

fn uniform(f: i64, i: i64, w: i64, latency: i64) -> CostModel {
    CostModel { latency, ..CostModel::uniform(Costs { f, i, w }) }
}

/// Makespan and idle time, what is to be small first.
fn quality(objective: Objective, makespan: i64, idle: i64) -> (i64, i64) {
    match objective {
        Objective::Makespan => (makespan, idle),
        Objective::Idle => (idle, makespan),
    }
}

#[test]
fn never_longer_than_a_schedule_of_the_library_under_its_limit() {
    never_worse_than_the_library(Objective::Makespan);
}

#[test]
fn never_idler_than_a_schedule_of_the_library_under_its_limit() {
    never_worse_than_the_library(Objective::Idle);
}

fn never_worse_than_the_library(objective: Objective) {
    let (mut cases, mut alone) = (0, 0);
    for entry in library().iter().chain(further()).filter(|entry| !entry.eval) {
        for (ranks, microbatches) in [(1, 4), (1, 8), (1, 16), (2, 4), (2, 8), (2, 16), (4, 4), (4, 8), (4, 16)] {
            if entry.name == "dualpipe_v" && microbatches < 2 * ranks {
                continue;
            }
            for (f, i, w, latency) in [(1, 1, 1, 0), (4, 5, 3, 0), (4, 5, 3, 2), (3, 2, 4, 1)] {
                let costs = uniform(f, i, w, latency);
                let request = request(entry, ranks, microbatches, costs.clone(), objective);
                let given = entry.checked(ranks, microbatches).expect("the library is right").into_owned();
                let index = Index::new(&given.schedule);
                let timeline = run(&given.schedule, &index, &costs).expect("it is checked");
                let known = quality(objective, timeline.makespan, timeline.idle());
                let best = synthesize(&request, std::slice::from_ref(&given)).expect("the given one fits");
                assert!(quality(objective, best.makespan, best.idle) <= known, "{} {request:?}", entry.name);
                assert!(best.memory.iter().all(|peak| *peak <= request.limit));
                cases += 1;
                // At equal quality the given one is returned.
                alone += u32::from(
                    best.given.is_none() || {
                        let found = synthesize(&request, &[]).expect("feasible");
                        quality(objective, found.makespan, found.idle) <= known
                    },
                );
            }
        }
    }
    // By itself it equals or beats nearly all of them; where it does not, the given one is taken.
    assert!(alone * 100 >= cases * 95, "{alone} of {cases}");
}

#[test]
fn sixteen_ranks_and_64_microbatches_take_seconds() {
    for entry in library().iter().filter(|entry| ["zb_h1", "zb_v"].contains(&entry.name)) {
        let given = entry.checked(16, 64).expect("the library is right").into_owned();
        let mut request = request(entry, 16, 64, uniform(10, 12, 7, 3), Objective::Makespan);
        let costs = |s: u32| Costs { f: 10 + i64::from(s % 3), i: 12 + i64::from(s % 2), w: 7 };
        request.costs.stages = (0..request.stages).map(costs).collect();
        let start = Instant::now();
        let first = synthesize(&request, std::slice::from_ref(&given)).expect("feasible");
        let took = start.elapsed();
        println!("{}: {took:.2?}, makespan {}", entry.name, first.makespan);
        assert_eq!(synthesize(&request, std::slice::from_ref(&given)), Ok(first));
        assert!(took < Duration::from_secs(20), "{took:?}");
    }
}

/// Numbers from a seed: the same ones on every machine.
struct Draw(u64);

impl Draw {
    fn below(&mut self, end: i64) -> i64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) % end as u64) as i64
    }
}

/// Random costs per stage, latencies and times on the wire: no schedule of the library is better under its own limit.
#[test]
fn never_worse_at_random_costs() {
    let mut draw = Draw(2026);
    let entries: Vec<_> = library().iter().chain(further()).filter(|entry| !entry.eval).collect();
    let (mut cases, mut alone) = (0, 0);
    for case in 0..60 {
        let entry = entries[case % entries.len()];
        let ranks = 1 + draw.below(16);
        // Few large ones: a case at 16 x 64 takes most of a second.
        let most = if case % 12 == 0 { 64 } else { 24 };
        let microbatches = if entry.name == "dualpipe_v" { 2 * ranks } else { 1 } + draw.below(most);
        let stages = ranks * entry.virtual_stages;
        let mut cost = || 1 + draw.below(20);
        let stages: Vec<Costs> = (0..stages).map(|_| Costs { f: cost(), i: cost(), w: cost() }).collect();
        let transfer = (1..stages.len()).map(|_| draw.below(6)).collect();
        let costs = CostModel { stages, latency: draw.below(4), transfer, ..CostModel::unit() };
        let objective = if case % 3 == 0 { Objective::Idle } else { Objective::Makespan };
        let request = request(entry, ranks, microbatches, costs.clone(), objective);
        let given = entry.checked(ranks, microbatches).expect("the library is right").into_owned();
        let index = Index::new(&given.schedule);
        let timeline = run(&given.schedule, &index, &costs).expect("it is checked");
        let known = quality(objective, timeline.makespan, timeline.idle());
        let best = synthesize(&request, std::slice::from_ref(&given)).expect("the given one fits");
        assert!(
            quality(objective, best.makespan, best.idle) <= known,
            "{} P = {ranks}, M = {microbatches}",
            entry.name
        );
        assert!(best.memory.iter().all(|peak| *peak <= request.limit), "{}", entry.name);
        if case % 4 == 0 {
            assert_eq!(synthesize(&request, std::slice::from_ref(&given)).as_ref(), Ok(&best), "twice the same");
        }
        cases += 1;
        alone += u32::from(best.given.is_none());
    }
    // Where stages differ, a schedule made for their costs is nearly always better than one written for equal ones.
    assert!(alone * 100 >= cases * 75, "{alone} of {cases}");
}
