//! The further schedules against their papers' formulas, over a grid of ranks, microbatches and costs.

use qeffect_core::ids::Rank;
use qeffect_core::index::Index;
use qeffect_core::plan::{Checked, Op};
use qeffect_core::schedule::Costs;
use qeffect_core::sim::{self, CostModel, Timeline};
use qeffect_schedules::{by_name, dualpipe_v, further, interleaved_zb, library, looped_bfs, zb_h2};

const COSTS: &[(i64, i64, i64)] =
    &[(1, 1, 1), (4, 5, 3), (10, 12, 7), (5, 4, 3), (1, 2, 1), (2, 1, 1), (3, 3, 1), (3, 3, 2), (2, 3, 3), (1, 1, 4)];

fn run(checked: &Checked, (f, i, w): (i64, i64, i64), overlap: Option<i64>) -> Timeline {
    let index = Index::new(&checked.schedule);
    let costs = CostModel { overlap, ..CostModel::uniform(Costs { f, i, w }) };
    sim::run(&checked.schedule, &index, &costs).expect("a checked schedule ends")
}

/// Inside an overlap no message has a place: its channels have the written order.
#[test]
fn overlaps_wait_before_and_send_after() {
    let mut seen = Vec::new();
    for entry in library().iter().chain(further()) {
        let built: Vec<Checked> =
            [(2, 4), (2, 6), (4, 8)].iter().filter_map(|(p, m)| (entry.build)(*p, *m).ok()).collect();
        assert!(!built.is_empty(), "{}", entry.name);
        for checked in built {
            for rank in (0..checked.schedule.ranks).map(Rank) {
                let mut inside = false;
                for node in checked.plan.rank(rank) {
                    inside = node.op == Op::OverlapBegin || (inside && node.op != Op::OverlapEnd);
                    if inside && seen.last() != Some(&entry.name) {
                        seen.push(entry.name);
                    }
                    let moves = [
                        Op::SendForward,
                        Op::SendBackward,
                        Op::PostForward,
                        Op::PostBackward,
                        Op::WaitForward,
                        Op::WaitBackward,
                        Op::Refresh,
                        Op::Reduce,
                    ];
                    assert!(!inside || !moves.contains(&node.op), "{}, rank {rank}: {node:?}", entry.name);
                }
            }
        }
    }
    seen.sort_unstable();
    assert_eq!(seen, ["dualpipe_v", "kimi_k2"]);
}

fn slots(checked: &Checked) -> Vec<i64> {
    checked.plan.peaks.iter().map(|peaks| i64::from(peaks.slots)).collect()
}

#[test]
fn zero_bubble_h2() {
    for p in 1..=8 {
        for m in 1..=20 {
            let checked = zb_h2::build(p, m).unwrap();
            for (r, peaks) in checked.plan.peaks.iter().enumerate() {
                let r = r as i64;
                assert_eq!(i64::from(peaks.tapes), (2 * (p - r) - 1).min(m), "{p} {m} {r}");
                assert!(i64::from(peaks.slots) <= (2 * p - 1).min(m));
            }
            for &(f, i, w) in COSTS.iter().filter(|(f, i, w)| m >= 2 * p && w <= f.min(i)) {
                let timeline = run(&checked, (f, i, w), None);
                assert_eq!(timeline.idle(), ((p - 1) * (f + i - 2 * w)).max(0), "{p} {m} {f} {i} {w}");
                assert!(timeline.bubble() >= (p - 1) * f);
            }
        }
    }
    // P = 8, M = 24, costs 4, 5, 3, from another program.
    let timeline = run(&zb_h2::build(8, 24).unwrap(), (4, 5, 3), None);
    assert_eq!((timeline.makespan, timeline.bubble(), timeline.idle()), (316, 28, 21));
}

#[test]
fn interleaved_zero_bubble() {
    for p in 1..=6 {
        for rounds in 2..=4 {
            let m = p * rounds;
            let checked = interleaved_zb::build(p, m, 2).unwrap();
            assert_eq!(slots(&checked), vec![2 * p; p as usize], "{p} {m}");
            for (r, peaks) in checked.plan.peaks.iter().enumerate() {
                assert_eq!(i64::from(peaks.tapes), 2 * p - r as i64, "{p} {m} {r}");
            }
            for &(f, i, w) in COSTS.iter().filter(|(f, i, w)| w <= f.min(i)) {
                assert_eq!(run(&checked, (f, i, w), None).bubble(), (p - 1) * (f + i - w), "{p} {m} {f} {i} {w}");
            }
        }
    }
    for (p, m, v) in [(4, 10, 2), (3, 4, 3), (4, 3, 2), (5, 7, 4)] {
        interleaved_zb::build(p, m, v).unwrap();
    }
    let timeline = run(&interleaved_zb::build(8, 16, 2).unwrap(), (4, 5, 3), None);
    assert_eq!((timeline.makespan, timeline.bubble(), timeline.idle()), (426, 42, 42));
}

#[test]
fn looped_breadth_first() {
    for v in 1..=4 {
        for p in 1..=6 {
            for rounds in 1..=3 {
                let m = p * rounds;
                let checked = looped_bfs::build(p, m, v).unwrap();
                assert_eq!(slots(&checked), vec![m * v; p as usize]);
                assert_eq!(checked.order_dependent, m > 1);
                for &(f, i, w) in COSTS {
                    assert_eq!(run(&checked, (f, i, w), None).bubble(), (p - 1) * (f + i + w), "{p} {m} {v}");
                }
            }
        }
    }
}

#[test]
fn dual_pipe_v() {
    for p in 1..=8 {
        for m in 2 * p..=2 * p + 6 {
            let checked = dualpipe_v::build(p, m).unwrap();
            assert!(slots(&checked).iter().all(|slots| *slots == 2 * p + 1), "{p} {m} {:?}", slots(&checked));
            for &(f, i, w) in COSTS.iter().filter(|(f, i, w)| f == i && w <= f) {
                for pair in f.max(i + w)..=f + i + w {
                    let timeline = run(&checked, (f, i, w), Some(pair));
                    let bubble = (p - 1) * (pair + i + w - 3 * w);
                    assert_eq!(timeline.bubble(), bubble, "{p} {m} {f} {i} {w} {pair}");
                }
            }
        }
        assert!(p == 1 || dualpipe_v::build(p, 2 * p - 2).is_err(), "too few microbatches to fill the V");
    }
    // Costs at which the formula does not hold: from another program.
    for (p, costs, bubble) in
        [(4, (4, 5, 3), 30), (4, (10, 12, 7), 75), (4, (5, 4, 3), 33), (8, (4, 5, 3), 73), (2, (1, 1, 2), 2)]
    {
        assert_eq!(run(&dualpipe_v::build(p, 2 * p).unwrap(), costs, None).bubble(), bubble, "{p} {costs:?}");
    }
}

#[test]
fn both_lists_are_consistent() {
    for entry in further() {
        assert!(library().iter().all(|other| other.name != entry.name));
        assert_eq!(by_name(entry.name).map(|e| e.summary), Some(entry.summary));
        let built = (entry.build)(4, 8).unwrap();
        if let Some(proved) = (entry.find)(4, 8) {
            assert_eq!(proved.schedule, built.schedule, "{}", entry.name);
        }
        assert_eq!(i64::from(built.schedule.stages), 4 * entry.virtual_stages);
        assert_eq!(built.schedule.placement.last() == Some(&Rank(0)), entry.v_shaped);
        assert_eq!(entry.evaluation().checked(4, 8).unwrap().schedule.placement, built.schedule.placement);
        assert!(built.notes.is_empty(), "{:?}", built.notes);
    }
}
