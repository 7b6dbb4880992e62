qeffect::schedule! {
    /// One-forward-one-backward with weight gradients filling the cool-down.
    pub zb_h1<P, M> for (2, 4), (4, 8);

    ranks: P;
    microbatches: M;
    stages: P;
    place: |s| s;                                   // stage → rank
    slots: |_| P;                                   // bound on live microbatches per rank
    expect bubble(1, 1, 1) <= P - 1 if M >= P;      // a contract, for costs of F, I and W

    rank |r| {
        let warm = min(P - 1 - r, M);
        for m in 0..warm { F(r, m); }
        for m in 0..M {
            if m + warm < M { F(r, m + warm); }
            I(r, m);
            if m >= r { W(r, m); }
        }
        for m in M - min(r, M)..M { W(r, m); }
    }
}
fn main() {}

// The mistake that the README shows, and what it says of it.
