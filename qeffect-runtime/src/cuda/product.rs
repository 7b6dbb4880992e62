//! `Cmd::Gemm` as a product of the library.

use half::bf16;
use qeffect_core::dtype::Dtype;
use qeffect_kernels::Span;
use qeffect_kernels::gemm::{Matrix, Operands, Output, Product, Scaling, Type};

use super::table::Table;
use crate::cmd::Operand;
use crate::device::{Buf, DeviceError};

const CMD: &str = "gemm";

/// A product, and what it works on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Gemm {
    pub(super) product: Product,
    pub(super) operands: Operands,
}

impl Gemm {
    /// `out[m, n] = a[m, k] · b[k, n] + bias[n]`, or added to what `out` holds. The library's sum of a product and what is
    /// there is that of the product, rounded to a float, and what is there (a test says so).
    pub(super) fn new(
        table: &Table,
        [m, n, k]: [usize; 3],
        a: &Operand,
        b: &Operand,
        bias: Option<Buf>,
        out: Buf,
        accumulate: bool,
    ) -> Result<Gemm, DeviceError> {
        let (left_type, left) = operand(table, a)?;
        let (right_type, right) = operand(table, b)?;
        let (out_type, out) = match table.spec(out)?.dtype {
            Dtype::Bf16 => (Output::Bf16, Matrix::Bf16(table.get(CMD, out)?)),
            Dtype::F32 => (Output::F32, Matrix::F32(table.get(CMD, out)?)),
            _ => return Err(table.not(CMD, out, "bf16 or f32")),
        };
        let bias = bias.map(|bias| table.get::<bf16>(CMD, bias)).transpose()?;
        // As Transformer Engine has it: fast accumulation in F, whose operands are both E4M3, and exact sums in gradients.
        let fast = left_type == Type::E4M3 && right_type == Type::E4M3 && out_type == Output::Bf16;
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
            fast,
            // Weight gradients may be added to: one algorithm, without a split of the depth, for first and later ones.
            split: out_type == Output::Bf16,
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

fn operand(table: &Table, operand: &Operand) -> Result<(Type, Matrix), DeviceError> {
    Ok(match table.spec(operand.buf)?.dtype {
        Dtype::Bf16 => (Type::Bf16, Matrix::Bf16(table.get(CMD, operand.buf)?)),
        Dtype::E4M3 => (Type::E4M3, Matrix::Codes(table.get(CMD, operand.buf)?)),
        Dtype::E5M2 => (Type::E5M2, Matrix::Codes(table.get(CMD, operand.buf)?)),
        _ => return Err(table.not(CMD, operand.buf, "bf16 or FP8 codes")),
    })
}

fn factor(table: &Table, operand: &Operand) -> Result<Option<Span<f32>>, DeviceError> {
    operand.scale_inv.map(|factor| table.get::<f32>(CMD, factor)).transpose()
}
