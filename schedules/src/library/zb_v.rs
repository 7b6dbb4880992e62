//! ZB-V: two stages per rank, placed in a V, without idle time between a rank's first and last action.

schedule! {
    /// ZB-V: two stages per rank, placed in a V, without idle time between a rank's first and last
    /// action when F, I and W cost the same.
    ///
    /// Qi et al., *Pipeline Parallelism with Controllable Memory*, 2024; the fixed program of
    /// PyTorch's `ScheduleZBVZeroBubble`. Rank r holds stages r and 2P - 1 - r, so the loss is
    /// computed where the first stage lives. The program is made for at least 2P - 1 microbatches;
    /// with fewer of them the surplus actions fall away.
    ///
    /// | | costs of one of the 2P stages |
    /// |---|---|
    /// | bubble | (P - 1)f if f = i = w and M >= 2P; no idle time inside a rank |
    /// | live (stage, microbatch) pairs on a rank | at most 2P |
    pub zb_v<P, M> for (1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (2, 8), (4, 4), (4, 8);

    ranks: P;
    microbatches: M;
    stages: 2 * P;
    place: |s| if s < P { s } else { 2 * P - 1 - s };
    slots: |_| min(2 * P, 2 * M);
    expect bubble(1, 1, 1) == P - 1 if M >= 2 * P;
    expect idle(1, 1, 1) == 0 if M >= 2 * P;

    rank |r| {
        // The stage on the way down the V and the one on the way up, and how far each has come.
        let down = r;
        let up = 2 * P - 1 - r;
        let total = max(2 * P - 1, M);
        let mut f_down = 0;
        let mut f_up = 0;
        let mut i_down = 0;
        let mut i_up = 0;

        // Warm-up.
        for _ in 0..2 * (P - r) - 1 {
            if f_down < M { F(down, f_down); }
            f_down += 1;
        }
        for _ in 0..r {
            if f_up < M { F(up, f_up); }
            f_up += 1;
            if f_down < M { F(down, f_down); }
            f_down += 1;
        }
        for _ in 0..P - r {
            if f_up < M { F(up, f_up); }
            f_up += 1;
            if i_up < M { I(up, i_up); W(up, i_up); }
            i_up += 1;
        }

        // Steady state.
        while f_up < f_down || f_down < total {
            if f_down < total {
                if f_down < M { F(down, f_down); }
                f_down += 1;
            }
            if i_down < M { I(down, i_down); W(down, i_down); }
            i_down += 1;
            if f_up < M { F(up, f_up); }
            f_up += 1;
            if i_up < M { I(up, i_up); W(up, i_up); }
            i_up += 1;
        }

        // Cool-down: the input gradients hurry, the weight gradients fill the gaps.
        let mut w_down = i_down;
        let mut w_up = i_up;
        for _ in 0..r {
            if i_down < M { I(down, i_down); }
            i_down += 1;
            if i_up < M { I(up, i_up); }
            i_up += 1;
        }
        for _ in 0..P - r {
            if i_down < M { I(down, i_down); }
            i_down += 1;
            if w_down < M { W(down, w_down); }
            w_down += 1;
        }
        for m in w_up..min(i_up, M) { W(up, m); }
        for m in w_down..min(i_down, M) { W(down, m); }
    }
}
