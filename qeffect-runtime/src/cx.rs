//! The context of an action: the primitives that ops are written in.
//!
//! A context belongs to one action on one stage and microbatch. It leases activations, issues commands, and is the only
//! way to the state cells: quantising an input takes a `Token<Fwd>`, quantising a gradient a `Token<Bwd>`, and a weight
//! gradient is given neither.

use qeffect_core::code::Code;
use qeffect_core::dtype::Dtype;
use qeffect_core::fp8::Fp8 as Format;
use qeffect_core::ids::Microbatch;
use qeffect_core::recipe::Recipe;
use qeffect_core::schedule::Update;
use qeffect_core::token::{Bwd, Fwd, Token};

use crate::act::{Act, Fp8, Kept};
use crate::cmd::{Beside, Cmd, Kernel, Operand, Scalar};
use crate::device::{Buf, Device};
use crate::error::{Error, Result};
use crate::fast::FastAccumulation;
pub use crate::gradients::GradDst;
use crate::gradients::Grads;
use crate::groups::{self, BLOCK, Grouped, Lines, Waiting};
use crate::ops::linear::Saved;
use crate::pool::Pool;
use crate::retained::Retained;
use crate::stage::{CellId, ParamId, Role, StageSpec, TableId};
use crate::state::{Bank, StageState, WorkingBufs};

/// What all actions of a rank share.
#[derive(Debug)]
pub struct RunBufs {
    /// u32, one element: set when a value is not finite, cleared when a step begins.
    pub flag: Buf,
    /// Per microbatch, u32: the tokens of its sequences.
    pub tokens: Vec<Act>,
    /// Per microbatch, u32: the token after each.
    pub targets: Vec<Act>,
    /// Master, one element per microbatch: its loss.
    pub losses: Act,
    /// u64, one element: the attempt number of the step. It is written before a step begins, as its tokens are, so a list
    /// of commands that reads it can be replayed.
    pub step: Buf,
    /// In which products the device may take faster sums for exact ones.
    pub fast_accumulation: FastAccumulation,
}

/// In which forms a quantised tensor is kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Forms {
    /// As stored only.
    Plain,
    /// Also transposed, where the device needs that for a weight gradient.
    Both,
    /// As `Both`, for the gradient of this weight: transposed beside the rest of its group, where there are groups.
    For(ParamId),
}

/// What an action does to the state cells of its stage.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Cells {
    /// It reads them, and moves them under its token.
    Moved,
    /// An F that is run again moves nothing, and reads the scales that it used the first time.
    Again(Option<Act>),
    /// An evaluation reads them.
    Read,
}

/// The context of one action.
pub struct Cx<'a> {
    pub(crate) device: &'a mut dyn Device,
    pub(crate) pool: &'a mut Pool,
    pub(crate) spec: &'a StageSpec,
    pub(crate) state: &'a StageState,
    pub(crate) run: &'a RunBufs,
    pub(crate) order: &'a [Act],
    pub(crate) grads: &'a mut Grads,
    pub(crate) microbatch: Microbatch,
    pub(crate) targets: bool,
    pub(crate) cells: Cells,
    /// An F that will be run again: its tape is given up at once.
    pub(crate) seeds: bool,
}

impl Cx<'_> {
    /// The recipe.
    pub const fn recipe(&self) -> &Recipe {
        &self.spec.recipe
    }

    /// The microbatch.
    pub const fn microbatch(&self) -> Microbatch {
        self.microbatch
    }

    /// Carries out a command.
    pub fn issue(&mut self, cmd: Cmd) -> Result<()> {
        Ok(self.device.issue(&cmd)?)
    }

    /// Leases an activation.
    pub fn lease(&mut self, rows: usize, cols: usize) -> Result<Act> {
        self.lease_as(self.spec.recipe.activation(), rows, cols)
    }

    /// Leases a tensor of some type.
    pub fn lease_as(&mut self, dtype: Dtype, rows: usize, cols: usize) -> Result<Act> {
        self.pool.lease(self.device, dtype, rows, cols)
    }

    /// Gives a leased tensor back.
    pub fn free(&mut self, act: Act) -> Result<()> {
        self.pool.free(self.device, act)
    }

    /// Retains a leased tensor: its buffer lives until both shares are given up.
    pub fn keep(&mut self, act: Act) -> Result<Kept> {
        self.pool.keep(act)
    }

    /// Takes one more share of a leased tensor, which is given back as the first one is.
    pub fn share(&mut self, act: Act) -> Result<Act> {
        Ok(self.keep(act)?.act())
    }

    /// Gives a retained tensor up.
    pub fn release(&mut self, kept: Kept) -> Result<()> {
        self.pool.release(self.device, kept)
    }

    /// Gives a retained quantised tensor up.
    pub fn release_fp8(&mut self, fp8: Fp8) -> Result<()> {
        self.pool.release_fp8(self.device, fp8)
    }

    /// The tokens of this microbatch.
    pub fn tokens(&self) -> Result<Act> {
        self.run.tokens.get(self.microbatch.index()).copied().ok_or_else(|| self.no_microbatch())
    }

    /// The rows of this microbatch, sorted by token.
    pub fn token_order(&self) -> Result<Act> {
        self.order.get(self.microbatch.index()).copied().ok_or_else(|| self.no_microbatch())
    }

    /// Their successors; `None` where only logits are wanted.
    pub fn targets(&self) -> Result<Option<Act>> {
        if !self.targets {
            return Ok(None);
        }
        self.run.targets.get(self.microbatch.index()).copied().map(Some).ok_or_else(|| self.no_microbatch())
    }

    /// Where the loss of this microbatch goes.
    pub fn loss(&self) -> Scalar {
        Scalar { buf: self.run.losses.buf, index: self.microbatch.index() }
    }

    /// Where the attempt number of this step lies.
    pub fn step(&self) -> Buf {
        self.run.step
    }

    /// A table that the stage registered.
    pub fn table(&self, table: TableId) -> Act {
        self.state.table(table)
    }

    /// The flag of this step.
    pub fn flag(&self) -> Buf {
        self.run.flag
    }

    /// A parameter's master weights.
    pub fn master(&self, param: ParamId) -> Act {
        self.state.param(param).master
    }

    /// A parameter in the form that ops read.
    pub fn working(&self, param: ParamId) -> WorkingBufs {
        self.state.param(param).working
    }

    /// Where the gradient of a parameter goes for this microbatch. It is written once, by this action.
    pub fn grad(&mut self, param: ParamId) -> Result<GradDst> {
        if self.cells == Cells::Read {
            let message = format!("gradient {} is asked for by an evaluation", param.0);
            return Err(Error::Contract { code: Code::ArenaDuplicate, message });
        }
        self.grads.open(param, self.microbatch)?;
        let bufs = self.state.param(param);
        let act = bufs.slots.get(self.microbatch.index()).copied().unwrap_or(bufs.grad);
        Ok(GradDst { param, act })
    }

    /// Keeps what the gradient of `weight` needs of an input or output gradient, and gives up the rest of it.
    pub fn keep_factor(&mut self, weight: ParamId, role: Role, saved: Saved) -> Result<Saved> {
        if self.seeds {
            return Ok(saved);
        }
        let grouped = self.grads.groups().is_some();
        match saved {
            Saved::Fp8(Fp8 { codes, other: None, scale_inv, grouped: Some(grouped), .. }) => {
                self.release(codes)?;
                self.release(scale_inv)?;
                Ok(Saved::Grouped(grouped))
            }
            Saved::Fp8(fp8) if !grouped => Ok(Saved::Fp8(self.keep_for_weight_grad(fp8)?)),
            Saved::Fp8(Fp8 { codes, flipped: false, other: None, scale_inv, .. }) => {
                self.copy_beside(weight, role, codes, Some(scale_inv))
            }
            Saved::Plain(kept) if grouped => self.copy_beside(weight, role, kept, None),
            Saved::Fp8(fp8) => Err(Error::shape("a group of microbatches", "codes of its own cast", Some(fp8.codes()))),
            saved => Ok(saved),
        }
    }

    /// Copies a tensor beside those of its group, and gives it up.
    fn copy_beside(&mut self, weight: ParamId, role: Role, kept: Kept, scale_inv: Option<Kept>) -> Result<Saved> {
        let act = kept.act();
        let grouped = self.join(weight, role, act, Lines::Rows, act.rows)?;
        let (dst, dst_at) = (grouped.region().buf, grouped.first());
        self.issue(Cmd::CopyRange { src: act.buf, src_at: 0, dst, dst_at, len: act.elements() })?;
        self.release(kept)?;
        Ok(Saved::Grouped(Grouped { scale_inv, ..grouped }))
    }

    /// This microbatch's part of the region of its group, for a tensor of the type and shape of `act`.
    fn join(&mut self, weight: ParamId, role: Role, act: Act, lines: Lines, stride: usize) -> Result<Grouped> {
        let Some(groups) = self.grads.groups() else {
            return Err(Error::Config("gradients are not coalesced".into()));
        };
        let (group, position, members) = groups.partition.locate(self.microbatch.0);
        let key = (weight, role, group);
        let region = match groups.join(key, members) {
            Some(region) => self.keep(region)?,
            None => {
                let tokens = members as usize * stride;
                let region = match lines {
                    Lines::Rows => self.lease_as(act.dtype, tokens, act.cols)?,
                    Lines::Columns => self.lease_as(act.dtype, act.cols, tokens)?,
                };
                if stride != act.rows {
                    self.issue(Cmd::Fill { dst: region.buf, value: 0.0 })?;
                }
                self.grads.groups().into_iter().for_each(|groups| groups.found(key, members, region));
                Kept::new(region)
            }
        };
        let Act { rows, cols, .. } = act;
        Ok(Grouped { region, scale_inv: None, lines, rows, cols, stride, position })
    }

    /// The gradient of a weight, `dyᵀ · x`, as the placement of gradients wants it. Consumes both factors.
    pub fn weight_product(&mut self, dst: GradDst, dy: Saved, x: Saved) -> Result<()> {
        let (dy, x) = match (dy, x) {
            (Saved::Grouped(dy), Saved::Grouped(x)) => return self.group_product(dst, dy, x),
            alone => alone,
        };
        let [m, n, k] = [dy.cols(), x.cols(), x.rows()];
        let (a, b) = (dy.first(true)?, x.second(false)?);
        let fast = self.run.fast_accumulation.in_gradients();
        let (write, accumulate) = self.grads.take(dst.param, self.microbatch)?;
        let result = self.device.issue(&Cmd::Gemm { m, n, k, a, b, bias: None, out: dst.act.buf, accumulate, fast });
        self.grads.executed([write], &dst.act, result)?;
        dy.release(self)?;
        x.release(self)
    }

    /// Gradients that one command writes, told where they go and whether it adds to what is there. For parameters of kind
    /// `Embedding`.
    pub fn add_gradients(&mut self, dsts: Vec<GradDst>, cmd: impl FnOnce(&[Buf], bool) -> Cmd) -> Result<()> {
        let bufs: Vec<Buf> = dsts.iter().map(|dst| dst.act.buf).collect();
        let mut writes = Vec::with_capacity(dsts.len());
        let mut adding = false;
        for dst in &dsts {
            let (write, adds) = self.grads.take(dst.param, self.microbatch)?;
            adding |= adds; // the parameters of one command have the same writes behind them
            writes.push((write, dst.act));
        }
        let result = self.device.issue(&cmd(&bufs, adding));
        writes.into_iter().try_for_each(|(write, act)| self.grads.executed([write], &act, result.clone()))
    }

    /// A member's share in the product of its group, which runs when the last member is here.
    fn group_product(&mut self, dst: GradDst, dy: Grouped, x: Grouped) -> Result<()> {
        let (write, accumulate) = self.grads.take(dst.param, self.microbatch)?;
        let Some(groups) = self.grads.groups() else {
            return Err(Error::Config("gradients are not coalesced".into()));
        };
        let (group, position, members) = groups.partition.locate(self.microbatch.0);
        let [m, n, k, stride] = [dy.cols, x.cols, x.rows, x.stride];
        if dy.rows != k || dy.stride != stride {
            return Err(Error::shape("a weight gradient", "as many tokens on both sides", Some(dy.region())));
        }
        let Some(all) = groups.add((dst.param, group), members, Waiting { write, position, dy, x }) else {
            return Ok(());
        };
        let shared = self.state.same_scales();
        let a = groups::operand(all.iter().map(|product| &product.dy), false, shared)?;
        let b = groups::operand(all.iter().map(|product| &product.x), true, shared)?;
        let (members, out) = (members as usize, dst.act.buf);
        let result = self.device.issue(&Cmd::GroupGemm { m, n, k, stride, members, a, b, out, accumulate });
        let mut writes = Vec::with_capacity(members);
        let mut factors = Vec::with_capacity(2 * members);
        for Waiting { write, dy, x, .. } in all {
            writes.push(write);
            factors.extend([dy, x]);
        }
        self.grads.executed(writes, &dst.act, result)?;
        factors.into_iter().try_for_each(|factor| factor.release(self))
    }

    /// The end of an action: what it was allowed to write is written, or nothing of it counts.
    pub(crate) fn close<T>(self, result: Result<T>) -> Result<T> {
        self.grads.close(self.spec, self.state, result)
    }

    /// `out = op(a) · op(b) + bias`, as an activation.
    pub fn gemm(&mut self, [m, n, k]: [usize; 3], a: Operand, b: Operand, bias: Option<Buf>) -> Result<Act> {
        let out = self.lease(m, n)?;
        let codes = |operand: Operand| Ok::<_, Error>(self.device.spec(operand.buf)?.dtype == Format::E4M3.dtype());
        // Gradients are E5M2: a product of two E4M3 is one of F.
        let fast = match codes(a)? && codes(b)? {
            true => self.run.fast_accumulation.in_forward(),
            false => self.run.fast_accumulation.in_gradients(),
        };
        self.issue(Cmd::Gemm { m, n, k, a, b, bias, out: out.buf, accumulate: false, fast })?;
        Ok(out)
    }

    /// `a + b`.
    pub fn add(&mut self, a: Act, b: Act) -> Result<Act> {
        if (a.rows, a.cols) != (b.rows, b.cols) {
            return Err(Error::shape("add", &a.to_string(), Some(b)));
        }
        let out = self.lease(a.rows, a.cols)?;
        self.issue(Cmd::Add { a: a.buf, b: b.buf, out: out.buf })?;
        Ok(out)
    }

    /// Runs a kernel that the op brings along.
    pub fn launch(&mut self, kernel: Kernel, inputs: &[Act], outputs: &[Act]) -> Result<()> {
        let bufs = |acts: &[Act]| acts.iter().map(|act| act.buf).collect();
        self.issue(Cmd::Launch { kernel, inputs: bufs(inputs), outputs: bufs(outputs) })
    }

    /// `Σ x[i, j]` over rows, into a gradient.
    pub fn column_sums(&mut self, x: Act, dst: GradDst) -> Result<()> {
        self.issue(Cmd::ColumnSums { x: x.buf, out: dst.act().buf, cols: x.cols })
    }

    /// Quantises an input, with the scale in force, and stages its amax. For F.
    pub fn quantise_input(&mut self, x: Act, cell: CellId, token: Token<Fwd>) -> Result<(Fp8, Token<Fwd>)> {
        Ok((self.quantise(x, cell, Role::Input, Forms::Both, true)?, token))
    }

    /// As [`Cx::quantise_input`], for a tensor that the gradient of `weight` needs: [`Cx::keep_factor`] follows.
    pub fn quantise_input_of(
        &mut self,
        weight: ParamId,
        x: Act,
        cell: CellId,
        token: Token<Fwd>,
    ) -> Result<(Fp8, Token<Fwd>)> {
        Ok((self.quantise(x, cell, Role::Input, Forms::For(weight), true)?, token))
    }

    /// As [`Cx::quantise_grad`], for a tensor that the gradient of `weight` needs: [`Cx::keep_factor`] follows.
    pub fn quantise_grad_of(
        &mut self,
        weight: ParamId,
        dy: Act,
        cell: CellId,
        token: Token<Bwd>,
    ) -> Result<(Fp8, Token<Bwd>)> {
        Ok((self.quantise(dy, cell, Role::GradOutput, Forms::For(weight), true)?, token))
    }

    /// Quantises the gradient of an output, with the scale in force, and stages its amax. For I.
    pub fn quantise_grad(&mut self, dy: Act, cell: CellId, token: Token<Bwd>) -> Result<(Fp8, Token<Bwd>)> {
        Ok((self.quantise(dy, cell, Role::GradOutput, Forms::Both, true)?, token))
    }

    /// Quantises an input with the scale in force and leaves no trace. For evaluation.
    pub fn quantise_frozen(&mut self, x: Act, cell: CellId) -> Result<Fp8> {
        self.quantise(x, cell, Role::Input, Forms::Plain, false)
    }

    /// Drops the form of a quantised tensor that only the product of this action needed.
    pub fn keep_for_weight_grad(&mut self, fp8: Fp8) -> Result<Fp8> {
        match fp8.other {
            None => Ok(fp8),
            Some(other) => {
                self.release(fp8.codes)?;
                Ok(Fp8 { codes: other, flipped: !fp8.flipped, other: None, ..fp8 })
            }
        }
    }

    /// The end of F: rolls the input cells of the stage.
    pub fn roll_forward(&mut self, token: Token<Fwd>) -> Result<Token<Fwd>> {
        Ok(if self.roll(Role::Input)? { token.rolled() } else { token })
    }

    /// The end of I: rolls the gradient cells of the stage.
    pub fn roll_backward(&mut self, token: Token<Bwd>) -> Result<Token<Bwd>> {
        Ok(if self.roll(Role::GradOutput)? { token.rolled() } else { token })
    }

    fn roll(&mut self, role: Role) -> Result<bool> {
        match self.state.bank(role) {
            Some(bank) if self.state.update() == Update::Microbatch => match self.cells {
                Cells::Moved => bank.roll(self.device, None).map(|()| true),
                Cells::Again(_) => Ok(false),
                Cells::Read => Err(wrong_cell(format!("{} cells are rolled by an evaluation", role.name()))),
            },
            _ => Ok(false),
        }
    }

    fn quantise(&mut self, x: Act, cell: CellId, role: Role, forms: Forms, record: bool) -> Result<Fp8> {
        let state = self.state;
        let bank: &Bank = match state.bank(role) {
            Some(bank) if cell.role == role && cell.index < bank.len() => bank,
            _ => {
                let (name, index) = (cell.role.name(), cell.index);
                return Err(wrong_cell(format!("{name} cell {index} is not moved by this action")));
            }
        };
        let (scale, record) = match self.cells {
            Cells::Again(Some(scales)) if role == Role::Input => (Scalar { buf: scales.buf, index: cell.index }, false),
            Cells::Again(_) => {
                let (name, index) = (role.name(), cell.index);
                return Err(wrong_cell(format!("{name} cell {index} is not read by a recomputation")));
            }
            Cells::Read if record => {
                let (name, index) = (role.name(), cell.index);
                return Err(wrong_cell(format!("an amax is staged into {name} cell {index} by an evaluation")));
            }
            Cells::Moved | Cells::Read => (bank.scale(cell.index), record),
        };
        let format: Format = bank.format;
        let both = forms != Forms::Plain && !self.seeds && self.device.caps().fp8_needs_transposes;
        let codes = self.lease_as(format.dtype(), x.rows, x.cols)?;
        let scale_inv = self.lease_as(Dtype::F32, 1, 1)?;
        let mut grouped = None;
        if let Forms::For(weight) = forms
            && both
            && self.grads.groups().is_some()
        {
            let stride = if self.state.same_scales() { x.rows } else { x.rows.next_multiple_of(BLOCK) };
            let part = self.join(weight, role, codes, Lines::Columns, stride)?;
            grouped = Some(Grouped { scale_inv: Some(self.keep(scale_inv)?), ..part });
        }
        let other = match both && grouped.is_none() {
            true => Some(self.lease_as(format.dtype(), x.cols, x.rows)?),
            false => None,
        };
        let beside = grouped.as_ref().map(|part| Beside { first: part.first(), line: part.region().cols });
        let transposed = grouped.as_ref().map(Grouped::region).or(other).map(|act| act.buf);
        self.issue(Cmd::Quantise {
            src: x.buf,
            rows: x.rows,
            cols: x.cols,
            format,
            scale,
            codes: codes.buf,
            transposed,
            beside,
            scale_inv: scale_inv.buf,
            amax: record.then(|| bank.staging(cell.index)),
            flag: record.then_some(self.run.flag),
        })?;
        // The lease itself is what is kept.
        Ok(Fp8 {
            format,
            rows: x.rows,
            cols: x.cols,
            codes: Kept::new(codes),
            flipped: false,
            other: other.map(Kept::new),
            scale_inv: Kept::new(scale_inv),
            grouped,
        })
    }

    fn no_microbatch(&self) -> Error {
        Error::Contract {
            code: Code::OutOfRange,
            message: format!("microbatch {} does not exist in this run", self.microbatch),
        }
    }
}

fn wrong_cell(message: String) -> Error {
    Error::Contract { code: Code::TokenOutOfOrder, message }
}
