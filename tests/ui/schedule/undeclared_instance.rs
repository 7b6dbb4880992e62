//! An instance that was not declared.

qeffect::schedule! {
    known<P, M> for (2, 4), (4, 8);

    ranks: P;
    microbatches: M;
    stages: P;
    place: |s| s;

    rank |r| {
        for m in 0..M { F(r, m); B(r, m); }
    }
}

fn main() {
    let _ = known::<2, 4>();
    let _ = known::<3, 5>();
}
