//! QE03: versions of weights and their quantised cache.
//!
//! Lowering inserts refresh, reduce and commit where they belong; whoever writes them is held to the
//! same places. Legal: `refresh(s)` once, before the first F of `s`; `reduce(s)` once, after the last
//! gradient of `s`; `commit` once, last. Illegal: an F after commit, which would read the cache of
//! the weights before.

use super::place;
use crate::action::{Item, Kind};
use crate::code::Code;
use crate::diag::{Diagnostic, Place};
use crate::ids::{Rank, Stage};
use crate::index::Index;
use crate::schedule::Schedule;

/// Judges written refresh, reduce and commit actions.
pub fn check(schedule: &Schedule, _index: &Index) -> Vec<Diagnostic> {
    let mut faults = Vec::new();
    for rank in (0..schedule.ranks).map(Rank) {
        let items = schedule.rank(rank);
        if items.iter().any(|i| matches!(i.kind, Kind::Refresh | Kind::Reduce | Kind::Commit)) {
            rank_versions(schedule, rank, items, &mut faults);
        }
    }
    faults
}

fn rank_versions(schedule: &Schedule, rank: Rank, items: &[Item], faults: &mut Vec<Diagnostic>) {
    let here = |at: usize| place(rank, at, &items[at]);
    let find = |kind: Kind, stage: Stage| items.iter().position(|i| i.kind == kind && i.stage == stage);
    let commit = items.iter().position(|i| i.kind == Kind::Commit);
    for stage in schedule.stages_of(rank) {
        let first_forward = find(Kind::Forward, stage);
        if let (Some(refresh), Some(forward)) = (find(Kind::Refresh, stage), first_forward)
            && refresh > forward
            && commit.is_none_or(|commit| forward < commit)
        {
            faults.push(
                Diagnostic::new(
                    Code::StaleCache,
                    here(forward),
                    format!("{} reads the weight cache of stage {stage} before its refresh", items[forward]),
                )
                .role("reads the cache of an earlier step")
                .label(here(refresh), "refreshed only here")
                .help(format!("move `refresh({stage})` above the first forward of stage {stage}")),
            );
        }
        if let Some(reduce) = find(Kind::Reduce, stage) {
            let gradient = |i: &Item| {
                i.stage == stage
                    && matches!(i.kind, Kind::InputGrad | Kind::FullBackward | Kind::WeightGrad | Kind::WeightGradJoin)
            };
            if let Some(last) = items.iter().rposition(gradient).filter(|last| *last > reduce) {
                faults.push(
                    Diagnostic::new(
                        Code::ReduceMisplaced,
                        here(reduce),
                        format!("reduce({stage}) runs before {}, which still adds to the gradient", items[last]),
                    )
                    .label(here(last), "adds to the gradient after its reduction")
                    .help(format!("move `reduce({stage})` below the last `I` and `W` of stage {stage}")),
                );
            }
        }
        for kind in [Kind::Refresh, Kind::Reduce] {
            let code = if kind == Kind::Refresh { Code::RefreshMisplaced } else { Code::ReduceMisplaced };
            repeated(items, |i| i.kind == kind && i.stage == stage, code, here, faults);
            if find(kind, stage).is_none() && items.iter().any(|i| i.kind == kind) {
                let written = items.iter().position(|i| i.kind == kind).unwrap_or_default();
                let word = if kind == Kind::Refresh { "refresh" } else { "reduce" };
                faults.push(
                    Diagnostic::new(
                        code,
                        here(written),
                        format!(
                            "rank {rank} writes `{word}` for stage {}, but not for stage {stage}",
                            items[written].stage
                        ),
                    )
                    .help(format!("write `{word}` for every stage of the rank, or for none: then it is inserted")),
                );
            }
        }
    }
    repeated(items, |i| i.kind == Kind::Commit, Code::CommitMissing, here, faults);
    if let Some(commit) = commit {
        for (at, item) in items.iter().enumerate().skip(commit + 1) {
            let (code, why) = match item.kind {
                Kind::Forward | Kind::Recompute => {
                    (Code::StaleCache, format!("{item} runs after commit and reads the cache of the weights before it"))
                }
                Kind::Commit | Kind::OverlapBegin | Kind::OverlapBranch | Kind::OverlapEnd => continue,
                Kind::Refresh => (Code::RefreshMisplaced, format!("{item} stands after commit")),
                _ => (Code::CommitWithWork, format!("commit runs before {item}, whose work is in flight")),
            };
            faults.push(
                Diagnostic::new(code, here(at), why)
                    .label(here(commit), "committed here")
                    .help("`commit;` is the last action of a rank"),
            );
        }
    }
}

fn repeated(
    items: &[Item],
    matches: impl Fn(&Item) -> bool,
    code: Code,
    here: impl Fn(usize) -> Place,
    faults: &mut Vec<Diagnostic>,
) {
    let mut places = (0..items.len()).filter(|at| matches(&items[*at]));
    let Some(first) = places.next() else { return };
    for at in places {
        faults.push(
            Diagnostic::new(code, here(at), format!("{} runs a second time in this step", items[at]))
                .label(here(first), "first run here")
                .help("once per step"),
        );
    }
}
