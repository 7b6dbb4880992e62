//! What a stage's body may not do with activations, and how to say it.

use proc_macro2::{Ident, TokenTree};
use quote::ToTokens;
use syn::{BinOp, Expr, UnOp};

use super::Reader;
use super::tokens::{op_of, strip, text, walk};
use crate::faults::span_of;

const ONE_WAY: &str = "a stage runs from its first line to its last, so that its backward is known when it is compiled";

impl Reader<'_> {
    /// Whether an expression gives activations: a name of one, a call of an op, or something made of these.
    pub(super) fn is_value(&self, expr: &Expr) -> bool {
        match strip(expr) {
            Expr::Path(path) => path.path.get_ident().is_some_and(|ident| self.names.contains_key(&ident.to_string())),
            Expr::Call(call) => op_of(call).is_some(),
            Expr::Tuple(tuple) => tuple.elems.iter().any(|part| self.is_value(part)),
            Expr::If(branch) => self.mentions(branch) || calls_an_op(&branch.then_branch.stmts),
            Expr::Block(block) => self.mentions(block) || calls_an_op(&block.block.stmts),
            _ => false,
        }
    }

    /// Whether an expression that is no activation has one in it, or leaves the stage.
    pub(super) fn is_misused(&self, expr: &Expr) -> bool {
        self.mentions(expr) || leaves(expr).is_some()
    }

    /// Whether an activation occurs by name. Fields and methods of that name do not count.
    pub(super) fn mentions(&self, tokens: &impl ToTokens) -> bool {
        !self.mentioned(tokens).is_empty()
    }

    fn mentioned(&self, tokens: &impl ToTokens) -> Vec<Ident> {
        let mut found = Vec::new();
        walk(tokens.to_token_stream(), &mut |before, tree, after| {
            let TokenTree::Ident(ident) = tree else { return };
            let [far, near] = before.map(punct);
            // `w.x` and `path::x`, and not `..x` or `name: x`.
            let member = (near == Some('.') && far != Some('.')) || (near == Some(':') && far == Some(':'));
            let named = after.first().and_then(punct_of) == Some(':') && after.get(1).and_then(punct_of) != Some(':');
            if !member && !named && self.names.contains_key(&ident.to_string()) {
                found.push(ident.clone());
            }
        });
        found
    }

    /// Reports what leaves the stage inside an expression of the configuration.
    pub(super) fn forbidden(&mut self, expr: &Expr) {
        if let Some(tree) = leaves(expr) {
            self.early(&tree);
        }
    }

    fn early(&mut self, tree: &TokenTree) {
        let message = match tree.to_string().as_str() {
            "?" => "`?` leaves the stage early".to_owned(),
            word => format!("`{word}` leaves the stage early"),
        };
        self.faults.add(tree, message, ONE_WAY);
    }

    /// Reports why an expression cannot stand in a stage.
    pub(super) fn misuse(&mut self, expr: &Expr) {
        let mentioned = self.mentioned(expr);
        let name = mentioned.first().map_or_else(|| "x".to_owned(), |ident| ident.to_string());
        // Used, if wrongly: no fault of its own.
        for ident in &mentioned {
            let _ = self.resolve(ident);
        }
        match expr {
            Expr::Paren(inner) => self.misuse(&inner.expr),
            Expr::Closure(closure) => {
                let help = "call ops in the body itself: the macro reads what runs, and cannot look into a closure";
                self.faults.add(closure, format!("a closure over the activation `{name}`"), help);
            }
            Expr::Try(inner) => {
                self.faults.add(
                    &inner.question_token,
                    "`?` leaves the stage early",
                    "ops fail on their own: write the call without `?`",
                );
            }
            Expr::Return(early) => {
                self.faults.add(
                    &early.return_token,
                    "`return` leaves the stage early",
                    "end the body in its result; choose by `if` on the configuration",
                );
            }
            Expr::Break(inner) => self.faults.add(&inner.break_token, "`break` leaves the loop early", ONE_WAY),
            Expr::Continue(inner) => {
                self.faults.add(&inner.continue_token, "`continue` leaves the round early", ONE_WAY)
            }
            Expr::Match(inner) => self.flow(&inner.match_token, "`match`"),
            Expr::While(inner) => self.flow(&inner.while_token, "`while`"),
            Expr::Loop(inner) => self.flow(&inner.loop_token, "`loop`"),
            Expr::Binary(binary) if assigns(&binary.op) => {
                let help = format!("make a new value: `{name} = add({name}, ..)`");
                self.faults.add(expr, "mutation in a stage", &help);
            }
            Expr::Binary(binary) => {
                let help = match binary.op {
                    BinOp::Add(_) => format!("write `add({}, {})`", text(&binary.left), text(&binary.right)),
                    _ => "call an op, so that its backward is known".into(),
                };
                self.faults.add(&binary.op, "an operator between activations", &help);
            }
            Expr::Unary(unary) => {
                let what = match unary.op {
                    UnOp::Deref(_) => "a dereferenced activation",
                    _ => "an operator on an activation",
                };
                self.faults.add(unary, what, "call an op, so that its backward is known");
            }
            Expr::Reference(reference) if reference.mutability.is_some() => {
                self.faults.add(reference, "mutation in a stage", &format!("make a new value: `let {name} = ..`"));
            }
            Expr::Reference(reference) => {
                self.faults.add(
                    reference,
                    format!("the activation `{name}` is borrowed"),
                    "activations are passed by value: drop the `&`",
                );
            }
            Expr::MethodCall(call) => {
                let help = format!("call an op: `{}(..)`", call.method);
                self.faults.add(&call.method, "a method call on an activation", &help);
            }
            Expr::Field(field) => {
                let help = "take the parts of a tuple by `let (a, b) = ..`";
                self.faults.add(field, "a field of an activation", help);
            }
            Expr::Macro(call) => self.faults.add(call, "a macro in a stage", "write it out"),
            Expr::Call(call) => {
                let what = format!("`{}` is not an op", text(&call.func));
                self.faults.add(&call.func, what, "an op is called by its name: `gelu(x)`");
            }
            Expr::Assign(assign) => {
                self.faults.add(&assign.left, "mutation in a stage", "assign in a statement of its own")
            }
            other => {
                self.faults.at(
                    span_of(other),
                    "this cannot stand in a stage",
                    "a stage is `let`, calls of ops, `if` on the configuration and `for` over layers",
                );
            }
        }
    }

    fn flow(&mut self, token: &impl ToTokens, what: &str) {
        let help = "a stage branches by `if` on the configuration, and loops over layers by `for`";
        self.faults.add(token, format!("{what} in a stage: control flow must not depend on data"), help);
    }
}

/// The first `?`, `return`, `break` or `continue`.
fn leaves(expr: &Expr) -> Option<TokenTree> {
    let mut found = None;
    walk(expr.to_token_stream(), &mut |_, tree, _| {
        let early = match tree {
            TokenTree::Punct(punct) => punct.as_char() == '?',
            TokenTree::Ident(ident) => ident == "return" || ident == "break" || ident == "continue",
            _ => false,
        };
        if early && found.is_none() {
            found = Some(tree.clone());
        }
    });
    found
}

fn calls_an_op(statements: &[syn::Stmt]) -> bool {
    match statements.last() {
        Some(syn::Stmt::Expr(Expr::Call(call), None)) => op_of(call).is_some(),
        _ => false,
    }
}

fn punct(tree: Option<&TokenTree>) -> Option<char> {
    tree.and_then(punct_of)
}

fn punct_of(tree: &TokenTree) -> Option<char> {
    match tree {
        TokenTree::Punct(punct) => Some(punct.as_char()),
        _ => None,
    }
}

const fn assigns(op: &BinOp) -> bool {
    matches!(
        op,
        BinOp::AddAssign(_)
            | BinOp::SubAssign(_)
            | BinOp::MulAssign(_)
            | BinOp::DivAssign(_)
            | BinOp::RemAssign(_)
            | BinOp::BitXorAssign(_)
            | BinOp::BitAndAssign(_)
            | BinOp::BitOrAssign(_)
            | BinOp::ShlAssign(_)
            | BinOp::ShrAssign(_)
    )
}
