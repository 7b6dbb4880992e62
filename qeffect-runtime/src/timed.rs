//! An executor whose calls are timed.
//!
//! A device may only queue what an action issues. So that an action's time is that of its commands, each call ends when
//! the device has nothing left to do; a measured step therefore takes longer than others, and computes the same bits.

use std::time::{Duration, Instant};

use qeffect_core::execute::{Execute, Mode, Port};
use qeffect_core::ids::{Microbatch, Stage};
use qeffect_core::ledger::{Action, Rolls, Site, Verdict};
use qeffect_core::measured::Span;
use qeffect_core::plan::Op;
use qeffect_core::token::{Bwd, Fwd, Token};

use crate::capture::replay::{SEND, WAIT, message, node};
use crate::error::{Error, Result};

/// What can wait for its device.
pub(crate) trait Idle {
    /// Returns when all that was issued has been carried out.
    fn idle(&mut self) -> Result<()>;
}

/// The time of a step, and what has been measured in it.
pub(crate) struct Clock {
    /// The start of the step, the same on all ranks.
    zero: Instant,
    pub spans: Vec<Span>,
}

impl Clock {
    pub fn new(zero: Instant) -> Clock {
        Clock { zero, spans: Vec::new() }
    }

    fn now(&self) -> Duration {
        self.zero.elapsed()
    }

    fn add(&mut self, action: Action, start: Duration, end: Duration) {
        if let Action::Node { op, stage, microbatch } = action {
            self.spans.push(Span { op, stage, microbatch, start, end });
        }
    }
}

/// Runs what `inner` runs.
pub(crate) struct Timed<'c, E> {
    pub inner: E,
    pub clock: &'c mut Clock,
}

impl<E: Execute<Error = Error> + Idle> Timed<'_, E> {
    fn span<T>(&mut self, action: Action, run: impl FnOnce(&mut E) -> Result<T>) -> Result<T> {
        let start = self.clock.now();
        let value = run(&mut self.inner)?;
        self.inner.idle()?;
        self.clock.add(action, start, self.clock.now());
        Ok(value)
    }

    fn action<T>(&mut self, op: Op, at: Site, run: impl FnOnce(&mut E) -> Result<T>) -> Result<T> {
        self.span(node(op, at.stage(), at.microbatch()), run)
    }
}

const NO_STAGE: Stage = Stage(0);
const NO_MICROBATCH: Microbatch = Microbatch(0);

impl<E: Execute<Error = Error> + Idle> Execute for Timed<'_, E> {
    type Tape = E::Tape;
    type Work = E::Work;
    type Error = Error;

    fn begin(&mut self, step: u64, mode: Mode) -> Result<()> {
        self.inner.begin(step, mode)?;
        self.inner.idle()
    }

    fn forward(&mut self, at: Site, token: Token<Fwd>) -> Result<(E::Tape, Token<Fwd>)> {
        self.action(Op::Forward, at, |inner| inner.forward(at, token))
    }

    fn evaluate(&mut self, at: Site) -> Result<()> {
        self.action(Op::Forward, at, |inner| inner.evaluate(at))
    }

    fn recompute(&mut self, at: Site, tape: E::Tape) -> Result<E::Tape> {
        self.action(Op::Recompute, at, |inner| inner.recompute(at, tape))
    }

    fn input_grad(&mut self, at: Site, tape: E::Tape, token: Token<Bwd>) -> Result<(E::Work, Token<Bwd>)> {
        self.action(Op::InputGrad, at, |inner| inner.input_grad(at, tape, token))
    }

    /// The time of a group is shared evenly among its members: they are computed as one.
    fn weight_grad(&mut self, works: std::vec::Drain<'_, (Site, E::Work)>) -> Result<()> {
        let sites: Vec<Site> = works.as_slice().iter().map(|(at, _)| *at).collect();
        let start = self.clock.now();
        self.inner.weight_grad(works)?;
        self.inner.idle()?;
        let whole = self.clock.now().saturating_sub(start);
        let until = |members: usize| start + whole.mul_f64(members as f64 / sites.len() as f64);
        for (at, site) in sites.iter().enumerate() {
            self.clock.add(node(Op::WeightGrad, site.stage(), site.microbatch()), until(at), until(at + 1));
        }
        Ok(())
    }

    fn full_backward(&mut self, at: Site, tape: E::Tape, token: Token<Bwd>) -> Result<Token<Bwd>> {
        self.action(Op::FullBackward, at, |inner| inner.full_backward(at, tape, token))
    }

    fn send(&mut self, port: Port) -> Result<()> {
        self.span(message(SEND, port), |inner| inner.send(port))
    }

    fn post(&mut self, port: Port) -> Result<()> {
        self.inner.post(port)
    }

    fn wait(&mut self, port: Port) -> Result<()> {
        self.span(message(WAIT, port), |inner| inner.wait(port))
    }

    fn refresh(&mut self, stage: Stage) -> Result<()> {
        self.span(node(Op::Refresh, stage, NO_MICROBATCH), |inner| inner.refresh(stage))
    }

    fn reduce(&mut self, stage: Stage) -> Result<()> {
        self.span(node(Op::Reduce, stage, NO_MICROBATCH), |inner| inner.reduce(stage))
    }

    fn rolls(&self, stage: Stage) -> Rolls {
        self.inner.rolls(stage)
    }

    fn agree(&mut self) -> Result<()> {
        self.span(node(Op::Agree, NO_STAGE, NO_MICROBATCH), E::agree)
    }

    fn commit(&mut self) -> Result<()> {
        self.span(node(Op::Commit, NO_STAGE, NO_MICROBATCH), E::commit)
    }

    fn verdict(&mut self) -> Result<Verdict> {
        self.inner.verdict()
    }

    fn abort(&mut self) {
        self.inner.abort();
    }
}
