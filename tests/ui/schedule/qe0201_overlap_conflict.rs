//! Two branches that roll the same state.

qeffect::schedule! {
    pub racing<P, M> for (1, 2);

    ranks: P;
    microbatches: M;
    stages: P;
    place: |s| s;

    rank |r| {
        overlap {
            { F(r, 0); }
            { F(r, 1); }
        }
        for m in 0..M { B(r, m); }
    }
}

fn main() {}
