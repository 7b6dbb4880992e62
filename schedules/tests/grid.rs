//! Every schedule at every size of a grid, 1 to 16 ranks and 1 to 64 microbatches: checked, simulated,
//! and, under the conditions of its formulas, equal to them.

use qeffect_core::diag::Report;
use qeffect_core::ids::Rank;
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
    build: fn(i64, i64) -> Result<Checked, Report>,
    /// Sizes at which there is no such schedule.
    refused: fn(i64, i64) -> bool,
    bubble: fn(At) -> Option<i64>,
    idle: fn(At) -> Option<i64>,
    /// Live pairs on rank r.
    peak: fn(i64, i64, i64) -> Option<i64>,
    /// Live tapes on rank r.
    tapes: fn(i64, i64, i64) -> Option<i64>,
    /// Largest memory of rank r, where a tape takes [`TAPE`], of which [`WORK`] lives on to W.
    memory: fn(i64, i64, i64) -> Option<i64>,
}

const TAPE: i64 = 10;
const WORK: i64 = 4;

const NO_FORMULAS: Row = Row {
    name: "",
    build: gpipe::build,
    refused: |_, _| false,
    bubble: |_| None,
    idle: |_| None,
    peak: |_, _, _| None,
    tapes: |_, _, _| None,
    memory: |_, _, _| None,
};

fn run(checked: &Checked, at: At) -> Timeline {
    run_with(checked, at, None)
}

fn run_with(checked: &Checked, at: At, overlap: Option<i64>) -> Timeline {
    let index = Index::new(&checked.schedule);
    let costs = CostModel { overlap, ..CostModel::uniform(Costs { f: at.f, i: at.i, w: at.w }) };
    sim::run(&checked.schedule, &index, &costs).expect("a checked schedule ends")
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
            let checked = match (row.build)(p, m) {
                Ok(checked) => checked,
                Err(_) if (row.refused)(p, m) => continue,
                Err(report) => panic!("{}, P = {p}, M = {m}: {report}", row.name),
            };
            assert!(!(row.refused)(p, m), "{}, P = {p}, M = {m}", row.name);
            for (r, peaks) in checked.plan.peaks.iter().enumerate() {
                let memory = || sim::peak_memory(&checked.schedule, Rank(r as u32), TAPE, WORK);
                let (slots, tapes) = (|| i64::from(peaks.slots), || i64::from(peaks.tapes));
                let measures: [(_, _, &dyn Fn() -> i64); 3] =
                    [("peak", row.peak, &slots), ("tapes", row.tapes, &tapes), ("memory", row.memory, &memory)];
                for (what, formula, measured) in measures {
                    if let Some(value) = formula(p, m, r as i64) {
                        assert_eq!(measured(), value, "{}: {what} of rank {r}, P = {p}, M = {m}", row.name);
                        applied[2] += 1;
                    }
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

fn check(row: &Row, bubbles: u32, idles: u32, peaks: u32) {
    let [bubble, idle, peak] = grid(row);
    assert!(bubble >= bubbles && idle >= idles && peak >= peaks, "{}: {bubble}, {idle}, {peak} comparisons", row.name);
}

const SIZES: u32 = 16 * 64;

#[test]
fn gpipe_grid() {
    let row = Row {
        name: "gpipe",
        build: gpipe::build,
        bubble: |at| Some((at.p - 1) * (at.f + at.i + at.w)),
        idle: |at| Some((at.p - 1) * (at.f + at.i + at.w)),
        peak: |_, m, _| Some(m),
        ..NO_FORMULAS
    };
    check(&row, 5 * SIZES, 5 * SIZES, 8 * SIZES);
}

#[test]
fn one_f_one_b_grid() {
    let row = Row {
        name: "one_f_one_b",
        build: one_f_one_b::build,
        bubble: |at| Some((at.p - 1) * (at.f + at.i + at.w)),
        peak: |p, m, r| Some((p - r).min(m)),
        ..NO_FORMULAS
    };
    check(&row, 5 * SIZES, 0, 8 * SIZES);
}

#[test]
fn interleaved_grid() {
    let row = Row {
        name: "interleaved_1f1b",
        build: |p, m| interleaved_1f1b::build(p, m, 2),
        bubble: |at| (at.m % at.p == 0).then_some((at.p - 1) * (at.f + at.i + at.w)),
        peak: |p, m, r| (m % p == 0).then_some((2 * (p - 1 - r) + p + 1).min(2 * m)),
        ..NO_FORMULAS
    };
    check(&row, 700, 0, 900);
    let row = Row {
        name: "interleaved_1f1b, V = 3",
        build: |p, m| interleaved_1f1b::build(p, m, 3),
        peak: |p, m, r| (m % p == 0).then_some((2 * (p - 1 - r) + 2 * p + 1).min(3 * m)),
        ..row
    };
    check(&row, 700, 0, 900);
    let row = Row {
        name: "interleaved_1f1b, V = 4",
        build: |p, m| interleaved_1f1b::build(p, m, 4),
        peak: |p, m, r| (m % p == 0).then_some((2 * (p - 1 - r) + 3 * p + 1).min(4 * m)),
        ..row
    };
    check(&row, 700, 0, 900);
}

#[test]
fn kimi_k2_grid() {
    let row = Row {
        name: "kimi_k2",
        build: |p, m| kimi_k2::build(p, m, 2),
        bubble: |at| (at.m % at.p == 0 && at.short_w()).then_some((at.p - 1) * (at.f + at.i)),
        peak: |p, m, r| (m % p == 0).then_some((2 * (p - 1 - r) + p + 2).min(2 * m)),
        ..NO_FORMULAS
    };
    check(&row, 700, 0, 900);
}

#[test]
fn looped_bfs_grid() {
    let row = Row {
        name: "looped_bfs",
        build: |p, m| looped_bfs::build(p, m, 2),
        bubble: |at| (at.m % at.p == 0).then_some((at.p - 1) * (at.f + at.i + at.w)),
        peak: |_, m, _| Some(2 * m),
        ..NO_FORMULAS
    };
    check(&row, 1000, 0, 8 * SIZES);
}

#[test]
fn interleaved_zb_grid() {
    let row = Row {
        name: "interleaved_zb",
        build: |p, m| interleaved_zb::build(p, m, 2),
        bubble: |at| {
            (at.m % at.p == 0 && at.m >= 2 * at.p && at.short_w()).then_some((at.p - 1) * (at.f + at.i - at.w))
        },
        peak: |p, m, _| (m % p == 0 && m >= 2 * p).then_some(2 * p),
        tapes: |p, m, r| (m % p == 0 && m >= 2 * p).then_some(2 * p - r),
        ..NO_FORMULAS
    };
    check(&row, 500, 0, 500);
}

#[test]
fn zb_h1_grid() {
    let row = Row {
        name: "zb_h1",
        build: zb_h1::build,
        bubble: |at| match at.m >= 2 * at.p {
            true => Some((at.p - 1) * (at.f + at.i - at.f.min(at.i).min(at.w))),
            false => (at.m >= at.p && at.short_w()).then_some((at.p - 1) * (at.f + at.i - at.w)),
        },
        // P at most on every rank.
        peak: |p, m, r| (m >= 2 * p && r == 0).then_some(p),
        tapes: |p, m, r| Some((p - r).min(m)),
        memory: |p, m, r| (m >= 2 * p).then_some(TAPE * (p - r) + WORK * r),
        ..NO_FORMULAS
    };
    check(&row, 3000, 0, 500);
}

#[test]
fn zb_h2_grid() {
    let row = Row {
        name: "zb_h2",
        build: zb_h2::build,
        idle: |at| (at.m >= 2 * at.p && at.short_w()).then_some(((at.p - 1) * (at.f + at.i - 2 * at.w)).max(0)),
        peak: |p, m, r| (m >= 2 * p && r == 0).then_some(2 * p - 1),
        tapes: |p, m, r| Some((2 * (p - r) - 1).min(m)),
        memory: |p, m, r| (m >= 2 * p).then_some(TAPE * (2 * (p - r) - 1) + WORK * 2 * r),
        ..NO_FORMULAS
    };
    check(&row, 0, 2000, 500);
}

#[test]
fn zb_v_grid() {
    let row = Row {
        name: "zb_v",
        build: zb_v::build,
        bubble: |at| (at.equal() && at.m >= 2 * at.p).then_some((at.p - 1) * at.f),
        idle: |at| (at.equal() && at.m >= 2 * at.p).then_some(0),
        peak: |p, m, _| (m >= 2 * p).then_some(2 * p),
        ..NO_FORMULAS
    };
    check(&row, 500, 500, 5000);
}

#[test]
fn v_half_grid() {
    let row = Row {
        name: "v_half",
        build: v_half::build,
        bubble: v_half_bubble,
        idle: v_half_bubble,
        peak: |p, m, _| (m >= 2 * p).then_some(2 * ((p + 2) / 2)),
        ..NO_FORMULAS
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
        build: v_min::build,
        bubble: v_min_bubble,
        idle: v_min_bubble,
        // The first ranks may hold one less.
        peak: |p, m, r| (m >= 2 * p && r == p - 1).then_some(2 * ((p + 4) / 3)),
        ..NO_FORMULAS
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
        build: dualpipe_v::build,
        refused: |p, m| p > 1 && m < 2 * p - 1,
        // A pair costs f + i + w here; `other_costs_of_a_pair` has the rest.
        bubble: |at| {
            (at.f == at.i && at.w <= at.f && at.m >= 2 * at.p).then_some((at.p - 1) * (at.f + 2 * at.i - at.w))
        },
        peak: |p, m, _| (m >= 2 * p).then_some(2 * p + 1),
        ..NO_FORMULAS
    };
    check(&row, 1000, 0, 5000);
}

/// GPipe: a rank idles between its first start and its last end by the work of the ranks after it.
#[test]
fn each_rank_of_gpipe_waits_for_those_after_it() {
    for p in 1..=16 {
        for m in 1..=64 {
            let checked = gpipe::build(p, m).unwrap();
            for (f, i, w) in COSTS {
                let run = run(&checked, At { p, m, f, i, w });
                for r in 0..p as usize {
                    let idle = run.last[r] - run.first[r] - run.busy[r];
                    assert_eq!(idle, (p - 1 - r as i64) * (f + i + w), "rank {r}, P = {p}, M = {m}");
                }
            }
        }
    }
}

/// V-Min holds as much as its formula says on its last rank, and nowhere more.
#[test]
fn v_min_holds_most_on_its_last_rank() {
    for p in 1..=16 {
        for m in 2 * p..=64 {
            let peaks = v_min::build(p, m).unwrap().plan.peaks;
            assert_eq!(peaks.iter().map(|peaks| i64::from(peaks.slots)).max(), Some(2 * ((p + 4) / 3)), "{p} {m}");
        }
    }
}

/// DualPipeV, where a pair of F and B costs less than its parts.
#[test]
fn other_costs_of_a_pair() {
    let mut compared = 0;
    for p in 1..=16 {
        for m in 2 * p..=64 {
            let checked = dualpipe_v::build(p, m).unwrap();
            for (f, i, w) in COSTS.into_iter().filter(|(f, i, w)| f == i && w <= f) {
                for pair in f.max(i + w)..=f + i + w {
                    let run = run_with(&checked, At { p, m, f, i, w }, Some(pair));
                    assert_eq!(run.bubble(), (p - 1) * (pair + i + w - 3 * w), "P = {p}, M = {m}, pair {pair}");
                    compared += 1;
                }
            }
        }
    }
    assert!(compared > 3000, "{compared}");
}

/// The near miss of ZB-H1: one forward more in flight has the same bubble, and one microbatch more on every rank.
#[test]
fn the_near_miss_of_zb_h1_holds_one_more() {
    let (p, m) = (4i64, 8i64);
    let rank = |r: i64| {
        let warm = (p - r).min(m);
        let mut cells: Vec<String> = (0..warm).map(|k| format!("{r}F{k}")).collect();
        for k in 0..m {
            cells.push(format!("{r}I{k}"));
            cells.extend((k + warm < m).then(|| format!("{r}F{}", k + warm)));
            cells.extend((k >= r).then(|| format!("{r}W{}", k - r)));
        }
        cells.extend((m - r..m).map(|k| format!("{r}W{k}")));
        cells.join(",")
    };
    let text: Vec<String> = (0..p).map(rank).collect();
    let (schedule, _) = qeffect_core::text::read_csv("near_miss", "near_miss.csv", &text.join("\n"));
    let checked = qeffect_core::check::check(schedule.unwrap(), &qeffect_core::check::Options::AT_START).unwrap();
    let at = At { p, m, f: 10, i: 12, w: 7 };
    assert_eq!(run(&checked, at).bubble(), run(&zb_h1::build(p, m).unwrap(), at).bubble());
    for r in 0..p {
        assert_eq!(checked.plan.peaks[r as usize].slots, 5);
        let memory = sim::peak_memory(&checked.schedule, Rank(r as u32), TAPE, WORK);
        assert_eq!(memory, TAPE * (p - r) + WORK * (r + 1), "rank {r}");
    }
}

/// Numbers that other programs give for the same schedules.
#[test]
fn golden_numbers_of_the_further_ones() {
    let at = |p, m| At { p, m, f: 1, i: 1, w: 1 };
    let rows = [
        (v_half::build(8, 24), at(8, 24), (161, 17, 17), 10),
        (v_min::build(6, 18), at(6, 18), (125, 17, 17), 6),
        (dualpipe_v::build(4, 8), at(4, 8), (54, 6, 6), 9),
        (zb_h2::build(8, 24), At { p: 8, m: 24, f: 4, i: 5, w: 3 }, (316, 28, 21), 15),
        (interleaved_zb::build(8, 16, 2), At { p: 8, m: 16, f: 4, i: 5, w: 3 }, (426, 42, 42), 16),
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
