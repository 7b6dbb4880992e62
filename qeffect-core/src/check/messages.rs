//! QE04 for plans whose communication somebody wrote: imported `compute_comms` programs.
//!
//! What [`crate::lower`] adds is right by construction; what a file says is judged here. Legal:
//! every boundary between ranks has one send (after its producer) and one post (before its consumer)
//! per microbatch, and both ends of an edge name the microbatches in the same order. Illegal: two
//! swapped receives, which would train on swapped microbatches.

use std::collections::{BTreeMap, HashMap};

use super::progress;
use crate::code::Code;
use crate::diag::{Diagnostic, Place};
use crate::ids::{Rank, Stage};
use crate::lower::{backward_edge, forward_edge};
use crate::plan::{Node, Op};
use crate::schedule::Transport;
use crate::sim::CostModel;

/// Judges the sends, posts and waits of `nodes` (per rank, in program order) on transport `edge`.
///
/// `placement` gives the rank of each stage. Compute nodes are taken as legal: check the schedule
/// that they form first. A consumer without a `Wait` waits right before it runs.
pub fn check(nodes: &[Vec<Node>], placement: &[Rank]) -> Vec<Diagnostic> {
    check_on(nodes, placement, Transport::Edge)
}

/// As [`check`], on a declared transport.
pub fn check_on(nodes: &[Vec<Node>], placement: &[Rank], transport: Transport) -> Vec<Diagnostic> {
    let mut table = Table::default();
    let (mut faults, mut inside) = (Vec::new(), Vec::new());
    for (rank, program) in nodes.iter().enumerate() {
        let mut overlap = None;
        for (index, node) in program.iter().enumerate() {
            let at = At { rank: Rank(rank as u32), index, node: *node };
            match node.op {
                Op::OverlapBegin => overlap = Some(at),
                Op::OverlapEnd => overlap = None,
                _ => inside.extend(overlap.and_then(|begin| at.inside(&begin))),
            }
            table.enter(at, placement, &mut faults);
        }
    }
    if faults.is_empty() {
        table.pair(placement, &mut faults);
        faults.append(&mut inside);
    }
    if faults.is_empty() {
        table.orders(placement, transport, &mut faults);
    }
    if faults.is_empty()
        && let Err(stops) = progress::run(nodes, placement, transport, &CostModel::unit())
    {
        faults = progress::deadlocks(nodes, &stops, transport);
    }
    faults
}

/// A message: edge and microbatch.
type Key = (u32, u32);

/// Where a node stands.
#[derive(Clone, Copy)]
struct At {
    rank: Rank,
    index: usize,
    node: Node,
}

impl At {
    fn place(&self) -> Place {
        Place { origin: self.node.origin, item: Some((self.rank, self.index as u32)) }
    }

    /// The fault of a message node in an overlap: its branches may run at once, the messages of a channel may not.
    fn inside(&self, begin: &At) -> Option<Diagnostic> {
        let (side, verb) = match self.node.op {
            Op::SendForward | Op::SendBackward => ("after", "is sent"),
            Op::PostForward | Op::PostBackward => ("before", "is received"),
            Op::WaitForward | Op::WaitBackward => ("before", "is awaited"),
            _ => return None,
        };
        let fault = format!("{} {verb} inside an overlap, whose branches may run at once", name(&self.node));
        Some(
            Diagnostic::new(Code::MessageEarly, self.place(), fault)
                .label(begin.place(), "the overlap begins here")
                .note("an overlap starts when all that it needs is there, and its results are usable when it ends")
                .help(format!("move it {side} the overlap")),
        )
    }
}

#[derive(Default)]
struct Table {
    produced: HashMap<Key, At>,
    consumed: HashMap<Key, At>,
    sent: HashMap<Key, At>,
    posted: HashMap<Key, At>,
    waited: HashMap<Key, At>,
    /// Messages in the order in which sends and posts name them, per rank.
    send_order: BTreeMap<Rank, Vec<Key>>,
    post_order: BTreeMap<Rank, Vec<Key>>,
}

/// The text name of a communication node, as in PyTorch's format.
pub(super) fn name(node: &Node) -> String {
    let word = match node.op {
        Op::SendForward => "SEND_F",
        Op::PostForward => "RECV_F",
        Op::WaitForward => "WAIT_F",
        Op::SendBackward => "SEND_B",
        Op::PostBackward => "RECV_B",
        Op::WaitBackward => "WAIT_B",
        Op::Forward => "F",
        Op::InputGrad => "I",
        Op::FullBackward => "B",
        _ => "?",
    };
    format!("{}{word}{}", node.stage, node.microbatch)
}

impl Table {
    fn enter(&mut self, at: At, placement: &[Rank], faults: &mut Vec<Diagnostic>) {
        let stages = placement.len() as u32;
        let (rank, node) = (at.rank, &at.node);
        let into_forward = node.stage.0.checked_sub(1).and_then(|from| forward_edge(stages, Stage(from)));
        let into_backward =
            (node.stage.0 + 1 < stages).then(|| backward_edge(stages, Stage(node.stage.0 + 1))).flatten();
        let out_forward = forward_edge(stages, node.stage);
        let out_backward = backward_edge(stages, node.stage);
        let mut key = |edge: Option<u32>, what: &str| -> Option<Key> {
            let fault = if placement.get(node.stage.index()) != Some(&rank) {
                Some(format!("{} stands on rank {rank}, which does not hold stage {}", name(node), node.stage))
            } else {
                match edge {
                    None => {
                        Some(format!("{} has no {what}: stage {} is the end of the pipeline", name(node), node.stage))
                    }
                    Some(edge) => {
                        let [from, to] = ends(edge, stages);
                        (placement[from.index()] == placement[to.index()]).then(|| {
                            format!(
                                "{} crosses no boundary: stages {from} and {to} both live on rank {rank}",
                                name(node)
                            )
                        })
                    }
                }
            };
            if let Some(message) = fault {
                faults.push(Diagnostic::new(Code::MessageUnknown, at.place(), message));
                return None;
            }
            edge.map(|edge| (edge, node.microbatch.0))
        };
        let doubled = |table: &mut HashMap<Key, At>, key: Key, verb: &str, faults: &mut Vec<Diagnostic>| {
            if let Some(first) = table.get(&key) {
                faults.push(
                    Diagnostic::new(Code::MessageDoubled, at.place(), format!("{} {verb} a second time", name(node)))
                        .label(first.place(), "the first time is here")
                        .help("remove one of them"),
                );
                false
            } else {
                table.insert(key, at);
                true
            }
        };
        match node.op {
            Op::SendForward | Op::SendBackward => {
                let edge = if node.op == Op::SendForward { out_forward } else { out_backward };
                if let Some(key) = key(edge, "receiver")
                    && doubled(&mut self.sent, key, "is sent", faults)
                {
                    self.send_order.entry(rank).or_default().push(key);
                }
            }
            Op::PostForward | Op::PostBackward => {
                let edge = if node.op == Op::PostForward { into_forward } else { into_backward };
                if let Some(key) = key(edge, "sender")
                    && doubled(&mut self.posted, key, "is received", faults)
                {
                    self.post_order.entry(rank).or_default().push(key);
                }
            }
            Op::WaitForward | Op::WaitBackward => {
                let edge = if node.op == Op::WaitForward { into_forward } else { into_backward };
                if let Some(key) = key(edge, "sender") {
                    doubled(&mut self.waited, key, "is awaited", faults);
                }
            }
            Op::Forward => {
                self.compute(out_forward, into_forward, at);
            }
            Op::InputGrad | Op::FullBackward => {
                self.compute(out_backward, into_backward, at);
            }
            _ => {}
        }
    }

    fn compute(&mut self, out: Option<u32>, into: Option<u32>, at: At) {
        let microbatch = at.node.microbatch.0;
        if let Some(edge) = out {
            self.produced.insert((edge, microbatch), at);
        }
        if let Some(edge) = into {
            self.consumed.insert((edge, microbatch), at);
        }
    }

    /// Every message has both ends, each in its place.
    fn pair(&self, placement: &[Rank], faults: &mut Vec<Diagnostic>) {
        let stages = placement.len() as u32;
        for (key, producer) in &self.produced {
            let [from, to] = ends(key.0, stages);
            if placement[from.index()] == placement[to.index()] {
                continue;
            }
            let Some(consumer) = self.consumed.get(key) else { continue };
            match (self.sent.get(key), self.posted.get(key)) {
                (None, None) => faults.push(
                    Diagnostic::new(
                        Code::MessageMissing,
                        consumer.place(),
                        format!("{} consumes what is neither sent nor received", name(&consumer.node)),
                    )
                    .label(producer.place(), format!("{} produces it", name(&producer.node)))
                    .help(format!("send it from rank {} and receive it on rank {}", producer.rank, consumer.rank)),
                ),
                (Some(send), None) => faults.push(
                    Diagnostic::new(
                        Code::MessageMissing,
                        send.place(),
                        format!("{} is never received", name(&send.node)),
                    )
                    .label(consumer.place(), format!("{} consumes it", name(&consumer.node))),
                ),
                (None, Some(post)) => faults.push(
                    Diagnostic::new(Code::MessageMissing, post.place(), format!("{} is never sent", name(&post.node)))
                        .label(producer.place(), format!("{} produces it", name(&producer.node))),
                ),
                (Some(send), Some(post)) => self.placed(*key, producer, send, post, consumer, faults),
            }
        }
        for (table, verb) in [(&self.sent, "sent"), (&self.posted, "received"), (&self.waited, "awaited")] {
            for at in table.iter().filter(|(key, _)| !self.produced.contains_key(key)).map(|(_, at)| at) {
                faults.push(Diagnostic::new(
                    Code::MessageUnknown,
                    at.place(),
                    format!("{} is {verb}, but nothing produces it", name(&at.node)),
                ));
            }
        }
    }

    fn placed(&self, key: Key, producer: &At, send: &At, post: &At, consumer: &At, faults: &mut Vec<Diagnostic>) {
        let mut early = |at: &At, what: &str, other: &At| {
            faults.push(
                Diagnostic::new(
                    Code::MessageEarly,
                    at.place(),
                    format!("{} {what} {}", name(&at.node), name(&other.node)),
                )
                .label(other.place(), format!("{} runs here", name(&other.node)))
                .help("swap the two"),
            );
        };
        if send.index < producer.index {
            early(send, "is sent before it is produced by", producer);
        }
        if post.index > consumer.index {
            early(post, "is received after its consumer", consumer);
        }
        if let Some(wait) = self.waited.get(&key) {
            if wait.index > consumer.index {
                early(wait, "is awaited after its consumer", consumer);
            } else if wait.index < post.index {
                early(wait, "is awaited before it is received by", post);
            }
        }
    }

    /// Both ends of every channel name the messages in the same order. A channel is an edge, or what one
    /// rank sends to another.
    fn orders(&self, placement: &[Rank], transport: Transport, faults: &mut Vec<Diagnostic>) {
        let stages = placement.len() as u32;
        let channel = |key: &Key| match transport {
            Transport::Edge => [key.0, 0],
            Transport::RankEdge | Transport::Rendezvous => ends(key.0, stages).map(|stage| placement[stage.index()].0),
        };
        let mut channels: BTreeMap<[u32; 2], [Vec<Key>; 2]> = BTreeMap::new();
        for (end, order) in [&self.send_order, &self.post_order].into_iter().enumerate() {
            for key in order.values().flatten() {
                channels.entry(channel(key)).or_default()[end].push(*key);
            }
        }
        for [sends, posts] in channels.values() {
            if let Some((sent, posted)) = sends.iter().zip(posts).find(|(a, b)| a != b) {
                let (send, post) = (&self.sent[sent], &self.posted[posted]);
                faults.push(
                    Diagnostic::new(
                        Code::FifoOrder,
                        post.place(),
                        format!(
                            "{} would take {}: the ends order this channel differently",
                            name(&post.node),
                            name(&send.node)
                        ),
                    )
                    .role("takes the next message of the channel")
                    .label(send.place(), format!("the next message is {}", name(&send.node)))
                    .help("receive in the order in which the other end sends"),
                );
            }
        }
    }
}

/// Sending and receiving stage of an edge.
pub(super) fn ends(edge: u32, stages: u32) -> [Stage; 2] {
    let inner = stages - 1;
    if edge < inner { [Stage(edge), Stage(edge + 1)] } else { [Stage(edge - inner + 1), Stage(edge - inner)] }
}
