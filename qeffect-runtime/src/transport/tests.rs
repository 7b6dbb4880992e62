use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use qeffect_core::code::Code;
use qeffect_core::ids::{Microbatch, Stage};
use qeffect_core::plan::Direction;

use super::local::*;
use super::*;

const A: Rank = Rank(0);
const B: Rank = Rank(1);

fn tag(m: u32) -> Tag {
    Tag { step: 4, direction: Direction::Forward, from: Stage(0), microbatch: Microbatch(m) }
}

fn edge(buffers: u32) -> EdgeSpec {
    EdgeSpec { from: A, to: B, buffers, bytes: 8 }
}

fn back(buffers: u32) -> EdgeSpec {
    EdgeSpec { from: B, to: A, buffers, bytes: 8 }
}

fn send(link: &Link<'_, u32>, at: u32, m: u32, value: u64) -> Result<(), TransportError> {
    let mut bytes = link.source(at)?;
    bytes.copy_from_slice(&value.to_le_bytes());
    link.send(at, tag(m), bytes)
}

fn value(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes.try_into().unwrap())
}

#[test]
fn a_send_never_blocks_and_is_counted_until_a_buffer_is_free() {
    let fabric = Fabric::new(2, [Some(edge(1))]);
    let (a, b) = (fabric.link(A), fabric.link(B));
    for m in 0..3 {
        send(&a, 0, m, u64::from(m) + 10).unwrap(); // nobody has posted yet
    }
    assert_eq!(fabric.peak_held(0), 3);
    for m in 0..3 {
        b.post(0, tag(m)).unwrap();
    }
    assert_eq!(lock(&fabric.state).edge(0).unwrap().outbox.len(), 2, "one buffer, one message");
    for m in 0..3 {
        let bytes = b.wait(0, tag(m)).unwrap();
        assert_eq!(value(&bytes), u64::from(m) + 10);
        assert!(lock(&fabric.state).edge(0).unwrap().arrived.is_empty(), "the buffer is in use");
        b.release(0, bytes).unwrap();
    }
    a.finish();
    b.finish();
    fabric.drained().unwrap();
}

#[test]
fn a_wrong_tag_is_refused_before_its_bytes_are_used() {
    // Sent out of order.
    let fabric = Fabric::new(2, [Some(edge(2))]);
    let (a, b) = (fabric.link(A), fabric.link(B));
    b.post(0, tag(0)).unwrap();
    let error = send(&a, 0, 1, 0).unwrap_err();
    assert_eq!(error, TransportError::Order { rank: B, expected: tag(0), found: tag(1) });
    assert_eq!(error.code(), Some(Code::FifoOrder));
    assert_eq!(
        error.to_string(),
        "rank 1 expects the result of F(0, 0) of step 4, and the edge brings the result of F(0, 1) of step 4 [QE0402]"
    );
    assert!(b.wait(0, tag(0)).unwrap_err().is_echo(), "the other end learns of it");

    // Taken out of order.
    let fabric = Fabric::new(2, [Some(edge(2))]);
    let (a, b) = (fabric.link(A), fabric.link(B));
    for m in 0..2 {
        b.post(0, tag(m)).unwrap();
        send(&a, 0, m, 0).unwrap();
    }
    assert_eq!(b.wait(0, tag(1)).unwrap_err().code(), Some(Code::FifoOrder));

    // Of another step; never posted; of the wrong size; on no edge.
    let fabric = Fabric::new(2, [Some(edge(2)), None]);
    let (a, b) = (fabric.link(A), fabric.link(B));
    b.post(0, Tag { step: 5, ..tag(0) }).unwrap();
    assert_eq!(send(&a, 0, 0, 0).unwrap_err().code(), Some(Code::FifoOrder));
    fabric.reset();
    assert_eq!(b.wait(0, tag(7)).unwrap_err().code(), Some(Code::MessageEarly));
    fabric.reset();
    let size = a.send(0, tag(0), vec![0; 3]).unwrap_err();
    assert_eq!(size, TransportError::Size { tag: tag(0), expected: 8, found: 3 });
    fabric.reset();
    assert_eq!(a.post(1, tag(0)).unwrap_err().code(), Some(Code::MessageUnknown));
}

#[test]
fn a_deadlock_is_reported_at_once_with_what_each_rank_waits_for() {
    let fabric = Fabric::<u32>::new(2, [Some(edge(1)), Some(back(1))]);
    let errors: Vec<TransportError> = thread::scope(|scope| {
        let threads = [(A, 1), (B, 0)].map(|(rank, at)| {
            let fabric = &fabric;
            scope.spawn(move || {
                let link = fabric.link(rank);
                link.post(at, tag(0)).unwrap();
                let error = link.wait(at, tag(0)).unwrap_err();
                link.abandon("deadlock");
                error
            })
        });
        threads.map(|thread| thread.join().unwrap()).into()
    });
    let deadlock = errors.iter().find(|error| !error.is_echo()).unwrap();
    assert_eq!(deadlock.code(), Some(Code::Deadlock));
    let text = deadlock.to_string();
    assert!(text.contains("rank 0 waits for the result of F(0, 0) of step 4\nrank 1 waits for"), "{text}");
    assert_eq!(errors.iter().filter(|error| error.is_echo()).count(), 1);
}

#[test]
fn a_rank_that_panics_or_ends_early_wakes_all_others() {
    for panics in [true, false] {
        let fabric = Fabric::new(3, [Some(edge(1)), Some(back(1))]);
        let started = AtomicU32::new(0);
        thread::scope(|scope| {
            let waits = scope.spawn(|| {
                let link = fabric.link(B);
                link.post(0, tag(0)).unwrap();
                started.fetch_add(1, Ordering::Relaxed);
                link.wait(0, tag(0)).unwrap_err()
            });
            let gathers = scope.spawn(|| {
                let link = fabric.link(Rank(2));
                started.fetch_add(1, Ordering::Relaxed);
                link.gather(1).unwrap_err()
            });
            let fails = scope.spawn(|| {
                let _link = fabric.link(A);
                while started.load(Ordering::Relaxed) < 2 {
                    thread::yield_now();
                }
                assert!(!panics, "injected");
            });
            assert_eq!(fails.join().is_err(), panics);
            for error in [waits.join().unwrap(), gathers.join().unwrap()] {
                assert!(error.is_echo() && matches!(error, TransportError::Peer { rank: A, .. }), "{error}");
            }
        });
        // The fabric serves the next pass.
        fabric.reset();
        let (a, b) = (fabric.link(A), fabric.link(B));
        b.post(0, tag(0)).unwrap();
        send(&a, 0, 0, 3).unwrap();
        assert_eq!(value(&b.wait(0, tag(0)).unwrap()), 3);
    }
}

#[test]
fn what_is_never_sent_or_never_taken_is_named() {
    let fabric = Fabric::<u32>::new(2, [Some(edge(1))]);
    let (a, b) = (fabric.link(A), fabric.link(B));
    b.post(0, tag(0)).unwrap();
    a.finish();
    let error = b.wait(0, tag(0)).unwrap_err();
    assert_eq!(error, TransportError::Missing { rank: B, tag: tag(0), fate: "is never sent" });

    fabric.reset();
    let (a, b) = (fabric.link(A), fabric.link(B));
    send(&a, 0, 0, 0).unwrap();
    a.finish();
    assert_eq!(b.gather(0).unwrap_err(), TransportError::Absent { rank: B, absent: A });
    let error = fabric.drained().unwrap_err();
    assert_eq!(error, TransportError::Missing { rank: B, tag: tag(0), fate: "is never taken" });
}

#[test]
fn a_timeout_says_what_each_rank_does() {
    let fabric = Fabric::<u32>::new(2, [Some(edge(1))]).timeout(Duration::from_millis(20));
    let _computes = fabric.link(A);
    let b = fabric.link(B);
    b.post(0, tag(0)).unwrap();
    let error = b.wait(0, tag(0)).unwrap_err();
    let TransportError::Timeout { rank: B, doing, .. } = &error else { panic!("{error}") };
    assert_eq!(doing[0], "rank 0 computes");
}

#[test]
fn many_passes_allocate_nothing_and_bring_every_byte() {
    const MESSAGES: u32 = 50;
    const RANKS: u32 = 3;
    let around = (0..RANKS).map(|r| Some(EdgeSpec { from: Rank(r), to: Rank((r + 1) % RANKS), buffers: 2, bytes: 8 }));
    let fabric = Fabric::<u32>::new(RANKS, around);
    let pass = || {
        fabric.reset();
        thread::scope(|scope| {
            for r in 0..RANKS {
                let fabric = &fabric;
                scope.spawn(move || {
                    let link = fabric.link(Rank(r));
                    let from = (r + RANKS - 1) % RANKS;
                    link.post(from, tag(0)).unwrap();
                    link.post(from, tag(1)).unwrap();
                    for m in 0..MESSAGES {
                        // Every third message goes out in a burst of three.
                        if m % 3 == 0 {
                            for m in m..(m + 3).min(MESSAGES) {
                                send(&link, r, m, u64::from(r * 1000 + m)).unwrap();
                            }
                        }
                        let bytes = link.wait(from, tag(m)).unwrap();
                        assert_eq!(value(&bytes), u64::from(from * 1000 + m));
                        link.release(from, bytes).unwrap();
                        if m + 2 < MESSAGES {
                            link.post(from, tag(m + 2)).unwrap();
                        }
                        if m % 10 == 0 {
                            let all = link.gather(r + m).unwrap();
                            assert_eq!(all, (0..RANKS).map(|r| r + m).collect::<Vec<_>>());
                        }
                    }
                    link.finish();
                });
            }
        });
        fabric.drained().unwrap();
        let state = lock(&fabric.state);
        let buffers = state.edges.iter().flatten().flat_map(|e| e.free.iter().chain(&e.spare)).map(Vec::as_ptr);
        buffers.collect::<BTreeSet<_>>()
    };
    let mut buffers = pass();
    // Sources grow to the most that was ever held, and never beyond; the receive buffers stay two per edge.
    for _ in 0..100 {
        let next = pass();
        assert!(buffers.is_subset(&next), "a buffer was lost");
        buffers = next;
    }
    let held: usize = (0..RANKS).map(|edge| fabric.peak_held(edge)).sum();
    assert!(buffers.len() <= (2 * RANKS) as usize + held + RANKS as usize, "{} buffers, {held} held", buffers.len());
}
