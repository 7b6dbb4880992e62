//! Communication on every declared transport against brute force: all interleavings of small lowered
//! programs, as they are lowered and with their sends and receives moved, dropped, doubled and grouped.
#![allow(missing_docs)]

mod common;

use std::collections::{BTreeMap, HashMap, HashSet};

use common::{Rng, legal, mutate, oracle};
use qeffect_core::check::{Options, check, messages, progress};
use qeffect_core::code::Code;
use qeffect_core::ids::{Rank, Stage};
use qeffect_core::plan::{Direction, Node, Op, Plan};
use qeffect_core::schedule::Transport::{self, Edge, RankEdge, Rendezvous};
use qeffect_core::sim::{self, CostModel};
use qeffect_core::text::{read_plan, write_plan};

/// A message as its sender names it: forward or not, producing stage, microbatch.
type Message = (bool, u32, u32);

/// What a node does with a message, worked out from its name alone.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Act {
    Make(Message),
    Send(Message),
    Receive(Message),
    Wait(Message),
    Use(Message),
}

fn acts(node: &Node, stages: u32) -> Vec<Act> {
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
fn ends((forward, from, _): Message, placement: &[Rank]) -> (u32, u32) {
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
enum Truth {
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

fn brute_force(programs: &[Vec<Node>], placement: &[Rank], transport: Transport) -> Truth {
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

fn programs(plan: &Plan, ranks: u32) -> Vec<Vec<Node>> {
    (0..ranks).map(|rank| plan.rank(Rank(rank)).to_vec()).collect()
}

fn is_message(node: &Node) -> bool {
    matches!(node.op, Op::SendForward | Op::SendBackward | Op::PostForward | Op::PostBackward)
}

/// One change to the communication of a program.
fn disturb(rng: &mut Rng, programs: &mut [Vec<Node>]) {
    let rank = rng.below(programs.len());
    let program = &mut programs[rank];
    let messages: Vec<usize> = (0..program.len()).filter(|at| is_message(&program[*at])).collect();
    if messages.is_empty() {
        return;
    }
    let at = messages[rng.below(messages.len())];
    match rng.below(8) {
        0 => {
            program.remove(at);
        }
        1 => {
            let to = rng.below(program.len() + 1);
            program.insert(to, program[at]);
        }
        2 | 3 => {
            let other = messages[rng.below(messages.len())];
            program.swap(at, other);
        }
        4 | 5 => {
            let node = program.remove(at);
            let to = (at + rng.below(5)).saturating_sub(2).min(program.len());
            program.insert(to, node);
        }
        _ => {
            // A run of sends and receives becomes a group.
            let run = program[at..].iter().take_while(|node| is_message(node)).count();
            let grouped = program[..at].iter().rev().find(|n| matches!(n.op, Op::GroupBegin | Op::GroupEnd));
            if grouped.is_none_or(|node| node.op == Op::GroupEnd) {
                program.insert(at + 1 + rng.below(run), Node::new(Op::GroupEnd, 0, 0, u32::MAX, 0));
                program.insert(at, Node::new(Op::GroupBegin, 0, 0, u32::MAX, 0));
            }
        }
    }
}

/// Whether groups hold sends and receives only, as the reader of text requires.
fn well_grouped(program: &[Node]) -> bool {
    let mut inside = false;
    program.iter().all(|node| match node.op {
        Op::GroupBegin => !std::mem::replace(&mut inside, true),
        Op::GroupEnd => std::mem::replace(&mut inside, false),
        _ => !inside || is_message(node),
    }) && !inside
}

fn small(rng: &mut Rng) -> qeffect_core::schedule::Schedule {
    let (ranks, virtual_stages) = [(2, 1), (2, 2), (3, 1)][rng.below(3)];
    let microbatches = 1 + rng.below(2);
    legal(rng, ranks, virtual_stages, microbatches)
}

#[test]
fn written_communication_is_judged_as_brute_force_judges_it() {
    let mut counts: BTreeMap<(String, Truth), usize> = BTreeMap::new();
    for seed in 0..6000 {
        let mut rng = Rng(seed ^ 0x7EA1);
        let transport = [Edge, RankEdge, Rendezvous][rng.below(3)];
        let mut schedule = small(&mut rng);
        schedule.transport = if rng.below(2) == 0 { Rendezvous } else { Edge };
        let Ok(checked) = check(schedule, &Options::AT_START) else { continue };
        let placement = checked.schedule.placement.to_vec();
        let mut programs = programs(&checked.plan, checked.schedule.ranks);
        for _ in 0..rng.below(3) {
            disturb(&mut rng, &mut programs);
        }
        if !programs.iter().all(|program| well_grouped(program)) {
            continue;
        }
        let truth = brute_force(&programs, &placement, transport);
        let faults = messages::check_on(&programs, &placement, transport);
        let codes: Vec<Code> = faults.iter().map(|fault| fault.code).collect();
        let fits = match truth {
            Truth::Finishes => codes.is_empty(),
            Truth::Unpaired => {
                codes.iter().any(|c| matches!(c, Code::MessageMissing | Code::MessageDoubled | Code::MessageUnknown))
            }
            Truth::Early => !codes.is_empty() && codes.iter().all(|c| *c == Code::MessageEarly),
            Truth::Mispairs => !codes.is_empty() && codes.iter().all(|c| *c == Code::FifoOrder),
            // The first to stop may do so before the messages that would have been mistaken come.
            Truth::Stops => !codes.is_empty() && codes.iter().all(|c| matches!(c, Code::Deadlock | Code::FifoOrder)),
        };
        assert!(fits, "seed {seed}, {transport:?}: {truth:?} but {codes:?}\n{programs:#?}");
        *counts.entry((format!("{transport:?}"), truth)).or_default() += 1;

        // The same through text, where every node is written.
        let mut starts = vec![0];
        starts.extend(programs.iter().scan(0, |sum, program| {
            *sum += program.len() as u32;
            Some(*sum)
        }));
        let plan = Plan { nodes: programs.concat().into(), starts: starts.into(), ..checked.plan.clone() };
        let (raw, _) = read_plan("case", "case.csv", &write_plan(&plan));
        let raw = raw.unwrap_or_else(|report| panic!("seed {seed}: {report}"));
        let read: Vec<Code> =
            messages::check_on(&raw.nodes, &raw.schedule.placement, transport).iter().map(|fault| fault.code).collect();
        assert_eq!(read.is_empty(), codes.is_empty(), "seed {seed}: {}", write_plan(&plan));
    }
    for transport in ["Edge", "RankEdge", "Rendezvous"] {
        for truth in [Truth::Finishes, Truth::Unpaired, Truth::Early, Truth::Mispairs, Truth::Stops] {
            let n = counts.get(&(transport.to_owned(), truth)).copied().unwrap_or(0);
            assert!(n > 5, "{transport} {truth:?}: {counts:?}");
        }
    }
}

/// What is lowered for a blocking stream never comes to a stand, and is refused exactly where waits for
/// data alone close a circle (case B31).
#[test]
fn the_global_order_of_a_blocking_stream_always_ends() {
    let mut counts = [0usize; 2];
    for seed in 0..1500 {
        let mut rng = Rng(seed ^ 0x51DE);
        let mut schedule = small(&mut rng);
        for _ in 0..rng.below(3) {
            schedule = mutate(&mut rng, &schedule);
        }
        schedule.transport = Rendezvous;
        let truth = oracle(&schedule);
        match check(schedule, &Options::AT_START) {
            Ok(checked) => {
                assert_eq!(truth, "ok", "seed {seed}");
                let programs = programs(&checked.plan, checked.schedule.ranks);
                let verdict = brute_force(&programs, &checked.schedule.placement, Rendezvous);
                assert_eq!(verdict, Truth::Finishes, "seed {seed}: {programs:#?}");
                assert_eq!(messages::check_on(&programs, &checked.schedule.placement, Rendezvous), []);
                counts[0] += 1;
            }
            Err(report) => {
                assert_eq!(&report.codes()[0].to_string()[..4], truth, "seed {seed}: {report}");
                counts[1] += usize::from(truth == "QE04");
            }
        }
    }
    assert!(counts[0] > 500 && counts[1] > 15, "{counts:?}");
}

/// Receive buffers of a lowered program hold what is received and not yet used, and no more.
#[test]
fn buffers_of_a_blocking_stream_are_the_most_that_is_held() {
    for seed in 0..400 {
        let mut rng = Rng(seed ^ 0xB0F);
        let mut schedule = legal(&mut rng, 2 + seed as usize % 3, 1 + seed as usize % 2, 4);
        schedule.transport = Rendezvous;
        let checked = check(schedule, &Options::AT_START).unwrap();
        let stages = checked.schedule.stages;
        for edge in checked.plan.edges.iter().filter(|edge| edge.from_rank != edge.to_rank) {
            let sent = (edge.direction == Direction::Forward, edge.from);
            let (mut held, mut peak) = (0, 0);
            for act in checked.plan.rank(edge.to_rank).iter().flat_map(|node| acts(node, stages)) {
                match act {
                    Act::Receive((forward, from, _)) if (forward, Stage(from)) == sent => held += 1,
                    Act::Use((forward, from, _)) if (forward, Stage(from)) == sent => held -= 1,
                    _ => {}
                }
                peak = peak.max(held);
            }
            assert_eq!(edge.buffers, peak, "seed {seed}: {edge:?}");
        }
    }
}

/// With sends that never wait, playing the lowered program takes exactly as long as the schedule.
#[test]
fn the_lowered_program_takes_as_long_as_the_schedule() {
    for seed in 0..300 {
        let mut rng = Rng(seed ^ 0x71ED);
        let (ranks, microbatches) = (1 + rng.below(4), 1 + rng.below(5));
        let checked = check(legal(&mut rng, ranks, 2, microbatches), &Options::AT_START).unwrap();
        let schedule = &checked.schedule;
        let mut costs = CostModel::unit();
        costs.stages[0].f = 1 + rng.below(4) as i64;
        costs.stages[0].i = 1 + rng.below(4) as i64;
        costs.latency = rng.below(3) as i64;
        let index = qeffect_core::index::Index::new(schedule);
        let timeline = sim::run(schedule, &index, &costs).unwrap();
        let programs = programs(&checked.plan, schedule.ranks);
        let clocks = progress::run(&programs, &schedule.placement, Edge, &costs).unwrap();
        assert_eq!((clocks.bubble(), clocks.idle()), (timeline.bubble(), timeline.idle()), "seed {seed}");
        assert_eq!(clocks.busy, timeline.busy);
    }
}
