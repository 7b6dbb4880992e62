//! Captures, and calls that concern a whole context, keep apart.
//!
//! A thread that captures forbids other threads nothing, yet what they wait for, allocate or free in the same context can
//! end its capture. So such calls wait until no thread captures, and captures until no thread makes such a call. Ranks are
//! threads that share a GPU.

use std::cell::Cell;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

static CAPTURES: RwLock<()> = RwLock::new(());

/// Held as long as a thread captures; several may.
#[derive(Debug)]
pub(crate) struct Capturing(#[expect(dead_code, reason = "held, not read")] RwLockReadGuard<'static, ()>);

/// Held during a call that concerns a context.
pub(crate) struct Alone(#[expect(dead_code, reason = "held, not read")] RwLockWriteGuard<'static, ()>);

thread_local! {
    /// How many captures this thread has open.
    static OPEN: Cell<usize> = const { Cell::new(0) };
}

impl Drop for Capturing {
    fn drop(&mut self) {
        OPEN.set(OPEN.get() - 1);
    }
}

/// Whether this thread captures.
pub(crate) fn is_capturing() -> bool {
    OPEN.get() > 0
}

pub(crate) fn capturing() -> Capturing {
    OPEN.set(OPEN.get() + 1);
    Capturing(CAPTURES.read().unwrap_or_else(PoisonError::into_inner)) // it guards no data
}

/// Never within a capture of the same thread.
pub(crate) fn alone() -> Alone {
    Alone(CAPTURES.write().unwrap_or_else(PoisonError::into_inner))
}
