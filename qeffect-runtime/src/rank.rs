//! One rank: its shard, its ledger, and the ways in which a pass is run: as code, or replayed.

use std::time::{Duration, Instant};

use qeffect_core::bind::Bound;
use qeffect_core::execute::{Execute, Held, Mode, StepError, StepOutcome, run_rank};
use qeffect_core::ids::{Rank, Stage as StageId};
use qeffect_core::ledger::{Action, Ledger, LedgerError, StepEffects, Verdict};
use qeffect_core::measured::Span;
use qeffect_core::plan::{Node, Plan};
use qeffect_core::version::WeightVersion;
use qeffect_kernels::nvtx;

use crate::capture::CaptureMode;
use crate::capture::program::{Captured, Programs};
use crate::capture::record::Trace;
use crate::capture::replay::{Replayer, play};
use crate::data::Windows;
use crate::error::{Error, Result};
use crate::executor::{Executor, Mail, Outlet};
use crate::optim::{self, Measured};
use crate::pool::{KeptBytes, RegionBytes};
use crate::recompute::{Recomputed, StageTape};
use crate::shard::{CellHealth, Mismatch, Shard};
use crate::stage::Stage;
use crate::timed::{Clock, Idle, Timed};
use crate::transport::local::Fabric;
use crate::wire::Wire;

/// A bound plan and what connects its ranks.
pub(crate) struct Route {
    pub bound: Bound,
    pub fabric: Fabric<Measured>,
    recomputed: Recomputed,
}

impl Route {
    pub fn new(bound: Bound, fabric: Fabric<Measured>) -> Route {
        let recomputed = Recomputed::of(&bound.checked().plan);
        Route { bound, fabric, recomputed }
    }

    fn plan(&self) -> &Plan {
        &self.bound.checked().plan
    }

    fn microbatches(&self) -> usize {
        self.bound.facts().microbatches as usize
    }
}

/// One rank of a session.
pub(crate) struct RankState<S: Stage> {
    rank: Rank,
    pub shard: Shard<S>,
    ledger: Ledger,
    held: Held<StageTape<S::Tape>, S::Work>,
    mail: Mail,
    /// The training step, if it is replayed.
    captured: Option<Captured>,
    /// The same action by action, once a step was measured.
    actions: Option<Captured>,
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
    /// Time what is done, from this moment on.
    pub timed: Option<Instant>,
    /// Count what casts lose.
    pub health: bool,
}

/// What became of a pass, beside its outcome.
#[derive(Default)]
pub(crate) struct Aftermath {
    /// The state of the step's start is saved.
    pub began: bool,
    /// State may have been changed for good: an error from here on cannot be put back.
    pub unsure: bool,
    pub verdict: Option<optim::Verdict>,
    pub logits: Vec<Vec<f64>>,
    /// Lists of commands that were launched.
    pub launches: usize,
    /// What went wrong in an abort.
    pub failure: Option<Error>,
}

impl Aftermath {
    /// Asks the device what the ranks agreed on.
    pub fn conclude<S: Stage>(&mut self, shard: &mut Shard<S>) -> Result<Verdict> {
        let verdict = shard.verdict()?;
        self.verdict = Some(verdict);
        Ok(if verdict.commit { Verdict::Good } else { Verdict::Skip })
    }
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
    /// Bytes of the regions that these lie in.
    pub regions: RegionBytes,
    /// Bytes of all destinations of gradients.
    pub arena_bytes: usize,
    /// Most bytes that each stage retained at once since start.
    pub kept: Vec<(StageId, KeptBytes)>,
    /// Ranks that met a value that is not finite.
    pub raised: Vec<Rank>,
    /// A slot whose tag was another one than expected.
    pub mismatch: Option<Mismatch>,
    /// Lists of commands that the step was made of.
    pub lists: usize,
    /// How often it launched one.
    pub launches: usize,
    /// What was done and when, if that was asked for.
    pub spans: Vec<Span>,
    /// How the state cells fared, if that was asked for.
    pub health: Vec<CellHealth>,
}

impl<S: Stage> RankState<S> {
    /// A rank at start. Its weight cache has been filled.
    pub fn new(rank: Rank, shard: Shard<S>, bound: &Bound) -> Result<RankState<S>> {
        let stages: Vec<StageId> = shard.stages().map(|(id, _)| id).collect();
        let mut ledger = bound.ledger(rank);
        for stage in stages {
            ledger.fill(stage)?;
        }
        let (held, mail) = (Held::default(), Mail::default());
        Ok(RankState { rank, shard, ledger, held, mail, captured: None, actions: None, broken: None })
    }

    /// From now on, and before any capture: slots carry tags that the device checks.
    pub fn verify(&mut self) -> Result<()> {
        self.shard.tag_slots(self.ledger.pool().len())
    }

    /// Weight versions of the rank's stages.
    pub fn versions(&self) -> Result<Vec<(StageId, WeightVersion)>> {
        let mut versions = Vec::new();
        for (id, _) in self.shard.stages() {
            versions.extend(self.ledger.version(id)?.map(|version| (id, version)));
        }
        Ok(versions)
    }

    /// Parameters are about to be given new values. Should that fail half-way, no step reads what is cached.
    pub fn forget_cache(&mut self) -> Result<()> {
        let stages: Vec<StageId> = self.shard.stages().map(|(id, _)| id).collect();
        stages.into_iter().try_for_each(|stage| Ok(self.ledger.forget_cache(stage)?))
    }

    /// Parameters were given new values: fills the cache anew.
    pub fn refill(&mut self) -> Result<()> {
        self.shard.prologue()?;
        let stages: Vec<StageId> = self.shard.stages().map(|(id, _)| id).collect();
        stages.into_iter().try_for_each(|stage| Ok(self.ledger.fill(stage)?))
    }

    /// Refuses unless nothing is in flight.
    pub fn quiescent(&self) -> Result<()> {
        Ok(self.ledger.quiescent(Action::Checkpoint)?)
    }

    /// Writes a training step down. Nothing is carried out, and nothing moves.
    pub fn trace(&mut self, route: &Route) -> Result<(Trace, StepEffects)> {
        let plan = route.plan();
        let mut rehearsal = self.ledger.rehearsal()?;
        self.mail.reset(plan.edges.len(), route.microbatches());
        let mut after = Aftermath::default();
        self.shard.start_trace();
        let mut executor = Executor {
            shard: &mut self.shard,
            mail: &mut self.mail,
            outlet: Outlet::Trace,
            plan,
            recomputed: &route.recomputed,
            batch: &[],
            logits: false,
            after: &mut after,
        };
        let result = run_rank(plan.rank(self.rank), Mode::Train, &mut rehearsal, &mut self.held, &mut executor);
        let trace = self.shard.stop_trace();
        result.map_err(unwrap_step)?;
        Ok((trace, self.ledger.effects_of(&rehearsal)?))
    }

    /// Makes the training step ready to be replayed.
    pub fn capture(&mut self, route: &Route, mode: CaptureMode) -> Result<()> {
        if mode == CaptureMode::Eager {
            return Ok(());
        }
        let (trace, effects) = self.trace(route)?;
        let rolls = self.shard.roll_counter();
        self.captured = Captured::new(self.shard.device(), mode, trace, effects, rolls)?;
        Ok(())
    }

    /// Writes the training step down for a list of all ranks, in which it will be replayed.
    pub fn capture_joint(&mut self, route: &Route) -> Result<Trace> {
        let (trace, effects) = self.trace(route)?;
        let count = self.shard.roll_counter();
        let rolls = trace.parts.iter().flat_map(|part| count(&part.entries)).collect();
        self.captured = Some(Captured { effects, programs: Programs::Joint(rolls) });
        Ok(trace)
    }

    /// Before a step is measured: a device on which a list takes less time than its commands one by one is measured with a
    /// list per action, where steps are replayed at all.
    pub fn capture_actions(&mut self, route: &Route) -> Result<()> {
        let by_step = self.captured.as_ref().is_some_and(|captured| !matches!(captured.programs, Programs::Actions(_)));
        if !by_step || self.actions.is_some() || !self.shard.device().caps().parallel {
            return Ok(());
        }
        let (trace, effects) = self.trace(route)?;
        let rolls = self.shard.roll_counter();
        self.actions = Captured::new(self.shard.device(), CaptureMode::Action, trace, effects, rolls)?;
        Ok(())
    }

    fn usable(&self) -> Result<()> {
        self.broken.as_ref().map_or(Ok(()), |reason| Err(Error::Broken(reason.clone())))
    }

    /// Runs this rank's part of a plan.
    pub fn run(&mut self, pass: &Pass<'_>) -> Result<RankReport> {
        let link = pass.route.fabric.link(self.rank);
        self.usable()?;
        let plan = pass.route.plan();
        let start = Instant::now();
        let _range = match pass.mode {
            Mode::Train => nvtx::range(format_args!("step {}", self.shard.attempts())),
            Mode::Evaluate { .. } => nvtx::range("evaluation"),
        };
        let mut wire = Wire::new(&link, plan);
        let mut after = Aftermath::default();
        let nodes = plan.rank(self.rank);
        let mut clock = pass.timed.map(Clock::new);
        let replayed = |captured: &&Captured| {
            // A program of a whole step has no actions to time: then the step runs as code. So it does where casts are
            // counted, for no program counts.
            let timed = clock.is_none() || matches!(captured.programs, Programs::Actions(_));
            pass.mode == Mode::Train && timed && !pass.health
        };
        if pass.health {
            self.shard.count_casts()?;
        }
        let captured = self.captured.as_ref().filter(replayed);
        let captured = captured.or_else(|| self.actions.as_ref().filter(|_| clock.is_some()));
        let lists = captured.map_or(0, Captured::lists);
        let result = match captured.map(|captured| (&captured.programs, &captured.effects)) {
            Some((Programs::Actions(programs), _)) => {
                let programs = programs.iter();
                let (shard, after) = (&mut self.shard, &mut after);
                let replayer = Replayer { shard, programs, wire: &mut wire, batch: pass.batch, after, step: 0 };
                walk(nodes, pass.mode, &mut self.ledger, &mut Held::default(), replayer, clock.as_mut())
            }
            Some((Programs::Step(program), effects)) => {
                let (ledger, shard) = (&mut self.ledger, &mut self.shard);
                replay(ledger, shard, effects, pass.batch, &mut after, |shard, step, after| {
                    play(program, shard, &mut wire, step, after)
                })
            }
            Some((Programs::Joint(_), _)) => {
                return Err(Error::Config("the step is part of a list of all ranks".into()));
            }
            None => {
                self.mail.reset(plan.edges.len(), pass.route.microbatches());
                let executor = Executor {
                    shard: &mut self.shard,
                    mail: &mut self.mail,
                    outlet: Outlet::Wire(&mut wire),
                    plan,
                    recomputed: &pass.route.recomputed,
                    batch: pass.batch,
                    logits: pass.logits,
                    after: &mut after,
                };
                walk(nodes, pass.mode, &mut self.ledger, &mut self.held, executor, clock.as_mut())
            }
        };
        let busy = start.elapsed().saturating_sub(wire.waited);
        self.shard.stop_counting();
        let spans = clock.map_or_else(|| Ok(Vec::new()), |clock| clock.finish(self.shard.device()));
        match self.report(result, after, pass.route, busy, lists) {
            Ok(report) => {
                link.finish();
                let health = if pass.health { self.shard.health() } else { Ok(Vec::new()) };
                // The step is over, whatever cannot be told of it.
                let told = spans.and_then(|spans| Ok((spans, health?)));
                let (spans, health) = told.inspect_err(|error| self.broken = Some(error.to_string()))?;
                Ok(RankReport { spans, health, ..report })
            }
            Err(error) => {
                link.abandon(&error.to_string());
                Err(error)
            }
        }
    }

    /// Before a list of all ranks is launched: the ledger's transaction, and the data.
    ///
    /// The number of the step.
    pub fn prepare_joint(&mut self, batch: &[Windows]) -> Result<u64> {
        self.usable()?;
        let Some(Captured { effects, programs: Programs::Joint(rolls) }) = &self.captured else {
            return Err(Error::Config("no step was captured for all ranks".into()));
        };
        let shard = &mut self.shard;
        let step = begin(&mut self.ledger, shard, effects)?;
        let fed = shard.begin_replay().and_then(|()| {
            shard.feed(batch, step)?;
            shard.add_rolls(rolls)
        });
        if fed.is_err() {
            shard.cancel_replay();
            self.ledger.abort_step();
        }
        fed.map(|()| step)
    }

    /// The list was not launched: some rank was not ready.
    pub fn cancel_joint(&mut self) -> Result<()> {
        if self.quiescent().is_err() {
            self.shard.cancel_replay();
            self.ledger.abort_step();
        }
        Ok(())
    }

    /// After the launch: settles the step by its verdict.
    pub fn conclude_joint(&mut self, route: &Route, start: Instant) -> Result<RankReport> {
        let step = self.ledger.step();
        let mut after = Aftermath { began: true, unsure: true, ..Aftermath::default() };
        let result = after.conclude(&mut self.shard).map_err(|error| StepError::Failed { action: Action::Step, error });
        let result = result.and_then(|verdict| settled(&mut self.ledger, step, verdict));
        self.report(result, after, route, start.elapsed(), 0)
    }

    fn report(
        &mut self,
        result: Result<StepOutcome, StepError<Error>>,
        after: Aftermath,
        route: &Route,
        busy: Duration,
        lists: usize,
    ) -> Result<RankReport> {
        let rank = self.rank;
        if let Some(failure) = after.failure {
            self.broken = Some(format!("rank {rank} could not put its state back: {failure}"));
        } else if result.is_err() && after.unsure {
            self.broken = Some(format!("rank {rank} failed where its state cannot be put back"));
        }
        let outcome = result.map_err(unwrap_step)?;
        let last = route.bound.checked().schedule.placement.last() == Some(&rank);
        let mut losses = Vec::new();
        if last {
            losses = self.shard.losses().inspect_err(|error| self.broken = Some(error.to_string()))?;
            losses.truncate(route.microbatches());
        }
        let raised = match outcome.verdict {
            Some(Verdict::Skip) => self.shard.raised()?,
            _ => Vec::new(),
        };
        let mismatch = match outcome.verdict {
            Some(Verdict::Skip) => self.shard.mismatch()?,
            _ => None,
        };
        let norm = after.verdict.map_or(f64::NAN, |verdict| verdict.norm);
        let (bytes, regions) = (self.shard.pool().peak(), self.shard.pool().regions());
        let arena_bytes = self.shard.arena_bytes();
        let kept = self.shard.kept_bytes();
        let (logits, spans) = (after.logits, Vec::new());
        Ok(RankReport {
            outcome,
            busy,
            norm,
            losses,
            logits,
            bytes,
            regions,
            arena_bytes,
            kept,
            raised,
            mismatch,
            lists,
            launches: after.launches,
            spans,
            health: Vec::new(),
        })
    }
}

/// Walks a plan, on the clock if there is one.
fn walk<E: Execute<Error = Error> + Idle>(
    nodes: &[Node],
    mode: Mode,
    ledger: &mut Ledger,
    held: &mut Held<E::Tape, E::Work>,
    mut executor: E,
    clock: Option<&mut Clock>,
) -> Result<StepOutcome, StepError<Error>> {
    match clock {
        None => run_rank(nodes, mode, ledger, held, &mut executor),
        Some(clock) => run_rank(nodes, mode, ledger, held, &mut Timed { inner: executor, clock }),
    }
}

/// The ledger's transaction of a replayed step. A step that it refuses counts as an attempt too, for the numbers of all
/// ranks stay the same.
fn begin<S: Stage>(ledger: &mut Ledger, shard: &mut Shard<S>, effects: &StepEffects) -> Result<u64, LedgerError> {
    ledger.begin_replay(effects, |stage| shard.rolls(stage).unwrap_or_default()).inspect_err(|_| {
        ledger.miss_step();
        shard.set_attempts(ledger.step());
    })
}

/// A whole step under one transaction of the ledger. What `run` returns early from is put back.
fn replay<S: Stage>(
    ledger: &mut Ledger,
    shard: &mut Shard<S>,
    effects: &StepEffects,
    batch: &[Windows],
    after: &mut Aftermath,
    run: impl FnOnce(&mut Shard<S>, u64, &mut Aftermath) -> Result<()>,
) -> Result<StepOutcome, StepError<Error>> {
    let step = begin(ledger, shard, effects)?;
    let played = shard.begin_replay().and_then(|()| {
        shard.feed(batch, step)?;
        run(shard, step, after)?;
        after.conclude(shard)
    });
    match played {
        Ok(verdict) => settled(ledger, step, verdict),
        Err(error) => {
            if after.began {
                after.failure = shard.abort().err();
            } else {
                shard.cancel_replay();
            }
            ledger.abort_step();
            Err(StepError::Failed { action: Action::Step, error })
        }
    }
}

fn settled(ledger: &mut Ledger, step: u64, verdict: Verdict) -> Result<StepOutcome, StepError<Error>> {
    let epoch = ledger.settle(verdict)?;
    Ok(StepOutcome { step, epoch, verdict: Some(verdict), peaks: ledger.peaks() })
}

fn unwrap_step(error: StepError<Error>) -> Error {
    match error {
        StepError::Refused(error) => error.into(),
        StepError::Failed { action, error } => Error::Action { action, source: Box::new(error) },
    }
}
