//! A second refresh in one step.

qeffect::schedule! {
    pub restless<P, M> for (1, 2);

    ranks: P;
    microbatches: M;
    stages: P;
    place: |s| s;

    rank |r| {
        refresh(r);
        for m in 0..M {
            F(r, m);
            refresh(r);
            B(r, m);
        }
    }
}

fn main() {}
