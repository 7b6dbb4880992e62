//! Kernels on a GPU, against references on the host. Without a GPU every test says that it was skipped.
//!
//! Where a kernel's operations and their order are those of the reference, the bits must be equal. Elsewhere a float64
//! reference and a bound are stated.

mod attention;
mod bench;
mod cast;
mod elementwise;
mod embedding;
mod gemm;
mod loss;
mod norm;
mod optimizer;
mod rig;
mod scale;
mod step;
