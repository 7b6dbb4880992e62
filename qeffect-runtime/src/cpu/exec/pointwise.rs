//! What is done to each element, and sums of tensors.

use super::{Activation, Master, Result, Run, first, kernel};
use crate::kernels::{dropout, elementwise, gelu, rotary, silu};
use crate::rng;

impl Run<'_> {
    pub(super) fn gelu<E: Activation>(&mut self) -> Result {
        fields!(self, Gelu { x, y });
        let name = self.name;
        self.table.write(name, [*y], |table, [out]| {
            gelu::gelu_forward(table.get::<E>(name, *x)?, table.out(name, *y, out)?).map_err(kernel(name))
        })
    }

    pub(super) fn gelu_grad<E: Activation>(&mut self) -> Result {
        fields!(self, GeluGrad { x, dy, dx });
        let name = self.name;
        self.table.write(name, [*dx], |table, [out]| {
            let (x, dy) = (table.get::<E>(name, *x)?, table.get(name, *dy)?);
            gelu::gelu_backward(x, dy, table.out(name, *dx, out)?).map_err(kernel(name))
        })
    }

    pub(super) fn add<E: Activation>(&mut self) -> Result {
        fields!(self, Add { a, b, out });
        let name = self.name;
        self.table.write(name, [*out], |table, [y]| {
            let (a, b) = (table.get::<E>(name, *a)?, table.get(name, *b)?);
            elementwise::add(a, b, table.out(name, *out, y)?).map_err(kernel(name))
        })
    }

    pub(super) fn column_sums<E: Activation>(&mut self) -> Result {
        fields!(self, ColumnSums { x, out, cols });
        let name = self.name;
        self.table.write(name, [*out], |table, [y]| {
            elementwise::column_sums(table.get::<E>(name, *x)?, *cols, table.out(name, *out, y)?).map_err(kernel(name))
        })
    }

    pub(super) fn sum_slots<A: Master>(&mut self) -> Result {
        fields!(self, SumSlots { slots, out });
        let name = self.name;
        self.table.write(name, [*out], |table, [sum]| {
            let sum = table.out::<A>(name, *out, sum)?;
            let slots = slots.iter().map(|slot| table.get::<A>(name, *slot)).collect::<Result<Vec<_>>>()?;
            elementwise::sum_slots(&slots, sum).map_err(kernel(name))
        })
    }

    pub(super) fn silu<E: Activation>(&mut self) -> Result {
        fields!(self, Silu { x, y });
        let name = self.name;
        self.table.write(name, [*y], |table, [out]| {
            silu::silu_forward(table.get::<E>(name, *x)?, table.out(name, *y, out)?).map_err(kernel(name))
        })
    }

    pub(super) fn silu_grad<E: Activation>(&mut self) -> Result {
        fields!(self, SiluGrad { x, dy, dx });
        let name = self.name;
        self.table.write(name, [*dx], |table, [out]| {
            let (x, dy) = (table.get::<E>(name, *x)?, table.get(name, *dy)?);
            silu::silu_backward(x, dy, table.out(name, *dx, out)?).map_err(kernel(name))
        })
    }

    pub(super) fn swiglu<E: Activation>(&mut self) -> Result {
        fields!(self, Swiglu { x, y, cols });
        let name = self.name;
        self.table.write(name, [*y], |table, [out]| {
            silu::swiglu_forward(table.get::<E>(name, *x)?, *cols, table.out(name, *y, out)?).map_err(kernel(name))
        })
    }

    pub(super) fn swiglu_grad<E: Activation>(&mut self) -> Result {
        fields!(self, SwigluGrad { x, dy, dx, cols });
        let name = self.name;
        self.table.write(name, [*dx], |table, [out]| {
            let (x, dy) = (table.get::<E>(name, *x)?, table.get(name, *dy)?);
            silu::swiglu_backward(x, *cols, dy, table.out(name, *dx, out)?).map_err(kernel(name))
        })
    }

    pub(super) fn rotary<E: Activation>(&mut self) -> Result {
        fields!(self, Rotary { x, table: angles, out, shape, inverse });
        let name = self.name;
        self.table.write(name, [*out], |table, [y]| {
            let (x, angles) = (table.get::<E>(name, *x)?, table.get(name, *angles)?);
            rotary::rotary(*shape, angles, *inverse, x, table.out(name, *out, y)?).map_err(kernel(name))
        })
    }

    pub(super) fn dropout<E: Activation>(&mut self) -> Result {
        fields!(self, Dropout { x, y, step, key, rate });
        let name = self.name;
        let step = self.table.scalar::<u64>(name, first(*step))?;
        let mask = rng::draw(&[key.seed, step, key.site, key.microbatch]);
        self.table.write(name, [*y], |table, [out]| {
            dropout::dropout(mask, *rate, table.get::<E>(name, *x)?, table.out(name, *y, out)?).map_err(kernel(name))
        })
    }
}
