//! Forward-only schedules, for evaluation: nothing is retained and no state is rolled.

schedule! {
    /// Forward only, V stages per rank placed in a loop: for models trained with [`gpipe`](crate::gpipe()),
    /// [`one_f_one_b`](crate::one_f_one_b()), [`zb_h1`](crate::zb_h1()) (V = 1) or
    /// [`interleaved_1f1b`](crate::interleaved_1f1b()).
    ///
    /// | | costs of one of the V·P stages |
    /// |---|---|
    /// | bubble | (P - 1)f if V = 1 or P divides M |
    pub eval_loop<P, M, V> for
        (1, 2, 1), (1, 4, 1), (1, 8, 1), (2, 2, 1), (2, 4, 1), (2, 8, 1), (4, 2, 1), (4, 4, 1), (4, 8, 1),
        (1, 2, 2), (1, 4, 2), (1, 8, 2), (2, 2, 2), (2, 4, 2), (2, 8, 2), (4, 4, 2), (4, 8, 2);

    eval;
    ranks: P;
    microbatches: M;
    stages: P * V;
    place: |s| s % P;
    expect bubble(1, 1, 1) == P - 1 if V == 1 || M % P == 0;

    rank |r| {
        // In rounds of up to P microbatches, as in interleaved 1F1B.
        for first in (0..M).step_by(P) {
            for turn in 0..V {
                for m in first..min(first + P, M) { F(turn * P + r, m); }
            }
        }
    }
}

schedule! {
    /// Forward only, two stages per rank placed in a V: for models trained with
    /// [`zb_v`](crate::zb_v()).
    ///
    /// | | costs of one of the 2P stages |
    /// |---|---|
    /// | bubble | 2(P - 1)f if M >= 2P - 1: rank P - 1 starts after P - 1 stages and ends before as many |
    pub eval_v<P, M> for (1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (2, 8), (4, 4), (4, 8);

    eval;
    ranks: P;
    microbatches: M;
    stages: 2 * P;
    place: |s| if s < P { s } else { 2 * P - 1 - s };
    expect bubble(1, 1, 1) == 2 * (P - 1) if M >= 2 * P - 1;

    rank |r| {
        let warm = min(2 * (P - r) - 1, M);
        for m in 0..warm { F(r, m); }
        for m in 0..M {
            F(2 * P - 1 - r, m);
            if m + warm < M { F(r, m + warm); }
        }
    }
}
