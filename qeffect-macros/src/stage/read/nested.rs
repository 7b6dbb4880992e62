//! Scopes within scopes: loops and branches, what they take from outside and what they assign there.

use proc_macro2::Span;
use syn::{Expr, ExprForLoop, ExprIf};

use super::tokens::{condition_names, field_name, idents};
use super::{Frame, Made, Reader};
use crate::faults::span_of;
use crate::stage::body::{Branch, Carried, Item, Loop, Var};

impl Reader<'_> {
    /// Reads a nested scope; gives its frame and its results, and puts outer names back.
    pub(super) fn nested(&mut self, read: impl FnOnce(&mut Self) -> Option<Vec<Var>>) -> (Frame, Option<Vec<Var>>) {
        let names = self.names.clone();
        let config = self.config.clone();
        let vars: Vec<Var> = self.declared.iter().map(|declared| declared.var).collect();
        self.frames.push(Frame::default());
        let results = read(self);
        for (declared, var) in self.declared.iter_mut().zip(vars) {
            declared.var = var;
        }
        self.names = names;
        self.config = config;
        (self.frames.pop().unwrap_or_default(), results)
    }

    pub(super) fn for_loop(&mut self, each: &ExprForLoop) {
        if let Some(label) = &each.label {
            self.faults.add(label, "a label in a stage", "a stage runs from its first line to its last");
        }
        if self.mentions(&each.expr) || self.is_value(&each.expr) {
            let help = "loop over a list of parameters: `for layer in &w.layers`";
            self.faults.add(&each.expr, "a loop over data: how often it runs must follow from the configuration", help);
            return;
        }
        self.forbidden(&each.expr);
        let faults = self.faults.count();
        let (mut frame, results) = self.nested(|reader| {
            for ident in idents(&each.pat) {
                reader.names.remove(&ident.to_string());
                reader.config.push(ident.to_string());
            }
            reader.block(&each.body, 0)
        });
        if results.is_none() {
            return;
        }
        let mut carried = Vec::new();
        for (declared, (value, at)) in std::mem::take(&mut frame.assigned) {
            let name = self.declared[declared].name.clone();
            let before = self.capture(self.declared[declared].var, at);
            let Some((inner, _)) = frame.captured.remove(&before) else {
                self.made[value].used = true;
                let message = format!("`{name}` is assigned in this loop and not read");
                self.faults.at(
                    at,
                    message,
                    "a round begins with what the round before gave: read it, or move it out of the loop",
                );
                continue;
            };
            self.made[value].used = true;
            let after = self.make(&name, at);
            frame.scope.inputs.push(inner);
            frame.scope.results.push(value);
            carried.push(Carried { before, after });
            self.assigned(declared, after, at);
        }
        for (var, (_, at)) in &frame.captured {
            let message = format!("`{}` comes from outside and is the same in every round", self.made[*var].name);
            self.faults.at(*at, message, "a loop reads what it assigns: `x = block(x, layer)`");
        }
        if carried.is_empty() && frame.captured.is_empty() && self.faults.count() == faults {
            self.faults.add(&each.for_token, "this loop assigns no activation", "as in `x = block(x, layer)`");
        }
        let name = field_name(&each.expr).unwrap_or_else(|| "loop".into());
        let (pat, list) = ((*each.pat).clone(), (*each.expr).clone());
        self.push(Item::Loop(Loop { pat, list, carried, body: frame.scope, name }));
    }

    /// A name stands for a new value; the scope around learns of it, if the name is not of this one.
    pub(super) fn assigned(&mut self, declared: usize, value: Var, at: (Span, Span)) {
        let depth = self.frames.len() - 1;
        let name = &mut self.declared[declared];
        name.var = value;
        if name.depth < depth {
            self.frames[depth].assigned.insert(declared, (value, at));
        }
    }

    /// `if`: as an expression that gives `want` values, or as a statement that assigns.
    pub(super) fn branch(&mut self, branch: &ExprIf, want: usize) -> Option<Vec<Var>> {
        if self.mentions(&branch.cond) {
            let help = "decide by the configuration: every microbatch runs the same ops";
            self.faults.add(&branch.cond, "control flow that depends on data", help);
            return None;
        }
        self.forbidden(&branch.cond);
        let faults = self.faults.count();
        let bound = condition_names(&branch.cond);
        let (then, then_results) = self.nested(|reader| {
            for ident in bound {
                reader.names.remove(&ident.to_string());
                reader.config.push(ident.to_string());
            }
            reader.block(&branch.then_branch, want)
        });
        let (other, other_results) = match &branch.else_branch {
            Some((_, otherwise)) => self.nested(|reader| match &**otherwise {
                Expr::Block(block) => reader.block(&block.block, want),
                Expr::If(inner) => reader.branch(inner, want),
                other => reader.values(other, want),
            }),
            None if want == 0 => (Frame::default(), Some(Vec::new())),
            None => {
                self.faults.add(&branch.if_token, "an `if` that gives an activation needs an `else`", "");
                return None;
            }
        };
        let (mut then, mut other) = (then, other);
        then.scope.results = then_results?;
        other.scope.results = other_results?;
        self.consume(&then.scope.results);
        self.consume(&other.scope.results);

        let mut declared: Vec<usize> = then.assigned.keys().chain(other.assigned.keys()).copied().collect();
        declared.sort_unstable();
        declared.dedup();
        let depth = self.frames.len();
        let mut outputs: Vec<Var> = (0..want).map(|_| self.make("", span_of(branch))).collect();
        let mut rebound = Vec::new();
        for declared in declared {
            let name = self.declared[declared].name.clone();
            let at = then
                .assigned
                .get(&declared)
                .or_else(|| other.assigned.get(&declared))
                .map_or_else(|| span_of(branch), |(_, at)| *at);
            let before = self.capture(self.declared[declared].var, at);
            for frame in [&mut then, &mut other] {
                let value = match frame.assigned.get(&declared) {
                    Some((value, _)) => *value,
                    None => match frame.captured.get(&before) {
                        Some((inner, _)) => *inner,
                        None => {
                            self.made.push(Made { name: name.clone(), span: at, depth, used: true });
                            let inner = self.made.len() - 1;
                            frame.captured.insert(before, (inner, at));
                            inner
                        }
                    },
                };
                self.made[value].used = true;
                frame.scope.results.push(value);
            }
            let after = self.make(&name, at);
            outputs.push(after);
            rebound.push((declared, after, at));
        }
        // A branch with a fault may use more than was read of it.
        let whole = self.faults.count() == faults;
        for (here, there) in [(&then, &other), (&other, &then)].into_iter().filter(|_| whole) {
            for (var, (_, at)) in here.captured.iter().filter(|(var, _)| !there.captured.contains_key(*var)) {
                let message = format!("`{}` is used in one branch only", self.made[*var].name);
                self.faults.at(*at, message, "compute it inside that branch, or use it in both");
            }
        }
        let captured: Vec<Var> = then.captured.keys().copied().collect();
        for frame in [&mut then, &mut other] {
            frame.scope.inputs = frame.captured.values().map(|(inner, _)| *inner).collect();
        }
        for (declared, after, at) in rebound {
            self.assigned(declared, after, at);
        }
        if outputs.is_empty() {
            if self.faults.count() == faults {
                let help = "an `if` chooses between ops: as in `x = if w.gated { silu(x) } else { gelu(x) }`";
                self.faults.add(&branch.if_token, "this `if` gives no activation and assigns none", help);
            }
            return None;
        }
        let given = outputs[..want].to_vec();
        let cond = (*branch.cond).clone();
        self.push(Item::Branch(Branch { cond, captured, outputs, then: then.scope, other: other.scope }));
        Some(given)
    }
}
