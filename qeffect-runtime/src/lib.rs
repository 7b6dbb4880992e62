//! Devices, ops, driver and training loop of QEffect.

pub mod kernels;
