//! The norm of gradients, and AdamW.

use super::{Master, Result, Run, first, kernel};
use crate::cpu::table::{Data, Table};
use crate::device::Buf;
use crate::kernels::optimizer::{self, norm_pieces};

impl Run<'_> {
    pub(super) fn sum_squares<A: Master>(&mut self) -> Result {
        fields!(self, SumSquares { src, factor, partials, first });
        let name = self.name;
        let mut widened = std::mem::take(A::rows(self.workspace));
        let result = self.table.write(name, [*partials], |table, [sums]| {
            let src = gradient::<A>(table, name, *src, &mut widened)?;
            let end = first + norm_pieces(src.len());
            let sums = table.out::<A>(name, *partials, sums)?;
            let Some(sums) = sums.get_mut(*first..end) else { return Err(table.short(name, *partials, end)) };
            optimizer::sums_of_squares(src, A::from_f32(*factor), sums).map_err(kernel(name))
        });
        *A::rows(self.workspace) = widened;
        result
    }

    pub(super) fn settle<A: Master>(&mut self) -> Result {
        fields!(self, Settle { partials, flags, limit, norm, clip, flag });
        let name = self.name;
        let value = optimizer::norm(self.table.get::<A>(name, *partials)?);
        let raised = self.table.get::<u32>(name, *flags)?.iter().any(|flag| *flag != 0);
        self.table.flag(name, *flag)?;
        self.table.scalar::<A>(name, first(*clip))?;
        *self.table.scalar_mut(name, first(*norm))? = value;
        let factor = if limit.is_finite() { optimizer::clip_factor(value, A::from_f32(*limit)) } else { A::ONE };
        *self.table.scalar_mut(name, first(*clip))? = factor;
        if raised || !value.finite() {
            *self.table.scalar_mut::<u32>(name, first(*flag))? = 1;
        }
        Ok(())
    }

    pub(super) fn adamw<A: Master>(&mut self) -> Result {
        fields!(self, AdamW { param, grad, factor, moment1, moment2, clip, table: rates, counter, config, unless });
        let name = self.name;
        if self.table.flag(name, *unless)? {
            return Ok(());
        }
        let done = self.table.scalar::<u64>(name, first(*counter))? as usize;
        let rates_of_all = self.table.get::<A>(name, *rates)?;
        let Some(&[rate, step_size, correction2_sqrt]) = rates_of_all.get(done * 3..done * 3 + 3) else {
            return Err(self.failed(&format!("the learning-rate table ends before step {done}")));
        };
        let step = optimizer::AdamW {
            share1: A::from_f64(1.0 - config.beta1),
            beta2: A::from_f64(config.beta2),
            share2: A::from_f64(1.0 - config.beta2),
            epsilon: A::from_f64(config.epsilon),
            step_size,
            correction2_sqrt,
            decay: A::from_f64(1.0 - rate.to_f64() * config.weight_decay),
            factor: A::from_f32(*factor),
            clip: self.table.scalar::<A>(name, first(*clip))?,
        };
        let mut widened = std::mem::take(A::rows(self.workspace));
        let result = self.table.write(name, [*param, *moment1, *moment2], |table, [weight, m, v]| {
            let weight = table.out::<A>(name, *param, weight)?;
            let (m, v) = (table.out::<A>(name, *moment1, m)?, table.out::<A>(name, *moment2, v)?);
            let gradient = gradient::<A>(table, name, *grad, &mut widened)?;
            optimizer::adamw(&step, gradient, weight, m, v).map_err(kernel(name))
        });
        *A::rows(self.workspace) = widened;
        result
    }
}

/// A gradient in the type of masters; one in bf16 is widened.
fn gradient<'a, A: Master>(table: &'a Table, name: &'static str, buf: Buf, widened: &'a mut Vec<A>) -> Result<&'a [A]> {
    let Data::Bf16(values) = table.data(buf)? else { return table.get::<A>(name, buf) };
    widened.clear();
    widened.extend(values.iter().map(|x| A::from_f32(x.to_f32())));
    Ok(widened)
}
