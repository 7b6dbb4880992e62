//! Coalescing: one weight gradient for a group of microbatches.
//!
//! A pass from schedule to schedule, before the check: of every stage, the weight gradients of each
//! group of `n` consecutive microbatches run as one action where the group's last member (in program
//! order) stood; a full backward becomes its I and a member of the group. The last group may be
//! short. Slots, peaks and contracts are judged on the result.

use std::borrow::Cow;

use crate::action::{Item, Kind};
use crate::check::{Options, check};
use crate::code::Code;
use crate::diag::{Diagnostic, Report};
use crate::plan::Checked;
use crate::schedule::{Bounds, Schedule};

/// Rewrites a schedule whose header says `coalesce: n`; any other one is returned as it is.
pub fn coalesce(mut schedule: Schedule) -> Schedule {
    let n = schedule.coalesce;
    if n <= 1 || schedule.eval {
        return schedule;
    }
    let groups = schedule.microbatches.div_ceil(n);
    let group = |item: &Item| (item.stage.0 * groups + item.microbatch.0 / n) as usize;
    let mut left = vec![0u32; (schedule.stages * groups) as usize];
    for item in schedule.items.iter().filter(|item| has_weight_grad(item.kind)) {
        left[group(item)] += 1;
    }
    let mut members: Vec<Vec<Item>> = vec![Vec::new(); left.len()];
    let mut items = Vec::with_capacity(schedule.items.len());
    let mut starts = Vec::with_capacity(schedule.starts.len());
    for rank in 0..schedule.ranks as usize {
        starts.push(items.len() as u32);
        for item in &schedule.items[schedule.starts[rank] as usize..schedule.starts[rank + 1] as usize] {
            if item.kind == Kind::FullBackward {
                items.push(Item { kind: Kind::InputGrad, ..*item });
            }
            if !has_weight_grad(item.kind) {
                items.push(*item);
                continue;
            }
            let at = group(item);
            members[at].push(*item);
            left[at] -= 1;
            if left[at] == 0 {
                let mut all = std::mem::take(&mut members[at]);
                all.sort_by_key(|item| item.microbatch);
                for (n, item) in all.into_iter().enumerate() {
                    let kind = if n == 0 { Kind::WeightGrad } else { Kind::WeightGradJoin };
                    items.push(Item { kind, ..item });
                }
            }
        }
    }
    starts.push(items.len() as u32);
    schedule.items = Cow::Owned(items);
    schedule.starts = Cow::Owned(starts);
    schedule
}

impl Checked {
    /// The same schedule with the weight gradients of every `n` neighbouring microbatches as one, checked again. The
    /// bounds that its author declared on live microbatches and works were meant for single ones: they become notes.
    ///
    /// # Errors
    ///
    /// QE0707 if `n` is 0; what the check finds.
    pub fn coalesced(self, n: u32) -> Result<Checked, Report> {
        if n == 0 {
            let message = "a group of weight gradients has at least one microbatch";
            let fault = Diagnostic::new(Code::Header, self.schedule.origins.name, message);
            return Err(Report::from_faults(vec![fault]));
        }
        if self.schedule.coalesce == n || self.schedule.eval {
            return Ok(self);
        }
        let mut schedule = self.schedule;
        schedule.coalesce = n;
        let declared = schedule.bounds.to_vec();
        schedule.bounds =
            declared.iter().map(|bounds| Bounds { slots: None, works: None, ..*bounds }).collect::<Vec<_>>().into();
        let mut checked = check(schedule, &Options::AT_START)?;
        let mut exceeded = Vec::new();
        for (rank, (peaks, bounds)) in checked.plan.peaks.iter().zip(&declared).enumerate() {
            let rows = [("live microbatches", peaks.slots, bounds.slots), ("pending works", peaks.works, bounds.works)];
            for (what, peak, bound) in rows {
                let Some(bound) = bound.filter(|bound| peak > *bound) else { continue };
                exceeded.push(Cow::Owned(format!(
                    "rank {rank} holds {peak} {what} at once, {bound} before weight gradients were coalesced by {n}"
                )));
            }
        }
        checked.notes.to_mut().extend(exceeded);
        Ok(checked)
    }
}

fn has_weight_grad(kind: Kind) -> bool {
    matches!(kind, Kind::WeightGrad | Kind::WeightGradJoin | Kind::FullBackward)
}
