//! What a stage owns on a device: parameters, weight cache, state cells, gradients, moments.
//!
//! The weight cache is a copy of the masters in the form that ops read. [`StageState::prefill`] writes it, at start and
//! at commit, with the scale that is in force then, and stages the weight's amax; [`StageState::refresh`], before a
//! step's first F, rolls the weight cells and need not touch the bytes again. The factor of the bytes lies beside them,
//! so moving a scale never changes what a cached weight means.

use std::cell::Cell;

use qeffect_core::arena::Places;
use qeffect_core::bind::Gradients;
use qeffect_core::dtype::Dtype;
use qeffect_core::fp8::Fp8 as Format;
use qeffect_core::scaling::ScaleRule;
use qeffect_core::schedule::Update;

use crate::act::{Act, Fp8View};
use crate::cmd::{Cmd, Scalar};
use crate::device::{Buf, BufSpec, Device};
use crate::error::Result;
use crate::gradients::{GradDtype, places};
use crate::stage::{CellId, ParamId, ParamKind, ParamSpec, Role, StageSpec, TableId, TableSpec, Working};

/// Buffers of one parameter.
#[derive(Debug)]
pub struct ParamBufs {
    /// Master weights.
    pub master: Act,
    /// The form that ops read.
    pub working: WorkingBufs,
    /// The gradient of the step: a sum over microbatches, complete after `reduce`.
    pub grad: Act,
    /// One gradient per microbatch; none where W adds to `grad` itself.
    pub slots: Vec<Act>,
    /// First moment.
    pub moment1: Act,
    /// Second moment.
    pub moment2: Act,
}

/// The form in which ops read a parameter.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WorkingBufs {
    /// Numbers: the master, or its copy in the activation type.
    Plain(Act),
    /// Codes with their factor.
    Fp8(Fp8View),
}

/// State cells of one role.
#[derive(Debug)]
pub struct Bank {
    /// `[cells]`
    pub scales: Buf,
    /// `[H, cells]`
    pub history: Buf,
    /// How they follow from amax.
    pub rule: ScaleRule,
    /// Format of what is quantised.
    pub format: Format,
    cells: usize,
    saved: [Buf; 2],
    /// Rolls by an action since start, and when the step began.
    rolls: [Cell<u64>; 2],
}

impl Bank {
    /// Number of cells.
    pub const fn len(&self) -> usize {
        self.cells
    }

    /// Whether there is none.
    pub const fn is_empty(&self) -> bool {
        self.cells == 0
    }

    /// Rolls every cell that ran.
    pub fn roll(&self, device: &mut dyn Device, unless: Option<Buf>) -> Result<()> {
        let cmd =
            Cmd::Roll { scales: self.scales, history: self.history, cells: 0..self.cells, rule: self.rule, unless };
        device.issue(&cmd)?;
        self.rolls[0].set(self.rolls[0].get() + u64::from(unless.is_none()));
        Ok(())
    }

    /// How often an action rolled these cells since start: what tokens are compared with. Rolls at commit, and those of
    /// an aborted step, do not count.
    pub const fn rolls(&self) -> u64 {
        self.rolls[0].get()
    }

    /// Cells were rolled by commands that did not come from here.
    pub(crate) fn add_rolls(&self, times: u64) {
        self.rolls[0].set(self.rolls[0].get() + times);
    }

    /// The scale of a cell.
    pub const fn scale(&self, index: usize) -> Scalar {
        Scalar { buf: self.scales, index }
    }

    /// The staging entry of a cell.
    pub const fn staging(&self, index: usize) -> Scalar {
        Scalar { buf: self.history, index }
    }
}

/// Everything a stage owns on a device.
#[derive(Debug)]
pub struct StageState {
    /// Parameters, in the order of the spec.
    pub params: Vec<ParamBufs>,
    banks: [Option<Bank>; 3],
    tables: Vec<Act>,
    update: Update,
}

impl StageState {
    /// Makes the buffers of a stage for steps of `microbatches`. Parameters hold nothing yet; scales are 1, histories
    /// and moments 0.
    pub fn new(
        device: &mut dyn Device,
        spec: &StageSpec,
        (gradients, grad_dtype): (Gradients, GradDtype),
        microbatches: u32,
    ) -> Result<StageState> {
        let recipe = &spec.recipe;
        let master = recipe.master();
        let mut params = Vec::with_capacity(spec.params.len());
        for (at, param) in spec.params.iter().enumerate() {
            let mut act = |what: &str, dtype: Dtype| matrix(device, param, what, dtype);
            let masters = act("master", master)?;
            let stored = match (grad_dtype, param.kind) {
                (GradDtype::Bf16, ParamKind::Matrix) if spec.tied_to(ParamId(at)).is_none() => Dtype::Bf16,
                _ => master,
            };
            let grad = act("gradient", stored)?;
            let moment1 = act("first moment", master)?;
            let moment2 = act("second moment", master)?;
            let slots = match places(param.kind, gradients) {
                Places::PerMicrobatch => microbatches,
                Places::One => 0,
            };
            let slots =
                (0..slots).map(|m| act(&format!("gradient of microbatch {m}"), master)).collect::<Result<Vec<_>>>()?;
            let working = match param.working {
                Working::Master => WorkingBufs::Plain(masters),
                Working::Activation if recipe.activation() == master => WorkingBufs::Plain(masters),
                Working::Activation => WorkingBufs::Plain(act("working copy", recipe.activation())?),
                Working::Fp8(_) => {
                    let codes = act("codes", Dtype::E4M3)?.buf;
                    let other = match device.caps().fp8_needs_transposes {
                        true => Some(matrix(device, param, "transposed codes", Dtype::E4M3)?.buf),
                        false => None,
                    };
                    let spec = BufSpec::new(format!("{} (factor)", param.path), Dtype::F32, 1, 1);
                    WorkingBufs::Fp8(Fp8View { codes, flipped: false, other, scale_inv: device.alloc(spec)? })
                }
            };
            for moment in [moment1, moment2] {
                device.issue(&Cmd::Fill { dst: moment.buf, value: 0.0 })?;
            }
            params.push(ParamBufs { master: masters, working, grad, slots, moment1, moment2 });
        }
        let mut banks = [None, None, None];
        if let Some(delayed) = recipe.delayed() {
            for role in Role::ALL {
                let cells = spec.cells(role).len();
                if cells == 0 {
                    continue;
                }
                let format = if role == Role::GradOutput { Format::E5M2 } else { Format::E4M3 };
                let rows = delayed.history as usize;
                let mut alloc = |what: &str, rows: usize, value: f32| -> Result<Buf> {
                    let buf = device.alloc(BufSpec::new(format!("{} {what}", role.name()), Dtype::F32, rows, cells))?;
                    device.issue(&Cmd::Fill { dst: buf, value })?;
                    Ok(buf)
                };
                banks[role as usize] = Some(Bank {
                    scales: alloc("scales", 1, 1.0)?,
                    history: alloc("amax history", rows, 0.0)?,
                    saved: [alloc("saved scales", 1, 1.0)?, alloc("saved amax history", rows, 0.0)?],
                    rule: delayed.rule(format),
                    format,
                    cells,
                    rolls: Default::default(),
                });
            }
        }
        let tables = spec.tables().iter().map(|table| upload(device, table, master)).collect::<Result<Vec<_>>>()?;
        Ok(StageState { params, banks, tables, update: recipe.update() })
    }

    /// The cells of a role, if the stage has any.
    pub const fn bank(&self, role: Role) -> Option<&Bank> {
        self.banks[role as usize].as_ref()
    }

    /// When cells move.
    pub const fn update(&self) -> Update {
        self.update
    }

    /// Whether all microbatches of a step are cast with the same scales.
    pub fn same_scales(&self) -> bool {
        self.update != Update::Microbatch
    }

    /// The buffers of a parameter.
    pub fn param(&self, id: ParamId) -> &ParamBufs {
        &self.params[id.0]
    }

    /// A table.
    pub fn table(&self, id: TableId) -> Act {
        self.tables[id.0]
    }

    /// Copies scales and histories aside, at the start of a step.
    pub fn save_cells(&self, device: &mut dyn Device) -> Result<()> {
        for bank in self.banks.iter().flatten() {
            device.issue(&Cmd::Copy { src: bank.scales, dst: bank.saved[0] })?;
            device.issue(&Cmd::Copy { src: bank.history, dst: bank.saved[1] })?;
        }
        self.mark_rolls();
        Ok(())
    }

    /// Remembers the counts of rolls, at the start of a step.
    pub(crate) fn mark_rolls(&self) {
        for bank in self.banks.iter().flatten() {
            bank.rolls[1].set(bank.rolls[0].get());
        }
    }

    /// Takes scales and histories back from that copy, if `flag` is set.
    pub fn restore_cells(&self, device: &mut dyn Device, flag: Buf) -> Result<()> {
        for bank in self.banks.iter().flatten() {
            device.issue(&Cmd::CopyIf { flag, src: bank.saved[0], dst: bank.scales })?;
            device.issue(&Cmd::CopyIf { flag, src: bank.saved[1], dst: bank.history })?;
        }
        Ok(())
    }

    /// Takes the counts of rolls back to where they were at the start of the step.
    pub fn restore_rolls(&self) {
        for bank in self.banks.iter().flatten() {
            bank.rolls[0].set(bank.rolls[1].get());
        }
    }

    /// Moves the scales where they move once per step, unless `flag` is set.
    pub fn step_cells(&self, device: &mut dyn Device, flag: Buf) -> Result<()> {
        if self.update == Update::Step {
            for bank in self.banks.iter().flatten() {
                bank.roll(device, Some(flag))?;
            }
        }
        Ok(())
    }

    /// Forgets the amax of weights that were cast but not rolled: those weights are replaced.
    pub fn forget_weights(&self, device: &mut dyn Device) -> Result<()> {
        let Some(bank) = self.bank(Role::Weight) else { return Ok(()) };
        let mut history = vec![0; device.spec(bank.history)?.bytes()];
        device.read(bank.history, &mut history)?;
        history[..bank.cells * size_of::<f32>()].fill(0); // the staging row
        Ok(device.write(bank.history, &history)?)
    }

    /// Writes the weight cache from the masters, with the scales in force, and stages each weight's amax. Doing it
    /// again changes nothing.
    pub fn prefill(&self, device: &mut dyn Device, spec: &StageSpec) -> Result<()> {
        for (param, bufs) in spec.params.iter().zip(&self.params) {
            match (bufs.working, param.working) {
                (WorkingBufs::Plain(act), _) => {
                    if act.buf != bufs.master.buf {
                        device.issue(&Cmd::Convert { src: bufs.master.buf, dst: act.buf })?;
                    }
                }
                (WorkingBufs::Fp8(view), Working::Fp8(CellId { index, .. })) => {
                    let Some(bank) = self.bank(Role::Weight) else { continue };
                    device.issue(&Cmd::Quantise {
                        src: bufs.master.buf,
                        rows: param.rows,
                        cols: param.cols,
                        format: bank.format,
                        scale: bank.scale(index),
                        codes: view.codes,
                        transposed: view.other,
                        beside: None,
                        scale_inv: view.scale_inv,
                        amax: Some(bank.staging(index)),
                        flag: None,
                    })?;
                }
                (WorkingBufs::Fp8(_), _) => {}
            }
        }
        Ok(())
    }

    /// Before a step's first F: rolls the weight cells, once. The cache holds the current weights already.
    pub fn refresh(&self, device: &mut dyn Device) -> Result<()> {
        match self.bank(Role::Weight) {
            Some(bank) if self.update == Update::Microbatch => bank.roll(device, None),
            _ => Ok(()),
        }
    }
}

fn upload(device: &mut dyn Device, table: &TableSpec, dtype: Dtype) -> Result<Act> {
    let TableSpec { name, rows, cols, values } = table;
    let buf = device.alloc(BufSpec::new(name.clone(), dtype, *rows, *cols))?;
    match dtype {
        Dtype::F64 => device.write(buf, bytemuck::cast_slice(values))?,
        _ => {
            let rounded: Vec<f32> = values.iter().map(|x| *x as f32).collect();
            device.write(buf, bytemuck::cast_slice(&rounded))?;
        }
    }
    Ok(Act { buf, dtype, rows: *rows, cols: *cols })
}

fn matrix(device: &mut dyn Device, param: &ParamSpec, what: &str, dtype: Dtype) -> Result<Act> {
    let buf = device.alloc(BufSpec::new(format!("{} ({what})", param.path), dtype, param.rows, param.cols))?;
    Ok(Act { buf, dtype, rows: param.rows, cols: param.cols })
}
