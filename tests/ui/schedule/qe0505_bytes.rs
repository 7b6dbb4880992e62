//! More bytes than the budget allows.

qeffect::schedule! {
    pub hoarding<P, M> for (2, 4);

    ranks: P;
    microbatches: M;
    stages: P;
    place: |s| s;
    bytes(tape = |s| 4096 - 1024 * s, work = |_| 1024, budget = |_| 10000);

    rank |r| {
        for m in 0..M { F(r, m); }
        for m in 0..M { B(r, m); }
    }
}

fn main() {}
