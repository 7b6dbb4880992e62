//! Calls with too few and too many arguments.

qeffect::schedule! {
    pub short<P, M> for (2, 4);

    ranks: P;
    microbatches: M;
    stages: P;
    place: |s| s;

    rank |r| {
        let shift = |a, b| a + b;
        for m in 0..M { F(m); }
        for m in 0..M { I(r, m, 0); }
        for m in 0..M { W(r, shift(m)); }
    }
}

fn main() {}
