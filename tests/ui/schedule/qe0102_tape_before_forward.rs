//! A backward before its forward.

qeffect::schedule! {
    pub hasty<P, M> for (2, 4);

    ranks: P;
    microbatches: M;
    stages: P;
    place: |s| s;

    rank |r| {
        for m in 0..M { B(r, m); F(r, m); }
    }
}

fn main() {}
