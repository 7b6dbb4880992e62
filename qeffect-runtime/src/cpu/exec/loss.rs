//! Cross-entropy.

use super::{Activation, Master, Result, Run, first, kernel};
use crate::kernels::{Real, loss};

impl Run<'_> {
    pub(super) fn cross_entropy<E: Activation>(&mut self) -> Result {
        fields!(self, CrossEntropy { logits, targets, lse, loss: dst, flag, vocabulary });
        let name = self.name;
        if let Some(flag) = flag {
            self.table.flag(name, *flag)?;
        }
        self.table.scalar::<E::Acc>(name, *dst)?;
        let scratch = E::Acc::scratch(self.workspace);
        let mean = self.table.write(name, [*lse], |table, [sums]| {
            let sums = table.out(name, *lse, sums)?;
            let (logits, targets) = (table.get::<E>(name, *logits)?, table.get(name, *targets)?);
            loss::cross_entropy_forward(scratch, logits, targets, *vocabulary, sums).map_err(kernel(name))
        })?;
        *self.table.scalar_mut(name, *dst)? = mean;
        match flag {
            Some(flag) if !mean.finite() => *self.table.scalar_mut::<u32>(name, first(*flag))? = 1,
            _ => {}
        }
        Ok(())
    }

    pub(super) fn cross_entropy_grad<E: Activation>(&mut self) -> Result {
        fields!(self, CrossEntropyGrad { logits, targets, lse, dlogits, vocabulary, factor });
        let name = self.name;
        let factor = <E::Acc as Real>::from_f32(*factor);
        let scratch = E::Acc::scratch(self.workspace);
        self.table.write(name, [*dlogits], |table, [out]| {
            let out = table.out(name, *dlogits, out)?;
            let (logits, targets, lse) =
                (table.get::<E>(name, *logits)?, table.get(name, *targets)?, table.get(name, *lse)?);
            loss::cross_entropy_backward(scratch, logits, targets, *vocabulary, lse, factor, out).map_err(kernel(name))
        })
    }
}
