//! More live microbatches than declared.

qeffect::schedule! {
    pub roomy<P, M> for (2, 4);

    ranks: P;
    microbatches: M;
    stages: P;
    place: |s| s;
    slots: |r| P - r;

    rank |r| {
        for m in 0..M { F(r, m); }
        for m in 0..M { B(r, m); }
    }
}

fn main() {}
