//! Ops: the parts of a stage, each with its own forward, input gradient and weight gradient.
//!
//! An op has a name in two namespaces: a type, `linear`, that carries F, I and W, and a plain function, `linear`, that
//! says what it takes and gives. A function with `#[stage]` calls the function; what runs is the type. Such a function is
//! an op too, so stages are made of ops and of other stages.

use qeffect_core::effects::Access;
pub use qeffect_core::token::{Bwd, Fwd, Token};

use crate::act::Act;
use crate::cx::Cx;
use crate::error::Result;
use crate::stage::{Retained, Role};
use crate::value::Value;

/// What an op does to hidden state: the roles of the cells that it moves or only reads.
///
/// `#[effect(read(weight), write(input, grad_output))]` on an `impl Op` writes this down.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Effects {
    read: u8,
    write: u8,
    fold: u8,
}

impl Effects {
    /// Touches no state.
    pub const NONE: Effects = Effects { read: 0, write: 0, fold: 0 };

    /// Also reads cells of this role.
    pub const fn reads(self, role: Role) -> Effects {
        Effects { read: self.read | bit(role), ..self }
    }

    /// Also moves cells of this role, in order.
    pub const fn writes(self, role: Role) -> Effects {
        Effects { write: self.write | bit(role), ..self }
    }

    /// Also moves cells of this role, in any order.
    pub const fn folds(self, role: Role) -> Effects {
        Effects { fold: self.fold | bit(role), ..self }
    }

    /// What two ops do together.
    pub const fn and(self, other: Effects) -> Effects {
        Effects { read: self.read | other.read, write: self.write | other.write, fold: self.fold | other.fold }
    }

    /// Whether cells of this role are read.
    pub const fn read(self, role: Role) -> bool {
        self.read & bit(role) != 0
    }

    /// Whether cells of this role are moved, in whatever order.
    pub const fn moved(self, role: Role) -> bool {
        (self.write | self.fold) & bit(role) != 0
    }

    /// The strongest access to cells of this role: a write is ordered, a fold is not.
    pub const fn access(self, role: Role) -> Option<Access> {
        let bit = bit(role);
        if self.write & bit != 0 {
            Some(Access::Write)
        } else if self.fold & bit != 0 {
            Some(Access::Fold)
        } else if self.read & bit != 0 {
            Some(Access::Read)
        } else {
            None
        }
    }
}

const fn bit(role: Role) -> u8 {
    1 << role as u8
}

/// A function of activations with a split backward.
///
/// Tensors that go in stay the property of the caller; those that come out are leased to it.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not an op",
    label = "a stage calls ops and other stages only",
    note = "an op is a function and a type of the same name that implements `Op` or `PureOp`"
)]
pub trait Op {
    /// The state that it moves.
    const EFFECTS: Effects;
    /// The activations that it takes: `Act`, `()` for none, a tuple for several.
    type Input: Value;
    /// The activations that it gives.
    type Output: Value;
    /// What it reads of the model or of the configuration: a reference to parameters mostly, a tuple for several.
    type Param<'a>: Copy;
    /// From F to I.
    type Tape: Retained;
    /// From I to W.
    type Work: Retained;

    /// F.
    fn forward(
        cx: &mut Cx<'_>,
        x: Self::Input,
        param: Self::Param<'_>,
        token: Token<Fwd>,
    ) -> Result<(Self::Output, Self::Tape, Token<Fwd>)>;

    /// I, with the gradients of vectors.
    fn input_grad(
        cx: &mut Cx<'_>,
        dy: Self::Output,
        param: Self::Param<'_>,
        tape: Self::Tape,
        token: Token<Bwd>,
    ) -> Result<(Self::Input, Self::Work, Token<Bwd>)>;

    /// W: the gradients of matrices, each written once. No token is in reach: it cannot move state.
    fn weight_grad(cx: &mut Cx<'_>, param: Self::Param<'_>, work: Self::Work) -> Result<()>;

    /// F of evaluation: moves nothing, retains nothing.
    fn evaluate(cx: &mut Cx<'_>, x: Self::Input, param: Self::Param<'_>) -> Result<Self::Output>;
}

/// An op of one activation without hidden state and without matrices.
pub trait PureOp {
    /// What it reads of the model or of the configuration.
    type Param<'a>: Copy;
    /// From F to I.
    type Tape: Retained;

    /// F.
    fn forward(cx: &mut Cx<'_>, x: Act, param: Self::Param<'_>) -> Result<(Act, Self::Tape)>;

    /// I, with the gradients of vectors.
    fn input_grad(cx: &mut Cx<'_>, dy: Act, param: Self::Param<'_>, tape: Self::Tape) -> Result<Act>;

    /// F of evaluation.
    fn evaluate(cx: &mut Cx<'_>, x: Act, param: Self::Param<'_>) -> Result<Act>;
}

#[diagnostic::do_not_recommend]
impl<P: PureOp> Op for P {
    const EFFECTS: Effects = Effects::NONE;
    type Input = Act;
    type Output = Act;
    type Param<'a> = P::Param<'a>;
    type Tape = P::Tape;
    type Work = ();

    fn forward(
        cx: &mut Cx<'_>,
        x: Act,
        param: Self::Param<'_>,
        token: Token<Fwd>,
    ) -> Result<(Act, Self::Tape, Token<Fwd>)> {
        let (y, tape) = P::forward(cx, x, param)?;
        Ok((y, tape, token))
    }

    fn input_grad(
        cx: &mut Cx<'_>,
        dy: Act,
        param: Self::Param<'_>,
        tape: Self::Tape,
        token: Token<Bwd>,
    ) -> Result<(Act, (), Token<Bwd>)> {
        Ok((P::input_grad(cx, dy, param, tape)?, (), token))
    }

    fn weight_grad(_: &mut Cx<'_>, _: Self::Param<'_>, (): ()) -> Result<()> {
        Ok(())
    }

    fn evaluate(cx: &mut Cx<'_>, x: Act, param: Self::Param<'_>) -> Result<Act> {
        P::evaluate(cx, x, param)
    }
}

/// The body of an op's plain function, which is there for its types.
///
/// # Panics
///
/// Always: ops run on a device, inside a function with `#[stage]`.
pub fn witness(name: &str) -> ! {
    panic!("`{name}` is an op: call it in a function with `#[stage]`")
}
