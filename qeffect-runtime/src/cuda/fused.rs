//! Fused commands in one pass over memory; a norm of rows too long to be kept in two; the gradient of a norm in one for its
//! rows and their codes, and one for all that goes down the columns.

use half::bf16;
use qeffect_core::dtype::Dtype;
use qeffect_core::fp8::Fp8 as Format;
use qeffect_kernels::launch::cast::{self, ColumnSums, LossGradient, Normalised};
use qeffect_kernels::launch::norm::{Normal, Residual, Statistics};
use qeffect_kernels::launch::optimizer::{AdamW, Parameter};

use super::exec::{Down, Lane, NormGrad, Result, first};
use super::failed;
use super::unit::Piece;
use crate::cmd::fused::{Fused, Producer};
use crate::device::{Buf, DeviceError};

impl Lane<'_> {
    /// Puts a fused command, or a piece of one, into the stream.
    pub(super) fn fused(&self, fused: &Fused, piece: Piece) -> Result {
        let (k, stream, t) = (self.kernels, self.stream, self.table);
        let name = fused.name();
        let failed = failed(name);
        let Fused { residual, plus, rows, cols, .. } = *fused;
        let shape = (rows, cols);
        let norms = matches!(fused.producer, Producer::LayerNorm { .. } | Producer::RmsNorm { .. });
        let grads = matches!(fused.producer, Producer::LayerNormGrad { .. } | Producer::RmsNormGrad { .. });
        if (residual.is_some() && !norms) || (plus.is_some() && !grads) {
            return Err(self.not_yet(name, "a sum beside this producer"));
        }
        match fused.producer {
            Producer::Stored { x } if t.spec(x)?.dtype == Dtype::F32 => {
                self.only(fused, Format::E4M3)?;
                k.cast_master(stream, t.get(name, x)?, shape, &self.outputs(fused)?).map_err(failed)
            }
            Producer::Stored { x } => {
                let format = fused.outputs.codes.map_or(Format::E4M3, |codes| codes.format);
                k.cast(stream, format, t.get(name, x)?, shape, &self.outputs(fused)?).map_err(failed)
            }
            Producer::LayerNorm { x, gain, bias, mean, rstd } => self.norm(
                fused,
                x,
                gain,
                Some(bias),
                Statistics { mean: Some(t.get(name, mean)?), rstd: t.get(name, rstd)? },
            ),
            Producer::RmsNorm { x, gain, rstd } => {
                self.norm(fused, x, gain, None, Statistics { mean: None, rstd: t.get(name, rstd)? })
            }
            Producer::LayerNormGrad { dy, x, gain, mean, rstd, gain_grad, bias_grad } => {
                let statistics = Statistics { mean: Some(t.get(name, mean)?), rstd: t.get(name, rstd)? };
                self.norm_grad(fused, [dy, x, gain], statistics, (gain_grad, Some(bias_grad)), piece)
            }
            Producer::RmsNormGrad { dy, x, gain, rstd, gain_grad } => {
                let statistics = Statistics { mean: None, rstd: t.get(name, rstd)? };
                self.norm_grad(fused, [dy, x, gain], statistics, (gain_grad, None), piece)
            }
            Producer::Gelu { x } => {
                self.only(fused, Format::E4M3)?;
                k.cast_gelu(stream, t.get(name, x)?, shape, &self.outputs(fused)?).map_err(failed)
            }
            Producer::Silu { x } => {
                self.only(fused, Format::E4M3)?;
                k.cast_silu(stream, t.get(name, x)?, shape, &self.outputs(fused)?).map_err(failed)
            }
            Producer::Swiglu { x } => {
                self.only(fused, Format::E4M3)?;
                k.cast_swiglu(stream, t.get(name, x)?, shape, &self.outputs(fused)?).map_err(failed)
            }
            Producer::GeluGrad { x, dy } => {
                self.only(fused, Format::E5M2)?;
                let (x, dy) = (t.get(name, x)?, t.get(name, dy)?);
                k.cast_gelu_backward(stream, x, dy, shape, &self.outputs(fused)?).map_err(failed)
            }
            Producer::SiluGrad { x, dy } => {
                self.only(fused, Format::E5M2)?;
                let (x, dy) = (t.get(name, x)?, t.get(name, dy)?);
                k.cast_silu_backward(stream, x, dy, shape, &self.outputs(fused)?).map_err(failed)
            }
            Producer::SwigluGrad { x, dy } => {
                self.only(fused, Format::E5M2)?;
                let (x, dy) = (t.get(name, x)?, t.get(name, dy)?);
                k.cast_swiglu_backward(stream, x, dy, (rows, cols / 2), &self.outputs(fused)?).map_err(failed)
            }
            Producer::CrossEntropyGrad { logits, targets, lse, factor } => {
                self.only(fused, Format::E5M2)?;
                let (logits, targets, lse) = (t.get(name, logits)?, t.get(name, targets)?, t.get(name, lse)?);
                let gradient = LossGradient { logits, targets, lse, factor };
                k.cast_loss(stream, &gradient, shape, &self.outputs(fused)?).map_err(failed)
            }
            Producer::AdamW { param, grad, factor, moment1, moment2, clip, table, counter, config, unless } => {
                let adam = AdamW {
                    table: t.get(name, table)?,
                    counter: t.scalar(name, first(counter))?,
                    clip: t.scalar(name, first(clip))?,
                    unless: t.scalar(name, first(unless))?,
                    factor,
                    beta1: config.beta1,
                    beta2: config.beta2,
                    epsilon: config.epsilon,
                    weight_decay: config.weight_decay,
                };
                let parameter = Parameter {
                    gradient: self.gradient(name, grad)?,
                    weight: t.get(name, param)?,
                    first: t.get(name, moment1)?,
                    second: t.get(name, moment2)?,
                };
                if fused.outputs.codes.is_some() || fused.outputs.column_sums.is_some() {
                    self.only(fused, Format::E4M3)?;
                    return k.adamw_cast(stream, &adam, &parameter, shape, &self.outputs(fused)?).map_err(failed);
                }
                let copy = fused.outputs.values.map(|copy| t.get::<bf16>(name, copy)).transpose()?;
                k.adamw(stream, &adam, &parameter, copy).map_err(failed)
            }
        }
    }

    /// Statistics of the rows, of their sum with what lies beside them if that is asked for; then the rows, normalised on
    /// the way into what is taken from them.
    fn norm(&self, fused: &Fused, x: Buf, gain: Buf, bias: Option<Buf>, statistics: Statistics) -> Result {
        let (k, stream, t) = (self.kernels, self.stream, self.table);
        let name = fused.name();
        let shape = (fused.rows, fused.cols);
        let rows = t.get::<bf16>(name, x)?;
        let (source, residual) = match fused.residual {
            None => (rows, None),
            Some(sum) if sum.out == x => {
                (t.get(name, sum.a)?, Some(Residual { other: t.get(name, sum.b)?, total: rows }))
            }
            Some(_) => return Err(self.not_yet(name, "a sum that the norm does not read")),
        };
        let gamma = t.get(name, gain)?;
        let beta = bias.map(|bias| t.get(name, bias)).transpose()?;
        let outputs = &fused.outputs;
        if outputs.codes.is_some() || outputs.column_sums.is_some() {
            self.only(fused, Format::E4M3)?;
            let normalised = Normalised { x: rows, mean: statistics.mean, rstd: statistics.rstd, gamma, beta };
            let parts = residual.map(|Residual { other, .. }| [source, other]);
            return k.layer_norm_cast(stream, &normalised, shape, parts, &self.outputs(fused)?).map_err(failed(name));
        }
        let values = outputs.values.map(|values| t.get(name, values)).transpose()?;
        let normal = values.map(|y| Normal { gamma, beta, y });
        k.layer_norm_forward(stream, source, shape, residual, statistics, normal).map_err(failed(name))
    }

    /// The gradient of the rows, with the gradient that bypasses the norm, and what is taken from it; those of gain and bias.
    fn norm_grad(
        &self,
        fused: &Fused,
        [dy, x, gain]: [Buf; 3],
        statistics: Statistics,
        (gain_grad, bias_grad): (Buf, Option<Buf>),
        piece: Piece,
    ) -> Result {
        let name = fused.name();
        let shape = (fused.rows, fused.cols);
        let norm = NormGrad { name, dy, x, shape, statistics };
        let Some(dx) = fused.outputs.values else {
            return Err(self.not_yet(name, "a gradient that is not stored"));
        };
        if piece.has_rows() {
            let (k, stream) = (self.kernels, self.stream);
            let (from, dx) = (self.norm_from(&norm, gain, fused.plus)?, self.table.get(name, dx)?);
            match fused.outputs.codes {
                Some(codes) => {
                    k.layer_norm_backward_cast(stream, &from, shape, dx, codes.format, &self.outputs(fused)?)
                }
                None => k.layer_norm_backward(stream, &from, shape, dx),
            }
            .map_err(failed(name))?;
        }
        if !piece.has_vectors() {
            return Ok(());
        }
        // What only weight gradients and the optimizer read is made beside the chain, with the vectors.
        let lines = self.outputs(fused)?.codes.and_then(|codes| Some((codes.codes, codes.transposed?)));
        let sums = fused.outputs.column_sums.map(|to| (dx, to));
        self.norm_vectors(&norm, gain_grad, bias_grad, Down { sums, lines })
    }

    /// What is taken, as kernels want it.
    fn outputs(&self, fused: &Fused) -> Result<cast::Outputs> {
        let (name, t) = (fused.name(), self.table);
        let outputs = &fused.outputs;
        let codes = match &outputs.codes {
            None => None,
            Some(codes) => {
                for buf in [Some(codes.codes), codes.transposed].into_iter().flatten() {
                    if t.spec(buf)?.dtype != codes.format.dtype() {
                        return Err(t.not(name, buf, codes.format.dtype().name()));
                    }
                }
                Some(cast::Codes {
                    codes: t.get(name, codes.codes)?,
                    transposed: codes.transposed.map(|buf| self.transposed(name, buf, codes.beside)).transpose()?,
                    scale: t.scalar(name, codes.scale)?,
                    scale_inv: t.get(name, codes.scale_inv)?,
                    amax: codes.amax.map(|amax| t.scalar(name, amax)).transpose()?,
                })
            }
        };
        let flag = outputs.codes.and_then(|codes| codes.flag);
        let sums = outputs.column_sums.map(|out| t.get(name, out)).transpose()?;
        Ok(cast::Outputs {
            values: outputs.values.map(|values| t.get(name, values)).transpose()?,
            codes,
            column_sums: sums.map(|out| ColumnSums { out, scratch: self.scratch.columns() }),
            flag: flag.map(|flag| t.scalar(name, first(flag))).transpose()?,
        })
    }

    /// Refuses codes of another format than the kernel makes.
    fn only(&self, fused: &Fused, format: Format) -> Result {
        match fused.outputs.codes {
            Some(codes) if codes.format != format => {
                Err(self.not_yet(fused.name(), &format!("codes in {}", codes.format.dtype().name())))
            }
            _ => Ok(()),
        }
    }

    fn not_yet(&self, cmd: &'static str, what: &str) -> DeviceError {
        DeviceError::Failed { cmd, reason: format!("{what}: not on this device yet") }
    }
}
