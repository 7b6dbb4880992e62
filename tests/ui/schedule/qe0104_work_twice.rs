//! Two weight gradients of one input gradient.

qeffect::schedule! {
    pub greedy<P, M> for (2, 4);

    ranks: P;
    microbatches: M;
    stages: P;
    place: |s| s;

    rank |r| {
        for m in 0..M { F(r, m); }
        for m in 0..M {
            I(r, m);
            W(r, m);
        }
        W(r, M - 1);
    }
}

fn main() {}
