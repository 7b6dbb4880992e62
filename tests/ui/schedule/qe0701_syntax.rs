//! Every broken statement is reported, each at its own token.

qeffect::schedule! {
    pub broken<P, M> for (2, 4);

    ranks: P;
    microbatches: M;
    stages: P;
    place: |s| s;

    rank |r| {
        for m in 0..M { F(r, m) I(r, m); }
        let warm = ;
        for m in 0..M { W(r m); }
    }
}

fn main() {}
