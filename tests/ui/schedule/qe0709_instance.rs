//! Instances that do not fit the parameters.

qeffect::schedule! {
    pub lopsided<P, M> for (2), (4, 8), (4, 8);

    ranks: P;
    microbatches: M;
    stages: P;
    place: |s| s;

    rank |r| {
        for m in 0..M { F(r, m); B(r, m); }
    }
}

fn main() {}
