//! Where a run computes, by name: `auto`, `cpu`, or `cuda:N`.

use core::fmt;
use core::str::FromStr;

use qeffect_core::dtype::Dtype;
use qeffect_core::recipe::Recipe;

use crate::cpu::CpuDevice;
use crate::cuda::CudaDevice;
use crate::device::Device;
use crate::error::{Error, Result};

/// A choice of device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Place {
    /// The first GPU, if there is one that can be used and the recipe runs there; else the cpu.
    Auto,
    /// The embedded device.
    #[default]
    Cpu,
    /// A GPU, as `CUDA_VISIBLE_DEVICES` counts.
    Cuda(usize),
}

impl Place {
    /// A device there. Ranks that open the same GPU share it.
    ///
    /// # Errors
    ///
    /// A GPU, or a library for it, that is missing where one was asked for.
    pub fn open(self, recipe: &Recipe) -> Result<Box<dyn Device>> {
        Ok(match self.gpu(recipe)? {
            Some(gpu) => Box::new(gpu),
            None => Box::new(CpuDevice::new()),
        })
    }

    /// The GPU that is meant, if one is.
    ///
    /// # Errors
    ///
    /// As [`Place::open`].
    pub fn gpu(self, recipe: &Recipe) -> Result<Option<CudaDevice>> {
        let fits = (recipe.activation(), recipe.master()) == (Dtype::Bf16, Dtype::F32);
        match self {
            Place::Cuda(ordinal) => CudaDevice::new(ordinal).map(Some),
            Place::Auto if fits => Ok(CudaDevice::new(0).ok()),
            Place::Auto | Place::Cpu => Ok(None),
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Auto => f.write_str("auto"),
            Place::Cpu => f.write_str("cpu"),
            Place::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

impl FromStr for Place {
    type Err = Error;

    fn from_str(text: &str) -> Result<Place> {
        let ordinal = |text: &str| text.strip_prefix("cuda:").and_then(|ordinal| ordinal.parse().ok());
        match text {
            "auto" => Ok(Place::Auto),
            "cpu" => Ok(Place::Cpu),
            "cuda" => Ok(Place::Cuda(0)),
            _ => ordinal(text)
                .map(Place::Cuda)
                .ok_or_else(|| Error::Config(format!("there is no device `{text}`; one of: auto, cpu, cuda:N"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_others_are_refused() {
        for place in [Place::Auto, Place::Cpu, Place::Cuda(0), Place::Cuda(7)] {
            assert_eq!(place.to_string().parse::<Place>().unwrap(), place);
        }
        assert_eq!("cuda".parse::<Place>().unwrap(), Place::Cuda(0));
        for text in ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "CPU"] {
            assert!(text.parse::<Place>().unwrap_err().to_string().contains("one of: auto, cpu, cuda:N"));
        }
    }

    #[test]
    fn what_a_gpu_cannot_compute_runs_on_the_cpu() {
        let recipe: Recipe = "f64".parse().unwrap();
        assert_eq!(Place::Auto.open(&recipe).unwrap().name(), "cpu");
        assert_eq!(Place::Cpu.open(&recipe).unwrap().name(), "cpu");
        assert!(Place::Cuda(999).open(&recipe).is_err());
    }
}
