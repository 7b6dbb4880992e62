//! Byte budgets and recomputation against counting by sets, and overlaps by their effects.
#![allow(missing_docs)]

mod common;

use std::collections::{BTreeMap, BTreeSet};

use common::{Rng, legal, programs, schedule};
use qeffect_core::action::{Item, Kind};
use qeffect_core::check::{Options, check};
use qeffect_core::code::Code;
use qeffect_core::ids::Rank;
use qeffect_core::lang;
use qeffect_core::origin::Origin;
use qeffect_core::plan::{Checked, Op};
use qeffect_core::schedule::{Bytes, Schedule};

/// Recomputes some forwards right before what takes their tape.
fn recomputing(rng: &mut Rng, base: &Schedule) -> Schedule {
    let mut changed = Vec::new();
    for program in programs(base) {
        let mut items = Vec::new();
        for item in program {
            if matches!(item.kind, Kind::InputGrad | Kind::FullBackward) && rng.below(2) == 0 {
                items.push(Item { kind: Kind::Recompute, ..item });
            }
            items.push(item);
        }
        changed.push(items);
    }
    schedule(changed, base.placement.iter().map(|rank| rank.0).collect(), base.microbatches)
}

/// Per stage, the most inputs, tapes and works that are held at once: sets that actions add to when they
/// start and take from when they end.
fn most_held(program: &[Item]) -> (BTreeMap<u32, [usize; 3]>, usize) {
    let mut most: BTreeMap<u32, [usize; 3]> = BTreeMap::new();
    let mut held: [BTreeSet<(u32, u32)>; 3] = Default::default();
    let mut tapes = 0;
    for item in program {
        let key = (item.stage.0, item.microbatch.0);
        let again = program
            .iter()
            .any(|r| r.kind == Kind::Recompute && (r.stage, r.microbatch) == (item.stage, item.microbatch));
        match item.kind {
            Kind::Forward => drop(held[usize::from(!again)].insert(key)),
            Kind::Recompute => drop(held[1].insert(key)),
            Kind::InputGrad | Kind::FullBackward => drop(held[2].insert(key)),
            _ => {}
        }
        for (which, held) in held.iter().enumerate() {
            let count = held.iter().filter(|(stage, _)| *stage == item.stage.0).count();
            let most = &mut most.entry(item.stage.0).or_default()[which];
            *most = count.max(*most);
        }
        tapes = tapes.max(held[1].len());
        match item.kind {
            Kind::Recompute => drop(held[0].remove(&key)),
            Kind::InputGrad => drop(held[1].remove(&key)),
            Kind::WeightGrad => drop(held[2].remove(&key)),
            Kind::FullBackward => {
                held[1].remove(&key);
                held[2].remove(&key);
            }
            _ => {}
        }
    }
    (most, tapes)
}

#[test]
fn a_budget_holds_exactly_what_the_regions_take() {
    let mut recomputed = 0;
    for seed in 0..300 {
        let mut rng = Rng(seed ^ 0xB17E);
        let (ranks, virtual_stages, microbatches) = (1 + rng.below(3), 1 + rng.below(2), 1 + rng.below(5));
        let base = legal(&mut rng, ranks, virtual_stages, microbatches);
        let mut schedule = recomputing(&mut rng, &base);
        let stages = schedule.stages as usize;
        let mut sizes = |most: usize| -> Vec<u64> { (0..stages).map(|_| rng.below(most) as u64 + 1).collect() };
        let (input, tape, work) = (sizes(50), sizes(1000), sizes(300));
        let with_input = seed % 2 == 0;
        let mut budget = Vec::new();
        for (rank, program) in programs(&schedule).iter().enumerate() {
            let (most, tapes) = most_held(program);
            let bytes = most.iter().map(|(stage, [inputs, tapes, works])| {
                let stage = *stage as usize;
                let input = if with_input { input[stage] } else { tape[stage] };
                *inputs as u64 * input + *tapes as u64 * tape[stage] + *works as u64 * work[stage]
            });
            budget.push(bytes.sum::<u64>());
            recomputed += most.values().filter(|[inputs, ..]| *inputs > 0).count();
            let checked = check(schedule.clone(), &Options::AT_START).unwrap();
            assert_eq!(checked.plan.peaks[rank].tapes as usize, tapes, "seed {seed}: a tape begins at R");
        }
        let bytes = |budget: Vec<u64>| Bytes {
            tape: tape.clone().into(),
            work: work.clone().into(),
            input: if with_input { input.clone().into() } else { Vec::new().into() },
            budget: budget.into(),
            origin: Origin::NONE,
        };
        schedule.bytes = Some(bytes(budget.clone()));
        check(schedule.clone(), &Options::COMPILE_TIME).unwrap_or_else(|report| panic!("seed {seed}: {report}"));
        for rank in 0..ranks {
            let mut less = budget.clone();
            less[rank] -= 1;
            schedule.bytes = Some(bytes(less));
            let report = check(schedule.clone(), &Options::AT_START).unwrap_err();
            assert_eq!(report.codes(), [Code::BytesExceeded], "seed {seed}");
            assert_eq!(report.diagnostics.len(), 1);
            let expected = format!("rank {rank} holds {} bytes, but its budget is {}", budget[rank], budget[rank] - 1);
            assert_eq!(report.diagnostics[0].message, expected, "seed {seed}");
        }
    }
    assert!(recomputed > 200, "{recomputed}");
}

fn judge(fields: &str, body: &str) -> Result<Checked, BTreeSet<Code>> {
    let text =
        format!("case<P, M>; ranks: P; microbatches: M; stages: 2 * P; place: |_| 0; {fields} rank |r| {{ {body} }}");
    let program = lang::read("case.sched", &text).0.unwrap();
    check(lang::interpret(&program, &[1, 2]).unwrap(), &Options::AT_START)
        .map_err(|report| report.codes().into_iter().collect())
}

#[test]
fn branches_that_may_run_at_once_are_judged_by_their_effects() {
    let end = "for m in 0..M { B(1, m); B(0, m); }";
    // Two forwards of a stage: a roll each with every microbatch, a fold with every step, nothing without state.
    let at_once = format!("overlap {{ {{ F(0, 0); }} {{ F(0, 1); }} }} F(1, 0); F(1, 1); {end}");
    assert_eq!(judge("", &at_once).err(), Some([Code::OverlapConflict].into()));
    judge("update: step;", &at_once).unwrap();
    judge("update: none;", &at_once).unwrap();
    // Weight gradients of one stage add to it, in any order; a reduction of it may not run beside them.
    let split = "F(0, 0); F(0, 1); F(1, 0); F(1, 1); B(1, 0); B(1, 1); I(0, 0); I(0, 1);";
    judge("", &format!("{split} overlap {{ {{ W(0, 0); }} {{ W(0, 1); }} }}")).unwrap();
    let reduced = format!("{split} W(0, 0); overlap {{ {{ W(0, 1); }} {{ reduce(0); }} }} reduce(1);");
    assert_eq!(judge("", &reduced).err(), Some([Code::OverlapConflict].into()));
    judge("", &format!("{split} overlap {{ {{ W(0, 0); W(0, 1); }} {{ reduce(1); }} }} reduce(0);")).unwrap();
    // A refresh writes what a forward reads, and another stage's does not.
    let other = format!("refresh(0); overlap {{ {{ F(0, 0); }} {{ refresh(1); }} }} F(0, 1); F(1, 0); F(1, 1); {end}");
    judge("", &other).unwrap();
    let same = format!("refresh(1); overlap {{ {{ F(0, 0); }} {{ refresh(0); }} }} F(0, 1); F(1, 0); F(1, 1); {end}");
    assert_eq!(judge("", &same).err(), Some([Code::OverlapConflict].into()));
    // commit touches everything.
    let committed = format!("{split} W(0, 0); overlap {{ {{ W(0, 1); }} {{ commit; }} }}");
    assert_eq!(judge("", &committed).err(), Some([Code::OverlapConflict].into()));
}

/// What lowering inserts may not stand in a branch while another branch uses it.
#[test]
fn refresh_and_reduce_are_inserted_outside_of_overlaps() {
    let body = "overlap { { F(0, 0); } { F(0, 1); } } F(1, 0); F(1, 1); B(1, 0); B(1, 1); I(0, 0); I(0, 1);
                overlap { { W(0, 1); } { W(0, 0); } }";
    let checked = judge("update: step;", body).unwrap();
    let ops: Vec<(Op, u32)> = checked.plan.rank(Rank(0)).iter().map(|node| (node.op, node.stage.0)).collect();
    let at = |op: Op, stage: u32| ops.iter().position(|found| *found == (op, stage)).unwrap();
    let (begin, end) = (at(Op::OverlapBegin, 0), ops.iter().rposition(|(op, _)| *op == Op::OverlapEnd).unwrap());
    assert!(at(Op::Refresh, 0) < begin, "{ops:?}");
    assert!(at(Op::Reduce, 0) > end, "{ops:?}");
    assert!(at(Op::Reduce, 1) < end, "{ops:?}");
}
