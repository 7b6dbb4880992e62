//! A backward in a forward-only schedule.

qeffect::schedule! {
    pub curious<P, M> for (2, 4);

    eval;
    ranks: P;
    microbatches: M;
    stages: P;
    place: |s| s;

    rank |r| {
        for m in 0..M { F(r, m); B(r, m); }
    }
}

fn main() {}
