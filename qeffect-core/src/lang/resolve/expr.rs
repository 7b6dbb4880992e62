//! Types of expressions, and what their names refer to.

use super::{Resolver, Type, What};
use crate::code::Code;
use crate::diag::Diagnostic;
use crate::lang::ast::*;
use crate::lang::parse::count;
use crate::origin::Origin;

impl Resolver<'_> {
    /// Checks that an expression has a type.
    pub(super) fn want(&mut self, id: ExprId, want: Type) {
        let found = self.expr(id);
        self.compare(found, want, self.draft.exprs[id as usize].origin);
    }

    pub(super) fn compare(&mut self, found: Type, want: Type, origin: Origin) {
        match (self.settled(found), self.settled(want)) {
            (Type::Any, _) | (_, Type::Any) => {}
            (found, want) if found == want => {}
            (Type::Open(n), ty) | (ty, Type::Open(n)) => self.types[n] = Some(ty),
            (found, want) => {
                let fault = Diagnostic::new(
                    Code::TypeMismatch,
                    origin,
                    format!("expected {}, found {}", want.text(), found.text()),
                )
                .role(format!("expected {}", want.text()));
                self.fault(match (want, found) {
                    (Type::Bool, Type::Int) => fault.help("compare it: `.. != 0`"),
                    _ => fault,
                });
            }
        }
    }

    pub(super) fn expr(&mut self, id: ExprId) -> Type {
        let Expr { kind, origin } = self.draft.exprs[id as usize];
        match kind {
            ExprKind::Int(_) => Type::Int,
            ExprKind::Bool(_) => Type::Bool,
            ExprKind::Broken => Type::Any,
            ExprKind::Var { name, .. } => self.variable(id, name, origin),
            ExprKind::Neg(a) | ExprKind::Abs(a) => {
                self.want(a, Type::Int);
                Type::Int
            }
            ExprKind::Not(a) => {
                self.want(a, Type::Bool);
                Type::Bool
            }
            ExprKind::Builtin(_, a, b) => {
                self.want(a, Type::Int);
                self.want(b, Type::Int);
                Type::Int
            }
            ExprKind::Binary(op, a, b) => self.binary(op, a, b),
            ExprKind::Call { name, args, .. } => self.call(id, name, args, origin),
            ExprKind::If(condition, then, otherwise) => {
                self.want(condition, Type::Bool);
                let first = self.block(then);
                let second = self.block(otherwise);
                for (ty, block) in [(first, then), (second, otherwise)] {
                    if ty == Type::Nothing {
                        let origin = self.draft.blocks[block as usize].origin;
                        let fault = Diagnostic::new(Code::TypeMismatch, origin, "this branch has no value");
                        self.fault(fault.help("end it with an expression"));
                        return Type::Any;
                    }
                }
                let tail = self.draft.blocks[otherwise as usize].tail;
                let at = tail.map_or(origin, |tail| self.draft.exprs[tail as usize].origin);
                self.compare(second, first, at);
                first
            }
            ExprKind::Block(block) => self.block(block),
        }
    }

    fn variable(&mut self, id: ExprId, name: NameId, origin: Origin) -> Type {
        let Some((depth, entry)) = self.find(name) else {
            self.unknown(name, origin);
            return Type::Any;
        };
        match entry.what {
            What::Variable { slot, ty, .. } => {
                self.captured(depth, entry, origin);
                self.draft.exprs[id as usize].kind = ExprKind::Var { name, slot };
                self.settled(ty)
            }
            What::Helper(_) => {
                let text = self.text(name).to_owned();
                let fault =
                    Diagnostic::new(Code::TypeMismatch, origin, format!("`{text}` is a helper closure, not a value"))
                        .help(format!("call it: `{text}(..)`"));
                self.fault(fault);
                Type::Any
            }
        }
    }

    fn binary(&mut self, op: BinaryOp, a: ExprId, b: ExprId) -> Type {
        match op {
            BinaryOp::And | BinaryOp::Or => {
                self.want(a, Type::Bool);
                self.want(b, Type::Bool);
                Type::Bool
            }
            BinaryOp::Eq | BinaryOp::Ne => {
                let first = self.expr(a);
                let second = self.expr(b);
                self.compare(second, first, self.draft.exprs[b as usize].origin);
                Type::Bool
            }
            _ => {
                self.want(a, Type::Int);
                self.want(b, Type::Int);
                if op.compares() { Type::Bool } else { Type::Int }
            }
        }
    }

    fn call(&mut self, id: ExprId, name: NameId, args: u32, origin: Origin) -> Type {
        let len = self.draft.call_lens.get(&id).copied().unwrap_or(0);
        let list = self.draft.entries(List { start: args, len }).to_vec();
        let text = self.text(name).to_owned();
        let helper = self.scope.iter().rev().find_map(|e| match e.what {
            What::Helper(lambda) if e.name == name => Some(lambda),
            _ => None,
        });
        let Some(lambda) = helper else { return self.builtin(id, name, &text, &list, origin) };
        let info = self.lambdas[lambda as usize].clone();
        self.height = self.height.max(info.height);
        if info.params.len() != list.len() {
            let message = format!("`{text}` takes {}, found {}", count(info.params.len(), "argument"), list.len());
            let at = self.draft.lambdas[lambda as usize].origin;
            self.fault(
                Diagnostic::new(Code::WrongArguments, origin, message).label(at, format!("`{text}` is defined here")),
            );
            for arg in list {
                self.expr(arg);
            }
            return info.value.unwrap_or(Type::Any);
        }
        for (arg, ty) in list.iter().zip(&info.params) {
            self.want(*arg, ty.unwrap_or(Type::Any));
        }
        self.draft.exprs[id as usize].kind = ExprKind::Call { name, lambda, args };
        info.value.unwrap_or(Type::Any)
    }

    fn builtin(&mut self, id: ExprId, name: NameId, text: &str, args: &[ExprId], origin: Origin) -> Type {
        let builtin = Builtin::ALL[..2].iter().copied().find(|b| b.text() == text);
        if builtin.is_none() && text != "abs" {
            match (self.find(name), text) {
                (_, "F" | "I" | "W" | "B" | "R" | "refresh" | "reduce" | "commit") => {
                    self.fault(Diagnostic::new(Code::Syntax, origin, "an action is a statement, not a value"));
                }
                (Some((_, entry)), _) => {
                    let fault = Diagnostic::new(
                        Code::TypeMismatch,
                        origin,
                        format!("`{text}` is a variable, it cannot be called"),
                    );
                    self.fault(fault.label(entry.origin, "introduced here"));
                }
                _ => self.unknown(name, origin),
            }
            for arg in args {
                self.expr(*arg);
            }
            return Type::Any;
        }
        for arg in args {
            self.want(*arg, Type::Int);
        }
        let kind = match (builtin, args) {
            (Some(builtin), [a, b]) => ExprKind::Builtin(builtin, *a, *b),
            (None, [a]) => ExprKind::Abs(*a),
            (builtin, _) => {
                let want = if builtin.is_some() { 2 } else { 1 };
                let message = format!("`{text}` takes {}, found {}", count(want, "argument"), args.len());
                let fault = Diagnostic::new(Code::WrongArguments, origin, message);
                let nested = builtin.is_some() && args.len() > 2;
                self.fault(if nested { fault.help(format!("`{text}(a, {text}(b, c))`")) } else { fault });
                return Type::Int;
            }
        };
        self.draft.exprs[id as usize].kind = kind;
        Type::Int
    }
}
