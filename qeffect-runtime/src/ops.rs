//! The ops of a transformer: what each computes forward, what it retains, and its two backward halves.

pub mod add;
pub mod attention;
pub mod cross_entropy;
pub mod dropout;
pub mod embedding;
pub mod gelu;
pub mod layer_norm;
pub mod linear;
pub mod rms_norm;
pub mod rotary;
pub mod silu;
