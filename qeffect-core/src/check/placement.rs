//! QE06: placement and coverage.
//!
//! Legal: every stage on one existing rank, every rank with a stage, every F(s, m) exactly once, on
//! the rank of `s`. Illegal: `F(1, 0)` in the program of a rank that does not hold stage 1.

use super::{list, place};
use crate::action::{Item, Kind};
use crate::code::Code;
use crate::diag::{Diagnostic, Place};
use crate::ids::{Rank, Stage};
use crate::schedule::Schedule;

/// Most stages named in faults of coverage; the rest is one root cause.
const STAGES_NAMED: usize = 8;

/// Judges placement and coverage.
pub fn check(schedule: &Schedule) -> Vec<Diagnostic> {
    let faults = sizes(schedule);
    if !faults.is_empty() {
        return faults;
    }
    let mut faults = items(schedule);
    if faults.is_empty() {
        faults = coverage(schedule);
    }
    faults
}

fn sizes(schedule: &Schedule) -> Vec<Diagnostic> {
    let origins = &schedule.origins;
    let mut faults = Vec::new();
    if schedule.ranks == 0 {
        faults.push(Diagnostic::new(Code::NothingToRun, origins.name, "the schedule has no rank"));
    }
    if schedule.stages == 0 {
        faults.push(Diagnostic::new(Code::NothingToRun, origins.name, "the schedule has no stage"));
    }
    if schedule.microbatches == 0 {
        faults.push(
            Diagnostic::new(Code::NothingToRun, origins.microbatches, "the schedule has no microbatch")
                .help("run at least one microbatch per step"),
        );
    }
    if !faults.is_empty() {
        return faults;
    }
    let mut empty = vec![true; schedule.ranks as usize];
    for (stage, rank) in schedule.placement.iter().enumerate() {
        match empty.get_mut(rank.index()) {
            Some(entry) => *entry = false,
            None => faults.push(Diagnostic::new(
                Code::PlacementInvalid,
                origins.place,
                format!("stage {stage} is placed on rank {rank}, but there are ranks 0 to {}", schedule.ranks - 1),
            )),
        }
    }
    let idle: Vec<u32> = (0..schedule.ranks).filter(|r| empty[*r as usize]).collect();
    if faults.is_empty() && !idle.is_empty() {
        faults.push(
            Diagnostic::new(Code::PlacementInvalid, origins.place, format!("rank {} holds no stage", list(&idle)))
                .help(format!("place at least one of the {} stages there, or use fewer ranks", schedule.stages)),
        );
    }
    faults
}

fn items(schedule: &Schedule) -> Vec<Diagnostic> {
    let mut faults = Vec::new();
    for rank in (0..schedule.ranks).map(Rank) {
        for (at, item) in schedule.rank(rank).iter().enumerate() {
            if let Some(fault) = misplaced(schedule, rank, item, place(rank, at, item)) {
                faults.push(fault);
            }
        }
    }
    faults
}

/// The fault, if any, of one item by itself.
fn misplaced(schedule: &Schedule, rank: Rank, item: &Item, at: Place) -> Option<Diagnostic> {
    let names_stage = item.kind.is_compute() || matches!(item.kind, Kind::Refresh | Kind::Reduce);
    if names_stage && item.stage.0 >= schedule.stages {
        return Some(Diagnostic::new(
            Code::OutOfRange,
            at,
            format!("{item} names stage {}, but there are stages 0 to {}", item.stage, schedule.stages - 1),
        ));
    }
    if item.kind.is_compute() && item.microbatch.0 >= schedule.microbatches {
        return Some(Diagnostic::new(
            Code::OutOfRange,
            at,
            format!(
                "{item} names microbatch {}, but there are microbatches 0 to {}",
                item.microbatch,
                schedule.microbatches - 1
            ),
        ));
    }
    let home = names_stage.then(|| schedule.placement[item.stage.index()]);
    if let Some(home) = home.filter(|home| *home != rank) {
        let here: Vec<u32> = schedule.stages_of(rank).map(|s| s.0).collect();
        return Some(
            Diagnostic::new(
                Code::WrongRank,
                at,
                format!("{item} runs on rank {rank}, but stage {} lives on rank {home}", item.stage),
            )
            .label(schedule.origins.place, format!("`place` puts stage {} on rank {home}", item.stage))
            .note(format!("rank {rank} holds stage {}", list(&here)))
            .help(format!("move it to the program of rank {home}, or name a stage of this rank")),
        );
    }
    let training = !matches!(item.kind, Kind::Forward | Kind::OverlapBegin | Kind::OverlapBranch | Kind::OverlapEnd);
    (schedule.eval && training).then(|| {
        Diagnostic::new(Code::BackwardInEval, at, format!("{item} stands in a forward-only schedule"))
            .label(schedule.origins.name, "declared `eval`")
            .help("remove it, or remove `eval;` from the header")
    })
}

/// Every F once. Sorts the F's of the schedule, so that memory follows the number of actions even
/// if the header claims sizes that the program does not fill.
fn coverage(schedule: &Schedule) -> Vec<Diagnostic> {
    let mut forwards: Vec<(u32, u32, u32)> = Vec::with_capacity(schedule.items.len());
    for (at, item) in schedule.items.iter().enumerate() {
        if item.kind == Kind::Forward {
            forwards.push((item.stage.0, item.microbatch.0, at as u32));
        }
    }
    // Per stage the F's are nearly always ascending already: a stable sort takes that for granted.
    forwards.sort();
    let mut faults = Vec::new();
    for pair in forwards.windows(2) {
        if (pair[0].0, pair[0].1) == (pair[1].0, pair[1].1) {
            let item = &schedule.items[pair[1].2 as usize];
            faults.push(
                Diagnostic::new(
                    Code::ForwardRepeated,
                    super::place_of(schedule, pair[1].2),
                    format!("{item} runs a forward that has run already"),
                )
                .role("second forward")
                .label(super::place_of(schedule, pair[0].2), format!("first run by {item}"))
                .help("each stage runs the forward of each microbatch once; to recompute it, write `R(s, m)`"),
            );
        }
    }
    let mut rest = forwards.as_slice();
    let mut stages_named = 0;
    for stage in 0..schedule.stages {
        let here = rest.partition_point(|f| f.0 == stage);
        let (of_stage, others) = rest.split_at(here);
        rest = others;
        let missing = missing(of_stage, schedule.microbatches);
        if missing.is_empty() {
            continue;
        }
        stages_named += 1;
        if stages_named <= STAGES_NAMED {
            faults.push(forward_missing(schedule, Stage(stage), &missing));
        }
    }
    faults
}

/// The first few microbatches that have no F, ascending.
fn missing(of_stage: &[(u32, u32, u32)], microbatches: u32) -> Vec<u32> {
    const ENOUGH: usize = 1000;
    let mut missing = Vec::new();
    let mut want = 0;
    for (_, microbatch, _) in of_stage {
        while want < *microbatch && missing.len() < ENOUGH {
            missing.push(want);
            want += 1;
        }
        want = microbatch + 1;
    }
    while want < microbatches && missing.len() < ENOUGH {
        missing.push(want);
        want += 1;
    }
    missing
}

fn forward_missing(schedule: &Schedule, stage: Stage, missing: &[u32]) -> Diagnostic {
    let rank = schedule.placement[stage.index()];
    let message = if missing.len() as u32 == schedule.microbatches {
        format!("stage {stage} never runs a forward")
    } else {
        format!(
            "stage {stage} never runs the forward of microbatch{} {}",
            if missing.len() > 1 { "es" } else { "" },
            list(missing)
        )
    };
    // The best place to look at is an F of that stage; without one, its rank; without that, the name.
    let anchor = schedule
        .rank(rank)
        .iter()
        .rev()
        .find(|item| item.kind == Kind::Forward && item.stage == stage)
        // Without its item: the loop values of another microbatch would mislead.
        .map(|item| Place::from(item.origin));
    let mut fault = Diagnostic::new(Code::ForwardMissing, anchor.unwrap_or(schedule.origins.name.into()), message);
    if anchor.is_some() {
        fault = fault.role("the last forward of this stage");
    }
    fault
        .note(format!("stage {stage} lives on rank {rank}"))
        .help(format!("every stage runs `F(s, m)` for every microbatch 0 to {}", schedule.microbatches - 1))
}
