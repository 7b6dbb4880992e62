//! Division by zero, with the rank for which it happens.

qeffect::schedule! {
    pub divided<P, M> for (2, 4), (4, 8);

    ranks: P;
    microbatches: M;
    stages: P;
    place: |s| s;

    rank |r| {
        let share = M / r;
        for m in 0..share { F(r, m); }
    }
}

fn main() {}
