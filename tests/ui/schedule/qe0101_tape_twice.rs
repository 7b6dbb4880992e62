//! Two input gradients of one forward.

qeffect::schedule! {
    pub twice<P, M> for (2, 4), (4, 8);

    ranks: P;
    microbatches: M;
    stages: P;
    place: |s| s;

    rank |r| {
        for m in 0..M { F(r, m); }
        for m in 0..M {
            I(r, m);
            if m > 0 { I(r, m - 1); }
            W(r, m);
        }
    }
}

fn main() {}
