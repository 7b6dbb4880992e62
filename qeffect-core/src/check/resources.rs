//! QE05: declared bounds and contracts.

use std::borrow::Cow;

use super::{Options, place};
use crate::action::Kind;
use crate::code::Code;
use crate::diag::Diagnostic;
use crate::ids::Rank;
use crate::index::Index;
use crate::plan::Plan;
use crate::schedule::{Compare, Costs, Expect, Measure, Schedule};
use crate::sim::{self, CostModel};

/// Judges `slots:`, `tapes:`, `works:` and `expect`. Returns faults, and notes about contracts that
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

/// The first item of a rank at which a count (0: slots, 1: tapes, 2: works) exceeds its bound.
fn first_over(schedule: &Schedule, rank: Rank, which: usize, bound: u32) -> Option<usize> {
    let (mut now, mut later, mut overlapped) = (0i64, 0i64, false);
    for (at, item) in schedule.rank(rank).iter().enumerate() {
        let (adds, frees) = match (which, item.kind) {
            (0, Kind::Forward) => (1, 0),
            (0, Kind::WeightGrad | Kind::WeightGradJoin | Kind::FullBackward) => (0, 1),
            (1, Kind::Forward) => (1, 0),
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
    let run = |costs: Costs| sim::run(schedule, index, &CostModel::uniform(costs)).ok();
    let costs = |c: Costs| format!("({}, {}, {})", c.f, c.i, c.w);
    let (name, value) = match expect.measure {
        Measure::Bubble(c) => (format!("bubble{}", costs(c)), run(c)?.bubble()),
        Measure::Idle(c) => (format!("idle{}", costs(c)), run(c)?.idle()),
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
