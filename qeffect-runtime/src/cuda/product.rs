//! `Cmd::Gemm` and `Cmd::GroupGemm` as products of the library.

use half::bf16;
use qeffect_core::dtype::Dtype;
use qeffect_kernels::Span;
use qeffect_kernels::gemm::{BLOCK, BlockScale, Matrix, Operands, Output, Product, Scaling, Type};

use super::table::Table;
use crate::cmd::{Cmd, GroupOperand, Operand};
use crate::device::{Buf, BufSpec, DeviceError};

type Result<T> = std::result::Result<T, DeviceError>;

/// The product that a command is; none of another command. It follows from the command and what its buffers hold.
pub(super) fn of<'a>(cmd: &Cmd, spec: impl Fn(Buf) -> Result<&'a BufSpec>) -> Result<Option<Product>> {
    let name = cmd.name();
    let element = |buf| operand_type(name, spec(buf)?);
    match cmd {
        // The library's sum of a product and what is there is that of the product, rounded to a float, and what is there (a
        // test says so).
        Cmd::Gemm { m, n, k, a, b, bias, out, fast, .. } => {
            let (left, right, out) = (element(a.buf)?, element(b.buf)?, output_type(name, spec(*out)?)?);
            Ok(Some(Product {
                rows: *m,
                columns: *n,
                depth: *k,
                left,
                right,
                left_transposed: a.transposed,
                // The library's right operand has the terms of a sum side by side: what the command calls transposed.
                right_transposed: !b.transposed,
                out,
                bias: bias.is_some(),
                fast: *fast && left.is_fp8(),
                // Weight gradients may be added to: one algorithm, without a split of the depth, for first and later ones.
                split: out == Output::Bf16,
                beside: out == Output::Bf16,
                scaling: Scaling::Tensor,
            }))
        }
        Cmd::GroupGemm { m, n, k, stride, members, a, b, out, .. } => {
            let refused = |reason: String| DeviceError::Failed { cmd: name, reason };
            let (left, right) = (element(a.buf)?, element(b.buf)?);
            let factors = if left.is_fp8() { GroupOperand::factors(a, b, *members) } else { 0 };
            // Codes of a member then fill whole blocks that share a scale, so that every block has the factor of its member.
            let blocks = factors > 1;
            if blocks && !stride.is_multiple_of(BLOCK) {
                return Err(refused(format!(
                    "members begin every {stride} terms; block scales need a multiple of {BLOCK}"
                )));
            }
            if stride < k {
                return Err(refused(format!("members of {k} terms begin every {stride}: they overlap")));
            }
            for side in [a, b] {
                let found = side.scale_inv.len();
                if found != factors {
                    return Err(refused(format!("{members} members in {left:?} × {right:?} have {found} factors")));
                }
            }
            Ok(Some(Product {
                left_transposed: a.transposed,
                right_transposed: !b.transposed,
                out: output_type(name, spec(*out)?)?,
                scaling: if blocks { Scaling::Blocks { left: BLOCKS[0], right: BLOCKS[1] } } else { Scaling::Tensor },
                ..Product::weight_gradient(*m, *n, members.saturating_mul(*stride), left, right)
            }))
        }
        _ => Ok(None),
    }
}

/// A product, and what it works on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Gemm {
    pub(super) product: Product,
    pub(super) operands: Operands,
}

impl Gemm {
    /// Of a [`Cmd::Gemm`]; none of another command.
    pub(super) fn of(table: &Table, cmd: &Cmd) -> Result<Option<Gemm>> {
        let Cmd::Gemm { a, b, bias, out, accumulate, .. } = cmd else { return Ok(None) };
        let Some(product) = of(cmd, |buf| table.spec(buf))? else { return Ok(None) };
        let name = cmd.name();
        let factor = |side: &Operand| side.scale_inv.map(|factor| table.get::<f32>(name, factor)).transpose();
        let operands = Operands {
            left: matrix(table, name, a.buf)?,
            right: matrix(table, name, b.buf)?,
            left_scale: factor(a)?,
            right_scale: factor(b)?,
            bias: bias.map(|bias| table.get::<bf16>(name, bias)).transpose()?,
            out: matrix(table, name, *out)?,
            accumulate: *accumulate,
        };
        Ok(Some(Gemm { product, operands }))
    }
}

/// The product of a group, over the terms of all members.
#[derive(Debug)]
pub(super) struct Group {
    /// The product and its operands; block scales are still to come.
    pub(super) gemm: Gemm,
    /// The factors of both sides, one per member: none of bf16, and none where all members have the same.
    pub(super) factors: Option<[Vec<Span<f32>>; 2]>,
    /// Blocks of terms that a member has.
    pub(super) blocks: usize,
}

/// How the factors of members become block scales: one of both may have square blocks, whose table is the smaller one.
/// The right operand, the inputs of a weight, seldom has more rows than the left one.
const BLOCKS: [BlockScale; 2] = [BlockScale::Square, BlockScale::Vector];

impl Group {
    /// Of a [`Cmd::GroupGemm`]; none of another command.
    pub(super) fn of(table: &Table, cmd: &Cmd) -> Result<Option<Group>> {
        let Cmd::GroupGemm { stride, a, b, out, accumulate, .. } = cmd else { return Ok(None) };
        let Some(product) = of(cmd, |buf| table.spec(buf))? else { return Ok(None) };
        let name = cmd.name();
        let factors = |side: &GroupOperand| {
            side.scale_inv.iter().map(|factor| table.get::<f32>(name, *factor)).collect::<Result<Vec<_>>>()
        };
        let [left, right] = [factors(a)?, factors(b)?];
        let blocks = product.scaling != Scaling::Tensor;
        // One factor of each side is the product's own; of several, block scales are made.
        let one = |factors: &[Span<f32>]| if blocks { None } else { factors.first().copied() };
        let operands = Operands {
            left: matrix(table, name, a.buf)?,
            right: matrix(table, name, b.buf)?,
            left_scale: one(&left),
            right_scale: one(&right),
            bias: None,
            out: matrix(table, name, *out)?,
            accumulate: *accumulate,
        };
        let factors = blocks.then_some([left, right]);
        Ok(Some(Group { gemm: Gemm { product, operands }, factors, blocks: stride / BLOCK }))
    }

    /// The forms of both tables of block scales, and the rows of their operands.
    pub(super) fn tables(&self) -> Option<[(BlockScale, usize); 2]> {
        match self.gemm.product.scaling {
            Scaling::Tensor => None,
            Scaling::Blocks { left, right } => {
                Some([(left, self.gemm.product.rows), (right, self.gemm.product.columns)])
            }
        }
    }
}

fn operand_type(cmd: &'static str, spec: &BufSpec) -> Result<Type> {
    match spec.dtype {
        Dtype::Bf16 => Ok(Type::Bf16),
        Dtype::E4M3 => Ok(Type::E4M3),
        Dtype::E5M2 => Ok(Type::E5M2),
        found => Err(DeviceError::Dtype { cmd, buffer: spec.name.clone(), found, expected: "bf16 or FP8 codes" }),
    }
}

fn output_type(cmd: &'static str, spec: &BufSpec) -> Result<Output> {
    match spec.dtype {
        Dtype::Bf16 => Ok(Output::Bf16),
        Dtype::F32 => Ok(Output::F32),
        found => Err(DeviceError::Dtype { cmd, buffer: spec.name.clone(), found, expected: "bf16 or f32" }),
    }
}

/// A buffer as the elements that it holds.
fn matrix(table: &Table, cmd: &'static str, buf: Buf) -> Result<Matrix> {
    Ok(match table.spec(buf)?.dtype {
        Dtype::Bf16 => Matrix::Bf16(table.get(cmd, buf)?),
        Dtype::E4M3 | Dtype::E5M2 => Matrix::Codes(table.get(cmd, buf)?),
        Dtype::F32 => Matrix::F32(table.get(cmd, buf)?),
        _ => return Err(table.not(cmd, buf, "bf16, FP8 codes or f32")),
    })
}
