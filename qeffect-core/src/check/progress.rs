//! How far a lowered program comes: its communication played on a declared transport.
//!
//! | transport | a send | a post | a wait |
//! |---|---|---|---|
//! | `edge`, `rank_edge` | never holds up its rank | never holds up its rank | until its message was sent |
//! | `rendezvous` | until the receiver is at the matching receive | until the sender is at the matching send | is over: the receive was |
//!
//! On `rendezvous` the members of a group go on together: the rank stands at all of them at once, and
//! leaves when the last one is done. Each message has one send and one post, and both ends of a
//! channel name them in the same order ([`messages`](super::messages) and lowering see to that), so
//! who meets whom is fixed by the programs. No rank can be made to stop by another's early step:
//! what is enabled stays enabled. So one run decides for all interleavings and all costs.

use std::collections::{BTreeMap, HashMap};

use super::messages::name;
use crate::action::{Item, Kind};
use crate::code::Code;
use crate::diag::{Diagnostic, Place};
use crate::ids::{Rank, Stage};
use crate::lower::{backward_edge, forward_edge};
use crate::plan::{Node, Op};
use crate::schedule::Transport;
use crate::sim::CostModel;

/// Where a rank stopped for ever, and the node of another rank without which it cannot go on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stop {
    /// The rank.
    pub rank: Rank,
    /// Its node, by index.
    pub at: usize,
    /// The rank that it waits for.
    pub peer: Rank,
    /// That rank's node.
    pub needs: usize,
}

/// When the ranks of a lowered program work, in the units of the costs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Clocks {
    /// First start of an action per rank.
    pub first: Vec<i64>,
    /// End of the last action or communication per rank.
    pub last: Vec<i64>,
    /// Sum of costs per rank.
    pub busy: Vec<i64>,
}

impl Clocks {
    /// Bubble in the makespan sense, of the rank that idles most.
    pub fn bubble(&self) -> i64 {
        let makespan = self.last.iter().copied().max().unwrap_or(0);
        self.busy.iter().map(|busy| makespan - busy).max().unwrap_or(0)
    }

    /// Largest idle time of a rank between its own first start and last end.
    pub fn idle(&self) -> i64 {
        (0..self.busy.len()).map(|r| self.last[r] - self.first[r] - self.busy[r]).max().unwrap_or(0)
    }
}

/// A message: edge and microbatch.
type Key = (u32, u32);

/// The message that a node moves or uses, and whether this is its sending end.
fn message(node: &Node, stages: u32) -> Option<(Key, bool)> {
    let (edge, sends) = match node.op {
        Op::SendForward => (forward_edge(stages, node.stage), true),
        Op::SendBackward => (backward_edge(stages, node.stage), true),
        Op::PostForward | Op::WaitForward | Op::Forward => {
            (node.stage.0.checked_sub(1).and_then(|from| forward_edge(stages, Stage(from))), false)
        }
        Op::PostBackward | Op::WaitBackward | Op::InputGrad | Op::FullBackward => {
            let from = Stage(node.stage.0 + 1);
            ((from.0 < stages).then(|| backward_edge(stages, from)).flatten(), false)
        }
        _ => (None, false),
    };
    edge.map(|edge| ((edge, node.microbatch.0), sends))
}

const fn is_communication(op: Op) -> bool {
    matches!(op, Op::SendForward | Op::SendBackward | Op::PostForward | Op::PostBackward)
}

/// Plays `nodes` (per rank, in program order).
///
/// # Errors
///
/// Every rank that never ends.
pub fn run<N: AsRef<[Node]>>(
    nodes: &[N],
    placement: &[Rank],
    transport: Transport,
    costs: &CostModel,
) -> Result<Clocks, Vec<Stop>> {
    let stages = placement.len() as u32;
    let mut ends_of: HashMap<Key, [Option<(usize, usize)>; 2]> = HashMap::new();
    for (rank, program) in nodes.iter().enumerate() {
        for (at, node) in program.as_ref().iter().enumerate() {
            if let Some((key, sends)) = message(node, stages)
                && is_communication(node.op)
            {
                ends_of.entry(key).or_default()[usize::from(!sends)] = Some((rank, at));
            }
        }
    }
    let programs: Vec<&[Node]> = nodes.iter().map(AsRef::as_ref).collect();
    let ranks = programs.len();
    let mut play = Play {
        ends: ends_of,
        stages,
        done: programs.iter().map(|program| vec![None; program.len()]).collect(),
        at: vec![0; ranks],
        clocks: Clocks { first: vec![i64::MIN; ranks], last: vec![0; ranks], busy: vec![0; ranks] },
        programs,
        transport,
        costs,
    };
    let mut stops = vec![None; ranks];
    let mut ready: Vec<usize> = (0..ranks).rev().collect();
    while let Some(rank) = ready.pop() {
        let mut moved = false;
        stops[rank] = loop {
            match play.step(rank) {
                Step::Moved => moved = true,
                Step::Stopped(stop) => break Some(stop),
                Step::Ended => break None,
            }
        };
        if moved || transport == Transport::Rendezvous {
            // Whoever waits for this rank may go on.
            for (other, stop) in stops.iter_mut().enumerate() {
                if stop.is_some_and(|stop: Stop| stop.peer.index() == rank && play.met(other, &stop)) {
                    *stop = None;
                    ready.push(other);
                }
            }
        }
    }
    let stops: Vec<Stop> = stops.into_iter().flatten().collect();
    if !stops.is_empty() {
        return Err(stops);
    }
    play.clocks.first.iter_mut().for_each(|first| *first = (*first).max(0));
    Ok(play.clocks)
}

enum Step {
    Moved,
    Stopped(Stop),
    Ended,
}

struct Play<'a> {
    programs: Vec<&'a [Node]>,
    stages: u32,
    transport: Transport,
    costs: &'a CostModel,
    /// Where each message is sent and posted: rank and index.
    ends: HashMap<Key, [Option<(usize, usize)>; 2]>,
    /// When each communication node was done.
    done: Vec<Vec<Option<i64>>>,
    at: Vec<usize>,
    clocks: Clocks,
}

impl Play<'_> {
    /// Whether the node that `stop` waits for has been done, or its rank now stands at it.
    fn met(&self, other: usize, stop: &Stop) -> bool {
        let peer = stop.peer.index();
        self.done[peer][stop.needs].is_some()
            || self.done[other][stop.at].is_some()
            || (self.transport == Transport::Rendezvous && self.standing(peer).contains(&stop.needs))
    }

    /// The communication nodes at which a rank stands: one, or those of a group.
    fn standing(&self, rank: usize) -> std::ops::Range<usize> {
        let (program, at) = (self.programs[rank], self.at[rank]);
        match program.get(at).map(|node| node.op) {
            Some(Op::GroupBegin) => {
                let length = program[at + 1..].iter().position(|node| node.op == Op::GroupEnd);
                at + 1..length.map_or(program.len(), |length| at + 1 + length)
            }
            Some(op) if is_communication(op) => at..at + 1,
            _ => at..at,
        }
    }

    fn step(&mut self, rank: usize) -> Step {
        let at = self.at[rank];
        let Some(node) = self.programs[rank].get(at).copied() else { return Step::Ended };
        let blocking = self.transport == Transport::Rendezvous;
        match node.op {
            op if blocking && (op == Op::GroupBegin || is_communication(op)) => return self.rendezvous(rank),
            op if is_communication(op) => self.done[rank][at] = Some(self.clocks.last[rank]),
            _ if !blocking => {
                if let Some((peer, send)) = message(&node, self.stages).and_then(|(key, _)| self.ends.get(&key)?[0]) {
                    let Some(time) = self.done[peer][send] else {
                        let (rank, peer) = (Rank(rank as u32), Rank(peer as u32));
                        return Step::Stopped(Stop { rank, at, peer, needs: send });
                    };
                    self.clocks.last[rank] = self.clocks.last[rank].max(time + self.costs.latency);
                }
                self.compute(rank, &node);
            }
            _ => self.compute(rank, &node),
        }
        self.go(rank, at + 1)
    }

    fn go(&mut self, rank: usize, to: usize) -> Step {
        self.at[rank] = to;
        Step::Moved
    }

    fn compute(&mut self, rank: usize, node: &Node) {
        let kind = match node.op {
            Op::Forward => Kind::Forward,
            Op::Recompute => Kind::Recompute,
            Op::InputGrad => Kind::InputGrad,
            Op::WeightGrad | Op::WeightGradJoin => Kind::WeightGrad,
            Op::FullBackward => Kind::FullBackward,
            _ => return,
        };
        let cost = self.costs.cost(&Item { kind, stage: node.stage, microbatch: node.microbatch, origin: node.origin });
        let clocks = &mut self.clocks;
        if clocks.first[rank] == i64::MIN {
            clocks.first[rank] = clocks.last[rank];
        }
        clocks.last[rank] += cost;
        clocks.busy[rank] += cost;
    }

    /// Meets every peer that stands at the other end of what this rank stands at.
    fn rendezvous(&mut self, rank: usize) -> Step {
        let members = self.standing(rank);
        let (mut last, mut open) = (self.clocks.last[rank], None);
        for at in members.clone() {
            if let Some(time) = self.done[rank][at] {
                last = last.max(time);
                continue;
            }
            let node = self.programs[rank][at];
            let other = message(&node, self.stages).and_then(|(key, sends)| self.ends.get(&key)?[usize::from(sends)]);
            let Some((peer, needs)) = other else { continue };
            if self.standing(peer).contains(&needs) {
                let time = self.clocks.last[rank].max(self.clocks.last[peer]) + self.costs.latency;
                self.done[rank][at] = Some(time);
                self.done[peer][needs] = Some(time);
                last = last.max(time);
            } else {
                let stop = Stop { rank: Rank(rank as u32), at, peer: Rank(peer as u32), needs };
                open.get_or_insert(stop);
            }
        }
        if let Some(stop) = open {
            return Step::Stopped(stop);
        }
        self.clocks.last[rank] = last;
        let grouped = self.programs[rank][self.at[rank]].op == Op::GroupBegin;
        self.go(rank, members.end + usize::from(grouped))
    }
}

/// One fault per circle of waits. `stops` lists every rank that never ends.
pub fn deadlocks<N: AsRef<[Node]>>(nodes: &[N], stops: &[Stop], transport: Transport) -> Vec<Diagnostic> {
    let by_rank: BTreeMap<Rank, &Stop> = stops.iter().map(|stop| (stop.rank, stop)).collect();
    let mut seen: BTreeMap<Rank, Rank> = BTreeMap::new();
    let mut faults = Vec::new();
    for start in by_rank.keys() {
        let mut rank = *start;
        while let Some(stop) = by_rank.get(&rank)
            && !seen.contains_key(&rank)
        {
            seen.insert(rank, *start);
            rank = stop.peer;
        }
        if seen.get(&rank) == Some(start) && by_rank.contains_key(&rank) {
            let mut circle = vec![by_rank[&rank]];
            while circle[circle.len() - 1].peer != rank {
                circle.push(by_rank[&circle[circle.len() - 1].peer]);
            }
            faults.push(fault(nodes, &circle, transport));
        }
    }
    faults
}

fn fault<N: AsRef<[Node]>>(nodes: &[N], circle: &[&Stop], transport: Transport) -> Diagnostic {
    const WAITS_SHOWN: usize = 6;
    let node = |rank: Rank, at: usize| &nodes[rank.index()].as_ref()[at];
    let place = |rank: Rank, at: usize| Place { origin: node(rank, at).origin, item: Some((rank, at as u32)) };
    let message = match circle {
        [one] => format!("rank {} waits for itself", one.rank),
        [a, b] => format!("ranks {} and {} wait for each other", a.rank, b.rank),
        _ => format!("{} ranks wait for each other in a circle", circle.len()),
    };
    let mut fault = Diagnostic::new(Code::Deadlock, place(circle[0].rank, circle[0].at), message);
    for stop in circle.iter().take(WAITS_SHOWN) {
        let (here, there) = (name(node(stop.rank, stop.at)), name(node(stop.peer, stop.needs)));
        fault = fault
            .label(
                place(stop.rank, stop.at),
                format!("rank {} stops at {here}, waiting for {there} of rank {}", stop.rank, stop.peer),
            )
            .label(
                place(stop.peer, stop.needs),
                format!("{there} would run here, after that stop of rank {}", stop.peer),
            );
    }
    if circle.len() > WAITS_SHOWN {
        fault = fault.note(format!("and {} more waits close the circle", circle.len() - WAITS_SHOWN));
    }
    if transport == Transport::Rendezvous {
        fault
            .note("with `transport: rendezvous` a send ends when its message is received, whatever its size")
            .help("put the send and the receive that cross it into one group: `(0SEND_F1;0RECV_B0)GROUP`")
    } else {
        fault.help("send each message right after what produces it")
    }
}
