//! Interleaved 1F1B: V stages per rank, so that the pipeline fills V times faster.

schedule! {
    /// Interleaved 1F1B: V stages per rank, so that the pipeline fills V times faster.
    ///
    /// Narayanan et al., *Efficient Large-Scale Language Model Training on GPU Clusters Using
    /// Megatron-LM*, 2021. Microbatches travel in rounds of P, and a rank runs its V stages one after
    /// the other for each round. Where P does not divide M, the rounds are as even as can be and no
    /// shorter than P (PyTorch's rule, without its limits), at the price of a larger bubble.
    ///
    /// | | costs of one of the V·P stages |
    /// |---|---|
    /// | bubble | (P - 1)(f + i + w) if P divides M: 1/V of 1F1B's for the same model |
    /// | live (stage, microbatch) pairs on rank r | min(2(P - 1 - r) + (V - 1)P + 1, M·V) |
    pub interleaved_1f1b<P, M, V> for
        (1, 2, 2), (1, 4, 2), (1, 8, 2), (2, 2, 2), (2, 4, 2), (2, 8, 2), (4, 4, 2), (4, 8, 2);

    ranks: P;
    microbatches: M;
    stages: P * V;
    place: |s| s % P;
    slots: |r| min(2 * (P - 1 - r) + (V - 1) * size(0) + 1, M * V);
    expect bubble(1, 1, 1) == 3 * (P - 1) if M % P == 0;
    expect bubble(4, 5, 3) == 12 * (P - 1) if M % P == 0;

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
        let warm = min(2 * (P - 1 - r) + (V - 1) * size(0), M * V);
        for k in 0..warm { F(turn(k) * P + r, microbatch(k)); }
        for k in 0..M * V {
            let ahead = k + warm;
            if ahead < M * V { F(turn(ahead) * P + r, microbatch(ahead)); }
            B((V - 1 - turn(k)) * P + r, microbatch(k));
        }
    }
}
