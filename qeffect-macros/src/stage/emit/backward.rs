//! I and W of a scope, from its last item to its first.

use std::collections::BTreeMap;

use proc_macro2::{Ident, TokenStream};
use quote::{format_ident, quote_spanned};

use super::retained::{Names, field};
use super::{Emitter, at_op, hygienic, local, located, open, pack, retains};
use crate::stage::body::{Branch, Item, Loop, Scope, Var};

/// Gradients while a scope runs backward: who they are, and whether this scope holds them.
type Gradients = BTreeMap<Var, (Ident, bool)>;

impl Emitter<'_> {
    /// A block that gives `(gradients of inputs, work)`. `dys` are borrowed.
    pub(super) fn input_grad(&self, scope: &Scope, names: &Names, dys: &[Ident]) -> TokenStream {
        let krate = self.krate;
        let mut code = Vec::new();
        let mut gradients = Gradients::new();
        let mut fresh = 0;
        for (result, dy) in scope.results.iter().zip(dys) {
            self.contribute(&mut code, &mut gradients, &mut fresh, *result, (dy.clone(), false));
        }
        for (at, item) in scope.items.iter().enumerate().rev() {
            let (tape, work) = (local(&format!("t{at}")), local(&format!("w{at}")));
            let outputs: Vec<(Ident, bool)> =
                item.makes().iter().filter_map(|output| gradients.remove(output)).collect();
            let packed = pack(&outputs.iter().map(|(g, _)| hygienic!(#g)).collect::<Vec<_>>());
            let inputs = item.uses();
            let dxs: Vec<Ident> = (0..inputs.len()).map(|n| local(&format!("d{at}_{n}"))).collect();
            let given = pack(&dxs.iter().map(|d| hygienic!(#d)).collect::<Vec<_>>());
            match item {
                Item::Alias { from, .. } => {
                    for gradient in outputs {
                        self.contribute(&mut code, &mut gradients, &mut fresh, *from, gradient);
                    }
                    continue;
                }
                Item::Call(call) => {
                    let (op, param) = (self.op(call), self.param(call));
                    let (at, given, packed) = (at_op(call), located(given, call), located(packed, call));
                    code.push(quote_spanned! {at=>
                        #param
                        let (#given, #work, after) = #op::input_grad(cx, #packed, param, #tape, token)?;
                        token = after;
                    });
                }
                Item::Loop(each) => {
                    let starts: Vec<TokenStream> = outputs.iter().map(|(g, _)| self.share(g)).collect();
                    code.push(self.input_grad_loop(at, each, names, &starts, &dxs));
                }
                Item::Branch(branch) => {
                    let side = |this: &Self, scope: &Scope, side: usize, name: &str| {
                        let names = &names.inner[&(at, side)];
                        let dys: Vec<Ident> = outputs.iter().map(|(g, _)| g.clone()).collect();
                        let body = this.input_grad(scope, names, &dys);
                        let name = format_ident!("{name}");
                        hygienic! {
                            let #krate::retained::Either::#name(tape) = #tape else {
                                return ::core::result::Result::Err(#krate::error::Error::branch());
                            };
                            let (dx, work) = #body;
                            (dx, #krate::retained::Either::#name(work))
                        }
                    };
                    let cond = &branch.cond;
                    let then = side(self, &branch.then, 0, "Then");
                    let other = side(self, &branch.other, 1, "Else");
                    code.push(hygienic!(let (#given, #work) = if #cond { #then } else { #other };));
                }
            }
            code.extend(outputs.iter().filter(|(_, held)| *held).map(|(g, _)| self.free(g)));
            for (input, dx) in inputs.into_iter().zip(dxs) {
                self.contribute(&mut code, &mut gradients, &mut fresh, input, (dx, true));
            }
        }
        let results: Vec<TokenStream> = scope
            .inputs
            .iter()
            .map(|input| match gradients.get(input) {
                Some((gradient, true)) => hygienic!(#gradient),
                Some((gradient, false)) => self.share(gradient),
                None => hygienic!(()), // every input is used: the reader has seen to it
            })
            .collect();
        let results = pack(&results);
        let (open, config) = (open(scope, &names.types.tape, "t", "tape"), &scope.config);
        let work = &names.types.work;
        let parts = scope.items.iter().enumerate().filter(|(_, item)| retains(item)).map(|(at, _)| {
            let (field, work) = (field(at), local(&format!("w{at}")));
            hygienic!(#field: #work)
        });
        hygienic!({ #(#config)* #open #(#code)* (#results, #work { #(#parts),* }) })
    }

    fn input_grad_loop(
        &self,
        at: usize,
        each: &Loop,
        names: &Names,
        starts: &[TokenStream],
        dxs: &[Ident],
    ) -> TokenStream {
        let (tape, work) = (local(&format!("t{at}")), local(&format!("w{at}")));
        let (pat, list) = (&each.pat, &each.list);
        let now: Vec<Ident> = (0..starts.len()).map(|n| local(&format!("c{at}_{n}"))).collect();
        let next: Vec<Ident> = (0..starts.len()).map(|n| local(&format!("n{at}_{n}"))).collect();
        let results = pack(&next.iter().map(|n| hygienic!(#n)).collect::<Vec<_>>());
        let body = self.input_grad(&each.body, &names.inner[&(at, 0)], &now);
        let frees = now.iter().map(|now| self.free(now));
        hygienic! {
            let mut #work = ::std::vec::Vec::new();
            #(let mut #now = #starts;)*
            let rounds = ::core::iter::IntoIterator::into_iter(#list);
            for (#pat, tape) in ::core::iter::Iterator::rev(::core::iter::Iterator::zip(rounds, #tape)) {
                let (#results, work) = #body;
                #(#frees)*
                #(#now = #next;)*
                #work.push(work);
            }
            #(let #dxs = #now;)*
        }
    }

    /// Adds a gradient of `of`.
    fn contribute(
        &self,
        code: &mut Vec<TokenStream>,
        gradients: &mut Gradients,
        fresh: &mut usize,
        of: Var,
        (gradient, held): (Ident, bool),
    ) {
        let krate = self.krate;
        let Some((sum_so_far, held_so_far)) = gradients.remove(&of) else {
            gradients.insert(of, (gradient, held));
            return;
        };
        let sum = local(&format!("g{of}_{fresh}"));
        *fresh += 1;
        code.push(hygienic!(let #sum = #krate::value::Value::sum(#sum_so_far, #gradient, cx)?;));
        code.extend(
            [(sum_so_far, held_so_far), (gradient, held)].iter().filter(|(_, held)| *held).map(|(g, _)| self.free(g)),
        );
        gradients.insert(of, (sum, true));
    }

    /// Statements, the last item first.
    pub(super) fn weight_grad(&self, scope: &Scope, names: &Names) -> TokenStream {
        let krate = self.krate;
        let (open, config) = (open(scope, &names.types.work, "w", "work"), &scope.config);
        let mut code = Vec::new();
        for (at, item) in scope.items.iter().enumerate().rev() {
            let work = local(&format!("w{at}"));
            code.push(match item {
                Item::Alias { .. } => continue,
                Item::Call(call) => {
                    let (op, param) = (self.op(call), self.param(call));
                    hygienic!(#param #op::weight_grad(cx, param, #work)?;)
                }
                Item::Loop(Loop { pat, list, body, .. }) => {
                    let body = self.weight_grad(body, &names.inner[&(at, 0)]);
                    hygienic! {
                        let rounds = ::core::iter::Iterator::rev(::core::iter::IntoIterator::into_iter(#list));
                        for (#pat, work) in ::core::iter::Iterator::zip(rounds, #work) { #body }
                    }
                }
                Item::Branch(Branch { cond, then, other, .. }) => {
                    let side = |scope: &Scope, side: usize, name: &str| {
                        let body = self.weight_grad(scope, &names.inner[&(at, side)]);
                        let name = format_ident!("{name}");
                        hygienic! {
                            let #krate::retained::Either::#name(work) = #work else {
                                return ::core::result::Result::Err(#krate::error::Error::branch());
                            };
                            #body
                        }
                    };
                    let (then, other) = (side(then, 0, "Then"), side(other, 1, "Else"));
                    hygienic!(if #cond { #then } else { #other })
                }
            });
        }
        hygienic!(#(#config)* #open #(#code)*)
    }
}
