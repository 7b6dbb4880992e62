//! Lowering: adds communication, slots, receive buffers and the bookkeeping of a step.
//!
//! # Why bounded receive buffers hold nobody up
//!
//! Messages of an edge arrive in the sender's order, and a send whose message finds no free buffer
//! waits on its own stream while the sender computes on. When a rank waits for a message, the
//! messages before it on the edge that it has not yet consumed are fixed by the two program orders,
//! not by timing; the run at unit costs with unbounded buffers has held all of them and the awaited
//! one at once. So with as many buffers as that run's peak the awaited message always finds one, and
//! a plan deadlocks if and only if it does with unbounded buffers.
//!
//! # Why an overlap is one block
//!
//! Branches of an `overlap` may run at once, but both ends of a FIFO must name its messages in one order. So all that the
//! members need is waited for before the block and all that they make is sent after it, each in written order, as
//! the simulator has it: a block starts when everything is there, and its results are usable when it ends.
//!
//! # Why a blocking stream holds nobody up for ever
//!
//! On `rendezvous` each rank has one stream, on which a send and a receive wait for each other. Both
//! are then placed where the message comes in one global order: actions by their end in the run at unit
//! costs, each message right after its producer. Every rank's program is a part of that order, so the
//! first message in it that is not done has both its ends at the front, and goes on.

use std::borrow::Cow;
use std::collections::BTreeMap;

use crate::action::{Item, Kind};
use crate::ids::{Microbatch, Rank, Stage};
use crate::index::{ABSENT, Index};
use crate::origin::Origin;
use crate::plan::{Direction, Edge, NONE, Node, Op, Plan};
use crate::schedule::{Schedule, Transport};
use crate::sim::{self, Timeline};

/// Lowers a schedule that passed the checks up to communication. `timeline` is its run at unit costs.
pub fn lower(schedule: &Schedule, index: &Index, timeline: &Timeline) -> Plan {
    let mut edges = edges(schedule, index, timeline);
    let meetings = match schedule.transport {
        Transport::Edge | Transport::RankEdge => None,
        Transport::Rendezvous => Some(meetings(schedule, index, timeline, &mut edges)),
    };
    let mut slot_of = vec![ABSENT; schedule.stages as usize * schedule.microbatches as usize];
    let mut nodes = Vec::with_capacity(schedule.items.len() * 2);
    let mut starts = Vec::with_capacity(schedule.ranks as usize + 1);
    let mut peaks = Vec::with_capacity(schedule.ranks as usize);
    let mut receives = Receives::new(schedule, &edges);
    for rank in 0..schedule.ranks {
        starts.push(nodes.len() as u32);
        let live = sim::live(schedule, index, Rank(rank), &mut slot_of);
        peaks.push(live.peaks);
        RankLowering { schedule, edges: &edges, receives: &mut receives, rank: Rank(rank), nodes: &mut nodes }
            .lower(&live.slots, meetings.as_ref().map(|meetings| &meetings[rank as usize][..]));
    }
    starts.push(nodes.len() as u32);
    Plan { nodes: nodes.into(), starts: starts.into(), edges: edges.into(), peaks: Cow::Owned(peaks) }
}

/// All logical edges, with receive buffers.
fn edges(schedule: &Schedule, index: &Index, timeline: &Timeline) -> Vec<Edge> {
    let inner = schedule.stages.saturating_sub(1);
    let mut events = Vec::new();
    let mut edge = |direction, from: u32, to: u32| {
        let table = match direction {
            Direction::Forward => &index.forward,
            Direction::Backward => &index.input_grad,
        };
        Edge {
            direction,
            from: Stage(from),
            to: Stage(to),
            from_rank: schedule.placement[from as usize],
            to_rank: schedule.placement[to as usize],
            buffers: sim::unconsumed(schedule, timeline, table, Stage(from), Stage(to), &mut events),
        }
    };
    let mut edges: Vec<Edge> = (0..inner).map(|s| edge(Direction::Forward, s, s + 1)).collect();
    if !schedule.eval {
        edges.extend((0..inner).map(|s| edge(Direction::Backward, s + 1, s)));
    }
    edges
}

/// Index in [`Plan::edges`] of the edge that carries F's output of `from`, if it has a successor.
pub(crate) fn forward_edge(stages: u32, from: Stage) -> Option<u32> {
    (from.0 + 1 < stages).then_some(from.0)
}

/// Index in [`Plan::edges`] of the edge that carries dX of `from`, if it has a predecessor.
pub(crate) fn backward_edge(stages: u32, from: Stage) -> Option<u32> {
    (from.0 > 0).then(|| stages - 1 + from.0 - 1)
}

/// What is still to be received, in the order in which the senders send it, and where there is room for it.
struct Receives {
    /// Per edge, its channel: the edge itself, or on `rank_edge` the first edge between the same two ranks.
    channel: Vec<u32>,
    /// Per channel, edge and microbatch of its messages in sender order.
    sent: Vec<Vec<(u32, Microbatch)>>,
    /// Per channel, how many of them are posted.
    posted: Vec<usize>,
    /// Per edge, receive buffers that no post has taken.
    free: Vec<u32>,
}

impl Receives {
    fn new(schedule: &Schedule, edges: &[Edge]) -> Receives {
        let mut first = BTreeMap::new();
        let channel: Vec<u32> = (0u32..)
            .zip(edges)
            .map(|(at, edge)| match schedule.transport {
                Transport::RankEdge => *first.entry((edge.from_rank, edge.to_rank)).or_insert(at),
                Transport::Edge | Transport::Rendezvous => at,
            })
            .collect();
        let mut sent: Vec<Vec<(u32, Microbatch)>> = vec![Vec::new(); edges.len()];
        for item in schedule.items.iter() {
            if let Some(edge) = output_edge(schedule, item)
                && edges[edge as usize].from_rank != edges[edge as usize].to_rank
            {
                sent[channel[edge as usize] as usize].push((edge, item.microbatch));
            }
        }
        let free = edges.iter().map(|edge| edge.buffers).collect();
        Receives { channel, sent, posted: vec![0; edges.len()], free }
    }

    /// The next message of the channel of an edge, if its own edge has room for it.
    fn next(&mut self, edge: u32) -> Option<(u32, Microbatch)> {
        let channel = self.channel[edge as usize] as usize;
        let (edge, microbatch) = *self.sent[channel].get(self.posted[channel])?;
        let free = &mut self.free[edge as usize];
        *free = free.checked_sub(1)?;
        self.posted[channel] += 1;
        Some((edge, microbatch))
    }
}

/// The edge that takes what an item produces.
fn output_edge(schedule: &Schedule, item: &Item) -> Option<u32> {
    match item.kind {
        Kind::Forward => forward_edge(schedule.stages, item.stage),
        Kind::InputGrad | Kind::FullBackward => backward_edge(schedule.stages, item.stage),
        _ => None,
    }
}

/// The edge that brings what an item consumes.
fn input_edge(schedule: &Schedule, item: &Item) -> Option<u32> {
    match item.kind {
        Kind::Forward if item.stage.0 > 0 => forward_edge(schedule.stages, Stage(item.stage.0 - 1)),
        Kind::InputGrad | Kind::FullBackward if item.stage.0 + 1 < schedule.stages => {
            backward_edge(schedule.stages, Stage(item.stage.0 + 1))
        }
        _ => None,
    }
}

/// Sends and receives of one rank on `rendezvous`, each with the index of the item before which it
/// stands, in order.
type Meetings = Vec<(usize, Node)>;

/// Places both ends of every message in the global order, per rank, and counts receive buffers: from the
/// receive to the end of the consumer.
fn meetings(schedule: &Schedule, index: &Index, timeline: &Timeline, edges: &mut [Edge]) -> Vec<Meetings> {
    // Messages by the end of their producer, of lower ranks first, as they stand in the program.
    let mut order: Vec<(i64, u32, usize, u32)> = Vec::new();
    for rank in 0..schedule.ranks {
        let start = schedule.starts[rank as usize] as usize;
        for (at, item) in schedule.rank(Rank(rank)).iter().enumerate() {
            if let Some(edge) = output_edge(schedule, item)
                && edges[edge as usize].to_rank.0 != rank
            {
                order.push((timeline.end[start + at], rank, at, edge));
            }
        }
    }
    order.sort_unstable();
    let block_ends: Vec<Vec<usize>> = (0..schedule.ranks).map(|rank| block_ends(schedule.rank(Rank(rank)))).collect();
    let mut meetings: Vec<Meetings> = vec![Vec::new(); schedule.ranks as usize];
    let mut held: Vec<Vec<(usize, i8)>> = vec![Vec::new(); edges.len()];
    for (end, rank, at, edge) in order {
        let items = schedule.rank(Rank(rank));
        let item = &items[at];
        let target = &edges[edge as usize];
        let (send, post, table) = match target.direction {
            Direction::Forward => (Op::SendForward, Op::PostForward, &index.forward),
            Direction::Backward => (Op::SendBackward, Op::PostBackward, &index.input_grad),
        };
        let node = |op, stage| Node { op, stage, microbatch: item.microbatch, slot: edge, origin: item.origin };
        let sent = block_ends[rank as usize][at] + 1;
        meetings[rank as usize].push((sent, node(send, target.from)));
        let to = target.to_rank;
        let (from, until) = (schedule.starts[to.index()] as usize, schedule.starts[to.index() + 1] as usize);
        let before = timeline.end[from..until].partition_point(|other| (*other, to.0) < (end, rank));
        meetings[to.index()].push((before, node(post, target.to)));
        let used = table[index.cell(target.to, item.microbatch)] as usize - from;
        held[edge as usize].push((2 * before, 1));
        held[edge as usize].push((2 * block_ends[to.index()][used] + 1, -1));
    }
    for (edge, mut held) in edges.iter_mut().zip(held) {
        held.sort_unstable();
        let (mut now, mut peak) = (0i32, 0i32);
        for (_, step) in held {
            now += i32::from(step);
            peak = peak.max(now);
        }
        if edge.from_rank != edge.to_rank {
            edge.buffers = peak as u32;
        }
    }
    meetings
}

/// For each item, the end of the overlap in which it stands, or the item itself.
fn block_ends(items: &[Item]) -> Vec<usize> {
    let mut ends: Vec<usize> = (0..items.len()).collect();
    let mut end = None;
    for (at, item) in items.iter().enumerate().rev() {
        if item.kind == Kind::OverlapEnd {
            end = Some(at);
        }
        ends[at] = end.unwrap_or(at);
        if item.kind == Kind::OverlapBegin {
            end = None;
        }
    }
    ends
}

struct RankLowering<'a> {
    schedule: &'a Schedule,
    edges: &'a [Edge],
    receives: &'a mut Receives,
    rank: Rank,
    nodes: &'a mut Vec<Node>,
}

impl RankLowering<'_> {
    /// `meetings`: sends and receives as the global order places them; `None`: each send right after what
    /// produces it, and a receive as soon as a buffer is free.
    fn lower(&mut self, slots: &[u32], meetings: Option<&[(usize, Node)]>) {
        let items = self.schedule.rank(self.rank);
        let stages: Vec<Stage> = self.schedule.stages_of(self.rank).collect();
        let first_stage = stages.first().map_or(0, |s| s.index());
        // Per stage of this rank (dense from its lowest stage): gradient actions left, refreshed.
        let span = stages.last().map_or(0, |s| s.index() - first_stage + 1);
        let mut left = vec![0u32; span];
        let mut refreshed = vec![false; span];
        let (mut reduce_written, mut commit_written) = (false, false);
        let block_ends = block_ends(items);
        for item in items {
            match item.kind {
                kind if has_gradient(kind) => left[item.stage.index() - first_stage] += 1,
                Kind::Refresh => refreshed[item.stage.index() - first_stage] = true,
                Kind::Reduce => reduce_written = true,
                Kind::Commit => commit_written = true,
                _ => {}
            }
        }

        if meetings.is_none() {
            for edge in self.incoming() {
                self.post_free(edge);
            }
        }
        let mut met = meetings.unwrap_or_default();
        let mut at = 0;
        while at < items.len() {
            let block = at..block_ends[at] + 1;
            let now = met.iter().take_while(|(before, _)| *before <= at).count();
            self.nodes.extend(met[..now].iter().map(|(_, node)| *node));
            met = &met[now..];
            let members = &items[block.clone()];
            for forward in members.iter().filter(|item| item.kind == Kind::Forward && !self.schedule.eval) {
                if !std::mem::replace(&mut refreshed[forward.stage.index() - first_stage], true) {
                    self.push(Op::Refresh, forward.stage, NONE);
                }
            }
            for item in members {
                if let Some(edge) = self.crossing(input_edge(self.schedule, item)) {
                    self.push_for([Op::WaitForward, Op::WaitBackward], item, edge);
                }
            }
            for (item, slot) in members.iter().zip(&slots[block.clone()]) {
                if item.kind == Kind::Commit {
                    self.push(Op::Agree, Stage(0), NONE);
                }
                let (op, slot) = (compute_op(item.kind), *slot);
                self.nodes.push(Node { op, stage: item.stage, microbatch: item.microbatch, slot, origin: item.origin });
            }
            if meetings.is_none() {
                self.messages_after(members);
            }
            for item in members.iter().filter(|item| has_gradient(item.kind)) {
                let left = &mut left[item.stage.index() - first_stage];
                *left -= 1;
                if *left == 0 && !reduce_written {
                    self.push(Op::Reduce, item.stage, NONE);
                }
            }
            at = block.end;
        }
        self.nodes.extend(met.iter().map(|(_, node)| *node));
        if !self.schedule.eval && !commit_written {
            self.push(Op::Agree, Stage(0), NONE);
            self.push(Op::Commit, Stage(0), NONE);
        }
    }

    /// The edges on which other ranks send to this one.
    fn incoming(&self) -> Vec<u32> {
        let mut edges = Vec::new();
        for stage in self.schedule.stages_of(self.rank) {
            let forward = stage.0.checked_sub(1).and_then(|from| forward_edge(self.schedule.stages, Stage(from)));
            let backward = (!self.schedule.eval && stage.0 + 1 < self.schedule.stages)
                .then(|| backward_edge(self.schedule.stages, Stage(stage.0 + 1)))
                .flatten();
            edges.extend([forward, backward].into_iter().filter_map(|edge| self.crossing(edge)));
        }
        edges.sort_unstable();
        edges
    }

    /// Sends what a block made, then posts receives into the buffers that it has freed.
    fn messages_after(&mut self, members: &[Item]) {
        for item in members {
            if let Some(edge) = self.crossing(output_edge(self.schedule, item)) {
                self.push_for([Op::SendForward, Op::SendBackward], item, edge);
            }
        }
        for item in members {
            if let Some(edge) = self.crossing(input_edge(self.schedule, item)) {
                self.receives.free[edge as usize] += 1;
                self.post_free(edge);
            }
        }
    }

    /// Posts the next receives of an edge's channel, in sender order, as far as there is room.
    fn post_free(&mut self, edge: u32) {
        while let Some((edge, microbatch)) = self.receives.next(edge) {
            let target = &self.edges[edge as usize];
            let op = match target.direction {
                Direction::Forward => Op::PostForward,
                Direction::Backward => Op::PostBackward,
            };
            self.nodes.push(Node { op, stage: target.to, microbatch, slot: edge, origin: Origin::NONE });
        }
    }

    fn crossing(&self, edge: Option<u32>) -> Option<u32> {
        edge.filter(|edge| self.edges[*edge as usize].from_rank != self.edges[*edge as usize].to_rank)
    }

    fn push(&mut self, op: Op, stage: Stage, slot: u32) {
        self.nodes.push(Node { op, stage, microbatch: Microbatch(0), slot, origin: Origin::NONE });
    }

    /// A node at one end of an edge; `ops`: of a forward and of a backward edge.
    fn push_for(&mut self, ops: [Op; 2], item: &Item, slot: u32) {
        let op = ops[usize::from(self.edges[slot as usize].direction == Direction::Backward)];
        self.nodes.push(Node { op, stage: item.stage, microbatch: item.microbatch, slot, origin: item.origin });
    }
}

/// Whether an action contributes to the gradients of its stage.
const fn has_gradient(kind: Kind) -> bool {
    matches!(kind, Kind::InputGrad | Kind::FullBackward | Kind::WeightGrad | Kind::WeightGradJoin)
}

const fn compute_op(kind: Kind) -> Op {
    match kind {
        Kind::Forward => Op::Forward,
        Kind::InputGrad => Op::InputGrad,
        Kind::WeightGrad => Op::WeightGrad,
        Kind::FullBackward => Op::FullBackward,
        Kind::Recompute => Op::Recompute,
        Kind::WeightGradJoin => Op::WeightGradJoin,
        Kind::Refresh => Op::Refresh,
        Kind::Reduce => Op::Reduce,
        Kind::Commit => Op::Commit,
        Kind::OverlapBegin => Op::OverlapBegin,
        Kind::OverlapBranch => Op::OverlapBranch,
        Kind::OverlapEnd => Op::OverlapEnd,
    }
}
