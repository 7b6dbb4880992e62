//! Three independent faults: a tape twice, a work lost, a work twice.

qeffect::schedule! {
    pub three<P, M> for (2, 4), (4, 8);

    ranks: P;
    microbatches: M;
    stages: P;
    place: |s| s;

    rank |r| {
        for m in 0..M { F(r, m); }
        for m in 0..M {
            I(r, m);
            if m == 1 { I(r, m); }
            if m != 2 { W(r, m); }
            if m == 3 { W(r, m); }
        }
    }
}

fn main() {
    // The items are there nevertheless, so nothing else is reported.
    let _ = (three::<2, 4>(), three::<4, 8>(), three::build(1, 2));
}
