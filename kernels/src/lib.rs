//! CUDA kernels of QEffect: their sources, their compilation, and typed launches.
//!
//! Nothing here needs CUDA to be built, or to be loaded: libraries are looked for at run time ([`probe`]), and what is
//! missing is an error that says what to do. Sources are embedded ([`source`]), compiled by NVRTC for the GPU that is
//! found ([`compile`]) and kept on disk ([`cache`]), so a second start compiles nothing.
//!
//! Every kernel gives the same bits on every launch: sums of floats have a fixed order, and atomics are integer sums,
//! maxima and ors only. Products and sums are not contracted where the cpu device does not contract them, subnormal numbers are kept.

pub mod arch;
mod bindings;
pub mod cache;
pub mod compile;
pub mod error;
pub mod event;
pub mod gemm;
pub mod graph;
pub mod launch;
pub mod memory;
pub mod module;
pub mod nvrtc;
pub mod nvtx;
pub mod pinned;
pub mod probe;
mod quiet;
pub mod source;

pub use arch::Arch;
pub use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError};
pub use error::{Error, Result};
pub use memory::{Buffer, Span};
pub use module::Kernels;
