//! Schedules that the tests of this crate draw.
#![allow(dead_code)]

use qeffect_core::check::{self, Options};
use qeffect_core::lang;
use qeffect_core::plan::Checked;
use qeffect_view::report::plain;

/// Reads, unrolls and checks a schedule in the language of `schedule!`.
pub fn checked(text: &str, params: &[i64]) -> Checked {
    let (program, map) = lang::read("test.sched", text);
    let checked = program.and_then(|p| lang::interpret(&p, params)).and_then(|s| check::check(s, &Options::AT_START));
    checked.unwrap_or_else(|report| panic!("{}", plain(&report, &map)))
}

/// One stage per rank, deferred weight gradients.
pub const ZB_H1: &str = "
    pub zb_h1<P, M>;
    ranks: P; microbatches: M; stages: P; place: |s| s;
    rank |r| {
        let warm = min(P - 1 - r, M);
        for m in 0..warm { F(r, m); }
        for m in 0..M {
            if m + warm < M { F(r, m + warm); }
            I(r, m);
            if m >= r { W(r, m - r); }
        }
        for m in M - min(r, M)..M { W(r, m); }
    }
";

/// Two stages per rank in a loop, full backwards.
pub const LOOPED: &str = "
    pub looped<P, M>;
    ranks: P; microbatches: M; stages: 2 * P; place: |s| s % P;
    rank |r| {
        for v in 0..2 { for m in 0..M { F(v * P + r, m); } }
        for v in (0..2).rev() { for m in 0..M { B(v * P + r, m); } }
    }
";

/// A forward beside a split backward, and recomputation at the end.
pub const OVERLAPPED: &str = "
    pub overlapped<P, M>;
    ranks: P; microbatches: M; stages: P; place: |s| s;
    rank |r| {
        let warm = min(P - r, M);
        for m in 0..warm { F(r, m); }
        for m in 0..M {
            if m + warm < M { overlap { { F(r, m + warm); } { I(r, m); W(r, m); } } } else { R(r, m); B(r, m); }
        }
    }
";
