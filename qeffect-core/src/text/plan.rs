//! Lowered programs as text: every send, receive and wait is written, so that faulty communication
//! can be written, imported and tested.
//!
//! Cells are those of PyTorch's lowered format, and these of our own: `1WAIT_F0` and `0WAIT_B0`
//! (the compute stream waits; left out right before the consumer, or the overlap in which it stands), `0REFRESH`, `0R1`, `0JOIN1` (a
//! further member of the weight gradient before it), and without a stage `AGREE`, `COMMIT`, `OVERLAP`,
//! `BRANCH`, `OVERLAP_END`. `(0SEND_F1;0RECV_B0)GROUP` is sends and receives that go on together.
//! `0WAIT_REDUCE_GRAD` and `0WAIT_SEND_F1` are read over: they mean nothing here. `0UNSHARD` and
//! `0RESHARD` leave no node either, but are judged ([`shards`](super::shards)).

use std::collections::HashSet;
use std::fmt::Write;

use super::cell::{Cell, Field, cell, container, fault, rows};
use super::csv::{assemble, is_compute_only};
use super::shards;
use super::words::spelt;
use crate::action::{Item, Kind};
use crate::code::Code;
use crate::diag::{Diagnostic, Report};
use crate::ids::{Microbatch, Rank, Stage};
use crate::origin::Origin;
use crate::plan::{NONE, Node, Op, Plan};
use crate::schedule::Schedule;
use crate::source::SourceMap;

/// Types with a microbatch.
const WITH_MICROBATCH: &[(&str, Op)] = &[
    ("F", Op::Forward),
    ("I", Op::InputGrad),
    ("W", Op::WeightGrad),
    ("B", Op::FullBackward),
    ("R", Op::Recompute),
    ("JOIN", Op::WeightGradJoin),
    ("SEND_F", Op::SendForward),
    ("RECV_F", Op::PostForward),
    ("WAIT_F", Op::WaitForward),
    ("SEND_B", Op::SendBackward),
    ("RECV_B", Op::PostBackward),
    ("WAIT_B", Op::WaitBackward),
];
/// Types of a whole stage.
const OF_STAGE: &[(&str, Op)] = &[("REFRESH", Op::Refresh), ("REDUCE_GRAD", Op::Reduce)];
/// Types that leave no node, of a whole stage and with a microbatch: sharding is not ours, and a
/// sender never waits for what it has sent.
const IGNORED: &[&str] = &["UNSHARD", "RESHARD", "WAIT_REDUCE_GRAD"];
const IGNORED_WITH_MICROBATCH: &[&str] = &["WAIT_SEND_F", "WAIT_SEND_B"];
/// Words without a stage.
const OF_RANK: &[(&str, Op)] = &[
    ("AGREE", Op::Agree),
    ("COMMIT", Op::Commit),
    ("OVERLAP", Op::OverlapBegin),
    ("BRANCH", Op::OverlapBranch),
    ("OVERLAP_END", Op::OverlapEnd),
    ("GROUP", Op::GroupBegin),
    ("GROUP_END", Op::GroupEnd),
];

/// Whether a text has a cell that only lowered programs have, wherever it stands. Compute-only files
/// have none: a program that is neither cut nor sharded is told by its bookkeeping.
pub fn is_lowered(text: &str) -> bool {
    text.split(['\n', ',', ';', '(', ')']).any(|cell| is_lowered_word(cell.trim()))
}

/// Whether a cell, whole or not, names a type that only lowered programs have.
pub(super) fn is_lowered_word(cell: &str) -> bool {
    let word = cell.trim_matches(|c: char| c.is_ascii_digit());
    let known = WITH_MICROBATCH.iter().chain(OF_STAGE).chain(OF_RANK).map(|(word, _)| word);
    !is_compute_only(word) && known.chain(IGNORED).chain(IGNORED_WITH_MICROBATCH).any(|known| *known == word)
}

/// Reads `0F1` or `0UNSHARD`: stage, type and microbatch of a lowered program.
pub(super) fn lowered_cell(text: &str) -> Result<Cell<'_>, (Code, String, Option<String>)> {
    let with: Vec<&str> =
        WITH_MICROBATCH.iter().map(|(word, _)| word).chain(IGNORED_WITH_MICROBATCH).copied().collect();
    let alone: Vec<&str> = OF_STAGE.iter().map(|(word, _)| word).chain(IGNORED).copied().collect();
    cell(text, &with, &alone)
}

pub(super) fn word(op: Op) -> &'static str {
    let mut all = WITH_MICROBATCH.iter().chain(OF_STAGE).chain(OF_RANK);
    all.find(|(_, known)| *known == op).map_or("?", |(word, _)| word)
}

fn compute_kind(op: Op) -> Option<Kind> {
    Some(match op {
        Op::Forward => Kind::Forward,
        Op::InputGrad => Kind::InputGrad,
        Op::WeightGrad => Kind::WeightGrad,
        Op::WeightGradJoin => Kind::WeightGradJoin,
        Op::FullBackward => Kind::FullBackward,
        Op::Recompute => Kind::Recompute,
        Op::Refresh => Kind::Refresh,
        Op::Reduce => Kind::Reduce,
        Op::Commit => Kind::Commit,
        Op::OverlapBegin => Kind::OverlapBegin,
        Op::OverlapBranch => Kind::OverlapBranch,
        Op::OverlapEnd => Kind::OverlapEnd,
        _ => return None,
    })
}

/// A lowered program as somebody wrote it: nothing about it is checked yet.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RawPlan {
    /// The nodes of each rank; slots and edges are not numbered. Waits are explicit.
    pub nodes: Vec<Vec<Node>>,
    /// The actions alone. Check these first: communication is judged against legal actions.
    pub schedule: Schedule,
}

/// Reads a lowered program; the map draws reports about it.
///
/// # Errors
///
/// Cells that are none; a stage that computes outside its `UNSHARD` and `RESHARD`, or has no
/// `REDUCE_GRAD`, in a file that has such words at all. Whether the communication is right is for
/// [`check::messages`](crate::check::messages).
pub fn read_plan(name: &str, file: &str, text: &str) -> (Result<RawPlan, Report>, SourceMap) {
    let mut map = SourceMap::new(file, text);
    let result = rows(text, &mut map).and_then(|rows| {
        let mut faults = Vec::new();
        let nodes: Vec<Vec<Node>> = rows.iter().map(|row| rank(row, &mut faults)).collect();
        if !faults.is_empty() {
            return Err(faults);
        }
        let schedule = schedule(name, &nodes)?;
        let faults = shards::check(&rows);
        if !faults.is_empty() {
            return Err(faults);
        }
        Ok(RawPlan { nodes: nodes.into_iter().map(with_waits).collect(), schedule })
    });
    (result.map_err(|faults| spelt(Report::from_faults(faults))), map)
}

fn rank(row: &[Field<'_>], faults: &mut Vec<Diagnostic>) -> Vec<Node> {
    let mut nodes = Vec::new();
    let blank = row.len() == 1 && row[0].text.is_empty();
    for Field { text, origin } in row.iter().filter(|_| !blank) {
        if text.is_empty() {
            let message = "an empty cell: a lowered program has no idle steps";
            faults.push(Diagnostic::new(Code::Syntax, *origin, message).help("remove it"));
            continue;
        }
        if let Some((parts, "GROUP")) = container(text) {
            group(&parts, *origin, &mut nodes, faults);
            continue;
        }
        if let Some((parts, name)) = container(text) {
            if name != "OVERLAP_F_B" || parts.len() < 2 {
                let message = format!("`{text}` is no overlap");
                faults.push(Diagnostic::new(Code::Syntax, *origin, message).help("write `(0F1;1B0)OVERLAP_F_B`"));
                continue;
            }
            nodes.push(Node::new(Op::OverlapBegin, 0, 0, NONE, origin.0));
            for part in parts {
                nodes.push(Node::new(Op::OverlapBranch, 0, 0, NONE, origin.0));
                nodes.extend(node(part, *origin, faults));
            }
            nodes.push(Node::new(Op::OverlapEnd, 0, 0, NONE, origin.0));
            continue;
        }
        nodes.extend(node(text, *origin, faults));
    }
    nodes
}

/// `(0SEND_F1;0RECV_B0)GROUP`: sends and receives only, for that is what can go on together.
fn group(parts: &[&str], origin: Origin, nodes: &mut Vec<Node>, faults: &mut Vec<Diagnostic>) {
    nodes.push(Node::new(Op::GroupBegin, 0, 0, NONE, origin.0));
    for part in parts {
        let Some(member) = node(part, origin, faults) else { continue };
        if !matches!(member.op, Op::SendForward | Op::PostForward | Op::SendBackward | Op::PostBackward) {
            let message = format!("`{part}` cannot stand in a group");
            let help = "a group holds `SEND_F`, `RECV_F`, `SEND_B` and `RECV_B`";
            faults.push(Diagnostic::new(Code::Syntax, origin, message).help(help));
        }
        nodes.push(member);
    }
    nodes.push(Node::new(Op::GroupEnd, 0, 0, NONE, origin.0));
}

fn node(text: &str, origin: Origin, faults: &mut Vec<Diagnostic>) -> Option<Node> {
    if let Some((_, op)) = OF_RANK.iter().find(|(word, _)| *word == text) {
        return Some(Node::new(*op, 0, 0, NONE, origin.0));
    }
    match lowered_cell(text) {
        Ok(Cell { stage, word, microbatch }) => {
            let (_, op) = WITH_MICROBATCH.iter().chain(OF_STAGE).find(|(known, _)| *known == word)?;
            Some(Node::new(*op, stage, microbatch.unwrap_or(0), NONE, origin.0))
        }
        Err(why) => {
            faults.push(fault(origin, why));
            None
        }
    }
}

/// The receive that an action consumes, and the wait for it.
const fn input(op: Op) -> Option<(Op, Op)> {
    match op {
        Op::Forward => Some((Op::PostForward, Op::WaitForward)),
        Op::InputGrad | Op::FullBackward => Some((Op::PostBackward, Op::WaitBackward)),
        _ => None,
    }
}

/// The wait that a consumer has if none is written: right before it, or before the overlap that it stands in.
fn wait_of(node: &Node) -> Option<Node> {
    input(node.op).map(|(_, wait)| Node { op: wait, ..*node })
}

/// Nodes by what they say, without slot and place.
fn key(node: &Node) -> (Op, Stage, Microbatch) {
    (node.op, node.stage, node.microbatch)
}

/// The waits of a block for messages that are received: those whose post is among `known`.
fn waits_of(block: &[Node], known: &HashSet<(Op, Stage, Microbatch)>) -> Vec<Node> {
    let received =
        |node: &&Node| input(node.op).is_some_and(|(post, _)| known.contains(&key(&Node { op: post, ..**node })));
    block.iter().filter(received).filter_map(wait_of).collect()
}

/// A program as its overlaps, and single nodes between them; each with the place of its first node.
fn blocks(nodes: &[Node]) -> impl Iterator<Item = (usize, &[Node])> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let rest = nodes.get(at..).filter(|rest| !rest.is_empty())?;
        let length = match rest[0].op {
            Op::OverlapBegin => rest.iter().position(|node| node.op == Op::OverlapEnd).map_or(1, |end| end + 1),
            _ => 1,
        };
        at += length;
        Some((at - length, &rest[..length]))
    })
}

/// Adds the waits that are left out.
fn with_waits(nodes: Vec<Node>) -> Vec<Node> {
    let known: HashSet<_> = nodes.iter().map(key).collect();
    let mut out = Vec::with_capacity(nodes.len());
    for (_, block) in blocks(&nodes) {
        out.extend(waits_of(block, &known).into_iter().filter(|wait| !known.contains(&key(wait))));
        out.extend_from_slice(block);
    }
    out
}

/// Which nodes are waits that reading would put there.
fn implied(nodes: &[Node]) -> Vec<bool> {
    let known: HashSet<_> = nodes.iter().map(key).collect();
    let mut implied = vec![false; nodes.len()];
    for (at, block) in blocks(nodes) {
        let waits = waits_of(block, &known);
        let Some(from) = at.checked_sub(waits.len()) else { continue };
        if nodes[from..at].iter().map(key).eq(waits.iter().map(key)) {
            implied[from..at].fill(true);
        }
    }
    implied
}

fn schedule(name: &str, nodes: &[Vec<Node>]) -> Result<Schedule, Vec<Diagnostic>> {
    let (mut items, mut starts) = (Vec::new(), vec![0]);
    for rank in nodes {
        items.extend(rank.iter().filter_map(|node| {
            Some(Item::new(compute_kind(node.op)?, node.stage.0, node.microbatch.0, node.origin.0))
        }));
        starts.push(items.len() as u32);
    }
    let faults = super::csv::oversized(&items);
    if !faults.is_empty() {
        return Err(faults);
    }
    assemble(name, nodes.len() as u32, items, starts)
}

/// Writes a plan with the words of our own; [`read_plan`] gives its nodes back, but for slots and edges.
pub fn write_plan(plan: &Plan) -> String {
    let mut out = String::new();
    for rank in 0..plan.starts.len().saturating_sub(1) {
        let nodes = plan.rank(Rank(rank as u32));
        let mut separator = "";
        for (node, _) in nodes.iter().zip(implied(nodes)).filter(|(_, implied)| !implied) {
            out.push_str(separator);
            separator = ",";
            let word = word(node.op);
            let _ = match node.op {
                Op::Refresh | Op::Reduce => write!(out, "{}{word}", node.stage),
                Op::Agree
                | Op::Commit
                | Op::OverlapBegin
                | Op::OverlapBranch
                | Op::OverlapEnd
                | Op::GroupBegin
                | Op::GroupEnd => write!(out, "{word}"),
                _ => write!(out, "{}{word}{}", node.stage, node.microbatch),
            };
        }
        out.push_str("\r\n");
    }
    out
}
