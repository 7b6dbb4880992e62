//! Kernels that ops bring along: on this device a function over numbers, which are rounded as they are stored.

use half::bf16;

use super::{Result, Run};
use crate::cpu::table::Data;
use crate::device::{Buf, DeviceError};

impl Run<'_> {
    pub(super) fn launch(&mut self) -> Result {
        fields!(self, Launch { kernel, inputs, outputs });
        for (at, output) in outputs.iter().enumerate() {
            if inputs.contains(output) || outputs[..at].contains(output) {
                let buffer = self.table.spec(*output)?.name.clone();
                return Err(DeviceError::Aliased { cmd: self.name, buffer });
            }
        }
        let read = inputs.iter().map(|input| self.numbers(*input)).collect::<Result<Vec<_>>>()?;
        let mut written = Vec::with_capacity(outputs.len());
        for output in outputs {
            written.push(vec![0.0; self.table.spec(*output)?.elements()]);
        }
        let views: Vec<&[f64]> = read.iter().map(Vec::as_slice).collect();
        let mut slots: Vec<&mut [f64]> = written.iter_mut().map(Vec::as_mut_slice).collect();
        (kernel.cpu)(&views, &mut slots).map_err(|reason| self.failed(&reason))?;
        outputs.iter().zip(written).try_for_each(|(output, values)| self.store(*output, &values))
    }

    fn numbers(&self, buf: Buf) -> Result<Vec<f64>> {
        Ok(match self.table.data(buf)? {
            Data::F64(x) => x.clone(),
            Data::F32(x) => x.iter().map(|x| f64::from(*x)).collect(),
            Data::Bf16(x) => x.iter().map(|x| f64::from(*x)).collect(),
            _ => return Err(self.not(buf, self.dtype(buf)?, "numbers")),
        })
    }

    fn store(&mut self, buf: Buf, values: &[f64]) -> Result {
        let dtype = self.dtype(buf)?;
        match self.table.data_mut(buf)? {
            Data::F64(x) => x.copy_from_slice(values),
            Data::F32(x) => x.iter_mut().zip(values).for_each(|(x, value)| *x = *value as f32),
            Data::Bf16(x) => x.iter_mut().zip(values).for_each(|(x, value)| *x = bf16::from_f64(*value)),
            _ => return Err(self.not(buf, dtype, "numbers")),
        }
        Ok(())
    }
}
