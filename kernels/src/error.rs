//! What can go wrong, as values.

use std::path::PathBuf;

use crate::arch::Arch;
use crate::probe::Library;

/// A failure of a library, a compilation, a launch, or a shape that a kernel does not take.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A library is not there, or is not usable.
    #[error("{library}: {found}\nhelp: {advice}")]
    Library {
        /// The library.
        library: Library,
        /// What was found.
        found: String,
        /// What to do.
        advice: String,
    },
    /// A function that the library should have.
    #[error("{library} lacks the function `{symbol}`: {message}")]
    Symbol {
        /// The library.
        library: Library,
        /// The function.
        symbol: &'static str,
        /// What the loader said.
        message: String,
    },
    /// A call into NVRTC failed.
    #[error("NVRTC: {call} failed: {message}")]
    Nvrtc {
        /// The call.
        call: &'static str,
        /// Its error.
        message: String,
    },
    /// A source does not compile: a bug, or options that this NVRTC does not know.
    #[error("{source_name} does not compile for {arch}:\n{log}")]
    Compile {
        /// The file.
        source_name: &'static str,
        /// The architecture.
        arch: Arch,
        /// What the compiler said.
        log: String,
    },
    /// The cache of compiled kernels cannot be used.
    #[error("cache of compiled kernels at {}: {source}", path.display())]
    Cache {
        /// The file or folder.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The GPU has no FP8.
    #[error("GPU {ordinal} ({name}) has compute capability {major}.{minor}; FP8 needs at least 8.9")]
    Capability {
        /// Number of the GPU.
        ordinal: usize,
        /// Its name.
        name: String,
        /// Its compute capability.
        major: u32,
        /// Its compute capability.
        minor: u32,
    },
    /// A call into the driver failed.
    #[error("{call}: {source}")]
    Driver {
        /// What was being done.
        call: &'static str,
        /// The driver's error.
        source: cudarc::driver::DriverError,
    },
    /// A kernel that the module should hold.
    #[error("{source_name} holds no kernel `{kernel}`: {source}")]
    Kernel {
        /// The file.
        source_name: &'static str,
        /// The kernel.
        kernel: &'static str,
        /// The driver's error.
        source: cudarc::driver::DriverError,
    },
    /// A call into cuBLASLt failed.
    #[error("cuBLASLt: {call} failed: {status}")]
    Cublas {
        /// The call.
        call: &'static str,
        /// Its status.
        status: String,
    },
    /// A matrix product that the library does not take, or operands that are not those of the product.
    #[error("{product}: {reason}")]
    Product {
        /// The product.
        product: String,
        /// Why.
        reason: String,
    },
    /// A launch that does not fit its kernel: a bug.
    #[error("{kernel}: {found}")]
    Argument {
        /// The kernel.
        kernel: &'static str,
        /// What does not fit.
        found: String,
    },
    /// A buffer at an address that the kernel cannot read in whole groups.
    #[error("{kernel}: `{operand}` lies at {address:#x}, which is no multiple of {alignment}")]
    Alignment {
        /// The kernel.
        kernel: &'static str,
        /// The operand, by the name of its parameter.
        operand: &'static str,
        /// Its address.
        address: u64,
        /// The alignment that it needs.
        alignment: usize,
    },
    /// A buffer does not fit the shape.
    #[error("{kernel}: `{operand}` has {found} elements, the shape needs {expected}")]
    Length {
        /// The kernel.
        kernel: &'static str,
        /// The operand, by the name of its parameter.
        operand: &'static str,
        /// Elements that the shape asks for.
        expected: usize,
        /// Elements that the buffer has.
        found: usize,
    },
    /// A dimension that the kernel does not take.
    #[error("{kernel}: `{dimension}` is {found}; {rule}")]
    Dimension {
        /// The kernel.
        kernel: &'static str,
        /// The dimension, by the name of its parameter.
        dimension: &'static str,
        /// Its value.
        found: usize,
        /// What it must be.
        rule: &'static str,
    },
}

/// Result of everything here.
pub type Result<T = ()> = std::result::Result<T, Error>;
