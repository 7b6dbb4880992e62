//! A microbatch that no stage runs.

qeffect::schedule! {
    pub lazy<P, M> for (2, 4);

    ranks: P;
    microbatches: M;
    stages: P;
    place: |s| s;

    rank |r| {
        for m in 1..M { F(r, m); B(r, m); }
    }
}

fn main() {}
