//! GPipe: all forwards, then all backwards.

schedule! {
    /// GPipe: all forwards, then all backwards.
    ///
    /// Huang et al., *GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism*,
    /// 2019. The simplest schedule and the largest memory: every rank holds all M microbatches.
    ///
    /// | | |
    /// |---|---|
    /// | bubble | (P - 1)(f + i + w) |
    /// | live microbatches on rank r | M |
    pub gpipe<P, M> for (1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (2, 8), (4, 2), (4, 4), (4, 8);

    ranks: P;
    microbatches: M;
    stages: P;
    place: |s| s;
    slots: |_| M;
    expect bubble(1, 1, 1) == 3 * (P - 1);
    expect bubble(4, 5, 3) == 12 * (P - 1);
    expect peak == M;

    rank |r| {
        for m in 0..M { F(r, m); }
        for m in 0..M { B(r, m); }
    }
}
