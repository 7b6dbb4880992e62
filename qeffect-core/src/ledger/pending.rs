//! Transitions that are checked and not yet committed.
//!
//! A [`Pending`] borrows the ledger, so nothing else can begin. `finish` commits; dropping leaves the
//! state as it was, with the references given to the transition gone and the step to be aborted.

use super::stage::did;
use super::{Action, Ledger, LedgerError, Phase};
use crate::code::Code;
use crate::ids::{Microbatch, Stage};
use crate::plan::Op;
use crate::tape::{TapeKey, TapeRef, WorkRef};
use crate::token::{Bwd, Fwd, Token};

/// Where an action runs: what it is called, and the slot that holds what it retains.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Site {
    /// Step, stage and microbatch.
    pub key: TapeKey,
    /// The slot; [`NONE`](crate::plan::NONE) in evaluation.
    pub slot: u32,
}

impl Site {
    /// The stage.
    pub const fn stage(&self) -> Stage {
        self.key.stage
    }

    /// The microbatch.
    pub const fn microbatch(&self) -> Microbatch {
        self.key.microbatch
    }
}

/// A checked transition: do the action, then [`finish`](Pending::finish).
///
/// It borrows its ledger, and with it the slots, so that no second one can begin meanwhile:
///
/// ```compile_fail,E0499
/// # use qeffect_core::{ids::Stage, ledger::Ledger};
/// fn at_once(ledger: &mut Ledger) {
///     let pending = (ledger.begin_reduce(Stage(0)), ledger.begin_reduce(Stage(1)));
///     drop(pending);
/// }
/// ```
#[must_use = "a transition that is not finished aborts its step"]
#[derive(Debug)]
pub struct Pending<'l, T> {
    ledger: &'l mut Ledger,
    transition: T,
}

impl<'l, T> Pending<'l, T> {
    pub(super) fn new(ledger: &'l mut Ledger, transition: T) -> Self {
        Pending { ledger, transition }
    }

    /// For transitions that cannot fail.
    fn settle(self) -> (&'l mut Ledger, T) {
        self.ledger.pending = None;
        (self.ledger, self.transition)
    }
}

macro_rules! transitions {
    ($($(#[$doc:meta])* $name:ident { $($field:ident: $type:ty),* })*) => {$(
        $(#[$doc])*
        #[derive(Debug)]
        pub struct $name {
            $(pub(super) $field: $type,)*
        }
    )*};
}

transitions! {
    /// F.
    Forward { at: usize, site: Site, rolls: u64 }
    /// F of an evaluation.
    Evaluate { at: usize, site: Site }
    /// R.
    Recompute { at: usize, site: Site }
    /// I.
    InputGrad { at: usize, site: Site, tape: TapeRef, rolls: u64 }
    /// B.
    FullBackward { at: usize, site: Site, tape: TapeRef, rolls: u64 }
    /// W, with the members that joined it.
    WeightGrad { at: usize, site: Site }
    /// A send or a wait.
    Message { at: usize, microbatch: Microbatch, bit: u8 }
    /// `refresh(s)`.
    Refresh { at: usize }
    /// `reduce(s)`.
    Reduce { at: usize }
}

/// `agree`.
#[derive(Debug)]
pub struct Agree;
/// `commit`.
#[derive(Debug)]
pub struct Commit;

macro_rules! site {
    ($($name:ident)*) => {$(
        impl Pending<'_, $name> {
            /// Where the action runs.
            pub const fn site(&self) -> Site {
                self.transition.site
            }
        }
    )*};
}

site!(Forward Evaluate Recompute InputGrad FullBackward WeightGrad);

/// The token must be that of the stage, rolled exactly as often as the action rolls.
fn check_token<D>(ledger: &Ledger, op: Op, site: Site, token: &Token<D>, rolls: u64) -> Result<(), LedgerError> {
    if token.stage() == site.stage() && token.rolls() == rolls {
        return Ok(());
    }
    let action = Action::of(op, site.stage(), site.microbatch());
    let expected = format!("the token of stage {} after {rolls} rolls", site.stage());
    let found = format!("the token of stage {} after {}", token.stage(), token.rolls());
    Err(ledger.refuse(Code::TokenOutOfOrder, action, "returns another token than it is to return", expected, found))
}

impl Pending<'_, Forward> {
    /// F has succeeded: leases the slot.
    pub fn finish(self, token: Token<Fwd>) -> Result<TapeRef, LedgerError> {
        let Pending { ledger, transition: Forward { at, site, rolls } } = self;
        check_token(ledger, Op::Forward, site, &token, rolls)?;
        let action = Action::of(Op::Forward, site.stage(), site.microbatch());
        let tape = ledger.pool.lease(site.key, site.slot).map_err(|e| ledger.slot(action, e))?;
        ledger.stages[at].forward = Some(token);
        ledger.stages[at].set(site.microbatch(), did::FORWARD);
        ledger.seeds.left(site.stage(), site.microbatch());
        ledger.pending = None;
        Ok(tape)
    }
}

impl Pending<'_, Evaluate> {
    /// F has succeeded.
    pub fn finish(self) {
        let (ledger, Evaluate { at, site }) = self.settle();
        ledger.stages[at].set(site.microbatch(), did::FORWARD);
    }
}

impl Pending<'_, Recompute> {
    /// R has succeeded.
    pub fn finish(self) {
        let (ledger, Recompute { at, site }) = self.settle();
        ledger.stages[at].set(site.microbatch(), did::RECOMPUTED);
        ledger.seeds.grown(site.stage(), site.microbatch());
    }
}

impl Pending<'_, InputGrad> {
    /// I has succeeded: the tape became work, and the vector gradients of the microbatch are there.
    pub fn finish(self, token: Token<Bwd>) -> Result<WorkRef, LedgerError> {
        let Pending { ledger, transition: InputGrad { at, site, tape, rolls } } = self;
        check_token(ledger, Op::InputGrad, site, &token, rolls)?;
        let action = Action::of(Op::InputGrad, site.stage(), site.microbatch());
        let work = ledger.pool.consume_tape(tape, &site.key).map_err(|e| ledger.slot(action, e))?;
        ledger.stages[at].backward = Some(token);
        ledger.stages[at].set(site.microbatch(), did::INPUT_GRAD);
        ledger.pending = None;
        Ok(work)
    }
}

impl Pending<'_, FullBackward> {
    /// B has succeeded: all gradients of the microbatch are there, and the slot is free.
    pub fn finish(self, token: Token<Bwd>) -> Result<(), LedgerError> {
        let Pending { ledger, transition: FullBackward { at, site, tape, rolls } } = self;
        check_token(ledger, Op::FullBackward, site, &token, rolls)?;
        let action = Action::of(Op::FullBackward, site.stage(), site.microbatch());
        let work = ledger.pool.consume_tape(tape, &site.key).map_err(|e| ledger.slot(action, e))?;
        ledger.pool.consume_work(work, &site.key).map_err(|e| ledger.slot(action, e))?;
        ledger.stages[at].backward = Some(token);
        ledger.stages[at].set(site.microbatch(), did::INPUT_GRAD | did::WEIGHT_GRAD);
        ledger.pending = None;
        Ok(())
    }
}

impl Pending<'_, WeightGrad> {
    /// Adds a member of the same stage to a coalesced W, and returns where its work lies.
    pub fn join(&mut self, stage: Stage, microbatch: Microbatch, work: WorkRef) -> Result<Site, LedgerError> {
        let action = Action::of(Op::WeightGradJoin, stage, microbatch);
        // The group itself is what is pending.
        let begun = self.ledger.pending.take();
        let entered = self.ledger.enter_weight_grad(action, stage, microbatch, &work);
        self.ledger.pending = begun;
        let (at, site) = entered?;
        if at != self.transition.at {
            let expected = format!("stage {}", self.transition.site.stage());
            let found = format!("stage {stage}");
            let fault = "joins the weight gradient of another stage";
            return Err(self.ledger.refuse(Code::KeyMismatch, action, fault, expected, found));
        }
        self.ledger.group.push((microbatch, work));
        Ok(site)
    }

    /// W has succeeded: the matrix gradients are there, and the slots are free.
    pub fn finish(self) -> Result<(), LedgerError> {
        let Pending { ledger, transition: WeightGrad { at, site } } = self;
        let mut group = std::mem::take(&mut ledger.group);
        for (microbatch, work) in group.drain(..) {
            let action = Action::of(Op::WeightGrad, site.stage(), microbatch);
            let key = TapeKey { microbatch, ..site.key };
            ledger.pool.consume_work(work, &key).map_err(|e| ledger.slot(action, e))?;
            ledger.stages[at].set(microbatch, did::WEIGHT_GRAD);
        }
        ledger.group = group;
        ledger.pending = None;
        Ok(())
    }
}

impl Pending<'_, Message> {
    /// The message is on its way, or here.
    pub fn finish(self) {
        let (ledger, Message { at, microbatch, bit }) = self.settle();
        ledger.stages[at].set(microbatch, bit);
    }
}

impl Pending<'_, Refresh> {
    /// The weight cache is current and its scaling state rolled.
    pub fn finish(self) {
        let (ledger, Refresh { at }) = self.settle();
        ledger.stages[at].version.refresh();
        ledger.stages[at].refreshed = true;
    }
}

impl Pending<'_, Reduce> {
    /// The gradients of the stage are final.
    pub fn finish(self) {
        let (ledger, Reduce { at }) = self.settle();
        ledger.stages[at].reduced = true;
    }
}

impl Pending<'_, Agree> {
    /// Every rank has what all of them decide from.
    pub fn finish(self) {
        let (ledger, _) = self.settle();
        ledger.phase = Phase::Training { agreed: true };
    }
}

impl Pending<'_, Commit> {
    /// The weights have moved, unless a value was not finite: provisional until [`Ledger::settle`].
    pub fn finish(self) {
        let (ledger, _) = self.settle();
        for stage in &mut ledger.stages {
            stage.version.commit();
        }
        ledger.phase = Phase::Provisional;
    }
}
