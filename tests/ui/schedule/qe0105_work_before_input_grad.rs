//! A weight gradient before its input gradient.

qeffect::schedule! {
    pub inverted<P, M> for (2, 4);

    ranks: P;
    microbatches: M;
    stages: P;
    place: |s| s;

    rank |r| {
        for m in 0..M { F(r, m); W(r, m); I(r, m); }
    }
}

fn main() {}
