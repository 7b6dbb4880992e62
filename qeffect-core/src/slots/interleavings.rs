//! Threads that share a pool behind a lock, in every interleaving, tried by loom.

use loom::sync::{Arc, Mutex};
use loom::thread;

use super::*;
use crate::ids::{Microbatch, Stage};

fn key(m: u32) -> TapeKey {
    TapeKey::stage(0, Stage(0), Microbatch(m))
}

/// A pool, and the tapes that F has left for I.
struct Shared {
    pool: Mutex<SlotPool>,
    tapes: Mutex<Vec<(TapeKey, TapeRef)>>,
}

fn shared(slots: u32) -> Arc<Shared> {
    Arc::new(Shared { pool: Mutex::new(SlotPool::new(slots)), tapes: Mutex::new(Vec::new()) })
}

/// F of a microbatch, if its slot is free.
fn forward(shared: &Shared, m: u32, slot: u32) -> Result<(), SlotError> {
    let tape = shared.pool.lock().unwrap().lease(key(m), slot)?;
    shared.tapes.lock().unwrap().push((key(m), tape));
    Ok(())
}

/// I and W of whatever waits for them: how many microbatches that were.
fn backward(shared: &Shared) -> u32 {
    let mut done = 0;
    loop {
        let Some((key, tape)) = shared.tapes.lock().unwrap().pop() else { return done };
        let work = shared.pool.lock().unwrap().consume_tape(tape, &key).unwrap();
        shared.pool.lock().unwrap().consume_work(work, &key).unwrap();
        done += 1;
    }
}

/// What is said at the end, whoever came first.
fn rest(shared: &Shared, leases: u64) {
    let pool = shared.pool.lock().unwrap();
    assert_eq!((pool.live(), pool.tapes(), pool.works(), pool.keys().count()), (0, 0, 0, 0));
    assert_eq!((0..pool.len()).filter_map(|slot| pool.generation(slot)).sum::<u64>(), leases);
}

#[test]
fn one_slot_is_given_to_one_microbatch_at_a_time() {
    loom::model(|| {
        let shared = shared(1);
        let threads = [1, 2].map(|m| {
            let shared = shared.clone();
            thread::spawn(move || match forward(&shared, m, 0) {
                Ok(()) => 1,
                Err(SlotError::Occupied { slot: 0, holder }) => {
                    assert_ne!(holder, key(m), "refused for the sake of another");
                    0
                }
                Err(other) => panic!("{other}"),
            })
        });
        let done = backward(&shared);
        let leases: u64 = threads.into_iter().map(|thread| thread.join().unwrap()).sum();
        assert!(leases >= 1 && u64::from(done) <= leases);
        assert_eq!(u64::from(done + backward(&shared)), leases, "every tape is consumed once");
        rest(&shared, leases);
    });
}

#[test]
fn a_microbatch_lives_in_one_slot_at_a_time() {
    loom::model(|| {
        let shared = shared(2);
        let other = shared.clone();
        let thread = thread::spawn(move || forward(&other, 7, 1));
        let here = forward(&shared, 7, 0);
        let done = backward(&shared);
        let results = [here, thread.join().unwrap()];
        let leases = results.iter().filter(|result| result.is_ok()).count() as u64;
        for refused in results.iter().filter_map(|result| result.as_ref().err()) {
            assert!(matches!(refused, SlotError::Live { key: live, .. } if *live == key(7)), "{refused}");
        }
        assert_eq!(u64::from(done + backward(&shared)), leases);
        rest(&shared, leases);
    });
}

#[test]
fn references_of_a_purged_step_are_refused_whenever_they_come() {
    loom::model(|| {
        let shared = shared(1);
        forward(&shared, 0, 0).unwrap();
        let other = shared.clone();
        let thread = thread::spawn(move || other.pool.lock().unwrap().purge(0));
        let (key, tape) = shared.tapes.lock().unwrap().pop().unwrap();
        let result = shared.pool.lock().unwrap().consume_tape(tape, &key);
        let work = result.and_then(|work| shared.pool.lock().unwrap().consume_work(work, &key));
        let purged = thread.join().unwrap();
        match work {
            Ok(()) => assert_eq!(purged, 0, "W had ended"),
            Err(SlotError::Stale { slot: 0, reference: 1, current: 2 }) => assert_eq!(purged, 1),
            Err(other) => panic!("{other}"),
        }
        rest(&shared, 1 + u64::from(purged));
    });
}
