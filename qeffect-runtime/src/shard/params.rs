//! The parameters of a rank by name: first values, values, gradients; of the whole of one, or of a named view of its rows.

use std::ops::Range;

use qeffect_core::dtype::Dtype;

use super::{Shard, mean};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::rng;
use crate::stage::{Init, ParamId, Stage};

/// A parameter of a part, or a view of one.
pub(super) struct Found {
    pub(super) part: usize,
    pub(super) index: usize,
    pub(super) elements: Range<usize>,
}

impl<S: Stage> Shard<S> {
    /// Draws the first values of every parameter: a function of seed and name, wherever the parameter lives.
    pub fn init(&mut self, seed: u64) -> Result<()> {
        for part in 0..self.parts.len() {
            for index in 0..self.parts[part].state.params.len() {
                let spec = &self.parts[part].stage.spec().params[index];
                let tied = self.parts[part].stage.spec().tied_to(ParamId(index));
                let stream = rng::name(tied.unwrap_or(&spec.path));
                let (len, init) = (spec.elements(), spec.init);
                let master = self.parts[part].state.params[index].master;
                match (init, master.dtype) {
                    (Init::Zeros, _) => self.upload_reals(master.buf, &vec![0.0; len])?,
                    (Init::Ones, _) => self.upload_reals(master.buf, &vec![1.0; len])?,
                    // Rounded where they are drawn: billions of numbers are a matter of seconds.
                    (Init::Normal(deviation), Dtype::F32) => {
                        let values = rng::normals(seed, stream, len, |normal| (deviation * normal) as f32);
                        self.device.write(master.buf, bytemuck::cast_slice(&values))?;
                    }
                    (Init::Normal(deviation), _) => {
                        let values = rng::normals(seed, stream, len, |normal| deviation * normal);
                        self.upload_reals(master.buf, &values)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Gives a parameter, or a named view of one, its values. The weight cache follows at the next [`Shard::prologue`].
    pub fn set_param(&mut self, path: &str, values: &[f64]) -> Result<()> {
        let Found { part, index, elements } = self.find(path)?;
        let master = self.parts[part].state.params[index].master;
        if elements.len() == master.elements() {
            return self.upload_reals(master.buf, values);
        }
        if elements.len() != values.len() {
            let (expected, found) = (elements.len(), values.len());
            return Err(Error::Config(format!("`{path}` has {expected} values, {found} were given")));
        }
        let mut all = self.reals(master)?;
        all[elements].copy_from_slice(values);
        self.upload_reals(master.buf, &all)
    }

    /// The values of a parameter, or of a named view of one.
    pub fn param(&mut self, path: &str) -> Result<Vec<f64>> {
        let Found { part, index, elements } = self.find(path)?;
        let master = self.parts[part].state.params[index].master;
        Ok(self.reals(master)?[elements].to_vec())
    }

    /// The gradient of a parameter, or of a named view of one: the mean over the step, not clipped. Complete after
    /// [`Shard::reduce`]; refused before it, and after an aborted step.
    pub fn gradient(&mut self, path: &str) -> Result<Vec<f64>> {
        let Found { part, index, elements } = self.find(path)?;
        self.parts[part].grads.require_final(ParamId(index))?;
        let grad = self.parts[part].state.params[index].grad;
        let factor = self.gradient_factor();
        Ok(self.reals(grad)?[elements].iter().map(|sum| mean(grad.dtype, *sum, factor)).collect())
    }

    pub(super) fn find(&self, path: &str) -> Result<Found> {
        let mut parts = self.parts.iter().enumerate();
        let found = parts.find_map(|(part, of)| {
            let (param, elements) = of.stage.spec().find(path)?;
            Some(Found { part, index: param.0, elements })
        });
        found.ok_or_else(|| Error::Config(format!("this rank has no parameter `{path}`")))
    }
}
