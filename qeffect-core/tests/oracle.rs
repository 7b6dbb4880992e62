//! The checker against brute force on small random schedules, legal and broken.
#![allow(missing_docs)]

mod common;

use std::collections::{BTreeMap, VecDeque};

use common::{Rng, legal, mutate, oracle};
use qeffect_core::check::{Options, check};
use qeffect_core::ids::Rank;
use qeffect_core::plan::{Checked, Op};
use qeffect_core::schedule::Schedule;

fn verdict(schedule: &Schedule) -> String {
    match check(schedule.clone(), &Options::AT_START) {
        Ok(_) => "ok".to_owned(),
        Err(report) => report.codes()[0].to_string()[..4].to_owned(),
    }
}

#[test]
fn verdicts_equal_brute_force() {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for seed in 0..20_000 {
        let mut rng = Rng(seed);
        let (ranks, virtual_stages, microbatches) = (1 + rng.below(3), 1 + rng.below(2), 1 + rng.below(3));
        let mut schedule = legal(&mut rng, ranks, virtual_stages, microbatches);
        for _ in 0..rng.below(4) {
            schedule = mutate(&mut rng, &schedule);
        }
        let (ours, truth) = (verdict(&schedule), oracle(&schedule));
        assert_eq!(ours, truth, "seed {seed}: {:#?}", common::programs(&schedule));
        *counts.entry(ours).or_default() += 1;
    }
    // The sample must not be one-sided, or it proves little.
    for family in ["ok", "QE01", "QE04", "QE06"] {
        assert!(counts.get(family).is_some_and(|n| *n > 300), "{counts:?}");
    }
}

/// Two ranks that hold stages 0, 2 and 1, 3 each send the other two messages, in opposite orders,
/// on boundaries that do not touch: legal, since every boundary and direction has a FIFO of its own.
#[test]
fn opposite_orders_across_stages_that_do_not_touch() {
    use qeffect_core::action::{
        Item,
        Kind::{Forward, FullBackward},
    };
    // Microbatch 0 and 1; rank 0 sends 0F0 then 2F1 .. while rank 1 takes the other one first.
    let f = |s, m| Item::new(Forward, s, m, 0);
    let b = |s, m| Item::new(FullBackward, s, m, 0);
    let rank0 = vec![f(0, 0), f(0, 1), f(2, 0), f(2, 1), b(2, 1), b(2, 0), b(0, 0), b(0, 1)];
    let rank1 = vec![f(1, 0), f(1, 1), f(3, 1), f(3, 0), b(3, 1), b(3, 0), b(1, 0), b(1, 1)];
    let schedule = common::schedule(vec![rank0, rank1], vec![0, 1, 0, 1], 2);
    assert_eq!(verdict(&schedule), oracle(&schedule));
    assert_eq!(oracle(&schedule), "ok");
    assert_eq!(run_plan(&check(schedule, &Options::AT_START).unwrap(), &mut Rng(1)), Ok(()));
    // The same with a cycle: each rank takes first what the other sends last.
    let rank0 = vec![f(0, 0), f(2, 0), f(0, 1), f(2, 1), b(2, 0), b(2, 1), b(0, 0), b(0, 1)];
    let rank1 = vec![f(1, 1), f(1, 0), f(3, 0), f(3, 1), b(3, 0), b(3, 1), b(1, 0), b(1, 1)];
    let schedule = common::schedule(vec![rank0, rank1], vec![0, 1, 0, 1], 2);
    assert_eq!((verdict(&schedule).as_str(), oracle(&schedule)), ("QE04", "QE04"));
}

/// Plays a plan: compute in program order per rank, one FIFO per edge, as many receive buffers as
/// the plan says, ranks and deliveries in random order. Fails if it stops before the end, or if a
/// receive meets another message than it was posted for.
fn run_plan(checked: &Checked, rng: &mut Rng) -> Result<(), String> {
    let plan = &checked.plan;
    let ranks = checked.schedule.ranks as usize;
    let mut pc = vec![0usize; ranks];
    let edges = plan.edges.len();
    let mut in_flight: Vec<VecDeque<u32>> = vec![VecDeque::new(); edges];
    let mut posted: Vec<VecDeque<u32>> = vec![VecDeque::new(); edges];
    let mut landed: Vec<Vec<u32>> = vec![Vec::new(); edges];
    let mut in_use: Vec<Option<(usize, u32)>> = vec![None; ranks];
    loop {
        let mut choices: Vec<usize> = (0..ranks + edges).collect();
        let mut moved = false;
        while !choices.is_empty() {
            let who = choices.swap_remove(rng.below(choices.len()));
            if who < ranks {
                let nodes = plan.rank(Rank(who as u32));
                let Some(node) = nodes.get(pc[who]) else { continue };
                let edge = node.slot as usize;
                match node.op {
                    Op::SendForward | Op::SendBackward => in_flight[edge].push_back(node.microbatch.0),
                    Op::PostForward | Op::PostBackward => posted[edge].push_back(node.microbatch.0),
                    Op::WaitForward | Op::WaitBackward => {
                        let Some(at) = landed[edge].iter().position(|m| *m == node.microbatch.0) else { continue };
                        landed[edge].remove(at);
                        in_use[who] = Some((edge, node.microbatch.0));
                    }
                    _ => in_use[who] = None,
                }
                pc[who] += 1;
                moved = true;
            } else {
                let edge = who - ranks;
                let held = landed[edge].len() + in_use.iter().flatten().filter(|(e, _)| *e == edge).count();
                if held as u32 >= plan.edges[edge].buffers {
                    continue;
                }
                let (Some(sent), Some(expected)) = (in_flight[edge].front(), posted[edge].front()) else { continue };
                if sent != expected {
                    return Err(format!("edge {edge}: {sent} arrives where {expected} was posted"));
                }
                landed[edge].push(*sent);
                in_flight[edge].pop_front();
                posted[edge].pop_front();
                moved = true;
            }
            if moved {
                break;
            }
        }
        if !moved {
            break;
        }
    }
    for rank in 0..ranks {
        let nodes = plan.rank(Rank(rank as u32));
        if pc[rank] < nodes.len() {
            return Err(format!("rank {rank} stops at {:?}", nodes[pc[rank]]));
        }
    }
    Ok(())
}

#[test]
fn accepted_plans_run_to_the_end_with_their_buffers() {
    let mut ran = 0;
    for seed in 0..1500 {
        let mut rng = Rng(seed ^ 0xABCD);
        let (ranks, virtual_stages, microbatches) = (1 + rng.below(4), 1 + rng.below(3), 1 + rng.below(5));
        let mut schedule = legal(&mut rng, ranks, virtual_stages, microbatches);
        for _ in 0..rng.below(3) {
            schedule = mutate(&mut rng, &schedule);
        }
        if let Ok(checked) = check(schedule, &Options::AT_START) {
            assert_eq!(run_plan(&checked, &mut rng), Ok(()), "seed {seed}");
            ran += 1;
        }
    }
    assert!(ran > 600, "{ran}");
}
