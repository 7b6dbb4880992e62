//! Contracts that do not hold.

qeffect::schedule! {
    pub hopeful<P, M> for (2, 4), (4, 8);

    ranks: P;
    microbatches: M;
    stages: P;
    place: |s| s;
    expect bubble(1, 1, 1) <= P - 1;
    expect peak <= P if M > P;

    rank |r| {
        for m in 0..M { F(r, m); }
        for m in 0..M { B(r, m); }
    }
}

fn main() {}
