//! A recomputation before its forward.

qeffect::schedule! {
    pub repeating<P, M> for (2, 4);

    ranks: P;
    microbatches: M;
    stages: P;
    place: |s| s;

    rank |r| {
        for m in 0..M { R(r, m); F(r, m); B(r, m); }
    }
}

fn main() {}
