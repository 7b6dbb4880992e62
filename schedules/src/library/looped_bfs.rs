//! Looped breadth first: all microbatches through one stage of a rank before the next one.

schedule! {
    /// Looped BFS: a rank runs all microbatches through one of its V stages before it turns to the
    /// next, and their backwards in reverse.
    ///
    /// Lamy-Poirier, *Breadth-First Pipeline Parallelism*, 2022; PyTorch's `ScheduleLoopedBFS`. Weights
    /// of a stage are needed once per direction, which suits sharded parameters. Backwards run in
    /// descending microbatch order: recipes whose state moves with every microbatch refuse it unless
    /// allowed by name.
    ///
    /// | | costs of one of the V·P stages |
    /// |---|---|
    /// | bubble | (P - 1)(f + i + w) if P divides M |
    /// | live (stage, microbatch) pairs on a rank | M·V |
    pub looped_bfs<P, M, V> for (2, 4, 2), (4, 8, 2);

    ranks: P;
    microbatches: M;
    stages: P * V;
    place: |s| s % P;
    expect bubble(1, 1, 1) == 3 * (P - 1) if M % P == 0;
    expect peak == M * V;

    rank |r| {
        for turn in 0..V {
            for m in 0..M { F(turn * P + r, m); }
        }
        for turn in (0..V).rev() {
            for m in (0..M).rev() { B(turn * P + r, m); }
        }
    }
}
