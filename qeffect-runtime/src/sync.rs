//! Locks and condition variables: std's, or loom's where every interleaving is tried (`--cfg loom`).

#[cfg(loom)]
pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard};
#[cfg(not(loom))]
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};

/// Locks; a lock that a panic left behind is taken all the same: whoever panicked is reported by other means, and the
/// state under the lock is consistent between any two of its methods.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
