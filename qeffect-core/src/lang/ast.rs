//! The syntax tree of a schedule program, as flat tables.
//!
//! Nodes refer to each other by index, every table is a `Cow<'static, [..]>`, and every node is
//! `Copy`: the macro embeds a [`Program`] as static data, and the interpreter walks it without
//! chasing pointers. Names are already resolved: a [`ExprKind::Var`] knows its slot in the frame.
//! [`parse`](crate::lang::parse()) is the only maker; indices are trusted.

mod expr;

use std::borrow::Cow;

use crate::action::Kind;
use crate::origin::Origin;
use crate::schedule::{Compare, HeaderOrigins, Transport, Update};

pub use expr::{BinaryOp, Builtin, Expr, ExprKind};

/// A table of the program.
pub type Table<T> = Cow<'static, [T]>;

/// Index into [`Program::exprs`].
pub type ExprId = u32;
/// Index into [`Program::blocks`].
pub type BlockId = u32;
/// Index into [`Program::names`].
pub type NameId = u32;

/// A run of entries in [`Program::lists`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct List {
    /// First entry.
    pub start: u32,
    /// How many.
    pub len: u32,
}

/// A schedule program.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Program {
    /// The schedule's name.
    pub name: Cow<'static, str>,
    /// Where the name stands.
    pub name_origin: Origin,
    /// Documentation lines.
    pub docs: Table<Cow<'static, str>>,
    /// The parameters, in order; parameter `n` lives in slot `n`.
    pub params: Table<Binding>,
    /// The instances declared after `for`.
    pub instances: Table<Instance>,
    /// The header.
    pub header: Header,
    /// Top-level `let`s: visible in the header and to every rank.
    pub lets: BlockId,
    /// The variable of `rank |r|`.
    pub rank: Binding,
    /// The body of `rank |r| { .. }`.
    pub body: BlockId,
    /// Size of the frame that holds all variables.
    pub frame: u32,
    /// All names.
    pub names: Table<Cow<'static, str>>,
    /// All expressions.
    pub exprs: Table<Expr>,
    /// All statements; those of one block stand together.
    pub stmts: Table<Stmt>,
    /// All blocks.
    pub blocks: Table<Block>,
    /// All closures.
    pub lambdas: Table<Lambda>,
    /// Arguments, members and branches.
    pub lists: Table<u32>,
    /// Parameters of closures.
    pub bindings: Table<Binding>,
}

/// A variable where it is introduced.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Binding {
    /// Its name; `_` is one that cannot be read.
    pub name: NameId,
    /// Its slot in the frame.
    pub slot: u32,
    /// Where.
    pub origin: Origin,
}

/// One instance of `for (2, 4), (4, 8)`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Instance {
    /// A value per parameter.
    pub values: Table<i64>,
    /// Where it is declared.
    pub origin: Origin,
}

/// The header fields.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Header {
    /// `ranks:`
    pub ranks: ExprId,
    /// `microbatches:`
    pub microbatches: ExprId,
    /// `stages:`
    pub stages: ExprId,
    /// `place:` stage to rank.
    pub place: u32,
    /// `slots:`, `tapes:`, `works:`, as indices into [`Program::lambdas`].
    pub bounds: [Option<u32>; 3],
    /// `transport:`
    pub transport: Option<Transport>,
    /// `update:`
    pub update: Option<Update>,
    /// `bytes(tape = |s| .., work = |s| .., budget = |r| ..)`
    pub bytes: Option<BytesLine>,
    /// `coalesce:`
    pub coalesce: Option<ExprId>,
    /// `eval`
    pub eval: bool,
    /// `expect ..`, in order.
    pub expects: Table<ExpectLine>,
    /// Where the fields stand.
    pub origins: HeaderOrigins,
}

/// `bytes(tape = |s| .., work = |s| .., input = |s| .., budget = |r| ..)`, as indices into
/// [`Program::lambdas`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BytesLine {
    /// Per stage, from F to I.
    pub tape: u32,
    /// Per stage, from I to W.
    pub work: u32,
    /// Per stage, from F to R.
    pub input: Option<u32>,
    /// Per rank.
    pub budget: u32,
    /// The name of the field.
    pub origin: Origin,
}

impl BytesLine {
    /// All closures.
    pub(super) fn lambdas(&self) -> impl Iterator<Item = u32> {
        [self.tape, self.work, self.budget].into_iter().chain(self.input)
    }
}

/// `expect bubble(1, 1, 1) <= P - 1 if M >= P;`
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ExpectLine {
    /// What is measured.
    pub measure: MeasureKind,
    /// The costs of F, I and W; empty for `peak`.
    pub costs: List,
    /// The comparison.
    pub compare: Compare,
    /// What it is compared with.
    pub bound: ExprId,
    /// When it is expected.
    pub condition: Option<ExprId>,
    /// The whole line.
    pub origin: Origin,
}

/// What an `expect` line measures, before its costs are known.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MeasureKind {
    /// `bubble(f, i, w)`
    Bubble,
    /// `idle(f, i, w)`
    Idle,
    /// `peak`
    Peak,
}

/// A statement.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stmt {
    /// What it is.
    pub kind: StmtKind,
    /// The action, or the keyword, or the assigned variable.
    pub origin: Origin,
}

/// The statements.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StmtKind {
    /// `let x = e;`
    Let {
        /// The variable.
        name: NameId,
        /// Its slot.
        slot: u32,
        /// Whether it is `let mut`.
        mutable: bool,
        /// Its first value.
        value: ExprId,
    },
    /// `let f = |a, b| e;`
    Helper {
        /// The helper.
        name: NameId,
        /// Index into [`Program::lambdas`].
        lambda: u32,
    },
    /// `x = e;` or `x += e;`
    Assign {
        /// The variable.
        name: NameId,
        /// Its slot.
        slot: u32,
        /// The operator before `=`.
        op: Option<BinaryOp>,
        /// The operand.
        value: ExprId,
    },
    /// `if c { .. } else { .. }`
    If {
        /// The condition.
        condition: ExprId,
        /// Runs when it holds.
        then: BlockId,
        /// Runs when it does not.
        otherwise: Option<BlockId>,
    },
    /// `for x in (a..b).rev() { .. }`
    For {
        /// The variable.
        name: NameId,
        /// Its slot.
        slot: u32,
        /// Index into [`Program::lists`]: start, end, and the step if the walk has one.
        range: u32,
        /// Whether `end` belongs to the range.
        inclusive: bool,
        /// In which order.
        walk: Walk,
        /// The body.
        body: BlockId,
    },
    /// `while c { .. }`
    While {
        /// The condition.
        condition: ExprId,
        /// The body.
        body: BlockId,
    },
    /// `{ .. }`
    Block(BlockId),
    /// `F(s, m);` and its like.
    Action {
        /// F, I, W, B or R.
        kind: Kind,
        /// The stage.
        stage: ExprId,
        /// The microbatch.
        microbatch: ExprId,
    },
    /// `W(s, [m0, m1]);`
    Group {
        /// The stage.
        stage: ExprId,
        /// The microbatches.
        microbatches: List,
    },
    /// `overlap { { .. } { .. } }`
    Overlap {
        /// The branches, as block ids.
        branches: List,
    },
    /// `refresh(s);`
    Refresh(ExprId),
    /// `reduce(s);`
    Reduce(ExprId),
    /// `commit;`
    Commit,
}

/// In which order a `for` walks its range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Walk {
    /// `a..b`
    Up,
    /// `(a..b).rev()`
    Down,
    /// `(a..b).step_by(k)`
    UpBy,
    /// `(a..b).rev().step_by(k)`: from the last element, every k-th.
    DownBy,
    /// `(a..b).step_by(k).rev()`: the elements of `UpBy`, last one first.
    UpByReversed,
}

impl Walk {
    /// All of them, in the order of their numbers.
    pub const ALL: [Walk; 5] = [Walk::Up, Walk::Down, Walk::UpBy, Walk::DownBy, Walk::UpByReversed];

    /// Whether there is a step.
    pub const fn has_step(self) -> bool {
        !matches!(self, Walk::Up | Walk::Down)
    }
}

/// `{ .. }`, with its last expression if it has one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Block {
    /// First statement in [`Program::stmts`].
    pub start: u32,
    /// How many.
    pub len: u32,
    /// The value of the block.
    pub tail: Option<ExprId>,
    /// The opening brace.
    pub origin: Origin,
}

/// A closure.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lambda {
    /// First parameter in [`Program::bindings`].
    pub params: u32,
    /// How many.
    pub arity: u32,
    /// Its value.
    pub body: ExprId,
    /// The whole closure.
    pub origin: Origin,
}

impl Program {
    /// The text of a name.
    pub fn text(&self, name: NameId) -> &str {
        &self.names[name as usize]
    }

    /// The entries of a list.
    pub fn list(&self, list: List) -> &[u32] {
        &self.lists[list.start as usize..(list.start + list.len) as usize]
    }

    /// The statements of a block.
    pub fn statements(&self, block: BlockId) -> &[Stmt] {
        let block = &self.blocks[block as usize];
        &self.stmts[block.start as usize..(block.start + block.len) as usize]
    }

    /// The parameters of a closure.
    pub fn parameters(&self, lambda: u32) -> &[Binding] {
        let lambda = &self.lambdas[lambda as usize];
        &self.bindings[lambda.params as usize..(lambda.params + lambda.arity) as usize]
    }

    /// The same program with every place erased, to compare programs by what they say.
    #[must_use]
    pub fn without_origins(&self) -> Program {
        let mut p = self.clone();
        p.name_origin = Origin::NONE;
        p.rank.origin = Origin::NONE;
        p.params.to_mut().iter_mut().for_each(|b| b.origin = Origin::NONE);
        p.instances.to_mut().iter_mut().for_each(|i| i.origin = Origin::NONE);
        p.header.expects.to_mut().iter_mut().for_each(|e| e.origin = Origin::NONE);
        p.header.origins = HeaderOrigins::NONE;
        p.exprs.to_mut().iter_mut().for_each(|e| e.origin = Origin::NONE);
        p.stmts.to_mut().iter_mut().for_each(|s| s.origin = Origin::NONE);
        p.blocks.to_mut().iter_mut().for_each(|b| b.origin = Origin::NONE);
        p.lambdas.to_mut().iter_mut().for_each(|l| l.origin = Origin::NONE);
        p.bindings.to_mut().iter_mut().for_each(|b| b.origin = Origin::NONE);
        p
    }
}
