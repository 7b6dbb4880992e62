//! `#[retained]`: a struct that is consumed exactly once.

use proc_macro2::{Ident, Span, TokenStream, TokenTree};
use quote::{ToTokens, quote, quote_spanned};
use syn::{Attribute, Fields, Generics, ItemStruct};

use crate::faults::Faults;
use crate::options::Options;

/// A field: how it is reached, what it is called in a layout, its type.
pub struct Part {
    pub member: TokenStream,
    pub name: String,
    pub ty: TokenStream,
}

/// Expands `#[retained]`.
pub fn expand(options: TokenStream, item: TokenStream) -> TokenStream {
    let mut faults = Faults::default();
    let options = syn::parse2::<Options>(options).unwrap_or_else(|error| {
        faults.parse(&error);
        Options::default()
    });
    let expanded = match syn::parse2::<ItemStruct>(item.clone()) {
        Ok(item) => expand_struct(&options, &item, &mut faults),
        Err(_) => {
            let help = "an action leaves a fixed set of tensors for a later one; a choice between two is `Either`";
            faults.add(&item, "`#[retained]` stands on a struct", help);
            item
        }
    };
    let errors = faults.errors();
    quote!(#expanded #errors)
}

fn expand_struct(options: &Options, item: &ItemStruct, faults: &mut Faults) -> TokenStream {
    let krate = &options.krate;
    for lifetime in item.generics.lifetimes() {
        faults.add(lifetime, BORROW, BORROW_HELP);
    }
    let mut parts = Vec::new();
    for (at, field) in item.fields.iter().enumerate() {
        if item.generics.lifetimes().next().is_none()
            && let Some(borrow) = borrow(field.ty.to_token_stream())
        {
            faults.add(&borrow, BORROW, BORROW_HELP);
        }
        let (member, name) = match &field.ident {
            Some(ident) => (ident.to_token_stream(), ident.to_string()),
            None => (syn::Index::from(at).to_token_stream(), at.to_string()),
        };
        parts.push(Part { member, name, ty: field.ty.to_token_stream() });
    }
    let derived = item.attrs.iter().filter_map(copies).next();
    if let Some(derive) = &derived {
        let help = "remove it: who needs the tensor again retains one more share of it with `cx.keep`";
        faults.add(derive, format!("retained work is consumed exactly once, and `{derive}` would double it"), help);
    }
    let mut shown = item.clone();
    if derived.is_some() {
        shown.attrs.retain(|attr| copies(attr).is_none());
    }
    if !faults.none() {
        parts.clear();
        if matches!(shown.fields, Fields::Named(_)) || !shown.generics.params.is_empty() {
            return shown.to_token_stream();
        }
    }
    let implementation = implementation(krate, &item.generics, &item.ident, &parts);
    quote! {
        #[must_use = "retained work is consumed exactly once"]
        #shown
        #implementation
    }
}

const BORROW: &str = "retained work holds a borrow";
const BORROW_HELP: &str = "it outlives its action: hold a `Kept` or `Fp8` of its own";

/// The first `&` or lifetime of a type.
fn borrow(ty: TokenStream) -> Option<TokenTree> {
    ty.into_iter().find_map(|tree| match &tree {
        TokenTree::Punct(punct) if matches!(punct.as_char(), '&' | '\'') => Some(tree),
        TokenTree::Group(group) => borrow(group.stream()),
        _ => None,
    })
}

/// `Clone` or `Copy` in a `derive` below this attribute.
fn copies(attr: &Attribute) -> Option<Ident> {
    if !attr.path().is_ident("derive") {
        return None;
    }
    let mut found = None;
    let _ = attr.parse_nested_meta(|meta| {
        if let Some(segment) = meta.path.segments.last()
            && (segment.ident == "Clone" || segment.ident == "Copy")
        {
            found.get_or_insert(segment.ident.clone());
        }
        Ok(())
    });
    found
}

/// `Retained`, field by field, and the fence: an implementation of `Clone` whose condition never holds, so that any
/// other one, derived or by hand, is a second one. `Copy` needs `Clone`.
pub fn implementation(krate: &TokenStream, generics: &Generics, name: &Ident, parts: &[Part]) -> TokenStream {
    let (impl_generics, ty_generics, where_clause) = generics.split_for_impl();
    let conditions = where_clause.map(|clause| &clause.predicates);
    let bounds = generics.type_params().map(|param| &param.ident);
    let bounds = quote!(#(#bounds: #krate::retained::Retained,)*);
    let layouts = parts.iter().map(|Part { member, name, ty }| {
        let retained = retained(krate, ty);
        quote_spanned! {Span::mixed_site()=>
            let outer = layout.enter(#name);
            #retained::layout(&self.#member, layout);
            layout.leave(outer);
        }
    });
    let releases = parts.iter().map(|Part { member, ty, .. }| {
        let retained = retained(krate, ty);
        quote_spanned!(Span::mixed_site()=> #retained::release(self.#member, cx)?;)
    });
    quote_spanned! {Span::mixed_site()=>
        #[automatically_derived]
        impl #impl_generics #krate::retained::Retained for #name #ty_generics where #bounds #conditions {
            fn layout(&self, layout: &mut #krate::retained::Layout) {
                let _ = &layout;
                #(#layouts)*
            }

            fn release(self, cx: &mut #krate::cx::Cx<'_>) -> #krate::error::Result<()> {
                let _ = &cx;
                #(#releases)*
                ::core::result::Result::Ok(())
            }
        }

        #[automatically_derived]
        impl #impl_generics ::core::clone::Clone for #name #ty_generics
        where
            for<'__once> #krate::retained::ConsumedExactlyOnce<'__once>: ::core::clone::Clone,
            #conditions
        {
            fn clone(&self) -> Self {
                ::core::unreachable!()
            }
        }
    }
}

/// `<Kept as Retained>`, at the type.
fn retained(krate: &TokenStream, ty: &TokenStream) -> TokenStream {
    let span = ty.clone().into_iter().next().map_or_else(Span::call_site, |tree| tree.span());
    quote_spanned!(span=> <#ty as #krate::retained::Retained>)
}
