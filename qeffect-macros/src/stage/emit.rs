//! The four functions of a stage, from its body. This cannot fail.
//!
//! Who holds what: a scope borrows its inputs, holds what it makes, and gives its results away. A value is freed after
//! its last use. Backward, the gradients of results are borrowed and those of inputs given away; a value that is used
//! several times has its gradients added in the order in which they arise, the last use first.

mod backward;
mod retained;

use proc_macro2::{Ident, Span, TokenStream, TokenTree};
use quote::quote_spanned;

use retained::{Names, field};

use super::body::{Call, Item, Loop, Scope, Var};

/// `quote!` whose variables neither see nor hide the user's.
macro_rules! hygienic {
    ($($tokens:tt)*) => { ::quote::quote_spanned!(::proc_macro2::Span::mixed_site()=> $($tokens)*) };
}
pub(super) use hygienic;

/// Writes the functions of one stage.
pub struct Emitter<'a> {
    /// Path of the runtime.
    pub krate: &'a TokenStream,
    /// Structs of what scopes retain, as they are met.
    pub types: Vec<TokenStream>,
    names: usize,
}

fn local(name: &str) -> Ident {
    Ident::new(name, Span::mixed_site())
}

fn var(var: Var) -> Ident {
    local(&format!("v{var}"))
}

/// `()`, `a`, or `(a, b)`.
pub fn pack(parts: &[TokenStream]) -> TokenStream {
    match parts {
        [one] => one.clone(),
        many => hygienic!((#(#many),*)),
    }
}

fn vars(list: &[Var]) -> TokenStream {
    pack(
        &list
            .iter()
            .map(|v| {
                let v = var(*v);
                hygienic!(#v)
            })
            .collect::<Vec<_>>(),
    )
}

/// The parts of a stage that its trait wants.
pub struct Functions {
    pub tape: TokenStream,
    pub work: TokenStream,
    pub forward: TokenStream,
    pub input_grad: TokenStream,
    pub weight_grad: TokenStream,
    pub evaluate: TokenStream,
    pub effects: TokenStream,
}

impl Functions {
    /// Of a stage whose body is not understood, so that its users give no errors of their own.
    pub fn unknown() -> Functions {
        let body = hygienic!(::core::unreachable!());
        Functions {
            tape: hygienic!(()),
            work: hygienic!(()),
            forward: body.clone(),
            input_grad: body.clone(),
            weight_grad: body.clone(),
            evaluate: body,
            effects: TokenStream::new(),
        }
    }
}

impl<'a> Emitter<'a> {
    pub fn new(krate: &'a TokenStream) -> Emitter<'a> {
        Emitter { krate, types: Vec::new(), names: 0 }
    }

    /// Bodies of the four functions over `cx`, `x` or `dy`, `tape` or `work`, `token`.
    pub fn functions(&mut self, scope: &Scope) -> Functions {
        let names = self.declare(scope);
        let (tape, work) = (names.types.tape_type.clone(), names.types.work_type.clone());
        let inputs = vars(&scope.inputs);
        let forward = self.forward(scope, Some(&names));
        let evaluate = self.forward(scope, None);
        let gradients: Vec<Ident> = (0..scope.results.len()).map(|at| local(&format!("dy{at}"))).collect();
        let packed = pack(&gradients.iter().map(|g| hygienic!(#g)).collect::<Vec<_>>());
        let backward = self.input_grad(scope, &names, &gradients);
        let weight_grad = self.weight_grad(scope, &names);
        let effects = self.effects(scope);
        Functions {
            tape,
            work,
            forward: hygienic! {
                let #inputs = x;
                let (y, tape) = #forward;
                ::core::result::Result::Ok((y, tape, token))
            },
            input_grad: hygienic! {
                let #packed = dy;
                let (dx, work) = #backward;
                ::core::result::Result::Ok((dx, work, token))
            },
            weight_grad: hygienic! {
                #weight_grad
                ::core::result::Result::Ok(())
            },
            evaluate: hygienic! {
                let #inputs = x;
                let y = #evaluate;
                ::core::result::Result::Ok(y)
            },
            effects,
        }
    }

    /// `<linear as Op>`
    fn op(&self, call: &Call) -> TokenStream {
        let (krate, op) = (self.krate, &call.op);
        let span = op.segments.last().map_or_else(Span::call_site, |segment| segment.ident.span());
        quote_spanned!(span=> <#op as #krate::op::Op>)
    }

    /// `let param: <linear as Op>::Param<'_> = &w.qkv;`, the same in all functions: what is wrong with it is said once.
    fn param(&self, call: &Call) -> TokenStream {
        let op = self.op(call);
        let at = call.op.segments.last().map_or_else(Span::call_site, |segment| segment.ident.span());
        let args: Vec<TokenStream> = call.args.iter().map(|arg| hygienic!(#arg)).collect();
        let args = match &args[..] {
            [one] => one.clone(),
            many => quote_spanned!(at=> (#(#many),*)),
        };
        // At the op, so that it says what is expected.
        quote_spanned!(at.resolved_at(Span::mixed_site())=> let param: #op::Param<'_> = #args;)
    }

    /// `.and(<linear as Op>::EFFECTS)..`
    fn effects(&self, scope: &Scope) -> TokenStream {
        let mut all = TokenStream::new();
        for item in &scope.items {
            let inner = match item {
                Item::Alias { .. } => continue,
                Item::Call(call) => {
                    let op = self.op(call);
                    hygienic!(.and(#op::EFFECTS))
                }
                Item::Loop(each) => self.effects(&each.body),
                Item::Branch(branch) => [self.effects(&branch.then), self.effects(&branch.other)].into_iter().collect(),
            };
            all.extend(inner);
        }
        all
    }

    fn free(&self, ident: &Ident) -> TokenStream {
        let krate = self.krate;
        hygienic!(#krate::value::Value::free(#ident, cx)?;)
    }

    fn share(&self, ident: &Ident) -> TokenStream {
        let krate = self.krate;
        hygienic!(#krate::value::Value::share(#ident, cx)?)
    }

    /// A block that gives `(results, tape)`, or only results where nothing is retained.
    fn forward(&self, scope: &Scope, names: Option<&Names>) -> TokenStream {
        let krate = self.krate;
        let frees = scope.last_uses();
        let config = &scope.config;
        let mut code = Vec::new();
        for (at, item) in scope.items.iter().enumerate() {
            let tape = local(&format!("t{at}"));
            code.push(match item {
                Item::Call(call) => {
                    let (op, param) = (self.op(call), self.param(call));
                    let (inputs, outputs) = (vars(&call.inputs), vars(&call.outputs));
                    let (at, inputs) = (at_op(call), located(inputs, call));
                    // Bound by themselves, so that what is wrong with them is said once for F and evaluation.
                    let input = quote_spanned!(at=> let input: #op::Input = #inputs;);
                    match names {
                        Some(_) => quote_spanned! {at=>
                            #param
                            #input
                            let (#outputs, #tape, after) = #op::forward(cx, input, param, token)?;
                            token = after;
                        },
                        None => quote_spanned!(at=> #param #input let #outputs = #op::evaluate(cx, input, param)?;),
                    }
                }
                Item::Alias { from, to } => {
                    let (share, to) = (self.share(&var(*from)), var(*to));
                    hygienic!(let #to = #share;)
                }
                Item::Loop(each) => self.forward_loop(at, each, names),
                Item::Branch(branch) => {
                    let names = |side| names.map(|names| &names.inner[&(at, side)]);
                    let (then, other) = (self.forward(&branch.then, names(0)), self.forward(&branch.other, names(1)));
                    let (enter, enter_other) =
                        (enter(&branch.captured, &branch.then), enter(&branch.captured, &branch.other));
                    let (cond, outputs) = (&branch.cond, vars(&branch.outputs));
                    match names(0) {
                        Some(_) => hygienic! {
                            let (#outputs, #tape) = if #cond {
                                #enter
                                let (y, tape) = #then;
                                (y, #krate::retained::Either::Then(tape))
                            } else {
                                #enter_other
                                let (y, tape) = #other;
                                (y, #krate::retained::Either::Else(tape))
                            };
                        },
                        None => hygienic! {
                            let #outputs = if #cond { #enter #then } else { #enter_other #other };
                        },
                    }
                }
            });
            code.extend(frees[at].iter().map(|v| self.free(&var(*v))));
        }
        let mut given = Vec::new();
        let results: Vec<TokenStream> = scope
            .results
            .iter()
            .map(|v| {
                let ident = var(*v);
                let held = !scope.inputs.contains(v) && !given.contains(v);
                given.push(*v);
                if held { hygienic!(#ident) } else { self.share(&ident) }
            })
            .collect();
        let results = pack(&results);
        match names {
            Some(names) => {
                let tape = &names.types.tape;
                let parts = scope.items.iter().enumerate().filter(|(_, item)| retains(item)).map(|(at, _)| {
                    let (field, tape) = (field(at), local(&format!("t{at}")));
                    hygienic!(#field: #tape)
                });
                let parts: Vec<_> = parts.collect();
                hygienic!({ #(#config)* #(#code)* (#results, #tape { #(#parts),* }) })
            }
            None => hygienic!({ #(#config)* #(#code)* #results }),
        }
    }

    fn forward_loop(&self, at: usize, each: &Loop, names: Option<&Names>) -> TokenStream {
        let tape = local(&format!("t{at}"));
        let (pat, list) = (&each.pat, &each.list);
        let now: Vec<Ident> = (0..each.carried.len()).map(|n| local(&format!("c{at}_{n}"))).collect();
        let next: Vec<Ident> = (0..each.carried.len()).map(|n| local(&format!("n{at}_{n}"))).collect();
        let starts = each.carried.iter().map(|carried| self.share(&var(carried.before)));
        let enter = each.body.inputs.iter().zip(&now).map(|(inner, now)| {
            let inner = var(*inner);
            hygienic!(let #inner = #now;)
        });
        let enter: Vec<_> = enter.collect();
        let body = self.forward(&each.body, names.map(|names| &names.inner[&(at, 0)]));
        let results = pack(&next.iter().map(|n| hygienic!(#n)).collect::<Vec<_>>());
        let frees: Vec<_> = now.iter().map(|now| self.free(now)).collect();
        let after = each.carried.iter().map(|carried| var(carried.after));
        let (make, round, push) = match names {
            Some(_) => (
                hygienic!(let mut #tape = ::std::vec::Vec::new();),
                hygienic!(let (#results, tape) = #body;),
                hygienic!(#tape.push(tape);),
            ),
            None => (hygienic!(), hygienic!(let #results = #body;), hygienic!()),
        };
        hygienic! {
            #make
            #(let mut #now = #starts;)*
            for #pat in #list {
                #(#enter)*
                #round
                #(#frees)*
                #(#now = #next;)*
                #push
            }
            #(let #after = #now;)*
        }
    }
}

/// The place of an op in the user's code.
fn at_op(call: &Call) -> Span {
    call.op.segments.last().map_or_else(Span::call_site, |segment| segment.ident.span()).resolved_at(Span::mixed_site())
}

/// A tuple of arguments at the op that takes it: what is wrong with their number is said there.
fn located(tokens: TokenStream, call: &Call) -> TokenStream {
    let at = at_op(call);
    let located = tokens.into_iter().map(|mut tree| {
        if let TokenTree::Group(group) = &mut tree {
            group.set_span(at);
        }
        tree
    });
    located.collect()
}

fn retains(item: &Item) -> bool {
    !matches!(item, Item::Alias { .. })
}

/// `let Tape0 { part0: t0, .. } = tape;`
fn open(scope: &Scope, name: &Ident, prefix: &str, from: &str) -> TokenStream {
    let from = Ident::new(from, Span::mixed_site());
    let parts = scope.items.iter().enumerate().filter(|(_, item)| retains(item)).map(|(at, _)| {
        let (field, part) = (field(at), local(&format!("{prefix}{at}")));
        hygienic!(#field: #part)
    });
    hygienic!(let #name { #(#parts),* } = #from;)
}

/// Inputs of a branch by their names inside.
fn enter(captured: &[Var], scope: &Scope) -> TokenStream {
    scope
        .inputs
        .iter()
        .zip(captured)
        .map(|(inner, outer)| {
            let (inner, outer) = (var(*inner), var(*outer));
            hygienic!(let #inner = #outer;)
        })
        .collect()
}
