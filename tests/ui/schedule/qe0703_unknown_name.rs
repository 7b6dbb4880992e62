//! A name that nobody declared.

qeffect::schedule! {
    pub misspelt<P, M> for (2, 4);

    ranks: P;
    microbatches: M;
    stages: P;
    place: |s| s;

    rank |r| {
        let warm = min(P - 1 - r, M);
        for m in 0..wram { F(r, m); }
        for m in 0..M { I(r, mm); }
        for m in 0..count(M) { W(r, m); }
    }
}

fn main() {}
