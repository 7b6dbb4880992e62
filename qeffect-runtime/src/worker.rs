//! A thread that owns one value and does what it is asked to, in order.
//!
//! Ranks live on such threads for a whole session. A panic on one is caught, reported as an error, and leaves the value
//! marked by whoever reads the error; the thread goes on.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};

use crate::error::{Error, Result};

type Job<T> = Box<dyn FnOnce(&mut T) + Send>;

/// A value on a thread of its own.
pub(crate) struct Worker<T> {
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
    /// A thread of this name that owns `value`.
    pub fn new(name: String, mut value: T) -> Result<Worker<T>> {
        let (jobs, incoming) = channel::<Job<T>>();
        let run = move || incoming.into_iter().for_each(|job| job(&mut value));
        let thread = thread::Builder::new()
            .name(name)
            .spawn(run)
            .map_err(|error| Error::Config(format!("cannot start a thread: {error}")))?;
        Ok(Worker { jobs: Some(jobs), thread: Some(thread) })
    }

    /// Has the thread do `job`.
    pub fn call<R: Send + 'static>(&self, job: impl FnOnce(&mut T) -> Result<R> + Send + 'static) -> Reply<R> {
        let (answer, reply) = channel();
        let job = move |value: &mut T| {
            let result = catch_unwind(AssertUnwindSafe(|| job(value)));
            let result = result.unwrap_or_else(|payload| Err(Error::Panic(text(payload.as_ref()))));
            let _ = answer.send(result); // nobody waits: the session is gone
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
    }
}
