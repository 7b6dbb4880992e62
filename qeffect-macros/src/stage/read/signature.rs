//! The signature of a stage: which parameters are activations, and what it gives.

use proc_macro2::{Ident, TokenStream};
use quote::{ToTokens, quote};
use syn::{FnArg, Pat, ReturnType, Type};

use crate::faults::Faults;
use crate::stage::emit::pack;

/// What the implementation needs to say of a stage.
pub struct Signature {
    /// Parameters that are no activations.
    pub params: Vec<Param>,
    /// How many activations it takes.
    pub inputs: usize,
    /// Type of what it gives.
    pub outputs: TokenStream,
}

/// A parameter that is no activation.
pub struct Param {
    /// As written.
    pub pat: Pat,
    /// References have the lifetime `'__p`.
    pub ty: TokenStream,
}

/// Activations that come and go.
pub struct Inputs {
    /// Their names.
    pub names: Vec<Ident>,
    /// How many are given.
    pub outputs: usize,
}

const RETURNS: &str = "a stage gives `Act`, a tuple of `Act`, or `Loss`";

/// Reads a signature; `None` if the body cannot be read without it.
pub fn read(sig: &syn::Signature, faults: &mut Faults) -> Option<(Signature, Inputs)> {
    let plain = "a stage is a plain function: `fn block(x: Act, w: &Block) -> Act`";
    for (present, tokens) in [
        (sig.asyncness.is_some(), sig.asyncness.to_token_stream()),
        (sig.unsafety.is_some(), sig.unsafety.to_token_stream()),
        (sig.constness.is_some(), sig.constness.to_token_stream()),
        (sig.abi.is_some(), sig.abi.to_token_stream()),
        (!sig.generics.params.is_empty(), sig.generics.to_token_stream()),
    ] {
        if present {
            faults.add(&tokens, plain, "");
        }
    }
    let (mut names, mut params) = (Vec::new(), Vec::new());
    for arg in &sig.inputs {
        let FnArg::Typed(arg) = arg else {
            faults.add(arg, "a stage has no `self`", "put `#[stage]` on an `impl Op` to write F, I and W by hand");
            continue;
        };
        match (&*arg.pat, &*arg.ty) {
            (Pat::Ident(name), ty) if is(ty, "Act") => names.push(name.ident.clone()),
            (Pat::Wild(_), ty) if is(ty, "Act") => {
                faults.add(arg, "an activation is not used", "give it a name and use it");
            }
            (_, ty) if tuple_of_acts(ty).is_some() => {
                faults.add(arg, "activations are parameters of their own", "as in `q: Act, k: Act`");
            }
            (_, Type::Reference(reference)) => {
                if reference.mutability.is_some() {
                    faults.add(arg, "a stage reads its parameters only", "take `&`: gradients go to the optimizer");
                }
                let ty = &reference.elem;
                params.push(Param { pat: (*arg.pat).clone(), ty: quote!(&'__p #ty) });
            }
            (pat, ty) => params.push(Param { pat: pat.clone(), ty: ty.to_token_stream() }),
        }
    }
    let (outputs, count) = match &sig.output {
        ReturnType::Type(_, ty) if is(ty, "Act") || is(ty, "Loss") => (ty.to_token_stream(), 1),
        ReturnType::Type(_, ty) => match tuple_of_acts(ty) {
            Some(acts) if acts.len() > 1 => (pack(&acts), acts.len()),
            _ => {
                faults.add(ty, RETURNS, "");
                return None;
            }
        },
        ReturnType::Default => {
            faults.add(&sig.ident, RETURNS, "");
            return None;
        }
    };
    let inputs = names.len();
    Some((Signature { params, inputs, outputs }, Inputs { names, outputs: count }))
}

fn is(ty: &Type, name: &str) -> bool {
    match ty {
        Type::Path(path) => path.path.segments.last().is_some_and(|segment| segment.ident == name),
        Type::Paren(inner) => is(&inner.elem, name),
        _ => false,
    }
}

fn tuple_of_acts(ty: &Type) -> Option<Vec<TokenStream>> {
    let Type::Tuple(tuple) = ty else { return None };
    let acts = tuple.elems.iter().all(|part| is(part, "Act"));
    (acts && !tuple.elems.is_empty()).then(|| tuple.elems.iter().map(ToTokens::to_token_stream).collect())
}
