//! What all views are drawn from agrees with the checker, the simulator and arithmetic.

mod common;

use common::{LOOPED, OVERLAPPED, ZB_H1, checked};
use qeffect_core::schedule::Costs;
use qeffect_core::sim::CostModel;
use qeffect_view::Scene;

fn costs(f: i64, i: i64, w: i64, latency: i64, overlap: Option<i64>) -> CostModel {
    CostModel { latency, overlap, ..CostModel::uniform(Costs { f, i, w }) }
}

#[test]
fn numbers_of_a_known_schedule() {
    let scene = Scene::new(&checked(ZB_H1, &[4, 8]), &costs(10, 12, 7, 0, None));
    assert_eq!((scene.makespan, scene.bubble, scene.idle), (277, 45, 45));
    assert_eq!(scene.peaks.iter().map(|p| p.slots).collect::<Vec<_>>(), [4; 4]);
}

#[test]
fn bars_of_a_rank_never_run_at_once_and_fill_its_busy_time() {
    for (text, model) in
        [(ZB_H1, costs(4, 5, 3, 2, None)), (LOOPED, costs(4, 5, 3, 0, None)), (OVERLAPPED, costs(4, 5, 3, 1, None))]
    {
        let scene = Scene::new(&checked(text, &[3, 7]), &model);
        for rank in 0..scene.ranks {
            let bars = scene.rank(rank);
            let plain: Vec<_> = bars.iter().filter(|b| b.overlap.is_none()).collect();
            assert!(plain.windows(2).all(|w| w[0].end <= w[1].start));
            let mut blocks: Vec<(i64, i64)> = bars.iter().filter_map(|b| b.overlap.map(|o| (o.start, o.end))).collect();
            blocks.dedup();
            let busy: i64 =
                plain.iter().map(|b| b.end - b.start).sum::<i64>() + blocks.iter().map(|b| b.1 - b.0).sum::<i64>();
            assert_eq!(busy, scene.busy[rank as usize]);
        }
    }
}

#[test]
fn nothing_starts_before_what_it_needs() {
    for text in [ZB_H1, LOOPED] {
        let scene = Scene::new(&checked(text, &[4, 8]), &costs(4, 5, 3, 2, None));
        for bar in &scene.bars {
            for need in &bar.needs {
                let need = &scene.bars[*need as usize];
                let latency = if need.rank == bar.rank { 0 } else { 2 };
                assert!(need.end + latency <= bar.start, "{} before {}", bar.key(), need.key());
            }
        }
        // F(0, m) needs nothing, everything else something.
        assert!(scene.bars.iter().all(|b| b.needs.is_empty() == (b.letter() == 'F' && b.item.stage.0 == 0)));
    }
}

#[test]
fn branches_share_the_span_of_their_overlap() {
    let scene = Scene::new(&checked(OVERLAPPED, &[2, 4]), &costs(4, 4, 2, 0, Some(6)));
    let inside: Vec<_> = scene.rank(0).iter().filter(|b| b.overlap.is_some()).collect();
    let spans: Vec<_> =
        inside.iter().take(3).map(|b| (b.letter(), b.overlap.unwrap().number, b.end - b.start)).collect();
    assert_eq!(spans, [('F', 0, 6), ('I', 1, 4), ('W', 1, 2)]);
    assert_eq!(inside[0].start, inside[1].start);
    assert_eq!(inside[0].end, inside[2].end);
}

#[test]
fn live_counts_reach_the_peaks_of_the_plan() {
    for text in [ZB_H1, LOOPED, OVERLAPPED] {
        let scene = Scene::new(&checked(text, &[4, 8]), &CostModel::unit());
        for rank in 0..scene.ranks {
            let most =
                |value: fn(&qeffect_core::plan::Peaks) -> u32| scene.rank(rank).iter().map(|b| value(&b.live)).max();
            let peaks = scene.peaks[rank as usize];
            assert_eq!(
                (most(|p| p.slots), most(|p| p.tapes), most(|p| p.works)),
                (Some(peaks.slots), Some(peaks.tapes), Some(peaks.works))
            );
            assert!(scene.rank(rank).iter().all(|b| b.slot.is_some_and(|slot| slot < peaks.slots)));
        }
    }
}

#[test]
fn the_critical_path_has_no_gap() {
    for (text, latency) in [(ZB_H1, 0), (ZB_H1, 3), (LOOPED, 0), (LOOPED, 2), (OVERLAPPED, 0), (OVERLAPPED, 1)] {
        let scene = Scene::new(&checked(text, &[4, 8]), &costs(4, 5, 3, latency, None));
        let path: Vec<_> = scene.critical_path().iter().map(|at| &scene.bars[*at as usize]).collect();
        let span = |b: &qeffect_view::Bar| b.overlap.map_or((b.start, b.end), |o| (o.start, o.end));
        assert_eq!(span(path[0]).0, 0);
        assert_eq!(span(path[path.len() - 1]).1, scene.makespan);
        for pair in path.windows(2) {
            let gap = span(pair[1]).0 - span(pair[0]).1;
            assert_eq!(
                gap,
                if pair[0].rank == pair[1].rank { 0 } else { latency },
                "{} to {}",
                pair[0].key(),
                pair[1].key()
            );
        }
    }
}

/// Messages that take longer on the wire than an action computes queue behind each other.
#[test]
fn messages_of_an_edge_follow_each_other() {
    const GPIPE: &str = "gpipe<P, M>; ranks: P; microbatches: M; stages: P; place: |s| s;
        rank |r| { for m in 0..M { F(r, m); } for m in 0..M { B(r, m); } }";
    let model = CostModel { transfer: vec![3], ..costs(1, 1, 1, 2, None) };
    let scene = Scene::new(&checked(GPIPE, &[2, 4]), &model);
    let at = |key: &str| scene.bars.iter().find(|bar| bar.key() == key).unwrap();
    // F(0, m) ends at m + 1; the wire takes one message after the other, from 1 on, 3 each, and 2 more.
    assert_eq!([0, 1, 2, 3].map(|m| at(&format!("0F{m}")).sent), [1, 4, 7, 10]);
    assert_eq!([0, 1, 2, 3].map(|m| at(&format!("1F{m}")).start), [6, 9, 12, 15]);
    // B of the last stage: 16 to 18, 20, 22, 24; gradients on the wire from 18, 21, 24, 27; B(0, 3) at 32.
    assert_eq!([0, 1, 2, 3].map(|m| at(&format!("0B{m}")).start), [23, 26, 29, 32]);
    assert_eq!(scene.makespan, 34);
    let path: Vec<String> = scene.critical_path().iter().map(|at| scene.bars[*at as usize].key()).collect();
    assert_eq!(path, ["0F0", "1F3", "1B0", "0B3"], "what queued is not what held up the end");
}

#[test]
fn an_overlap_costs_what_its_pair_of_stages_costs() {
    use qeffect_core::ids::Stage;
    let checked = checked(OVERLAPPED, &[2, 4]);
    let mut model = costs(4, 4, 2, 0, Some(7));
    let lengths = |model: &CostModel| {
        let scene = Scene::new(&checked, model);
        let overlaps = scene
            .bars
            .iter()
            .filter(|bar| bar.letter() == 'F')
            .filter_map(|bar| Some((bar.item.stage.0, bar.overlap?)));
        overlaps.map(|(stage, branch)| (stage, branch.end - branch.start)).collect::<Vec<_>>()
    };
    assert!(lengths(&model).iter().all(|(_, length)| *length == 7));
    model.pairs.insert((Stage(0), Stage(0)), 9);
    assert!(lengths(&model).iter().all(|(stage, length)| *length == if *stage == 0 { 9 } else { 7 }));
    assert!(lengths(&model).iter().any(|(stage, _)| *stage == 0));
}

/// The costs of a simulated trace are those that it was simulated with, in nanoseconds.
#[test]
fn a_trace_is_a_profile() {
    use qeffect_view::trace;
    let stages: Vec<Costs> = (1..=8).map(|s| Costs { f: s, i: s + 1, w: 2 * s }).collect();
    let model = CostModel { stages: stages.clone(), ..CostModel::unit() };
    let text = trace::render(&[&Scene::new(&checked(LOOPED, &[4, 8]), &model)]);
    let wanted: Vec<Costs> = stages.iter().map(|c| Costs { f: 1000 * c.f, i: 1000 * c.i, w: 1000 * c.w }).collect();
    let sum = |all: &[Costs]| all.iter().map(|c| (c.f, c.i + c.w)).collect::<Vec<_>>();
    assert_eq!(sum(&trace::profile(&text).unwrap()), sum(&wanted));
    let split =
        trace::render(&[&Scene::new(&checked(ZB_H1, &[4, 8]), &CostModel { stages: stages[..4].to_vec(), ..model })]);
    assert_eq!(trace::profile(&split).unwrap(), wanted[..4]);
    for (text, message) in [
        ("{", "EOF"),
        ("{\"traceEvents\": []}", "no action"),
        (
            r#"{"traceEvents": [{"ph": "X", "name": "0F0", "ts": 0, "dur": 1}, {"ph": "X", "name": "2B0", "ts": 0, "dur": 1}]}"#,
            "stage 0 has no",
        ),
        (r#"{"traceEvents": [{"ph": "X", "name": "0F0", "ts": 0, "dur": -1}]}"#, "-1"),
    ] {
        let error = trace::profile(text).unwrap_err();
        assert!(error.contains(message), "{error}");
    }
}

/// A measured step is named as a simulated one is; messages have an arrow from the rank that sends to the one that waits.
#[test]
fn a_measured_step_is_a_trace() {
    use qeffect_core::ids::{Microbatch, Stage};
    use qeffect_core::measured::Span;
    use qeffect_core::plan::Op;
    use qeffect_view::trace;
    let span = |op, stage, m, start, end| Span {
        op,
        stage: Stage(stage),
        microbatch: Microbatch(m),
        start: std::time::Duration::from_nanos(start),
        end: std::time::Duration::from_nanos(end),
    };
    let ranks = [
        vec![
            span(Op::Refresh, 0, 0, 0, 90),
            span(Op::Forward, 0, 7, 100, 1_600),
            span(Op::SendForward, 0, 7, 1_700, 1_800),
            span(Op::WaitBackward, 0, 7, 1_900, 9_000),
            span(Op::FullBackward, 0, 7, 9_000, 9_501),
        ],
        vec![
            span(Op::WaitForward, 1, 7, 50, 2_000),
            span(Op::Forward, 1, 7, 2_000, 4_500),
            span(Op::InputGrad, 1, 7, 4_500, 8_500),
            span(Op::SendBackward, 1, 7, 8_500, 8_600),
            span(Op::WeightGrad, 1, 7, 8_600, 8_601),
            span(Op::Commit, 0, 0, 9_000, 9_999),
        ],
    ];
    let text = trace::measured("a step", &ranks);
    let costs = [Costs { f: 1_500, i: 251, w: 250 }, Costs { f: 2_500, i: 4_000, w: 1 }];
    assert_eq!(trace::profile(&text).unwrap(), costs);
    let value: serde_json::Value = serde_json::from_str(&text).unwrap();
    let events = value["traceEvents"].as_array().unwrap();
    let of = |phase: &str| events.iter().filter(|event| event["ph"] == phase).collect::<Vec<_>>();
    let names: Vec<&str> = of("X").iter().map(|event| event["name"].as_str().unwrap()).collect();
    let wanted = "refresh 0|0F7|send 0F7|wait 1I7|0B7|wait 0F7|1F7|1I7|send 1I7|1W7|commit";
    assert_eq!(names.join("|"), wanted);
    let ends =
        |phase: &str| of(phase).iter().map(|e| (e["id"].to_string(), e["tid"].as_u64().unwrap())).collect::<Vec<_>>();
    assert_eq!(ends("s"), [("\"0F7\"".to_owned(), 0), ("\"1I7\"".to_owned(), 1)]);
    assert_eq!(ends("f"), [("\"0F7\"".to_owned(), 1), ("\"1I7\"".to_owned(), 0)]);
    let times = |event: &serde_json::Value| (event["ts"].as_f64().unwrap(), event["dur"].as_f64().unwrap());
    assert_eq!(times(of("X")[1]), (0.1, 1.5), "microseconds");
}
