//! Filling, copying and converting buffers.

use half::bf16;
use qeffect_core::dtype::Dtype;

use super::{Master, Result, Run, first, kernel};
use crate::cpu::table::Data;
use crate::device::{Buf, DeviceError};
use crate::kernels::elementwise;

impl Run<'_> {
    pub(super) fn fill(&mut self, dst: Buf, value: f32) -> Result {
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

    pub(super) fn copy(&mut self, src: Buf, dst: Buf) -> Result {
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

    pub(super) fn copy_range(&mut self) -> Result {
        fields!(self, CopyRange { src, src_at, dst, dst_at, len });
        let name = self.name;
        let (from, to) = (self.table.spec(*src)?, self.table.spec(*dst)?);
        if from.dtype != to.dtype {
            return Err(self.not(*dst, to.dtype, from.dtype.name()));
        }
        for (buf, at, spec) in [(*src, *src_at, from), (*dst, *dst_at, to)] {
            let end = at.saturating_add(*len);
            if end > spec.elements() {
                return Err(self.table.short(name, buf, end));
            }
        }
        let size = from.dtype.size();
        self.table.write(name, [*dst], |table, [out]| {
            let from = table.data(*src)?;
            if matches!(from, Data::Taken) {
                return Err(DeviceError::Aliased { cmd: name, buffer: table.spec(*src)?.name.clone() });
            }
            let from = &from.bytes()[src_at * size..][..len * size];
            out.bytes_mut()[dst_at * size..][..len * size].copy_from_slice(from);
            Ok(())
        })
    }

    /// A buffer of that many u64.
    fn words<const N: usize>(&self, buf: Buf) -> Result<[u64; N]> {
        let words = self.table.get::<u64>(self.name, buf)?;
        words.try_into().map_err(|_| self.table.short(self.name, buf, N))
    }

    pub(super) fn write_tag(&mut self) -> Result {
        fields!(self, WriteTag { tag, step, value });
        let [step] = self.words(*step)?;
        let _: [u64; 3] = self.words(*tag)?; // it is that long
        self.table.write(self.name, [*tag], |table, [data]| {
            table.out::<u64>(self.name, *tag, data)?.copy_from_slice(&[step, value.key, value.generation]);
            Ok(())
        })
    }

    pub(super) fn check_tag(&mut self) -> Result {
        fields!(self, CheckTag { tag, step, expected, flag, report });
        let [step] = self.words(*step)?;
        let expected = [step, expected.key, expected.generation];
        let found: [u64; 3] = self.words(*tag)?;
        let before: [u64; 7] = self.words(*report)?;
        let flag = self.table.scalar_mut::<u32>(self.name, first(*flag))?;
        if found == expected {
            return Ok(());
        }
        *flag |= 2;
        if before[0] != 0 {
            return Ok(());
        }
        self.table.write(self.name, [*report], |table, [data]| {
            let report = table.out::<u64>(self.name, *report, data)?;
            report[0] = 1;
            report[1..4].copy_from_slice(&expected);
            report[4..].copy_from_slice(&found);
            Ok(())
        })
    }

    pub(super) fn check_finite<A: Master>(&mut self) -> Result {
        fields!(self, CheckFinite { src, flag });
        let raised = self.table.get::<A>(self.name, *src)?.iter().any(|x| !x.finite());
        let flag = self.table.scalar_mut::<u32>(self.name, first(*flag))?;
        *flag |= u32::from(raised);
        Ok(())
    }

    pub(super) fn convert(&mut self, src: Buf, dst: Buf) -> Result {
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
}
