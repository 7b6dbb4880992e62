//! What the model of the ledger is asked to do.

use qeffect_core::ledger::Verdict;

use crate::model::{MICROBATCHES, Model};
use crate::slots::SLOTS;

#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Call {
    Step,
    Evaluation,
    EndEvaluation,
    Abort,
    Fill(u32),
    Forward {
        stage: u32,
        microbatch: u32,
        slot: u32,
        finish: Finish,
    },
    Evaluate {
        stage: u32,
        microbatch: u32,
    },
    Recompute {
        stage: u32,
        microbatch: u32,
        slot: u32,
        generation: u64,
    },
    InputGrad {
        stage: u32,
        microbatch: u32,
        slot: u32,
        generation: u64,
        finish: Finish,
    },
    FullBackward {
        stage: u32,
        microbatch: u32,
        slot: u32,
        generation: u64,
        finish: Finish,
    },
    WeightGrad {
        stage: u32,
        microbatch: u32,
        slot: u32,
        generation: u64,
        finish: Finish,
    },
    /// A coalesced W: of `stage` and `microbatch`, joined by another work.
    Join {
        stage: u32,
        microbatch: u32,
        slot: u32,
        generation: u64,
        with: Joined,
        finish: Finish,
    },
    Send {
        backward: bool,
        stage: u32,
        microbatch: u32,
    },
    Wait {
        backward: bool,
        stage: u32,
        microbatch: u32,
    },
    Refresh(u32),
    Reduce(u32),
    Agree {
        honest: bool,
    },
    Commit,
    Settle(Verdict),
    /// A whole step at once: with the rolls that the state has or others, the effects of this program or of another.
    Replay {
        honest: bool,
        foreign: bool,
    },
}

/// The further member of a coalesced W.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Joined {
    pub stage: u32,
    pub microbatch: u32,
    pub slot: u32,
    pub generation: u64,
}

/// How the caller of an action ends it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Finish {
    Right,
    /// Drops the transition: the action failed.
    Dropped,
    /// Returns a token that was rolled once more than the action rolls.
    RolledTwice,
}

impl Model {
    /// Every call with every argument in reach, a few beyond it.
    pub fn all(&self) -> Vec<Call> {
        let mut calls = vec![
            Call::Step,
            Call::Step,
            Call::Evaluation,
            Call::EndEvaluation,
            Call::Abort,
            Call::Commit,
            Call::Commit,
            Call::Settle(Verdict::Good),
            Call::Settle(Verdict::Good),
            Call::Settle(Verdict::Skip),
        ];
        calls.extend([true, true, true, false].map(|honest| Call::Agree { honest }));
        calls.extend(
            [(true, false), (false, false), (true, true)].map(|(honest, foreign)| Call::Replay { honest, foreign }),
        );
        calls.extend(self.joins());
        for stage in [1, 2, 3] {
            calls.extend([Call::EndEvaluation; 6]);
            calls.extend([Call::Fill(stage), Call::Refresh(stage), Call::Refresh(stage), Call::Reduce(stage)]);
            for microbatch in 0..=MICROBATCHES {
                calls.push(Call::Evaluate { stage, microbatch });
                for backward in [false, true] {
                    calls.push(Call::Send { backward, stage, microbatch });
                    calls.push(Call::Wait { backward, stage, microbatch });
                }
                for slot in 0..=SLOTS {
                    let current = self.slots.generations.get(slot as usize).copied().unwrap_or(1);
                    for finish in [Finish::Right; 2].into_iter().chain([Finish::Dropped, Finish::RolledTwice]) {
                        calls.push(Call::Forward { stage, microbatch, slot, finish });
                        for generation in current.saturating_sub(1).max(1)..=current.max(1) {
                            calls.push(Call::InputGrad { stage, microbatch, slot, generation, finish });
                            calls.push(Call::FullBackward { stage, microbatch, slot, generation, finish });
                            calls.push(Call::WeightGrad { stage, microbatch, slot, generation, finish });
                        }
                    }
                    calls.push(Call::Recompute { stage, microbatch, slot, generation: current.max(1) });
                }
            }
        }
        calls
    }
    /// Every live work as the first of a group, with every other reference in reach.
    fn joins(&self) -> Vec<Call> {
        let mut calls = Vec::new();
        let works =
            (0u32..).zip(&self.slots.records).filter_map(|(slot, record)| Some((slot, record.filter(|r| r.1)?.0)));
        for (first, key) in works {
            let (stage, microbatch) = (key.stage.0, key.microbatch.0);
            for slot in (0..=SLOTS).filter(|slot| *slot != first) {
                let generation_of = |slot: u32| self.slots.generations.get(slot as usize).copied().unwrap_or(1);
                let current = generation_of(slot).max(1);
                for (other, m) in [1, 2, 3].into_iter().flat_map(|other| (0..=MICROBATCHES).map(move |m| (other, m))) {
                    for generation in current.saturating_sub(1).max(1)..=current {
                        let with = Joined { stage: other, microbatch: m, slot, generation };
                        for finish in [Finish::Right, Finish::Right, Finish::Right, Finish::Right, Finish::Dropped] {
                            let generation = generation_of(first);
                            calls.push(Call::Join { stage, microbatch, slot: first, generation, with, finish });
                        }
                    }
                }
            }
        }
        calls
    }
}
