//! Commands to kernels: looks buffers up, picks the types, calls.

use half::bf16;
use qeffect_core::dtype::Dtype;
use qeffect_core::fp8::Fp8 as Format;

use super::Workspace;
use super::table::{Data, Store, Table};
use crate::cmd::{AttentionShape, Cmd, Operand, Scalar};
use crate::device::{Buf, DeviceError};
use crate::kernels::layer_norm::{NormGradients, Saved, Statistics};
use crate::kernels::optimizer::norm_pieces;
use crate::kernels::{
    Elem, KernelError, Real, Scratch, attention, cast, elementwise, embedding, gelu, gemm, layer_norm, loss, optimizer,
};

type Result<T = (), E = DeviceError> = std::result::Result<T, E>;

/// A type to store activations in.
trait Activation: Elem<Acc: Master> + Store {}
impl<E: Elem<Acc: Master> + Store> Activation for E {}

/// A type of masters, and the memory for computing in it.
trait Master: Real + Store {
    fn scratch(workspace: &mut Workspace) -> &mut Scratch<Self>;
    fn bias(workspace: &mut Workspace) -> &mut Vec<Self>;
    fn rows(workspace: &mut Workspace) -> &mut Vec<Self>;
}

impl Master for f32 {
    fn scratch(workspace: &mut Workspace) -> &mut Scratch<f32> {
        &mut workspace.f32
    }
    fn bias(workspace: &mut Workspace) -> &mut Vec<f32> {
        &mut workspace.bias32
    }
    fn rows(workspace: &mut Workspace) -> &mut Vec<f32> {
        &mut workspace.rows32
    }
}

impl Master for f64 {
    fn scratch(workspace: &mut Workspace) -> &mut Scratch<f64> {
        &mut workspace.f64
    }
    fn bias(workspace: &mut Workspace) -> &mut Vec<f64> {
        &mut workspace.bias64
    }
    fn rows(workspace: &mut Workspace) -> &mut Vec<f64> {
        &mut workspace.rows64
    }
}

/// Calls a function that is generic over the type of an activation.
macro_rules! by_activation {
    ($run:ident, $buf:expr, $f:ident) => {
        match $run.dtype($buf)? {
            Dtype::F64 => $run.$f::<f64>(),
            Dtype::F32 => $run.$f::<f32>(),
            Dtype::Bf16 => $run.$f::<bf16>(),
            found => Err($run.not($buf, found, "an activation type")),
        }
    };
}

/// Calls a function that is generic over the type of masters.
macro_rules! by_master {
    ($run:ident, $buf:expr, $f:ident) => {
        match $run.dtype($buf)? {
            Dtype::F64 => $run.$f::<f64>(),
            Dtype::F32 => $run.$f::<f32>(),
            found => Err($run.not($buf, found, "f32 or f64")),
        }
    };
}

pub(super) fn run(table: &mut Table, workspace: &mut Workspace, cmd: &Cmd) -> Result {
    let mut run = Run { name: cmd.name(), table, workspace, cmd };
    match cmd {
        Cmd::Fill { dst, value } => run.fill(*dst, *value),
        Cmd::Copy { src, dst } => run.copy(*src, *dst),
        Cmd::CopyIf { flag, src, dst } => match run.table.flag(run.name, *flag)? {
            true => run.copy(*src, *dst),
            false => Ok(()),
        },
        Cmd::Convert { src, dst } => run.convert(*src, *dst),
        Cmd::Gemm { out, .. } => match run.dtype(*out)? {
            Dtype::F64 => run.gemm::<f64>(),
            Dtype::F32 | Dtype::Bf16 => run.gemm::<f32>(),
            found => Err(run.not(*out, found, "an activation or master type")),
        },
        Cmd::Quantise { src, .. } => match run.dtype(*src)? {
            Dtype::F32 => run.quantise::<f32>(),
            Dtype::Bf16 => run.quantise::<bf16>(),
            found => Err(run.not(*src, found, "f32 or bf16")),
        },
        Cmd::Roll { .. } => run.roll(),
        Cmd::Embed { out, .. } => by_activation!(run, *out, embed),
        Cmd::EmbedGrad { dy, .. } => by_activation!(run, *dy, embed_grad),
        Cmd::LayerNorm { x, .. } => by_activation!(run, *x, layer_norm),
        Cmd::LayerNormGrad { x, .. } => by_activation!(run, *x, layer_norm_grad),
        Cmd::Gelu { x, .. } => by_activation!(run, *x, gelu),
        Cmd::GeluGrad { x, .. } => by_activation!(run, *x, gelu_grad),
        Cmd::Attention { qkv, .. } => by_activation!(run, *qkv, attention),
        Cmd::AttentionGrad { qkv, .. } => by_activation!(run, *qkv, attention_grad),
        Cmd::Add { a, .. } => by_activation!(run, *a, add),
        Cmd::ColumnSums { x, .. } => by_activation!(run, *x, column_sums),
        Cmd::CrossEntropy { logits, .. } => by_activation!(run, *logits, cross_entropy),
        Cmd::CrossEntropyGrad { logits, .. } => by_activation!(run, *logits, cross_entropy_grad),
        Cmd::SumSlots { out, .. } => by_master!(run, *out, sum_slots),
        Cmd::SumSquares { src, .. } => by_master!(run, *src, sum_squares),
        Cmd::Settle { norm, .. } => by_master!(run, *norm, settle),
        Cmd::AdamW { param, .. } => by_master!(run, *param, adamw),
        Cmd::Advance { counter, unless } => match run.table.flag(run.name, *unless)? {
            true => Ok(()),
            false => {
                *run.table.scalar_mut::<u64>(run.name, first(*counter))? += 1;
                Ok(())
            }
        },
    }
}

fn first(buf: Buf) -> Scalar {
    Scalar { buf, index: 0 }
}

struct Run<'a> {
    name: &'static str,
    table: &'a mut Table,
    workspace: &'a mut Workspace,
    cmd: &'a Cmd,
}

/// The fields of the command at hand; every caller has matched its kind already.
macro_rules! fields {
    ($run:ident, $kind:ident { $($field:ident $(: $name:ident)?),* }) => {
        let Cmd::$kind { $($field $(: $name)?,)* .. } = $run.cmd else { return Err($run.failed("another command")) };
    };
}

impl Run<'_> {
    fn dtype(&self, buf: Buf) -> Result<Dtype> {
        Ok(self.table.spec(buf)?.dtype)
    }

    fn not(&self, buf: Buf, found: Dtype, expected: &'static str) -> DeviceError {
        let buffer = self.table.spec(buf).map_or_else(|_| buf.to_string(), |spec| spec.name.clone());
        DeviceError::Dtype { cmd: self.name, buffer, found, expected }
    }

    fn failed(&self, reason: &str) -> DeviceError {
        DeviceError::Failed { cmd: self.name, reason: reason.into() }
    }

    fn fill(&mut self, dst: Buf, value: f32) -> Result {
        match self.table.data_mut(dst)? {
            Data::F64(x) => x.fill(f64::from(value)),
            Data::F32(x) => x.fill(value),
            Data::Bf16(x) => x.fill(bf16::from_f32(value)),
            Data::U8(x) => x.fill(value as u8),
            Data::U32(x) => x.fill(value as u32),
            Data::U64(x) => x.fill(value as u64),
            Data::Taken => {}
        }
        Ok(())
    }

    fn copy(&mut self, src: Buf, dst: Buf) -> Result {
        let name = self.name;
        let (from, to) = (self.table.spec(src)?, self.table.spec(dst)?);
        if from.dtype != to.dtype {
            return Err(self.not(dst, to.dtype, from.dtype.name()));
        }
        if from.elements() != to.elements() {
            return Err(self.table.short(name, dst, from.elements()));
        }
        self.table.write(name, [dst], |table, [out]| {
            let from = table.data(src)?;
            if matches!(from, Data::Taken) {
                return Err(DeviceError::Aliased { cmd: name, buffer: table.spec(src)?.name.clone() });
            }
            out.bytes_mut().copy_from_slice(from.bytes());
            Ok(())
        })
    }

    fn convert(&mut self, src: Buf, dst: Buf) -> Result {
        let name = self.name;
        match (self.dtype(src)?, self.dtype(dst)?) {
            (from, to) if from == to => self.copy(src, dst),
            (Dtype::F32, Dtype::Bf16) => self.table.write(name, [dst], |table, [out]| {
                let out = table.out::<bf16>(name, dst, out)?;
                elementwise::convert(table.get::<f32>(name, src)?, out).map_err(kernel(name))
            }),
            (Dtype::Bf16, Dtype::F32) => self.table.write(name, [dst], |table, [out]| {
                let out = table.out::<f32>(name, dst, out)?;
                elementwise::convert(table.get::<bf16>(name, src)?, out).map_err(kernel(name))
            }),
            (found, _) => Err(self.not(src, found, "f32, or bf16 to f32")),
        }
    }

    fn gemm<A: Master>(&mut self) -> Result {
        fields!(self, Gemm { m, n, k, a, b, bias, out });
        let name = self.name;
        let shape = gemm::GemmShape { m: *m, n: *n, k: *k };
        let mut bias_values = std::mem::take(A::bias(self.workspace));
        let scratch = A::scratch(self.workspace);
        let result = self.table.write(name, [*out], |table, [data]| {
            let bias = match bias {
                None => None,
                Some(buf) => {
                    bias_values.clear();
                    match table.data(*buf)? {
                        Data::Bf16(x) => bias_values.extend(x.iter().map(|x| A::from_f32(x.to_f32()))),
                        _ => bias_values.extend_from_slice(table.get::<A>(name, *buf)?),
                    }
                    Some(&bias_values[..])
                }
            };
            let (a, b) = (operand::<A>(table, name, a)?, operand::<A>(table, name, b)?);
            let output = match data {
                Data::Bf16(x) => gemm::Output::Bf16(x),
                data => gemm::Output::Real(table.out::<A>(name, *out, data)?),
            };
            gemm::gemm(scratch, shape, a, b, bias, output).map_err(kernel(name))
        });
        *A::bias(self.workspace) = bias_values;
        result
    }

    fn quantise<E: Elem<Acc = f32> + Store>(&mut self) -> Result {
        fields!(self, Quantise { src, rows, cols, format, scale, codes, transposed, scale_inv, amax, flag });
        let name = self.name;
        let elements = rows * cols;
        let factor = self.table.scalar::<f32>(name, *scale)?;
        for buf in [Some(codes), transposed.as_ref()].into_iter().flatten() {
            match self.table.spec(*buf)? {
                spec if spec.dtype != format.dtype() => return Err(self.not(*buf, spec.dtype, format.dtype().name())),
                spec if spec.elements() != elements => return Err(self.table.short(name, *buf, elements)),
                _ => {}
            }
        }
        if let Some(amax) = amax {
            self.table.scalar::<f32>(name, *amax)?;
        }
        if let Some(flag) = flag {
            self.table.flag(name, *flag)?;
        }
        if self.table.get::<E>(name, *src)?.len() != elements {
            return Err(self.table.short(name, *src, elements));
        }
        let noticed = self.table.write(name, [*codes, *scale_inv], |table, [data, inverse]| {
            let data = table.out::<u8>(name, *codes, data)?;
            let [inverse] = table.out::<f32>(name, *scale_inv, inverse)? else {
                return Err(table.short(name, *scale_inv, 1));
            };
            cast::quantise(*format, table.get::<E>(name, *src)?, factor, data, inverse).map_err(kernel(name))
        })?;
        if let Some(transposed) = transposed {
            self.table.write(name, [*transposed], |table, [out]| {
                let out = table.out::<u8>(name, *transposed, out)?;
                cast::transpose(table.get::<u8>(name, *codes)?, (*rows, *cols), out).map_err(kernel(name))
            })?;
        }
        if let Some(amax) = amax {
            qeffect_core::scaling::stage(self.table.scalar_mut(name, *amax)?, noticed.amax);
        }
        match flag {
            Some(flag) if !noticed.finite => *self.table.scalar_mut::<u32>(name, first(*flag))? = 1,
            _ => {}
        }
        Ok(())
    }

    fn roll(&mut self) -> Result {
        fields!(self, Roll { scales, history, rule, unless });
        let name = self.name;
        if let Some(flag) = unless
            && self.table.flag(name, *flag)?
        {
            return Ok(());
        }
        self.table.write(name, [*scales, *history], |table, [scale, rows]| {
            let scale = table.out::<f32>(name, *scales, scale)?;
            let rows = table.out::<f32>(name, *history, rows)?;
            let refused = |error: qeffect_core::scaling::HistoryShape| error.to_string();
            rule.roll(scale, rows, None).map_err(|e| DeviceError::Failed { cmd: name, reason: refused(e) })
        })
    }

    fn embed<E: Activation>(&mut self) -> Result {
        fields!(self, Embed { tokens, table: words, positions, out, seq, cols });
        let name = self.name;
        self.table.write(name, [*out], |table, [y]| {
            let y = table.out::<E>(name, *out, y)?;
            let positions_values = table.get::<E::Acc>(name, *positions)?;
            if positions_values.len() != seq * cols {
                return Err(table.short(name, *positions, seq * cols));
            }
            let ids = table.get::<u32>(name, *tokens)?;
            embedding::embedding_forward(ids, *cols, table.get(name, *words)?, positions_values, y)
                .map_err(kernel(name))
        })
    }

    fn embed_grad<E: Activation>(&mut self) -> Result {
        fields!(self, EmbedGrad { tokens, order, dy, table_grad, positions_grad, cols });
        let name = self.name;
        let mut partial = std::mem::take(E::Acc::rows(self.workspace));
        let sorted = &mut self.workspace.positions;
        let result = self.table.write(name, [*table_grad, *positions_grad], |table, [words, positions]| {
            let dy_values = table.get::<E>(name, *dy)?;
            let ids = table.get::<u32>(name, *tokens)?;
            let order = table.get::<u32>(name, *order)?;
            group(ids, order, sorted).ok_or_else(|| DeviceError::Failed {
                cmd: name,
                reason: "the order of rows does not sort the tokens".into(),
            })?;
            let words = table.out::<E::Acc>(name, *table_grad, words)?;
            let positions = table.out::<E::Acc>(name, *positions_grad, positions)?;
            partial.resize(sorted.tokens.len() * cols, <E::Acc as Real>::ZERO);
            embedding::token_gradient(dy_values, *cols, sorted, &mut partial).map_err(kernel(name))?;
            words.fill(<E::Acc as Real>::ZERO);
            embedding::scatter_rows(&sorted.tokens, *cols, &partial, words).map_err(kernel(name))?;
            embedding::position_gradient(dy_values, *cols, positions).map_err(kernel(name))
        });
        *E::Acc::rows(self.workspace) = partial;
        result
    }

    fn layer_norm<E: Activation>(&mut self) -> Result {
        fields!(self, LayerNorm { x, gain, bias, y, mean, rstd });
        let name = self.name;
        let scratch = E::Acc::scratch(self.workspace);
        self.table.write(name, [*y, *mean, *rstd], |table, [out, means, rstds]| {
            let statistics = Statistics { mean: table.out(name, *mean, means)?, rstd: table.out(name, *rstd, rstds)? };
            let out = table.out::<E>(name, *y, out)?;
            let (x, gain, bias) = (table.get::<E>(name, *x)?, table.get(name, *gain)?, table.get(name, *bias)?);
            layer_norm::layer_norm_forward(scratch, x, gain, bias, out, statistics).map_err(kernel(name))
        })
    }

    fn layer_norm_grad<E: Activation>(&mut self) -> Result {
        fields!(self, LayerNormGrad { dy, x, gain, mean, rstd, dx, gain_grad, bias_grad });
        let name = self.name;
        let scratch = E::Acc::scratch(self.workspace);
        self.table.write(name, [*dx, *gain_grad, *bias_grad], |table, [out, gains, biases]| {
            let gradients = NormGradients {
                gamma: table.out(name, *gain_grad, gains)?,
                beta: table.out(name, *bias_grad, biases)?,
            };
            let out = table.out::<E>(name, *dx, out)?;
            let saved = Saved { mean: table.get(name, *mean)?, rstd: table.get(name, *rstd)? };
            let (x, dy, gain) = (table.get::<E>(name, *x)?, table.get::<E>(name, *dy)?, table.get(name, *gain)?);
            layer_norm::layer_norm_backward(scratch, x, gain, saved, dy, out, gradients).map_err(kernel(name))
        })
    }

    fn gelu<E: Activation>(&mut self) -> Result {
        fields!(self, Gelu { x, y });
        let name = self.name;
        self.table.write(name, [*y], |table, [out]| {
            gelu::gelu_forward(table.get::<E>(name, *x)?, table.out(name, *y, out)?).map_err(kernel(name))
        })
    }

    fn gelu_grad<E: Activation>(&mut self) -> Result {
        fields!(self, GeluGrad { x, dy, dx });
        let name = self.name;
        self.table.write(name, [*dx], |table, [out]| {
            let (x, dy) = (table.get::<E>(name, *x)?, table.get(name, *dy)?);
            gelu::gelu_backward(x, dy, table.out(name, *dx, out)?).map_err(kernel(name))
        })
    }

    fn attention<E: Activation>(&mut self) -> Result {
        fields!(self, Attention { qkv, out, lse, shape });
        let name = self.name;
        let scratch = E::Acc::scratch(self.workspace);
        self.table.write(name, [*out, *lse], |table, [y, sums]| {
            let (y, sums) = (table.out(name, *out, y)?, table.out(name, *lse, sums)?);
            let qkv = table.get::<E>(name, *qkv)?;
            attention::attention_forward(scratch, sizes(shape), qkv, y, sums).map_err(kernel(name))
        })
    }

    fn attention_grad<E: Activation>(&mut self) -> Result {
        fields!(self, AttentionGrad { qkv, lse, dout, dqkv, shape });
        let name = self.name;
        let scratch = E::Acc::scratch(self.workspace);
        self.table.write(name, [*dqkv], |table, [out]| {
            let out = table.out(name, *dqkv, out)?;
            let (qkv, lse, dout) = (table.get::<E>(name, *qkv)?, table.get(name, *lse)?, table.get(name, *dout)?);
            attention::attention_backward(scratch, sizes(shape), qkv, lse, dout, out).map_err(kernel(name))
        })
    }

    fn add<E: Activation>(&mut self) -> Result {
        fields!(self, Add { a, b, out });
        let name = self.name;
        self.table.write(name, [*out], |table, [y]| {
            let (a, b) = (table.get::<E>(name, *a)?, table.get(name, *b)?);
            elementwise::add(a, b, table.out(name, *out, y)?).map_err(kernel(name))
        })
    }

    fn column_sums<E: Activation>(&mut self) -> Result {
        fields!(self, ColumnSums { x, out, cols });
        let name = self.name;
        self.table.write(name, [*out], |table, [y]| {
            elementwise::column_sums(table.get::<E>(name, *x)?, *cols, table.out(name, *out, y)?).map_err(kernel(name))
        })
    }

    fn cross_entropy<E: Activation>(&mut self) -> Result {
        fields!(self, CrossEntropy { logits, targets, lse, loss: dst, flag, vocabulary });
        let name = self.name;
        if let Some(flag) = flag {
            self.table.flag(name, *flag)?;
        }
        self.table.scalar::<E::Acc>(name, *dst)?;
        let scratch = E::Acc::scratch(self.workspace);
        let mean = self.table.write(name, [*lse], |table, [sums]| {
            let sums = table.out(name, *lse, sums)?;
            let (logits, targets) = (table.get::<E>(name, *logits)?, table.get(name, *targets)?);
            loss::cross_entropy_forward(scratch, logits, targets, *vocabulary, sums).map_err(kernel(name))
        })?;
        *self.table.scalar_mut(name, *dst)? = mean;
        match flag {
            Some(flag) if !mean.finite() => *self.table.scalar_mut::<u32>(name, first(*flag))? = 1,
            _ => {}
        }
        Ok(())
    }

    fn cross_entropy_grad<E: Activation>(&mut self) -> Result {
        fields!(self, CrossEntropyGrad { logits, targets, lse, dlogits, vocabulary, factor });
        let name = self.name;
        let factor = <E::Acc as Real>::from_f32(*factor);
        let scratch = E::Acc::scratch(self.workspace);
        self.table.write(name, [*dlogits], |table, [out]| {
            let out = table.out(name, *dlogits, out)?;
            let (logits, targets, lse) =
                (table.get::<E>(name, *logits)?, table.get(name, *targets)?, table.get(name, *lse)?);
            loss::cross_entropy_backward(scratch, logits, targets, *vocabulary, lse, factor, out).map_err(kernel(name))
        })
    }

    fn sum_slots<A: Master>(&mut self) -> Result {
        fields!(self, SumSlots { slots, out, factor });
        let name = self.name;
        self.table.write(name, [*out], |table, [sum]| {
            let sum = table.out::<A>(name, *out, sum)?;
            let slots = slots.iter().map(|slot| table.get::<A>(name, *slot)).collect::<Result<Vec<_>>>()?;
            elementwise::sum_slots(&slots, A::from_f32(*factor), sum).map_err(kernel(name))
        })
    }

    fn sum_squares<A: Master>(&mut self) -> Result {
        fields!(self, SumSquares { src, partials, first });
        let name = self.name;
        self.table.write(name, [*partials], |table, [sums]| {
            let src = table.get::<A>(name, *src)?;
            let end = first + norm_pieces(src.len());
            let sums = table.out::<A>(name, *partials, sums)?;
            let Some(sums) = sums.get_mut(*first..end) else { return Err(table.short(name, *partials, end)) };
            optimizer::sums_of_squares(src, sums).map_err(kernel(name))
        })
    }

    fn settle<A: Master>(&mut self) -> Result {
        fields!(self, Settle { partials, flags, limit, norm, clip, flag });
        let name = self.name;
        let mut sum = A::ZERO;
        for partial in self.table.get::<A>(name, *partials)? {
            sum = sum + *partial;
        }
        let value = sum.sqrt();
        let raised = self.table.get::<u32>(name, *flags)?.iter().any(|flag| *flag != 0);
        self.table.flag(name, *flag)?;
        self.table.scalar::<A>(name, first(*clip))?;
        *self.table.scalar_mut(name, first(*norm))? = value;
        let factor = if limit.is_finite() { optimizer::clip_factor(value, A::from_f32(*limit)) } else { A::ONE };
        *self.table.scalar_mut(name, first(*clip))? = factor;
        if raised || !value.finite() {
            *self.table.scalar_mut::<u32>(name, first(*flag))? = 1;
        }
        Ok(())
    }

    fn adamw<A: Master>(&mut self) -> Result {
        fields!(self, AdamW { param, grad, moment1, moment2, clip, table: rates, counter, config, unless });
        let name = self.name;
        if self.table.flag(name, *unless)? {
            return Ok(());
        }
        let done = self.table.scalar::<u64>(name, first(*counter))? as usize;
        let rates_of_all = self.table.get::<A>(name, *rates)?;
        let Some(&[rate, step_size, correction2_sqrt]) = rates_of_all.get(done * 3..done * 3 + 3) else {
            return Err(self.failed(&format!("the learning-rate table ends before step {done}")));
        };
        let step = optimizer::AdamW {
            share1: A::from_f64(1.0 - config.beta1),
            beta2: A::from_f64(config.beta2),
            share2: A::from_f64(1.0 - config.beta2),
            epsilon: A::from_f64(config.epsilon),
            step_size,
            correction2_sqrt,
            decay: A::from_f64(1.0 - rate.to_f64() * config.weight_decay),
            clip: self.table.scalar::<A>(name, first(*clip))?,
        };
        self.table.write(name, [*param, *moment1, *moment2], |table, [weight, m, v]| {
            let weight = table.out::<A>(name, *param, weight)?;
            let (m, v) = (table.out::<A>(name, *moment1, m)?, table.out::<A>(name, *moment2, v)?);
            optimizer::adamw(&step, table.get::<A>(name, *grad)?, weight, m, v).map_err(kernel(name))
        })
    }
}

fn kernel(cmd: &'static str) -> impl Fn(KernelError) -> DeviceError {
    move |error| DeviceError::Failed { cmd, reason: error.to_string() }
}

fn sizes(shape: &AttentionShape) -> attention::AttentionShape {
    let AttentionShape { sequences, length, heads, head_dim } = *shape;
    attention::AttentionShape { sequences, length, heads, head_dim }
}

fn operand<'a, A: Master>(table: &'a Table, cmd: &'static str, operand: &Operand) -> Result<gemm::Operand<'a, A>> {
    let format = match table.spec(operand.buf)?.dtype {
        Dtype::E4M3 => Some(Format::E4M3),
        Dtype::E5M2 => Some(Format::E5M2),
        _ => None,
    };
    let values = match (format, operand.scale_inv, table.data(operand.buf)?) {
        (Some(format), Some(scale_inv), Data::U8(codes)) => {
            gemm::Values::Fp8 { format, codes, scale_inv: table.scalar::<f32>(cmd, first(scale_inv))? }
        }
        (Some(_), None, _) => {
            let reason = format!("`{}` has no factor", table.spec(operand.buf)?.name);
            return Err(DeviceError::Failed { cmd, reason });
        }
        (None, None, Data::Bf16(x)) => gemm::Values::Bf16(x),
        _ => gemm::Values::Real(table.get::<A>(cmd, operand.buf)?),
    };
    Ok(gemm::Operand { values, transposed: operand.transposed })
}

/// Groups rows by token, given their order; `None` if that is no such order.
fn group(ids: &[u32], order: &[u32], sorted: &mut embedding::TokenPositions) -> Option<()> {
    sorted.tokens.clear();
    sorted.starts.clear();
    sorted.order.clear();
    if ids.len() != order.len() {
        return None;
    }
    let mut before = None;
    for (index, row) in order.iter().enumerate() {
        let key = (*ids.get(*row as usize)?, *row);
        if before.is_some_and(|before| before >= key) {
            return None;
        }
        if before.is_none_or(|(token, _)| token != key.0) {
            sorted.tokens.push(key.0);
            sorted.starts.push(index as u32);
        }
        sorted.order.push(*row);
        before = Some(key);
    }
    sorted.starts.push(order.len() as u32);
    Some(())
}
