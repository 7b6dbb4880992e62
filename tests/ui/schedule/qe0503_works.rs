//! More pending works than declared.

qeffect::schedule! {
    pub procrastinating<P, M> for (2, 4);

    ranks: P;
    microbatches: M;
    stages: P;
    place: |s| s;
    works: |_| 2;

    rank |r| {
        for m in 0..M { F(r, m); I(r, m); }
        for m in 0..M { W(r, m); }
    }
}

fn main() {}
