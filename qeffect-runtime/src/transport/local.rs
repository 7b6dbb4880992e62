//! The local transport: ranks are threads of one process.
//!
//! A send never blocks its rank: the bytes wait on the sender's side, and are counted there, until a receive is posted
//! and a receive buffer is free. Bytes are handed over by exchanging buffers, so nothing is copied between ranks and
//! nothing is allocated once every buffer has been used. One lock guards the whole fabric: messages are few and large,
//! and under one lock it is decidable at every moment whether anybody can still go on. So a deadlock is reported when
//! it arises, not after a timeout, and a failed rank wakes all others.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use qeffect_core::ids::Rank;

use super::sync::{Condvar, Mutex, MutexGuard};
use super::{Tag, TransportError};

/// One edge between two ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EdgeSpec {
    /// Who sends.
    pub from: Rank,
    /// Who receives.
    pub to: Rank,
    /// Receive buffers.
    pub buffers: u32,
    /// Bytes of every message.
    pub bytes: usize,
}

/// All edges between the ranks of a plan, and their exchange of `T`.
pub struct Fabric<T> {
    pub(super) state: Mutex<State<T>>,
    changed: Condvar,
    timeout: Duration,
}

/// One rank's end of the fabric, for one pass. Dropped without [`finish`](Link::finish), it fails the pass of all.
pub struct Link<'f, T> {
    pub(super) fabric: &'f Fabric<T>,
    rank: Rank,
    finished: bool,
}

pub(super) struct State<T> {
    pub(super) edges: Vec<Option<Edge>>,
    ranks: Vec<Activity>,
    gathered: Vec<Option<T>>,
    /// Ranks that still have to take the gathered values.
    takers: usize,
    failure: Option<(Rank, String)>,
}

pub(super) struct Edge {
    spec: EdgeSpec,
    posted: VecDeque<Tag>,
    /// Sent, and waiting for a posted receive and a free buffer.
    pub(super) outbox: VecDeque<(Tag, Vec<u8>)>,
    pub(super) arrived: VecDeque<(Tag, Vec<u8>)>,
    /// Free receive buffers.
    pub(super) free: Vec<Vec<u8>>,
    /// Free buffers of the sender's side.
    pub(super) spare: Vec<Vec<u8>>,
    peak_held: usize,
}

/// What a rank does, as far as the fabric knows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Activity {
    Computing,
    Waiting { edge: u32, tag: Tag },
    Gathering,
    Finished,
}

impl Edge {
    fn new(spec: EdgeSpec) -> Edge {
        let mut edge = Edge {
            spec,
            posted: VecDeque::new(),
            outbox: VecDeque::new(),
            arrived: VecDeque::new(),
            free: Vec::new(),
            spare: Vec::new(),
            peak_held: 0,
        };
        edge.reset();
        edge
    }

    /// Nothing on its way, every receive buffer free.
    fn reset(&mut self) {
        self.posted.clear();
        self.free.extend(self.arrived.drain(..).map(|(_, bytes)| bytes));
        self.spare.extend(self.outbox.drain(..).map(|(_, bytes)| bytes));
        // A rank that failed took its buffers with it.
        self.free.resize_with(self.spec.buffers as usize, || vec![0; self.spec.bytes]);
    }

    /// Lets messages into free buffers, in order.
    fn deliver(&mut self) -> Result<(), TransportError> {
        while let (Some((found, _)), Some(expected), false) =
            (self.outbox.front(), self.posted.front(), self.free.is_empty())
        {
            if found != expected {
                return Err(TransportError::Order { rank: self.spec.to, expected: *expected, found: *found });
            }
            self.posted.pop_front();
            self.spare.extend(self.free.pop());
            self.arrived.extend(self.outbox.pop_front());
        }
        Ok(())
    }
}

impl<T> State<T> {
    pub(super) fn edge(&mut self, edge: u32) -> Result<&mut Edge, TransportError> {
        self.edges.get_mut(edge as usize).and_then(Option::as_mut).ok_or(TransportError::NoEdge { edge })
    }

    /// Whether a rank that waits could go on now.
    fn ready(&self, activity: Activity) -> bool {
        match activity {
            Activity::Computing => true,
            Activity::Finished => false,
            Activity::Waiting { edge, .. } => {
                self.edges.get(edge as usize).and_then(Option::as_ref).is_some_and(|e| !e.arrived.is_empty())
            }
            Activity::Gathering => self.takers > 0 || self.gathered.iter().all(Option::is_some),
        }
    }

    /// The error of a rank that waits in vain, if it does.
    fn verdict(&self, rank: Rank) -> Result<(), TransportError> {
        if let Some((failed, reason)) = &self.failure {
            return Err(TransportError::Peer { rank: *failed, reason: reason.clone() });
        }
        let activity = self.ranks[rank.index()];
        if self.ready(activity) {
            return Ok(());
        }
        match activity {
            Activity::Waiting { edge, tag } => {
                if let Some(Some(edge)) = self.edges.get(edge as usize)
                    && self.ranks[edge.spec.from.index()] == Activity::Finished
                    && edge.outbox.is_empty()
                {
                    return Err(TransportError::Missing { rank, tag, fate: "is never sent" });
                }
            }
            Activity::Gathering => {
                if let Some(absent) = self.ranks.iter().position(|a| *a == Activity::Finished) {
                    return Err(TransportError::Absent { rank, absent: Rank(absent as u32) });
                }
            }
            _ => {}
        }
        if self.ranks.iter().any(|activity| self.ready(*activity)) {
            return Ok(());
        }
        Err(TransportError::Deadlock { waiting: self.doing() })
    }

    fn doing(&self) -> Vec<String> {
        let what = |activity: &Activity| match activity {
            Activity::Computing => "computes".into(),
            Activity::Waiting { tag, .. } => format!("waits for {tag}"),
            Activity::Gathering => "waits for all ranks".into(),
            Activity::Finished => "has ended its pass".into(),
        };
        self.ranks.iter().enumerate().map(|(rank, activity)| format!("rank {rank} {}", what(activity))).collect()
    }
}

impl<T> Fabric<T> {
    /// Edges by their index in the plan; `None` where both ends are one rank.
    pub fn new(ranks: u32, edges: impl IntoIterator<Item = Option<EdgeSpec>>) -> Fabric<T> {
        let state = State {
            edges: edges.into_iter().map(|spec| spec.map(Edge::new)).collect(),
            ranks: vec![Activity::Computing; ranks as usize],
            gathered: (0..ranks).map(|_| None).collect(),
            takers: 0,
            failure: None,
        };
        Fabric { state: Mutex::new(state), changed: Condvar::new(), timeout: Duration::from_secs(600) }
    }

    /// Gives up a wait after this long, if some rank still computes. Deadlocks are reported at once.
    #[must_use]
    pub fn timeout(self, timeout: Duration) -> Fabric<T> {
        Fabric { timeout, ..self }
    }

    /// Starts a pass: whatever an aborted one left is dropped. No link may be alive.
    pub fn reset(&self) {
        let mut state = lock(&self.state);
        state.edges.iter_mut().flatten().for_each(Edge::reset);
        state.ranks.fill(Activity::Computing);
        state.gathered.iter_mut().for_each(|value| *value = None);
        state.takers = 0;
        state.failure = None;
    }

    /// A rank's end, for one pass.
    pub const fn link(&self, rank: Rank) -> Link<'_, T> {
        Link { fabric: self, rank, finished: false }
    }

    /// After a pass: every message was taken.
    pub fn drained(&self) -> Result<(), TransportError> {
        let state = lock(&self.state);
        for edge in state.edges.iter().flatten() {
            if let Some((tag, _)) = edge.arrived.front().or(edge.outbox.front()) {
                let fate = "is never taken";
                return Err(TransportError::Missing { rank: edge.spec.to, tag: *tag, fate });
            }
        }
        Ok(())
    }

    /// Bytes of every message of an edge; 0 if it does not connect two ranks.
    pub fn message_bytes(&self, edge: u32) -> usize {
        lock(&self.state).edge(edge).map_or(0, |edge| edge.spec.bytes)
    }

    /// The most messages that an edge held on its sender's side.
    pub fn peak_held(&self, edge: u32) -> usize {
        lock(&self.state).edge(edge).map_or(0, |edge| edge.peak_held)
    }
}

impl<T: Clone> Link<'_, T> {
    /// A buffer to write a message into.
    pub fn source(&self, edge: u32) -> Result<Vec<u8>, TransportError> {
        let mut state = lock(&self.fabric.state);
        let edge = state.edge(edge)?;
        let spare = edge.spare.pop();
        let bytes = edge.spec.bytes;
        drop(state);
        Ok(spare.unwrap_or_else(|| vec![0; bytes]))
    }

    /// Sends; does not wait for the receiver.
    pub fn send(&self, edge: u32, tag: Tag, bytes: Vec<u8>) -> Result<(), TransportError> {
        self.change(|state| {
            let edge = state.edge(edge)?;
            if bytes.len() != edge.spec.bytes {
                return Err(TransportError::Size { tag, expected: edge.spec.bytes, found: bytes.len() });
            }
            edge.outbox.push_back((tag, bytes));
            edge.deliver()?;
            edge.peak_held = edge.peak_held.max(edge.outbox.len());
            Ok(())
        })
    }

    /// Says that the next free receive buffer takes this message.
    pub fn post(&self, edge: u32, tag: Tag) -> Result<(), TransportError> {
        self.change(|state| {
            let edge = state.edge(edge)?;
            edge.posted.push_back(tag);
            edge.deliver()
        })
    }

    /// Waits for a message. Its buffer is to be given back by [`release`](Link::release).
    pub fn wait(&self, edge: u32, tag: Tag) -> Result<Vec<u8>, TransportError> {
        let mut state = lock(&self.fabric.state);
        let end = state.edge(edge)?;
        if !end.posted.contains(&tag) && !end.arrived.iter().any(|(arrived, _)| *arrived == tag) {
            return Err(self.fail(state, TransportError::NotPosted { rank: self.rank, tag }));
        }
        state.ranks[self.rank.index()] = Activity::Waiting { edge, tag };
        let mut state = self.wait_until_ready(state)?;
        let found = state.edge(edge)?.arrived.front().map(|(found, _)| *found);
        match found {
            Some(found) if found == tag => {
                let message = state.edge(edge)?.arrived.pop_front();
                Ok(message.map(|(_, bytes)| bytes).unwrap_or_default())
            }
            Some(found) => Err(self.fail(state, TransportError::Order { rank: self.rank, expected: tag, found })),
            None => Err(self.fail(state, TransportError::NotPosted { rank: self.rank, tag })),
        }
    }

    /// Gives a receive buffer back: its message is used.
    pub fn release(&self, edge: u32, buffer: Vec<u8>) -> Result<(), TransportError> {
        self.change(|state| {
            let edge = state.edge(edge)?;
            edge.free.push(buffer);
            edge.deliver()
        })
    }

    /// Gives `value` and takes those of all ranks, by rank.
    pub fn gather(&self, value: T) -> Result<Vec<T>, TransportError> {
        let mut state = lock(&self.fabric.state);
        // A rank that is fast enters the next exchange while others still take this one's values.
        while state.takers > 0 && state.failure.is_none() {
            state = self.fabric.changed.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
        state.gathered[self.rank.index()] = Some(value);
        if state.gathered.iter().all(Option::is_some) {
            state.takers = state.gathered.len();
            self.fabric.changed.notify_all();
        }
        state.ranks[self.rank.index()] = Activity::Gathering;
        let mut state = self.wait_until_ready(state)?;
        let values = state.gathered.iter().flatten().cloned().collect();
        state.takers -= 1;
        if state.takers == 0 {
            state.gathered.iter_mut().for_each(|value| *value = None);
            self.fabric.changed.notify_all();
        }
        Ok(values)
    }

    /// Ends the pass of this rank.
    pub fn finish(mut self) {
        self.finished = true;
        let mut state = lock(&self.fabric.state);
        state.ranks[self.rank.index()] = Activity::Finished;
        drop(state);
        self.fabric.changed.notify_all();
    }

    /// Ends the pass of all ranks.
    pub fn abandon(mut self, reason: &str) {
        self.finished = true;
        self.fabric.abandon(self.rank, reason);
    }

    /// Changes the state and wakes whoever may now go on. An error is everybody's.
    fn change(&self, change: impl FnOnce(&mut State<T>) -> Result<(), TransportError>) -> Result<(), TransportError> {
        let mut state = lock(&self.fabric.state);
        match change(&mut state) {
            Ok(()) => {
                drop(state);
                self.fabric.changed.notify_all();
                Ok(())
            }
            Err(error) => Err(self.fail(state, error)),
        }
    }

    fn fail(&self, mut state: MutexGuard<'_, State<T>>, error: TransportError) -> TransportError {
        let (rank, reason) = (self.rank, error.to_string());
        state.failure.get_or_insert((rank, reason));
        state.ranks[rank.index()] = Activity::Finished;
        drop(state);
        self.fabric.changed.notify_all();
        error
    }

    fn wait_until_ready<'s>(
        &self,
        mut state: MutexGuard<'s, State<T>>,
    ) -> Result<MutexGuard<'s, State<T>>, TransportError> {
        let start = Instant::now();
        loop {
            if let Err(error) = state.verdict(self.rank) {
                return Err(if error.is_echo() { error } else { self.fail(state, error) });
            }
            let activity = state.ranks[self.rank.index()];
            if state.ready(activity) {
                state.ranks[self.rank.index()] = Activity::Computing;
                return Ok(state);
            }
            let waited = start.elapsed();
            let Some(left) = self.fabric.timeout.checked_sub(waited).filter(|left| !left.is_zero()) else {
                let what = match activity {
                    Activity::Waiting { tag, .. } => tag.to_string(),
                    _ => "all ranks".into(),
                };
                let (rank, seconds, doing) = (self.rank, waited.as_secs(), state.doing());
                return Err(self.fail(state, TransportError::Timeout { rank, seconds, what, doing }));
            };
            (state, _) = self.fabric.changed.wait_timeout(state, left).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
    }
}

impl<T> Fabric<T> {
    fn abandon(&self, rank: Rank, reason: &str) {
        let mut state = lock(&self.state);
        state.failure.get_or_insert((rank, reason.to_owned()));
        state.ranks[rank.index()] = Activity::Finished;
        drop(state);
        self.changed.notify_all();
    }
}

impl<T> Drop for Link<'_, T> {
    fn drop(&mut self) {
        if !self.finished {
            self.fabric.abandon(self.rank, "it ended early");
        }
    }
}

/// Locks; a lock that a panic left behind is taken all the same: whoever panicked is reported by other means, and the
/// state under the lock is consistent between any two of its methods.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
