//! The driver: walks one rank's plan through its [`Ledger`], with whatever does the work behind [`Execute`].
//!
//! The driver holds tapes and works between actions and threads tokens by value; the executor never
//! sees more than the action it runs. Every transition is checked before the executor is called and
//! committed after it succeeded. Whatever goes wrong ends in one place: executor and ledger both put
//! back the start of the step.

use core::fmt;

use crate::code::Code;
use crate::ids::{Microbatch, Stage};
use crate::ledger::{Action, Ledger, LedgerError, Rolls, Site, Verdict};
use crate::plan::{Direction, Node, Op, Peaks};
use crate::tape::{TapeRef, WorkRef};
use crate::token::{Bwd, Fwd, Token};

/// One end of a message.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Port {
    /// Index in [`Plan::edges`](crate::plan::Plan::edges).
    pub edge: u32,
    /// Which way it travels.
    pub direction: Direction,
    /// The stage at this end.
    pub stage: Stage,
    /// For which microbatch.
    pub microbatch: Microbatch,
    /// In which step.
    pub step: u64,
}

/// What does the work of one rank: a device, or a test. One method per kind of plan node.
///
/// An error ends the step; [`abort`](Execute::abort) is then called once.
pub trait Execute {
    /// What F retains for I.
    type Tape;
    /// What I retains for W.
    type Work;
    /// What can go wrong.
    type Error;

    /// A pass begins: keep what [`abort`](Execute::abort) must put back (an evaluation moves nothing).
    fn begin(&mut self, step: u64, mode: Mode) -> Result<(), Self::Error>;

    /// F: rolls the forward state by its token, retains a tape.
    fn forward(&mut self, at: Site, token: Token<Fwd>) -> Result<(Self::Tape, Token<Fwd>), Self::Error>;

    /// F of an evaluation: retains and rolls nothing.
    fn evaluate(&mut self, at: Site) -> Result<(), Self::Error>;

    /// R: completes what F kept to a tape. Rolls nothing.
    fn recompute(&mut self, at: Site, tape: Self::Tape) -> Result<Self::Tape, Self::Error>;

    /// I: consumes the tape, rolls the backward state by its token, retains work.
    fn input_grad(
        &mut self,
        at: Site,
        tape: Self::Tape,
        token: Token<Bwd>,
    ) -> Result<(Self::Work, Token<Bwd>), Self::Error>;

    /// W: consumes the work of one microbatch, or of a coalesced group. No token in reach.
    fn weight_grad(&mut self, works: std::vec::Drain<'_, (Site, Self::Work)>) -> Result<(), Self::Error>;

    /// B: I and W as one action.
    fn full_backward(&mut self, at: Site, tape: Self::Tape, token: Token<Bwd>) -> Result<Token<Bwd>, Self::Error> {
        let (work, token) = self.input_grad(at, tape, token)?;
        self.weight_grad(vec![(at, work)].drain(..))?;
        Ok(token)
    }

    /// Sends what F or I of this port made; does not wait for the receiver.
    fn send(&mut self, port: Port) -> Result<(), Self::Error>;

    /// Says that the next free receive buffer of the edge takes this message.
    fn post(&mut self, port: Port) -> Result<(), Self::Error>;

    /// Waits until the message is here.
    fn wait(&mut self, port: Port) -> Result<(), Self::Error>;

    /// Makes the weight cache of a stage current and rolls the weight's state.
    fn refresh(&mut self, stage: Stage) -> Result<(), Self::Error>;

    /// Finishes the gradients of a stage.
    fn reduce(&mut self, stage: Stage) -> Result<(), Self::Error>;

    /// Rolls of a stage since start, counted by the state itself and not by tokens.
    fn rolls(&self, stage: Stage) -> Rolls;

    /// Gathers norm and finite flag over all ranks, to where [`commit`](Execute::commit) finds them.
    fn agree(&mut self) -> Result<(), Self::Error>;

    /// The optimizer step. If a value was not finite it changes nothing, and puts back what [`begin`](Execute::begin)
    /// saw: device code decides, since a captured step has no host in it.
    fn commit(&mut self) -> Result<(), Self::Error>;

    /// What the ranks agreed on, the same on every rank; asked once, after commit. Counts kept on the host follow it.
    fn verdict(&mut self) -> Result<Verdict, Self::Error>;

    /// Puts back the state that [`begin`](Execute::begin) saw, and drops everything in flight.
    fn abort(&mut self);
}

/// What a rank holds between actions, by slot. Kept from step to step for its memory.
#[derive(Debug)]
pub struct Held<T, W> {
    tapes: Vec<Option<(TapeRef, T)>>,
    works: Vec<Option<(WorkRef, W)>>,
    group: Vec<(Site, W)>,
}

impl<T, W> Default for Held<T, W> {
    fn default() -> Self {
        Held { tapes: Vec::new(), works: Vec::new(), group: Vec::new() }
    }
}

impl<T, W> Held<T, W> {
    /// Empty, with room for `slots`.
    fn reset(&mut self, slots: u32) {
        self.tapes.clear();
        self.tapes.resize_with(slots as usize, || None);
        self.works.clear();
        self.works.resize_with(slots as usize, || None);
        self.group.clear();
    }
}

fn take<T>(held: &mut [Option<T>], slot: u32) -> Option<T> {
    held.get_mut(slot as usize)?.take()
}

fn keep<T>(held: &mut [Option<T>], slot: u32, value: T) {
    if let Some(place) = held.get_mut(slot as usize) {
        *place = Some(value);
    }
}

/// What a rank is to do with its plan.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Mode {
    /// One training step.
    Train,
    /// One forward-only pass, which leaves no trace.
    Evaluate {
        /// Microbatches of the pass.
        microbatches: u32,
    },
}

/// How a pass ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StepOutcome {
    /// Attempt number of the step; for an evaluation, of the step that follows.
    pub step: u64,
    /// Good commits so far.
    pub epoch: u64,
    /// What the ranks agreed on; `None` for an evaluation.
    pub verdict: Option<Verdict>,
    /// Most that was live at once.
    pub peaks: Peaks,
}

/// Why a pass ended early. The rank is back at the start of the step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum StepError<E> {
    /// The ledger refused an action.
    Refused(LedgerError),
    /// The executor failed.
    Failed {
        /// At this action.
        action: Action,
        /// With this error.
        error: E,
    },
}

impl<E> From<LedgerError> for StepError<E> {
    fn from(error: LedgerError) -> Self {
        StepError::Refused(error)
    }
}

impl<E: fmt::Display> fmt::Display for StepError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StepError::Refused(error) => error.fmt(f),
            StepError::Failed { action, error } => write!(f, "{action} failed: {error}"),
        }
    }
}

impl<E: std::error::Error + 'static> std::error::Error for StepError<E> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            StepError::Refused(error) => Some(error),
            StepError::Failed { error, .. } => Some(error),
        }
    }
}

/// Runs one rank's nodes: one training step, or one evaluation.
///
/// Branches of an overlap run one after the other.
///
/// # Errors
///
/// The first refusal or failure. Ledger and executor have then put back the start of the step.
pub fn run_rank<E: Execute>(
    nodes: &[Node],
    mode: Mode,
    ledger: &mut Ledger,
    held: &mut Held<E::Tape, E::Work>,
    executor: &mut E,
) -> Result<StepOutcome, StepError<E::Error>> {
    match mode {
        Mode::Train => ledger.begin_step().map(|_| ())?,
        Mode::Evaluate { microbatches } => ledger.begin_evaluation(microbatches)?,
    }
    held.reset(ledger.pool().len());
    let step = ledger.step();
    let result = Walk { nodes, mode, step, ledger: &mut *ledger, held: &mut *held, executor: &mut *executor }.run();
    let outcome =
        result.and_then(|verdict| Ok(StepOutcome { step, epoch: ledger.epoch()?, verdict, peaks: ledger.peaks() }));
    if outcome.is_err() {
        executor.abort();
        ledger.abort_step();
        held.reset(0);
    }
    outcome
}

struct Walk<'a, E: Execute> {
    nodes: &'a [Node],
    mode: Mode,
    step: u64,
    ledger: &'a mut Ledger,
    held: &'a mut Held<E::Tape, E::Work>,
    executor: &'a mut E,
}

type Walked<E, T = ()> = Result<T, StepError<<E as Execute>::Error>>;

impl<E: Execute> Walk<'_, E> {
    fn run(&mut self) -> Walked<E, Option<Verdict>> {
        let action = if self.mode == Mode::Train { Action::Step } else { Action::Evaluation };
        self.executor.begin(self.step, self.mode).map_err(|error| StepError::Failed { action, error })?;
        let mut committed = false;
        let mut at = 0;
        while let Some(node) = self.nodes.get(at) {
            at += 1;
            match node.op {
                Op::WeightGrad => {
                    let joins = self.nodes[at..].iter().take_while(|n| n.op == Op::WeightGradJoin).count();
                    self.weight_grad(node, at..at + joins)?;
                    at += joins;
                }
                Op::Agree => self.agree(node)?,
                Op::Commit => {
                    self.commit(node)?;
                    committed = true;
                }
                _ => self.node(node)?,
            }
        }
        match self.mode {
            Mode::Evaluate { .. } => {
                self.ledger.end_evaluation()?;
                Ok(None)
            }
            Mode::Train if !committed => Err(self.uncommitted().into()),
            Mode::Train => {
                let verdict = self.executor.verdict().map_err(|error| StepError::Failed { action, error })?;
                self.ledger.settle(verdict)?;
                Ok(Some(verdict))
            }
        }
    }

    fn node(&mut self, node: &Node) -> Walked<E> {
        match node.op {
            Op::Forward if self.mode != Mode::Train => self.evaluate(node),
            Op::Forward => self.forward(node),
            Op::InputGrad => self.input_grad(node),
            Op::FullBackward => self.full_backward(node),
            Op::Recompute => self.recompute(node),
            Op::SendForward => self.send(node, Direction::Forward),
            Op::SendBackward => self.send(node, Direction::Backward),
            Op::PostForward => self.post(node, Direction::Forward),
            Op::PostBackward => self.post(node, Direction::Backward),
            Op::WaitForward => self.wait(node, Direction::Forward),
            Op::WaitBackward => self.wait(node, Direction::Backward),
            Op::Refresh => self.refresh(node),
            Op::Reduce => self.reduce(node),
            // A join without the W that it joins has found no work to take.
            Op::WeightGradJoin => Err(self.ledger.nothing_held(node.op, node.stage, node.microbatch).into()),
            Op::WeightGrad | Op::Agree | Op::Commit => Ok(()), // taken by the walk
            Op::OverlapBegin | Op::OverlapBranch | Op::OverlapEnd | Op::GroupBegin | Op::GroupEnd => Ok(()),
        }
    }

    fn forward(&mut self, node: &Node) -> Walked<E> {
        let (pending, token) = self.ledger.begin_forward(node.stage, node.microbatch, node.slot)?;
        let (tape, token) = self.executor.forward(pending.site(), token).map_err(|e| failed(node, e))?;
        let reference = pending.finish(token)?;
        keep(&mut self.held.tapes, node.slot, (reference, tape));
        Ok(())
    }

    fn evaluate(&mut self, node: &Node) -> Walked<E> {
        let pending = self.ledger.begin_evaluate(node.stage, node.microbatch)?;
        self.executor.evaluate(pending.site()).map_err(|e| failed(node, e))?;
        pending.finish();
        Ok(())
    }

    fn recompute(&mut self, node: &Node) -> Walked<E> {
        let (reference, tape) = self.tape(node)?;
        let pending = self.ledger.begin_recompute(node.stage, node.microbatch, &reference)?;
        let tape = self.executor.recompute(pending.site(), tape).map_err(|e| failed(node, e))?;
        pending.finish();
        keep(&mut self.held.tapes, node.slot, (reference, tape));
        Ok(())
    }

    fn input_grad(&mut self, node: &Node) -> Walked<E> {
        let (reference, tape) = self.tape(node)?;
        let (pending, token) = self.ledger.begin_input_grad(node.stage, node.microbatch, reference)?;
        let (work, token) = self.executor.input_grad(pending.site(), tape, token).map_err(|e| failed(node, e))?;
        let reference = pending.finish(token)?;
        keep(&mut self.held.works, node.slot, (reference, work));
        Ok(())
    }

    fn full_backward(&mut self, node: &Node) -> Walked<E> {
        let (reference, tape) = self.tape(node)?;
        let (pending, token) = self.ledger.begin_full_backward(node.stage, node.microbatch, reference)?;
        let token = self.executor.full_backward(pending.site(), tape, token).map_err(|e| failed(node, e))?;
        pending.finish(token)?;
        Ok(())
    }

    fn weight_grad(&mut self, node: &Node, joins: core::ops::Range<usize>) -> Walked<E> {
        let (reference, work) = self.work(node)?;
        let mut pending = self.ledger.begin_weight_grad(node.stage, node.microbatch, reference)?;
        self.held.group.push((pending.site(), work));
        for join in &self.nodes[joins] {
            let Some((reference, work)) = take(&mut self.held.works, join.slot) else {
                drop(pending);
                return Err(self.ledger.nothing_held(join.op, join.stage, join.microbatch).into());
            };
            self.held.group.push((pending.join(join.stage, join.microbatch, reference)?, work));
        }
        self.executor.weight_grad(self.held.group.drain(..)).map_err(|e| failed(node, e))?;
        pending.finish()?;
        Ok(())
    }

    fn send(&mut self, node: &Node, direction: Direction) -> Walked<E> {
        let pending = self.ledger.begin_send(direction, node.stage, node.microbatch)?;
        self.executor.send(port(node, direction, self.step)).map_err(|e| failed(node, e))?;
        pending.finish();
        Ok(())
    }

    fn post(&mut self, node: &Node, direction: Direction) -> Walked<E> {
        self.executor.post(port(node, direction, self.step)).map_err(|e| failed(node, e))
    }

    fn wait(&mut self, node: &Node, direction: Direction) -> Walked<E> {
        let pending = self.ledger.begin_wait(direction, node.stage, node.microbatch)?;
        self.executor.wait(port(node, direction, self.step)).map_err(|e| failed(node, e))?;
        pending.finish();
        Ok(())
    }

    fn refresh(&mut self, node: &Node) -> Walked<E> {
        let pending = self.ledger.begin_refresh(node.stage)?;
        self.executor.refresh(node.stage).map_err(|e| failed(node, e))?;
        pending.finish();
        Ok(())
    }

    fn reduce(&mut self, node: &Node) -> Walked<E> {
        let pending = self.ledger.begin_reduce(node.stage)?;
        self.executor.reduce(node.stage).map_err(|e| failed(node, e))?;
        pending.finish();
        Ok(())
    }

    fn agree(&mut self, node: &Node) -> Walked<E> {
        let pending = self.ledger.begin_agree(|stage| self.executor.rolls(stage))?;
        self.executor.agree().map_err(|e| failed(node, e))?;
        pending.finish();
        Ok(())
    }

    fn commit(&mut self, node: &Node) -> Walked<E> {
        let pending = self.ledger.begin_commit()?;
        self.executor.commit().map_err(|e| failed(node, e))?;
        pending.finish();
        Ok(())
    }

    fn tape(&mut self, node: &Node) -> Walked<E, (TapeRef, E::Tape)> {
        take(&mut self.held.tapes, node.slot)
            .ok_or_else(|| self.ledger.nothing_held(node.op, node.stage, node.microbatch).into())
    }

    fn work(&mut self, node: &Node) -> Walked<E, (WorkRef, E::Work)> {
        take(&mut self.held.works, node.slot)
            .ok_or_else(|| self.ledger.nothing_held(node.op, node.stage, node.microbatch).into())
    }

    fn uncommitted(&self) -> LedgerError {
        LedgerError {
            code: Code::CommitMissing,
            rank: self.ledger.rank(),
            step: self.step,
            action: Action::Step,
            fault: "ends without a commit".into(),
            expected: "commit as the last node".into(),
            found: "none".into(),
        }
    }
}

fn failed<E>(node: &Node, error: E) -> StepError<E> {
    StepError::Failed { action: node.into(), error }
}

const fn port(node: &Node, direction: Direction, step: u64) -> Port {
    Port { edge: node.slot, direction, stage: node.stage, microbatch: node.microbatch, step }
}

#[cfg(test)]
mod tests;
