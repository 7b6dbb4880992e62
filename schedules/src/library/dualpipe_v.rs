//! DualPipeV: a V whose forwards run beside the backwards of the other stage.

schedule! {
    /// DualPipeV: two stages per rank in a V, and the forward of one overlapped with the backward of the
    /// other wherever both are there.
    ///
    /// DualPipe of DeepSeek-AI, *DeepSeek-V3 Technical Report*, 2024, cut in half as Qi et al. proposed in
    /// *DualPipe could be better without the Dual*, 2025; PyTorch's `ScheduleDualPipeV`. It pays
    /// where a forward and a backward together take less time than one after the other, as with expert
    /// parallelism. At least 2P microbatches.
    ///
    /// | | costs of one of the 2P stages; a pair costs c |
    /// |---|---|
    /// | bubble | (P - 1)(c + i - 2w) if f = i, w <= f and max(f, i + w) <= c <= f + i + w |
    /// | live (stage, microbatch) pairs on a rank | 2P + 1 |
    pub dualpipe_v<P, M> for (2, 4), (4, 8);

    ranks: P;
    microbatches: M;
    stages: 2 * P;
    place: |s| if s < P { s } else { 2 * P - 1 - s };
    slots: |_| 2 * P + 1;
    expect bubble(1, 1, 1) == 2 * (P - 1) if M >= 2 * P;

    rank |r| {
        let down = r;
        let up = 2 * P - 1 - r;
        let mut f_down = 0;
        let mut f_up = 0;
        let mut b_down = 0;
        let mut b_up = 0;

        // Fill the V.
        for _ in 0..2 * (P - 1 - r) { F(down, f_down); f_down += 1; }
        for _ in 0..r + 1 {
            F(down, f_down); f_down += 1;
            F(up, f_up); f_up += 1;
        }
        for _ in 0..P - 1 - r {
            I(up, b_up); W(up, b_up); b_up += 1;
            F(up, f_up); f_up += 1;
        }

        // Steady state: pairs. The last rank's first pair would only make the bubble larger.
        for n in 0..M - 2 * P + r + 1 {
            if n == 0 && r == P - 1 {
                F(down, f_down);
                B(up, b_up);
            } else {
                overlap { { F(down, f_down); } { B(up, b_up); } }
            }
            f_down += 1;
            b_up += 1;
            overlap { { F(up, f_up); } { B(down, b_down); } }
            f_up += 1;
            b_down += 1;
        }
        for _ in 0..P - 1 - r {
            B(up, b_up); b_up += 1;
            overlap { { F(up, f_up); } { B(down, b_down); } }
            f_up += 1;
            b_down += 1;
        }

        // Drain: from the middle on, input gradients hurry and weight gradients wait, oldest first.
        let half = (r + 1) / 2;
        let odd = r % 2 == 1;
        let late_down = b_down + half;
        let late_up = if odd { b_up + half } else { b_up + half + 1 };
        for n in 0..r + 1 {
            if n > half || (n == half && odd) { I(up, b_up); } else { B(up, b_up); }
            b_up += 1;
            if n >= half { I(down, b_down); } else { B(down, b_down); }
            b_down += 1;
        }
        // The first r + 1 of those that wait alternate between both stages.
        for n in 0..P {
            if n > r { W(down, late_down + (r + 1 - half) + (n - r - 1)); }
            else if n % 2 == 0 && odd || n % 2 == 1 && !odd { W(up, late_up + n / 2); }
            else { W(down, late_down + n / 2); }
            if n < P - 1 - r { I(down, b_down); b_down += 1; }
        }
    }
}
