//! No microbatch.

qeffect::schedule! {
    pub idle<P, M> for (2, 0);

    ranks: P;
    microbatches: M;
    stages: P;
    place: |s| s;

    rank |r| {
        for m in 0..M { F(r, m); B(r, m); }
    }
}

fn main() {}
