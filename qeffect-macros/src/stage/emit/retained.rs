//! The types of what scopes retain.

use std::collections::BTreeMap;

use proc_macro2::{Ident, TokenStream};
use quote::format_ident;

use super::{Emitter, hygienic};
use crate::retained::Part;
use crate::stage::body::{Item, Scope};

/// What a scope retains: two structs, generic over their fields, and these with the types of their fields. So the structs
/// are sound whatever the ops are, and of what is no op that is said once.
pub(super) struct Types {
    pub(super) tape: Ident,
    pub(super) work: Ident,
    pub(super) tape_type: TokenStream,
    pub(super) work_type: TokenStream,
}

/// Types of a scope, and of the scopes in it by item and side.
pub(super) struct Names {
    pub(super) types: Types,
    pub(super) inner: BTreeMap<(usize, usize), Names>,
}

pub(super) fn field(at: usize) -> Ident {
    format_ident!("part{at}")
}

impl Emitter<'_> {
    /// Declares the two types of a scope and of all scopes in it.
    pub(super) fn declare(&mut self, scope: &Scope) -> Names {
        let krate = self.krate.clone();
        let (tape_name, work_name) = (format_ident!("__Tape{}", self.names), format_ident!("__Work{}", self.names));
        self.names += 1;
        let mut inner = BTreeMap::new();
        let mut parts = Vec::new();
        let mut used: BTreeMap<String, usize> = BTreeMap::new();
        for (at, item) in scope.items.iter().enumerate() {
            let (name, tape, work) = match item {
                Item::Alias { .. } => continue,
                Item::Call(call) => {
                    let path = self.op(call);
                    (call.name.clone(), hygienic!(#path::Tape), hygienic!(#path::Work))
                }
                Item::Loop(each) => {
                    let names = self.declare(&each.body);
                    let (tape, work) = (&names.types.tape_type, &names.types.work_type);
                    let types = (hygienic!(::std::vec::Vec<#tape>), hygienic!(::std::vec::Vec<#work>));
                    inner.insert((at, 0), names);
                    (each.name.clone(), types.0, types.1)
                }
                Item::Branch(branch) => {
                    let (then, other) = (self.declare(&branch.then), self.declare(&branch.other));
                    let tapes = (&then.types.tape_type, &other.types.tape_type);
                    let works = (&then.types.work_type, &other.types.work_type);
                    let ((a, b), (c, d)) = (tapes, works);
                    let types =
                        (hygienic!(#krate::retained::Either<#a, #b>), hygienic!(#krate::retained::Either<#c, #d>));
                    inner.insert((at, 0), then);
                    inner.insert((at, 1), other);
                    ("if".to_owned(), types.0, types.1)
                }
            };
            let count = used.entry(name.clone()).or_default();
            *count += 1;
            let name = if *count == 1 { name } else { format!("{name}_{count}") };
            parts.push((at, name, tape, work));
        }
        let fields: Vec<(usize, String)> = parts.iter().map(|(at, name, _, _)| (*at, name.clone())).collect();
        let (tapes, works): (Vec<_>, Vec<_>) = parts.into_iter().map(|(_, _, tape, work)| (tape, work)).unzip();
        let retained = [
            (&tape_name, "a tape is consumed by exactly one input gradient"),
            (&work_name, "retained work is consumed by exactly one weight gradient"),
        ];
        for (name, must_use) in retained {
            self.types.push(retained_struct(&krate, name, &fields, must_use));
        }
        let (tape_type, work_type) = (hygienic!(#tape_name<#(#tapes),*>), hygienic!(#work_name<#(#works),*>));
        Names { types: Types { tape: tape_name, work: work_name, tape_type, work_type }, inner }
    }
}

/// A struct of what a scope retains.
fn retained_struct(krate: &TokenStream, name: &Ident, fields: &[(usize, String)], must_use: &str) -> TokenStream {
    let idents: Vec<Ident> = fields.iter().map(|(at, _)| field(*at)).collect();
    let types: Vec<Ident> = fields.iter().map(|(at, _)| format_ident!("__Part{at}")).collect();
    let part = |((_, name), (ident, ty)): (&(usize, String), (&Ident, &Ident))| Part {
        member: hygienic!(#ident),
        name: name.clone(),
        ty: hygienic!(#ty),
    };
    let parts: Vec<Part> = fields.iter().zip(idents.iter().zip(&types)).map(part).collect();
    let generics = syn::parse_quote!(<#(#types),*>);
    let implementation = crate::retained::implementation(krate, &generics, name, &parts);
    hygienic! {
        #[doc(hidden)]
        #[must_use = #must_use]
        pub struct #name<#(#types),*> { #(#idents: #types),* }
        #implementation
    }
}
