//! A V on one channel per pair of ranks: a gradient would be taken for an activation of its shape.

qeffect::schedule! {
    pub vee<M> for 2;

    ranks: 2;
    microbatches: M;
    stages: 4;
    place: |s| min(s, 3 - s);
    transport: rank_edge;

    rank |r| {
        if r == 0 {
            for m in 0..M { F(0, m); }
            for m in 0..M { F(3, m); B(3, m); }
            for m in 0..M { B(0, m); }
        } else {
            for m in 0..M { F(1, m); F(2, m); B(2, m); }
            for m in 0..M { B(1, m); }
        }
    }
}

fn main() {}
