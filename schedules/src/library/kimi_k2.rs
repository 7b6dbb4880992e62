//! Kimi K2's interleaved 1F1B: one more forward in flight, so that each forward runs beside a backward.

schedule! {
    /// Interleaved 1F1B with one more warm-up forward and the weight gradient taken out of the backward.
    ///
    /// Moonshot AI, *Kimi K2: Open Agentic Intelligence*, 2025. With one microbatch more in flight, the
    /// forward and the input gradient of a turn belong to different microbatches: they may run at once,
    /// so that the expert exchange of one hides behind the work of the other. The weight gradient comes
    /// right after, beside the messages of that turn. Rounds are those of `interleaved_1f1b`.
    ///
    /// | | costs of one of the V·P stages |
    /// |---|---|
    /// | bubble | (P - 1)(f + i) if P divides M, w <= min(f, i) and a pair costs f + i |
    /// | live (stage, microbatch) pairs on rank r | min(2(P - 1 - r) + (V - 1)P + 2, M·V): one more than `interleaved_1f1b` |
    pub kimi_k2<P, M, V> for (2, 4, 2), (4, 8, 2);

    ranks: P;
    microbatches: M;
    stages: P * V;
    place: |s| s % P;
    slots: |r| min(2 * (P - 1 - r) + (V - 1) * size(0) + 2, M * V);
    expect bubble(1, 1, 1) == 2 * (P - 1) if M % P == 0;
    expect bubble(4, 5, 3) == 9 * (P - 1) if M % P == 0;

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
        let warm = min(2 * (P - 1 - r) + (V - 1) * size(0) + 1, M * V);
        for k in 0..warm { F(turn(k) * P + r, microbatch(k)); }
        for k in 0..M * V {
            let ahead = k + warm;
            let back = (V - 1 - turn(k)) * P + r;
            if ahead < M * V {
                overlap { { F(turn(ahead) * P + r, microbatch(ahead)); } { I(back, microbatch(k)); } }
            } else {
                I(back, microbatch(k));
            }
            W(back, microbatch(k));
        }
    }
}
