//! Commands to launches: looks buffers up, and puts kernels into the stream of a lane.
//!
//! Nothing here allocates or waits, so all of it may be captured; what a command needs besides was made before, by
//! `CudaDevice::prepare`.

use std::collections::HashMap;

use half::bf16;
use qeffect_core::dtype::Dtype;
use qeffect_kernels::gemm::{Plan, Product};
use qeffect_kernels::launch::attention;
use qeffect_kernels::launch::cast::{Codes, ColumnSums, LossGradient, Outputs, Transposed};
use qeffect_kernels::launch::elementwise::Mask;
use qeffect_kernels::launch::embedding::RotaryShape;
use qeffect_kernels::launch::norm::{DownColumns, NormGradient, Normal, Statistics};
use qeffect_kernels::launch::optimizer::{AdamW, Gradient, Parameter, Settled};
use qeffect_kernels::launch::scale::Spread;
use qeffect_kernels::launch::step::Tag;
use qeffect_kernels::{CudaStream, Kernels, Span, memory};

use super::failed;
use super::product::{Gemm, Group};
use super::scratch::Scratch;
use super::table::{Stored, Table};
use super::unit::Piece;
use crate::cmd::effects::Mode;
use crate::cmd::{AttentionShape, Beside, Cmd, HEALTH_WORDS, Scalar, SlotTag};
use crate::device::{Buf, BufSpec, DeviceError};
use crate::kernels::optimizer::norm_pieces;

pub(super) type Result<T = (), E = DeviceError> = std::result::Result<T, E>;

/// A lane with everything that commands are carried out with.
pub(super) struct Lane<'a> {
    pub(super) table: &'a Table,
    pub(super) kernels: &'a Kernels,
    pub(super) plans: &'a HashMap<Product, Plan>,
    pub(super) stream: &'a CudaStream,
    pub(super) scratch: &'a Scratch,
}

/// What goes down the columns of a norm's gradient, beside the gradients of gain and bias.
#[derive(Clone, Copy, Default)]
pub(super) struct Down {
    /// The gradient of the rows, and where its column sums go.
    pub(super) sums: Option<(Buf, Buf)>,
    /// Its codes, and where they go transposed.
    pub(super) lines: Option<(Span<u8>, Transposed)>,
}

/// What both parts of the backward of a norm work on.
#[derive(Clone, Copy)]
pub(super) struct NormGrad {
    pub(super) name: &'static str,
    pub(super) dy: Buf,
    pub(super) x: Buf,
    /// Rows and columns.
    pub(super) shape: (usize, usize),
    pub(super) statistics: Statistics,
}

pub(super) fn first(buf: Buf) -> Scalar {
    Scalar { buf, index: 0 }
}

fn sizes(shape: &AttentionShape) -> attention::AttentionShape {
    let AttentionShape { sequences, length, heads, kv_heads, head_dim } = *shape;
    attention::AttentionShape { sequences, length, heads, kv_heads, head_dim }
}

impl Lane<'_> {
    /// Puts a command, or a piece of one, into the stream.
    pub(super) fn issue(&self, cmd: &Cmd, piece: Piece) -> Result {
        self.put(cmd, piece)?;
        if matches!(cmd, Cmd::EmbedGrad { .. }) {
            return Ok(()); // keeps account of the rows that it writes
        }
        let accesses = cmd.effects(|buf| self.table.spec(buf).ok().map(BufSpec::elements));
        let mut written = accesses.iter().filter(|access| access.mode != Mode::Read);
        written.try_for_each(|access| self.table.touch(self.stream, cmd.name(), access.buf))
    }

    fn put(&self, cmd: &Cmd, piece: Piece) -> Result {
        let (k, stream, t) = (self.kernels, self.stream, self.table);
        let name = cmd.name();
        let failed = failed(name);
        match cmd {
            Cmd::Fill { dst, value } => t.fill(stream, name, *dst, *value),
            Cmd::Copy { src, dst } => self.copy(name, *src, *dst),
            Cmd::CopyRange { src, src_at, dst, dst_at, len } => {
                let (from, to) = (t.spec(*src)?, t.spec(*dst)?);
                if from.dtype != to.dtype {
                    return Err(t.not(name, *dst, from.dtype.name()));
                }
                let part = |buf, at: usize| {
                    let (end, size) = (at.saturating_add(*len), from.dtype.size());
                    let range = at.saturating_mul(size)..end.saturating_mul(size);
                    t.bytes_of(buf)?.part(range).ok_or_else(|| t.short(name, buf, end))
                };
                memory::copy(stream, part(*src, *src_at)?, part(*dst, *dst_at)?).map_err(failed)
            }
            Cmd::Convert { src, dst } => match (t.spec(*src)?.dtype, t.spec(*dst)?.dtype) {
                (from, to) if from == to => self.copy(name, *src, *dst),
                (Dtype::Bf16, Dtype::F32) => k.widen(stream, t.get(name, *src)?, t.get(name, *dst)?).map_err(failed),
                _ => k.convert(stream, t.get(name, *src)?, t.get(name, *dst)?).map_err(failed),
            },
            Cmd::Gemm { .. } => Gemm::of(t, cmd)?.map_or(Ok(()), |gemm| self.gemm(name, &gemm)),
            Cmd::GroupGemm { .. } => Group::of(t, cmd)?.map_or(Ok(()), |group| self.group(name, group)),
            Cmd::Quantise { src, .. } => match t.spec(*src)?.dtype {
                Dtype::Bf16 => self.quantise(cmd, |format, shape, outputs| {
                    k.cast(stream, format, t.get(name, *src)?, shape, outputs).map_err(failed)
                }),
                _ => self.quantise(cmd, |format, shape, outputs| {
                    if format.dtype() != Dtype::E4M3 {
                        return Err(t.not(name, *src, "bf16, where codes are E5M2"));
                    }
                    k.cast_master(stream, t.get(name, *src)?, shape, outputs).map_err(failed)
                }),
            },
            Cmd::Health { src, format, scale, counts, cell } => {
                let words = cell * HEALTH_WORDS..(cell + 1) * HEALTH_WORDS;
                let short = || t.short(name, *counts, words.end);
                let words = t.get::<u64>(name, *counts)?.part(words.clone()).ok_or_else(short)?;
                let scale = t.scalar(name, *scale)?;
                match t.spec(*src)?.dtype {
                    Dtype::Bf16 => k.health(stream, *format, t.get(name, *src)?, scale, words),
                    _ => k.health_master(stream, *format, t.get(name, *src)?, scale, words),
                }
                .map_err(failed)
            }
            Cmd::Roll { scales, history, cells, rule, unless } => {
                let unless = unless.map(|flag| t.scalar(name, first(flag))).transpose()?;
                let (scales, history) = (t.get::<f32>(name, *scales)?, t.get(name, *history)?);
                let cells = cells.start..cells.end.min(scales.len());
                k.roll_scales(stream, rule, cells, scales, history, None, unless).map_err(failed)
            }
            Cmd::Embed { tokens, table, positions, out, flag, seq, cols } => {
                let flag = flag.map(|flag| t.scalar(name, first(flag))).transpose()?;
                let places = positions.map(|positions| self.sized::<f32>(name, positions, seq * cols)).transpose()?;
                let (ids, words) = (t.get(name, *tokens)?, t.get(name, *table)?);
                k.embedding_forward(stream, ids, *cols, words, places, t.get(name, *out)?, flag).map_err(failed)
            }
            Cmd::EmbedGrad { tokens, order, dy, table_grad, positions_grad, seq, cols, accumulate } => {
                let ids = t.get::<u32>(name, *tokens)?;
                let order = self.sized::<u32>(name, *order, ids.len())?;
                let dy = self.sized::<bf16>(name, *dy, ids.len() * cols)?;
                let words = t.get::<f32>(name, *table_grad)?;
                let places = positions_grad.map(|grad| self.sized::<f32>(name, grad, seq * cols)).transpose()?;
                let touched = t.rows(*table_grad).map(|rows| rows.touched);
                let zeroed = match touched {
                    _ if *accumulate => Ok(()),
                    Some(touched) => k.clear_rows(stream, *cols, touched, words),
                    None => memory::zero(stream, words),
                };
                zeroed
                    .and_then(|()| k.token_gradient(stream, ids, order, *cols, dy, *accumulate, words, touched))
                    .and_then(|()| {
                        places.map_or(Ok(()), |places| k.position_gradient(stream, *cols, dy, *accumulate, places))
                    })
                    .map_err(failed)
            }
            Cmd::LayerNorm { x, gain, bias, y, mean, rstd, cols } => {
                let (x, shape) = self.matrix(name, *x, *cols)?;
                let statistics = Statistics { mean: Some(t.get(name, *mean)?), rstd: t.get(name, *rstd)? };
                let (gamma, beta) = (t.get(name, *gain)?, Some(t.get(name, *bias)?));
                let normal = Normal { gamma, beta, y: t.get(name, *y)? };
                k.layer_norm_forward(stream, x, shape, None, statistics, Some(normal)).map_err(failed)
            }
            Cmd::LayerNormGrad { dy, x, gain, mean, rstd, dx, gain_grad, bias_grad, cols } => {
                let (_, shape) = self.matrix(name, *x, *cols)?;
                let statistics = Statistics { mean: Some(t.get(name, *mean)?), rstd: t.get(name, *rstd)? };
                let norm = NormGrad { name, dy: *dy, x: *x, shape, statistics };
                if piece.has_rows() {
                    k.layer_norm_backward(stream, &self.norm_from(&norm, *gain, None)?, shape, t.get(name, *dx)?)
                        .map_err(failed)?;
                }
                if piece.has_vectors() {
                    self.norm_vectors(&norm, *gain_grad, Some(*bias_grad), Down::default())
                } else {
                    Ok(())
                }
            }
            Cmd::RmsNorm { x, gain, y, rstd, cols } => {
                let (x, shape) = self.matrix(name, *x, *cols)?;
                let statistics = Statistics { mean: None, rstd: t.get(name, *rstd)? };
                let normal = Normal { gamma: t.get(name, *gain)?, beta: None, y: t.get(name, *y)? };
                k.layer_norm_forward(stream, x, shape, None, statistics, Some(normal)).map_err(failed)
            }
            Cmd::RmsNormGrad { dy, x, gain, rstd, dx, gain_grad, cols } => {
                let (_, shape) = self.matrix(name, *x, *cols)?;
                let statistics = Statistics { mean: None, rstd: t.get(name, *rstd)? };
                let norm = NormGrad { name, dy: *dy, x: *x, shape, statistics };
                if piece.has_rows() {
                    k.layer_norm_backward(stream, &self.norm_from(&norm, *gain, None)?, shape, t.get(name, *dx)?)
                        .map_err(failed)?;
                }
                if piece.has_vectors() { self.norm_vectors(&norm, *gain_grad, None, Down::default()) } else { Ok(()) }
            }
            Cmd::Rotary { x, table, out, shape, inverse } => {
                let crate::cmd::RotaryShape { length, heads, head_dim, width } = *shape;
                let shape = RotaryShape { length, heads, head_dim, width };
                let (x, table, out) = (t.get(name, *x)?, t.get(name, *table)?, t.get(name, *out)?);
                k.rotary(stream, x, table, out, *inverse, &shape).map_err(failed)
            }
            Cmd::Gelu { x, y } => {
                k.cast_gelu(stream, t.get(name, *x)?, self.shape(*x)?, &self.values(name, *y)?).map_err(failed)
            }
            Cmd::GeluGrad { x, dy, dx } => {
                let (x, dy, shape) = (t.get(name, *x)?, t.get(name, *dy)?, self.shape(*x)?);
                k.cast_gelu_backward(stream, x, dy, shape, &self.values(name, *dx)?).map_err(failed)
            }
            Cmd::Silu { x, y } => {
                k.cast_silu(stream, t.get(name, *x)?, self.shape(*x)?, &self.values(name, *y)?).map_err(failed)
            }
            Cmd::SiluGrad { x, dy, dx } => {
                let (x, dy, shape) = (t.get(name, *x)?, t.get(name, *dy)?, self.shape(*x)?);
                k.cast_silu_backward(stream, x, dy, shape, &self.values(name, *dx)?).map_err(failed)
            }
            Cmd::Swiglu { x, y, cols } => {
                let (_, shape) = self.matrix(name, *y, *cols)?;
                k.cast_swiglu(stream, t.get(name, *x)?, shape, &self.values(name, *y)?).map_err(failed)
            }
            Cmd::SwigluGrad { x, dy, dx, cols } => {
                let (dy, shape) = self.matrix(name, *dy, *cols)?;
                k.cast_swiglu_backward(stream, t.get(name, *x)?, dy, shape, &self.values(name, *dx)?).map_err(failed)
            }
            Cmd::Dropout { x, y, step, key, rate } => {
                let mask = Mask {
                    seed: key.seed,
                    site: key.site,
                    microbatch: key.microbatch,
                    threshold: rate.threshold,
                    factor: rate.factor,
                };
                k.dropout(stream, &mask, t.scalar(name, first(*step))?, t.get(name, *x)?, t.get(name, *y)?)
                    .map_err(failed)
            }
            Cmd::Launch { .. } => {
                let reason = "kernels that ops bring along are not on this device yet".into();
                Err(DeviceError::Failed { cmd: name, reason })
            }
            Cmd::Fused(fused) => self.fused(fused, piece),
            Cmd::Attention { qkv, out, lse, shape } => {
                let shape = sizes(shape);
                k.attention_forward(stream, &shape, t.get(name, *qkv)?, t.get(name, *out)?, t.get(name, *lse)?)
                    .map_err(failed)
            }
            Cmd::AttentionGrad { qkv, lse, dout, dqkv, shape } => {
                let shape = sizes(shape);
                let (qkv, dout, sums) = (t.get(name, *qkv)?, t.get(name, *dout)?, t.get::<f32>(name, *lse)?);
                let delta = self.rows(name, sums.len())?;
                k.attention_backward(stream, &shape, qkv, dout, sums, t.get(name, *dqkv)?, delta).map_err(failed)
            }
            Cmd::Add { a, b, out } => {
                k.add(stream, t.get(name, *a)?, t.get(name, *b)?, t.get(name, *out)?).map_err(failed)
            }
            Cmd::ColumnSums { x, out, cols } => {
                let (x, shape) = self.matrix(name, *x, *cols)?;
                let sums = ColumnSums { out: t.get(name, *out)?, scratch: self.scratch.columns() };
                let outputs = Outputs { column_sums: Some(sums), ..Outputs::default() };
                k.cast(stream, qeffect_core::fp8::Fp8::E4M3, x, shape, &outputs).map_err(failed)
            }
            Cmd::CrossEntropy { logits, targets, lse, loss, flag, vocabulary } => {
                let targets = t.get::<u32>(name, *targets)?;
                let logits = self.sized::<bf16>(name, *logits, targets.len() * vocabulary)?;
                let flag = flag.map(|flag| t.scalar(name, first(flag))).transpose()?;
                let losses = self.rows(name, targets.len())?;
                k.cross_entropy_forward(
                    stream,
                    logits,
                    targets,
                    t.get(name, *lse)?,
                    losses,
                    t.scalar(name, *loss)?,
                    flag,
                )
                .map_err(failed)
            }
            Cmd::CrossEntropyGrad { logits, targets, lse, dlogits, vocabulary, factor } => {
                let (logits, shape) = self.matrix(name, *logits, *vocabulary)?;
                let (targets, lse) = (t.get(name, *targets)?, t.get(name, *lse)?);
                let gradient = LossGradient { logits, targets, lse, factor: *factor };
                k.cast_loss(stream, &gradient, shape, &self.values(name, *dlogits)?).map_err(failed)
            }
            Cmd::SumSlots { slots, out } => {
                let slots = slots.iter().map(|slot| t.get::<f32>(name, *slot)).collect::<Result<Vec<_>>>()?;
                k.sum_slots(stream, &slots, 1.0, t.get(name, *out)?).map_err(failed)
            }
            Cmd::SumSquares { src, factor, partials, first } => {
                let end = first + norm_pieces(t.spec(*src)?.elements());
                let src = self.gradient(name, *src)?;
                let sums = t.get::<f32>(name, *partials)?.part(*first..end);
                let sums = sums.ok_or_else(|| t.short(name, *partials, end))?;
                k.sum_squares(stream, src, *factor, sums).map_err(failed)
            }
            Cmd::Settle { partials, flags, limit, norm, clip, flag } => {
                let settled = Settled {
                    norm: t.get(name, *norm)?,
                    clip: t.get(name, *clip)?,
                    flag: t.scalar(name, first(*flag))?,
                };
                k.settle(stream, t.get(name, *partials)?, t.get(name, *flags)?, *limit, &settled).map_err(failed)
            }
            Cmd::AdamW { param, grad, factor, moment1, moment2, clip, table, counter, config, unless } => {
                let adam = AdamW {
                    table: t.get(name, *table)?,
                    counter: t.scalar(name, first(*counter))?,
                    clip: t.scalar(name, first(*clip))?,
                    unless: t.scalar(name, first(*unless))?,
                    factor: *factor,
                    beta1: config.beta1,
                    beta2: config.beta2,
                    epsilon: config.epsilon,
                    weight_decay: config.weight_decay,
                };
                let parameter = Parameter {
                    gradient: self.gradient(name, *grad)?,
                    weight: t.get(name, *param)?,
                    first: t.get(name, *moment1)?,
                    second: t.get(name, *moment2)?,
                };
                k.adamw(stream, &adam, &parameter, None).map_err(failed)
            }
            Cmd::Advance { counter, unless } => {
                let unless = Some(t.scalar(name, first(*unless))?);
                k.advance(stream, t.scalar(name, first(*counter))?, unless).map_err(failed)
            }
            Cmd::WriteTag { tag, step, value } => {
                let SlotTag { key, generation } = *value;
                let value = Tag { key, generation };
                k.write_tag(stream, t.get(name, *tag)?, t.scalar(name, first(*step))?, value).map_err(failed)
            }
            Cmd::CheckTag { tag, step, expected, flag, report } => {
                let SlotTag { key, generation } = *expected;
                let expected = Tag { key, generation };
                let (step, flag) = (t.scalar(name, first(*step))?, t.scalar(name, first(*flag))?);
                k.check_tag(stream, t.get(name, *tag)?, step, expected, flag, t.get(name, *report)?).map_err(failed)
            }
            Cmd::CheckFinite { src, flag } => {
                k.check_finite(stream, t.get(name, *src)?, t.scalar(name, first(*flag))?).map_err(failed)
            }
            Cmd::CopyIf { flag, src, dst } => {
                let (from, to) = self.same(name, *src, *dst)?;
                let flag = t.scalar(name, first(*flag))?;
                let (Some(from), Some(to)) = (from.cast::<u32>(), to.cast::<u32>()) else {
                    let reason = format!("`{}` does not consist of whole words", t.spec(*src)?.name);
                    return Err(DeviceError::Failed { cmd: name, reason });
                };
                k.copy_if(stream, flag, from, to).map_err(failed)
            }
        }
    }

    fn gemm(&self, cmd: &'static str, gemm: &Gemm) -> Result {
        let unplanned = || DeviceError::Failed { cmd, reason: format!("{} was not planned", gemm.product) };
        let plan = self.plans.get(&gemm.product).ok_or_else(unplanned)?;
        plan.run(self.stream, &gemm.operands, self.scratch.workspace()).map_err(failed(cmd))
    }

    /// One product over the terms of a whole group. The factors of its members lie in the tables of the lane by then.
    fn group(&self, cmd: &'static str, mut group: Group) -> Result {
        if let (Some([left, right]), Some([to_left, to_right])) = (&group.factors, group.tables()) {
            let missing = || DeviceError::Failed { cmd, reason: "its scratch was not reserved".into() };
            let tables = self.scratch.block_scales(group.gemm.product.scales()).ok_or_else(missing)?;
            let side = |factors, (kind, rows), table| Spread { factors, kind, rows, table };
            let sides = [&side(left, to_left, tables[0]), &side(right, to_right, tables[1])];
            self.kernels.spread_scales(self.stream, sides, group.blocks).map_err(failed(cmd))?;
            let operands = &mut group.gemm.operands;
            (operands.left_scale, operands.right_scale) = (Some(tables[0]), Some(tables[1]));
        }
        self.gemm(cmd, &group.gemm)
    }

    fn quantise(
        &self,
        cmd: &Cmd,
        cast: impl FnOnce(qeffect_core::fp8::Fp8, (usize, usize), &Outputs) -> Result,
    ) -> Result {
        let (name, t) = (cmd.name(), self.table);
        let Cmd::Quantise { rows, cols, format, scale, codes, transposed, beside, scale_inv, amax, flag, .. } = cmd
        else {
            return Err(DeviceError::Failed { cmd: name, reason: "another command".into() });
        };
        for buf in [Some(codes), transposed.as_ref()].into_iter().flatten() {
            if t.spec(*buf)?.dtype != format.dtype() {
                return Err(t.not(name, *buf, format.dtype().name()));
            }
        }
        let transposed = transposed.map(|buf| self.transposed(name, buf, *beside)).transpose()?;
        let codes = Codes {
            codes: t.get(name, *codes)?,
            transposed,
            scale: t.scalar(name, *scale)?,
            scale_inv: t.get(name, *scale_inv)?,
            amax: amax.map(|amax| t.scalar(name, amax)).transpose()?,
        };
        let flag = flag.map(|flag| t.scalar(name, first(flag))).transpose()?;
        cast(*format, (*rows, *cols), &Outputs { flag, ..Outputs::codes(codes) })
    }

    /// Where transposed codes go: a buffer of their own, or their lines in one that they share.
    pub(super) fn transposed(&self, name: &'static str, buf: Buf, beside: Option<Beside>) -> Result<Transposed> {
        let whole = self.table.get::<u8>(name, buf)?;
        let Some(Beside { first, line }) = beside else { return Ok(Transposed::Alone(whole)) };
        let region = whole.part(first..whole.len()).ok_or_else(|| self.table.short(name, buf, first))?;
        Ok(Transposed::Beside { region, line })
    }

    /// What the gradient of the rows of a norm is made from, with the gradient that bypasses it, if any.
    pub(super) fn norm_from(
        &self,
        norm: &NormGrad,
        gain: Buf,
        plus: Option<Buf>,
    ) -> std::result::Result<NormGradient, DeviceError> {
        let t = self.table;
        let NormGrad { name, dy, x, statistics, .. } = *norm;
        let x = t.get::<bf16>(name, x)?;
        let (dy, gamma) = (self.sized(name, dy, x.len())?, t.get(name, gain)?);
        Ok(NormGradient { x, dy, gamma, statistics, residual: plus.map(|plus| t.get(name, plus)).transpose()? })
    }

    /// The gradients of its gain and bias, and what else goes down the columns.
    pub(super) fn norm_vectors(
        &self,
        norm: &NormGrad,
        gain_grad: Buf,
        bias_grad: Option<Buf>,
        Down { sums, lines }: Down,
    ) -> Result {
        let (k, stream, t) = (self.kernels, self.stream, self.table);
        let NormGrad { name, dy, x, shape, statistics } = *norm;
        let x = t.get::<bf16>(name, x)?;
        let dy = self.sized::<bf16>(name, dy, x.len())?;
        let gains = self.sized::<f32>(name, gain_grad, shape.1)?;
        let biases = bias_grad.map(|bias| self.sized::<f32>(name, bias, shape.1)).transpose()?;
        let sums = sums.map(|(of, to)| Ok((t.get(name, of)?, self.sized(name, to, shape.1)?))).transpose()?;
        let down = DownColumns { dgamma: gains, dbeta: biases, sums, lines };
        k.layer_norm_gradients(stream, x, dy, shape, statistics, &down, self.scratch.columns()).map_err(failed(name))
    }

    /// A gradient on its way to the optimizer.
    pub(super) fn gradient(&self, name: &'static str, buf: Buf) -> Result<Gradient> {
        let t = self.table;
        Ok(match (t.spec(buf)?.dtype, t.rows(buf)) {
            (Dtype::Bf16, _) => Gradient::Bf16(t.get(name, buf)?),
            (_, Some(rows)) => Gradient::Rows(t.get(name, buf)?, rows),
            (_, None) => Gradient::F32(t.get(name, buf)?),
        })
    }

    fn copy(&self, name: &'static str, src: Buf, dst: Buf) -> Result {
        let (from, to) = self.same(name, src, dst)?;
        memory::copy(self.stream, from, to).map_err(failed(name))
    }

    /// Two buffers of the same type and size, as bytes.
    fn same(&self, name: &'static str, src: Buf, dst: Buf) -> Result<(Span<u8>, Span<u8>)> {
        let (from, to) = (self.table.spec(src)?, self.table.spec(dst)?);
        if from.dtype != to.dtype {
            return Err(self.table.not(name, dst, from.dtype.name()));
        }
        if from.elements() != to.elements() {
            return Err(self.table.short(name, dst, from.elements()));
        }
        Ok((self.table.bytes_of(src)?, self.table.bytes_of(dst)?))
    }

    /// A buffer of that many elements.
    fn sized<T: Stored>(&self, name: &'static str, buf: Buf, expected: usize) -> Result<Span<T>> {
        let span = self.table.get::<T>(name, buf)?;
        if span.len() != expected {
            return Err(self.table.short(name, buf, expected));
        }
        Ok(span)
    }

    /// An activation of whole rows.
    fn matrix(&self, name: &'static str, buf: Buf, cols: usize) -> Result<(Span<bf16>, (usize, usize))> {
        let span = self.table.get::<bf16>(name, buf)?;
        if cols == 0 || !span.len().is_multiple_of(cols) {
            return Err(self.table.short(name, buf, span.len().next_multiple_of(cols.max(1))));
        }
        Ok((span, (span.len() / cols, cols)))
    }

    /// Rows and columns as the buffer was made; any split of its elements would do.
    fn shape(&self, buf: Buf) -> Result<(usize, usize)> {
        let spec = self.table.spec(buf)?;
        Ok((spec.rows, spec.cols))
    }

    /// The values of a fused cast, and nothing else of it.
    fn values(&self, name: &'static str, buf: Buf) -> Result<Outputs> {
        Ok(Outputs { values: Some(self.table.get(name, buf)?), ..Outputs::default() })
    }

    fn rows(&self, name: &'static str, len: usize) -> Result<Span<f32>> {
        let missing = || DeviceError::Failed { cmd: name, reason: "its scratch was not reserved".into() };
        self.scratch.rows(len).ok_or_else(missing)
    }
}
