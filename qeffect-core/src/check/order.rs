//! QE02: order of state transitions.
//!
//! On one rank program order orders everything, except inside `overlap`, whose branches may run at
//! once: what they do to state ([`crate::effects`]) must commute, and they must not need each
//! other. Illegal: F(s, 0) and F(s, 1) in two branches where each F rolls the state of its stage.

use super::place;
use crate::action::{Item, Kind};
use crate::code::Code;
use crate::diag::Diagnostic;
use crate::effects::{self, Access};
use crate::ids::Rank;
use crate::index::Index;
use crate::schedule::Schedule;

/// Judges the branches of every `overlap`.
pub fn check(schedule: &Schedule, _index: &Index) -> Vec<Diagnostic> {
    let mut faults = Vec::new();
    for rank in (0..schedule.ranks).map(Rank) {
        let items = schedule.rank(rank);
        let mut at = 0;
        while at < items.len() {
            if items[at].kind == Kind::OverlapBegin {
                let end = items[at..].iter().position(|i| i.kind == Kind::OverlapEnd).map_or(items.len(), |n| at + n);
                overlap(schedule, rank, at, end, &mut faults);
                at = end;
            }
            at += 1;
        }
    }
    faults
}

fn overlap(schedule: &Schedule, rank: Rank, begin: usize, end: usize, faults: &mut Vec<Diagnostic>) {
    let items = schedule.rank(rank);
    let mut branch = 0;
    let mut members: Vec<(usize, usize)> = Vec::new();
    for (at, item) in items.iter().enumerate().take(end).skip(begin + 1) {
        match item.kind {
            Kind::OverlapBranch => branch += 1,
            _ => members.push((branch, at)),
        }
    }
    for (n, (branch, at)) in members.iter().enumerate() {
        for (other_branch, other_at) in &members[..n] {
            if branch == other_branch {
                continue;
            }
            let (later, earlier) = (&items[*at], &items[*other_at]);
            if let Some((cell, how, other)) = effects::conflict(later, earlier, schedule.update, schedule.eval) {
                let cell = format!(
                    "{} of stage {}",
                    cell.name(),
                    if later.kind == Kind::Commit { earlier } else { later }.stage
                );
                let verb = |access: Access| if access == Access::Read { "reads" } else { "writes" };
                let (message, label) = if verb(how) == verb(other) {
                    (format!("both write {cell}"), format!("{earlier} writes it too, in another branch"))
                } else {
                    let label = format!("{earlier} {} it, in another branch", verb(other));
                    (format!("one writes and one reads {cell}"), label)
                };
                faults.push(
                    Diagnostic::new(
                        Code::OverlapConflict,
                        place(rank, *at, later),
                        format!("{later} and {earlier} may run at once, but {message}"),
                    )
                    .label(place(rank, *other_at, earlier), label)
                    .help("put both into one branch, which runs in order, or take one out of the overlap"),
                );
            } else if needs(later, earlier) || needs(earlier, later) {
                let (user, maker) = if needs(later, earlier) { (later, earlier) } else { (earlier, later) };
                faults.push(
                    Diagnostic::new(
                        Code::OverlapDependent,
                        place(rank, *at, later),
                        format!("{user} needs the result of {maker}, which may run at the same time"),
                    )
                    .label(place(rank, *other_at, earlier), "in another branch of the same overlap")
                    .help("put both into one branch, or take one out of the overlap"),
                );
            }
        }
    }
}

/// Whether `user` consumes what `maker` leaves.
fn needs(user: &Item, maker: &Item) -> bool {
    use Kind::{Forward, FullBackward, InputGrad, Recompute, WeightGrad, WeightGradJoin};
    if user.microbatch != maker.microbatch {
        return false;
    }
    let same = user.stage == maker.stage;
    match (user.kind, maker.kind) {
        (Forward, Forward) => user.stage.0 == maker.stage.0 + 1,
        (InputGrad | FullBackward, InputGrad | FullBackward) => user.stage.0 + 1 == maker.stage.0,
        (InputGrad | FullBackward, Forward | Recompute) | (Recompute, Forward) => same,
        (WeightGrad | WeightGradJoin, InputGrad) => same,
        _ => false,
    }
}

/// Whether some stage runs its F's or its I's out of microbatch order.
pub fn depends_on_order(schedule: &Schedule) -> bool {
    let mut next = vec![[0u32; 2]; schedule.stages as usize];
    schedule.items.iter().any(|item| {
        let direction = match item.kind {
            Kind::Forward => 0,
            Kind::InputGrad | Kind::FullBackward => 1,
            _ => return false,
        };
        let expected = &mut next[item.stage.index()][direction];
        let out_of_order = item.microbatch.0 < *expected;
        *expected = item.microbatch.0 + 1;
        out_of_order
    })
}
