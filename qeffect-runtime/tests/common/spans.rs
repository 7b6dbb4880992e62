//! What must hold of the spans of a measured step, on whatever device.

use std::collections::BTreeMap;

use qeffect_core::action::Kind;
use qeffect_core::ids::{Microbatch, Rank, Stage};
use qeffect_core::measured::Span;
use qeffect_core::plan::{Checked, Op};

/// What the schedule has the rank do.
fn program(checked: &Checked, rank: Rank) -> Vec<(Op, Stage, Microbatch)> {
    let starts = &checked.schedule.starts;
    let items = &checked.schedule.items[starts[rank.index()] as usize..starts[rank.index() + 1] as usize];
    let op = |kind| match kind {
        Kind::Forward => Some(Op::Forward),
        Kind::InputGrad => Some(Op::InputGrad),
        Kind::WeightGrad | Kind::WeightGradJoin => Some(Op::WeightGrad),
        Kind::FullBackward => Some(Op::FullBackward),
        _ => None,
    };
    items.iter().filter_map(|item| Some((op(item.kind)?, item.stage, item.microbatch))).collect()
}

/// What computes.
pub const COMPUTE: [Op; 4] = [Op::Forward, Op::InputGrad, Op::WeightGrad, Op::FullBackward];

/// Every action of the plan once, in its order, and nothing before what it needs.
pub fn one_clock(checked: &Checked, ranks: &[Vec<Span>]) {
    let mut forward = BTreeMap::new();
    let mut backward = BTreeMap::new();
    for (rank, spans) in ranks.iter().enumerate() {
        let done: Vec<_> = spans.iter().filter(|span| COMPUTE.contains(&span.op)).collect();
        let named: Vec<_> = done.iter().map(|span| (span.op, span.stage, span.microbatch)).collect();
        assert_eq!(named, program(checked, Rank(rank as u32)));
        assert!(done.iter().all(|span| span.start < span.end), "what computes takes time");
        assert!(spans.windows(2).all(|pair| pair[0].end <= pair[1].start), "a rank does one thing after the other");
        assert_eq!(spans.iter().filter(|span| span.op == Op::Commit).count(), 1);
        for span in done {
            let key = (span.stage.0, span.microbatch);
            match span.op {
                Op::Forward => drop(forward.insert(key, *span)),
                Op::InputGrad | Op::FullBackward => drop(backward.insert(key, *span)),
                _ => {}
            }
        }
    }
    // Whatever the rank, nothing starts before what it needs has ended.
    let last = checked.schedule.stages - 1;
    for ((stage, m), span) in &forward {
        let before = stage.checked_sub(1).map(|before| forward[&(before, *m)]);
        assert!(before.is_none_or(|before| before.end <= span.start));
        let back = backward[&(*stage, *m)];
        let needed = if *stage == last { *span } else { backward[&(stage + 1, *m)] };
        assert!(needed.end <= back.start);
    }
}
