//! A stage's body as it was understood: values in the order in which they are made, each made once.

use std::collections::BTreeMap;

use proc_macro2::TokenStream;
use syn::{Expr, Pat, Path};

/// A value: an activation, made once.
pub type Var = usize;

/// Straight-line code.
#[derive(Default)]
pub struct Scope {
    /// Values from outside: borrowed.
    pub inputs: Vec<Var>,
    /// In order.
    pub items: Vec<Item>,
    /// Values that it gives.
    pub results: Vec<Var>,
    /// Bindings of configuration, as written: they may be evaluated in front of everything else.
    pub config: Vec<TokenStream>,
}

/// One step.
pub enum Item {
    /// An op or another stage.
    Call(Call),
    /// A second name that will be assigned to.
    Alias { from: Var, to: Var },
    /// Once per layer.
    Loop(Loop),
    /// One of two, as the configuration says.
    Branch(Branch),
}

/// `f(x, &w.p)`
pub struct Call {
    /// `f`
    pub op: Path,
    /// Activations, in order.
    pub inputs: Vec<Var>,
    /// The other arguments, in order.
    pub args: Vec<Expr>,
    /// What it gives.
    pub outputs: Vec<Var>,
    /// Name in layouts.
    pub name: String,
}

/// A variable that a loop reads and assigns.
pub struct Carried {
    /// Before the loop.
    pub before: Var,
    /// After it.
    pub after: Var,
}

/// `for layer in &w.layers { .. }`
pub struct Loop {
    /// `layer`
    pub pat: Pat,
    /// `&w.layers`
    pub list: Expr,
    /// Parallel to inputs and results of the body.
    pub carried: Vec<Carried>,
    /// One round.
    pub body: Scope,
    /// Name in layouts.
    pub name: String,
}

/// `if w.gated { .. } else { .. }`
pub struct Branch {
    /// `w.gated`, or `let Some(p) = &w.p`.
    pub cond: Expr,
    /// Values from outside that both use; parallel to the inputs of both.
    pub captured: Vec<Var>,
    /// What either gives.
    pub outputs: Vec<Var>,
    /// The branches.
    pub then: Scope,
    pub other: Scope,
}

impl Item {
    /// The values that it takes.
    pub fn uses(&self) -> Vec<Var> {
        match self {
            Item::Call(call) => call.inputs.clone(),
            Item::Alias { from, .. } => vec![*from],
            Item::Loop(each) => each.carried.iter().map(|carried| carried.before).collect(),
            Item::Branch(branch) => branch.captured.clone(),
        }
    }

    /// The values that it makes.
    pub fn makes(&self) -> Vec<Var> {
        match self {
            Item::Call(call) => call.outputs.clone(),
            Item::Alias { to, .. } => vec![*to],
            Item::Loop(each) => each.carried.iter().map(|carried| carried.after).collect(),
            Item::Branch(branch) => branch.outputs.clone(),
        }
    }
}

impl Scope {
    /// Per item, the values made here that nobody needs after it.
    pub fn last_uses(&self) -> Vec<Vec<Var>> {
        let mut last: BTreeMap<Var, usize> = BTreeMap::new();
        for (at, item) in self.items.iter().enumerate() {
            for var in item.makes().into_iter().chain(item.uses()) {
                last.insert(var, at);
            }
        }
        let mut frees = vec![Vec::new(); self.items.len()];
        for (var, at) in last {
            if !self.inputs.contains(&var) && !self.results.contains(&var) {
                frees[at].push(var);
            }
        }
        frees
    }
}
