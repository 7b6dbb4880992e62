//! Devices, ops, driver and training loop of QEffect.
//!
//! From the bottom up: `kernels` compute on slices; a [`device`] owns buffers and carries out [`cmd`]s; a [`cx`] gives
//! ops leased activations, commands and, with a token, the state cells; a [`stage`] is F, I and W of a part of the model;
//! a [`shard`] is one rank's stages with all they own; a [`rank`] walks its program over the shard, exchanging messages
//! through a [`transport`]; a [`session`] runs all ranks.

pub mod act;
pub mod admit;
pub mod built;
pub mod capture;
pub mod cmd;
pub mod cpu;
pub mod cuda;
pub mod cx;
pub mod data;
pub mod device;
pub mod error;
mod executor;
pub mod fast;
pub mod fuse;
pub mod gpt;
pub mod gradients;
pub mod groups;
pub mod kernels;
mod layers;
pub mod llama;
pub mod op;
pub mod ops;
pub mod optim;
pub mod params;
mod pipeline;
pub mod place;
pub mod pool;
pub mod prelude;
pub mod profile;
pub mod rank;
pub mod recompute;
pub mod retained;
pub mod rng;
pub mod sample;
pub mod session;
pub mod shard;
pub mod stage;
pub mod state;
mod timed;
pub mod transport;
pub mod value;
mod wire;
mod worker;
