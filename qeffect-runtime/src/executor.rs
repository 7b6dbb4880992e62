//! What the driver calls for each node of a plan: moves tensors between stages and runs the shard's actions.
//!
//! It knows nothing of what tensors mean. Between two stages of one rank a tensor is handed over in place; between ranks
//! its bytes travel. A tensor that came by message holds its receive buffer until its consumer has run. The same code
//! runs a step and rehearses one for capture: then messages, too, are only written down.

use qeffect_core::code::Code;
use qeffect_core::execute::{Execute, Mode, Port};
use qeffect_core::ids::{Microbatch, Stage as StageId};
use qeffect_core::ledger::{Action, Rolls, Site, Verdict};
use qeffect_core::plan::{Direction, Node, Op, Plan};
use qeffect_core::token::{Bwd, Fwd, Token};
use qeffect_kernels::nvtx::{self, Range};

use crate::act::Act;
use crate::capture::record::Entry;
use crate::capture::replay::{POST, SEND, WAIT, message, node};
use crate::data::Windows;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::rank::Aftermath;
use crate::recompute::{Recomputed, StageTape};
use crate::shard::Shard;
use crate::stage::Stage;
use crate::timed::Idle;
use crate::transport::TransportError;
use crate::wire::{MessageShape, Wire};

/// The tensors that one action gives to another, on their way.
#[derive(Default)]
struct Parcel {
    acts: Vec<Act>,
    /// They came by message, in a receive buffer.
    received: bool,
}

/// Tensors on their way: per edge and microbatch.
#[derive(Default)]
pub(crate) struct Mail {
    inbound: Vec<Vec<Option<Parcel>>>,
    outbound: Vec<Vec<Option<Vec<Act>>>>,
}

impl Mail {
    pub fn reset(&mut self, edges: usize, microbatches: usize) {
        self.inbound.resize_with(edges, Vec::new);
        self.outbound.resize_with(edges, Vec::new);
        for slots in &mut self.inbound {
            slots.clear();
            slots.resize_with(microbatches, || None);
        }
        for slots in &mut self.outbound {
            slots.clear();
            slots.resize_with(microbatches, || None);
        }
    }
}

/// Where messages go.
pub(crate) enum Outlet<'a, 'w> {
    /// To the other ranks.
    Wire(&'a mut Wire<'w>),
    /// Into the trace that the shard's device keeps.
    Trace,
}

pub(crate) struct Executor<'a, 'w, S: Stage> {
    pub shard: &'a mut Shard<S>,
    pub mail: &'a mut Mail,
    pub outlet: Outlet<'a, 'w>,
    pub plan: &'a Plan,
    pub recomputed: &'a Recomputed,
    /// What the pass runs on; a rehearsal has none.
    pub batch: &'a [Windows],
    /// Keep the logits of every microbatch, and compute no loss.
    pub logits: bool,
    pub after: &'a mut Aftermath,
}

impl<S: Stage> Executor<'_, '_, S> {
    fn edge(&self, direction: Direction, from: StageId) -> Option<u32> {
        let at = self.plan.edges.iter().position(|edge| edge.direction == direction && edge.from == from)?;
        Some(at as u32)
    }

    /// The edge that brings a stage's input.
    fn input(&self, direction: Direction, to: StageId) -> Option<u32> {
        let at = self.plan.edges.iter().position(|edge| edge.direction == direction && edge.to == to)?;
        Some(at as u32)
    }

    /// Takes what an action consumes: nothing at the ends of the pipeline.
    fn take(&mut self, direction: Direction, at: Site) -> Result<(u32, Parcel)> {
        let Some(edge) = self.input(direction, at.stage()) else { return Ok((0, Parcel::default())) };
        let slot = self.mail.inbound.get_mut(edge as usize).and_then(|slots| slots.get_mut(at.microbatch().index()));
        match slot.and_then(Option::take) {
            Some(parcel) => Ok((edge, parcel)),
            None => Err(Error::Contract {
                code: Code::MessageEarly,
                message: format!("stage {} runs microbatch {} before its input is there", at.stage(), at.microbatch()),
            }),
        }
    }

    /// The consumer has run.
    fn consumed(&mut self, (edge, parcel): (u32, Parcel)) -> Result<()> {
        let Parcel { acts, received } = parcel;
        self.free(acts)?;
        match &mut self.outlet {
            _ if !received => Ok(()),
            Outlet::Wire(wire) => wire.release(edge),
            Outlet::Trace => {
                self.shard.recorder().log(Entry::Release { edge });
                Ok(())
            }
        }
    }

    /// Hands a result on: in place, or to the send that follows.
    fn deliver(&mut self, direction: Direction, at: Site, acts: Vec<Act>) -> Result<()> {
        let Some(edge) = self.edge(direction, at.stage()) else { return self.free(acts) };
        let ends = &self.plan.edges[edge as usize];
        let (edge, m) = (edge as usize, at.microbatch().index());
        if ends.from_rank == ends.to_rank {
            self.mail.inbound[edge][m] = Some(Parcel { acts, received: false });
        } else {
            self.mail.outbound[edge][m] = Some(acts);
        }
        Ok(())
    }

    fn free(&mut self, acts: Vec<Act>) -> Result<()> {
        acts.into_iter().try_for_each(|act| self.shard.free(act))
    }

    /// The slot that F of a stage and microbatch leaves its tape in.
    fn slot(&self, at: Site) -> Result<u32> {
        let forward =
            |node: &&Node| (node.op, node.stage, node.microbatch) == (Op::Forward, at.stage(), at.microbatch());
        let missing = || Error::Config(format!("the plan has no F({}, {})", at.stage(), at.microbatch()));
        self.plan.nodes.iter().find(forward).map(|node| node.slot).ok_or_else(missing)
    }

    /// F has left its tape in its slot.
    fn write_tag(&mut self, at: Site) -> Result<()> {
        if !self.shard.is_tagged() {
            return Ok(());
        }
        let slot = self.slot(at)?;
        self.shard.write_tag(slot, at.stage(), at.microbatch())
    }

    /// R, I or W is about to read what F left there.
    fn check_tag(&mut self, at: Site) -> Result<()> {
        if !self.shard.is_tagged() {
            return Ok(());
        }
        let slot = self.slot(at)?;
        self.shard.check_tag(slot, at.stage(), at.microbatch())
    }

    /// Names what follows in a trace, or for a profiler.
    fn enter(&mut self, action: Action) -> Range {
        self.shard.recorder().enter(action);
        match self.outlet {
            Outlet::Wire(_) => nvtx::range(action),
            Outlet::Trace => Range::none(),
        }
    }

    fn enter_compute(&mut self, op: Op, at: Site) -> Range {
        self.enter(node(op, at.stage(), at.microbatch()))
    }

    fn run_input_grad(&mut self, at: Site, tape: S::Tape, token: Token<Bwd>) -> Result<(S::Work, Token<Bwd>)> {
        self.check_tag(at)?;
        let parcel = self.take(Direction::Backward, at)?;
        let (dx, work, token) = self.shard.input_grad(at.stage(), at.microbatch(), &parcel.1.acts, tape, token)?;
        self.consumed(parcel)?;
        self.deliver(Direction::Backward, at, dx)?;
        Ok((work, token))
    }
}

impl<S: Stage> Execute for Executor<'_, '_, S> {
    type Tape = StageTape<S::Tape>;
    type Work = S::Work;
    type Error = Error;

    fn begin(&mut self, step: u64, mode: Mode) -> Result<()> {
        if mode != Mode::Train {
            return self.shard.load(self.batch);
        }
        if matches!(self.outlet, Outlet::Wire(_)) {
            self.shard.feed(self.batch, step)?;
        }
        let _range = self.enter(Action::Step);
        self.shard.begin()?;
        self.after.began = true;
        Ok(())
    }

    fn forward(&mut self, at: Site, token: Token<Fwd>) -> Result<(Self::Tape, Token<Fwd>)> {
        let _range = self.enter_compute(Op::Forward, at);
        let parcel = self.take(Direction::Forward, at)?;
        let x = &parcel.1.acts[..];
        let (stage, microbatch) = (at.stage(), at.microbatch());
        let (y, tape, token) = if self.recomputed.contains(stage, microbatch) {
            let (y, seed, token) = self.shard.forward_for_recompute(stage, microbatch, x, token)?;
            (y, StageTape::Seed(seed), token)
        } else {
            let (y, tape, token) = self.shard.forward(stage, microbatch, x, token)?;
            (y, StageTape::Whole(tape), token)
        };
        self.write_tag(at)?;
        self.consumed(parcel)?;
        self.deliver(Direction::Forward, at, y)?;
        Ok((tape, token))
    }

    fn evaluate(&mut self, at: Site) -> Result<()> {
        let _range = nvtx::range(node(Op::Forward, at.stage(), at.microbatch()));
        let parcel = self.take(Direction::Forward, at)?;
        let y = self.shard.evaluate(at.stage(), at.microbatch(), &parcel.1.acts, !self.logits)?;
        self.consumed(parcel)?;
        match y[..] {
            [logits] if self.logits && self.edge(Direction::Forward, at.stage()).is_none() => {
                let m = at.microbatch().index();
                let kept = &mut self.after.logits;
                kept.resize_with(kept.len().max(m + 1), Vec::new);
                kept[m] = self.shard.reals(logits)?;
                self.shard.free(logits)
            }
            _ => self.deliver(Direction::Forward, at, y),
        }
    }

    fn recompute(&mut self, at: Site, tape: Self::Tape) -> Result<Self::Tape> {
        let _range = self.enter_compute(Op::Recompute, at);
        self.check_tag(at)?;
        let tape = self.shard.recompute(at.stage(), at.microbatch(), tape.seed()?)?;
        Ok(StageTape::Whole(tape))
    }

    fn input_grad(&mut self, at: Site, tape: Self::Tape, token: Token<Bwd>) -> Result<(S::Work, Token<Bwd>)> {
        let _range = self.enter_compute(Op::InputGrad, at);
        self.run_input_grad(at, tape.whole()?, token)
    }

    fn weight_grad(&mut self, works: std::vec::Drain<'_, (Site, S::Work)>) -> Result<()> {
        let first = works.as_slice().first().map(|(at, _)| *at);
        let _range = first.map(|at| self.enter_compute(Op::WeightGrad, at));
        for (at, work) in works {
            self.check_tag(at)?;
            self.shard.weight_grad(at.stage(), at.microbatch(), work)?;
        }
        Ok(())
    }

    fn full_backward(&mut self, at: Site, tape: Self::Tape, token: Token<Bwd>) -> Result<Token<Bwd>> {
        let _range = self.enter_compute(Op::FullBackward, at);
        let (work, token) = self.run_input_grad(at, tape.whole()?, token)?;
        self.shard.weight_grad(at.stage(), at.microbatch(), work)?;
        Ok(token)
    }

    fn send(&mut self, port: Port) -> Result<()> {
        let _range = self.enter(message(SEND, port));
        let slot = self.mail.outbound.get_mut(port.edge as usize).and_then(|s| s.get_mut(port.microbatch.index()));
        let Some(acts) = slot.and_then(Option::take) else {
            let message = format!("{} sends what is not there", message(SEND, port));
            return Err(Error::Contract { code: Code::MessageEarly, message });
        };
        match &mut self.outlet {
            Outlet::Wire(wire) => wire.send(self.shard.device(), port, &acts)?,
            Outlet::Trace => self.shard.recorder().log(Entry::Send { port, acts: acts.clone() }),
        }
        self.free(acts)
    }

    fn post(&mut self, port: Port) -> Result<()> {
        let _range = self.enter(message(POST, port));
        match &mut self.outlet {
            Outlet::Wire(wire) => wire.post(port),
            Outlet::Trace => {
                self.shard.recorder().log(Entry::Post { port });
                Ok(())
            }
        }
    }

    fn wait(&mut self, port: Port) -> Result<()> {
        let _range = self.enter(message(WAIT, port));
        let stage = self.shard.stages().find(|(id, _)| *id == port.stage);
        let Some(shape) = stage.and_then(|(_, stage)| MessageShape::of(stage, port.direction)) else {
            return Err(TransportError::NoEdge { edge: port.edge }.into());
        };
        let leases = shape.tensors.iter().map(|[rows, cols]| self.shard.lease(shape.dtype, *rows, *cols));
        let acts = leases.collect::<Result<Vec<_>>>()?;
        match &mut self.outlet {
            Outlet::Wire(wire) => wire.wait(self.shard.device(), port, &acts)?,
            Outlet::Trace => self.shard.recorder().log(Entry::Wait { port, acts: acts.clone() }),
        }
        let slot = self.mail.inbound.get_mut(port.edge as usize).and_then(|s| s.get_mut(port.microbatch.index()));
        *slot.ok_or(TransportError::NoEdge { edge: port.edge })? = Some(Parcel { acts, received: true });
        Ok(())
    }

    fn refresh(&mut self, stage: StageId) -> Result<()> {
        let _range = self.enter(node(Op::Refresh, stage, Microbatch(0)));
        self.shard.refresh(stage)
    }

    fn reduce(&mut self, stage: StageId) -> Result<()> {
        let _range = self.enter(node(Op::Reduce, stage, Microbatch(0)));
        self.shard.reduce(stage)
    }

    fn rolls(&self, stage: StageId) -> Rolls {
        self.shard.rolls(stage).unwrap_or_default()
    }

    fn agree(&mut self) -> Result<()> {
        let _range = self.enter(node(Op::Agree, StageId(0), Microbatch(0)));
        if self.shard.ties_across() {
            match &mut self.outlet {
                Outlet::Wire(wire) => {
                    let all = wire.gather(self.shard.offer_ties()?)?;
                    self.shard.accept_ties(&all)?;
                }
                Outlet::Trace => {
                    let ends = self.shard.far_ends();
                    self.shard.recorder().log(Entry::Tie(ends));
                }
            }
        }
        self.shard.combine_ties()?;
        self.shard.measure()?;
        match &mut self.outlet {
            Outlet::Wire(wire) => {
                let all = wire.gather(self.shard.offer()?)?;
                self.shard.accept(&all)?;
            }
            Outlet::Trace => {
                let exchange = self.shard.exchange()?;
                self.shard.recorder().log(Entry::Agree(exchange));
            }
        }
        self.shard.settle()
    }

    fn commit(&mut self) -> Result<()> {
        let _range = self.enter(node(Op::Commit, StageId(0), Microbatch(0)));
        self.after.unsure = true;
        self.shard.commit()
    }

    fn verdict(&mut self) -> Result<Verdict> {
        match &self.outlet {
            Outlet::Wire(_) => self.after.conclude(self.shard),
            // A rehearsal is of a good step.
            Outlet::Trace => Ok(Verdict::Good),
        }
    }

    fn abort(&mut self) {
        let result = if self.after.began { self.shard.abort() } else { self.shard.abort_evaluation() };
        self.after.failure = result.err();
        self.mail.reset(0, 0);
    }
}

impl<S: Stage> Idle for Executor<'_, '_, S> {
    fn idle(&mut self) -> Result<()> {
        self.shard.idle()
    }

    fn device(&mut self) -> &mut dyn Device {
        self.shard.device()
    }
}
