//! The contract on the cpu device: what may be run, what is refused, and that every way to run it gives the same bits.
//!
//! One binary, since what sessions are made of is compiled anew in each.

#[path = "../common/mod.rs"]
mod common;

mod bit_for_bit;
mod capture;
mod fast;
mod fits;
mod fuse;
mod gradients;
mod health;
mod measured;
mod not_finite;
mod orders;
mod placements;
mod recompute;
mod session;
mod state;
mod tags;
mod transports;
mod unsplit;
mod unused;
mod violations;
mod watched;
