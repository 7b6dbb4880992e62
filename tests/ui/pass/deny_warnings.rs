//! Private schedules, unused ones, and public ones raise no lint.

#![deny(warnings, missing_docs, unreachable_pub, unused, nonstandard_style, future_incompatible)]

mod inner {
    qeffect::schedule! {
        /// Visible in the crate.
        pub(crate) narrow<P, M> for (1, 2);

        ranks: P;
        microbatches: M;
        stages: P;
        place: |s| s;

        rank |r| {
            for m in 0..M { F(r, m); B(r, m); }
        }
    }
}

qeffect::schedule! {
    unused<Ranks, microbatches> for (1, 2), (2, 2);

    ranks: Ranks;
    microbatches: microbatches;
    stages: Ranks;
    place: |s| s;

    rank |r| {
        for m in 0..microbatches { F(r, m); B(r, m); }
    }
}

fn main() {
    assert!(inner::narrow::build(2, 3).is_ok());
}
