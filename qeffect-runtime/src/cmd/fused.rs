//! Fused commands: a producer, and what is taken from the matrix that it makes.
//!
//! A fused command means its parts ([`Fused::parts`]), one after the other; a device may carry it out in one pass. Values are
//! rounded to the activation type before anything is taken from them, so the bits are those of the parts. A matrix that
//! nobody else reads is not stored.

use qeffect_core::fp8::Fp8 as Format;

use super::effects::{Access, Mode};
use super::{AdamWConfig, Beside, Cmd, Scalar};
use crate::device::Buf;

/// What makes a matrix of activations.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Producer {
    /// It is there already.
    Stored {
        /// Activation or master.
        x: Buf,
    },
    /// [`Cmd::LayerNorm`]
    LayerNorm {
        /// Activation.
        x: Buf,
        /// Master, one per column.
        gain: Buf,
        /// Master, one per column.
        bias: Buf,
        /// Master, one per row: written.
        mean: Buf,
        /// Master, one per row: written.
        rstd: Buf,
    },
    /// [`Cmd::RmsNorm`]
    RmsNorm {
        /// Activation.
        x: Buf,
        /// Master, one per column.
        gain: Buf,
        /// Master, one per row: written.
        rstd: Buf,
    },
    /// [`Cmd::LayerNormGrad`]
    LayerNormGrad {
        /// Activation.
        dy: Buf,
        /// Activation.
        x: Buf,
        /// Master.
        gain: Buf,
        /// Master.
        mean: Buf,
        /// Master.
        rstd: Buf,
        /// Master, one per column: written.
        gain_grad: Buf,
        /// Master, one per column: written.
        bias_grad: Buf,
    },
    /// [`Cmd::RmsNormGrad`]
    RmsNormGrad {
        /// Activation.
        dy: Buf,
        /// Activation.
        x: Buf,
        /// Master.
        gain: Buf,
        /// Master.
        rstd: Buf,
        /// Master, one per column: written.
        gain_grad: Buf,
    },
    /// [`Cmd::Gelu`]
    Gelu {
        /// Activation.
        x: Buf,
    },
    /// [`Cmd::GeluGrad`]
    GeluGrad {
        /// Activation.
        x: Buf,
        /// Activation.
        dy: Buf,
    },
    /// [`Cmd::Silu`]
    Silu {
        /// Activation.
        x: Buf,
    },
    /// [`Cmd::SiluGrad`]
    SiluGrad {
        /// Activation.
        x: Buf,
        /// Activation.
        dy: Buf,
    },
    /// [`Cmd::Swiglu`]
    Swiglu {
        /// Activation, twice as wide.
        x: Buf,
    },
    /// [`Cmd::SwigluGrad`]
    SwigluGrad {
        /// Activation.
        x: Buf,
        /// Activation, half as wide.
        dy: Buf,
    },
    /// [`Cmd::CrossEntropyGrad`]
    CrossEntropyGrad {
        /// Activation.
        logits: Buf,
        /// u32.
        targets: Buf,
        /// Master.
        lse: Buf,
        /// Loss scale divided by the number of rows.
        factor: f32,
    },
    /// [`Cmd::AdamW`]: the matrix is the new weight, `values` its copy in the activation type. If the flag is set a device may
    /// leave codes and copy as they are: a step that is not committed has neither moved the weight nor, for good, its scale.
    AdamW {
        /// Master: updated.
        param: Buf,
        /// Master: a sum over microbatches.
        grad: Buf,
        /// Makes it a mean.
        factor: f32,
        /// Master: updated.
        moment1: Buf,
        /// Master: updated.
        moment2: Buf,
        /// Master, one element.
        clip: Buf,
        /// Master, `[steps, 3]`.
        table: Buf,
        /// u64, one element.
        counter: Buf,
        /// Constants.
        config: AdamWConfig,
        /// If this flag is set, nothing is updated.
        unless: Buf,
    },
}

/// FP8 codes and what belongs to them: the outputs of [`Cmd::Quantise`].
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Codes {
    /// The format.
    pub format: Format,
    /// The scale in force.
    pub scale: Scalar,
    /// The codes.
    pub codes: Buf,
    /// The codes transposed.
    pub transposed: Option<Buf>,
    /// Where they lie there, if that buffer holds others too.
    pub beside: Option<Beside>,
    /// Their factor, one f32.
    pub scale_inv: Buf,
    /// The staging entry that the largest magnitude is folded into.
    pub amax: Option<Scalar>,
    /// Set, and never cleared, if a value is infinite or NaN.
    pub flag: Option<Buf>,
}

/// What is taken from a matrix.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Outputs {
    /// The values themselves, where somebody else reads them.
    pub values: Option<Buf>,
    /// Their codes.
    pub codes: Option<Codes>,
    /// Their sums over rows ([`Cmd::ColumnSums`]).
    pub column_sums: Option<Buf>,
}

/// The sum in front of a norm: `out = a + b`, which the norm then reads as its input, and which is kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Residual {
    /// Activation.
    pub a: Buf,
    /// Activation.
    pub b: Buf,
    /// Activation.
    pub out: Buf,
}

/// A fused command.
#[derive(Clone, PartialEq, Debug)]
pub struct Fused {
    /// Added before the producer reads it.
    pub residual: Option<Residual>,
    /// What makes the matrix.
    pub producer: Producer,
    /// Activation: added to the rounded matrix; the sum, rounded, is the matrix that outputs are taken from, and its values
    /// are stored.
    pub plus: Option<Buf>,
    /// Rows of the matrix.
    pub rows: usize,
    /// Columns of the matrix.
    pub cols: usize,
    /// What is taken from it.
    pub outputs: Outputs,
}

impl Producer {
    /// What it reads first: its type is that of the values.
    pub const fn input(&self) -> Buf {
        match self {
            Producer::Stored { x }
            | Producer::LayerNorm { x, .. }
            | Producer::RmsNorm { x, .. }
            | Producer::LayerNormGrad { x, .. }
            | Producer::RmsNormGrad { x, .. }
            | Producer::Gelu { x }
            | Producer::GeluGrad { x, .. }
            | Producer::Silu { x }
            | Producer::SiluGrad { x, .. }
            | Producer::Swiglu { x }
            | Producer::SwigluGrad { x, .. } => *x,
            Producer::CrossEntropyGrad { logits, .. } => *logits,
            Producer::AdamW { param, .. } => *param,
        }
    }

    /// Where the matrix lies in any case.
    const fn stored(&self) -> Option<Buf> {
        match self {
            Producer::Stored { x } => Some(*x),
            Producer::AdamW { param, .. } => Some(*param),
            _ => None,
        }
    }

    /// The command that makes the matrix in `to`; none if it is stored already.
    fn command(&self, to: Buf, cols: usize) -> Option<Cmd> {
        Some(match *self {
            Producer::Stored { .. } => return None,
            Producer::LayerNorm { x, gain, bias, mean, rstd } => {
                Cmd::LayerNorm { x, gain, bias, y: to, mean, rstd, cols }
            }
            Producer::RmsNorm { x, gain, rstd } => Cmd::RmsNorm { x, gain, y: to, rstd, cols },
            Producer::LayerNormGrad { dy, x, gain, mean, rstd, gain_grad, bias_grad } => {
                Cmd::LayerNormGrad { dy, x, gain, mean, rstd, dx: to, gain_grad, bias_grad, cols }
            }
            Producer::RmsNormGrad { dy, x, gain, rstd, gain_grad } => {
                Cmd::RmsNormGrad { dy, x, gain, rstd, dx: to, gain_grad, cols }
            }
            Producer::Gelu { x } => Cmd::Gelu { x, y: to },
            Producer::GeluGrad { x, dy } => Cmd::GeluGrad { x, dy, dx: to },
            Producer::Silu { x } => Cmd::Silu { x, y: to },
            Producer::SiluGrad { x, dy } => Cmd::SiluGrad { x, dy, dx: to },
            Producer::Swiglu { x } => Cmd::Swiglu { x, y: to, cols },
            Producer::SwigluGrad { x, dy } => Cmd::SwigluGrad { x, dy, dx: to, cols: cols / 2 },
            Producer::CrossEntropyGrad { logits, targets, lse, factor } => {
                Cmd::CrossEntropyGrad { logits, targets, lse, dlogits: to, vocabulary: cols, factor }
            }
            Producer::AdamW { param, grad, factor, moment1, moment2, clip, table, counter, config, unless } => {
                Cmd::AdamW { param, grad, factor, moment1, moment2, clip, table, counter, config, unless }
            }
        })
    }
}

impl Fused {
    /// Its name, for messages and profiles.
    pub const fn name(&self) -> &'static str {
        match self.producer {
            Producer::Stored { .. } => "fused_quantise",
            Producer::LayerNorm { .. } => "fused_layer_norm",
            Producer::RmsNorm { .. } => "fused_rms_norm",
            Producer::LayerNormGrad { .. } => "fused_layer_norm_grad",
            Producer::RmsNormGrad { .. } => "fused_rms_norm_grad",
            Producer::Gelu { .. } => "fused_gelu",
            Producer::GeluGrad { .. } => "fused_gelu_grad",
            Producer::Silu { .. } => "fused_silu",
            Producer::SiluGrad { .. } => "fused_silu_grad",
            Producer::Swiglu { .. } => "fused_swiglu",
            Producer::SwigluGrad { .. } => "fused_swiglu_grad",
            Producer::CrossEntropyGrad { .. } => "fused_cross_entropy_grad",
            Producer::AdamW { .. } => "fused_adamw",
        }
    }

    /// Whether a device needs memory for values that are not stored.
    pub const fn needs_scratch(&self) -> bool {
        self.plus.is_some() || (self.outputs.values.is_none() && self.producer.stored().is_none())
    }

    /// The commands that it means, in order. `scratch` takes the values that are not stored.
    pub fn parts(&self, scratch: Buf) -> Vec<Cmd> {
        let Fused { residual, producer, plus, rows, cols, outputs } = *self;
        let mut parts = Vec::with_capacity(4);
        parts.extend(residual.map(|Residual { a, b, out }| Cmd::Add { a, b, out }));
        let values = producer.stored().or(outputs.values).unwrap_or(scratch);
        match plus {
            None => parts.extend(producer.command(values, cols)),
            Some(other) => {
                parts.extend(producer.command(scratch, cols));
                parts.push(Cmd::Add { a: scratch, b: other, out: values });
            }
        }
        let copy = outputs.values.filter(|copy| *copy != values);
        parts.extend(copy.map(|dst| Cmd::Convert { src: values, dst }));
        parts.extend(outputs.column_sums.map(|out| Cmd::ColumnSums { x: values, out, cols }));
        parts.extend(outputs.codes.map(|of| {
            let Codes { format, scale, codes, transposed, beside, scale_inv, amax, flag } = of;
            Cmd::Quantise { src: values, rows, cols, format, scale, codes, transposed, beside, scale_inv, amax, flag }
        }));
        parts
    }

    /// What it touches, as [`Cmd::effects`]: what its parts do, without what passes between them.
    pub(crate) fn effects(&self, elements: &dyn Fn(Buf) -> Option<usize>) -> Vec<Access> {
        let scratch = Buf(u32::MAX);
        let mut own: Vec<Access> = Vec::new();
        for access in self.parts(scratch).iter().flat_map(|part| part.effects(elements)) {
            let made_here = |made: &Access| matches!(made.mode, Mode::Write | Mode::Update) && made.covers(&access);
            let between = access.buf == scratch || (access.mode == Mode::Read && own.iter().any(made_here));
            if !between && !own.contains(&access) {
                own.push(access);
            }
        }
        own
    }
}
