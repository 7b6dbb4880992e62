//! Ranks that wait for each other.

qeffect::schedule! {
    pub stuck<P, M> for (2, 4);

    ranks: P;
    microbatches: M;
    stages: P;
    place: |s| s;

    rank |r| {
        // The last rank wants the second microbatch first.
        if r == 0 {
            F(0, 0);
            B(0, 0);
            for m in 1..M { F(0, m); B(0, m); }
        } else {
            F(1, 1);
            F(1, 0);
            B(1, 0);
            B(1, 1);
            for m in 2..M { F(1, m); B(1, m); }
        }
    }
}

fn main() {}
