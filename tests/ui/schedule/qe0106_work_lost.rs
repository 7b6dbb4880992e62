//! Weight gradients that were put off and forgotten.

qeffect::schedule! {
    pub deferred<P, M> for (2, 4);

    ranks: P;
    microbatches: M;
    stages: P;
    place: |s| s;

    rank |r| {
        for m in 0..M {
            F(r, m);
            I(r, m);
            if m >= r { W(r, m - r); }
        }
    }
}

fn main() {}
