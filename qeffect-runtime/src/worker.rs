//! A value with a thread that does to it what it is asked to, in order.
//!
//! Ranks live so for a whole session. What waits for nobody may be done on the caller's thread instead: waking another one
//! and being woken by it takes longer than what the host has to do for a replayed step. A panic is caught, reported as an
//! error, and leaves the value marked by whoever reads the error; the thread goes on.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use crate::error::{Error, Result};

type Job<T> = Box<dyn FnOnce(&mut T) + Send>;

/// A value with a thread of its own.
pub(crate) struct Worker<T> {
    value: Arc<Mutex<T>>,
    jobs: Option<Sender<Job<T>>>,
    thread: Option<JoinHandle<()>>,
}

/// The answer to a call.
#[must_use = "a call that nobody waits for hides its error"]
pub(crate) struct Reply<R>(Receiver<Result<R>>);

impl<R> Reply<R> {
    /// Waits for it.
    pub fn wait(self) -> Result<R> {
        self.0.recv().unwrap_or_else(|_| Err(Error::Panic("its thread has ended".into())))
    }
}

impl<T: Send + 'static> Worker<T> {
    /// A thread of this name for `value`.
    pub fn new(name: String, value: T) -> Result<Worker<T>> {
        let (jobs, incoming) = channel::<Job<T>>();
        let value = Arc::new(Mutex::new(value));
        let shared = value.clone();
        let run = move || incoming.into_iter().for_each(|job| job(&mut lock(&shared)));
        let thread = thread::Builder::new()
            .name(name)
            .spawn(run)
            .map_err(|error| Error::Config(format!("cannot start a thread: {error}")))?;
        Ok(Worker { value, jobs: Some(jobs), thread: Some(thread) })
    }

    /// Does `job` on this thread. Nothing that the worker was asked for may be outstanding.
    pub fn here<R>(&self, job: impl FnOnce(&mut T) -> Result<R>) -> Result<R> {
        caught(&mut *lock(&self.value), job)
    }

    /// Has the thread do `job`.
    pub fn call<R: Send + 'static>(&self, job: impl FnOnce(&mut T) -> Result<R> + Send + 'static) -> Reply<R> {
        let (answer, reply) = channel();
        let job = move |value: &mut T| {
            let _ = answer.send(caught(value, job)); // nobody waits: the session is gone
        };
        if let Some(jobs) = &self.jobs {
            let _ = jobs.send(Box::new(job)); // the reply says that the thread has ended
        }
        Reply(reply)
    }
}

impl<T> Drop for Worker<T> {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // jobs catch their panics
        }
    }
}

/// Jobs catch their panics, so no lock is poisoned.
fn lock<T>(value: &Mutex<T>) -> MutexGuard<'_, T> {
    value.lock().unwrap_or_else(PoisonError::into_inner)
}

fn caught<T, R>(value: &mut T, job: impl FnOnce(&mut T) -> Result<R>) -> Result<R> {
    let result = catch_unwind(AssertUnwindSafe(|| job(value)));
    result.unwrap_or_else(|payload| Err(Error::Panic(text(payload.as_ref()))))
}

fn text(payload: &(dyn Any + Send)) -> String {
    match (payload.downcast_ref::<&str>(), payload.downcast_ref::<String>()) {
        (Some(text), _) => (*text).to_owned(),
        (_, Some(text)) => text.clone(),
        _ => "of unknown kind".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_run_in_order_and_a_panic_is_an_error() {
        let worker = Worker::new("counter".into(), 0u32).unwrap();
        let add = |n: u32| {
            worker.call(move |value| {
                *value += n;
                Ok(*value)
            })
        };
        let replies: Vec<Reply<u32>> = (1..=3).map(add).collect();
        assert_eq!(replies.into_iter().map(|r| r.wait().unwrap()).collect::<Vec<_>>(), [1, 3, 6]);
        let error = worker.call::<()>(|value| panic!("at {value}")).wait().unwrap_err();
        assert_eq!(error.to_string(), "a panic: at 6");
        assert_eq!(add(1).wait().unwrap(), 7, "the thread goes on");
        let error = worker.here::<()>(|value| panic!("here at {value}")).unwrap_err();
        assert_eq!(error.to_string(), "a panic: here at 7");
        assert_eq!(worker.here(|value| Ok(*value)).unwrap(), 7);
        assert_eq!(add(1).wait().unwrap(), 8);
    }
}
