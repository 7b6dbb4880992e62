//! One rank's part of the model: its device, its stages with all they own, and the life of a step.
//!
//! A driver calls, per step: [`Shard::begin_step`], then per node of its program [`Shard::refresh`], [`Shard::forward`],
//! [`Shard::input_grad`], [`Shard::weight_grad`], [`Shard::reduce`], then [`Shard::measure`], the exchange of
//! [`Shard::offer`] and [`Shard::accept`], [`Shard::settle`], [`Shard::commit`], and [`Shard::verdict`]. Between the data
//! at its start and the verdict at its end a step is commands alone, so it can be captured: the exchange is data of the
//! device too, and a device that all ranks share copies it. The driver never learns what a stage computes. Order,
//! versions and ownership are the ledger's to check.

mod agree;
mod config;
mod export;
mod health;
mod params;
mod recording;
mod tags;
mod ties;

use qeffect_core::code::Code;
use qeffect_core::dtype::Dtype;
use qeffect_core::ids::{Microbatch, Stage as StageId};
use qeffect_core::ledger::Rolls;
use qeffect_core::recipe::Recipe;
use qeffect_core::schedule::Update;
use qeffect_core::token::{Bwd, Fwd, Token};

use crate::act::Act;
use crate::admit::admit;
use crate::capture::record::Recorder;
use crate::cmd::{AdamWConfig, Cmd};
use crate::cx::{Cells, Cx, RunBufs};
use crate::data::Windows;
use crate::device::{Buf, BufSpec, Device};
use crate::error::{Error, Result};
use crate::gradients::Grads;
use crate::groups::Partition;
use crate::optim::OptimConfig;
use crate::pool::{Class, KeptBytes, Pool, Reuse};
use crate::retained::Layout;
use crate::stage::{ParamId, Retained, Role, Stage, StageSpec};
use crate::state::{Bank, StageState};

pub(crate) use agree::Exchange;
pub use config::ShardConfig;
pub use export::Named;
use export::mean;
pub use health::CellHealth;
pub use tags::{Mismatch, REPORT_WORDS, TAG_WORDS};
use ties::Held;
pub(crate) use ties::Tie;

struct Part<S> {
    id: StageId,
    stage: S,
    state: StageState,
    grads: Grads,
}

struct OptimBufs {
    partials: Buf,
    flags: Buf,
    norm: Buf,
    clip: Buf,
    table: Buf,
    counter: Buf,
}

/// One rank's part of the model.
pub struct Shard<S> {
    device: Recorder,
    pool: Pool,
    parts: Vec<Part<S>>,
    run: RunBufs,
    order: Vec<Act>,
    optim: OptimBufs,
    recipe: Recipe,
    config: ShardConfig,
    attempts: u64,
    tags: Option<tags::Tags>,
    counters: health::Counters,
    ties: Vec<Held>,
    ties_across: bool,
}

impl<S: Stage> Shard<S> {
    /// Makes all buffers. Parameters are to be given by [`Shard::init`] or [`Shard::set_param`], then the weight cache
    /// by [`Shard::prologue`].
    pub fn new(device: Box<dyn Device>, stages: Vec<(StageId, S)>, config: ShardConfig) -> Result<Shard<S>> {
        config.optim.validate()?;
        let Some(recipe) = stages.first().map(|(_, stage)| stage.spec().recipe) else {
            return Err(Error::Config("a rank holds no stage".into()));
        };
        if config.microbatches == 0 || config.data_parallel == 0 || config.tokens == 0 || config.ranks == 0 {
            return Err(Error::Config("microbatches, tokens and ranks must not be zero".into()));
        }
        let specs = stages.iter().map(|(_, stage)| stage.spec());
        admit(device.as_ref(), &recipe, specs, config.tokens, config.members())?;
        if config.rank >= config.ranks {
            return Err(Error::Config(format!("rank {} of {} ranks", config.rank, config.ranks)));
        }
        let mut device = Recorder::new(device);
        let dev: &mut dyn Device = &mut device;
        let master = recipe.master();
        let mut parts = Vec::with_capacity(stages.len());
        for (id, stage) in stages {
            let spec = stage.spec();
            let state = StageState::new(dev, spec, (config.gradients, config.grad_dtype), config.microbatches)?;
            let partition = Partition { coalesce: config.coalesce, microbatches: config.microbatches };
            let grads = Grads::new(spec, &state, config.gradients, partition)?;
            parts.push(Part { id, stage, state, grads });
        }
        let mut act = |name: &str, dtype: Dtype, rows: usize, cols: usize| -> Result<Act> {
            Ok(Act { buf: dev.alloc(BufSpec::new(name, dtype, rows, cols))?, dtype, rows, cols })
        };
        let m = config.microbatches as usize;
        let mut ids = |name: &str| -> Result<Vec<Act>> {
            (0..m).map(|m| act(&format!("{name} of microbatch {m}"), Dtype::U32, config.tokens, 1)).collect()
        };
        let (tokens, targets, order) = (ids("tokens")?, ids("targets")?, ids("order of tokens")?);
        let run = RunBufs {
            flag: act("flag", Dtype::U32, 1, 1)?.buf,
            tokens,
            targets,
            losses: act("losses", master, 1, m)?,
            step: act("attempt number of the step", Dtype::U64, 1, 1)?.buf,
            fast_accumulation: config.fast_accumulation,
        };
        let steps = config.optim.steps as usize;
        let optim = OptimBufs {
            partials: act("partial sums of squares", master, 1, config.norm.len())?.buf,
            flags: act("flags of all ranks", Dtype::U32, 1, config.ranks as usize)?.buf,
            norm: act("gradient norm", master, 1, 1)?.buf,
            clip: act("clipping factor", master, 1, 1)?.buf,
            table: act("learning rates", master, steps, 3)?.buf,
            counter: act("commits", Dtype::U64, 1, 1)?.buf,
        };
        let mut shard = Shard {
            device,
            pool: Pool::new(cfg!(debug_assertions), Reuse::Lowest),
            parts,
            run,
            order,
            optim,
            recipe,
            config,
            attempts: 0,
            tags: None,
            counters: health::Counters::new(),
            ties: Vec::new(),
            ties_across: false,
        };
        shard.upload_reals(shard.optim.table, &shard.config.optim.table())?;
        shard.device.issue(&Cmd::Fill { dst: shard.optim.counter, value: 0.0 })?;
        shard.device.issue(&Cmd::Fill { dst: shard.run.flag, value: 0.0 })?;
        Ok(shard)
    }

    /// The recipe.
    pub const fn recipe(&self) -> &Recipe {
        &self.recipe
    }

    /// The device.
    pub fn device(&mut self) -> &mut dyn Device {
        &mut self.device
    }

    /// The stages of this rank, in the order in which they were given.
    pub fn stages(&self) -> impl Iterator<Item = (StageId, &S)> {
        self.parts.iter().map(|part| (part.id, &part.stage))
    }

    /// Gives the stages back. The shard is of no use any more.
    pub(crate) fn take_stages(&mut self) -> Vec<(StageId, S)> {
        std::mem::take(&mut self.parts).into_iter().map(|part| (part.id, part.stage)).collect()
    }

    /// What a stage owns.
    pub fn spec(&self, stage: StageId) -> Result<&StageSpec> {
        Ok(self.part(stage)?.stage.spec())
    }

    fn part(&self, stage: StageId) -> Result<&Part<S>> {
        self.parts.iter().find(|part| part.id == stage).ok_or_else(|| wrong_rank(stage))
    }

    /// At start and after loading: fills the weight cache from the masters.
    pub fn prologue(&mut self) -> Result<()> {
        for part in &self.parts {
            part.state.forget_weights(&mut self.device)?;
            part.state.prefill(&mut self.device, part.stage.spec())?;
        }
        Ok(())
    }

    /// A step begins: its data and attempt number are written, the flag cleared, scales and histories are copied aside.
    pub fn begin_step(&mut self, batch: &[Windows]) -> Result<()> {
        self.feed(batch, self.attempts)?;
        self.begin()
    }

    /// Writes what the host gives to a step: its data and its attempt number. Nothing else of a step is host data.
    pub(crate) fn feed(&mut self, batch: &[Windows], step: u64) -> Result<()> {
        if batch.len() != self.config.microbatches as usize {
            return Err(Error::Contract {
                code: Code::BatchMismatch,
                message: format!("{} microbatches for a schedule of {}", batch.len(), self.config.microbatches),
            });
        }
        self.load(batch)?;
        self.device.write(self.run.step, &step.to_le_bytes())?;
        self.attempts = step + 1;
        Ok(())
    }

    /// A step begins on data that lies there already.
    pub(crate) fn begin(&mut self) -> Result<()> {
        self.pool.quiescent()?;
        self.device.issue(&Cmd::Fill { dst: self.run.flag, value: 0.0 })?;
        self.clear_tags()?;
        for part in &mut self.parts {
            part.grads.begin_step();
            part.state.save_cells(&mut self.device)?;
        }
        Ok(())
    }

    /// Steps that have begun. The next one has this number.
    pub const fn attempts(&self) -> u64 {
        self.attempts
    }

    /// Gives the next step its attempt number: where a run goes on that was saved.
    pub const fn set_attempts(&mut self, attempts: u64) {
        self.attempts = attempts;
    }

    /// Writes tokens and targets, from microbatch 0 on. For evaluation, where no step begins.
    pub fn load(&mut self, batch: &[Windows]) -> Result<()> {
        if batch.len() > self.run.tokens.len() {
            return Err(Error::Contract {
                code: Code::BatchMismatch,
                message: format!("{} microbatches for buffers of {}", batch.len(), self.run.tokens.len()),
            });
        }
        for (m, windows) in batch.iter().enumerate() {
            let order = windows.rows_by_token();
            for (act, values) in [
                (self.run.tokens[m], &windows.tokens),
                (self.run.targets[m], &windows.targets),
                (self.order[m], &order),
            ] {
                if values.len() != act.elements() {
                    return Err(Error::Contract {
                        code: Code::BatchMismatch,
                        message: format!("microbatch {m} has {} tokens, not {}", values.len(), act.elements()),
                    });
                }
                self.device.write(act.buf, bytemuck::cast_slice(values))?;
            }
        }
        Ok(())
    }

    pub(crate) fn context(&mut self, stage: StageId, microbatch: Microbatch, targets: bool) -> Result<(&S, Cx<'_>)> {
        let Shard { device, pool, parts, run, order, .. } = self;
        let part = parts.iter_mut().find(|part| part.id == stage).ok_or_else(|| wrong_rank(stage))?;
        let cx = Cx {
            device,
            pool,
            spec: part.stage.spec(),
            state: &part.state,
            run,
            order,
            grads: &mut part.grads,
            microbatch,
            targets,
            cells: Cells::Moved,
            seeds: false,
        };
        Ok((&part.stage, cx))
    }

    /// Counts what an action retains.
    pub(crate) fn mark(&mut self, retained: &impl Retained, stage: StageId, class: Class) {
        self.pool.mark(&Layout::of(retained), stage, class);
    }

    /// F. `x` stays the caller's; the output is leased to the caller.
    pub fn forward(
        &mut self,
        stage: StageId,
        microbatch: Microbatch,
        x: &[Act],
        token: Token<Fwd>,
    ) -> Result<(Vec<Act>, S::Tape, Token<Fwd>)> {
        let id = stage;
        let (stage, mut cx) = self.context(stage, microbatch, true)?;
        let result = stage.forward(&mut cx, x, token);
        let (y, tape, token) = cx.close(result)?;
        self.mark(&tape, id, Class::Tape);
        Ok((y, tape, token))
    }

    /// I. `dy` stays the caller's; dX is leased to the caller.
    pub fn input_grad(
        &mut self,
        stage: StageId,
        microbatch: Microbatch,
        dy: &[Act],
        tape: S::Tape,
        token: Token<Bwd>,
    ) -> Result<(Vec<Act>, S::Work, Token<Bwd>)> {
        let id = stage;
        let (stage, mut cx) = self.context(stage, microbatch, true)?;
        let result = stage.input_grad(&mut cx, dy, tape, token);
        let (dx, work, token) = cx.close(result)?;
        self.mark(&work, id, Class::Work);
        Ok((dx, work, token))
    }

    /// W.
    pub fn weight_grad(&mut self, stage: StageId, microbatch: Microbatch, work: S::Work) -> Result<()> {
        let (stage, mut cx) = self.context(stage, microbatch, true)?;
        let result = stage.weight_grad(&mut cx, work);
        cx.close(result)
    }

    /// F of evaluation. The last stage gives its logits, and with `targets` writes the loss.
    pub fn evaluate(&mut self, stage: StageId, microbatch: Microbatch, x: &[Act], targets: bool) -> Result<Vec<Act>> {
        let (stage, mut cx) = self.context(stage, microbatch, targets)?;
        cx.cells = Cells::Read;
        stage.evaluate(&mut cx, x)
    }

    /// Before a stage's first F of a step: its weight cells roll; the cache is current already.
    pub fn refresh(&mut self, stage: StageId) -> Result<()> {
        let Shard { device, parts, .. } = self;
        let part = parts.iter().find(|part| part.id == stage).ok_or_else(|| wrong_rank(stage))?;
        part.state.refresh(device)
    }

    /// After a stage's last gradient: microbatches are added in order. Who reads the sum makes it a mean: it multiplies by
    /// 1/(M·DP) and the inverse of the loss scale, once.
    pub fn reduce(&mut self, stage: StageId) -> Result<()> {
        let Shard { device, parts, .. } = self;
        let part = parts.iter_mut().find(|part| part.id == stage).ok_or_else(|| wrong_rank(stage))?;
        for index in 0..part.state.params.len() {
            part.grads.complete(ParamId(index))?;
        }
        for param in part.state.params.iter().filter(|param| !param.slots.is_empty()) {
            let slots = param.slots.iter().map(|slot| slot.buf).collect();
            device.issue(&Cmd::SumSlots { slots, out: param.grad.buf })?;
        }
        Ok(())
    }

    fn gradient_factor(&self) -> f32 {
        1.0 / (self.config.microbatches * self.config.data_parallel) as f32 / self.recipe.loss_scale()
    }

    /// The optimizer step. If the flag is set, nothing changes: parameters and moments stay, scales and histories are
    /// those of the step's start.
    pub fn commit(&mut self) -> Result<()> {
        self.pool.quiescent()?;
        self.parts.iter().try_for_each(|part| part.grads.all_final())?;
        let factor = self.gradient_factor();
        let device: &mut dyn Device = &mut self.device;
        let flag = self.run.flag;
        let OptimBufs { clip, table, counter, .. } = self.optim;
        let OptimConfig { beta1, beta2, epsilon, weight_decay, .. } = self.config.optim;
        for part in &self.parts {
            part.state.restore_cells(device, flag)?;
            part.state.step_cells(device, flag)?;
            for (id, param) in part.state.params.iter().enumerate() {
                let weight_decay = if part.stage.spec().decays(ParamId(id)) { weight_decay } else { 0.0 };
                device.issue(&Cmd::AdamW {
                    param: param.master.buf,
                    grad: param.grad.buf,
                    factor,
                    moment1: param.moment1.buf,
                    moment2: param.moment2.buf,
                    clip,
                    table,
                    counter,
                    config: AdamWConfig { beta1, beta2, epsilon, weight_decay },
                    unless: flag,
                })?;
            }
        }
        device.issue(&Cmd::Advance { counter, unless: flag })?;
        // After a bad step this writes the same bytes again: neither weights nor scales have moved.
        for part in &self.parts {
            part.state.prefill(device, part.stage.spec())?;
        }
        Ok(())
    }

    /// An aborted step: everything retained is given up, and state is that of the step's start.
    pub fn abort(&mut self) -> Result<()> {
        self.pool.reset(&mut self.device)?;
        self.device.issue(&Cmd::Fill { dst: self.run.flag, value: 1.0 })?;
        for part in &mut self.parts {
            part.state.restore_cells(&mut self.device, self.run.flag)?;
            part.grads.abort();
        }
        self.forget_rolls();
        Ok(())
    }

    /// An evaluation that ended early: everything leased is given up. Nothing else has moved.
    pub fn abort_evaluation(&mut self) -> Result<()> {
        self.pool.reset(&mut self.device)
    }

    /// How often one F and one I of a stage roll its cells: what its tokens are held to.
    pub fn rolls_per_action(&self, stage: StageId) -> Result<(u32, u32)> {
        let state = &self.part(stage)?.state;
        let rolls = |role| u32::from(state.update() == Update::Microbatch && state.bank(role).is_some());
        Ok((rolls(Role::Input), rolls(Role::GradOutput)))
    }

    /// How often F and I of a stage have rolled its cells since start, counted by the cells themselves.
    pub fn rolls(&self, stage: StageId) -> Result<Rolls> {
        let state = &self.part(stage)?.state;
        let rolls = |role| state.bank(role).map_or(0, Bank::rolls);
        Ok(Rolls { forward: rolls(Role::Input), backward: rolls(Role::GradOutput) })
    }

    /// Per stage, the most bytes that it retained at once since start.
    pub fn kept_bytes(&self) -> Vec<(StageId, KeptBytes)> {
        self.parts.iter().map(|part| (part.id, self.pool.kept(part.id))).collect()
    }

    /// Bytes of all destinations of gradients.
    pub fn arena_bytes(&self) -> usize {
        self.parts.iter().map(|part| part.grads.bytes()).sum()
    }

    /// Good commits so far: `e_W`.
    pub fn commits(&mut self) -> Result<u64> {
        Ok(self.read_pod::<u64>(self.optim.counter)?[0])
    }

    /// The loss of each microbatch, where this rank holds the last stage.
    pub fn losses(&mut self) -> Result<Vec<f64>> {
        self.read_reals(self.run.losses.buf)
    }

    /// Leases an activation for a message that arrives.
    pub fn lease(&mut self, dtype: Dtype, rows: usize, cols: usize) -> Result<Act> {
        self.pool.lease(&mut self.device, dtype, rows, cols)
    }

    /// Gives a leased activation back.
    pub fn free(&mut self, act: Act) -> Result<()> {
        self.pool.free(&mut self.device, act)
    }

    /// Fills an activation, as a message would.
    pub fn write_act(&mut self, act: Act, bytes: &[u8]) -> Result<()> {
        Ok(self.device.write(act.buf, bytes)?)
    }

    /// Activations, tapes and works: what is leased now and the most that was.
    pub const fn pool(&self) -> &Pool {
        &self.pool
    }

    /// The values of an activation.
    pub fn reals(&mut self, act: Act) -> Result<Vec<f64>> {
        self.read_reals(act.buf)
    }
}

fn wrong_rank(stage: StageId) -> Error {
    Error::Contract { code: Code::WrongRank, message: format!("stage {stage} does not live on this rank") }
}
