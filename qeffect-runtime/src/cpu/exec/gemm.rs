//! Matrix products.

use half::bf16;
use qeffect_core::dtype::Dtype;
use qeffect_core::fp8::Fp8 as Format;

use super::{Master, Result, Run, first, kernel};
use crate::cmd::{Cmd, GroupOperand, Operand};
use crate::cpu::table::{Data, Table};
use crate::device::DeviceError;
use crate::kernels::gemm;

impl Run<'_> {
    pub(super) fn gemm<A: Master>(&mut self) -> Result {
        fields!(self, Gemm { m, n, k, a, b, bias, out, accumulate });
        let name = self.name;
        let shape = gemm::GemmShape { m: *m, n: *n, k: *k };
        if *accumulate && bias.is_some() {
            return Err(self.failed("a product that is added has no bias"));
        }
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
                Data::Bf16(x) if !accumulate => gemm::Output::Bf16(x),
                data if *accumulate => gemm::Output::Add(table.out::<A>(name, *out, data)?),
                data => gemm::Output::Real(table.out::<A>(name, *out, data)?),
            };
            gemm::gemm(scratch, shape, a, b, bias, output).map_err(kernel(name))
        });
        *A::bias(self.workspace) = bias_values;
        result
    }

    pub(super) fn group_gemm<A: Master>(&mut self) -> Result {
        fields!(self, GroupGemm { out, accumulate });
        let (name, shape, factors) = (self.name, self.group_shape()?, self.group_factors()?);
        let (cmd, scratch) = (self.cmd, A::scratch(self.workspace));
        self.table.write(name, [*out], |table, [data]| {
            let [a, b] = group_operands::<A>(table, cmd)?;
            let out = table.out::<A>(name, *out, data)?;
            gemm::group_gemm(scratch, shape, a, b, &factors, *accumulate, out).map_err(kernel(name))
        })
    }

    /// Into a gradient in bf16: the sum is rounded, and so is what becomes of it and what is there.
    pub(super) fn group_gemm_bf16(&mut self) -> Result {
        fields!(self, GroupGemm { m, n, out, accumulate });
        let (name, shape, factors) = (self.name, self.group_shape()?, self.group_factors()?);
        let mut sums = std::mem::take(&mut self.workspace.rows32);
        sums.clear();
        sums.resize(m * n, 0.0);
        let (cmd, scratch) = (self.cmd, f32::scratch(self.workspace));
        let result = self.table.write(name, [*out], |table, [data]| {
            let [a, b] = group_operands::<f32>(table, cmd)?;
            let (out_buf, out) = (out, table.out::<bf16>(name, *out, data)?);
            if out.len() != sums.len() {
                return Err(table.short(name, *out_buf, sums.len()));
            }
            gemm::group_gemm(scratch, shape, a, b, &factors, false, &mut sums).map_err(kernel(name))?;
            for (out, sum) in out.iter_mut().zip(&sums) {
                let sum = bf16::from_f32(*sum);
                *out = if *accumulate { bf16::from_f32(out.to_f32() + sum.to_f32()) } else { sum };
            }
            Ok(())
        });
        self.workspace.rows32 = sums;
        result
    }

    fn group_shape(&self) -> Result<gemm::GroupShape> {
        fields!(self, GroupGemm { m, n, k, stride, members, a, b });
        let factors = GroupOperand::factors(a, b, *members);
        for side in [a, b] {
            if ![0, factors].contains(&side.scale_inv.len()) {
                let found = side.scale_inv.len();
                return Err(self.failed(&format!("{members} members have {found} factors on one side")));
            }
        }
        let member = gemm::GemmShape { m: *m, n: *n, k: *k };
        Ok(gemm::GroupShape { member, members: *members, stride: *stride })
    }

    /// The factor of each member's product; none where codes have none.
    fn group_factors(&self) -> Result<Vec<f32>> {
        fields!(self, GroupGemm { members, a, b });
        let (name, table) = (self.name, &*self.table);
        let factor = |side: &GroupOperand, at: usize| match side.scale_inv.get(at).or(side.scale_inv.first()) {
            Some(buf) => table.scalar::<f32>(name, first(*buf)),
            None => Ok(1.0),
        };
        let scaled = !(a.scale_inv.is_empty() && b.scale_inv.is_empty());
        (0..if scaled { *members } else { 0 }).map(|at| Ok(factor(a, at)? * factor(b, at)?)).collect()
    }
}

fn group_operands<'a, A: Master>(table: &'a Table, cmd: &Cmd) -> Result<[gemm::Operand<'a, A>; 2]> {
    let Cmd::GroupGemm { a, b, .. } = cmd else {
        return Err(DeviceError::Failed { cmd: cmd.name(), reason: "another command".into() });
    };
    Ok([group_operand::<A>(table, cmd.name(), a)?, group_operand::<A>(table, cmd.name(), b)?])
}

/// The values of a whole group's operand; factors are apart, one per member.
fn group_operand<'a, A: Master>(
    table: &'a Table,
    cmd: &'static str,
    operand: &GroupOperand,
) -> Result<gemm::Operand<'a, A>> {
    let spec = table.spec(operand.buf)?;
    let format = match spec.dtype {
        Dtype::E4M3 => Some(Format::E4M3),
        Dtype::E5M2 => Some(Format::E5M2),
        _ => None,
    };
    if format.is_some() == operand.scale_inv.is_empty() {
        let reason = format!("`{}` has {} factors", spec.name, operand.scale_inv.len());
        return Err(DeviceError::Failed { cmd, reason });
    }
    let values = match (format, table.data(operand.buf)?) {
        (Some(format), Data::U8(codes)) => gemm::Values::Fp8 { format, codes, scale_inv: 1.0 },
        (None, Data::Bf16(x)) => gemm::Values::Bf16(x),
        _ => gemm::Values::Real(table.get::<A>(cmd, operand.buf)?),
    };
    Ok(gemm::Operand { values, transposed: operand.transposed })
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
