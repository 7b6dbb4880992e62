//! Every schedule at every size of a grid, 1 to 16 ranks and 1 to 64 microbatches: checked, simulated,
//! and, under the conditions of its formulas, equal to them.

use qeffect_core::index::Index;
use qeffect_core::plan::Checked;
use qeffect_core::schedule::Costs;
use qeffect_core::sim::{self, CostModel, Timeline};
use qeffect_schedules::*;

const COSTS: [(i64, i64, i64); 5] = [(1, 1, 1), (4, 5, 3), (3, 3, 2), (2, 1, 1), (1, 2, 3)];

/// Ranks, microbatches and costs of a run.
#[derive(Clone, Copy)]
struct At {
    p: i64,
    m: i64,
    f: i64,
    i: i64,
    w: i64,
}

impl At {
    fn equal(self) -> bool {
        self.f == self.i && self.i == self.w
    }

    /// The condition of the zero-bubble formulas.
    fn short_w(self) -> bool {
        self.w <= self.f.min(self.i)
    }
}

/// A row of the table of formulas; `None`: outside of its conditions.
struct Row {
    name: &'static str,
    build: fn(i64, i64) -> Option<Checked>,
    bubble: fn(At) -> Option<i64>,
    idle: fn(At) -> Option<i64>,
    /// Live pairs on rank r.
    peak: fn(i64, i64, i64) -> Option<i64>,
}

fn run(checked: &Checked, at: At) -> Timeline {
    let index = Index::new(&checked.schedule);
    let costs = Costs { f: at.f, i: at.i, w: at.w };
    sim::run(&checked.schedule, &index, &CostModel::uniform(costs)).expect("a checked schedule ends")
}

/// No run is shorter than the work of its busiest rank, or than the way of one microbatch.
fn least(checked: &Checked, at: At) -> i64 {
    let work = at.f + at.i + at.w;
    let stages = i64::from(checked.schedule.stages);
    (stages / at.p * at.m * work).max(stages * (at.f + at.i) + at.w)
}

/// Runs the grid for one row; returns how often each formula applied.
fn grid(row: &Row) -> [u32; 3] {
    let mut applied = [0; 3];
    for p in 1..=16 {
        for m in 1..=64 {
            let Some(checked) = (row.build)(p, m) else { continue };
            let slots = checked.plan.peaks.iter().map(|peaks| i64::from(peaks.slots));
            for (r, slots) in slots.enumerate() {
                if let Some(peak) = (row.peak)(p, m, r as i64) {
                    assert_eq!(slots, peak, "{}: peak of rank {r}, P = {p}, M = {m}", row.name);
                    applied[2] += 1;
                }
            }
            for (f, i, w) in COSTS {
                let at = At { p, m, f, i, w };
                let timeline = run(&checked, at);
                assert!(timeline.makespan >= least(&checked, at), "{} P = {p}, M = {m}", row.name);
                for (n, formula, measured) in
                    [(0, (row.bubble)(at), timeline.bubble()), (1, (row.idle)(at), timeline.idle())]
                {
                    if let Some(value) = formula {
                        let what = ["bubble", "idle"][n];
                        assert_eq!(measured, value, "{}: {what}, P = {p}, M = {m}, costs {f}, {i}, {w}", row.name);
                        applied[n] += 1;
                    }
                }
            }
        }
    }
    applied
}

fn none(_: At) -> Option<i64> {
    None
}

fn check(row: &Row, bubbles: u32, idles: u32, peaks: u32) {
    let [bubble, idle, peak] = grid(row);
    assert!(bubble >= bubbles && idle >= idles && peak >= peaks, "{}: {bubble}, {idle}, {peak} comparisons", row.name);
}

const SIZES: u32 = 16 * 64;

#[test]
fn gpipe_grid() {
    let row = Row {
        name: "gpipe",
        build: |p, m| gpipe::build(p, m).ok(),
        bubble: |at| Some((at.p - 1) * (at.f + at.i + at.w)),
        idle: |at| Some((at.p - 1) * (at.f + at.i + at.w)),
        peak: |_, m, _| Some(m),
    };
    check(&row, 5 * SIZES, 5 * SIZES, 8 * SIZES);
}

#[test]
fn one_f_one_b_grid() {
    let row = Row {
        name: "one_f_one_b",
        build: |p, m| one_f_one_b::build(p, m).ok(),
        bubble: |at| Some((at.p - 1) * (at.f + at.i + at.w)),
        idle: none,
        peak: |p, m, r| Some((p - r).min(m)),
    };
    check(&row, 5 * SIZES, 0, 8 * SIZES);
}

#[test]
fn interleaved_grid() {
    let row = Row {
        name: "interleaved_1f1b",
        build: |p, m| interleaved_1f1b::build(p, m, 2).ok(),
        bubble: |at| (at.m % at.p == 0).then_some((at.p - 1) * (at.f + at.i + at.w)),
        idle: none,
        peak: |p, m, r| (m % p == 0).then_some((2 * (p - 1 - r) + p + 1).min(2 * m)),
    };
    check(&row, 700, 0, 900);
    let row = Row {
        name: "interleaved_1f1b, V = 3",
        build: |p, m| interleaved_1f1b::build(p, m, 3).ok(),
        peak: |p, m, r| (m % p == 0).then_some((2 * (p - 1 - r) + 2 * p + 1).min(3 * m)),
        ..row
    };
    check(&row, 700, 0, 900);
}

#[test]
fn kimi_k2_grid() {
    let row = Row {
        name: "kimi_k2",
        build: |p, m| kimi_k2::build(p, m, 2).ok(),
        bubble: |at| (at.m % at.p == 0 && at.short_w()).then_some((at.p - 1) * (at.f + at.i)),
        idle: none,
        peak: |p, m, r| (m % p == 0).then_some((2 * (p - 1 - r) + p + 2).min(2 * m)),
    };
    check(&row, 700, 0, 900);
}

#[test]
fn looped_bfs_grid() {
    let row = Row {
        name: "looped_bfs",
        build: |p, m| looped_bfs::build(p, m, 2).ok(),
        bubble: |at| (at.m % at.p == 0).then_some((at.p - 1) * (at.f + at.i + at.w)),
        idle: none,
        peak: |_, m, _| Some(2 * m),
    };
    check(&row, 1000, 0, 8 * SIZES);
}

#[test]
fn interleaved_zb_grid() {
    let row = Row {
        name: "interleaved_zb",
        build: |p, m| interleaved_zb::build(p, m, 2).ok(),
        bubble: |at| {
            (at.m % at.p == 0 && at.m >= 2 * at.p && at.short_w()).then_some((at.p - 1) * (at.f + at.i - at.w))
        },
        idle: none,
        peak: |p, m, _| (m % p == 0 && m >= 2 * p).then_some(2 * p),
    };
    check(&row, 500, 0, 500);
}

#[test]
fn zb_h1_grid() {
    let row = Row {
        name: "zb_h1",
        build: |p, m| zb_h1::build(p, m).ok(),
        bubble: |at| match at.m >= 2 * at.p {
            true => Some((at.p - 1) * (at.f + at.i - at.f.min(at.i).min(at.w))),
            false => (at.m >= at.p && at.short_w()).then_some((at.p - 1) * (at.f + at.i - at.w)),
        },
        idle: none,
        peak: |p, m, r| (m >= 2 * p && r == 0).then_some(p),
    };
    check(&row, 3000, 0, 500);
}

#[test]
fn zb_h2_grid() {
    let row = Row {
        name: "zb_h2",
        build: |p, m| zb_h2::build(p, m).ok(),
        bubble: none,
        idle: |at| (at.m >= 2 * at.p && at.short_w()).then_some(((at.p - 1) * (at.f + at.i - 2 * at.w)).max(0)),
        peak: |p, m, r| (m >= 2 * p && r == 0).then_some(2 * p - 1),
    };
    check(&row, 0, 2000, 500);
}

#[test]
fn zb_v_grid() {
    let row = Row {
        name: "zb_v",
        build: |p, m| zb_v::build(p, m).ok(),
        bubble: |at| (at.equal() && at.m >= 2 * at.p).then_some((at.p - 1) * at.f),
        idle: |at| (at.equal() && at.m >= 2 * at.p).then_some(0),
        peak: |p, m, _| (m >= 2 * p).then_some(2 * p),
    };
    check(&row, 500, 500, 5000);
}

#[test]
fn v_half_grid() {
    let row = Row {
        name: "v_half",
        build: |p, m| v_half::build(p, m).ok(),
        bubble: v_half_bubble,
        idle: v_half_bubble,
        peak: |p, m, r| (m >= 2 * p && r == 0).then_some(2 * ((p + 2) / 2)),
    };
    check(&row, 500, 500, 500);
}

fn v_half_bubble(at: At) -> Option<i64> {
    let value = if at.p == 2 { 1 } else { 6 * ((at.p + 1) / 2) - 7 };
    (at.equal() && at.m >= 2 * at.p && at.p > 1).then_some(value * at.f)
}

#[test]
fn v_min_grid() {
    let row = Row {
        name: "v_min",
        build: |p, m| v_min::build(p, m).ok(),
        bubble: v_min_bubble,
        idle: v_min_bubble,
        // The first ranks may hold one less.
        peak: |p, m, r| (m >= 2 * p && r == p - 1).then_some(2 * ((p + 4) / 3)),
    };
    check(&row, 500, 500, 500);
}

fn v_min_bubble(at: At) -> Option<i64> {
    let value = if at.p % 3 == 0 { 4 * at.p - 7 } else { 4 * at.p - 5 };
    (at.equal() && at.m >= 2 * at.p && at.p > 1).then_some(value * at.f)
}

#[test]
fn dualpipe_v_grid() {
    let row = Row {
        name: "dualpipe_v",
        build: |p, m| {
            let built = dualpipe_v::build(p, m);
            assert!(built.is_ok() || m < 2 * p, "P = {p}, M = {m}");
            built.ok()
        },
        // A pair costs f + i + w here; `further.rs` has the other costs.
        bubble: |at| {
            (at.f == at.i && at.w <= at.f && at.m >= 2 * at.p).then_some((at.p - 1) * (at.f + 2 * at.i - at.w))
        },
        idle: none,
        peak: |p, m, _| (m >= 2 * p).then_some(2 * p + 1),
    };
    check(&row, 1000, 0, 5000);
}

/// Numbers that other programs give for the same schedules.
#[test]
fn golden_numbers_of_the_further_ones() {
    let at = |p, m| At { p, m, f: 1, i: 1, w: 1 };
    let rows = [
        (v_half::build(8, 24), at(8, 24), (161, 17, 17), 10),
        (v_min::build(6, 18), at(6, 18), (125, 17, 17), 6),
        (dualpipe_v::build(4, 8), at(4, 8), (54, 6, 6), 9),
    ];
    for (checked, at, numbers, peak) in rows {
        let checked = checked.unwrap();
        let timeline = run(&checked, at);
        assert_eq!((timeline.makespan, timeline.bubble(), timeline.idle()), numbers, "{}", checked.schedule.name);
        assert!(checked.plan.peaks.iter().all(|peaks| peaks.slots == peak), "{}", checked.schedule.name);
    }
    // At unequal costs the bubble of V-Half stays where W is long enough, and that of V-Min grows.
    let bubble = |checked: &Checked, (f, i, w)| run(checked, At { p: 0, m: 0, f, i, w }).bubble();
    for m in [16, 32, 64] {
        let checked = v_half::build(8, m).unwrap();
        assert_eq!((bubble(&checked, (4, 5, 3)), bubble(&checked, (10, 12, 7))), (98, 239), "M = {m}");
    }
    let grows: Vec<_> = [16, 32, 64].iter().map(|m| bubble(&v_half::build(8, *m).unwrap(), (2, 4, 1))).collect();
    assert_eq!(grows, [116, 164, 260]);
    let grows: Vec<_> = [12, 24, 48, 96].iter().map(|m| bubble(&v_min::build(6, *m).unwrap(), (4, 5, 3))).collect();
    assert_eq!(grows, [143, 215, 359, 647]);
}

#[test]
fn sizes_without_a_schedule_are_refused() {
    for build in [v_half::build, v_min::build, |p, m| kimi_k2::build(p, m, 2)] {
        for (p, m) in [(0, 4), (4, 0), (-1, 4), (4, i64::MAX), (i64::MAX, 4)] {
            assert!(build(p, m).is_err(), "P = {p}, M = {m}");
        }
    }
}
