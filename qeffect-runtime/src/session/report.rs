//! What a session tells of a step.

use std::time::Duration;

use qeffect_core::ids::Rank;
use qeffect_core::plan::Peaks;

use crate::pool::{KeptBytes, RegionBytes};
use crate::rank::RankReport;
use crate::shard::Mismatch;

/// One training step.
#[derive(Clone, PartialEq, Debug)]
pub struct StepReport {
    /// Attempt number of the step, from 0.
    pub step: u64,
    /// Good commits so far.
    pub epoch: u64,
    /// Mean loss over the step's tokens.
    pub loss: f64,
    /// Loss of each microbatch.
    pub losses: Vec<f64>,
    /// Norm of the whole gradient, before clipping.
    pub grad_norm: f64,
    /// The learning rate.
    pub learning_rate: f32,
    /// Tokens of the step.
    pub tokens: usize,
    /// Whether a value was not finite, and the step therefore changed nothing.
    pub skipped: bool,
    /// Slots whose tags were others than expected, where a session verifies them: the first one of every rank.
    pub mismatches: Vec<Mismatch>,
    /// How long the step took.
    pub wall: Duration,
    /// Per rank, time in its actions, without waiting.
    pub busy: Vec<Duration>,
    /// Per rank, most that was live at once.
    pub peaks: Vec<Peaks>,
    /// Per rank, most bytes of activations, tapes and works since start.
    pub bytes: Vec<usize>,
    /// Per rank, bytes of the tape region and of the work region, which these lie in.
    pub regions: Vec<RegionBytes>,
    /// Per rank, bytes of all destinations of gradients.
    pub arena_bytes: Vec<usize>,
    /// Per stage, most bytes of tapes and of works since start.
    pub kept: Vec<KeptBytes>,
    /// Lists of commands that are kept for replays, over all ranks; 0 in eager mode.
    pub graphs: usize,
    /// How many of them the step launched.
    pub launches: usize,
}

impl StepReport {
    /// Share of the ranks' time that was spent waiting.
    pub fn bubble(&self) -> f64 {
        let whole = self.wall.as_secs_f64() * self.busy.len() as f64;
        let busy: f64 = self.busy.iter().map(Duration::as_secs_f64).sum();
        if whole > 0.0 { (1.0 - busy / whole).max(0.0) } else { 0.0 }
    }
}

/// What was not finite, as far as a report tells.
pub(super) fn not_finite(losses: &[f64], report: &RankReport) -> String {
    let list = |items: Vec<String>| items.join(", ");
    let lost = losses.iter().enumerate().filter(|(_, loss)| !loss.is_finite()).map(|(m, _)| m.to_string());
    let lost: Vec<String> = lost.collect();
    if !lost.is_empty() {
        return format!("the loss of microbatch {} is not finite", list(lost));
    }
    match report.raised.iter().map(Rank::to_string).collect::<Vec<_>>() {
        ranks if !ranks.is_empty() => format!("a value that rank {} cast or scaled by is not finite", list(ranks)),
        _ => "the norm of the gradient is not finite".into(),
    }
}

pub(super) fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}
