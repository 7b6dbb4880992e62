//! A forward without a backward.

qeffect::schedule! {
    pub forgetful<P, M> for (2, 4);

    ranks: P;
    microbatches: M;
    stages: P;
    place: |s| s;

    rank |r| {
        for m in 0..M { F(r, m); }
        for m in 0..M - 1 { B(r, m); }
    }
}

fn main() {}
