//! What all views are drawn from agrees with the checker, the simulator and arithmetic.

mod common;

use common::{LOOPED, OVERLAPPED, ZB_H1, checked};
use qeffect_core::schedule::Costs;
use qeffect_core::sim::CostModel;
use qeffect_view::Scene;

fn costs(f: i64, i: i64, w: i64, latency: i64, overlap: Option<i64>) -> CostModel {
    CostModel { stages: vec![Costs { f, i, w }], latency, overlap }
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
