//! Brute force over lowered programs: what each node does with a message, by its name alone, and all interleavings.
#![allow(dead_code, missing_docs)]

use std::collections::{HashMap, HashSet};

use qeffect_core::ids::Rank;
use qeffect_core::plan::{Node, Op, Plan};
use qeffect_core::schedule::Transport::{self, Edge, Rendezvous};

/// A message as its sender names it: forward or not, producing stage, microbatch.
pub type Message = (bool, u32, u32);

/// What a node does with a message, worked out from its name alone.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Act {
    Make(Message),
    Send(Message),
    Receive(Message),
    Wait(Message),
    Use(Message),
}

pub fn acts(node: &Node, stages: u32) -> Vec<Act> {
    let (s, m) = (node.stage.0, node.microbatch.0);
    match node.op {
        Op::Forward => {
            let mut acts = Vec::new();
            if s > 0 {
                acts.push(Act::Use((true, s - 1, m)));
            }
            acts.push(Act::Make((true, s, m)));
            acts
        }
        Op::InputGrad | Op::FullBackward => {
            let mut acts = Vec::new();
            if s + 1 < stages {
                acts.push(Act::Use((false, s + 1, m)));
            }
            acts.push(Act::Make((false, s, m)));
            acts
        }
        Op::SendForward => vec![Act::Send((true, s, m))],
        Op::SendBackward => vec![Act::Send((false, s, m))],
        Op::PostForward => vec![Act::Receive((true, s - 1, m))],
        Op::PostBackward => vec![Act::Receive((false, s + 1, m))],
        Op::WaitForward => vec![Act::Wait((true, s - 1, m))],
        Op::WaitBackward => vec![Act::Wait((false, s + 1, m))],
        _ => Vec::new(),
    }
}

/// Ranks of the two ends of a message.
pub fn ends((forward, from, _): Message, placement: &[Rank]) -> (u32, u32) {
    let to = if forward { from + 1 } else { from - 1 };
    (placement[from as usize].0, placement[to as usize].0)
}

/// The channel of a message.
fn channel(message: Message, placement: &[Rank], transport: Transport) -> (u32, u32, bool, u32) {
    let (from, to) = ends(message, placement);
    if transport == Edge { (from, to, message.0, message.1) } else { (from, to, true, 0) }
}

/// What brute force says of a program.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Truth {
    Finishes,
    /// A message is lacking or doubled.
    Unpaired,
    /// A message is sent before it exists or used before it is received.
    Early,
    /// A receive takes another message than it names.
    Mispairs,
    /// Some interleaving comes to a stand.
    Stops,
}

/// Units in which a rank goes: single nodes, and groups of communication.
fn units(program: &[Node]) -> Vec<Vec<Node>> {
    let mut units = Vec::new();
    let mut group: Option<Vec<Node>> = None;
    for node in program {
        match (node.op, &mut group) {
            (Op::GroupBegin, _) => group = Some(Vec::new()),
            (Op::GroupEnd, _) => units.extend(group.take()),
            (_, Some(members)) => members.push(*node),
            _ => units.push(vec![*node]),
        }
    }
    units
}

pub fn brute_force(programs: &[Vec<Node>], placement: &[Rank], transport: Transport) -> Truth {
    let stages = placement.len() as u32;
    let all: Vec<Act> = programs.iter().flatten().flat_map(|node| acts(node, stages)).collect();
    let count = |act: Act| all.iter().filter(|other| **other == act).count();
    for act in &all {
        let crossing = |m: Message| ends(m, placement).0 != ends(m, placement).1;
        let complete = match *act {
            Act::Use(m) if crossing(m) => count(Act::Send(m)) == 1 && count(Act::Receive(m)) == 1,
            Act::Send(m) | Act::Receive(m) => crossing(m) && count(Act::Use(m)) == 1 && count(*act) == 1,
            Act::Wait(m) => crossing(m) && count(*act) == 1,
            _ => true,
        };
        if !complete {
            return Truth::Unpaired;
        }
    }
    for program in programs {
        // Branches of an overlap may run at once: what stands in one has no place among the messages of a channel.
        let mut inside = false;
        for node in program {
            inside = node.op == Op::OverlapBegin || (inside && node.op != Op::OverlapEnd);
            if inside && acts(node, stages).iter().any(|act| !matches!(act, Act::Make(_) | Act::Use(_))) {
                return Truth::Early;
            }
        }
        let order: Vec<Act> = program.iter().flat_map(|node| acts(node, stages)).collect();
        let before = |a: Act, b: Act| match [a, b].map(|act| order.iter().position(|other| *other == act)) {
            [Some(a), Some(b)] => a < b,
            _ => true,
        };
        let fine = order.iter().all(|act| match *act {
            Act::Send(m) => before(Act::Make(m), *act),
            Act::Receive(m) => before(*act, Act::Use(m)) && before(*act, Act::Wait(m)),
            Act::Wait(m) => before(*act, Act::Use(m)),
            _ => true,
        });
        if !fine {
            return Truth::Early;
        }
    }
    let units: Vec<Vec<Vec<Node>>> = programs.iter().map(|program| units(program)).collect();
    if transport == Rendezvous { meet(&units, placement) } else { flow(&units, placement, transport) }
}

/// Sends that never wait: all interleavings over how far each rank is.
fn flow(units: &[Vec<Vec<Node>>], placement: &[Rank], transport: Transport) -> Truth {
    let stages = placement.len() as u32;
    let mut seen = HashSet::new();
    let mut stack = vec![vec![0usize; units.len()]];
    while let Some(at) = stack.pop() {
        if !seen.insert(at.clone()) {
            continue;
        }
        // The n-th message of a channel lands in its n-th receive.
        let mut sent: HashMap<_, Vec<Message>> = HashMap::new();
        let mut received: HashMap<_, Vec<Message>> = HashMap::new();
        for (rank, units) in units.iter().enumerate() {
            for act in units[..at[rank]].iter().flatten().flat_map(|node| acts(node, stages)) {
                match act {
                    Act::Send(m) => sent.entry(channel(m, placement, transport)).or_default().push(m),
                    Act::Receive(m) => received.entry(channel(m, placement, transport)).or_default().push(m),
                    _ => {}
                }
            }
        }
        let mut here: HashSet<Message> = HashSet::new();
        for (channel, messages) in &sent {
            for (message, place) in messages.iter().zip(received.get(channel).into_iter().flatten()) {
                if message != place {
                    return Truth::Mispairs;
                }
                here.insert(*message);
            }
        }
        let mut moved = false;
        for rank in 0..units.len() {
            let Some(unit) = units[rank].get(at[rank]) else { continue };
            let free = unit.iter().flat_map(|node| acts(node, stages)).all(|act| match act {
                Act::Wait(m) | Act::Use(m) => ends(m, placement).0 == ends(m, placement).1 || here.contains(&m),
                _ => true,
            });
            if free {
                moved = true;
                let mut next = at.clone();
                next[rank] += 1;
                stack.push(next);
            }
        }
        if !moved && (0..units.len()).any(|rank| at[rank] < units[rank].len()) {
            return Truth::Stops;
        }
    }
    Truth::Finishes
}

/// Sends and receives that wait for each other: all interleavings over how far each rank is and which
/// members of its group are done. A receive takes the first send of its pair of ranks that is there.
fn meet(units: &[Vec<Vec<Node>>], placement: &[Rank]) -> Truth {
    let stages = placement.len() as u32;
    let mut seen = HashSet::new();
    let mut stack = vec![vec![(0usize, 0u32); units.len()]];
    while let Some(state) = stack.pop() {
        if !seen.insert(state.clone()) {
            continue;
        }
        let mut moved = false;
        // The members of the unit of a rank that are not done, as (member, act).
        let open = |rank: usize| -> Vec<(usize, Act)> {
            let (at, done) = state[rank];
            let unit = units[rank].get(at).map(Vec::as_slice).unwrap_or_default();
            let members = unit.iter().enumerate().filter(|(n, _)| done & (1 << n) == 0);
            members.flat_map(|(n, node)| acts(node, stages).into_iter().map(move |act| (n, act))).collect()
        };
        for rank in 0..units.len() {
            if units[rank].get(state[rank].0).is_none() {
                continue;
            }
            let open_here = open(rank);
            let blocks = |act: &Act| matches!(act, Act::Send(_) | Act::Receive(_));
            if !open_here.iter().any(|(_, act)| blocks(act)) {
                moved = true;
                let mut next = state.clone();
                next[rank] = (state[rank].0 + 1, 0);
                stack.push(next);
            }
            for peer in 0..units.len() {
                let send = open_here.iter().find_map(|(n, act)| match act {
                    Act::Send(m) if ends(*m, placement).1 as usize == peer => Some((*n, *m)),
                    _ => None,
                });
                let receive = open(peer).into_iter().find_map(|(n, act)| match act {
                    Act::Receive(m) if ends(m, placement).0 as usize == rank => Some((n, m)),
                    _ => None,
                });
                if let (Some((sender, sent)), Some((receiver, taken))) = (send, receive) {
                    if sent != taken {
                        return Truth::Mispairs;
                    }
                    moved = true;
                    let mut next = state.clone();
                    next[rank].1 |= 1 << sender;
                    next[peer].1 |= 1 << receiver;
                    stack.push(next);
                }
            }
        }
        if !moved && (0..units.len()).any(|rank| state[rank].0 < units[rank].len()) {
            return Truth::Stops;
        }
    }
    Truth::Finishes
}

pub fn programs(plan: &Plan, ranks: u32) -> Vec<Vec<Node>> {
    (0..ranks).map(|rank| plan.rank(Rank(rank)).to_vec()).collect()
}
