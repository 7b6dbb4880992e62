use super::*;
use crate::ids::{Microbatch, Stage};

fn key(m: u32) -> TapeKey {
    TapeKey::stage(5, Stage(1), Microbatch(m))
}

#[test]
fn a_slot_lives_until_both_consumers_are_done() {
    let mut pool = SlotPool::new(2);
    let tape = pool.lease(key(0), 1).unwrap();
    assert_eq!((tape.slot(), tape.generation(), pool.live(), pool.tapes(), pool.works()), (1, 1, 1, 1, 0));
    let work = pool.consume_tape(tape, &key(0)).unwrap();
    assert_eq!((pool.live(), pool.tapes(), pool.works()), (1, 0, 1));
    let refused = pool.lease(key(1), 1).unwrap_err();
    assert_eq!(refused, SlotError::Occupied { slot: 1, holder: key(0) }, "never preempted");
    pool.consume_work(work, &key(0)).unwrap();
    assert_eq!(pool.live(), 0);
    let next = pool.lease(key(1), 1).unwrap();
    assert_eq!(next.generation(), 2, "generations survive release");
}

#[test]
fn every_refusal_leaves_the_live_record_as_it_was() {
    let mut pool = SlotPool::new(2);
    let first = pool.lease(key(0), 0).unwrap();
    let work = pool.consume_tape(first, &key(0)).unwrap();
    pool.consume_work(work, &key(0)).unwrap();
    let _live = pool.lease(key(1), 0).unwrap(); // generation 2
    let before = format!("{pool:?}");
    let forge = TapeRef::new;
    let cases = [
        (pool.consume_tape(forge(0, 1), &key(1)).unwrap_err(), Code::StaleReference),
        (pool.consume_tape(forge(0, 3), &key(1)).unwrap_err(), Code::StaleReference),
        (pool.consume_tape(forge(0, 2), &key(0)).unwrap_err(), Code::KeyMismatch),
        (pool.consume_work(WorkRef::new(0, 1), &key(1)).unwrap_err(), Code::StaleReference),
        (pool.consume_work(WorkRef::new(0, 2), &key(1)).unwrap_err(), Code::WorkBeforeInputGrad),
        (pool.consume_tape(forge(2, 1), &key(1)).unwrap_err(), Code::SlotsExhausted),
        (pool.consume_tape(forge(1, 0), &key(1)).unwrap_err(), Code::TapeConsumedTwice),
        (pool.lease(key(1), 1).unwrap_err(), Code::ForwardRepeated),
        (pool.lease(key(2), 0).unwrap_err(), Code::SlotsExhausted),
    ];
    for (error, code) in cases {
        assert_eq!(error.code(), code, "{error}");
    }
    assert_eq!(format!("{pool:?}"), before);
}

#[test]
fn a_purge_makes_the_step_s_references_stale_and_no_others() {
    let mut pool = SlotPool::new(3);
    let old = pool.lease(key(0), 0).unwrap();
    let consumed = pool.lease(key(1), 1).unwrap();
    let work = pool.consume_tape(consumed, &key(1)).unwrap();
    let other = TapeKey { step: 6, ..key(0) };
    let kept = pool.lease(other, 2).unwrap();
    assert_eq!(pool.purge(5), 2);
    assert_eq!((pool.live(), pool.tapes()), (1, 1));
    assert_eq!(pool.consume_tape(old, &key(0)).unwrap_err().code(), Code::StaleReference);
    assert_eq!(pool.consume_work(work, &key(1)).unwrap_err().code(), Code::StaleReference);
    let again = pool.lease(key(0), 0).unwrap();
    assert_eq!(again.generation(), 3, "purged at 2, leased at 3");
    let _ = pool.consume_tape(kept, &other).unwrap();
}
