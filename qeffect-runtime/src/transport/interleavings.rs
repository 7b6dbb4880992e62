//! Every interleaving of small passes, tried by loom: the local transport once more, on loom's locks in place of std's.

#[allow(
    clippy::duplicate_mod,
    dead_code,
    missing_docs,
    reason = "the same file with other locks, of which tests use a part"
)]
#[path = "local.rs"]
mod local;

mod sync {
    pub(super) use loom::sync::{Condvar, Mutex, MutexGuard};
}

use loom::sync::Arc;
use loom::thread;
use qeffect_core::code::Code;
use qeffect_core::ids::{Microbatch, Rank, Stage};
use qeffect_core::plan::Direction;

use super::{Tag, TransportError};
use local::{EdgeSpec, Fabric, Link, lock};

fn tag(m: u32) -> Tag {
    Tag { step: 0, direction: Direction::Forward, from: Stage(0), microbatch: Microbatch(m) }
}

fn edge(from: u32, to: u32) -> Option<EdgeSpec> {
    Some(EdgeSpec { from: Rank(from), to: Rank(to), buffers: 1, bytes: 1 })
}

/// Runs two ranks; rank 1 in the thread of the model.
fn two(
    edges: [Option<EdgeSpec>; 2],
    first: fn(Link<'_, u32>) -> Result<(), TransportError>,
    second: fn(Link<'_, u32>) -> Result<(), TransportError>,
) -> [Result<(), TransportError>; 2] {
    let fabric = Arc::new(Fabric::new(2, edges));
    let other = fabric.clone();
    let thread = thread::spawn(move || first(other.link(Rank(0))));
    let second = second(fabric.link(Rank(1)));
    [thread.join().unwrap(), second]
}

/// At most three switches away from a thread that could go on; with more (`LOOM_MAX_PREEMPTIONS=100`) it takes minutes.
fn bounded(pass: impl Fn() + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound.get_or_insert(3);
    model.check(pass);
}

/// Two messages on edge 0, which say which they are.
fn sends_two(link: Link<'_, u32>) -> Result<(), TransportError> {
    for m in 0..2 {
        let mut bytes = link.source(0)?;
        bytes[0] = m as u8 + 7;
        link.send(0, tag(m), bytes)?;
    }
    link.finish();
    Ok(())
}

#[test]
fn messages_arrive_once_in_order_through_one_buffer() {
    loom::model(|| {
        let results = two([edge(0, 1), None], sends_two, |link| {
            link.post(0, tag(0))?;
            for m in 0..2 {
                let bytes = link.wait(0, tag(m))?;
                assert_eq!(bytes, [m as u8 + 7]);
                link.release(0, bytes)?;
                if m == 0 {
                    link.post(0, tag(1))?;
                }
            }
            link.finish();
            Ok(())
        });
        assert_eq!(results, [Ok(()), Ok(())]);
    });
}

/// Whoever sent waits at once: the message alone wakes the other, and the answer alone the sender.
#[test]
fn a_message_wakes_who_waits_for_it() {
    bounded(|| {
        let results = two(
            [edge(0, 1), edge(1, 0)],
            |link| {
                let bytes = link.source(0)?;
                link.send(0, tag(0), bytes)?;
                link.post(1, tag(1))?;
                let answer = link.wait(1, tag(1))?;
                assert_eq!(answer, [5]);
                link.release(1, answer)?;
                link.finish();
                Ok(())
            },
            |link| {
                link.post(0, tag(0))?;
                let bytes = link.wait(0, tag(0))?;
                link.release(0, bytes)?;
                let mut answer = link.source(1)?;
                answer[0] = 5;
                link.send(1, tag(1), answer)?;
                link.finish();
                Ok(())
            },
        );
        assert_eq!(results, [Ok(()), Ok(())]);
    });
}

#[test]
fn two_exchanges_in_a_row_do_not_mix() {
    loom::model(|| {
        let twice = |link: Link<'_, u32>| {
            for round in 0..2 {
                assert_eq!(link.gather(round)?, [round, round]);
            }
            link.finish();
            Ok(())
        };
        assert_eq!(two([None, None], twice, twice), [Ok(()), Ok(())]);
    });
}

#[test]
fn a_deadlock_is_found_whoever_waits_last() {
    loom::model(|| {
        let results = two(
            [edge(0, 1), edge(1, 0)],
            |link| {
                link.post(1, tag(0))?;
                link.wait(1, tag(0)).map(drop)
            },
            |link| {
                link.post(0, tag(0))?;
                link.wait(0, tag(0)).map(drop)
            },
        );
        let errors = results.map(Result::unwrap_err);
        assert_eq!(errors.iter().filter(|error| error.is_echo()).count(), 1);
        assert!(errors.iter().any(|error| error.code() == Some(Code::Deadlock)));
    });
}

#[test]
fn nobody_waits_for_a_rank_that_is_gone() {
    loom::model(|| {
        let results = two(
            [edge(0, 1), None],
            |link| {
                drop(link);
                Ok(())
            },
            |link| {
                link.post(0, tag(0))?;
                link.wait(0, tag(0)).map(drop)
            },
        );
        assert!(results[1].as_ref().is_err_and(TransportError::is_echo));
    });
}

/// Both receives are posted ahead of the one buffer: the second message waits until the first one's buffer is given back,
/// and is never written into it while it is in use.
#[test]
fn a_receive_buffer_is_handed_over_and_not_shared() {
    bounded(|| {
        let results = two([edge(0, 1), None], sends_two, |link| {
            (0..2).try_for_each(|m| link.post(0, tag(m)))?;
            let first = link.wait(0, tag(0))?;
            {
                let mut state = lock(&link.fabric.state);
                let edge = state.edge(0)?;
                assert!(edge.free.is_empty() && edge.arrived.is_empty(), "the only buffer is in use");
            }
            assert_eq!(first, [7]);
            link.release(0, first)?;
            let second = link.wait(0, tag(1))?;
            assert_eq!(second, [8]);
            link.release(0, second)?;
            let mut state = lock(&link.fabric.state);
            assert_eq!(state.edge(0)?.free.len(), 1, "as many as there were");
            drop(state);
            link.finish();
            Ok(())
        });
        assert_eq!(results, [Ok(()), Ok(())]);
    });
}

/// Three ranks in a row, of which the middle one passes on what it is given: a buffer that has left one edge serves the
/// next message of that edge, and none of another.
#[test]
fn a_rank_in_the_middle_passes_messages_on() {
    bounded(|| {
        let fabric = Arc::new(Fabric::<u32>::new(3, [edge(0, 1), edge(1, 2)]));
        let pass = |link: Link<'_, u32>| -> Result<(), TransportError> {
            link.post(0, tag(0))?;
            let bytes = link.wait(0, tag(0))?;
            let mut out = link.source(1)?;
            out[0] = bytes[0] + 1;
            link.release(0, bytes)?;
            link.send(1, tag(0), out)?;
            link.finish();
            Ok(())
        };
        let (first, middle) = (fabric.clone(), fabric.clone());
        let first = thread::spawn(move || {
            let link = first.link(Rank(0));
            let mut bytes = link.source(0)?;
            bytes[0] = 7;
            link.send(0, tag(0), bytes)?;
            link.finish();
            Ok::<(), TransportError>(())
        });
        let middle = thread::spawn(move || pass(middle.link(Rank(1))));
        let link = fabric.link(Rank(2));
        let last = (|| {
            link.post(1, tag(0))?;
            let bytes = link.wait(1, tag(0))?;
            let got = bytes[0];
            link.release(1, bytes)?;
            Ok::<u8, TransportError>(got)
        })();
        link.finish();
        assert_eq!((first.join().unwrap(), middle.join().unwrap(), last), (Ok(()), Ok(()), Ok(8)));
        fabric.drained().unwrap();
    });
}
