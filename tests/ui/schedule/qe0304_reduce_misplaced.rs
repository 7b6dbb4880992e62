//! A reduction before the last gradient.

qeffect::schedule! {
    pub premature<P, M> for (1, 2);

    ranks: P;
    microbatches: M;
    stages: P;
    place: |s| s;

    rank |r| {
        for m in 0..M { F(r, m); I(r, m); }
        W(r, 0);
        reduce(r);
        W(r, 1);
    }
}

fn main() {}
