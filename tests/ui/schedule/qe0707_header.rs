//! Header fields that are missing, repeated, misspelt or out of range.

qeffect::schedule! {
    pub headless<P, M> for (2, 4);

    ranks: P;
    ranks: P;
    microbatchs: M;
    stages: P;
    transport: fast;

    rank |r| {
        for m in 0..M { F(r, m); }
    }
}

fn main() {}
