//! What the constant expression of an embedded program calls.
//!
//! [`constant`](super::constant) writes a program as calls of these; whoever compiles that text has
//! them in scope (`use ..::lang::embed::*`). Not for use by hand. `NIL` stands for "none".

pub use core::option::Option::{None, Some};
pub use std::borrow::Cow;

pub use super::ast::*;
use crate::action::Kind;
pub use crate::origin::Origin;
pub use crate::schedule::{Compare, HeaderOrigins, Transport, Update};

/// An index that refers to nothing.
pub const NIL: u32 = u32::MAX;

const fn some(index: u32) -> Option<u32> {
    if index == NIL { None } else { Some(index) }
}

/// A table.
pub const fn t<T: Clone>(entries: &'static [T]) -> Table<T> {
    Cow::Borrowed(entries)
}

/// A text.
pub const fn s(text: &'static str) -> Cow<'static, str> {
    Cow::Borrowed(text)
}

/// A binding.
pub const fn binding(name: NameId, slot: u32, origin: u32) -> Binding {
    Binding { name, slot, origin: Origin(origin) }
}

/// An instance.
pub const fn instance(values: &'static [i64], origin: u32) -> Instance {
    Instance { values: Cow::Borrowed(values), origin: Origin(origin) }
}

/// A block.
pub const fn block(start: u32, len: u32, tail: u32, origin: u32) -> Block {
    Block { start, len, tail: some(tail), origin: Origin(origin) }
}

/// A closure.
pub const fn lambda(params: u32, arity: u32, body: ExprId, origin: u32) -> Lambda {
    Lambda { params, arity, body, origin: Origin(origin) }
}

/// A `bytes` line.
pub const fn bytes(tape: u32, work: u32, input: u32, budget: u32, origin: u32) -> BytesLine {
    BytesLine { tape, work, input: some(input), budget, origin: Origin(origin) }
}

/// An `expect` line.
pub const fn expect(
    measure: MeasureKind,
    (start, len): (u32, u32),
    compare: Compare,
    bound: ExprId,
    condition: u32,
    origin: u32,
) -> ExpectLine {
    let costs = List { start, len };
    ExpectLine { measure, costs, compare, bound, condition: some(condition), origin: Origin(origin) }
}

macro_rules! nodes {
    ($node:ident, $kind:ident: $($(#[$doc:meta])* $name:ident($($arg:ident: $ty:ty),*) = $value:expr;)*) => {
        $(
            $(#[$doc])*
            pub const fn $name($($arg: $ty,)* origin: u32) -> $node {
                $node { kind: $value, origin: Origin(origin) }
            }
        )*
    };
}

nodes! { Expr, ExprKind:
    /// A literal.
    int(value: i64) = ExprKind::Int(value);
    /// A literal.
    boolean(value: bool) = ExprKind::Bool(value);
    /// A variable.
    var(name: NameId, slot: u32) = ExprKind::Var { name, slot };
    /// `-a`
    neg(a: ExprId) = ExprKind::Neg(a);
    /// `!a`
    not(a: ExprId) = ExprKind::Not(a);
    /// `a + b`
    bin(op: u8, a: ExprId, b: ExprId) = ExprKind::Binary(BinaryOp::ALL[op as usize], a, b);
    /// `min(a, b)`
    fun(builtin: u8, a: ExprId, b: ExprId) = ExprKind::Builtin(Builtin::ALL[builtin as usize], a, b);
    /// `abs(a)`
    abs(a: ExprId) = ExprKind::Abs(a);
    /// `f(..)`
    call(name: NameId, lambda: u32, args: u32) = ExprKind::Call { name, lambda, args };
    /// `if c { a } else { b }`
    choose(c: ExprId, a: BlockId, b: BlockId) = ExprKind::If(c, a, b);
    /// `{ ..; a }`
    scope(a: BlockId) = ExprKind::Block(a);
}

nodes! { Stmt, StmtKind:
    /// `let x = e;`
    let_(name: NameId, slot: u32, mutable: bool, value: ExprId) = StmtKind::Let { name, slot, mutable, value };
    /// `let f = |a| e;`
    helper(name: NameId, lambda: u32) = StmtKind::Helper { name, lambda };
    /// `x = e;`
    set(name: NameId, slot: u32, value: ExprId) = StmtKind::Assign { name, slot, op: None, value };
    /// `x += e;`
    change(name: NameId, slot: u32, op: u8, value: ExprId) =
        StmtKind::Assign { name, slot, op: Some(BinaryOp::ALL[op as usize]), value };
    /// `if c { .. } else { .. }`
    if_(condition: ExprId, then: BlockId, otherwise: u32) =
        StmtKind::If { condition, then, otherwise: some(otherwise) };
    /// `for x in a..b { .. }`
    for_(name: NameId, slot: u32, range: u32, inclusive: bool, walk: u8, body: BlockId) =
        StmtKind::For { name, slot, range, inclusive, walk: Walk::ALL[walk as usize], body };
    /// `while c { .. }`
    while_(condition: ExprId, body: BlockId) = StmtKind::While { condition, body };
    /// `{ .. }`
    run(block: BlockId) = StmtKind::Block(block);
    /// `F(s, m);`
    f(stage: ExprId, microbatch: ExprId) = StmtKind::Action { kind: Kind::Forward, stage, microbatch };
    /// `I(s, m);`
    i(stage: ExprId, microbatch: ExprId) = StmtKind::Action { kind: Kind::InputGrad, stage, microbatch };
    /// `W(s, m);`
    w(stage: ExprId, microbatch: ExprId) = StmtKind::Action { kind: Kind::WeightGrad, stage, microbatch };
    /// `B(s, m);`
    b(stage: ExprId, microbatch: ExprId) = StmtKind::Action { kind: Kind::FullBackward, stage, microbatch };
    /// `R(s, m);`
    r(stage: ExprId, microbatch: ExprId) = StmtKind::Action { kind: Kind::Recompute, stage, microbatch };
    /// `W(s, [..]);`
    group(stage: ExprId, start: u32, len: u32) = StmtKind::Group { stage, microbatches: List { start, len } };
    /// `overlap { .. }`
    overlap(start: u32, len: u32) = StmtKind::Overlap { branches: List { start, len } };
    /// `refresh(s);`
    refresh(stage: ExprId) = StmtKind::Refresh(stage);
    /// `reduce(s);`
    reduce(stage: ExprId) = StmtKind::Reduce(stage);
    /// `commit;`
    commit() = StmtKind::Commit;
}
