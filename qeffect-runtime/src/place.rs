//! Where a run computes, by name: `auto`, `cpu`, or `cuda:N`.

use core::fmt;
use core::str::FromStr;

use qeffect_core::dtype::Dtype;
use qeffect_core::recipe::Recipe;
use qeffect_kernels::Error as KernelError;
use qeffect_kernels::probe::{self, Library};

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

/// What a place has come to.
#[derive(Debug)]
#[must_use]
pub struct Choice {
    /// The GPU; none: the cpu.
    pub gpu: Option<CudaDevice>,
    /// Why a GPU that is there was not taken, where it was left open which device is.
    pub passed_over: Option<Error>,
}

impl Choice {
    const CPU: Choice = Choice { gpu: None, passed_over: None };

    /// The device.
    pub fn device(self) -> Box<dyn Device> {
        match self.gpu {
            Some(gpu) => Box::new(gpu),
            None => Box::new(CpuDevice::new()),
        }
    }
}

impl Place {
    /// Opens the GPU that is meant, if one is. Ranks that open the same GPU share it.
    ///
    /// # Errors
    ///
    /// A GPU, or a library for it, that is missing where one was asked for.
    pub fn choose(self, recipe: &Recipe) -> Result<Choice> {
        let fits = (recipe.activation(), recipe.master()) == (Dtype::Bf16, Dtype::F32);
        match self {
            Place::Cuda(ordinal) => Ok(Choice { gpu: Some(CudaDevice::new(ordinal)?), ..Choice::CPU }),
            Place::Auto if fits => {
                let (gpu, passed_over) = first(probe::gpus().map(|gpus| gpus.len()), || CudaDevice::new(0));
                Ok(Choice { gpu, passed_over })
            }
            Place::Auto | Place::Cpu => Ok(Choice::CPU),
        }
    }
}

/// The first GPU, if it opens; else why not, unless there is none at all.
fn first<T>(gpus: qeffect_kernels::Result<usize>, open: impl FnOnce() -> Result<T>) -> (Option<T>, Option<Error>) {
    match gpus {
        Ok(0) | Err(KernelError::Library { library: Library::Driver, .. }) => (None, None),
        Ok(_) => match open() {
            Ok(gpu) => (Some(gpu), None),
            Err(error) => (None, Some(error)),
        },
        // A driver that does not even count its GPUs.
        Err(error) => (None, Some(error.into())),
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
        for place in [Place::Auto, Place::Cpu] {
            let choice = place.choose(&recipe).unwrap();
            assert!(choice.passed_over.is_none(), "no GPU computes it");
            assert_eq!(choice.device().name(), "cpu");
        }
        assert!(Place::Cuda(999).choose(&recipe).is_err());
    }

    #[test]
    fn a_gpu_that_is_there_is_passed_over_with_a_reason() {
        let missing = |library| KernelError::Library { library, found: "not found".into(), advice: "get it".into() };
        let never = || -> Result<()> { panic!("there is nothing to open") };
        assert!(matches!(first(Ok(0), never), (None, None)));
        assert!(matches!(first(Err(missing(Library::Driver)), never), (None, None)));
        assert!(matches!(first(Ok(1), || Ok(())), (Some(()), None)));
        for library in [Library::Nvrtc, Library::CublasLt] {
            let (gpu, why) = first::<()>(Ok(1), || Err(missing(library).into()));
            let why = why.unwrap().to_string();
            assert!(gpu.is_none() && why.contains(&library.to_string()) && why.contains("get it"), "{why}");
        }
        let status = KernelError::Cublas { call: "cuInit", status: "a broken driver".into() };
        let (gpu, why) = first(Err(status), never);
        assert!(gpu.is_none() && why.unwrap().to_string().contains("a broken driver"));
    }
}
