//! Pipeline schedules and the macro `schedule!`, in whose language they are written and checked when this crate is
//! compiled: all but V-Half and V-Min, which are made from a repeated block and checked when they are built.
//!
//! ```
//! use qeffect_schedules::zb_h1;
//!
//! let proved = zb_h1::<4, 8>(); // checked by the compiler
//! assert_eq!(proved.plan.peaks[0].slots, 4);
//! let other = zb_h1::build(3, 12)?; // checked now, by the same interpreter and checker
//! assert_eq!(other.schedule.ranks, 3);
//! # Ok::<(), qeffect_core::diag::Report>(())
//! ```

/// Writes a pipeline schedule, checked by the compiler for every declared instance.
///
/// ```
/// qeffect_schedules::schedule! {
///     /// All forwards, then all backwards.
///     pub fill_drain<P, M> for (2, 4);
///
///     ranks: P;
///     microbatches: M;
///     stages: P;
///     place: |s| s;
///
///     rank |r| {
///         for m in 0..M { F(r, m); }
///         for m in 0..M { I(r, m); W(r, m); }
///     }
/// }
///
/// assert_eq!(fill_drain::<2, 4>().schedule.items.len(), 24);
/// ```
///
/// It emits a function and a module of the schedule's name: `fill_drain::<2, 4>()` is the checked
/// schedule as static data; `fill_drain::build(p, m)` interprets and checks it at run time for any
/// values; `fill_drain::find(p, m)` looks among the declared instances.
#[macro_export]
macro_rules! schedule {
    ($($program:tt)*) => {
        $crate::__private::__schedule! { $crate $($program)* }
    };
}

/// What expansions reach through `$crate`. Not for use by hand.
#[doc(hidden)]
pub mod __private {
    pub use qeffect_core as core;
    pub use qeffect_macros::__schedule;
}

mod library;

pub use library::dualpipe_v::dualpipe_v;
pub use library::eval::{eval_loop, eval_v};
pub use library::gpipe::gpipe;
pub use library::interleaved_1f1b::interleaved_1f1b;
pub use library::interleaved_zb::interleaved_zb;
pub use library::kimi_k2::kimi_k2;
pub use library::looped_bfs::looped_bfs;
pub use library::one_f_one_b::one_f_one_b;
pub use library::zb_h1::zb_h1;
pub use library::zb_h2::zb_h2;
pub use library::zb_v::zb_v;
pub use library::{Entry, by_name, further, library, v_half, v_min};
