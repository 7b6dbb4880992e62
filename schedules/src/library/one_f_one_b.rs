//! 1F1B: after a short warm-up, one forward and one backward in turn.

schedule! {
    /// 1F1B: after a short warm-up, one forward and one backward in turn.
    ///
    /// Narayanan et al., *PipeDream: Generalized Pipeline Parallelism for DNN Training*, 2019, with a
    /// flush at the end of the step. GPipe's bubble, but a rank holds at most P microbatches.
    ///
    /// | | |
    /// |---|---|
    /// | bubble | (P - 1)(f + i + w) |
    /// | live microbatches on rank r | min(P - r, M) |
    pub one_f_one_b<P, M> for (1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (2, 8), (4, 2), (4, 4), (4, 8);

    ranks: P;
    microbatches: M;
    stages: P;
    place: |s| s;
    slots: |r| min(P - r, M);
    expect bubble(1, 1, 1) == 3 * (P - 1);
    expect bubble(4, 5, 3) == 12 * (P - 1);
    expect peak == min(P, M);

    rank |r| {
        let warm = min(P - 1 - r, M);
        for m in 0..warm { F(r, m); }
        for m in 0..M {
            if m + warm < M { F(r, m + warm); }
            B(r, m);
        }
    }
}
