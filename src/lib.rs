//! FP8 pipeline-parallel training whose schedules are proved by the Rust compiler.
//!
//! A schedule says in which order each rank runs the forwards (F), input gradients (I) and weight
//! gradients (W) of its stages. [`schedule!`] checks it while your program is compiled: that no
//! tape and no work is used twice or lost, that the hidden scaling state of FP8 moves in order, that
//! no rank waits for another one for ever.
//!
//! ```
//! qeffect::schedule! {
//!     /// One forward, one backward in turn.
//!     pub ping_pong<P, M> for (2, 4);
//!
//!     ranks: P;
//!     microbatches: M;
//!     stages: P;
//!     place: |s| s;
//!     slots: |r| P - r;
//!
//!     rank |r| {
//!         let warm = min(P - 1 - r, M);
//!         for m in 0..warm { F(r, m); }
//!         for m in 0..M {
//!             if m + warm < M { F(r, m + warm); }
//!             I(r, m);
//!             W(r, m);
//!         }
//!     }
//! }
//!
//! let proved = ping_pong::<2, 4>();
//! assert_eq!(proved.plan.peaks[0].slots, 2);
//! ```
//!
//! | crate | what it holds |
//! |---|---|
//! | [`core`] | the contract, the schedule language, lowering, checker and simulator |
//! | [`schedules`] | GPipe, 1F1B, interleaved 1F1B, ZB-H1, ZB-V and evaluation, in `schedule!` |
//! | [`mod@train`] | whole training runs, as `qeffect train` does them |
//! | [`runtime`] | devices, ops, stages, driver, optimizer and training loop; [`model`] is what models are written with |

pub use qeffect_core as core;
pub use qeffect_runtime as runtime;
pub use qeffect_runtime::prelude as model;
pub use qeffect_schedules as schedules;
pub use qeffect_schedules::schedule;

#[cfg(feature = "train")]
pub mod train;

/// What a program that writes or drives schedules needs.
pub mod prelude {
    pub use qeffect_core::diag::Report;
    pub use qeffect_core::ids::{Microbatch, Rank, Stage};
    pub use qeffect_core::plan::{Checked, Proved};
    pub use qeffect_core::tape::{TapeKey, TapeRef, WorkRef};
    pub use qeffect_core::token::{Bwd, Fwd, Token};
    pub use qeffect_schedules::{by_name, library, schedule};
}

/// The programs of the README, compiled and run as tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
