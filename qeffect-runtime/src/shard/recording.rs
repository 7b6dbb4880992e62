//! A shard whose commands are written down, and the counts of rolls that follow a replay.

use super::Shard;
use crate::capture::program::RollCount;
use crate::capture::record::{Entry, Recorder, Trace};
use crate::cmd::Cmd;
use crate::device::{Buf, Device};
use crate::error::Result;
use crate::pool::Reuse;
use crate::stage::{Role, Stage};

impl<S: Stage> Shard<S> {
    /// The device, to write down what is no command.
    pub(crate) fn recorder(&mut self) -> &mut Recorder {
        &mut self.device
    }

    /// From now on commands are written down and not carried out. If they are for a list whose commands run in parallel, buffers
    /// are reused late; commands that are carried out one by one have no use for that.
    pub(crate) fn start_trace(&mut self) {
        // Enough for a few microbatches to be under way; tensors of a kind that is larger have a few buffers all the same.
        let spare = 64 << 20;
        if self.config.lists && self.device.caps().parallel {
            self.pool.reuse(Reuse::Oldest { spare });
        }
        self.device.start();
    }

    /// What was written down. Everything that the host counted meanwhile is forgotten.
    pub(crate) fn stop_trace(&mut self) -> Trace {
        self.pool.reuse(Reuse::Lowest);
        self.forget_rolls();
        self.parts.iter_mut().for_each(|part| part.grads.begin_step());
        self.device.stop()
    }

    /// Counts the rolls in a part of a trace, by the cells that its commands move.
    pub(crate) fn roll_counter(&self) -> impl Fn(&[Entry]) -> Vec<RollCount> + use<S> {
        let mut banks = Vec::new();
        for part in &self.parts {
            let banks_of = Role::ALL.into_iter().filter_map(|role| Some((role, part.state.bank(role)?)));
            banks.extend(banks_of.map(|(role, bank)| (bank.scales, part.id, role)));
        }
        move |entries| {
            let rolled = |scales: Buf| {
                let of = |entry: &&Entry| matches!(entry, Entry::Cmd(Cmd::Roll { scales: at, unless: None, .. }) if *at == scales);
                entries.iter().filter(of).count() as u64
            };
            let counts = banks.iter().map(|(scales, stage, role)| RollCount {
                stage: *stage,
                role: *role,
                times: rolled(*scales),
            });
            counts.filter(|count| count.times > 0).collect()
        }
    }

    /// Cells were rolled by a replay.
    pub(crate) fn add_rolls(&self, counts: &[RollCount]) -> Result<()> {
        for RollCount { stage, role, times } in counts {
            if let Some(bank) = self.part(*stage)?.state.bank(*role) {
                bank.add_rolls(*times);
            }
        }
        Ok(())
    }

    /// A replayed step begins: the counts of rolls are remembered, and what it will write to gradients is entered.
    pub(crate) fn begin_replay(&mut self) -> Result<()> {
        self.parts.iter().for_each(|part| part.state.mark_rolls());
        self.parts.iter_mut().try_for_each(|part| part.grads.replay())
    }

    /// A replayed step ends before its first command.
    pub(crate) fn cancel_replay(&mut self) {
        self.forget_rolls();
        self.parts.iter_mut().for_each(|part| part.grads.abort());
    }

    /// Takes the counts of rolls back to the start of the step.
    pub(crate) fn forget_rolls(&self) {
        self.parts.iter().for_each(|part| part.state.restore_rolls());
    }
}
