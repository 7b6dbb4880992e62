//! Assignment to a variable that is not `mut`.

qeffect::schedule! {
    pub frozen<P, M> for (2, 4);

    ranks: P;
    microbatches: M;
    stages: P;
    place: |s| s;

    rank |r| {
        let next = 0;
        for m in 0..M {
            F(r, next);
            next += 1;
        }
    }
}

fn main() {}
