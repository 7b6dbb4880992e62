//! Attention.

use super::{Activation, Master, Result, Run, kernel};
use crate::kernels::attention;

impl Run<'_> {
    pub(super) fn attention<E: Activation>(&mut self) -> Result {
        fields!(self, Attention { qkv, out, lse, shape });
        let name = self.name;
        let scratch = E::Acc::scratch(self.workspace);
        self.table.write(name, [*out, *lse], |table, [y, sums]| {
            let (y, sums) = (table.out(name, *out, y)?, table.out(name, *lse, sums)?);
            let qkv = table.get::<E>(name, *qkv)?;
            attention::attention_forward(scratch, *shape, qkv, y, sums).map_err(kernel(name))
        })
    }

    pub(super) fn attention_grad<E: Activation>(&mut self) -> Result {
        fields!(self, AttentionGrad { qkv, lse, dout, dqkv, shape });
        let name = self.name;
        let scratch = E::Acc::scratch(self.workspace);
        self.table.write(name, [*dqkv], |table, [out]| {
            let out = table.out(name, *dqkv, out)?;
            let (qkv, lse, dout) = (table.get::<E>(name, *qkv)?, table.get(name, *lse)?, table.get(name, *dout)?);
            attention::attention_backward(scratch, *shape, qkv, lse, dout, out).map_err(kernel(name))
        })
    }
}
