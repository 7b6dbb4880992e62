//! A schedule may stand in a function body, and one without parameters needs no instance list.

#![deny(warnings)]

fn main() {
    const M: usize = 7;

    qeffect::schedule! {
        local<P, M> for (2, 4);

        ranks: P;
        microbatches: M;
        stages: P;
        place: |s| s;
        expect peak <= P;

        rank |r| {
            let warm = min(P - 1 - r, M);
            for m in 0..warm { F(r, m); }
            for m in 0..M {
                if m + warm < M { F(r, m + warm); }
                I(r, m);
                W(r, m);
            }
        }
    }

    let checked = local::<2, 4>();
    assert_eq!(checked.plan.peaks[0].slots, 2);
    assert_eq!(checked.proved, qeffect::prelude::Proved::AtCompileTime);

    // The same interpreter and checker, now: the same schedule and plan.
    let built = local::build(2, 4).unwrap();
    assert_eq!(built.proved, qeffect::prelude::Proved::AtStart);
    assert_eq!(built.schedule, checked.schedule);
    assert_eq!(built.plan, checked.plan);
    assert_eq!(M, 7);
}
