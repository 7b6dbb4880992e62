//! A forward before the refresh of its stage.

qeffect::schedule! {
    pub stale<P, M> for (1, 2);

    ranks: P;
    microbatches: M;
    stages: P;
    place: |s| s;

    rank |r| {
        F(r, 0);
        refresh(r);
        F(r, 1);
        for m in 0..M { B(r, m); }
    }
}

fn main() {}
