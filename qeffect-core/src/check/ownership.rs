//! QE01: ownership of retained work.
//!
//! Each F leaves one tape; exactly one I (or B) takes it and leaves one work; exactly one W takes
//! that. Rust types prove "never twice" for values in hand; this phase proves "never lost" and "in
//! this order" for the whole schedule. After placement, all actions of a stage stand on one rank, so
//! program order is their order.

use super::{list, place, place_of};
use crate::action::{Item, Kind};
use crate::code::Code;
use crate::diag::{Diagnostic, Place};
use crate::ids::{Rank, Stage};
use crate::index::{ABSENT, Index};
use crate::schedule::Schedule;

/// Judges who makes and who takes each tape and work.
pub fn check(schedule: &Schedule, index: &Index) -> Vec<Diagnostic> {
    if schedule.eval {
        return Vec::new();
    }
    let mut faults = Vec::new();
    let mut recomputed = vec![ABSENT; index.forward.len()];
    for (rank, start) in schedule.starts[..schedule.ranks as usize].iter().enumerate() {
        let rank = Rank(rank as u32);
        for (local, item) in schedule.rank(rank).iter().enumerate() {
            if item.kind.is_compute() {
                let at = *start + local as u32;
                judge(schedule, index, &mut recomputed, at, item, place(rank, local, item), &mut faults);
            }
        }
    }
    lost(schedule, index, &mut faults);
    faults
}

fn judge(
    schedule: &Schedule,
    index: &Index,
    recomputed: &mut [u32],
    at: u32,
    item: &Item,
    here: Place,
    faults: &mut Vec<Diagnostic>,
) {
    let cell = index.cell(item.stage, item.microbatch);
    let (forward, input_grad, weight_grad) = (index.forward[cell], index.input_grad[cell], index.weight_grad[cell]);
    let first = |at: u32| place_of(schedule, at);
    let named = |at: u32| &schedule.items[at as usize];
    match item.kind {
        Kind::Recompute => {
            if recomputed[cell] != ABSENT {
                faults.push(
                    Diagnostic::new(Code::RecomputeMisplaced, here, format!("{item} recomputes a second time"))
                        .label(first(recomputed[cell]), "first recomputed here"),
                );
            } else if at < forward || (input_grad != ABSENT && at > input_grad) {
                let (other, word) = if at < forward { (forward, "before") } else { (input_grad, "after") };
                faults.push(
                    Diagnostic::new(Code::RecomputeMisplaced, here, format!("{item} stands {word} {}", named(other)))
                        .label(first(other), format!("{} runs here", named(other)))
                        .help("`R(s, m)` stands after `F(s, m)` and before `I(s, m)`"),
                );
            }
            recomputed[cell] = at;
        }
        Kind::InputGrad | Kind::FullBackward if input_grad != at => {
            let taker = named(input_grad);
            let mut fault = Diagnostic::new(
                Code::TapeConsumedTwice,
                here,
                format!("{item} consumes a tape that is already consumed"),
            )
            .role("second consumer of the tape")
            .label(first(input_grad), format!("first consumed by {taker}"));
            if taker.kind != item.kind {
                fault = fault.note("`B` is `I` then `W` as one action: a microbatch has either `B` or `I` and `W`");
            }
            faults.push(fault.help(tape_help(schedule, index, item)));
        }
        Kind::InputGrad | Kind::FullBackward if at < forward => faults.push(
            Diagnostic::new(
                Code::TapeBeforeForward,
                here,
                format!("{item} runs before F({}, {}), whose tape it consumes", item.stage, item.microbatch),
            )
            .role("no tape yet")
            .label(first(forward), format!("{} runs only here", named(forward)))
            .help("move it below that forward"),
        ),
        Kind::WeightGrad | Kind::WeightGradJoin if weight_grad != at => {
            let taker = named(weight_grad);
            let mut fault = Diagnostic::new(
                Code::WorkConsumedTwice,
                here,
                format!("{item} consumes work that is already consumed"),
            )
            .role("second consumer of the work")
            .label(first(weight_grad), format!("first consumed by {taker}"));
            if taker.kind == Kind::FullBackward {
                fault = fault.note("`B` is `I` then `W` as one action: it leaves no work");
            }
            let without = without(schedule, &index.weight_grad, item.stage);
            faults.push(fault.help(match without.as_slice() {
                [] => "remove it: every work of this stage has its weight gradient".to_owned(),
                some => format!(
                    "each I leaves one work, and exactly one W takes it; microbatch {} has no W yet",
                    list(some)
                ),
            }));
        }
        Kind::WeightGrad | Kind::WeightGradJoin if input_grad != ABSENT && at < input_grad => faults.push(
            Diagnostic::new(
                Code::WorkBeforeInputGrad,
                here,
                format!("{item} runs before I({}, {}), which leaves its work", item.stage, item.microbatch),
            )
            .role("no work yet")
            .label(first(input_grad), format!("{} runs only here", named(input_grad)))
            .help("move it below that input gradient"),
        ),
        Kind::WeightGrad | Kind::WeightGradJoin if input_grad == ABSENT => faults.push(
            Diagnostic::new(
                Code::WorkBeforeInputGrad,
                here,
                format!("{item} has no work: I({}, {}) never runs", item.stage, item.microbatch),
            )
            .help("add that input gradient, or write `B(s, m)`, which computes both gradients"),
        ),
        _ => {}
    }
}

fn tape_help(schedule: &Schedule, index: &Index, item: &Item) -> String {
    match without(schedule, &index.input_grad, item.stage).as_slice() {
        [] => "remove it: every tape of this stage has its input gradient".to_owned(),
        some => format!("each F leaves one tape, and exactly one I takes it; microbatch {} has no I yet", list(some)),
    }
}

/// The microbatches of a stage that a table does not hold.
fn without(schedule: &Schedule, table: &[u32], stage: Stage) -> Vec<u32> {
    let row = stage.index() * schedule.microbatches as usize;
    (0..schedule.microbatches).filter(|m| table[row + *m as usize] == ABSENT).collect()
}

/// Tapes without I and works without W, one fault per stage.
fn lost(schedule: &Schedule, index: &Index, faults: &mut Vec<Diagnostic>) {
    for stage in (0..schedule.stages).map(Stage) {
        let row = stage.index() * schedule.microbatches as usize;
        let no_input_grad = without(schedule, &index.input_grad, stage);
        if let Some(first) = no_input_grad.first() {
            let forward = index.forward[row + *first as usize];
            faults.push(
                Diagnostic::new(
                    Code::TapeNeverConsumed,
                    place_of(schedule, forward),
                    format!("the tape of F({stage}, {first}) is never consumed"),
                )
                .role("tape left here")
                .note(pending(schedule, stage, &no_input_grad, "I"))
                .help(format!("add `I({stage}, {first})` and `W({stage}, {first})`, or `B({stage}, {first})`")),
            );
        }
        // Works that exist and are not taken: only where I runs.
        let no_weight_grad: Vec<u32> = without(schedule, &index.weight_grad, stage)
            .into_iter()
            .filter(|m| index.input_grad[row + *m as usize] != ABSENT)
            .collect();
        if let Some(first) = no_weight_grad.first() {
            let input_grad = index.input_grad[row + *first as usize];
            faults.push(
                Diagnostic::new(
                    Code::WorkNeverConsumed,
                    place_of(schedule, input_grad),
                    format!("the work of I({stage}, {first}) is never consumed"),
                )
                .role("work left here")
                .note(pending(schedule, stage, &no_weight_grad, "W"))
                .help(format!(
                    "add `W({stage}, {first})`, or use `B({stage}, {first})`, which computes both gradients at once"
                )),
            );
        }
    }
}

fn pending(schedule: &Schedule, stage: Stage, missing: &[u32], letter: &str) -> String {
    let rank = schedule.placement[stage.index()];
    format!(
        "still pending where the program of rank {rank} ends: no {letter} of stage {stage} for microbatch {}",
        list(missing)
    )
}
