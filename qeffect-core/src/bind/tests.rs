use std::borrow::Cow;

use super::*;
use crate::action::Item;
use crate::check::{Options, check};
use crate::effects::{Access, Cell, CellEffect};
use crate::schedule::{HeaderOrigins, Transport};

fn checked(eval: bool, update: Update, ranks: u32, order: &[(Kind, u32)]) -> Checked {
    let items: Vec<Item> =
        (0..ranks).flat_map(|r| order.iter().map(move |(kind, m)| Item::new(*kind, r, *m, 0))).collect();
    let starts = (0..=ranks).map(|r| r * order.len() as u32).collect();
    let schedule = Schedule {
        name: "test".into(),
        params: Cow::Borrowed(&[]),
        ranks,
        stages: ranks,
        microbatches: 2,
        placement: (0..ranks).map(Rank).collect(),
        items: items.into(),
        starts,
        bounds: Cow::Borrowed(&[]),
        expects: Cow::Borrowed(&[]),
        transport: Transport::Edge,
        update,
        eval,
        coalesce: 1,
        bytes: None,
        origins: HeaderOrigins::NONE,
    };
    check(schedule, &Options::AT_START).unwrap()
}

const ASCENDING: [(Kind, u32); 4] =
    [(Kind::Forward, 0), (Kind::Forward, 1), (Kind::FullBackward, 0), (Kind::FullBackward, 1)];
const DESCENDING_I: [(Kind, u32); 4] =
    [(Kind::Forward, 0), (Kind::Forward, 1), (Kind::FullBackward, 1), (Kind::FullBackward, 0)];
const DESCENDING_W: [(Kind, u32); 6] = [
    (Kind::Forward, 0),
    (Kind::Forward, 1),
    (Kind::InputGrad, 0),
    (Kind::InputGrad, 1),
    (Kind::WeightGrad, 1),
    (Kind::WeightGrad, 0),
];
const FORWARDS: [(Kind, u32); 2] = [(Kind::Forward, 0), (Kind::Forward, 1)];

const FACTS: RunFacts = RunFacts {
    update: Update::Microbatch,
    microbatches: 2,
    gradients: Gradients::Copied,
    allow_order_dependent: false,
};

fn scaled(stages: usize) -> Vec<StageEffects> {
    vec![StageEffects::SCALED; stages]
}

fn codes(checked: Checked, facts: RunFacts) -> Vec<Code> {
    codes_of(checked, facts, scaled(1))
}

fn codes_of(checked: Checked, facts: RunFacts, stages: Vec<StageEffects>) -> Vec<Code> {
    bind(checked, facts, stages).map_or_else(|report| report.codes(), |_| Vec::new())
}

#[test]
fn every_misfit_has_its_code() {
    let ascending = || checked(false, Update::Microbatch, 1, &ASCENDING);
    let disordered = || checked(false, Update::Microbatch, 1, &DESCENDING_I);
    assert_eq!(codes(ascending(), FACTS), []);
    assert_eq!(
        codes_of(ascending(), RunFacts { microbatches: 3, ..FACTS }, scaled(4)),
        [Code::StageMismatch, Code::BatchMismatch]
    );
    assert_eq!(codes(checked(false, Update::Step, 1, &ASCENDING), FACTS), [Code::RecipeTooStrict]);
    assert_eq!(codes(disordered(), FACTS), [Code::OrderDependent]);
    assert_eq!(codes(disordered(), RunFacts { allow_order_dependent: true, ..FACTS }), []);
    assert_eq!(codes(disordered(), RunFacts { update: Update::Step, ..FACTS }), []);
    assert_eq!(codes(checked(true, Update::Microbatch, 1, &FORWARDS), FACTS), [Code::StageMismatch]);
}

/// Every declaration that can be made for one cell, against what the schedule has F and I do: written out by hand.
#[test]
fn declared_effects_are_those_of_the_schedule() {
    use Access::{Fold, Read, Write};
    const ACCESSES: [Option<Access>; 4] = [None, Some(Read), Some(Fold), Some(Write)];
    let fits = |update, cell, owned, access| {
        let mut stage = StageEffects::NONE;
        *match cell {
            Cell::Forward => &mut stage.forward,
            Cell::Backward => &mut stage.backward,
            _ => &mut stage.cache,
        } = CellEffect { owned, access };
        let found =
            codes_of(checked(false, Update::Microbatch, 1, &ASCENDING), RunFacts { update, ..FACTS }, vec![stage]);
        assert!(found.is_empty() || found == [Code::EffectMismatch], "{found:?}");
        found.is_empty()
    };
    for update in [Update::None, Update::Step, Update::Microbatch] {
        for cell in [Cell::Forward, Cell::Backward] {
            // What a stage does not have, its ops may declare: linear layers are written for every recipe.
            assert_eq!(ACCESSES.map(|access| fits(update, cell, false, access)), [true; 4]);
            let folds = update != Update::Microbatch;
            assert_eq!(ACCESSES.map(|access| fits(update, cell, true, access)), [false, false, folds, true]);
        }
        assert_eq!(ACCESSES.map(|access| fits(update, Cell::Cache, false, access)), [true, true, false, false]);
        assert_eq!(ACCESSES.map(|access| fits(update, Cell::Cache, true, access)), [false, true, false, false]);
    }
}

#[test]
fn only_stages_whose_state_rolls_in_order_ask_for_one() {
    let disordered = |update| checked(false, update, 2, &DESCENDING_I);
    let forward_only = StageEffects { backward: CellEffect::NOTHING, ..StageEffects::SCALED };
    for (stages, refused) in [
        ([StageEffects::NONE, StageEffects::NONE], false),
        // F's ascend: only the backward state depends on the order of I's.
        ([StageEffects::NONE, forward_only], false),
        ([StageEffects::NONE, StageEffects::SCALED], true),
    ] {
        let report = bind(disordered(Update::Microbatch), FACTS, stages.to_vec());
        assert_eq!(report.is_err(), refused);
        if let Err(report) = report {
            assert_eq!(report.codes(), [Code::OrderDependent]);
            assert!(report.to_string().contains("of stage 1 is rolled by its I's"), "{report}");
        }
    }
    // A model without state asks nothing of the header either.
    let bound = bind(disordered(Update::None), FACTS, vec![StageEffects::NONE; 2]).unwrap();
    assert_eq!((bound.rolls(Stage(0)), bound.rolls(Stage(1))), ((0, 0), (0, 0)));
    let bound = bind(checked(false, Update::Microbatch, 2, &ASCENDING), FACTS, vec![StageEffects::NONE, forward_only]);
    let bound = bound.unwrap();
    assert_eq!((bound.rolls(Stage(0)), bound.rolls(Stage(1))), ((0, 0), (1, 0)));
}

#[test]
fn direct_gradients_need_ascending_weight_gradients() {
    let facts = RunFacts { gradients: Gradients::Direct, ..FACTS };
    assert_eq!(codes(checked(false, Update::Microbatch, 1, &ASCENDING), facts), []);
    let disordered = checked(false, Update::Microbatch, 1, &DESCENDING_W);
    assert!(!disordered.order_dependent);
    assert_eq!(codes(disordered.clone(), FACTS), []);
    let report = bind(disordered, facts, scaled(1)).unwrap_err();
    assert_eq!(report.codes(), [Code::GradientsUnsupported]);
    assert!(report.to_string().contains("W(0, 0) does not stand in ascending order"), "{report}");
    let facts = RunFacts { gradients: Gradients::Coalesced, ..FACTS };
    assert_eq!(codes(checked(false, Update::Microbatch, 1, &ASCENDING), facts), [Code::GradientsUnsupported]);
}

/// One rank, four microbatches; I's and W's in these orders.
fn four(inputs: [u32; 4], weights: [u32; 4]) -> Checked {
    let mut order: Vec<(Kind, u32)> = (0..4).map(|m| (Kind::Forward, m)).collect();
    order.extend(inputs.map(|m| (Kind::InputGrad, m)));
    order.extend(weights.map(|m| (Kind::WeightGrad, m)));
    let mut schedule = checked(false, Update::Microbatch, 1, &ASCENDING).schedule;
    schedule.microbatches = 4;
    schedule.items = order.iter().map(|(kind, m)| Item::new(*kind, 0, *m, 0)).collect();
    schedule.starts = Cow::Owned(vec![0, order.len() as u32]);
    check(schedule, &Options::AT_START).unwrap()
}

#[test]
fn coalesced_gradients_need_groups_in_ascending_order() {
    let facts = RunFacts { microbatches: 4, gradients: Gradients::Coalesced, ..FACTS };
    // Inside a group any order will do: its members run as one.
    for weights in [[0, 1, 2, 3], [1, 0, 3, 2]] {
        let checked = four([0, 1, 2, 3], weights).coalesced(2).unwrap();
        let bound = bind(checked.clone(), facts, scaled(1)).unwrap();
        assert!(bound.identity().ends_with("in groups 0-1 2-3"), "{}", bound.identity());
        let copied = RunFacts { gradients: Gradients::Copied, ..facts };
        assert_eq!(codes(checked, copied), [Code::GradientsUnsupported]);
    }
    let report = bind(four([0, 1, 2, 3], [2, 3, 0, 1]).coalesced(2).unwrap(), facts, scaled(1)).unwrap_err();
    assert_eq!(report.codes(), [Code::GradientsUnsupported]);
    assert!(report.to_string().contains("the group of W(0, 0)"), "{report}");
}

#[test]
fn the_partition_is_part_of_the_identity_and_the_order_of_weight_gradients_is_not() {
    let identity = |weights, gradients, n| {
        let checked = four([0, 1, 2, 3], weights).coalesced(n).unwrap();
        bind(checked, RunFacts { microbatches: 4, gradients, ..FACTS }, scaled(1)).unwrap().identity()
    };
    let copied = identity([0, 1, 2, 3], Gradients::Copied, 1);
    assert_eq!(copied, identity([3, 1, 2, 0], Gradients::Copied, 1));
    assert_eq!(copied, identity([0, 1, 2, 3], Gradients::Direct, 1));
    let three = identity([0, 1, 2, 3], Gradients::Coalesced, 3);
    assert!(three.ends_with("in groups 0-2 3-3"), "a last group may be short: {three}");
    assert_eq!(three, identity([2, 1, 0, 3], Gradients::Coalesced, 3));
    for other in [copied, identity([0, 1, 2, 3], Gradients::Coalesced, 2)] {
        assert_ne!(three, other);
    }
}

#[test]
fn coalescing_after_the_build_is_judged_again() {
    let single = four([0, 1, 2, 3], [0, 1, 2, 3]);
    assert_eq!(single.clone().coalesced(0).unwrap_err().codes(), [Code::Header]);
    assert_eq!(single.clone().coalesced(1).unwrap(), single);
    let mut bounded = single.schedule.clone();
    (bounded.microbatches, bounded.starts) = (2, Cow::Owned(vec![0, 4]));
    bounded.items = [(Kind::Forward, 0), (Kind::FullBackward, 0), (Kind::Forward, 1), (Kind::FullBackward, 1)]
        .map(|(kind, m)| Item::new(kind, 0, m, 0))
        .to_vec()
        .into();
    let bounds = crate::schedule::Bounds { slots: Some(1), tapes: Some(1), works: Some(1) };
    bounded.bounds = Cow::Owned(vec![bounds]);
    let bounded = check(bounded, &Options::AT_START).unwrap();
    let pair = bounded.coalesced(2).unwrap();
    assert_eq!((pair.plan.peaks[0].slots, pair.plan.peaks[0].works, pair.plan.peaks[0].tapes), (2, 2, 1));
    assert_eq!(
        pair.notes[..],
        [
            "rank 0 holds 2 live microbatches at once, 1 before weight gradients were coalesced by 2",
            "rank 0 holds 2 pending works at once, 1 before weight gradients were coalesced by 2",
        ]
    );
    assert_eq!(pair.schedule.bounds[0].tapes, Some(1), "tapes end at I, so their bound stands");
}

#[test]
fn evaluation_finds_stages_where_training_put_them() {
    let bound = bind(checked(false, Update::Microbatch, 2, &ASCENDING), FACTS, scaled(2)).unwrap();
    let evaluation = bound.evaluation(checked(true, Update::Microbatch, 2, &FORWARDS)).unwrap();
    assert_eq!(evaluation.facts().microbatches, 2);
    let elsewhere = bound.evaluation(checked(true, Update::Microbatch, 1, &FORWARDS)).unwrap_err();
    assert_eq!(elsewhere.codes(), [Code::StageMismatch]);
    let training = bound.evaluation(checked(false, Update::Microbatch, 2, &ASCENDING)).unwrap_err();
    assert_eq!(training.codes(), [Code::StageMismatch]);
}

#[test]
fn the_ledger_has_the_plan_s_slots() {
    let bound = bind(checked(false, Update::Microbatch, 2, &ASCENDING), FACTS, scaled(2)).unwrap();
    let mut ledger = bound.ledger(Rank(1));
    assert_eq!(ledger.pool().len(), 2);
    assert!(ledger.version(Stage(1)).unwrap().is_some() && ledger.version(Stage(0)).unwrap().is_none());
    assert_eq!(ledger.begin_step(), Ok(0));
}

#[test]
fn a_choice_of_placement_is_read_as_it_is_written() {
    for text in ["copied", "direct", "coalesced", "coalesced:2", "coalesced:17"] {
        assert_eq!(text.parse::<GradientChoice>().unwrap().to_string(), text);
    }
    for (text, reason) in [
        ("shared", "no placement"),
        ("direct:2", "has no groups"),
        ("coalesced:1", "2 microbatches or more"),
        ("coalesced:0", "2 microbatches or more"),
        ("coalesced:", "2 microbatches or more"),
        ("", "no placement"),
    ] {
        let error = text.parse::<GradientChoice>().unwrap_err();
        assert!(error.contains(reason), "{text}: {error}");
    }
    let apply = |text: &str, n: u32| {
        let checked = four([0, 1, 2, 3], [0, 1, 2, 3]).coalesced(n).unwrap();
        text.parse::<GradientChoice>().unwrap().apply(checked).unwrap().schedule.coalesce
    };
    assert_eq!([apply("copied", 1), apply("direct", 1), apply("coalesced", 1), apply("coalesced:2", 1)], [1, 1, 4, 2]);
    assert_eq!(apply("coalesced", 3), 3, "the schedule's own groups");
}
