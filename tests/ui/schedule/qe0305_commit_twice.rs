//! Two commits in one step.

qeffect::schedule! {
    pub insistent<P, M> for (1, 2);

    ranks: P;
    microbatches: M;
    stages: P;
    place: |s| s;

    rank |r| {
        for m in 0..M { F(r, m); B(r, m); }
        commit;
        commit;
    }
}

fn main() {}
