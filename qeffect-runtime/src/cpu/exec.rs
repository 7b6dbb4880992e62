//! Commands to kernels: looks buffers up, picks the types, calls.
//!
//! What belongs to one family of commands has a file of its own under this one.

use half::bf16;
use qeffect_core::dtype::Dtype;

use super::Workspace;
use super::table::{Store, Table};
use crate::cmd::{Cmd, Scalar};
use crate::device::{Buf, DeviceError};
use crate::kernels::{Elem, KernelError, Real, Scratch};

/// The fields of the command at hand; every caller has matched its kind already.
macro_rules! fields {
    ($run:ident, $kind:ident { $($field:ident $(: $name:ident)?),* }) => {
        let $crate::cmd::Cmd::$kind { $($field $(: $name)?,)* .. } = $run.cmd else { return Err($run.failed("another command")) };
    };
}

mod attention;
mod cast;
mod embedding;
mod fused;
mod gemm;
mod launch;
mod loss;
mod memory;
mod norm;
mod optimizer;
mod pointwise;

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
        Cmd::CopyRange { .. } => run.copy_range(),
        Cmd::Fused(fused) => fused::run(run.table, run.workspace, fused),
        Cmd::WriteTag { .. } => run.write_tag(),
        Cmd::CheckTag { .. } => run.check_tag(),
        Cmd::CheckFinite { src, .. } => by_master!(run, *src, check_finite),
        Cmd::Convert { src, dst } => run.convert(*src, *dst),
        Cmd::Gemm { out, .. } => match run.dtype(*out)? {
            Dtype::F64 => run.gemm::<f64>(),
            Dtype::F32 | Dtype::Bf16 => run.gemm::<f32>(),
            found => Err(run.not(*out, found, "an activation or master type")),
        },
        Cmd::GroupGemm { out, .. } => match run.dtype(*out)? {
            Dtype::Bf16 => run.group_gemm_bf16(),
            _ => by_master!(run, *out, group_gemm),
        },
        Cmd::Quantise { src, .. } => match run.dtype(*src)? {
            Dtype::F32 => run.quantise::<f32>(),
            Dtype::Bf16 => run.quantise::<bf16>(),
            found => Err(run.not(*src, found, "f32 or bf16")),
        },
        Cmd::Health { src, .. } => match run.dtype(*src)? {
            Dtype::F32 => run.health::<f32>(),
            Dtype::Bf16 => run.health::<bf16>(),
            found => Err(run.not(*src, found, "f32 or bf16")),
        },
        Cmd::Roll { .. } => run.roll(),
        Cmd::Embed { out, .. } => by_activation!(run, *out, embed),
        Cmd::EmbedGrad { dy, .. } => by_activation!(run, *dy, embed_grad),
        Cmd::LayerNorm { x, .. } => by_activation!(run, *x, layer_norm),
        Cmd::LayerNormGrad { x, .. } => by_activation!(run, *x, layer_norm_grad),
        Cmd::RmsNorm { x, .. } => by_activation!(run, *x, rms_norm),
        Cmd::RmsNormGrad { x, .. } => by_activation!(run, *x, rms_norm_grad),
        Cmd::Rotary { x, .. } => by_activation!(run, *x, rotary),
        Cmd::Silu { x, .. } => by_activation!(run, *x, silu),
        Cmd::SiluGrad { x, .. } => by_activation!(run, *x, silu_grad),
        Cmd::Swiglu { x, .. } => by_activation!(run, *x, swiglu),
        Cmd::SwigluGrad { x, .. } => by_activation!(run, *x, swiglu_grad),
        Cmd::Dropout { x, .. } => by_activation!(run, *x, dropout),
        Cmd::Launch { .. } => run.launch(),
        Cmd::Gelu { x, .. } => by_activation!(run, *x, gelu),
        Cmd::GeluGrad { x, .. } => by_activation!(run, *x, gelu_grad),
        Cmd::Attention { qkv, .. } => by_activation!(run, *qkv, attention),
        Cmd::AttentionGrad { qkv, .. } => by_activation!(run, *qkv, attention_grad),
        Cmd::Add { a, .. } => by_activation!(run, *a, add),
        Cmd::ColumnSums { x, .. } => by_activation!(run, *x, column_sums),
        Cmd::CrossEntropy { logits, .. } => by_activation!(run, *logits, cross_entropy),
        Cmd::CrossEntropyGrad { logits, .. } => by_activation!(run, *logits, cross_entropy_grad),
        Cmd::SumSlots { out, .. } => by_master!(run, *out, sum_slots),
        Cmd::SumSquares { partials, .. } => by_master!(run, *partials, sum_squares),
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
}

fn kernel(cmd: &'static str) -> impl Fn(KernelError) -> DeviceError {
    move |error| DeviceError::Failed { cmd, reason: error.to_string() }
}
