//! The schedules of the library against their papers' formulas, and against numbers from other
//! programs, over a grid of ranks, microbatches and costs.

use qeffect_core::ids::Rank;
use qeffect_core::index::Index;
use qeffect_core::plan::{Checked, Proved};
use qeffect_core::schedule::Costs;
use qeffect_core::sim::{self, CostModel, Timeline};
use qeffect_schedules::{eval_loop, eval_v, gpipe, interleaved_1f1b, library, one_f_one_b, zb_h1, zb_v};

const COSTS: &[(i64, i64, i64)] =
    &[(1, 1, 1), (4, 5, 3), (10, 12, 7), (5, 4, 3), (1, 2, 1), (2, 1, 1), (3, 3, 1), (2, 3, 3), (1, 1, 4)];

fn run(checked: &Checked, (f, i, w): (i64, i64, i64)) -> Timeline {
    let index = Index::new(&checked.schedule);
    sim::run(&checked.schedule, &index, &CostModel::uniform(Costs { f, i, w })).expect("a checked schedule ends")
}

fn slots(checked: &Checked) -> Vec<i64> {
    checked.plan.peaks.iter().map(|peaks| i64::from(peaks.slots)).collect()
}

fn tapes(checked: &Checked) -> Vec<i64> {
    checked.plan.peaks.iter().map(|peaks| i64::from(peaks.tapes)).collect()
}

/// Idle time of one rank between its own first start and last end.
fn sigma(timeline: &Timeline, rank: usize) -> i64 {
    timeline.last[rank] - timeline.first[rank] - timeline.busy[rank]
}

// case B32: P = 4 does not divide M = 6, so that there is one round of six: more than four stay in flight, and nothing is
// refused. Fewer microbatches than ranks are one short round.
#[test]
fn b32_interleaved_where_ranks_do_not_divide_microbatches() {
    for m in [1, 2, 3, 5, 6, 7, 9] {
        let checked = interleaved_1f1b::build(4, m, 2).unwrap();
        let longest = if m < 8 { m } else { (m + 1) / 2 };
        let most = |r: i64| (2 * (3 - r) + longest + 1).min(2 * m);
        assert_eq!(slots(&checked), (0..4).map(most).collect::<Vec<_>>(), "{m} microbatches");
        let timeline = run(&checked, (1, 1, 1));
        assert_eq!(timeline.busy, vec![2 * 3 * m; 4], "every action of every stage ran");
    }
    interleaved_1f1b::build(4, 0, 2).unwrap_err();
}

#[test]
fn gpipe_and_1f1b() {
    for p in 1..=8 {
        for m in 1..=12 {
            let (all, turns) = (gpipe::build(p, m).unwrap(), one_f_one_b::build(p, m).unwrap());
            assert_eq!(slots(&all), vec![m; p as usize]);
            assert_eq!(slots(&turns), (0..p).map(|r| (p - r).min(m)).collect::<Vec<_>>());
            for &(f, i, w) in COSTS {
                let timeline = run(&all, (f, i, w));
                assert_eq!(timeline.bubble(), (p - 1) * (f + i + w), "gpipe {p} {m}");
                for r in 0..p {
                    assert_eq!(sigma(&timeline, r as usize), (p - 1 - r) * (f + i + w), "gpipe {p} {m} rank {r}");
                }
                assert_eq!(run(&turns, (f, i, w)).bubble(), (p - 1) * (f + i + w), "1f1b {p} {m} {f} {i} {w}");
            }
        }
    }
}

#[test]
fn interleaved() {
    for v in 2..=4 {
        for p in 1..=6 {
            for rounds in 1..=4 {
                let m = p * rounds;
                let checked = interleaved_1f1b::build(p, m, v).unwrap();
                let peaks: Vec<_> = (0..p).map(|r| (2 * (p - 1 - r) + (v - 1) * p + 1).min(m * v)).collect();
                assert_eq!(slots(&checked), peaks, "{p} {m} {v}");
                for &(f, i, w) in COSTS {
                    assert_eq!(run(&checked, (f, i, w)).bubble(), (p - 1) * (f + i + w), "{p} {m} {v}");
                }
            }
        }
    }
}

/// Rounds of interleaved 1F1B may be uneven: a larger bubble, never a deadlock.
#[test]
fn interleaved_with_uneven_rounds() {
    for v in 1..=4 {
        for p in 1..=6 {
            for m in 1..=17 {
                let checked = interleaved_1f1b::build(p, m, v).unwrap_or_else(|e| panic!("{p} {m} {v}: {e}"));
                assert!(!checked.order_dependent, "{p} {m} {v}");
                assert!(run(&checked, (1, 1, 1)).bubble() >= 3 * (p - 1), "{p} {m} {v}");
            }
        }
    }
}

#[test]
fn zero_bubble_h1() {
    for p in 1..=8 {
        for m in 1..=20 {
            let checked = zb_h1::build(p, m).unwrap();
            assert!(slots(&checked).iter().all(|peak| *peak <= p), "{p} {m}");
            for &(f, i, w) in COSTS {
                let bubble = run(&checked, (f, i, w)).bubble();
                if m >= 2 * p {
                    assert_eq!(bubble, (p - 1) * (f + i - f.min(i).min(w)), "{p} {m} {f} {i} {w}");
                }
                if m >= p && w <= f.min(i) {
                    assert_eq!(bubble, (p - 1) * (f + i - w), "{p} {m} {f} {i} {w}");
                }
            }
            if m >= 2 * p {
                // (P - r) M_B + r M_W, for M_B = 10 and M_W = 4.
                for r in 0..p {
                    assert_eq!(
                        sim::peak_memory(&checked.schedule, Rank(r as u32), 10, 4),
                        10 * (p - r) + 4 * r,
                        "{p} {m} rank {r}"
                    );
                }
            }
        }
    }
}

#[test]
fn zero_bubble_v() {
    for p in 1..=8 {
        for m in 1..=20 {
            let checked = zb_v::build(p, m).unwrap_or_else(|e| panic!("{p} {m}: {e}"));
            assert!(!checked.order_dependent, "{p} {m}");
            assert!(slots(&checked).iter().all(|peak| *peak <= 2 * p), "{p} {m}");
            if m >= 2 * p {
                assert_eq!(slots(&checked), vec![2 * p; p as usize], "{p} {m}");
                for scale in [1, 7] {
                    let timeline = run(&checked, (scale, scale, scale));
                    assert_eq!((timeline.bubble(), timeline.idle()), ((p - 1) * scale, 0), "{p} {m}");
                }
            }
        }
    }
}

#[test]
fn evaluation() {
    for p in 1..=6 {
        for m in 1..=12 {
            for v in 1..=3 {
                let checked = eval_loop::build(p, m, v).unwrap();
                let bubble = run(&checked, (5, 0, 0)).bubble();
                if v == 1 || m % p == 0 {
                    assert_eq!(bubble, 5 * (p - 1), "{p} {m} {v}");
                }
                assert!(bubble >= 5 * (p - 1), "{p} {m} {v}");
            }
            let bubble = run(&eval_v::build(p, m).unwrap(), (5, 0, 0)).bubble();
            if m >= 2 * p - 1 {
                assert_eq!(bubble, 10 * (p - 1), "{p} {m}");
            }
            assert!(bubble >= 10 * (p - 1), "{p} {m}");
        }
    }
}

/// Numbers that other programs give for the same schedules.
#[test]
fn golden_numbers() {
    type Row = (Checked, (i64, i64, i64), (i64, i64, i64), Vec<i64>);
    let rows: [Row; 6] = [
        (gpipe::build(4, 8).unwrap(), (1, 1, 1), (33, 9, 9), vec![8, 8, 8, 8]),
        (one_f_one_b::build(4, 8).unwrap(), (4, 5, 3), (132, 36, 36), vec![4, 3, 2, 1]),
        (interleaved_1f1b::build(4, 8, 2).unwrap(), (1, 1, 1), (57, 9, 9), vec![11, 9, 7, 5]),
        (
            interleaved_1f1b::build(8, 16, 3).unwrap(),
            (10, 12, 7),
            (1595, 203, 203),
            vec![31, 29, 27, 25, 23, 21, 19, 17],
        ),
        (zb_h1::build(4, 8).unwrap(), (10, 12, 7), (277, 45, 45), vec![4; 4]),
        (zb_v::build(8, 16).unwrap(), (1, 1, 1), (103, 7, 0), vec![16; 8]),
    ];
    for (checked, costs, (makespan, beta, idle), peaks) in rows {
        let timeline = run(&checked, costs);
        let name = &checked.schedule.name;
        assert_eq!((timeline.makespan, timeline.bubble(), timeline.idle()), (makespan, beta, idle), "{name}");
        assert_eq!(slots(&checked), peaks, "{name}");
    }
    // Unequal costs: no closed form for the fixed program.
    let timeline = run(&zb_v::build(4, 8).unwrap(), (4, 5, 3));
    assert_eq!((timeline.bubble(), timeline.idle()), (15, 12));
    // Tapes: those of ZB-H1 are 1F1B's.
    assert_eq!(tapes(&zb_h1::build(4, 8).unwrap()), tapes(&one_f_one_b::build(4, 8).unwrap()));
}

/// What the compiler proved is what a check at start finds, table by table.
#[test]
fn static_instances_equal_built_ones() {
    let mut found = 0;
    for entry in library() {
        for p in 1..=4 {
            for m in 1..=8 {
                let Some(proved) = (entry.find)(p, m) else { continue };
                let built = (entry.build)(p, m).unwrap();
                assert_eq!(proved.schedule, built.schedule, "{}", entry.name);
                assert_eq!(proved.plan, built.plan, "{}", entry.name);
                assert_eq!(proved.notes, built.notes, "{}", entry.name);
                assert_eq!((proved.proved, built.proved), (Proved::AtCompileTime, Proved::AtStart));
                found += 1;
            }
        }
    }
    assert!(found >= 50, "{found} instances are declared");
}

#[test]
fn the_library_is_consistent() {
    for entry in library() {
        let checked = entry.checked(2, 4).unwrap();
        let schedule = &checked.schedule;
        assert_eq!(schedule.eval, entry.eval, "{}", entry.name);
        assert_eq!(i64::from(schedule.stages), 2 * entry.virtual_stages, "{}", entry.name);
        assert_eq!(schedule.placement.last() == Some(&Rank(0)), entry.v_shaped, "{}", entry.name);
        let evaluation = entry.evaluation().checked(2, 4).unwrap();
        assert_eq!(evaluation.schedule.placement, schedule.placement, "{}", entry.name);
        assert_eq!(qeffect_schedules::by_name(entry.name).map(|e| e.summary), Some(entry.summary));
    }
    assert_eq!(library().iter().filter(|entry| !entry.eval).count(), 5);
}
