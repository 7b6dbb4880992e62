//! More live tapes than declared.

qeffect::schedule! {
    pub hoarding<P, M> for (2, 4);

    ranks: P;
    microbatches: M;
    stages: P;
    place: |s| s;
    tapes: |_| 2;

    rank |r| {
        for m in 0..M { F(r, m); }
        for m in 0..M { B(r, m); }
    }
}

fn main() {}
