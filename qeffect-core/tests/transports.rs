//! Communication on every declared transport against brute force: all interleavings of small lowered
//! programs, as they are lowered and with their sends and receives moved, dropped, doubled and grouped.
#![allow(missing_docs)]

mod common;

use std::collections::BTreeMap;

use common::interleavings::{Act, Truth, acts, brute_force, programs};
use common::{Rng, legal, mutate, oracle, overlapping};
use qeffect_core::check::{Options, check, messages, progress};
use qeffect_core::code::Code;
use qeffect_core::ids::Stage;
use qeffect_core::plan::{Direction, Node, Op, Plan};
use qeffect_core::schedule::Transport::{Edge, RankEdge, Rendezvous};
use qeffect_core::sim::{self, CostModel};
use qeffect_core::text::{read_plan, write_plan};

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
        if rng.below(3) == 0 {
            schedule = overlapping(&mut rng, &schedule);
        }
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
