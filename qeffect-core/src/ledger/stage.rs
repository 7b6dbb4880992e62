//! What the ledger keeps per stage: tokens, version, and what each microbatch has done in this step.

use crate::code::Code;
use crate::ids::{Microbatch, Stage};
use crate::token::{Bwd, Fwd, Token};
use crate::version::WeightVersion;

/// How often one action of a stage rolls its scaling state: what its tokens are held to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StageContract {
    /// The stage.
    pub stage: Stage,
    /// Rolls of the forward cell by one F; 0 for recipes without hidden state.
    pub forward_rolls: u32,
    /// Rolls of the backward cell by one I.
    pub backward_rolls: u32,
}

/// Rolls since start, as the state itself counted them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Rolls {
    /// Of the forward cell.
    pub forward: u64,
    /// Of the backward cell.
    pub backward: u64,
}

/// One bit per thing that a (stage, microbatch) does at most once per step.
pub(super) mod did {
    pub const FORWARD: u8 = 1;
    /// The contribution of I: vector gradients.
    pub const INPUT_GRAD: u8 = 2;
    /// The contribution of W: matrix gradients.
    pub const WEIGHT_GRAD: u8 = 4;
    pub const SENT_FORWARD: u8 = 8;
    pub const SENT_BACKWARD: u8 = 16;
    pub const WAITED_FORWARD: u8 = 32;
    pub const WAITED_BACKWARD: u8 = 64;
    pub const RECOMPUTED: u8 = 128;
    pub const ALL: u8 = FORWARD | INPUT_GRAD | WEIGHT_GRAD;
}

#[derive(Debug)]
pub(super) struct StageState {
    pub contract: StageContract,
    /// `None` while an action holds it, and after that action failed.
    pub forward: Option<Token<Fwd>>,
    pub backward: Option<Token<Bwd>>,
    pub version: WeightVersion,
    pub refreshed: bool,
    pub reduced: bool,
    done: Vec<u8>,
    /// As they were when the step began.
    start: (Rolls, WeightVersion),
}

impl StageState {
    pub fn new(contract: StageContract, microbatches: u32, weights: u64) -> StageState {
        let version = WeightVersion::without_cache(weights);
        StageState {
            contract,
            forward: Some(Token::first(contract.stage)),
            backward: Some(Token::first(contract.stage)),
            version,
            refreshed: false,
            reduced: false,
            done: vec![0; microbatches as usize],
            start: (Rolls::default(), version),
        }
    }

    pub const fn stage(&self) -> Stage {
        self.contract.stage
    }

    /// Starts a pass: nothing done, and this is the state to come back to.
    pub fn begin(&mut self, microbatches: u32) {
        self.refreshed = false;
        self.reduced = false;
        self.done.clear();
        self.done.resize(microbatches as usize, 0);
        self.start = (self.rolls(), self.version);
    }

    /// A copy of a stage that nothing is in flight on.
    pub fn at_rest(&self) -> StageState {
        let rolls = self.rolls();
        StageState {
            contract: self.contract,
            forward: Some(Token::restored(self.stage(), rolls.forward)),
            backward: Some(Token::restored(self.stage(), rolls.backward)),
            version: self.version,
            refreshed: false,
            reduced: false,
            done: self.done.clone(),
            start: (rolls, self.version),
        }
    }

    /// Enters a whole step at once: `rolls` more, the cache refreshed, every microbatch's `bits`, weights committed.
    pub fn replay(&mut self, rolls: Rolls, bits: u8) {
        let (start, _) = self.start;
        self.forward = Some(Token::restored(self.stage(), start.forward + rolls.forward));
        self.backward = Some(Token::restored(self.stage(), start.backward + rolls.backward));
        self.version.refresh();
        self.version.commit();
        self.refreshed = true;
        self.reduced = true;
        self.done.fill(bits);
    }

    /// Puts back what [`begin`](Self::begin) saw.
    pub fn restore(&mut self) {
        let (rolls, version) = self.start;
        self.forward = Some(Token::restored(self.stage(), rolls.forward));
        self.backward = Some(Token::restored(self.stage(), rolls.backward));
        self.version = version;
        self.refreshed = false;
        self.reduced = false;
        self.done.fill(0);
    }

    /// Rolls by the tokens at rest; a token that is out counts as at the step's start.
    pub fn rolls(&self) -> Rolls {
        let (start, _) = self.start;
        Rolls {
            forward: self.forward.as_ref().map_or(start.forward, Token::rolls),
            backward: self.backward.as_ref().map_or(start.backward, Token::rolls),
        }
    }

    pub fn did(&self, microbatch: Microbatch, bits: u8) -> bool {
        self.done.get(microbatch.index()).is_some_and(|done| done & bits == bits)
    }

    pub fn set(&mut self, microbatch: Microbatch, bits: u8) {
        if let Some(done) = self.done.get_mut(microbatch.index()) {
            *done |= bits;
        }
    }

    pub fn microbatches(&self) -> u32 {
        self.done.len() as u32
    }

    /// How many microbatches have done all of `bits`.
    pub fn count(&self, bits: u8) -> u32 {
        self.done.iter().filter(|done| **done & bits == bits).count() as u32
    }

    /// The first microbatch that lacks one of `bits`.
    pub fn first_without(&self, bits: u8) -> Option<Microbatch> {
        self.done.iter().position(|done| done & bits != bits).map(|m| Microbatch(m as u32))
    }

    pub fn began(&self) -> bool {
        self.done.iter().any(|done| done & did::FORWARD != 0)
    }
}

/// Why an input gradient finds no tape, or a weight gradient no work.
pub(super) fn missing(state: &StageState, microbatch: Microbatch, weight_grad: bool) -> (Code, &'static str) {
    let consumed = if weight_grad { did::WEIGHT_GRAD } else { did::INPUT_GRAD };
    match (weight_grad, state.did(microbatch, consumed)) {
        (false, true) => (Code::TapeConsumedTwice, "consumes a tape that is already consumed"),
        (false, false) => (Code::TapeBeforeForward, "runs before its forward"),
        (true, true) => (Code::WorkConsumedTwice, "consumes work that is already consumed"),
        (true, false) => (Code::WorkBeforeInputGrad, "runs before its input gradient"),
    }
}
