//! A loop that does not end.

qeffect::schedule! {
    pub endless<P, M> for (2, 4);

    ranks: P;
    microbatches: M;
    stages: P;
    place: |s| s;

    rank |r| {
        let mut m = 0;
        while m < M { F(r, m); }
    }
}

fn main() {}
