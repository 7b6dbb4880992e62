//! Actions on a rank that does not hold their stage.

qeffect::schedule! {
    pub swapped<P, M> for (2, 2);

    ranks: P;
    microbatches: M;
    stages: P;
    place: |s| s;

    rank |r| {
        for m in 0..M { F(P - 1 - r, m); }
        for m in 0..M { B(r, m); }
    }
}

fn main() {}
