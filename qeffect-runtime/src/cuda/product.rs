//! `Cmd::Gemm` and `Cmd::GroupGemm` as products of the library.

use half::bf16;
use qeffect_core::dtype::Dtype;
use qeffect_kernels::Span;
use qeffect_kernels::gemm::{BLOCK, BlockScale, Matrix, Operands, Output, Product, Scaling, Type};

use super::table::Table;
use crate::cmd::{Cmd, GroupOperand, Operand};
use crate::device::{Buf, DeviceError};

const CMD: &str = "gemm";

/// A product, and what it works on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Gemm {
    pub(super) product: Product,
    pub(super) operands: Operands,
}

impl Gemm {
    /// Of a [`Cmd::Gemm`]; none of another command.
    pub(super) fn of(table: &Table, cmd: &Cmd) -> Result<Option<Gemm>, DeviceError> {
        let Cmd::Gemm { m, n, k, a, b, bias, out, accumulate, fast } = cmd else { return Ok(None) };
        Gemm::new(table, [*m, *n, *k], a, b, *bias, *out, [*accumulate, *fast]).map(Some)
    }

    /// `out[m, n] = a[m, k] · b[k, n] + bias[n]`, or added to what `out` holds. The library's sum of a product and what is
    /// there is that of the product, rounded to a float, and what is there (a test says so).
    fn new(
        table: &Table,
        [m, n, k]: [usize; 3],
        a: &Operand,
        b: &Operand,
        bias: Option<Buf>,
        out: Buf,
        [accumulate, fast]: [bool; 2],
    ) -> Result<Gemm, DeviceError> {
        let (left_type, left) = matrix(table, CMD, a.buf)?;
        let (right_type, right) = matrix(table, CMD, b.buf)?;
        let (out_type, out) = output(table, CMD, out)?;
        let bias = bias.map(|bias| table.get::<bf16>(CMD, bias)).transpose()?;
        let product = Product {
            rows: m,
            columns: n,
            depth: k,
            left: left_type,
            right: right_type,
            left_transposed: a.transposed,
            // The library's right operand has the terms of a sum side by side: what the command calls transposed.
            right_transposed: !b.transposed,
            out: out_type,
            bias: bias.is_some(),
            fast: fast && left_type.is_fp8(),
            // Weight gradients may be added to: one algorithm, without a split of the depth, for first and later ones.
            split: out_type == Output::Bf16,
            beside: out_type == Output::Bf16,
            scaling: Scaling::Tensor,
        };
        let operands = Operands {
            left,
            right,
            left_scale: factor(table, a)?,
            right_scale: factor(table, b)?,
            bias,
            out,
            accumulate,
        };
        Ok(Gemm { product, operands })
    }
}

/// The product of a group, over the terms of all members.
#[derive(Debug)]
pub(super) struct Group {
    /// The product and its operands; block scales are still to come.
    pub(super) gemm: Gemm,
    /// The factors of both sides, one per member: none of bf16.
    pub(super) factors: Option<[Vec<Span<f32>>; 2]>,
    /// Blocks of terms that a member has.
    pub(super) blocks: usize,
}

/// How the factors of members become block scales: one of both may have square blocks, whose table is the smaller one.
/// The right operand, the inputs of a weight, seldom has more rows than the left one.
const BLOCKS: [BlockScale; 2] = [BlockScale::Square, BlockScale::Vector];

/// Entries of both tables of block scales.
pub(super) const fn table_sizes(rows: usize, columns: usize, depth: usize) -> (usize, usize) {
    let [left, right] = BLOCKS;
    (left.len(rows, depth), right.len(columns, depth))
}

impl Group {
    /// Of a [`Cmd::GroupGemm`]; none of another command. Codes of a member fill whole blocks that share a scale, so that
    /// every block has the factor of its member.
    pub(super) fn new(table: &Table, cmd: &Cmd) -> Result<Option<Group>, DeviceError> {
        let Cmd::GroupGemm { m, n, k, stride, members, a, b, out, accumulate } = cmd else { return Ok(None) };
        let name = cmd.name();
        let refused = |reason: String| DeviceError::Failed { cmd: name, reason };
        let (left_type, left) = matrix(table, name, a.buf)?;
        let (right_type, right) = matrix(table, name, b.buf)?;
        let fp8 = left_type.is_fp8();
        if fp8 && !stride.is_multiple_of(BLOCK) {
            return Err(refused(format!(
                "members begin every {stride} terms; block scales need a multiple of {BLOCK}"
            )));
        }
        if stride < k {
            return Err(refused(format!("members of {k} terms begin every {stride}: they overlap")));
        }
        let factors = |side: &GroupOperand| match side.scale_inv.len() {
            found if found == if fp8 { *members } else { 0 } => {
                side.scale_inv.iter().map(|factor| table.get::<f32>(name, *factor)).collect::<Result<Vec<_>, _>>()
            }
            found => Err(refused(format!("{members} members in {left_type:?} × {right_type:?} have {found} factors"))),
        };
        let [left_factors, right_factors] = [factors(a)?, factors(b)?];
        let (out_type, out) = output(table, name, *out)?;
        let product = Product {
            left_transposed: a.transposed,
            right_transposed: !b.transposed,
            out: out_type,
            scaling: if fp8 { Scaling::Blocks { left: BLOCKS[0], right: BLOCKS[1] } } else { Scaling::Tensor },
            ..Product::weight_gradient(*m, *n, members.saturating_mul(*stride), left_type, right_type)
        };
        let operands =
            Operands { left, right, left_scale: None, right_scale: None, bias: None, out, accumulate: *accumulate };
        let factors = fp8.then_some([left_factors, right_factors]);
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

fn matrix(table: &Table, cmd: &'static str, buf: Buf) -> Result<(Type, Matrix), DeviceError> {
    Ok(match table.spec(buf)?.dtype {
        Dtype::Bf16 => (Type::Bf16, Matrix::Bf16(table.get(cmd, buf)?)),
        Dtype::E4M3 => (Type::E4M3, Matrix::Codes(table.get(cmd, buf)?)),
        Dtype::E5M2 => (Type::E5M2, Matrix::Codes(table.get(cmd, buf)?)),
        _ => return Err(table.not(cmd, buf, "bf16 or FP8 codes")),
    })
}

fn output(table: &Table, cmd: &'static str, buf: Buf) -> Result<(Output, Matrix), DeviceError> {
    Ok(match table.spec(buf)?.dtype {
        Dtype::Bf16 => (Output::Bf16, Matrix::Bf16(table.get(cmd, buf)?)),
        Dtype::F32 => (Output::F32, Matrix::F32(table.get(cmd, buf)?)),
        _ => return Err(table.not(cmd, buf, "bf16 or f32")),
    })
}

fn factor(table: &Table, operand: &Operand) -> Result<Option<Span<f32>>, DeviceError> {
    operand.scale_inv.map(|factor| table.get::<f32>(CMD, factor)).transpose()
}
