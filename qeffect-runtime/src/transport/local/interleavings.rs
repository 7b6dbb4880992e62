//! Every interleaving of small passes, tried by loom:
//! `RUSTFLAGS="--cfg loom" cargo test -p qeffect-runtime --lib interleavings`.

use loom::sync::Arc;
use loom::thread;
use qeffect_core::code::Code;
use qeffect_core::ids::{Microbatch, Stage};
use qeffect_core::plan::Direction;

use super::*;

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

#[test]
fn messages_arrive_once_in_order_through_one_buffer() {
    loom::model(|| {
        let results = two(
            [edge(0, 1), None],
            |link| {
                for m in 0..2 {
                    let mut bytes = link.source(0)?;
                    bytes[0] = m as u8 + 7;
                    link.send(0, tag(m), bytes)?;
                }
                link.finish();
                Ok(())
            },
            |link| {
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
