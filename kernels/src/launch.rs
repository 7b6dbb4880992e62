//! Typed launches: methods of [`Kernels`](crate::Kernels), grouped as their sources are.
//!
//! Each puts work into a stream and returns; sizes are checked before. What a kernel computes, and in which order it adds,
//! stands in its source.

#![expect(clippy::too_many_arguments, reason = "a launch takes what its kernel takes")]

pub mod attention;
pub mod cast;
pub mod elementwise;
pub mod embedding;
pub mod loss;
pub mod norm;
pub mod optimizer;
pub mod scale;
pub mod step;
