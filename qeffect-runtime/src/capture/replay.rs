//! A captured step, run: its programs in order, under the ledger.

use qeffect_core::execute::{Execute, Mode, Port};
use qeffect_core::ids::{Microbatch, Stage as StageId};
use qeffect_core::ledger::{Action, Rolls, Site, Verdict};
use qeffect_core::plan::{Direction, Op};
use qeffect_core::token::{Bwd, Fwd, Token};
use qeffect_kernels::nvtx;

use super::program::{Instr, Program};
use crate::data::Windows;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::rank::Aftermath;
use crate::shard::Shard;
use crate::stage::Stage;
use crate::timed::Idle;
use crate::wire::Wire;

/// Runs a program. `step`: the number that its messages carry.
pub(crate) fn play<S: Stage>(
    program: &Program,
    shard: &mut Shard<S>,
    wire: &mut Wire<'_>,
    step: u64,
    after: &mut Aftermath,
) -> Result<()> {
    shard.add_rolls(&program.rolls)?;
    after.unsure |= is_commit(program.action);
    for instr in &program.instrs {
        match instr {
            Instr::Launch(graph) => {
                // The first list of a step saves what an abort puts back; one that fails may have saved a part.
                shard.device().launch(*graph).inspect_err(|_| after.unsure |= !after.began)?;
                after.began = true;
                after.launches += 1;
            }
            Instr::Send { port, acts } => wire.send(shard.device(), Port { step, ..*port }, acts)?,
            Instr::Post { port } => wire.post(Port { step, ..*port })?,
            Instr::Wait { port, acts } => wire.wait(shard.device(), Port { step, ..*port }, acts)?,
            Instr::Release { edge } => wire.release(*edge)?,
            Instr::Tie => {
                let all = wire.gather(shard.offer_ties()?)?;
                shard.accept_ties(&all)?;
            }
            Instr::Agree => {
                let all = wire.gather(shard.offer()?)?;
                shard.accept(&all)?;
                // In a program of a whole step, what follows is its commit.
                after.unsure |= program.action == Action::Step;
            }
        }
    }
    Ok(())
}

const fn is_commit(action: Action) -> bool {
    matches!(action, Action::Node { op: Op::Commit, .. })
}

/// Replays action by action: the driver walks the plan as ever, and each of its calls runs the next program.
pub(crate) struct Replayer<'a, 'w, S> {
    pub shard: &'a mut Shard<S>,
    pub programs: std::slice::Iter<'a, Program>,
    pub wire: &'a mut Wire<'w>,
    pub batch: &'a [Windows],
    pub after: &'a mut Aftermath,
    pub step: u64,
}

impl<S: Stage> Replayer<'_, '_, S> {
    fn next(&mut self, action: Action) -> Result<()> {
        let _range = nvtx::range(action);
        let program = self.programs.next();
        match program.filter(|program| program.action == action) {
            Some(program) => play(program, self.shard, self.wire, self.step, self.after),
            None => {
                let captured = program.map_or_else(|| "nothing more".into(), |program| program.action.to_string());
                Err(Error::Config(format!("{action} is to be replayed where {captured} was captured")))
            }
        }
    }

    fn compute(&mut self, op: Op, at: Site) -> Result<()> {
        self.next(node(op, at.stage(), at.microbatch()))
    }

    fn roll<D>(&self, token: Token<D>, times: impl FnOnce((u32, u32)) -> u32) -> Result<Token<D>> {
        let times = times(self.shard.rolls_per_action(token.stage())?);
        Ok((0..times).fold(token, |token, _| token.rolled()))
    }
}

/// How a call of the driver is named in a trace.
pub(crate) const fn node(op: Op, stage: StageId, microbatch: Microbatch) -> Action {
    Action::Node { op, stage, microbatch }
}

/// The same for messages.
pub(crate) const fn message([forward, backward]: [Op; 2], port: Port) -> Action {
    let op = match port.direction {
        Direction::Forward => forward,
        Direction::Backward => backward,
    };
    node(op, port.stage, port.microbatch)
}

/// Sends, by direction.
pub(crate) const SEND: [Op; 2] = [Op::SendForward, Op::SendBackward];
/// Posts.
pub(crate) const POST: [Op; 2] = [Op::PostForward, Op::PostBackward];
/// Waits.
pub(crate) const WAIT: [Op; 2] = [Op::WaitForward, Op::WaitBackward];

impl<S: Stage> Idle for Replayer<'_, '_, S> {
    fn idle(&mut self) -> Result<()> {
        self.shard.idle()
    }

    fn device(&mut self) -> &mut dyn Device {
        self.shard.device()
    }
}

impl<S: Stage> Execute for Replayer<'_, '_, S> {
    /// What is retained lies where it lay when the step was captured.
    type Tape = ();
    type Work = ();
    type Error = Error;

    fn begin(&mut self, step: u64, mode: Mode) -> Result<()> {
        if mode != Mode::Train {
            return Err(Error::Config("an evaluation is not captured".into()));
        }
        self.step = step;
        self.shard.begin_replay()?;
        self.shard.feed(self.batch, step)?;
        self.next(Action::Step)
    }

    fn forward(&mut self, at: Site, token: Token<Fwd>) -> Result<((), Token<Fwd>)> {
        self.compute(Op::Forward, at)?;
        Ok(((), self.roll(token, |(forward, _)| forward)?))
    }

    fn evaluate(&mut self, at: Site) -> Result<()> {
        self.compute(Op::Forward, at)
    }

    fn recompute(&mut self, at: Site, (): ()) -> Result<()> {
        self.compute(Op::Recompute, at)
    }

    fn input_grad(&mut self, at: Site, (): (), token: Token<Bwd>) -> Result<((), Token<Bwd>)> {
        self.compute(Op::InputGrad, at)?;
        Ok(((), self.roll(token, |(_, backward)| backward)?))
    }

    fn weight_grad(&mut self, mut works: std::vec::Drain<'_, (Site, ())>) -> Result<()> {
        match works.next() {
            Some((at, ())) => self.compute(Op::WeightGrad, at),
            None => Ok(()),
        }
    }

    fn full_backward(&mut self, at: Site, (): (), token: Token<Bwd>) -> Result<Token<Bwd>> {
        self.compute(Op::FullBackward, at)?;
        self.roll(token, |(_, backward)| backward)
    }

    fn send(&mut self, port: Port) -> Result<()> {
        self.next(message(SEND, port))
    }

    fn post(&mut self, port: Port) -> Result<()> {
        self.next(message(POST, port))
    }

    fn wait(&mut self, port: Port) -> Result<()> {
        self.next(message(WAIT, port))
    }

    fn refresh(&mut self, stage: StageId) -> Result<()> {
        self.next(node(Op::Refresh, stage, Microbatch(0)))
    }

    fn reduce(&mut self, stage: StageId) -> Result<()> {
        self.next(node(Op::Reduce, stage, Microbatch(0)))
    }

    fn rolls(&self, stage: StageId) -> Rolls {
        self.shard.rolls(stage).unwrap_or_default()
    }

    fn agree(&mut self) -> Result<()> {
        self.next(node(Op::Agree, StageId(0), Microbatch(0)))
    }

    fn commit(&mut self) -> Result<()> {
        self.next(node(Op::Commit, StageId(0), Microbatch(0)))
    }

    fn verdict(&mut self) -> Result<Verdict> {
        self.after.conclude(self.shard)
    }

    fn abort(&mut self) {
        if self.after.began {
            self.after.failure = self.shard.abort().err();
        } else {
            self.shard.cancel_replay();
        }
    }
}
