//! The slot pool and the whole ledger as state machines, against models written from the contract: random
//! sequences of legal and illegal calls. What breaks no rule succeeds and has the effect that the model
//! says; what breaks one is refused with the code of a rule that it breaks, and changes nothing.
//!
//! References are affine and cannot be copied, so copies are forged: a pool of its own is led to the
//! wanted slot and generation.
#![allow(missing_docs)]

mod calls;
mod ledger;
mod model;
mod slots;

use std::collections::BTreeSet;

use qeffect_core::code::Code;
use qeffect_core::ids::{Microbatch, Stage};
use qeffect_core::slots::SlotPool;
use qeffect_core::tape::{TapeKey, TapeRef, WorkRef};

/// A tape reference to a slot at a generation from 1 on.
fn forged_tape(slot: u32, generation: u64) -> TapeRef {
    let mut pool = SlotPool::new(slot + 1);
    let key = TapeKey::stage(0, Stage(0), Microbatch(0));
    loop {
        let tape = pool.lease(key, slot).unwrap();
        if tape.generation() == generation {
            return tape;
        }
        let work = pool.consume_tape(tape, &key).unwrap();
        pool.consume_work(work, &key).unwrap();
    }
}

/// The same for work.
fn forged_work(slot: u32, generation: u64) -> WorkRef {
    let mut pool = SlotPool::new(slot + 1);
    let key = TapeKey::stage(0, Stage(0), Microbatch(0));
    loop {
        let tape = pool.lease(key, slot).unwrap();
        let (reached, work) = (tape.generation() == generation, pool.consume_tape(tape, &key).unwrap());
        if reached {
            return work;
        }
        pool.consume_work(work, &key).unwrap();
    }
}

/// A call for a choice: mostly one that breaks no rule and is likely, else one that breaks some rule, each rule
/// as often as any other.
fn choose<C: Copy>(
    (kind, n): (u8, u16),
    all: &[C],
    breaks: impl Fn(&C) -> BTreeSet<Code>,
    likely: impl Fn(&C) -> bool,
) -> C {
    let judged: Vec<(C, BTreeSet<Code>)> = all.iter().map(|call| (*call, breaks(call))).collect();
    let n = usize::from(n);
    let fine: Vec<C> =
        judged.iter().filter(|(call, broken)| broken.is_empty() && likely(call)).map(|(c, _)| *c).collect();
    if kind % 4 != 0 && !fine.is_empty() {
        return fine[n % fine.len()];
    }
    let codes: BTreeSet<Code> = judged.iter().flat_map(|(_, broken)| broken).copied().collect();
    let Some(code) = codes.iter().nth(n % codes.len().max(1)) else { return all[n % all.len()] };
    let broken: Vec<C> = judged.iter().filter(|(_, broken)| broken.contains(code)).map(|(c, _)| *c).collect();
    broken[n / codes.len() % broken.len()]
}
