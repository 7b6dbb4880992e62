//! Casts to FP8, and the cells whose scales they read.

use super::{Result, Run, first, kernel};
use crate::cmd::HEALTH_WORDS;
use crate::cpu::table::Store;
use crate::device::DeviceError;
use crate::kernels::{Elem, cast};

impl Run<'_> {
    pub(super) fn quantise<E: Elem<Acc = f32> + Store>(&mut self) -> Result {
        fields!(self, Quantise { src, rows, cols, format, scale, codes, transposed, beside, scale_inv, amax, flag });
        let name = self.name;
        let elements = rows * cols;
        let factor = self.table.scalar::<f32>(name, *scale)?;
        for buf in [Some(codes), transposed.as_ref()].into_iter().flatten() {
            match self.table.spec(*buf)? {
                spec if spec.dtype != format.dtype() => return Err(self.not(*buf, spec.dtype, format.dtype().name())),
                spec if spec.elements() != elements && (beside.is_none() || buf == codes) => {
                    return Err(self.table.short(name, *buf, elements));
                }
                _ => {}
            }
        }
        if let (Some(buf), Some(beside)) = (transposed, beside) {
            let end = beside.first + beside.line * cols.saturating_sub(1) + rows;
            if beside.line < *rows {
                return Err(self.failed("lines of transposed codes overlap"));
            }
            if self.table.spec(*buf)?.elements() < end {
                return Err(self.table.short(name, *buf, end));
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
                let codes = table.get::<u8>(name, *codes)?;
                match beside {
                    None => cast::transpose(codes, (*rows, *cols), out),
                    Some(beside) => {
                        cast::transpose_beside(codes, (*rows, *cols), beside.line, &mut out[beside.first..])
                    }
                }
                .map_err(kernel(name))
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

    pub(super) fn health<E: Elem<Acc = f32> + Store>(&mut self) -> Result {
        fields!(self, Health { src, format, scale, counts, cell });
        let name = self.name;
        let factor = self.table.scalar::<f32>(name, *scale)?;
        self.table.write(name, [*counts], |table, [data]| {
            let short = || table.short(name, *counts, (cell + 1) * HEALTH_WORDS);
            let (words, _) = table.out::<u64>(name, *counts, data)?.as_chunks_mut::<HEALTH_WORDS>();
            cast::health(*format, table.get::<E>(name, *src)?, factor, words.get_mut(*cell).ok_or_else(short)?);
            Ok(())
        })
    }

    pub(super) fn roll(&mut self) -> Result {
        fields!(self, Roll { scales, history, cells, rule, unless });
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
            rule.roll_some(cells.start..cells.end.min(scale.len()), scale, rows, None)
                .map_err(|e| DeviceError::Failed { cmd: name, reason: refused(e) })
        })
    }
}
