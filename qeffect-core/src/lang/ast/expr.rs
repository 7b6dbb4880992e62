//! Expressions and what they are made of.

use super::{BlockId, ExprId, NameId};
use crate::origin::Origin;

/// An expression.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Expr {
    /// What it is.
    pub kind: ExprKind,
    /// Its whole text.
    pub origin: Origin,
}

/// The expressions. Booleans are 0 and 1 in the frame; types are checked before anything runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ExprKind {
    /// A literal.
    Int(i64),
    /// `true`, `false`
    Bool(bool),
    /// A variable.
    Var {
        /// As it was written.
        name: NameId,
        /// Where it lives.
        slot: u32,
    },
    /// `-a`
    Neg(ExprId),
    /// `!a`
    Not(ExprId),
    /// `a + b`
    Binary(BinaryOp, ExprId, ExprId),
    /// `min(a, b)` and `a.min(b)` are the same node.
    Builtin(Builtin, ExprId, ExprId),
    /// `abs(a)`
    Abs(ExprId),
    /// A call of a helper closure.
    Call {
        /// As it was written.
        name: NameId,
        /// Index into [`Program::lambdas`](super::Program::lambdas).
        lambda: u32,
        /// The arguments start here in [`Program::lists`](super::Program::lists); there are as many as the closure has parameters.
        args: u32,
    },
    /// `if c { a } else { b }`
    If(ExprId, BlockId, BlockId),
    /// `{ ..; a }`
    Block(BlockId),
    /// Stands for a part that could not be read; never in a [`Program`](super::Program) that was handed out.
    Broken,
}

/// Operators with two operands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum BinaryOp {
    /// `+`
    Add,
    /// `-`
    Sub,
    /// `*`
    Mul,
    /// `/`, toward zero.
    Div,
    /// `%`, with the sign of the left operand.
    Rem,
    /// `==`
    Eq,
    /// `!=`
    Ne,
    /// `<`
    Lt,
    /// `<=`
    Le,
    /// `>`
    Gt,
    /// `>=`
    Ge,
    /// `&&`
    And,
    /// `||`
    Or,
}

impl BinaryOp {
    /// All of them, in the order of their numbers.
    pub const ALL: [BinaryOp; 13] = {
        use BinaryOp::*;
        [Add, Sub, Mul, Div, Rem, Eq, Ne, Lt, Le, Gt, Ge, And, Or]
    };

    /// As it is written.
    pub const fn text(self) -> &'static str {
        ["+", "-", "*", "/", "%", "==", "!=", "<", "<=", ">", ">=", "&&", "||"][self as usize]
    }

    /// The operator that is written so.
    pub fn parse(text: &str) -> Option<BinaryOp> {
        BinaryOp::ALL.into_iter().find(|op| op.text() == text)
    }

    /// Rust's precedence: higher binds tighter.
    pub const fn precedence(self) -> u8 {
        match self {
            BinaryOp::Or => 1,
            BinaryOp::And => 2,
            BinaryOp::Eq | BinaryOp::Ne | BinaryOp::Lt | BinaryOp::Le | BinaryOp::Gt | BinaryOp::Ge => 3,
            BinaryOp::Add | BinaryOp::Sub => 4,
            BinaryOp::Mul | BinaryOp::Div | BinaryOp::Rem => 5,
        }
    }

    /// Whether it compares.
    pub const fn compares(self) -> bool {
        self.precedence() == 3
    }
}

/// Functions of two numbers that every program has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Builtin {
    /// The smaller.
    Min,
    /// The larger.
    Max,
    /// Remainder that is never negative.
    RemEuclid,
    /// Quotient of that remainder.
    DivEuclid,
}

impl Builtin {
    /// All of them, in the order of their numbers.
    pub const ALL: [Builtin; 4] = [Builtin::Min, Builtin::Max, Builtin::RemEuclid, Builtin::DivEuclid];

    /// As it is written.
    pub const fn text(self) -> &'static str {
        ["min", "max", "rem_euclid", "div_euclid"][self as usize]
    }
}
