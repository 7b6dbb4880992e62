//! Norms over rows.

use super::{Activation, Master, Result, Run, kernel};
use crate::kernels::layer_norm::{self, NormGradients, Saved, Statistics};
use crate::kernels::rms_norm;

impl Run<'_> {
    pub(super) fn layer_norm<E: Activation>(&mut self) -> Result {
        fields!(self, LayerNorm { x, gain, bias, y, mean, rstd });
        let name = self.name;
        let scratch = E::Acc::scratch(self.workspace);
        self.table.write(name, [*y, *mean, *rstd], |table, [out, means, rstds]| {
            let statistics = Statistics { mean: table.out(name, *mean, means)?, rstd: table.out(name, *rstd, rstds)? };
            let out = table.out::<E>(name, *y, out)?;
            let (x, gain, bias) = (table.get::<E>(name, *x)?, table.get(name, *gain)?, table.get(name, *bias)?);
            layer_norm::layer_norm_forward(scratch, x, gain, bias, out, statistics).map_err(kernel(name))
        })
    }

    pub(super) fn layer_norm_grad<E: Activation>(&mut self) -> Result {
        fields!(self, LayerNormGrad { dy, x, gain, mean, rstd, dx, gain_grad, bias_grad });
        let name = self.name;
        let scratch = E::Acc::scratch(self.workspace);
        self.table.write(name, [*dx, *gain_grad, *bias_grad], |table, [out, gains, biases]| {
            let gradients = NormGradients {
                gamma: table.out(name, *gain_grad, gains)?,
                beta: table.out(name, *bias_grad, biases)?,
            };
            let out = table.out::<E>(name, *dx, out)?;
            let saved = Saved { mean: table.get(name, *mean)?, rstd: table.get(name, *rstd)? };
            let (x, dy, gain) = (table.get::<E>(name, *x)?, table.get::<E>(name, *dy)?, table.get(name, *gain)?);
            layer_norm::layer_norm_backward(scratch, x, gain, saved, dy, out, gradients).map_err(kernel(name))
        })
    }

    pub(super) fn rms_norm<E: Activation>(&mut self) -> Result {
        fields!(self, RmsNorm { x, gain, y, rstd });
        let name = self.name;
        let scratch = E::Acc::scratch(self.workspace);
        self.table.write(name, [*y, *rstd], |table, [out, rstds]| {
            let (out, rstds) = (table.out::<E>(name, *y, out)?, table.out(name, *rstd, rstds)?);
            let (x, gain) = (table.get::<E>(name, *x)?, table.get(name, *gain)?);
            rms_norm::rms_norm_forward(scratch, x, gain, out, rstds).map_err(kernel(name))
        })
    }

    pub(super) fn rms_norm_grad<E: Activation>(&mut self) -> Result {
        fields!(self, RmsNormGrad { dy, x, gain, rstd, dx, gain_grad });
        let name = self.name;
        let scratch = E::Acc::scratch(self.workspace);
        self.table.write(name, [*dx, *gain_grad], |table, [out, gains]| {
            let (out, gains) = (table.out::<E>(name, *dx, out)?, table.out(name, *gain_grad, gains)?);
            let (x, dy) = (table.get::<E>(name, *x)?, table.get::<E>(name, *dy)?);
            let (gain, rstd) = (table.get(name, *gain)?, table.get(name, *rstd)?);
            rms_norm::rms_norm_backward(scratch, x, gain, rstd, dy, out, gains).map_err(kernel(name))
        })
    }
}
