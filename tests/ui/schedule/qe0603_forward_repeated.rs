//! A forward that runs twice.

qeffect::schedule! {
    pub eager<P, M> for (2, 4);

    ranks: P;
    microbatches: M;
    stages: P;
    place: |s| s;

    rank |r| {
        F(r, 0);
        for m in 0..M { F(r, m); B(r, m); }
    }
}

fn main() {}
