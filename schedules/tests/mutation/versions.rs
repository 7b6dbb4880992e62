//! What is to be said of written refresh, reduce and commit: by the checker, of the whole program, and by the
//! ledger, which meets the first action that may not run.

use std::collections::{BTreeMap, BTreeSet};

use qeffect_core::action::{Item, Kind};
use qeffect_core::code::Code;

/// What has happened to a stage so far.
#[derive(Clone, Copy, Default)]
struct Stage {
    refreshed: bool,
    reduced: bool,
    /// F's, I's and W's that ran.
    ran: [u32; 3],
}

/// F's, I's and W's in an action.
fn parts(kind: Kind) -> [u32; 3] {
    match kind {
        Kind::Forward => [1, 0, 0],
        Kind::InputGrad => [0, 1, 0],
        Kind::WeightGrad => [0, 0, 1],
        Kind::FullBackward => [0, 1, 1],
        _ => [0; 3],
    }
}

fn writes(program: &[Item], kind: Kind) -> bool {
    program.iter().any(|item| item.kind == kind)
}

/// All codes of one rank's program, whose tapes and works are in order.
pub fn codes(program: &[Item]) -> BTreeSet<Code> {
    let mut codes = BTreeSet::new();
    let mut stages: BTreeMap<u32, Stage> = BTreeMap::new();
    let mut committed = false;
    for item in program {
        let refreshes = |other: &Item| other.kind == Kind::Refresh && other.stage == item.stage;
        let is_written = program.iter().any(refreshes);
        let stage = stages.entry(item.stage.0).or_default();
        let gradient = parts(item.kind)[1..] != [0, 0];
        codes.extend(match item.kind {
            Kind::Forward if committed || (is_written && !stage.refreshed) => Some(Code::StaleCache),
            Kind::Recompute if committed => Some(Code::StaleCache),
            Kind::Refresh if committed || stage.refreshed => Some(Code::RefreshMisplaced),
            Kind::Reduce if stage.reduced => Some(Code::ReduceMisplaced),
            Kind::Commit if committed => Some(Code::CommitMissing),
            _ if gradient && stage.reduced => Some(Code::ReduceMisplaced),
            _ => None,
        });
        if committed && (gradient || item.kind == Kind::Reduce) {
            codes.insert(Code::CommitWithWork);
        }
        stage.refreshed |= item.kind == Kind::Refresh;
        stage.reduced |= item.kind == Kind::Reduce;
        committed |= item.kind == Kind::Commit;
    }
    // What is written for one stage is written for all of the rank.
    let computes: BTreeSet<u32> = program.iter().filter(|i| i.kind.is_compute()).map(|i| i.stage.0).collect();
    if computes.iter().any(|stage| writes(program, Kind::Refresh) && !stages[stage].refreshed) {
        codes.insert(Code::RefreshMisplaced);
    }
    if computes.iter().any(|stage| writes(program, Kind::Reduce) && !stages[stage].reduced) {
        codes.insert(Code::ReduceMisplaced);
    }
    codes
}

/// The first refusal of a ledger that is driven through the program; a step ends with its commit.
///
/// | the checker says | what the ledger meets |
/// |---|---|
/// | an F before its refresh, or without one | that F: QE0301 |
/// | a refresh too many | that refresh: QE0303; after commit QE0306 |
/// | a reduce too early or too often | that reduce: QE0304; after commit QE0306 |
/// | a reduce that lacks | commit: QE0302 |
/// | an action of the step after commit | commit: QE0302 if something is live, else QE0802 |
/// | a second commit | that commit: QE0306 |
pub fn first_refusal(program: &[Item], microbatches: u32) -> Option<Code> {
    let mut stages: BTreeMap<u32, Stage> = BTreeMap::new();
    for item in program.iter().filter(|item| item.kind.is_compute()) {
        stages.entry(item.stage.0).or_default().refreshed = !writes(program, Kind::Refresh);
    }
    let complete = |stage: &Stage| stage.ran == [microbatches; 3];
    let mut rest = program.iter();
    for item in rest.by_ref() {
        if item.kind == Kind::Commit {
            break;
        }
        let stage = stages.get_mut(&item.stage.0)?;
        match item.kind {
            Kind::Forward if !stage.refreshed => return Some(Code::StaleCache),
            Kind::Refresh if stage.refreshed => return Some(Code::RefreshMisplaced),
            Kind::Refresh => stage.refreshed = true,
            Kind::Reduce if stage.reduced || !complete(stage) => return Some(Code::ReduceMisplaced),
            Kind::Reduce => stage.reduced = true,
            kind => {
                for (ran, more) in stage.ran.iter_mut().zip(parts(kind)) {
                    *ran += more;
                }
            }
        }
    }
    // The commit, written or not.
    let live = |stage: &Stage| stage.ran[0] > stage.ran[2];
    let reduced = |stage: &Stage| stage.reduced || !writes(program, Kind::Reduce);
    if stages.values().any(live) {
        Some(Code::CommitWithWork)
    } else if !stages.values().all(complete) {
        Some(Code::ArenaMissing)
    } else if !stages.values().all(reduced) {
        Some(Code::CommitWithWork)
    } else {
        rest.next().map(|_| Code::NotQuiescent)
    }
}
