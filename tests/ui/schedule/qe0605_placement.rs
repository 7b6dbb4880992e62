//! A rank without a stage.

qeffect::schedule! {
    pub crowded<P, M> for (2, 4);

    ranks: P;
    microbatches: M;
    stages: P;
    place: |s| 0;

    rank |r| {
        if r == 0 {
            for m in 0..M { F(0, m); F(1, m); B(1, m); B(0, m); }
        }
    }
}

fn main() {}
