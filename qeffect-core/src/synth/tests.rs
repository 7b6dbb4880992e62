//! The automatic scheduler against the checker, bounds from below and known optima.

use super::{Infeasible, Objective, Request, Shape, synthesize};
use crate::action::Kind;
use crate::schedule::Costs;
use crate::sim::CostModel;

fn request(ranks: u32, stages: u32, microbatches: u32, costs: (i64, i64, i64), limit: i64) -> Request {
    let (f, i, w) = costs;
    Request {
        ranks,
        stages,
        microbatches,
        costs: CostModel::uniform(Costs { f, i, w }),
        tape: 1,
        work: 1,
        limit,
        shape: Shape::Any,
        objective: Objective::Makespan,
    }
}

/// No schedule ends earlier: the busiest rank's work, and the longest chain of one microbatch
/// together with what its first and last rank do besides.
fn least(request: &Request) -> i64 {
    let cost = |stage: u32| request.costs.stages.get(stage as usize).unwrap_or(&request.costs.stages[0]);
    let m = i64::from(request.microbatches);
    let chain: i64 = (0..request.stages).map(|s| cost(s).f + cost(s).i).sum();
    let work = (0..request.stages).map(|s| (cost(s).f + cost(s).i + cost(s).w) * m).sum::<i64>();
    chain.max(work / i64::from(request.ranks))
}

#[test]
fn every_schedule_is_legal_keeps_its_limit_and_is_deterministic() {
    for ranks in 1..=5 {
        for v in 1..=3 {
            for microbatches in [1, 2, 3, 5, 8] {
                for (n, costs) in [(1, 1, 1), (4, 5, 3), (1, 3, 2), (0, 1, 0)].into_iter().enumerate() {
                    let limit = i64::from(v) + [0, 1, 3, 40][(n + ranks as usize + microbatches as usize) % 4];
                    let mut request = request(ranks, ranks * v, microbatches, costs, limit);
                    request.costs.latency = n as i64;
                    request.work = n as i64 % 2;
                    let found = synthesize(&request, &[]).expect("the limit holds a microbatch per stage");
                    assert!(found.memory.iter().all(|peak| *peak <= limit), "{request:?}: {:?}", found.memory);
                    assert!(found.makespan >= least(&request), "{request:?}");
                    assert!(!found.checked.order_dependent);
                    assert_eq!(synthesize(&request, &[]), Ok(found));
                }
            }
        }
    }
}

/// One stage per rank, every microbatch keeps its memory to the end of W: the zero-bubble papers'
/// limits of P and 2P - 1 microbatches, and what their schedules reach there.
#[test]
fn the_bubbles_of_zero_bubble_schedules_are_reached() {
    for ranks in 2..=6 {
        for (f, i, w) in [(1, 1, 1), (4, 5, 3), (10, 12, 7), (5, 4, 2)] {
            let p = i64::from(ranks);
            let m = 3 * ranks;
            let h1 = synthesize(&request(ranks, ranks, m, (f, i, w), p), &[]).expect("feasible");
            assert!(h1.bubble <= (p - 1) * (f + i - w), "P {ranks} {f},{i},{w}: {}", h1.bubble);
            let mut wide = request(ranks, ranks, m, (f, i, w), 2 * p - 1);
            wide.objective = Objective::Idle;
            let h2 = synthesize(&wide, &[]).expect("feasible");
            assert!(h2.idle <= ((p - 1) * (f + i - 2 * w)).max(0), "P {ranks} {f},{i},{w}: idle {}", h2.idle);
        }
    }
}

#[test]
fn more_memory_is_never_worse_in_what_is_asked() {
    for shape in [Shape::Loop, Shape::V] {
        let makespans: Vec<i64> = [2, 3, 4, 6, 8, 16]
            .into_iter()
            .map(|limit| {
                let request = Request { shape, ..request(4, 8, 8, (4, 5, 3), limit) };
                synthesize(&request, &[]).expect("feasible").makespan
            })
            .collect();
        assert!(makespans[0] > makespans[5], "{makespans:?}");
    }
}

#[test]
fn a_slow_stage_is_kept_busy() {
    let mut request = request(4, 4, 16, (2, 2, 2), 8);
    request.costs.stages = [(2, 2, 2), (2, 2, 2), (5, 5, 5), (2, 2, 2)].map(|(f, i, w)| Costs { f, i, w }).to_vec();
    let found = synthesize(&request, &[]).expect("feasible");
    // Stage 2 works 16 * 15 and cannot start before 4; after its last I the gradient climbs 4 and W ends.
    assert!(found.makespan <= 16 * 15 + 4 + 4 + 2, "{}", found.makespan);
}

#[test]
fn what_is_given_is_never_beaten_by_something_worse() {
    let wanted = request(3, 3, 6, (4, 5, 3), 3);
    let first = synthesize(&wanted, &[]).expect("feasible");
    let again = synthesize(&wanted, std::slice::from_ref(&first.checked)).expect("feasible");
    assert_eq!((again.given, again.makespan), (Some(0), first.makespan));
    // One that does not fit is passed over.
    let other = synthesize(&request(3, 3, 7, (4, 5, 3), 3), &[]).expect("feasible");
    assert_eq!(synthesize(&wanted, &[other.checked]).expect("feasible").given, None);
    let wide = synthesize(&request(3, 3, 6, (4, 5, 3), 6), &[]).expect("feasible");
    if wide.memory.iter().any(|peak| *peak > 3) {
        assert_eq!(synthesize(&wanted, &[wide.checked]).expect("feasible").given, None);
    }
}

#[test]
fn impossible_requests_are_refused() {
    let refused = |request: Request| synthesize(&request, &[]).expect_err("impossible");
    assert_eq!(refused(request(2, 4, 4, (1, 1, 1), 1)), Infeasible::Limit { limit: 1, least: 2 });
    for request in [
        request(0, 0, 1, (1, 1, 1), 1),
        request(2, 3, 1, (1, 1, 1), 9),
        request(2, 2, 0, (1, 1, 1), 9),
        request(2, 2, 1, (-1, 1, 1), 9),
        Request { work: 2, ..request(2, 2, 1, (1, 1, 1), 9) },
        Request { microbatches: u32::MAX, ..request(2, 2, 1, (1, 1, 1), 9) },
    ] {
        assert!(matches!(refused(request), Infeasible::Request(_)));
    }
    let mut odd = request(2, 2, 1, (1, 1, 1), 9);
    odd.costs.stages = vec![odd.costs.stages[0]; 3];
    assert!(matches!(refused(odd), Infeasible::Request(_)));
}

#[test]
fn forwards_and_input_gradients_run_in_microbatch_order() {
    let found = synthesize(&request(4, 8, 12, (4, 5, 3), 9), &[]).expect("feasible");
    for stage in 0..8 {
        for kind in [Kind::Forward, Kind::InputGrad] {
            let of = found.checked.schedule.items.iter().filter(|i| i.kind == kind && i.stage.0 == stage);
            let order: Vec<u32> = of.map(|i| i.microbatch.0).collect();
            assert_eq!(order, (0..12).collect::<Vec<_>>());
        }
    }
}
