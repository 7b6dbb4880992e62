//! QE04: communication.
//!
//! Under transport `edge` each logical edge is a FIFO of its own with enough buffers (see
//! [`crate::lower`]), so ranks can only wait for each other through data: a deadlock is a cycle of
//! waits. Under `rank_edge` all messages from one rank to another share a FIFO, whose two ends must
//! agree about the order, or a gradient would be taken for an activation of the same shape.

use std::collections::BTreeMap;

use super::{place, place_of};
use crate::action::{Item, Kind};
use crate::code::Code;
use crate::diag::Diagnostic;
use crate::ids::Stage;
use crate::index;
use crate::schedule::{Schedule, Transport};
use crate::sim::Blocked;

/// One fault per cycle of waits. `blocked` lists every rank that never ends.
pub fn deadlocks(schedule: &Schedule, blocked: &[Blocked]) -> Vec<Diagnostic> {
    let by_rank: BTreeMap<u32, &Blocked> = blocked.iter().map(|b| (b.rank.0, b)).collect();
    // Each blocked rank waits for one other: following the waits from anywhere ends in a cycle.
    let mut seen: BTreeMap<u32, u32> = BTreeMap::new();
    let mut faults = Vec::new();
    for start in by_rank.keys() {
        let mut rank = *start;
        while let Some(wait) = by_rank.get(&rank)
            && !seen.contains_key(&rank)
        {
            seen.insert(rank, *start);
            rank = schedule.locate(wait.needs).0.0;
        }
        if seen.get(&rank) == Some(start) {
            let mut cycle = vec![by_rank[&rank]];
            let mut next = schedule.locate(by_rank[&rank].needs).0.0;
            while next != rank {
                cycle.push(by_rank[&next]);
                next = schedule.locate(by_rank[&next].needs).0.0;
            }
            faults.push(cycle_fault(schedule, &cycle));
        }
    }
    faults
}

/// The overlap that encloses an item, as a range of [`Schedule::items`].
fn enclosing_overlap(schedule: &Schedule, at: u32) -> Option<std::ops::Range<u32>> {
    let (rank, local) = schedule.locate(at);
    let (items, base) = (schedule.rank(rank), at - local);
    let begin =
        items[..local as usize].iter().rposition(|i| matches!(i.kind, Kind::OverlapBegin | Kind::OverlapEnd))?;
    let end = begin + items[begin..].iter().position(|i| i.kind == Kind::OverlapEnd)?;
    (items[begin].kind == Kind::OverlapBegin).then(|| base + begin as u32..base + end as u32)
}

/// The fault of an overlap that needs, through other ranks, what it produces itself.
fn self_dependent(schedule: &Schedule, cycle: &[&Blocked]) -> Option<Diagnostic> {
    let item = |at: u32| &schedule.items[at as usize];
    cycle.iter().find_map(|stopped| {
        let block = enclosing_overlap(schedule, stopped.item)?;
        let taken = cycle.iter().find(|wait| block.contains(&wait.needs))?;
        Some(
            Diagnostic::new(
                Code::OverlapDependent,
                place_of(schedule, stopped.item),
                format!("{} depends on {}, which stands in the same overlap", item(stopped.item), item(taken.needs)),
            )
            .label(place_of(schedule, taken.needs), format!("rank {} needs this for {}", taken.rank, item(taken.item)))
            .label(place_of(schedule, stopped.needs), format!("and this one needs {} in turn", item(stopped.needs)))
            .note("an overlap starts when all that it needs is there, and its results are usable when it ends")
            .help("take one of the two out of the overlap"),
        )
    })
}

fn cycle_fault(schedule: &Schedule, cycle: &[&Blocked]) -> Diagnostic {
    const WAITS_SHOWN: usize = 6;
    if let Some(fault) = self_dependent(schedule, cycle) {
        return fault;
    }
    let item = |at: u32| &schedule.items[at as usize];
    let first = cycle[0];
    let message = match cycle {
        [one] => format!("{} waits for {}, which rank {} runs only later", item(one.item), item(one.needs), one.rank),
        [a, b] => format!("ranks {} and {} wait for each other", a.rank, b.rank),
        _ => format!("{} ranks wait for each other in a circle", cycle.len()),
    };
    let mut fault = Diagnostic::new(Code::Deadlock, place_of(schedule, first.item), message);
    for wait in cycle.iter().take(WAITS_SHOWN) {
        fault = fault.label(
            place_of(schedule, wait.item),
            format!(
                "rank {} stops at {}, waiting for {} of rank {}",
                wait.rank,
                item(wait.item),
                item(wait.needs),
                schedule.locate(wait.needs).0
            ),
        );
        fault = fault.label(
            place_of(schedule, wait.needs),
            format!("{} would run here, after that stop of rank {}", item(wait.needs), schedule.locate(wait.needs).0),
        );
    }
    if cycle.len() > WAITS_SHOWN {
        fault = fault.note(format!("and {} more waits close the circle", cycle.len() - WAITS_SHOWN));
    }
    let earliest = cycle.iter().max_by_key(|wait| {
        let stop = cycle.iter().find(|other| other.rank == schedule.locate(wait.needs).0);
        stop.map_or(0, |stop| u32::MAX - (wait.needs - stop.item.min(wait.needs)))
    });
    let moved = earliest.unwrap_or(&first);
    let at = cycle.iter().find(|other| other.rank == schedule.locate(moved.needs).0).unwrap_or(&first);
    fault.help(format!("run {} before {} on rank {}", item(moved.needs), item(at.item), at.rank))
}

/// A message: what made it (F or a backward), on which stage, for which microbatch.
type Message = (Kind, Stage, u32);

/// What one rank sends to another, in the sender's order, and what that one takes, in its own; each
/// with the item that does it.
#[derive(Default)]
struct Channel {
    sent: Vec<(Message, u32)>,
    taken: Vec<(Message, u32)>,
}

/// Judges the pairing of messages on FIFOs that several edges share.
pub fn check(schedule: &Schedule) -> Vec<Diagnostic> {
    if schedule.transport != Transport::RankEdge {
        return Vec::new();
    }
    let mut channels: BTreeMap<(u32, u32), Channel> = BTreeMap::new();
    for (at, item) in schedule.items.iter().enumerate() {
        let home = schedule.placement[item.stage.index()];
        let kind = if item.kind == Kind::Forward { Kind::Forward } else { Kind::InputGrad };
        if let Some(to) = index::dependent(schedule, item).map(|s| schedule.placement[s.index()])
            && to != home
        {
            let message = (kind, item.stage, item.microbatch.0);
            channels.entry((home.0, to.0)).or_default().sent.push((message, at as u32));
        }
        if let Some(source) = source(schedule, item)
            && schedule.placement[source.index()] != home
        {
            let from = schedule.placement[source.index()];
            let message = (kind, source, item.microbatch.0);
            channels.entry((from.0, home.0)).or_default().taken.push((message, at as u32));
        }
    }
    let mut faults = Vec::new();
    for ((from, to), Channel { sent, taken }) in &channels {
        let differs = sent.iter().zip(taken).find(|(a, b)| a.0 != b.0);
        if let Some((sent, taken)) = differs {
            let (rank, at) = schedule.locate(taken.1);
            let item = &schedule.items[taken.1 as usize];
            let sender = &schedule.items[sent.1 as usize];
            faults.push(
                Diagnostic::new(
                    Code::FifoOrder,
                    place(rank, at as usize, item),
                    format!("{item} would take the message of {sender}: ranks {from} and {to} order their channel differently"),
                )
                .role("takes the next message of the channel")
                .label(place_of(schedule, sent.1), format!("the next message is sent by {sender}"))
                .note(format!("with `transport: rank_edge` all messages from rank {from} to rank {to} share one channel"))
                .help("use `transport: edge`, which gives every boundary and direction a channel of its own"),
            );
        }
    }
    faults
}

fn source(schedule: &Schedule, item: &Item) -> Option<Stage> {
    match item.kind {
        Kind::Forward => item.stage.0.checked_sub(1).map(Stage),
        Kind::InputGrad | Kind::FullBackward => (item.stage.0 + 1 < schedule.stages).then_some(Stage(item.stage.0 + 1)),
        _ => None,
    }
}
