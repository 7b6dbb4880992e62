use std::borrow::Cow;

use super::*;
use crate::action::Item;
use crate::check::{Options, check};
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
    stages: 1,
    microbatches: 2,
    gradients: Gradients::Copied,
    allow_order_dependent: false,
};

fn codes(checked: Checked, facts: RunFacts) -> Vec<Code> {
    bind(checked, facts).map_or_else(|report| report.codes(), |_| Vec::new())
}

#[test]
fn every_misfit_has_its_code() {
    let ascending = || checked(false, Update::Microbatch, 1, &ASCENDING);
    let disordered = || checked(false, Update::Microbatch, 1, &DESCENDING_I);
    assert_eq!(codes(ascending(), FACTS), []);
    assert_eq!(
        codes(ascending(), RunFacts { stages: 4, microbatches: 3, ..FACTS }),
        [Code::StageMismatch, Code::BatchMismatch]
    );
    assert_eq!(codes(checked(false, Update::Step, 1, &ASCENDING), FACTS), [Code::RecipeTooStrict]);
    assert_eq!(codes(disordered(), FACTS), [Code::OrderDependent]);
    assert_eq!(codes(disordered(), RunFacts { allow_order_dependent: true, ..FACTS }), []);
    assert_eq!(codes(disordered(), RunFacts { update: Update::Step, ..FACTS }), []);
    assert_eq!(codes(checked(true, Update::Microbatch, 1, &FORWARDS), FACTS), [Code::StageMismatch]);
}

#[test]
fn direct_gradients_need_ascending_weight_gradients() {
    let facts = RunFacts { gradients: Gradients::Direct, ..FACTS };
    assert_eq!(codes(checked(false, Update::Microbatch, 1, &ASCENDING), facts), []);
    let disordered = checked(false, Update::Microbatch, 1, &DESCENDING_W);
    assert!(!disordered.order_dependent);
    assert_eq!(codes(disordered.clone(), FACTS), []);
    let report = bind(disordered, facts).unwrap_err();
    assert_eq!(report.codes(), [Code::GradientsUnsupported]);
    assert!(report.to_string().contains("W(0, 0) does not stand in ascending order"), "{report}");
    let facts = RunFacts { gradients: Gradients::Coalesced, ..FACTS };
    assert_eq!(codes(checked(false, Update::Microbatch, 1, &ASCENDING), facts), [Code::GradientsUnsupported]);
}

#[test]
fn evaluation_finds_stages_where_training_put_them() {
    let bound = bind(checked(false, Update::Microbatch, 2, &ASCENDING), RunFacts { stages: 2, ..FACTS }).unwrap();
    let evaluation = bound.evaluation(checked(true, Update::Microbatch, 2, &FORWARDS)).unwrap();
    assert_eq!(evaluation.facts().microbatches, 2);
    let elsewhere = bound.evaluation(checked(true, Update::Microbatch, 1, &FORWARDS)).unwrap_err();
    assert_eq!(elsewhere.codes(), [Code::StageMismatch]);
    let training = bound.evaluation(checked(false, Update::Microbatch, 2, &ASCENDING)).unwrap_err();
    assert_eq!(training.codes(), [Code::StageMismatch]);
}

#[test]
fn the_ledger_has_the_plan_s_slots() {
    let bound = bind(checked(false, Update::Microbatch, 2, &ASCENDING), RunFacts { stages: 2, ..FACTS }).unwrap();
    let mut ledger = bound.ledger(Rank(1), |_| (1, 1));
    assert_eq!(ledger.pool().len(), 2);
    assert!(ledger.version(Stage(1)).is_some() && ledger.version(Stage(0)).is_none());
    assert_eq!(ledger.begin_step(), Ok(0));
}
