//! Matrix products.

use qeffect_core::dtype::Dtype;
use qeffect_core::fp8::Fp8 as Format;

use super::{Master, Result, Run, first, kernel};
use crate::cmd::Operand;
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
