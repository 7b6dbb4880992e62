//! `#[stage]`: a function of activations becomes an op with a split backward.

mod body;
pub mod emit;
mod read;
#[cfg(test)]
mod tests;
mod written;

use proc_macro2::TokenStream;
use quote::{ToTokens, quote, quote_spanned};
use syn::parse::{Parse, ParseStream};
use syn::{Attribute, Block, Item, ItemFn, braced};

use crate::faults::Faults;
use crate::options::Options;
use body::Scope;
use emit::{Emitter, Functions, hygienic, pack};
use read::Signature;

/// Expands `#[stage]`.
pub fn expand(options: TokenStream, item: TokenStream) -> TokenStream {
    let mut faults = Faults::default();
    let options = syn::parse2::<Options>(options).unwrap_or_else(|error| {
        faults.parse(&error);
        Options::default()
    });
    let expanded = match syn::parse2::<Item>(item.clone()) {
        Ok(Item::Fn(function)) => {
            let read = read::function(&function, &mut faults);
            expand_function(&options, &function, &function, read, &faults)
        }
        Ok(Item::Impl(block)) => written::expand(&options, block, &mut faults),
        Ok(other) => {
            faults.add(&other, "`#[stage]` stands on a function or on an `impl`", "");
            item
        }
        // What an editor sees while a body is typed: the function as it is, and its type for those that call it.
        Err(error) => {
            faults.parse(&error);
            match syn::parse2::<Unfinished>(item.clone()) {
                Ok(Unfinished(function)) => {
                    let read = read::head(&function, &mut faults);
                    expand_function(&options, &function, &item, read, &faults)
                }
                Err(_) => item,
            }
        }
    };
    let errors = faults.errors();
    quote!(#expanded #errors)
}

/// A function whose body cannot be read yet; that is left out here.
struct Unfinished(ItemFn);

impl Parse for Unfinished {
    fn parse(input: ParseStream<'_>) -> syn::Result<Unfinished> {
        let attrs = input.call(Attribute::parse_outer)?;
        let (vis, sig) = (input.parse()?, input.parse()?);
        let body;
        let brace_token = braced!(body in input);
        body.parse::<TokenStream>()?;
        let block = Box::new(Block { brace_token, stmts: Vec::new() });
        Ok(Unfinished(ItemFn { attrs, vis, sig, block }))
    }
}

/// The function as it is, which is `shown`, and beside it a type of its name:
///
/// ```text
/// fn block(x: Act, w: &Block) -> Act { .. }
/// struct block {}
/// const _: () = {
///     struct __Tape0 { part0: <layer_norm as Op>::Tape, .. }
///     struct __Work0 { .. }
///     impl Op for block { .. }
/// };
/// ```
fn expand_function(
    options: &Options,
    function: &ItemFn,
    shown: &impl ToTokens,
    read: Option<(Signature, Option<Scope>)>,
    faults: &Faults,
) -> TokenStream {
    // What is wrong with a name is said once.
    let said = (!faults.none()).then(|| quote!(#[allow(unused_variables)]));
    let witness = quote! {
        #[allow(dead_code, unused_mut, clippy::needless_pass_by_value, clippy::let_and_return)]
        #said
        #shown
    };
    let Some((signature, scope)) = read else {
        // The type exists all the same: uses of it are no faults of theirs.
        let (name, vis) = (&function.sig.ident, &function.vis);
        return quote! {
            #witness
            #[doc(hidden)]
            #[allow(non_camel_case_types, dead_code)]
            #vis struct #name {}
        };
    };
    let krate = &options.krate;
    let mut emitter = Emitter::new(krate);
    let functions = match scope.filter(|_| faults.none()) {
        Some(scope) => emitter.functions(&scope),
        None => Functions::unknown(),
    };
    let types = &emitter.types;
    let Signature { params, inputs, outputs } = &signature;
    let (name, vis) = (&function.sig.ident, &function.vis);
    let docs = function.attrs.iter().filter(|attr| attr.path().is_ident("doc") || attr.path().is_ident("cfg"));
    let inputs = pack(&vec![quote!(#krate::act::Act); *inputs]);
    let param_types = pack(&params.iter().map(|param| param.ty.clone()).collect::<Vec<_>>());
    let param_names = pack(
        &params
            .iter()
            .map(|param| {
                let pat = &param.pat;
                quote!(#pat)
            })
            .collect::<Vec<_>>(),
    );
    let Functions { tape, work, forward, input_grad, weight_grad, evaluate, effects } = functions;
    let allow = quote! {
        #[allow(unused_variables, unused_mut, unused_assignments, clippy::all, clippy::pedantic)]
    };
    let implementation = hygienic! {
        #[automatically_derived]
        impl #krate::op::Op for #name {
            const EFFECTS: #krate::op::Effects = #krate::op::Effects::NONE #effects;
            type Input = #inputs;
            type Output = #outputs;
            type Param<'__p> = #param_types;
            type Tape = #tape;
            type Work = #work;

            #allow
            fn forward(
                cx: &mut #krate::cx::Cx<'_>,
                x: Self::Input,
                param: Self::Param<'_>,
                mut token: #krate::op::Token<#krate::op::Fwd>,
            ) -> #krate::error::Result<(Self::Output, Self::Tape, #krate::op::Token<#krate::op::Fwd>)> {
                let #param_names = param;
                #forward
            }

            #allow
            fn input_grad(
                cx: &mut #krate::cx::Cx<'_>,
                dy: Self::Output,
                param: Self::Param<'_>,
                tape: Self::Tape,
                mut token: #krate::op::Token<#krate::op::Bwd>,
            ) -> #krate::error::Result<(Self::Input, Self::Work, #krate::op::Token<#krate::op::Bwd>)> {
                let #param_names = param;
                #input_grad
            }

            #allow
            fn weight_grad(
                cx: &mut #krate::cx::Cx<'_>,
                param: Self::Param<'_>,
                work: Self::Work,
            ) -> #krate::error::Result<()> {
                let #param_names = param;
                #weight_grad
            }

            #allow
            fn evaluate(
                cx: &mut #krate::cx::Cx<'_>,
                x: Self::Input,
                param: Self::Param<'_>,
            ) -> #krate::error::Result<Self::Output> {
                let #param_names = param;
                #evaluate
            }
        }
    };
    let item = quote_spanned! {name.span()=>
        #(#docs)*
        #[allow(non_camel_case_types, dead_code)]
        #vis struct #name {}
    };
    quote! {
        #witness
        #item
        const _: () = {
            #(#types)*
            #implementation
        };
    }
}
