//! A branch that needs the result of another one.

qeffect::schedule! {
    pub circular<P, M> for (1, 1);

    ranks: P;
    microbatches: M;
    stages: P;
    place: |s| s;

    rank |r| {
        overlap {
            { F(r, 0); }
            { I(r, 0); W(r, 0); }
        }
    }
}

fn main() {}
