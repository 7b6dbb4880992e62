//! Names to slots, and types: what can be wrong without running anything.
//!
//! Every variable gets a slot in one flat frame; slots of blocks that cannot be alive together are
//! shared. A helper closure's own slots stay reserved as long as it is in scope, so that a call
//! never overwrites the caller's variables. Code that never runs is judged like all other code.

mod expr;

use std::borrow::Cow;

use super::ast::*;
use super::draft::Draft;
use super::nearest::nearest;
use crate::code::Code;
use crate::diag::Diagnostic;
use crate::origin::Origin;
use crate::schedule::HeaderOrigins;

/// Highest tree with the closures it calls: bounds the interpreter's recursion.
const MAX_HEIGHT: u32 = 1024;

/// Checks the draft and turns it into a program, if nothing is missing.
pub(super) fn resolve(draft: &mut Draft) -> Option<Program> {
    let mut r = Resolver {
        scope: Vec::new(),
        next: 0,
        frame: 0,
        closure: None,
        actions: false,
        types: Vec::new(),
        lambdas: vec![LambdaInfo::default(); draft.lambdas.len()],
        height: 0,
        draft,
    };
    for n in 0..r.draft.params.len() {
        let Binding { name, origin, .. } = r.draft.params[n];
        r.draft.params[n].slot = r.bind(name, Some(Type::Int), false, origin);
    }
    let mut lets = std::mem::take(&mut r.draft.lets);
    lets.iter_mut().for_each(|stmt| r.stmt(stmt));
    r.header();
    if let Some((mut binding, body, origin)) = r.draft.rank {
        r.actions = true;
        binding.slot = r.bind(binding.name, Some(Type::Int), false, binding.origin);
        r.unused(body, |r| r.body(body));
        r.draft.rank = Some((binding, body, origin));
    }
    let frame = r.frame;
    program(draft, lets, frame)
}

fn program(draft: &mut Draft, lets: Vec<Stmt>, frame: u32) -> Option<Program> {
    if !draft.faults.is_empty() {
        return None;
    }
    let lets = draft.block(&lets, None, Origin::NONE);
    let (name, name_origin) = draft.name.take()?;
    let (rank, body, _) = draft.rank?;
    let fields = std::mem::take(&mut draft.fields);
    let (microbatches, microbatches_at) = fields.microbatches?;
    let (place, place_at) = fields.place?;
    let header = Header {
        ranks: fields.ranks?.0,
        microbatches,
        stages: fields.stages?.0,
        place,
        bounds: fields.bounds.map(|b| b.map(|(lambda, _)| lambda)),
        transport: fields.transport.map(|f| f.0),
        update: fields.update.map(|f| f.0),
        bytes: fields.bytes,
        coalesce: fields.coalesce.map(|f| f.0),
        eval: fields.eval.is_some_and(|f| f.0),
        expects: fields.expects.into(),
        origins: HeaderOrigins {
            name: name_origin,
            place: place_at,
            microbatches: microbatches_at,
            bounds: fields.bounds.map(|b| b.map_or(Origin::NONE, |(_, at)| at)),
        },
    };
    let strings = |list: &mut Vec<String>| std::mem::take(list).into_iter().map(Cow::Owned).collect::<Vec<_>>();
    Some(Program {
        name: name.into(),
        name_origin,
        docs: strings(&mut draft.docs).into(),
        params: std::mem::take(&mut draft.params).into(),
        instances: std::mem::take(&mut draft.instances).into(),
        header,
        lets,
        rank,
        body,
        frame,
        names: strings(&mut draft.names).into(),
        exprs: std::mem::take(&mut draft.exprs).into(),
        stmts: std::mem::take(&mut draft.stmts).into(),
        blocks: std::mem::take(&mut draft.blocks).into(),
        lambdas: std::mem::take(&mut draft.lambdas).into(),
        lists: std::mem::take(&mut draft.lists).into(),
        bindings: std::mem::take(&mut draft.bindings).into(),
    })
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Type {
    Int,
    Bool,
    /// A block without a value.
    Nothing,
    /// Of something that is already reported.
    Any,
    /// Of a closure's parameter that nothing has fixed yet; index into [`Resolver::types`].
    Open(usize),
}

impl Type {
    const fn text(self) -> &'static str {
        match self {
            Type::Bool => "a bool",
            Type::Nothing => "no value",
            _ => "an integer",
        }
    }
}

#[derive(Clone, Copy)]
enum What {
    Variable { slot: u32, ty: Type, mutable: bool },
    Helper(u32),
}

#[derive(Clone, Copy)]
struct Entry {
    name: NameId,
    what: What,
    origin: Origin,
}

#[derive(Clone, Default)]
struct LambdaInfo {
    params: Vec<Option<Type>>,
    value: Option<Type>,
    /// Height of the tree of its body and everything it calls.
    height: u32,
}

struct Resolver<'a> {
    draft: &'a mut Draft,
    scope: Vec<Entry>,
    next: u32,
    frame: u32,
    /// Length of the scope where the innermost closure starts.
    closure: Option<usize>,
    /// Whether actions may stand here.
    actions: bool,
    /// Types of closure parameters, found by their first use.
    types: Vec<Option<Type>>,
    lambdas: Vec<LambdaInfo>,
    /// Highest call seen since this was last reset.
    height: u32,
}

impl Resolver<'_> {
    fn fault(&mut self, diagnostic: Diagnostic) {
        self.draft.faults.push(diagnostic);
    }

    fn text(&self, name: NameId) -> &str {
        &self.draft.names[name as usize]
    }

    fn bind(&mut self, name: NameId, ty: Option<Type>, mutable: bool, origin: Origin) -> u32 {
        let slot = self.next;
        self.next += 1;
        self.frame = self.frame.max(self.next);
        let ty = ty.unwrap_or_else(|| {
            self.types.push(None);
            Type::Open(self.types.len() - 1)
        });
        self.scope.push(Entry { name, what: What::Variable { slot, ty, mutable }, origin });
        slot
    }

    fn find(&self, name: NameId) -> Option<(usize, Entry)> {
        if self.text(name) == "_" {
            return None;
        }
        self.scope.iter().enumerate().rev().find(|(_, e)| e.name == name).map(|(n, e)| (n, *e))
    }

    /// What is known by now about an open type.
    fn settled(&self, mut ty: Type) -> Type {
        while let Type::Open(n) = ty
            && let Some(known) = self.types[n]
        {
            ty = known;
        }
        ty
    }

    fn unknown(&mut self, name: NameId, origin: Origin) {
        if self.draft.doubtful.contains(&name) {
            return;
        }
        let text = self.text(name);
        let visible = self.scope.iter().map(|e| self.text(e.name)).chain(["min", "max", "abs"]);
        let help = nearest(text, visible).map(|near| format!("did you mean `{near}`?"));
        let mut fault =
            Diagnostic::new(Code::UnknownName, origin, format!("`{text}` is not defined here")).role("not defined");
        fault.help = help;
        self.fault(fault);
    }

    fn header(&mut self) {
        let f = &self.draft.fields;
        let numbers: Vec<ExprId> =
            [f.ranks, f.microbatches, f.stages, f.coalesce].iter().flatten().map(|(e, _)| *e).collect();
        let fields = f.place.iter().chain(f.bounds.iter().flatten()).map(|(lambda, _)| *lambda);
        let lambdas: Vec<u32> = fields.chain(f.bytes.iter().flat_map(BytesLine::lambdas)).collect();
        let expects = f.expects.clone();
        for id in numbers {
            self.want(id, Type::Int);
        }
        for lambda in lambdas {
            let next = self.next;
            self.closure(lambda, Some(Type::Int));
            let value = self.lambdas[lambda as usize].value.unwrap_or(Type::Any);
            let body = self.draft.lambdas[lambda as usize].body;
            self.compare(value, Type::Int, self.draft.exprs[body as usize].origin);
            self.next = next;
        }
        for line in expects {
            for cost in self.draft.entries(line.costs).to_vec() {
                self.want(cost, Type::Int);
            }
            self.want(line.bound, Type::Int);
            if let Some(condition) = line.condition {
                self.want(condition, Type::Bool);
            }
        }
    }

    /// A block with its own scope; the type of its value.
    fn block(&mut self, id: BlockId) -> Type {
        let (scope, next) = (self.scope.len(), self.next);
        let ty = self.body(id);
        self.scope.truncate(scope);
        self.next = next;
        ty
    }

    fn body(&mut self, id: BlockId) -> Type {
        let block = self.draft.blocks[id as usize];
        for n in block.start..block.start + block.len {
            let mut stmt = self.draft.stmts[n as usize];
            self.stmt(&mut stmt);
            self.draft.stmts[n as usize] = stmt;
        }
        block.tail.map_or(Type::Nothing, |tail| self.expr(tail))
    }

    /// A block whose value nobody takes.
    fn block_stmt(&mut self, id: BlockId) {
        self.unused(id, |r| r.block(id));
    }

    fn unused(&mut self, id: BlockId, resolve: impl FnOnce(&mut Self) -> Type) {
        if resolve(self) != Type::Nothing
            && let Some(tail) = self.draft.blocks[id as usize].tail
        {
            let origin = self.draft.exprs[tail as usize].origin;
            let fault = Diagnostic::new(Code::Syntax, origin, "this value is never used");
            self.fault(fault.help("name it with `let`, or remove it"));
        }
    }

    fn stmt(&mut self, stmt: &mut Stmt) {
        let origin = stmt.origin;
        match &mut stmt.kind {
            StmtKind::Let { name, slot, mutable, value } => {
                let mut ty = self.expr(*value);
                if ty == Type::Nothing {
                    self.compare(ty, Type::Int, self.draft.exprs[*value as usize].origin);
                    ty = Type::Any;
                }
                *slot = self.bind(*name, Some(ty), *mutable, origin);
            }
            StmtKind::Helper { name, lambda } => {
                self.closure(*lambda, None);
                self.scope.push(Entry { name: *name, what: What::Helper(*lambda), origin });
            }
            StmtKind::Assign { name, slot, op, value } => {
                let ty = self.assigned(*name, slot, origin);
                match op {
                    Some(_) => {
                        self.compare(ty, Type::Int, origin);
                        self.want(*value, Type::Int);
                    }
                    None => self.want(*value, ty),
                }
            }
            StmtKind::If { condition, then, otherwise } => {
                self.want(*condition, Type::Bool);
                self.block_stmt(*then);
                otherwise.iter().for_each(|block| self.block_stmt(*block));
            }
            StmtKind::For { name, slot, range, walk, body, .. } => {
                for n in 0..2 + u32::from(walk.has_step()) {
                    self.want(self.draft.lists[(*range + n) as usize], Type::Int);
                }
                let (scope, next) = (self.scope.len(), self.next);
                *slot = self.bind(*name, Some(Type::Int), false, origin);
                self.block_stmt(*body);
                self.scope.truncate(scope);
                self.next = next;
            }
            StmtKind::While { condition, body } => {
                self.want(*condition, Type::Bool);
                self.block_stmt(*body);
            }
            StmtKind::Block(block) => self.block_stmt(*block),
            StmtKind::Action { stage, microbatch, .. } => {
                self.action(origin);
                self.want(*stage, Type::Int);
                self.want(*microbatch, Type::Int);
            }
            StmtKind::Group { stage, microbatches } => {
                self.action(origin);
                self.want(*stage, Type::Int);
                for member in self.draft.entries(*microbatches).to_vec() {
                    self.want(member, Type::Int);
                }
            }
            StmtKind::Overlap { branches } => {
                self.action(origin);
                for branch in self.draft.entries(*branches).to_vec() {
                    self.block_stmt(branch);
                }
            }
            StmtKind::Refresh(stage) | StmtKind::Reduce(stage) => {
                self.action(origin);
                self.want(*stage, Type::Int);
            }
            StmtKind::Commit => self.action(origin),
        }
    }

    fn action(&mut self, origin: Origin) {
        if self.closure.is_some() || !self.actions {
            let place = if self.closure.is_some() { "inside a helper closure" } else { "outside `rank`" };
            let fault = Diagnostic::new(
                Code::NotInLanguage,
                origin,
                format!("an action {place} is not in the schedule language"),
            )
            .help("a helper closure computes a number: write the action where it is called");
            self.fault(fault);
        }
    }

    /// The type of a variable that is assigned.
    fn assigned(&mut self, name: NameId, slot: &mut u32, origin: Origin) -> Type {
        let Some((depth, entry)) = self.find(name) else {
            self.unknown(name, origin);
            return Type::Any;
        };
        let text = self.text(name).to_owned();
        match entry.what {
            What::Helper(_) => {
                let fault = Diagnostic::new(
                    Code::Immutable,
                    origin,
                    format!("`{text}` is a helper closure and cannot be assigned"),
                );
                self.fault(fault.label(entry.origin, "defined here"));
                Type::Any
            }
            What::Variable { slot: found, ty, mutable } => {
                *slot = found;
                if !mutable {
                    let fault =
                        Diagnostic::new(Code::Immutable, origin, format!("`{text}` is assigned, but it is not `mut`"))
                            .role("assigned here")
                            .label(entry.origin, format!("`{text}` is introduced here"));
                    let is_let = depth >= self.draft.params.len();
                    let fault = if is_let { fault.help(format!("`let mut {text} = ..`")) } else { fault };
                    self.fault(fault);
                }
                self.captured(depth, entry, origin);
                self.settled(ty)
            }
        }
    }

    /// A closure sees the variables around it, but none that changes.
    fn captured(&mut self, depth: usize, entry: Entry, origin: Origin) {
        if let What::Variable { mutable: true, .. } = entry.what
            && self.closure.is_some_and(|start| depth < start)
        {
            let text = self.text(entry.name);
            let message =
                format!("a helper closure that uses `{text}`, which is `mut`, is not in the schedule language");
            let fault = Diagnostic::new(Code::NotInLanguage, origin, message)
                .label(entry.origin, format!("`{text}` is introduced here"))
                .help(format!("make `{text}` a parameter of the closure"));
            self.fault(fault);
        }
    }

    /// A closure's parameters and body; its own slots stay reserved after it.
    fn closure(&mut self, id: u32, param: Option<Type>) {
        let Lambda { params, arity, body, origin } = self.draft.lambdas[id as usize];
        let (scope, outer, height) = (self.scope.len(), self.closure, std::mem::take(&mut self.height));
        self.closure = Some(scope);
        let mut types = Vec::new();
        for n in params..params + arity {
            let Binding { name, origin, .. } = self.draft.bindings[n as usize];
            self.draft.bindings[n as usize].slot = self.bind(name, param, false, origin);
            if let Some(Entry { what: What::Variable { ty, .. }, .. }) = self.scope.last() {
                types.push(*ty);
            }
        }
        // Slots inside the body must not be shared with what comes after the closure.
        let before = std::mem::replace(&mut self.frame, self.next);
        let value = self.expr(body);
        self.next = self.next.max(self.frame);
        self.frame = self.frame.max(before);
        let settle = |r: &Self, ty| match r.settled(ty) {
            Type::Open(_) => Type::Int,
            ty => ty,
        };
        let own = self.draft.height(body) + self.height;
        self.lambdas[id as usize] = LambdaInfo {
            params: types.iter().map(|ty| Some(settle(self, *ty))).collect(),
            value: Some(settle(self, value)),
            height: own,
        };
        if value == Type::Nothing {
            let fault = Diagnostic::new(Code::TypeMismatch, origin, "this closure has no value");
            self.fault(fault.help("end it with an expression"));
            self.lambdas[id as usize].value = Some(Type::Any);
        }
        if own > MAX_HEIGHT {
            let fault = Diagnostic::new(Code::LimitExceeded, origin, "this closure calls closures too deeply");
            self.fault(fault);
            self.lambdas[id as usize].height = 0;
        }
        self.scope.truncate(scope);
        self.closure = outer;
        self.height = height;
    }
}
