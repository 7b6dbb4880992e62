//! ZB-H1: 1F1B whose weight gradients wait, so that they fill the cool-down.

schedule! {
    /// ZB-H1: 1F1B whose weight gradients wait, so that they fill the cool-down.
    ///
    /// Qi et al., *Zero Bubble Pipeline Parallelism*, 2023. The backward is split into I and W; W of
    /// rank r lags r microbatches behind. A third of 1F1B's bubble for equal costs, the same memory.
    ///
    /// | | |
    /// |---|---|
    /// | bubble | (P - 1)(f + i - w) if w <= min(f, i) and M >= P; (P - 1)(f + i - min(f, i, w)) if M >= 2P |
    /// | live on rank r | at most P - r tapes and r works: P microbatches |
    pub zb_h1<P, M> for (1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (2, 8), (4, 2), (4, 4), (4, 8);

    ranks: P;
    microbatches: M;
    stages: P;
    place: |s| s;
    slots: |_| P;
    expect bubble(1, 1, 1) == P - 1 if M >= P;
    expect bubble(10, 12, 7) == 15 * (P - 1) if M >= P;
    expect peak == min(P, M);

    rank |r| {
        let warm = min(P - 1 - r, M);
        for m in 0..warm { F(r, m); }
        for m in 0..M {
            if m + warm < M { F(r, m + warm); }
            I(r, m);
            if m >= r { W(r, m - r); }
        }
        for m in M - min(r, M)..M { W(r, m); }
    }
}
