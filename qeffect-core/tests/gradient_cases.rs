//! Faults that users of other systems have met with gradient buffers, against the arena. The ids are those of
//! `docs/cases.md`.
#![allow(missing_docs)]

use qeffect_core::arena::{ArenaError, Declared, Destination, GradArena, Places, State};
use qeffect_core::code::Code;
use qeffect_core::dtype::Dtype;

fn declared(name: &str, rows: u64, cols: u64, places: Places) -> Declared {
    Declared { name: name.to_owned(), dtype: Dtype::F32, rows, cols, places }
}

fn at(buffer: u64, rows: u64, cols: u64) -> Destination {
    Destination { device: 0, buffer, offset: 0, dtype: Dtype::F32, rows, cols }
}

// case B19: a sum keeps no buffer of whoever made a contribution. The first executed write overwrites the destination
// and the others add to it, each once: 1 + 2 + 4 is 7 in every order, with what the step before left in it.
#[test]
fn b19_contributions_are_added_into_a_place_of_the_arena() {
    let mut arena = GradArena::new(0, 3, [declared("w", 1, 1, Places::One)]);
    arena.bind(0, 0, at(0, 1, 1)).unwrap();
    let mut memory = 99.0;
    for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0]] {
        for microbatch in order {
            // What a replay leaves in the buffer that it always writes.
            let output = f64::from(1 << microbatch);
            let write = arena.begin(0, microbatch).unwrap();
            memory = if arena.initialises(&write) { output } else { memory + output };
            let destination = *arena.destination(0, microbatch).unwrap();
            arena.finish(write, &destination).unwrap();
        }
        arena.complete(0).unwrap();
        assert_eq!((memory, arena.state(0)), (7.0, Some(State::Final)), "{order:?}");
        let again: Result<_, ArenaError> = arena.begin(0, 1);
        assert_eq!(again.unwrap_err().code, Code::ArenaDuplicate, "added twice");
        arena.reset();
    }
}

// case B20: the buffers were allocated anew after the addresses had been taken down. A place keeps its destination for the
// whole run; cleared in place it is the same one.
#[test]
fn b20_gradients_do_not_move() {
    let mut arena = GradArena::new(0, 2, [declared("w", 32, 16, Places::One)]);
    let (captured, fresh) = (at(0, 32, 16), at(1, 32, 16));
    arena.bind(0, 0, captured).unwrap();
    let moved = arena.bind(0, 0, fresh).unwrap_err();
    assert_eq!(moved.code, Code::ArenaMismatch, "{moved}");
    arena.reset();
    assert_eq!(arena.destination(0, 1), Some(&captured), "what the optimizer reads is what was taken down");
    let write = arena.begin(0, 0).unwrap();
    let elsewhere = arena.finish(write, &fresh).unwrap_err();
    assert_eq!(elsewhere.code, Code::ArenaMismatch);
    assert!(elsewhere.message.contains("buffer 0") && elsewhere.message.contains("buffer 1"), "{elsewhere}");
    let write = arena.begin(0, 1).unwrap();
    arena.finish(write, &captured).unwrap();
    assert_eq!(arena.complete(0).unwrap_err().code, Code::ArenaMissing, "the write that went elsewhere does not count");
}

// case B26: two parameters with as many elements, given in another order than they were declared in.
#[test]
fn b26_a_gradient_goes_by_identity() {
    let params = || [declared("a", 32, 16, Places::One), declared("b", 16, 32, Places::One)];
    let (a, b) = (at(0, 32, 16), at(1, 16, 32));
    let mut reversed = GradArena::new(0, 1, params());
    let refused = reversed.bind(0, 0, b).unwrap_err();
    assert_eq!(refused.code, Code::ArenaMismatch);
    assert!(refused.message.contains("gradient of `a`"), "{refused}");
    let mut arena = GradArena::new(0, 1, params());
    arena.bind(0, 0, a).unwrap();
    arena.bind(1, 0, b).unwrap();
    for (param, wrong, right) in [(0, b, a), (1, a, b)] {
        let write = arena.begin(param, 0).unwrap();
        assert_eq!(arena.finish(write, &wrong).unwrap_err().code, Code::ArenaMismatch);
        arena.reset();
        let write = arena.begin(param, 0).unwrap();
        arena.finish(write, &right).unwrap();
        arena.complete(param).unwrap();
        arena.reset();
    }
    // One buffer under two names.
    let mut shared = GradArena::new(0, 1, [declared("a", 4, 4, Places::One), declared("b", 4, 4, Places::One)]);
    shared.bind(0, 0, at(0, 4, 4)).unwrap();
    assert_eq!(shared.bind(1, 0, at(0, 4, 4)).unwrap_err().code, Code::ArenaAliased);
}
