//! One rank: its shard, its ledger, and the executor that the driver calls for each node of the plan.
//!
//! The executor moves tensors between stages and knows nothing of what they mean. Between two stages of one rank a
//! tensor is handed over in place; between ranks its bytes travel. A tensor that came by message holds its receive
//! buffer until its consumer has run.

use std::time::{Duration, Instant};

use qeffect_core::bind::Bound;
use qeffect_core::code::Code;
use qeffect_core::dtype::Dtype;
use qeffect_core::execute::{Execute, Held, Mode, Port, StepError, StepOutcome, run_rank};
use qeffect_core::ids::{Microbatch, Rank, Stage as StageId};
use qeffect_core::ledger::{Ledger, Rolls, Site, Verdict};
use qeffect_core::plan::{Direction, Plan};
use qeffect_core::token::{Bwd, Fwd, Token};
use qeffect_core::version::WeightVersion;

use crate::act::Act;
use crate::data::Windows;
use crate::error::{Error, Result};
use crate::optim::Measured;
use crate::pool::KeptBytes;
use crate::shard::Shard;
use crate::stage::Stage;
use crate::transport::local::{Fabric, Link};
use crate::transport::{Tag, TransportError};

/// A bound plan and what connects its ranks.
pub(crate) struct Route {
    pub bound: Bound,
    pub fabric: Fabric<Measured>,
}

impl Route {
    fn plan(&self) -> &Plan {
        &self.bound.checked().plan
    }
}

/// A tensor between its producer and its consumer.
struct Parcel {
    act: Act,
    /// The receive buffer that it came in.
    buffer: Option<Vec<u8>>,
}

/// Tensors on their way: per edge and microbatch.
#[derive(Default)]
struct Mail {
    inbound: Vec<Vec<Option<Parcel>>>,
    outbound: Vec<Vec<Option<Act>>>,
}

impl Mail {
    fn reset(&mut self, edges: usize, microbatches: usize) {
        self.inbound.resize_with(edges, Vec::new);
        self.outbound.resize_with(edges, Vec::new);
        for slots in &mut self.inbound {
            slots.clear();
            slots.resize_with(microbatches, || None);
        }
        for slots in &mut self.outbound {
            slots.clear();
            slots.resize(microbatches, None);
        }
    }
}

/// One rank of a session.
pub(crate) struct RankState<S: Stage> {
    rank: Rank,
    pub shard: Shard<S>,
    ledger: Ledger,
    held: Held<S::Tape, S::Work>,
    mail: Mail,
    /// Why this rank can run nothing more.
    pub broken: Option<String>,
}

/// What a pass is to do beside running its plan.
pub(crate) struct Pass<'a> {
    pub route: &'a Route,
    pub mode: Mode,
    pub batch: &'a [Windows],
    /// Keep the logits of every microbatch, and compute no loss.
    pub logits: bool,
}

/// What one rank reports of a pass.
#[derive(Clone, Debug)]
pub(crate) struct RankReport {
    pub outcome: StepOutcome,
    /// Time in actions, without waiting.
    pub busy: Duration,
    /// Norm of the gradient, before clipping.
    pub norm: f64,
    /// Loss per microbatch, on the rank of the last stage.
    pub losses: Vec<f64>,
    pub logits: Vec<Vec<f64>>,
    /// Most bytes of activations, tapes and works since start.
    pub bytes: usize,
    /// Bytes of all destinations of gradients.
    pub arena_bytes: usize,
    /// Most bytes that each stage retained at once since start.
    pub kept: Vec<(StageId, KeptBytes)>,
}

impl<S: Stage> RankState<S> {
    /// A rank at start. Its weight cache has been filled.
    pub fn new(rank: Rank, shard: Shard<S>, bound: &Bound) -> Result<RankState<S>> {
        let stages: Vec<StageId> = shard.stages().map(|(id, _)| id).collect();
        let mut rolls = Vec::with_capacity(stages.len());
        for stage in &stages {
            rolls.push((*stage, shard.rolls_per_action(*stage)?));
        }
        let per_action = |stage| rolls.iter().find(|(id, _)| *id == stage).map_or((0, 0), |(_, rolls)| *rolls);
        let mut ledger = bound.ledger(rank, per_action);
        for stage in stages {
            ledger.fill(stage)?;
        }
        Ok(RankState { rank, shard, ledger, held: Held::default(), mail: Mail::default(), broken: None })
    }

    /// Weight versions of the rank's stages.
    pub fn versions(&self) -> Vec<(StageId, WeightVersion)> {
        self.shard.stages().filter_map(|(id, _)| Some((id, self.ledger.version(id)?))).collect()
    }

    /// Parameters were given new values: fills the cache anew.
    pub fn refill(&mut self) -> Result<()> {
        self.shard.prologue()?;
        let stages: Vec<StageId> = self.shard.stages().map(|(id, _)| id).collect();
        stages.into_iter().try_for_each(|stage| Ok(self.ledger.fill(stage)?))
    }

    /// Refuses unless nothing is in flight.
    pub fn quiescent(&self) -> Result<()> {
        Ok(self.ledger.quiescent(qeffect_core::ledger::Action::Checkpoint)?)
    }

    /// Runs this rank's part of a plan.
    pub fn run(&mut self, pass: &Pass<'_>) -> Result<RankReport> {
        let link = pass.route.fabric.link(self.rank);
        if let Some(reason) = &self.broken {
            return Err(Error::Broken(reason.clone()));
        }
        let plan = pass.route.plan();
        let microbatches = pass.route.bound.facts().microbatches as usize;
        self.mail.reset(plan.edges.len(), microbatches);
        let last = pass.route.bound.checked().schedule.placement.last() == Some(&self.rank);
        let mut executor = Executor {
            shard: &mut self.shard,
            mail: &mut self.mail,
            link: &link,
            plan,
            pass,
            began: false,
            committing: false,
            waited: Duration::ZERO,
            norm: f64::NAN,
            logits: Vec::new(),
            failure: None,
        };
        let start = Instant::now();
        let result = run_rank(plan.rank(self.rank), pass.mode, &mut self.ledger, &mut self.held, &mut executor);
        let busy = start.elapsed().saturating_sub(executor.waited);
        let Executor { norm, logits, failure, committing, .. } = executor;
        if let Some(failure) = failure {
            self.broken = Some(format!("rank {} could not put its state back: {failure}", self.rank));
        } else if result.is_err() && committing {
            self.broken = Some(format!("rank {} failed inside its commit", self.rank));
        }
        let outcome = match result {
            Ok(outcome) => outcome,
            Err(error) => {
                let error = match error {
                    StepError::Refused(error) => error.into(),
                    StepError::Failed { action, error } => Error::Action { action, source: Box::new(error) },
                };
                link.abandon(&error.to_string());
                return Err(error);
            }
        };
        let mut losses = Vec::new();
        if last {
            losses = self.shard.losses().inspect_err(|error| self.broken = Some(error.to_string()))?;
            losses.truncate(microbatches);
        }
        link.finish();
        Ok(RankReport {
            outcome,
            busy,
            norm,
            losses,
            logits,
            bytes: self.shard.pool().peak(),
            arena_bytes: self.shard.arena_bytes(),
            kept: self.shard.kept_bytes(),
        })
    }
}

struct Executor<'a, S: Stage> {
    shard: &'a mut Shard<S>,
    mail: &'a mut Mail,
    link: &'a Link<'a, Measured>,
    plan: &'a Plan,
    pass: &'a Pass<'a>,
    /// The state of the step's start is saved.
    began: bool,
    committing: bool,
    waited: Duration,
    norm: f64,
    logits: Vec<Vec<f64>>,
    /// What went wrong in an abort.
    failure: Option<Error>,
}

impl<S: Stage> Executor<'_, S> {
    fn edge(&self, direction: Direction, from: StageId) -> Option<u32> {
        let at = self.plan.edges.iter().position(|edge| edge.direction == direction && edge.from == from)?;
        Some(at as u32)
    }

    /// The edge that brings a stage's input.
    fn input(&self, direction: Direction, to: StageId) -> Option<u32> {
        let at = self.plan.edges.iter().position(|edge| edge.direction == direction && edge.to == to)?;
        Some(at as u32)
    }

    /// Takes what an action consumes, if it consumes anything.
    fn take(&mut self, direction: Direction, at: Site) -> Result<Option<(u32, Parcel)>> {
        let Some(edge) = self.input(direction, at.stage()) else { return Ok(None) };
        let slot = self.mail.inbound.get_mut(edge as usize).and_then(|slots| slots.get_mut(at.microbatch().index()));
        match slot.and_then(Option::take) {
            Some(parcel) => Ok(Some((edge, parcel))),
            None => Err(Error::Contract {
                code: Code::MessageEarly,
                message: format!("stage {} runs microbatch {} before its input is there", at.stage(), at.microbatch()),
            }),
        }
    }

    /// The consumer has run.
    fn consumed(&mut self, parcel: Option<(u32, Parcel)>) -> Result<()> {
        let Some((edge, Parcel { act, buffer })) = parcel else { return Ok(()) };
        self.shard.free(act)?;
        match buffer {
            Some(buffer) => Ok(self.link.release(edge, buffer)?),
            None => Ok(()),
        }
    }

    /// Hands a result on: in place, or to the send that follows.
    fn deliver(&mut self, direction: Direction, at: Site, act: Option<Act>) -> Result<()> {
        let Some(act) = act else { return Ok(()) };
        let Some(edge) = self.edge(direction, at.stage()) else { return self.shard.free(act) };
        let ends = &self.plan.edges[edge as usize];
        let (edge, m) = (edge as usize, at.microbatch().index());
        if ends.from_rank == ends.to_rank {
            self.mail.inbound[edge][m] = Some(Parcel { act, buffer: None });
        } else {
            self.mail.outbound[edge][m] = Some(act);
        }
        Ok(())
    }

    fn tag(&self, port: Port) -> Result<Tag> {
        let edge = self.plan.edges.get(port.edge as usize).ok_or(TransportError::NoEdge { edge: port.edge })?;
        Ok(Tag { step: port.step, direction: port.direction, from: edge.from, microbatch: port.microbatch })
    }

    fn waiting<T>(&mut self, wait: impl FnOnce(&Link<'_, Measured>) -> Result<T, TransportError>) -> Result<T> {
        let start = Instant::now();
        let result = wait(self.link);
        self.waited += start.elapsed();
        Ok(result?)
    }
}

/// What a port of a stage takes in: an input by a forward edge, the gradient of an output by a backward one.
pub(crate) fn message_shape(stage: &impl Stage, direction: Direction) -> Option<(Dtype, [usize; 2])> {
    let spec = stage.spec();
    let shape = match direction {
        Direction::Forward => spec.input,
        Direction::Backward => spec.output,
    };
    Some((spec.recipe.activation(), shape?))
}

impl<S: Stage> Execute for Executor<'_, S> {
    type Tape = S::Tape;
    type Work = S::Work;
    type Error = Error;

    fn begin(&mut self, _step: u64, mode: Mode) -> Result<()> {
        match mode {
            Mode::Train => {
                self.shard.begin_step(self.pass.batch)?;
                self.began = true;
                Ok(())
            }
            Mode::Evaluate { .. } => self.shard.load(self.pass.batch),
        }
    }

    fn forward(&mut self, at: Site, token: Token<Fwd>) -> Result<(S::Tape, Token<Fwd>)> {
        let parcel = self.take(Direction::Forward, at)?;
        let x = parcel.as_ref().map(|(_, parcel)| parcel.act);
        let (y, tape, token) = self.shard.forward(at.stage(), at.microbatch(), x, token)?;
        self.consumed(parcel)?;
        self.deliver(Direction::Forward, at, y)?;
        Ok((tape, token))
    }

    fn evaluate(&mut self, at: Site) -> Result<()> {
        let parcel = self.take(Direction::Forward, at)?;
        let x = parcel.as_ref().map(|(_, parcel)| parcel.act);
        let y = self.shard.evaluate(at.stage(), at.microbatch(), x, !self.pass.logits)?;
        self.consumed(parcel)?;
        match y {
            Some(logits) if self.pass.logits && self.edge(Direction::Forward, at.stage()).is_none() => {
                let m = at.microbatch().index();
                self.logits.resize_with(self.logits.len().max(m + 1), Vec::new);
                self.logits[m] = self.shard.reals(logits)?;
                self.shard.free(logits)
            }
            y => self.deliver(Direction::Forward, at, y),
        }
    }

    fn recompute(&mut self, at: Site, _tape: S::Tape) -> Result<S::Tape> {
        Err(no_recompute(at.stage(), at.microbatch()))
    }

    fn input_grad(&mut self, at: Site, tape: S::Tape, token: Token<Bwd>) -> Result<(S::Work, Token<Bwd>)> {
        let parcel = self.take(Direction::Backward, at)?;
        let dy = parcel.as_ref().map(|(_, parcel)| parcel.act);
        let (dx, work, token) = self.shard.input_grad(at.stage(), at.microbatch(), dy, tape, token)?;
        self.consumed(parcel)?;
        self.deliver(Direction::Backward, at, dx)?;
        Ok((work, token))
    }

    fn weight_grad(&mut self, works: std::vec::Drain<'_, (Site, S::Work)>) -> Result<()> {
        for (at, work) in works {
            self.shard.weight_grad(at.stage(), at.microbatch(), work)?;
        }
        Ok(())
    }

    fn send(&mut self, port: Port) -> Result<()> {
        let tag = self.tag(port)?;
        let slot = self.mail.outbound[port.edge as usize].get_mut(port.microbatch.index());
        let Some(act) = slot.and_then(Option::take) else {
            return Err(Error::Contract { code: Code::MessageEarly, message: format!("{tag} is sent and not there") });
        };
        let mut bytes = self.link.source(port.edge)?;
        if bytes.len() != act.bytes() {
            return Err(TransportError::Size { tag, expected: bytes.len(), found: act.bytes() }.into());
        }
        self.shard.read_act(act, &mut bytes)?;
        self.shard.free(act)?;
        Ok(self.link.send(port.edge, tag, bytes)?)
    }

    fn post(&mut self, port: Port) -> Result<()> {
        let tag = self.tag(port)?;
        Ok(self.link.post(port.edge, tag)?)
    }

    fn wait(&mut self, port: Port) -> Result<()> {
        let tag = self.tag(port)?;
        let bytes = self.waiting(|link| link.wait(port.edge, tag))?;
        let stage = self.shard.stages().find(|(id, _)| *id == port.stage);
        let Some((dtype, [rows, cols])) = stage.and_then(|(_, stage)| message_shape(stage, port.direction)) else {
            return Err(TransportError::NoEdge { edge: port.edge }.into());
        };
        let act = self.shard.lease(dtype, rows, cols)?;
        self.shard.write_act(act, &bytes)?;
        let slot = &mut self.mail.inbound[port.edge as usize][port.microbatch.index()];
        *slot = Some(Parcel { act, buffer: Some(bytes) });
        Ok(())
    }

    fn refresh(&mut self, stage: StageId) -> Result<()> {
        self.shard.refresh(stage)
    }

    fn reduce(&mut self, stage: StageId) -> Result<()> {
        self.shard.reduce(stage)
    }

    fn rolls(&self, stage: StageId) -> Rolls {
        self.shard.rolls(stage).unwrap_or_default()
    }

    fn agree(&mut self) -> Result<Verdict> {
        let measured = self.shard.measure()?;
        let all = self.waiting(|link| link.gather(measured))?;
        let verdict = self.shard.settle(&all)?;
        self.norm = verdict.norm;
        Ok(if verdict.commit { Verdict::Good } else { Verdict::Skip })
    }

    fn commit(&mut self) -> Result<()> {
        self.committing = true;
        self.shard.commit()
    }

    fn abort(&mut self) {
        let result = if self.began { self.shard.abort() } else { self.shard.abort_evaluation() };
        self.failure = result.err();
        self.mail.reset(0, 0);
    }
}

/// The refusal of R, which stages do not offer.
pub(crate) fn no_recompute(stage: StageId, microbatch: Microbatch) -> Error {
    Error::Config(format!("R({stage}, {microbatch}): these stages keep their tapes and recompute nothing"))
}
