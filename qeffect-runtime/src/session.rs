//! A training session: all ranks of a pipeline as threads of this process.
//!
//! A session is bound once, to a checked schedule, the stages of a model and an optimizer, and captures its training
//! step then. [`Session::step`] runs one training step over all ranks, [`Session::evaluate`] one forward-only pass that
//! leaves no trace. A step that fails has changed nothing, unless it failed inside a commit: then the session refuses to
//! go on.

mod config;
mod fit;
mod footprint;
mod ranks;
mod report;
mod values;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use qeffect_core::code::Code;
use qeffect_core::execute::Mode;
use qeffect_core::ids::{Rank, Stage as StageId};
use qeffect_core::ledger::Verdict;
use qeffect_core::measured::Span;
use qeffect_core::plan::Checked;
use qeffect_core::recipe::Recipe;
use qeffect_kernels::nvtx;

use crate::capture::record::Trace;
use crate::capture::split::split_rolls;
use crate::capture::{CaptureMode, joint};
use crate::cmd::Cmd;
use crate::cpu::CpuDevice;
use crate::data::Windows;
use crate::device::{Buf, Device, GraphId, SharedDevice};
use crate::error::{Error, Result};
use crate::fuse::fuse;
use crate::rank::{Pass, RankReport, RankState, Route};
pub use crate::shard::CellHealth;
use crate::shard::{Mismatch, Tie};
use crate::stage::Stage;
use crate::transport::local::Fabric;
use crate::worker::{Reply, Worker};

pub use crate::fast::FastAccumulation;
pub use crate::gradients::GradDtype;
pub use config::{OnNonFinite, SessionConfig};
pub use footprint::Footprint;
use ranks::{crosses, edge_spec};
pub use report::StepReport;
use report::{mean, not_finite};
pub use values::Snapshot;

/// A running pipeline.
pub struct Session<S: Stage> {
    workers: Vec<Worker<RankState<S>>>,
    route: Arc<Route>,
    recipe: Recipe,
    config: SessionConfig,
    ties: Vec<Tie>,
    commits: u64,
    joint: Option<Joint>,
    broken: Option<String>,
}

/// What is to be told of a step beside its report.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ask {
    Nothing,
    /// What was done, and when.
    Times,
    /// How state cells fare.
    Health,
}

/// A step, and what was asked of it.
struct Attempt {
    report: StepReport,
    spans: Vec<Vec<Span>>,
    health: Vec<CellHealth>,
}

/// The training step of all ranks as one list of a device that they share.
struct Joint {
    device: SharedDevice,
    graph: GraphId,
}

/// A forward-only schedule that is bound to a session.
#[derive(Clone)]
pub struct Evaluation {
    route: Arc<Route>,
}

impl<S> Session<S>
where
    S: Stage + Send + 'static,
    S::Tape: Send,
    S::Work: Send,
{
    /// Binds everything, on cpu.
    ///
    /// # Errors
    ///
    /// QE09xx if schedule, model and recipe do not fit; a device that fails.
    pub fn new(checked: Checked, stages: Vec<S>, config: SessionConfig) -> Result<Session<S>> {
        Session::with_devices(checked, stages, config, |_| Ok(Box::new(CpuDevice::new())))
    }

    /// Binds everything, on a device per rank.
    ///
    /// # Errors
    ///
    /// As [`Session::new`]. What does not fit into the memory of a rank's device, if that has an end
    /// ([`Device::memory`]), is refused with the table of [`Footprint`] before anything is allocated there.
    pub fn with_devices(
        checked: Checked,
        stages: Vec<S>,
        config: SessionConfig,
        device: impl FnMut(Rank) -> Result<Box<dyn Device>>,
    ) -> Result<Session<S>> {
        let devices = (0..checked.schedule.ranks).map(Rank).map(device).collect::<Result<Vec<_>>>()?;
        let stages = Session::fitting_each(&checked, stages, config, &devices)?;
        Session::apart(checked, stages, config, devices)
    }

    /// The same on devices that everything fits into. Every rank has one.
    fn apart(
        checked: Checked,
        stages: Vec<S>,
        config: SessionConfig,
        devices: Vec<Box<dyn Device>>,
    ) -> Result<Session<S>> {
        let session = Session::bound(checked, stages, config, devices)?;
        let (route, mode) = (session.route.clone(), config.capture);
        session.on_all(move |state| state.capture(&route, mode))?;
        Ok(session)
    }

    /// Binds everything, on one device for all ranks. A whole captured step is then one list of it, launched once.
    ///
    /// # Errors
    ///
    /// As [`Session::with_devices`].
    pub fn on_one_device(
        checked: Checked,
        stages: Vec<S>,
        config: SessionConfig,
        device: Box<dyn Device>,
    ) -> Result<Session<S>> {
        let mut device = SharedDevice::new(device);
        let stages = Session::fitting_together(&checked, stages, config, &device)?;
        let handles = (0..checked.schedule.ranks).map(|_| Box::new(device.clone()) as Box<dyn Device>).collect();
        if config.capture != CaptureMode::Step {
            return Session::apart(checked, stages, config, handles);
        }
        let mut session = Session::bound(checked, stages, config, handles)?;
        let traces = session.traces()?;
        let cmds = session.joint_step(&mut device, traces)?;
        let graph = device.instantiate(cmds)?;
        session.joint = Some(Joint { device, graph });
        Ok(session)
    }

    /// Every rank's training step, written down for a list of all; one after the other, so that buffers which they lease
    /// from one device lie in the same places every time.
    fn traces(&self) -> Result<Vec<Trace>> {
        let traces = self.workers.iter().map(|worker| {
            let route = self.route.clone();
            worker.call(move |state| state.capture_joint(&route)).wait()
        });
        settle(traces.collect())
    }

    /// The steps of all ranks as one list, as their device likes it best.
    fn joint_step(&self, device: &mut SharedDevice, traces: Vec<Trace>) -> Result<Vec<Cmd>> {
        let mut cmds = joint::merge(device, traces)?;
        let elements = |buf| device.find(buf).map(|spec| spec.elements());
        if device.caps().parallel {
            cmds = split_rolls(cmds, &elements);
        }
        if device.caps().fuses {
            let leased = self.on_all(|state| Ok(state.shard.pool().buffers().collect::<Vec<_>>()))?;
            let leased: BTreeSet<Buf> = leased.into_iter().flatten().collect();
            cmds = fuse(cmds, &|buf| !leased.contains(&buf), &elements);
        }
        Ok(cmds)
    }

    /// Everything but capture, on a device per rank.
    fn bound(
        checked: Checked,
        stages: Vec<S>,
        config: SessionConfig,
        devices: Vec<Box<dyn Device>>,
    ) -> Result<Session<S>> {
        let session = Session::ranks(checked, stages, config, devices)?;
        session.on_all(move |state| {
            state.shard.init(config.seed)?;
            state.shard.prologue()
        })?;
        Ok(session)
    }

    /// The schedule.
    pub fn schedule(&self) -> &Checked {
        self.route.bound.checked()
    }

    /// What of schedule and run decides bits: [`Bound::identity`](qeffect_core::bind::Bound::identity).
    pub fn identity(&self) -> String {
        self.route.bound.identity()
    }

    /// The recipe.
    pub const fn recipe(&self) -> &Recipe {
        &self.recipe
    }

    /// Good commits so far.
    pub const fn commits(&self) -> u64 {
        self.commits
    }

    /// Runs one training step on a batch: one [`Windows`] per microbatch.
    ///
    /// # Errors
    ///
    /// The first error of any rank. Nothing has changed then but the step counter.
    pub fn step(&mut self, batch: impl Into<Arc<[Windows]>>) -> Result<StepReport> {
        Ok(self.attempt(batch.into(), Ask::Nothing)?.report)
    }

    /// The same step, bit for bit, with what each rank did and when, in the order in which it did it: for traces and
    /// cost models. It runs action by action, whatever the mode of capture, on a GPU with a list for each where
    /// steps are replayed, and waits for a device that keeps no time after each: it takes longer than others. On a device that ranks share they take turns, so that an action's time is
    /// its own. A group of weight gradients, computed as one, is told as its members, in equal parts.
    ///
    /// # Errors
    ///
    /// As [`Session::step`].
    pub fn step_measured(&mut self, batch: impl Into<Arc<[Windows]>>) -> Result<(StepReport, Vec<Vec<Span>>)> {
        let Attempt { report, spans, .. } = self.attempt(batch.into(), Ask::Times)?;
        Ok((report, spans))
    }

    /// The same step, bit for bit, with how every state cell fared in it, by stage: what its casts lost, and whether its
    /// scale moves. None where the recipe has no cells. The step runs command by command, whatever the mode of capture, with
    /// a count beside each cast: it takes longer than others.
    ///
    /// # Errors
    ///
    /// As [`Session::step`].
    pub fn step_health(&mut self, batch: impl Into<Arc<[Windows]>>) -> Result<(StepReport, Vec<CellHealth>)> {
        let Attempt { report, health, .. } = self.attempt(batch.into(), Ask::Health)?;
        Ok((report, health))
    }

    fn attempt(&mut self, batch: Arc<[Windows]>, ask: Ask) -> Result<Attempt> {
        let facts = self.route.bound.facts();
        self.check_batch(&batch, facts.microbatches)?;
        let learning_rate = self.config.optim.learning_rate(self.commits);
        if self.commits >= self.config.optim.steps {
            return Err(Error::Config(format!("the run has {} steps, and they are done", self.config.optim.steps)));
        }
        if ask == Ask::Times {
            let route = self.route.clone();
            self.on_all(move |state| state.capture_actions(&route))?;
        }
        let (mut reports, wall) = match &self.joint {
            Some(_) if ask == Ask::Nothing => self.run_joint(batch)?,
            _ => self.run(&self.route.clone(), Mode::Train, batch, false, ask)?,
        };
        let spans = reports.iter_mut().map(|report| std::mem::take(&mut report.spans)).collect();
        let mut health: Vec<CellHealth> = reports.iter_mut().flat_map(|report| report.health.drain(..)).collect();
        health.sort_by_key(|cell| cell.stage);
        let first = reports.first().ok_or_else(|| Error::Config("no rank".into()))?;
        let losses: Vec<f64> = reports.iter().flat_map(|report| report.losses.iter().copied()).collect();
        self.commits = first.outcome.epoch;
        let skipped = first.outcome.verdict == Some(Verdict::Skip);
        let mismatches: Vec<Mismatch> = reports.iter().filter_map(|report| report.mismatch).collect();
        if skipped && self.config.on_nonfinite == OnNonFinite::Stop {
            if let Some(mismatch) = mismatches.first() {
                let message = format!("step {}: {mismatch}; nothing has changed", first.outcome.step);
                return Err(Error::Contract { code: Code::KeyMismatch, message });
            }
            let (step, what) = (first.outcome.step, not_finite(&losses, first));
            return Err(Error::NotFinite { step, what });
        }
        let over_ranks = |of: fn(&RankReport) -> usize| match self.joint {
            Some(_) if ask == Ask::Nothing => 1,
            _ => reports.iter().map(of).sum(),
        };
        let report = StepReport {
            step: first.outcome.step,
            epoch: first.outcome.epoch,
            loss: mean(&losses),
            grad_norm: first.norm,
            learning_rate,
            tokens: losses.len() * self.config.tokens,
            skipped,
            mismatches,
            wall,
            busy: reports.iter().map(|report| report.busy).collect(),
            peaks: reports.iter().map(|report| report.outcome.peaks).collect(),
            bytes: reports.iter().map(|report| report.bytes).collect(),
            regions: reports.iter().map(|report| report.regions).collect(),
            arena_bytes: reports.iter().map(|report| report.arena_bytes).collect(),
            kept: by_stage(reports.iter().flat_map(|report| report.kept.iter().copied())),
            graphs: over_ranks(|report| report.lists),
            launches: over_ranks(|report| report.launches),
            losses,
        };
        Ok(Attempt { report, spans, health })
    }

    /// Binds a forward-only schedule to this session.
    ///
    /// # Errors
    ///
    /// QE09xx if it places stages elsewhere, or has more microbatches than a training step.
    pub fn evaluation(&self, checked: Checked) -> Result<Evaluation> {
        let bound = self.route.bound.evaluation(checked)?;
        let (most, found) = (self.route.bound.facts().microbatches, bound.facts().microbatches);
        if found > most {
            let name = &bound.checked().schedule.name;
            let message = format!("`{name}` evaluates {found} microbatches, a training step has {most}");
            return Err(Error::Contract { code: Code::BatchMismatch, message });
        }
        let template = &self.route.fabric;
        let edges = bound.checked().plan.edges.iter().enumerate().map(|(at, edge)| {
            // Forward edges have the same index in both plans, and carry the same tensors.
            crosses(edge).then(|| edge_spec(edge, template.message_bytes(at as u32)))
        });
        let fabric = Fabric::new(bound.checked().schedule.ranks, edges);
        Ok(Evaluation { route: Arc::new(Route::new(bound, fabric)) })
    }

    /// The loss of each microbatch. Moves nothing.
    ///
    /// # Errors
    ///
    /// The first error of any rank.
    pub fn evaluate(&mut self, evaluation: &Evaluation, batch: impl Into<Arc<[Windows]>>) -> Result<Vec<f64>> {
        let reports = self.forward(evaluation, batch.into(), false)?;
        Ok(reports.into_iter().flat_map(|report| report.losses).collect())
    }

    /// The logits of each microbatch, `[tokens, vocabulary]`. Moves nothing; targets are not read.
    ///
    /// # Errors
    ///
    /// The first error of any rank.
    pub fn logits(&mut self, evaluation: &Evaluation, batch: impl Into<Arc<[Windows]>>) -> Result<Vec<Vec<f64>>> {
        let reports = self.forward(evaluation, batch.into(), true)?;
        Ok(reports.into_iter().flat_map(|report| report.logits).collect())
    }

    fn forward(&mut self, evaluation: &Evaluation, batch: Arc<[Windows]>, logits: bool) -> Result<Vec<RankReport>> {
        let microbatches = evaluation.route.bound.facts().microbatches;
        self.check_batch(&batch, microbatches)?;
        let (reports, _) = self.run(&evaluation.route, Mode::Evaluate { microbatches }, batch, logits, Ask::Nothing)?;
        Ok(reports)
    }

    fn check_batch(&self, batch: &[Windows], microbatches: u32) -> Result<()> {
        let mismatch = |message| Err(Error::Contract { code: Code::BatchMismatch, message });
        if batch.len() != microbatches as usize {
            return mismatch(format!("{} microbatches for a schedule of {microbatches}", batch.len()));
        }
        let tokens = self.config.tokens;
        match batch.iter().position(|windows| windows.tokens.len() != tokens || windows.targets.len() != tokens) {
            Some(m) => mismatch(format!(
                "microbatch {m} has {} tokens and {} targets, not {tokens}",
                batch[m].tokens.len(),
                batch[m].targets.len()
            )),
            None => Ok(()),
        }
    }

    /// Runs one pass on all ranks.
    fn run(
        &mut self,
        route: &Arc<Route>,
        mode: Mode,
        batch: Arc<[Windows]>,
        logits: bool,
        ask: Ask,
    ) -> Result<(Vec<RankReport>, Duration)> {
        if let Some(reason) = &self.broken {
            return Err(Error::Broken(reason.clone()));
        }
        route.fabric.reset();
        let start = Instant::now();
        let (timed, health) = ((ask == Ask::Times).then_some(start), ask == Ask::Health);
        let of_jobs = route.clone();
        let results = self
            .call_all(move |state| state.run(&Pass { route: &of_jobs, mode, batch: &batch, logits, timed, health }));
        let wall = start.elapsed();
        let committed = |result: &Result<RankReport>| {
            result.as_ref().is_ok_and(|report| report.outcome.verdict == Some(Verdict::Good))
        };
        let failed = results.iter().any(Result::is_err);
        if failed && results.iter().any(committed) {
            self.broken = Some("some ranks have committed a step that failed on others".into());
        }
        if let Some(Err(error)) = results.iter().find(|result| matches!(result, Err(Error::Panic(_)))) {
            self.broken = Some(error.to_string());
        }
        let reports = settle(results)?;
        if let Err(error) = route.fabric.drained() {
            self.broken = Some(error.to_string()); // the ranks have committed
            return Err(error.into());
        }
        Ok((reports, wall))
    }

    /// Runs one captured step on the device that all ranks share: their ledgers first, then one launch.
    fn run_joint(&mut self, batch: Arc<[Windows]>) -> Result<(Vec<RankReport>, Duration)> {
        let start = Instant::now();
        let steps = match self.in_turn(|state| state.prepare_joint(&batch)) {
            Ok(steps) => steps,
            Err(error) => {
                self.in_turn(RankState::cancel_joint)?;
                return Err(error);
            }
        };
        let range = nvtx::range(format_args!("step {}", steps.first().copied().unwrap_or_default()));
        if let Some(Joint { device, graph }) = &mut self.joint
            && let Err(error) = device.launch(*graph)
        {
            self.broken = Some(format!("the launch of a step failed: {error}"));
            return Err(error.into());
        }
        drop(range);
        let reports = self.in_turn(|state| state.conclude_joint(&self.route, start));
        let reports = reports.inspect_err(|error| self.broken = Some(error.to_string()))?;
        Ok((reports, start.elapsed()))
    }

    /// Has every rank do something, and waits for all.
    fn on_all<R: Send + 'static>(
        &self,
        job: impl Fn(&mut RankState<S>) -> Result<R> + Clone + Send + 'static,
    ) -> Result<Vec<R>> {
        if let Some(reason) = &self.broken {
            return Err(Error::Broken(reason.clone()));
        }
        settle(self.call_all(job))
    }

    /// As [`Session::on_all`], one rank after the other: for what is done sooner than a thread is woken.
    fn in_turn<R>(&self, job: impl Fn(&mut RankState<S>) -> Result<R>) -> Result<Vec<R>> {
        if let Some(reason) = &self.broken {
            return Err(Error::Broken(reason.clone()));
        }
        settle(self.workers.iter().map(|worker| worker.here(&job)).collect())
    }

    /// All ranks at once; a rank alone needs no other thread.
    fn call_all<R: Send + 'static>(
        &self,
        job: impl Fn(&mut RankState<S>) -> Result<R> + Clone + Send + 'static,
    ) -> Vec<Result<R>> {
        if let [alone] = &self.workers[..] {
            return vec![alone.here(job)];
        }
        let call = |worker: &Worker<RankState<S>>| worker.call(job.clone());
        let replies: Vec<_> = self.workers.iter().map(call).collect();
        replies.into_iter().map(Reply::wait).collect()
    }
}

/// All results, or the error that is the cause of the others.
fn settle<R>(results: Vec<Result<R>>) -> Result<Vec<R>> {
    let mut values = Vec::with_capacity(results.len());
    let mut worst: Option<(Rank, Error)> = None;
    for (rank, result) in results.into_iter().enumerate() {
        match result {
            Ok(value) => values.push(value),
            Err(error) if worst.as_ref().is_none_or(|(_, worst)| worst.is_echo() && !error.is_echo()) => {
                worst = Some((Rank(rank as u32), error));
            }
            Err(_) => {}
        }
    }
    match worst {
        None => Ok(values),
        Some((rank, error)) => Err(Error::Rank { rank, source: Box::new(error) }),
    }
}

fn by_stage<T>(values: impl Iterator<Item = (StageId, T)>) -> Vec<T> {
    values.collect::<BTreeMap<_, _>>().into_values().collect()
}
