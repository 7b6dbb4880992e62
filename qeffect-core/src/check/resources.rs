//! QE05: declared bounds, byte budgets and contracts.
//!
//! Counts are peaks over a rank's program order. Bytes are those of its regions: per stage one for what
//! lives from F to I, one from I to W, and one from F to R where F is recomputed, each as large as
//! its peak count times the declared size.

use std::borrow::Cow;
use std::collections::BTreeMap;

use super::{Options, place, progress};
use crate::action::Kind;
use crate::code::Code;
use crate::diag::Diagnostic;
use crate::ids::{Rank, Stage};
use crate::index::Index;
use crate::plan::Plan;
use crate::schedule::{Bytes, Compare, Costs, Expect, Measure, Schedule, Transport};
use crate::sim::{self, CostModel};

/// Judges `slots:`, `tapes:`, `works:`, `bytes(..)` and `expect`. Returns faults, and notes about contracts that
/// do not hold where that is no fault.
pub fn check(
    schedule: &Schedule,
    index: &Index,
    plan: &Plan,
    options: &Options,
) -> (Vec<Diagnostic>, Vec<Cow<'static, str>>) {
    let mut faults = Vec::new();
    let mut notes = Vec::new();
    for (rank, bounds) in schedule.bounds.iter().enumerate() {
        let peaks = plan.peaks[rank];
        let rank = Rank(rank as u32);
        let rows = [
            (Code::SlotsExceeded, "live microbatches", "slots", peaks.slots, bounds.slots),
            (Code::TapesExceeded, "live tapes", "tapes", peaks.tapes, bounds.tapes),
            (Code::WorksExceeded, "pending works", "works", peaks.works, bounds.works),
        ];
        for (n, (code, what, field, peak, bound)) in rows.into_iter().enumerate() {
            let Some(bound) = bound.filter(|bound| peak > *bound) else { continue };
            let message = format!("rank {rank} holds {peak} {what} at once, but `{field}` allows {bound}");
            let at = first_over(schedule, rank, n, bound);
            let mut fault = match at {
                Some(at) => Diagnostic::new(code, place(rank, at, &schedule.rank(rank)[at]), message)
                    .role(format!("the first to exceed `{field}`"))
                    .label(schedule.origins.bounds[n], format!("`{field}` of rank {rank} is {bound}")),
                None => Diagnostic::new(code, schedule.origins.bounds[n], message),
            };
            fault = fault.help(format!("run a backward earlier on this rank, or declare `{field}: |r| {peak}`"));
            faults.push(fault);
        }
    }
    if let Some(bytes) = &schedule.bytes {
        faults.extend((0..schedule.ranks).map(Rank).filter_map(|rank| over_budget(schedule, bytes, rank)));
    }
    for expect in schedule.expects.iter() {
        if let Some(message) = broken(schedule, index, plan, expect) {
            if options.expect_is_fault {
                faults.push(
                    Diagnostic::new(Code::ExpectFailed, expect.origin, message)
                        .note("ranks run their actions in order, one at a time; messages take no time"),
                );
            } else {
                notes.push(Cow::Owned(message));
            }
        }
    }
    (faults, notes)
}

/// Live counts and regions of one stage: inputs, tapes, works.
#[derive(Clone, Copy, Default)]
struct Regions {
    now: [u64; 3],
    peak: [u64; 3],
}

/// The fault of a rank whose regions are larger than its budget, at the action that makes them so.
fn over_budget(schedule: &Schedule, bytes: &Bytes, rank: Rank) -> Option<Diagnostic> {
    const INPUT: usize = 0;
    const TAPE: usize = 1;
    const WORK: usize = 2;
    let budget = u128::from(*bytes.budget.get(rank.index())?);
    let sizes = |stage: Stage| {
        let tape = bytes.tape.get(stage.index()).copied().unwrap_or(0);
        let input = bytes.input.get(stage.index()).copied().unwrap_or(tape);
        [input, tape, bytes.work.get(stage.index()).copied().unwrap_or(0)]
    };
    let items = schedule.rank(rank);
    let recomputed = sim::recomputed(items);
    let mut regions: BTreeMap<Stage, Regions> = BTreeMap::new();
    let (mut total, mut first) = (0u128, None);
    let mut ended: Vec<(Stage, usize)> = Vec::new();
    let mut overlapped = false;
    for (at, item) in items.iter().enumerate() {
        let again = recomputed.contains(&(item.stage, item.microbatch));
        let (starts, ends): (&[usize], &[usize]) = match item.kind {
            Kind::Forward if schedule.eval => (&[TAPE], &[TAPE]),
            Kind::Forward if again => (&[INPUT], &[]),
            Kind::Forward => (&[TAPE], &[]),
            Kind::Recompute => (&[TAPE], &[INPUT]),
            Kind::InputGrad => (&[WORK], &[TAPE]),
            Kind::FullBackward => (&[WORK], &[TAPE, WORK]),
            Kind::WeightGrad | Kind::WeightGradJoin => (&[], &[WORK]),
            _ => (&[], &[]),
        };
        for which in starts {
            let region = regions.entry(item.stage).or_default();
            region.now[*which] += 1;
            if region.now[*which] > region.peak[*which] {
                region.peak[*which] = region.now[*which];
                total += u128::from(sizes(item.stage)[*which]);
            }
        }
        if total > budget {
            first.get_or_insert(at);
        }
        ended.extend(ends.iter().map(|which| (item.stage, *which)));
        match item.kind {
            Kind::OverlapBegin => overlapped = true,
            Kind::OverlapEnd => overlapped = false,
            _ => {}
        }
        if !overlapped && items.get(at + 1).is_none_or(|next| next.kind != Kind::WeightGradJoin) {
            for (stage, which) in ended.drain(..) {
                regions.entry(stage).or_default().now[which] -= 1;
            }
        }
    }
    let at = first?;
    let mut fault = Diagnostic::new(
        Code::BytesExceeded,
        place(rank, at, &items[at]),
        format!("rank {rank} holds {total} bytes, but its budget is {budget}"),
    )
    .role("the first to exceed the budget")
    .label(bytes.origin, format!("the budget of rank {rank} is {budget}"));
    for (stage, region) in &regions {
        let parts = ["inputs", "tapes", "works"].into_iter().zip(region.peak.into_iter().zip(sizes(*stage)));
        let parts: Vec<String> = parts
            .filter(|(_, (peak, _))| *peak > 0)
            .map(|(what, (peak, size))| format!("{peak} x {size} for {what}"))
            .collect();
        fault = fault.note(format!("stage {stage}: {}", parts.join(", ")));
    }
    Some(fault.help("run a backward earlier on this rank, or recompute with `R(s, m)`"))
}

/// The first item of a rank at which a count (0: slots, 1: tapes, 2: works) exceeds its bound.
fn first_over(schedule: &Schedule, rank: Rank, which: usize, bound: u32) -> Option<usize> {
    let (mut now, mut later, mut overlapped) = (0i64, 0i64, false);
    let recomputed = sim::recomputed(schedule.rank(rank));
    for (at, item) in schedule.rank(rank).iter().enumerate() {
        let (adds, frees) = match (which, item.kind) {
            (0, Kind::Forward) => (1, 0),
            (0, Kind::WeightGrad | Kind::WeightGradJoin | Kind::FullBackward) => (0, 1),
            (1, Kind::Forward) if recomputed.contains(&(item.stage, item.microbatch)) => (0, 0),
            (1, Kind::Forward | Kind::Recompute) => (1, 0),
            (1, Kind::InputGrad | Kind::FullBackward) => (0, 1),
            (2, Kind::InputGrad) => (1, 0),
            (2, Kind::FullBackward) => (1, 1),
            (2, Kind::WeightGrad | Kind::WeightGradJoin) => (0, 1),
            _ => (0, 0),
        };
        now += adds;
        if now > i64::from(bound) {
            return Some(at);
        }
        later += frees;
        match item.kind {
            Kind::OverlapBegin => overlapped = true,
            Kind::OverlapEnd => overlapped = false,
            _ => {}
        }
        if !overlapped {
            now -= std::mem::take(&mut later);
        }
    }
    None
}

/// Says how a contract is broken, if it is.
fn broken(schedule: &Schedule, index: &Index, plan: &Plan, expect: &Expect) -> Option<String> {
    // Bubble and idle time, on the declared transport.
    let run = |costs: Costs| -> Option<(i64, i64)> {
        let model = CostModel::uniform(costs);
        if schedule.transport == Transport::Rendezvous {
            let nodes: Vec<_> = (0..schedule.ranks).map(|r| plan.rank(Rank(r))).collect();
            let clocks = progress::run(&nodes, &schedule.placement, schedule.transport, &model).ok()?;
            return Some((clocks.bubble(), clocks.idle()));
        }
        sim::run(schedule, index, &model).ok().map(|timeline| (timeline.bubble(), timeline.idle()))
    };
    let costs = |c: Costs| format!("({}, {}, {})", c.f, c.i, c.w);
    let (name, value) = match expect.measure {
        Measure::Bubble(c) => (format!("bubble{}", costs(c)), run(c)?.0),
        Measure::Idle(c) => (format!("idle{}", costs(c)), run(c)?.1),
        Measure::Peak => ("peak".to_owned(), plan.peaks.iter().map(|p| i64::from(p.slots)).max().unwrap_or(0)),
    };
    let (holds, sign) = match expect.compare {
        Compare::AtMost => (value <= expect.bound, "<="),
        Compare::Below => (value < expect.bound, "<"),
        Compare::Equal => (value == expect.bound, "=="),
        Compare::AtLeast => (value >= expect.bound, ">="),
        Compare::Above => (value > expect.bound, ">"),
    };
    (!holds).then(|| format!("`expect {name} {sign} {}` does not hold: it is {value}", expect.bound))
}
