//! PyTorch's lowered CSV (`compute_comms`), as its runtime loads it.
//!
//! Beside compute actions, sends and receives it wants words that mean nothing here, and has none for
//! what is ours alone:
//!
//! | word | where |
//! |---|---|
//! | `0UNSHARD`, `0RESHARD` | before the first and behind the last action of a stage on its rank |
//! | `0REDUCE_GRAD`, `0WAIT_REDUCE_GRAD` | where the plan reduces; one is pending at a time |
//! | `0WAIT_SEND_F1` | behind the backward that proves that the activation has arrived, else at the end |
//! | `0WAIT_SEND_B1` | at the end |
//!
//! Waits for receives, refresh, agreement and commit are not written.

use std::borrow::Cow;

use super::plan::word;
use crate::action::{Item, Kind};
use crate::check::{Options, check};
use crate::code::Code;
use crate::diag::{Diagnostic, Place, Report};
use crate::ids::{Microbatch, Rank, Stage};
use crate::origin::Origin;
use crate::plan::{Checked, Node, Op};
use crate::schedule::{Schedule, Transport};

/// Writes a lowered program that PyTorch (2.15) loads with `_load_csv(file, format="compute_comms")`;
/// [`read_plan`](super::read_plan) reads it back to the same actions.
///
/// PyTorch's sends and receives between two ranks meet in the order in which both name them, so the
/// schedule is lowered for [`Transport::Rendezvous`], whatever it declares.
///
/// # Errors
///
/// What the format cannot say: recomputation, coalesced weight gradients, an overlap that is not one
/// forward and one `I` or `B`, and a schedule without backward, which PyTorch's loader refuses.
pub fn write_comms(checked: &Checked) -> Result<String, Report> {
    let faults = unwritable(&checked.schedule);
    if !faults.is_empty() {
        return Err(Report::from_faults(faults));
    }
    // What is declared about it was judged on its own transport.
    let schedule = Schedule {
        transport: Transport::Rendezvous,
        bounds: Cow::Borrowed(&[]),
        expects: Cow::Borrowed(&[]),
        bytes: None,
        ..checked.schedule.clone()
    };
    let checked = check(schedule, &Options::AT_START)?;
    let mut out = String::new();
    for rank in (0..checked.schedule.ranks).map(Rank) {
        out.push_str(&row(checked.plan.rank(rank)).join(","));
        out.push_str("\r\n");
    }
    Ok(out)
}

fn unwritable(schedule: &Schedule) -> Vec<Diagnostic> {
    if schedule.eval {
        let message =
            "a schedule without backward is no program for PyTorch: its loader wants one backward per forward";
        return vec![Diagnostic::new(Code::Syntax, Origin::NONE, message).help("write compute-only CSV")];
    }
    let mut faults = Vec::new();
    for rank in (0..schedule.ranks).map(Rank) {
        let items = schedule.rank(rank);
        for (at, item) in items.iter().enumerate() {
            let why = match item.kind {
                Kind::Recompute => "it has no recomputation",
                Kind::WeightGradJoin => "it has no coalesced weight gradient",
                Kind::OverlapBegin if !is_forward_and_backward(&items[at + 1..]) => {
                    "an overlap there is one forward, then one `I` or `B`"
                }
                _ => continue,
            };
            let place = Place { origin: item.origin, item: Some((rank, at as u32)) };
            let message = format!("{item} cannot be written as PyTorch's lowered CSV: {why}");
            faults.push(Diagnostic::new(Code::Syntax, place, message));
        }
    }
    faults
}

/// Whether an overlap, of which this is what follows its begin, has the shape that PyTorch runs.
fn is_forward_and_backward(inside: &[Item]) -> bool {
    let end = inside.iter().position(|item| item.kind == Kind::OverlapEnd);
    let kinds: Vec<Kind> = inside[..end.unwrap_or(inside.len())].iter().map(|item| item.kind).collect();
    use Kind::{Forward, FullBackward, InputGrad, OverlapBranch};
    matches!(kinds[..], [OverlapBranch, Forward, OverlapBranch, InputGrad | FullBackward])
}

/// The cells of one rank.
fn row(nodes: &[Node]) -> Vec<String> {
    let spans = spans(nodes);
    let mut cells = Vec::new();
    // Sends that nothing has waited for, in their order.
    let mut pending: Vec<(Op, Stage, Microbatch)> = Vec::new();
    let mut parts: Option<Vec<String>> = None;
    // Backwards whose sends can be waited for once the overlap around them has ended.
    let mut done: Vec<(Stage, Microbatch)> = Vec::new();
    for (at, node) in nodes.iter().enumerate() {
        let Node { op, stage, microbatch, .. } = *node;
        cells.extend(spans.iter().filter(|span| span.first == at).map(|span| format!("{}UNSHARD", span.stage)));
        match op {
            Op::Forward | Op::InputGrad | Op::WeightGrad | Op::FullBackward => {
                parts.as_mut().unwrap_or(&mut cells).push(format!("{stage}{}{microbatch}", word(op)));
                if matches!(op, Op::InputGrad | Op::FullBackward) {
                    done.push((stage, microbatch));
                }
            }
            Op::SendForward | Op::SendBackward => {
                cells.push(format!("{stage}{}{microbatch}", word(op)));
                pending.push((op, stage, microbatch));
            }
            Op::PostForward | Op::PostBackward => {
                cells.push(format!("{stage}{}{microbatch}", word(op)));
            }
            Op::Reduce => cells.extend([format!("{stage}REDUCE_GRAD"), format!("{stage}WAIT_REDUCE_GRAD")]),
            Op::OverlapBegin => parts = Some(Vec::new()),
            Op::OverlapEnd => {
                cells.extend(parts.take().map(|parts| format!("({})OVERLAP_F_B", parts.join(";"))));
            }
            // Words of ours, and what `unwritable` refuses.
            Op::WaitForward | Op::WaitBackward | Op::Refresh | Op::Agree | Op::Commit => {}
            Op::OverlapBranch | Op::GroupBegin | Op::GroupEnd | Op::Recompute | Op::WeightGradJoin => {}
        }
        if parts.is_none() {
            for (stage, microbatch) in done.drain(..) {
                if let Some(sent) = pending.iter().position(|send| *send == (Op::SendForward, stage, microbatch)) {
                    pending.remove(sent);
                    cells.push(format!("{stage}WAIT_SEND_F{microbatch}"));
                }
            }
        }
        cells.extend(spans.iter().filter(|span| span.last == at).map(|span| format!("{}RESHARD", span.stage)));
    }
    cells.extend(pending.iter().map(|(op, stage, microbatch)| format!("{stage}WAIT_{}{microbatch}", word(*op))));
    cells
}

/// Where a stage's parameters are in use: the indices of its first and last action, or of the overlap around them.
struct Span {
    stage: Stage,
    first: usize,
    last: usize,
}

fn spans(nodes: &[Node]) -> Vec<Span> {
    let mut spans: Vec<Span> = Vec::new();
    let mut begin = None;
    for (at, node) in nodes.iter().enumerate() {
        match node.op {
            Op::OverlapBegin => begin = Some(at),
            Op::OverlapEnd => {
                // An action within counts to the end of the overlap.
                let begin = begin.take().unwrap_or(at);
                spans.iter_mut().filter(|span| span.last > begin).for_each(|span| span.last = at);
            }
            Op::Forward | Op::InputGrad | Op::WeightGrad | Op::FullBackward | Op::Reduce => {
                match spans.iter_mut().find(|span| span.stage == node.stage) {
                    Some(span) => span.last = at,
                    None => spans.push(Span { stage: node.stage, first: begin.unwrap_or(at), last: at }),
                }
            }
            _ => {}
        }
    }
    spans
}
