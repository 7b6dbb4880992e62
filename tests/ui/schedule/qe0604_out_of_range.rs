//! A microbatch that does not exist.

qeffect::schedule! {
    pub beyond<P, M> for (2, 4);

    ranks: P;
    microbatches: M;
    stages: P;
    place: |s| s;

    rank |r| {
        for m in 0..=M { F(r, m); B(r, m); }
    }
}

fn main() {}
