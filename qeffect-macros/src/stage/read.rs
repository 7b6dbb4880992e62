//! From the tokens of a function to its body, or to what is wrong with it.
//!
//! A call by a plain name, `f(..)`, is an op; its arguments are activations, or configuration and parameters, which are
//! handed on as written. `Shape::of(..)` and `w.shape()` are configuration.

mod misuse;
mod nested;
mod signature;
mod tokens;

use std::collections::BTreeMap;

use proc_macro2::{Ident, Span, TokenStream};
use quote::ToTokens;
use syn::{Block, Expr, ExprCall, ItemFn, Local, Pat, Stmt};

use super::body::{Call, Item, Scope, Var};
use crate::faults::{Faults, span_of};
pub use signature::Signature;
use tokens::{field_name, idents, op_of, strip};

/// A name that some `let` or parameter gave to activations.
struct Declared {
    name: String,
    /// The activation that it stands for now.
    var: Var,
    depth: usize,
}

/// What names stand for here: places among all declarations.
type Names = BTreeMap<String, usize>;

struct Made {
    name: String,
    span: (Span, Span),
    depth: usize,
    used: bool,
}

/// A scope that is being read.
#[derive(Default)]
struct Frame {
    scope: Scope,
    /// Values from outside by their names inside, with the place of first use.
    captured: BTreeMap<Var, (Var, (Span, Span))>,
    /// Outer variables that were assigned: by declaration, with the place.
    assigned: BTreeMap<usize, (Var, (Span, Span))>,
}

struct Reader<'f> {
    faults: &'f mut Faults,
    made: Vec<Made>,
    frames: Vec<Frame>,
    names: Names,
    declared: Vec<Declared>,
    /// Names of configuration.
    config: Vec<String>,
}

/// Reads a function whose body is not there yet.
pub fn head(function: &ItemFn, faults: &mut Faults) -> Option<(Signature, Option<Scope>)> {
    let (signature, _) = signature::read(&function.sig, faults)?;
    Some((signature, None))
}

/// Reads a function. Faults are reported; after some of them its body, or its signature too, stays unknown.
pub fn function(function: &ItemFn, faults: &mut Faults) -> Option<(Signature, Option<Scope>)> {
    let (signature, inputs) = signature::read(&function.sig, faults)?;
    let mut reader = Reader {
        faults,
        made: Vec::new(),
        frames: vec![Frame::default()],
        names: Names::new(),
        declared: Vec::new(),
        config: signature.params.iter().flat_map(|param| idents(&param.pat)).map(|ident| ident.to_string()).collect(),
    };
    for ident in &inputs.names {
        let var = reader.make(&ident.to_string(), span_of(ident));
        reader.frames[0].scope.inputs.push(var);
        reader.declare(ident, var);
    }
    let results = reader.block(&function.block, inputs.outputs);
    let mut scope = reader.frames.pop().unwrap_or_default().scope;
    let Some(results) = results else { return Some((signature, None)) };
    reader.consume(&results);
    scope.results = results;
    reader.unused();
    Some((signature, Some(scope)))
}

impl Reader<'_> {
    fn make(&mut self, name: &str, span: (Span, Span)) -> Var {
        self.made.push(Made { name: name.into(), span, depth: self.frames.len() - 1, used: false });
        self.made.len() - 1
    }

    fn declare(&mut self, ident: &Ident, var: Var) {
        let name = ident.to_string();
        self.names.insert(name.clone(), self.declared.len());
        self.declared.push(Declared { name, var, depth: self.frames.len() - 1 });
    }

    fn push(&mut self, item: Item) {
        if let Some(frame) = self.frames.last_mut() {
            frame.scope.items.push(item);
        }
    }

    fn consume(&mut self, values: &[Var]) {
        for value in values {
            self.made[*value].used = true;
        }
    }

    /// Activations that nothing uses: their gradient would be zero, so computing them is a mistake.
    fn unused(&mut self) {
        for made in self.made.iter().filter(|made| !made.used) {
            let message = match made.name.as_str() {
                "" => "this activation is not used".to_owned(),
                name => format!("the activation `{name}` is not used"),
            };
            self.faults.at(made.span, message, "use it, or remove it: what does not reach the result has no gradient");
        }
    }

    /// A value by name, from whatever scope it is.
    fn resolve(&mut self, ident: &Ident) -> Option<Var> {
        let declared = *self.names.get(&ident.to_string())?;
        Some(self.capture(self.declared[declared].var, span_of(ident)))
    }

    /// A value of this or an outer scope, as this scope names it.
    fn capture(&mut self, var: Var, at: (Span, Span)) -> Var {
        let mut var = var;
        for depth in self.made[var].depth + 1..self.frames.len() {
            let inner = match self.frames[depth].captured.get(&var) {
                Some((inner, _)) => *inner,
                None => {
                    let (name, span) = (self.made[var].name.clone(), self.made[var].span);
                    self.made.push(Made { name, span, depth, used: false });
                    let inner = self.made.len() - 1;
                    self.frames[depth].captured.insert(var, (inner, at));
                    inner
                }
            };
            self.made[var].used = true;
            var = inner;
        }
        self.made[var].used = true;
        var
    }

    /// Statements and the values at their end.
    fn block(&mut self, block: &Block, want: usize) -> Option<Vec<Var>> {
        let names = self.names.clone();
        let result = self.statements(block, want);
        self.names = names;
        result
    }

    fn statements(&mut self, block: &Block, want: usize) -> Option<Vec<Var>> {
        let (last, rest) = match block.stmts.split_last() {
            Some((Stmt::Expr(last, None), rest)) if want > 0 => (Some(last), rest),
            _ => (None, &block.stmts[..]),
        };
        for statement in rest {
            self.statement(statement);
        }
        match last {
            Some(last) => self.values(last, want),
            None if want == 0 => Some(Vec::new()),
            None => {
                let close = block.brace_token.span.close();
                self.faults.at(
                    (close, close),
                    "this block ends without an activation",
                    "end it in the result, without `;`",
                );
                None
            }
        }
    }

    fn statement(&mut self, statement: &Stmt) {
        match statement {
            Stmt::Local(local) => self.local(local),
            Stmt::Item(item) => self.config(item.to_token_stream()),
            Stmt::Macro(call) => {
                self.faults.add(
                    call,
                    "a macro in a stage",
                    "write it out, or check configuration when the stage is built",
                );
            }
            Stmt::Expr(Expr::Assign(assign), _) => self.assign(assign),
            Stmt::Expr(Expr::ForLoop(each), _) => self.for_loop(each),
            Stmt::Expr(Expr::If(branch), _) => {
                self.branch(branch, 0);
            }
            Stmt::Expr(Expr::Block(inner), _) if inner.label.is_none() => {
                self.block(&inner.block, 0);
            }
            Stmt::Expr(call @ Expr::Call(_), Some(_)) if self.is_value(call) => {
                self.faults.add(call, "the result of this op is not used", "bind it by `let`, or remove the call");
            }
            Stmt::Expr(other, _) => self.misuse(other),
        }
    }

    fn config(&mut self, tokens: TokenStream) {
        if let Some(frame) = self.frames.last_mut() {
            frame.scope.config.push(tokens);
        }
    }

    fn local(&mut self, local: &Local) {
        let Some(init) = &local.init else {
            self.faults.add(local, "a name without a value", "bind it where its value is made");
            return;
        };
        if let Some((_, otherwise)) = &init.diverge {
            self.faults.add(
                otherwise,
                "`let .. else` leaves the stage early",
                "a stage runs from its first line to its last",
            );
            return;
        }
        if !self.is_value(&init.expr) {
            if self.is_misused(&init.expr) {
                self.misuse(&init.expr);
            } else {
                self.configuration(local);
            }
            return;
        }
        let Some(targets) = self.targets(&local.pat) else { return };
        let alias = matches!(strip(&init.expr), Expr::Path(_));
        let Some(values) = self.values(&init.expr, targets.len()) else {
            // Known all the same, so that later uses give no errors of their own.
            for (ident, _) in targets {
                let var = self.make("", span_of(&ident));
                self.made[var].used = true;
                self.declare(&ident, var);
            }
            return;
        };
        for ((ident, mutable), mut value) in targets.into_iter().zip(values) {
            if alias && mutable {
                let to = self.make(&ident.to_string(), span_of(&ident));
                self.push(Item::Alias { from: value, to });
                value = to;
            } else if !alias {
                // It is better known by this name.
                let made = &mut self.made[value];
                (made.name, made.span) = (ident.to_string(), span_of(&ident));
            }
            self.declare(&ident, value);
        }
    }

    /// A binding of configuration, which is kept as written.
    fn configuration(&mut self, local: &Local) {
        for ident in idents(&local.pat) {
            let name = ident.to_string();
            self.names.remove(&name);
            if self.config.contains(&name) {
                let help = "choose another name: configuration is evaluated in front of the ops, in F, I and W alike";
                self.faults.add(&ident, format!("`{name}` names configuration already"), help);
            }
            self.config.push(name);
        }
        self.config(local.to_token_stream());
    }

    /// Names on the left of a `let` that binds activations.
    fn targets(&mut self, pat: &Pat) -> Option<Vec<(Ident, bool)>> {
        match pat {
            Pat::Ident(ident) if ident.by_ref.is_none() && ident.subpat.is_none() => {
                Some(vec![(ident.ident.clone(), ident.mutability.is_some())])
            }
            Pat::Type(typed) => self.targets(&typed.pat),
            Pat::Paren(inner) => self.targets(&inner.pat),
            Pat::Tuple(tuple) => {
                let mut all = Vec::new();
                for part in &tuple.elems {
                    all.extend(self.targets(part)?);
                }
                Some(all)
            }
            Pat::Wild(_) => {
                self.faults.add(
                    pat,
                    "an activation is not used",
                    "give it a name and use it: what does not reach the result has no gradient",
                );
                None
            }
            other => {
                self.faults.add(other, "activations are bound to a name, or to a tuple of names", "");
                None
            }
        }
    }

    fn assign(&mut self, assign: &syn::ExprAssign) {
        let target = match strip(&assign.left) {
            Expr::Path(path) => path.path.get_ident().cloned(),
            _ => None,
        };
        let known = target.as_ref().and_then(|ident| self.names.get(&ident.to_string())).copied();
        let (Some(ident), Some(declared)) = (target, known) else {
            let help = "a stage only rebinds activations, as in `x = add(x, y)`";
            self.faults.add(&assign.left, "mutation in a stage", help);
            return;
        };
        let Some(values) = self.values(&assign.right, 1) else { return };
        let alias = matches!(strip(&assign.right), Expr::Path(_));
        let value = values[0];
        if !alias {
            let made = &mut self.made[value];
            (made.name, made.span) = (ident.to_string(), span_of(&assign.left));
        }
        // Of a name that is not `mut` rustc says so itself.
        self.assigned(declared, value, span_of(assign));
    }

    /// An expression that gives `want` activations.
    fn values(&mut self, expr: &Expr, want: usize) -> Option<Vec<Var>> {
        let values = match expr {
            Expr::Paren(inner) => return self.values(&inner.expr, want),
            Expr::Group(inner) => return self.values(&inner.expr, want),
            Expr::Block(inner) if inner.label.is_none() => return self.block(&inner.block, want),
            Expr::If(branch) => return self.branch(branch, want),
            Expr::Call(call) if op_of(call).is_some() => return self.call(call, want),
            Expr::Path(path) => match path.path.get_ident().and_then(|ident| self.resolve(ident)) {
                Some(var) => vec![var],
                None => {
                    let text = path.to_token_stream().to_string();
                    let help = "activations are parameters of type `Act` and what ops give";
                    self.faults.add(path, format!("`{text}` is not an activation"), help);
                    return None;
                }
            },
            Expr::Tuple(tuple) => {
                let mut all = Vec::new();
                for part in &tuple.elems {
                    all.extend(self.values(part, 1)?);
                }
                all
            }
            other => {
                self.misuse(other);
                return None;
            }
        };
        if values.len() == want {
            return Some(values);
        }
        self.faults.add(expr, format!("{} where {} expected", count(values.len()), expected(want)), "");
        None
    }

    fn call(&mut self, call: &ExprCall, want: usize) -> Option<Vec<Var>> {
        let op = op_of(call)?.clone();
        if let Some(segment) = op.segments.iter().find(|segment| !segment.arguments.is_none()) {
            self.faults.add(&segment.arguments, "an op takes no generic arguments", "");
            return None;
        }
        let (mut inputs, mut args) = (Vec::new(), Vec::new());
        let mut broken = false;
        for arg in &call.args {
            if self.is_value(arg) {
                match self.values(arg, 1) {
                    Some(values) => inputs.extend(values),
                    None => broken = true,
                }
            } else if self.is_misused(arg) {
                self.misuse(arg);
                broken = true;
            } else {
                self.forbidden(arg);
                args.push(arg.clone());
            }
        }
        if broken {
            return None;
        }
        let span = span_of(call);
        self.consume(&inputs);
        let outputs: Vec<Var> = (0..want).map(|_| self.make("", span)).collect();
        let name = args.iter().find_map(field_name);
        let name = name.or_else(|| op.segments.last().map(|segment| segment.ident.to_string())).unwrap_or_default();
        self.push(Item::Call(Call { op, inputs, args, outputs: outputs.clone(), name }));
        Some(outputs)
    }
}

fn count(values: usize) -> String {
    match values {
        1 => "one activation".into(),
        n => format!("{n} activations"),
    }
}

fn expected(values: usize) -> String {
    match values {
        1 => "one is".into(),
        n => format!("{n} are"),
    }
}
