//! ZB-H2: zero bubble with twice the warm-up of ZB-H1, and its memory.

schedule! {
    /// ZB-H2: enough forwards in flight that no rank waits inside its own program.
    ///
    /// Qi et al., *Zero Bubble Pipeline Parallelism*, 2023. Ranks start and end as a parallelogram: the
    /// idle time inside a rank is what it makes small, and an optimizer that waits for all ranks pays
    /// for the slanted ends.
    ///
    /// | | |
    /// |---|---|
    /// | bubble | (P - 1) f or more: the slanted ends count there |
    /// | idle inside a rank | max(0, (P - 1)(f + i - 2w)) if w <= min(f, i) and M >= 2P |
    /// | live on rank r | at most 2(P - r) - 1 tapes and 2r works: 2P - 1 microbatches |
    pub zb_h2<P, M> for (2, 4), (4, 8);

    ranks: P;
    microbatches: M;
    stages: P;
    place: |s| s;
    slots: |_| min(2 * P - 1, M);
    expect idle(1, 1, 1) == 0 if M >= 2 * P;
    expect idle(4, 5, 3) == 3 * (P - 1) if M >= 2 * P;

    rank |r| {
        let warm = min(2 * (P - 1 - r), M);
        let lag = 2 * r;
        for m in 0..warm { F(r, m); }
        for m in 0..M {
            if m + warm < M { F(r, m + warm); }
            I(r, m);
            if m >= lag { W(r, m - lag); }
        }
        for m in M - min(lag, M)..M { W(r, m); }
    }
}
