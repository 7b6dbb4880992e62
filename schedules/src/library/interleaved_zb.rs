//! Interleaved zero bubble: interleaved 1F1B whose weight gradients wait, with a shorter warm-up.

schedule! {
    /// Interleaved zero bubble: interleaved 1F1B with a split backward, whose weight gradients lag, and
    /// half of the warm-up below the last rank.
    ///
    /// The idea of ZB-H1 (Qi et al., *Zero Bubble Pipeline Parallelism*, 2023) on V stages per rank, as
    /// in PyTorch's `ScheduleInterleavedZeroBubble`. Rounds are those of interleaved 1F1B; W of rank r
    /// lags r backwards behind.
    ///
    /// | | costs of one of the V·P stages |
    /// |---|---|
    /// | bubble, V = 2 | (P - 1)(f + i - w) if P divides M, M >= 2P and w <= min(f, i) |
    /// | live (stage, microbatch) pairs on a rank, V = 2 | at most 2P |
    pub interleaved_zb<P, M, V> for (2, 4, 2), (4, 8, 2);

    ranks: P;
    microbatches: M;
    stages: P * V;
    place: |s| s % P;
    slots: |_| min((V - 1) * size(0) + P, M * V);
    expect bubble(1, 1, 1) == P - 1 if V == 2 && M % P == 0 && M >= 2 * P;
    expect bubble(4, 5, 3) == 6 * (P - 1) if V == 2 && M % P == 0 && M >= 2 * P;

    // The first `longer` rounds have one microbatch more than the others.
    let rounds = max(1, M / P);
    let base = M / rounds;
    let longer = M % rounds;
    let split = longer * (base + 1) * V;

    // The k-th forward and the k-th backward of a rank: size of their round, first microbatch of
    // it, how far into it; and from these the turn through the V stages and the microbatch.
    let size = |k| if k < split { base + 1 } else { base };
    let first = |k| {
        if k < split {
            k / (size(k) * V) * size(k)
        } else {
            longer * (base + 1) + (k - split) / (size(k) * V) * size(k)
        }
    };
    let within = |k| if k < split { k % (size(k) * V) } else { (k - split) % (size(k) * V) };
    let turn = |k| within(k) / size(k);
    let microbatch = |k| first(k) + within(k) % size(k);

    rank |r| {
        let warm = min(P - 1 - r + (V - 1) * size(0), M * V);
        for k in 0..warm { F(turn(k) * P + r, microbatch(k)); }
        for k in 0..M * V {
            let ahead = k + warm;
            if ahead < M * V { F(turn(ahead) * P + r, microbatch(ahead)); }
            I((V - 1 - turn(k)) * P + r, microbatch(k));
            if k >= r { W((V - 1 - turn(k - r)) * P + r, microbatch(k - r)); }
        }
        for k in M * V - min(r, M * V)..M * V { W((V - 1 - turn(k)) * P + r, microbatch(k)); }
    }
}
