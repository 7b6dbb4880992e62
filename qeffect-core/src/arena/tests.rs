//! The arena against a second model, which knows only sets: random legal steps pass, each single violation of one is
//! refused with its code, and a refusal changes nothing.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

const MICROBATCHES: u32 = 3;

fn declared(param: usize, places: Places) -> Declared {
    Declared { name: format!("p{param}"), dtype: Dtype::F32, rows: 2, cols: 3, places }
}

fn at(buffer: u64) -> Destination {
    Destination { device: 7, buffer, offset: 0, dtype: Dtype::F32, rows: 2, cols: 3 }
}

/// Destinations in one allocation, side by side.
fn side_by_side(index: u64) -> Destination {
    Destination { offset: 24 * index, ..at(0) }
}

fn arena(places: &[Places]) -> GradArena {
    let params = places.iter().enumerate().map(|(param, places)| declared(param, *places));
    let mut arena = GradArena::new(7, MICROBATCHES, params);
    let mut next = 0;
    for (param, places) in places.iter().enumerate() {
        let count = if *places == Places::One { 1 } else { MICROBATCHES };
        for place in 0..count {
            assert_eq!(arena.state(param), Some(State::Unbound));
            arena.bind(param, place, side_by_side(next)).unwrap();
            next += 1;
        }
        assert_eq!(arena.state(param), Some(State::Bound));
    }
    assert_eq!(arena.bytes(), 24 * next);
    arena
}

/// Refused with this code, and nothing changed.
fn refused<T: core::fmt::Debug>(
    arena: &mut GradArena,
    code: Code,
    operation: impl FnOnce(&mut GradArena) -> Result<T, ArenaError>,
) {
    let before = arena.clone();
    let error = operation(arena).unwrap_err();
    assert_eq!(error.code, code, "{error}");
    assert!(error.to_string().ends_with(&format!("[{code}]")));
    assert_eq!(*arena, before, "{error}");
}

fn write(arena: &mut GradArena, param: usize, microbatch: u32) {
    let write = arena.begin(param, microbatch).unwrap();
    let destination = *arena.destination(param, microbatch).unwrap();
    arena.finish(write, &destination).unwrap();
}

#[test]
fn a_destination_is_bound_once_and_shared_with_nothing() {
    let mut arena = GradArena::new(7, MICROBATCHES, [Places::One, Places::PerMicrobatch].map(|p| declared(0, p)));
    arena.bind(0, 0, at(1)).unwrap();
    refused(&mut arena, Code::ArenaMismatch, |arena| arena.bind(0, 0, at(2))); // it would move
    refused(&mut arena, Code::ArenaMismatch, |arena| arena.bind(0, 1, at(2))); // no such place
    refused(&mut arena, Code::ArenaMismatch, |arena| arena.bind(2, 0, at(2))); // no such parameter
    refused(&mut arena, Code::ArenaAliased, |arena| arena.bind(1, 0, at(1)));
    for offset in [4, 20] {
        refused(&mut arena, Code::ArenaAliased, |arena| arena.bind(1, 0, Destination { offset, ..at(1) }));
    }
    for wrong in [
        Destination { dtype: Dtype::Bf16, ..at(2) },
        Destination { rows: 3, cols: 2, ..at(2) }, // as many bytes
        Destination { device: 8, ..at(2) },
    ] {
        refused(&mut arena, Code::ArenaMismatch, |arena| arena.bind(1, 0, wrong));
    }
    refused(&mut arena, Code::ArenaMismatch, |arena| arena.begin(1, 0)); // unbound
    arena.bind(1, 0, Destination { offset: 24, ..at(1) }).unwrap();
    assert_eq!((arena.state(0), arena.state(1)), (Some(State::Bound), Some(State::Unbound)));
}

// case B13: the write that comes first overwrites, every other one adds.
#[test]
fn the_first_executed_write_initialises_whichever_it_is() {
    for order in [[0, 1, 2], [2, 0, 1], [1, 2, 0]] {
        let mut arena = arena(&[Places::One]);
        // Allowed in another order than executed: what counts is the execution.
        let mut writes: Vec<Option<Write>> = (0..3).map(|m| Some(arena.begin(0, m).unwrap())).collect();
        for (nth, m) in order.into_iter().enumerate() {
            let write = writes[m].take().unwrap();
            assert_eq!(arena.initialises(&write), nth == 0);
            arena.finish(write, &side_by_side(0)).unwrap();
            assert_eq!(arena.state(0), Some(State::Written(nth as u32 + 1)));
        }
        arena.complete(0).unwrap();
        assert_eq!((arena.state(0), arena.all_final()), (Some(State::Final), Ok(())));
    }
    let mut slots = arena(&[Places::PerMicrobatch]);
    for m in [2, 0, 1] {
        let write = slots.begin(0, m).unwrap();
        assert!(slots.initialises(&write), "every slot is written once");
        slots.finish(write, &side_by_side(u64::from(m))).unwrap();
    }
}

#[test]
fn a_write_that_went_elsewhere_leaves_the_gradient_incomplete() {
    let mut arena = arena(&[Places::PerMicrobatch]);
    for m in 0..3 {
        let write = arena.begin(0, m).unwrap();
        if m == 1 {
            refused(&mut arena, Code::ArenaMismatch, |arena| arena.finish(write, &side_by_side(2)));
        } else {
            arena.finish(write, &side_by_side(u64::from(m))).unwrap();
        }
    }
    refused(&mut arena, Code::ArenaMissing, |arena| arena.complete(0));
}

#[test]
fn an_aborted_write_poisons_the_step_and_no_other() {
    let mut arena = arena(&[Places::One, Places::One]);
    write(&mut arena, 1, 0);
    let (aborted, open) = (arena.begin(0, 0).unwrap(), arena.begin(0, 1).unwrap());
    arena.abort(aborted);
    assert!(arena.is_poisoned());
    refused(&mut arena, Code::ArenaPoisoned, |arena| arena.begin(1, 1));
    refused(&mut arena, Code::ArenaPoisoned, |arena| arena.complete(1));
    refused(&mut arena, Code::ArenaPoisoned, |arena| arena.all_final());
    refused(&mut arena, Code::ArenaPoisoned, |arena| arena.finish(open, &side_by_side(0)));
    let late = {
        arena.reset();
        arena.begin(0, 0).unwrap()
    };
    arena.reset();
    assert_eq!((arena.state(0), arena.state(1)), (Some(State::Bound), Some(State::Bound)), "destinations stay");
    refused(&mut arena, Code::ArenaPoisoned, |arena| arena.finish(late, &side_by_side(0)));
    let old = arena.begin(0, 0).unwrap();
    arena.reset();
    arena.abort(old);
    assert!(!arena.is_poisoned(), "a write of an earlier step says nothing about this one");
}

#[test]
fn a_replay_is_one_transition_to_what_the_long_way_leads_to() {
    let mut replayed = arena(&[Places::One, Places::PerMicrobatch]);
    let mut written = replayed.clone();
    for param in 0..2 {
        refused(&mut replayed, Code::ArenaMissing, |arena| arena.require_final(param));
        (0..MICROBATCHES).for_each(|m| write(&mut written, param, m));
        written.complete(param).unwrap();
    }
    replayed.replay().unwrap();
    assert_eq!(replayed, written);
    replayed.all_final().unwrap();
    refused(&mut replayed, Code::ArenaDuplicate, GradArena::replay);
    refused(&mut replayed, Code::ArenaDuplicate, |arena| arena.complete(0));
    refused(&mut replayed, Code::ArenaDuplicate, |arena| arena.begin(1, 2));
    // Half a step is none.
    replayed.reset();
    let open = replayed.begin(0, 1).unwrap();
    refused(&mut replayed, Code::ArenaDuplicate, GradArena::replay);
    replayed.abort(open);
    refused(&mut replayed, Code::ArenaPoisoned, GradArena::replay);
    refused(&mut replayed, Code::ArenaPoisoned, |arena| arena.require_final(1));
    replayed.reset();
    replayed.replay().unwrap();
    replayed.poison();
    refused(&mut replayed, Code::ArenaPoisoned, |arena| arena.require_final(0));
    let mut unbound = GradArena::new(7, MICROBATCHES, [declared(0, Places::One)]);
    refused(&mut unbound, Code::ArenaMismatch, GradArena::replay);
}

/// What a legal step is, as far as sets can say it.
#[derive(Default)]
struct Model {
    open: BTreeSet<(usize, u32)>,
    done: BTreeSet<(usize, u32)>,
    last: BTreeSet<usize>,
    poisoned: bool,
}

#[derive(Clone, Copy, Debug)]
enum Operation {
    Begin(usize, u32),
    Finish(usize, u32),
    Abort(usize, u32),
    Complete(usize),
    Replay,
    Poison,
    Reset,
}

impl Model {
    /// The code that refuses an operation, `None` if it is legal, and the step after it.
    fn judge(&mut self, operation: Operation) -> Option<Code> {
        let whole = |set: &BTreeSet<(usize, u32)>, param| set.iter().filter(|(p, _)| *p == param).count() == 3;
        match operation {
            Operation::Reset => *self = Model::default(),
            Operation::Abort(..) | Operation::Poison => self.poisoned = true,
            _ if self.poisoned => return Some(Code::ArenaPoisoned),
            Operation::Begin(param, m) => {
                let known = self.last.contains(&param) || self.open.contains(&(param, m));
                if known || self.done.contains(&(param, m)) {
                    return Some(Code::ArenaDuplicate);
                }
                self.open.insert((param, m));
            }
            Operation::Finish(param, m) => {
                assert!(self.open.remove(&(param, m)), "only writes that exist can be finished");
                self.done.insert((param, m));
            }
            Operation::Complete(param) if self.last.contains(&param) => return Some(Code::ArenaDuplicate),
            Operation::Complete(param) if !whole(&self.done, param) => return Some(Code::ArenaMissing),
            Operation::Complete(param) => assert!(self.last.insert(param)),
            Operation::Replay if !(self.open.is_empty() && self.done.is_empty()) => return Some(Code::ArenaDuplicate),
            Operation::Replay => {
                self.done = (0..3).flat_map(|param| (0..MICROBATCHES).map(move |m| (param, m))).collect();
                self.last = (0..3).collect();
            }
        }
        None
    }
}

fn operations() -> impl Strategy<Value = Vec<Operation>> {
    let (param, m) = (0..3usize, 0..MICROBATCHES);
    let pair = (param.clone(), m);
    let operation = prop_oneof![
        8 => pair.clone().prop_map(|(p, m)| Operation::Begin(p, m)),
        8 => pair.clone().prop_map(|(p, m)| Operation::Finish(p, m)),
        1 => pair.prop_map(|(p, m)| Operation::Abort(p, m)),
        3 => param.prop_map(Operation::Complete),
        1 => Just(Operation::Replay),
        1 => Just(Operation::Poison),
        3 => Just(Operation::Reset),
    ];
    proptest::collection::vec(operation, 0..80)
}

const KINDS: [Places; 3] = [Places::One, Places::PerMicrobatch, Places::One];

proptest! {
    #[test]
    fn any_sequence_is_judged_as_the_model_judges_it(sequence in operations()) {
        let mut arena = arena(&KINDS);
        let mut model = Model::default();
        let mut writes: std::collections::BTreeMap<(usize, u32), Write> = Default::default();
        for operation in sequence {
            if let Operation::Finish(param, m) | Operation::Abort(param, m) = operation
                && !writes.contains_key(&(param, m))
            {
                continue; // a write that was never allowed cannot be named
            }
            let before = arena.clone();
            let found = match operation {
                Operation::Begin(param, m) => arena.begin(param, m).map(|write| {
                    writes.insert((param, m), write);
                }),
                Operation::Finish(param, m) => {
                    let write = writes.remove(&(param, m)).unwrap();
                    let first = !model.done.iter().any(|(p, _)| *p == param);
                    prop_assert_eq!(arena.initialises(&write), first || KINDS[param] == Places::PerMicrobatch);
                    let destination = *arena.destination(param, m).unwrap();
                    arena.finish(write, &destination)
                }
                Operation::Abort(param, m) => {
                    arena.abort(writes.remove(&(param, m)).unwrap());
                    Ok(())
                }
                Operation::Complete(param) => arena.complete(param),
                Operation::Replay => arena.replay(),
                Operation::Poison => {
                    arena.poison();
                    Ok(())
                }
                Operation::Reset => {
                    arena.reset();
                    writes.clear();
                    Ok(())
                }
            };
            let code = model.judge(operation);
            prop_assert_eq!(found.as_ref().err().map(|error| error.code), code, "{:?}", operation);
            if code.is_some() {
                prop_assert_eq!(&arena, &before);
            }
            prop_assert_eq!(arena.all_final().is_ok(), model.last.len() == 3 && !model.poisoned);
            prop_assert_eq!(arena.is_poisoned(), model.poisoned);
            for param in 0..3 {
                let count = model.done.iter().filter(|(p, _)| *p == param).count() as u32;
                let state = match count {
                    _ if model.last.contains(&param) => State::Final,
                    0 => State::Bound,
                    count => State::Written(count),
                };
                prop_assert_eq!(arena.state(param), Some(state));
            }
        }
    }

    /// A whole legal step in any order; and that step with one operation dropped, repeated or misdirected.
    #[test]
    fn each_single_violation_of_a_legal_step_is_refused(
        order in Just((0..9u32).map(|i| (i as usize / 3, i % 3)).collect::<Vec<_>>()).prop_shuffle(),
        at in 0..9usize,
    ) {
        let run = |until: usize| {
            let mut arena = arena(&KINDS);
            order[..until].iter().for_each(|(param, m)| write(&mut arena, *param, *m));
            arena
        };
        let mut legal = run(9);
        (0..3).try_for_each(|param| legal.complete(param)).unwrap();
        prop_assert!(legal.all_final().is_ok());

        let (param, m) = order[at];
        let mut dropped = arena(&KINDS);
        order.iter().filter(|write| **write != (param, m)).for_each(|(param, m)| write(&mut dropped, *param, *m));
        refused(&mut dropped, Code::ArenaMissing, |arena| arena.complete(param));
        refused(&mut dropped, Code::ArenaMissing, |arena| arena.all_final());

        let mut repeated = run(at + 1);
        refused(&mut repeated, Code::ArenaDuplicate, |arena| arena.begin(param, m));
        refused(&mut legal, Code::ArenaDuplicate, |arena| arena.begin(param, m));

        let mut beyond = run(at);
        refused(&mut beyond, Code::ArenaMismatch, |arena| arena.begin(param, MICROBATCHES));
        refused(&mut beyond, Code::ArenaMismatch, |arena| arena.begin(3, m));
        let write = beyond.begin(param, m).unwrap();
        let elsewhere = Destination { buffer: 99, ..*beyond.destination(param, m).unwrap() };
        refused(&mut beyond, Code::ArenaMismatch, |arena| arena.finish(write, &elsewhere));

        let mut aborted = run(at);
        let write = aborted.begin(param, m).unwrap();
        aborted.abort(write);
        refused(&mut aborted, Code::ArenaPoisoned, |arena| arena.complete(param));
    }
}
