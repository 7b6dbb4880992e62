//! A number where a condition is due, and the reverse.

qeffect::schedule! {
    pub mixed<P, M> for (2, 4);

    ranks: P;
    microbatches: M;
    stages: P;
    place: |s| s;

    rank |r| {
        for m in 0..M { if m { F(r, m); } }
        for m in 0..(M > 1) { I(r, m); }
        let late = r == 0;
        for m in 0..M { W(r, m + late); }
    }
}

fn main() {}
