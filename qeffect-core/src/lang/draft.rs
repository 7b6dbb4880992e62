//! A program while it is being read: growing tables, heights, names not resolved yet.

use std::collections::HashMap;

use super::ast::*;
use crate::diag::Diagnostic;
use crate::origin::Origin;
use crate::schedule::{Transport, Update};

/// A slot, closure or name that resolution has yet to find.
pub(super) const UNRESOLVED: u32 = u32::MAX;

/// A header field and the token that names it.
pub(super) type Field<T> = Option<(T, Origin)>;

/// Header fields as far as they were read.
#[derive(Default)]
pub(super) struct Fields {
    pub ranks: Field<ExprId>,
    pub microbatches: Field<ExprId>,
    pub stages: Field<ExprId>,
    pub place: Field<u32>,
    pub bounds: [Field<u32>; 3],
    pub transport: Field<Transport>,
    pub update: Field<Update>,
    pub bytes: Option<BytesLine>,
    pub coalesce: Field<ExprId>,
    pub eval: Field<bool>,
    pub expects: Vec<ExpectLine>,
}

/// Everything the parser has read.
#[derive(Default)]
pub(super) struct Draft {
    pub name: Option<(String, Origin)>,
    pub docs: Vec<String>,
    pub params: Vec<Binding>,
    pub instances: Vec<Instance>,
    pub fields: Fields,
    pub lets: Vec<Stmt>,
    pub rank: Option<(Binding, BlockId, Origin)>,
    pub names: Vec<String>,
    numbers: HashMap<String, NameId>,
    pub exprs: Vec<Expr>,
    heights: Vec<u32>,
    pub stmts: Vec<Stmt>,
    pub blocks: Vec<Block>,
    block_heights: Vec<u32>,
    pub lambdas: Vec<Lambda>,
    pub lists: Vec<u32>,
    pub bindings: Vec<Binding>,
    /// Number of arguments of each call, until its closure is known.
    pub call_lens: HashMap<ExprId, u32>,
    /// Names inside text that could not be read: they may have been defined there.
    pub doubtful: Vec<NameId>,
    pub faults: Vec<Diagnostic>,
}

impl Draft {
    pub fn name(&mut self, text: &str) -> NameId {
        if let Some(id) = self.numbers.get(text) {
            return *id;
        }
        let id = self.names.len() as NameId;
        self.names.push(text.to_owned());
        self.numbers.insert(text.to_owned(), id);
        id
    }

    pub fn expr(&mut self, kind: ExprKind, origin: Origin) -> ExprId {
        let below = match kind {
            ExprKind::Int(_) | ExprKind::Bool(_) | ExprKind::Var { .. } | ExprKind::Broken => 0,
            ExprKind::Neg(a) | ExprKind::Not(a) | ExprKind::Abs(a) => self.height(a),
            ExprKind::Binary(_, a, b) | ExprKind::Builtin(_, a, b) => self.height(a).max(self.height(b)),
            ExprKind::Call { .. } => 0,
            ExprKind::If(c, a, b) => self.height(c).max(self.block_height(a)).max(self.block_height(b)),
            ExprKind::Block(b) => self.block_height(b),
        };
        self.exprs.push(Expr { kind, origin });
        self.heights.push(below + 1);
        (self.exprs.len() - 1) as ExprId
    }

    pub fn call(&mut self, name: NameId, args: &[ExprId], origin: Origin) -> ExprId {
        let list = self.list(args);
        let id = self.expr(ExprKind::Call { name, lambda: UNRESOLVED, args: list.start }, origin);
        self.heights[id as usize] = 1 + args.iter().map(|a| self.height(*a)).max().unwrap_or(0);
        self.call_lens.insert(id, list.len);
        id
    }

    pub fn list(&mut self, entries: &[u32]) -> List {
        let start = self.lists.len() as u32;
        self.lists.extend_from_slice(entries);
        List { start, len: entries.len() as u32 }
    }

    /// Statements of one block stand together, so a block is closed after the blocks inside it.
    pub fn block(&mut self, stmts: &[Stmt], tail: Option<ExprId>, origin: Origin) -> BlockId {
        let height = stmts.iter().map(|s| self.stmt_height(&s.kind)).max().unwrap_or(0);
        let height = height.max(tail.map_or(0, |t| self.height(t))) + 1;
        let start = self.stmts.len() as u32;
        self.stmts.extend_from_slice(stmts);
        self.blocks.push(Block { start, len: stmts.len() as u32, tail, origin });
        self.block_heights.push(height);
        (self.blocks.len() - 1) as BlockId
    }

    pub fn lambda(&mut self, params: &[Binding], body: ExprId, origin: Origin) -> u32 {
        let start = self.bindings.len() as u32;
        self.bindings.extend_from_slice(params);
        self.lambdas.push(Lambda { params: start, arity: params.len() as u32, body, origin });
        (self.lambdas.len() - 1) as u32
    }

    /// Height of the tree under an expression: bounds the recursion of everything that walks it.
    pub fn height(&self, id: ExprId) -> u32 {
        self.heights[id as usize]
    }

    pub fn block_height(&self, id: BlockId) -> u32 {
        self.block_heights[id as usize]
    }

    fn stmt_height(&self, kind: &StmtKind) -> u32 {
        let e = |id: ExprId| self.height(id);
        let b = |id: BlockId| self.block_height(id);
        match *kind {
            StmtKind::Let { value, .. } | StmtKind::Assign { value, .. } => e(value),
            StmtKind::Helper { lambda, .. } => e(self.lambdas[lambda as usize].body),
            StmtKind::If { condition, then, otherwise } => e(condition).max(b(then)).max(otherwise.map_or(0, b)),
            StmtKind::For { range, walk, body, .. } => {
                let range = &self.lists[range as usize..][..2 + usize::from(walk.has_step())];
                range.iter().map(|id| e(*id)).max().unwrap_or(0).max(b(body))
            }
            StmtKind::While { condition, body } => e(condition).max(b(body)),
            StmtKind::Block(block) => b(block),
            StmtKind::Action { stage, microbatch, .. } => e(stage).max(e(microbatch)),
            StmtKind::Group { stage, microbatches } => {
                self.entries(microbatches).iter().map(|id| e(*id)).max().unwrap_or(0).max(e(stage))
            }
            StmtKind::Overlap { branches } => self.entries(branches).iter().map(|id| b(*id)).max().unwrap_or(0),
            StmtKind::Refresh(s) | StmtKind::Reduce(s) => e(s),
            StmtKind::Commit => 0,
        }
    }

    pub fn entries(&self, list: List) -> &[u32] {
        &self.lists[list.start as usize..(list.start + list.len) as usize]
    }
}
