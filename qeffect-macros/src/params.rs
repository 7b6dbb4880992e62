//! `derive(Params)`: the parameters of a struct, field by field, each under its name.

use proc_macro2::{Group, Span, TokenStream, TokenTree};
use quote::{ToTokens, quote, quote_spanned};
use syn::parse::ParseStream;
use syn::{Data, DeriveInput, Expr, Field, Fields, Ident, LitStr, Token, parenthesized};

use crate::faults::Faults;
use crate::options::Options;

/// What is said of one field.
#[derive(Default)]
struct Said {
    config: bool,
    name: Option<String>,
    init: Option<Expr>,
    precision: Option<Ident>,
    decay: Option<syn::LitBool>,
    /// Names, and their shares of the rows: 1 each, if nothing else is said.
    views: Vec<(Ident, Option<Expr>)>,
}

/// Expands `derive(Params)`.
pub fn expand(item: TokenStream) -> TokenStream {
    let mut faults = Faults::default();
    let mut krate = Options::default().krate;
    let input = match syn::parse2::<DeriveInput>(item) {
        Ok(input) => input,
        Err(error) => {
            faults.parse(&error);
            return faults.errors();
        }
    };
    for attr in input.attrs.iter().filter(|attr| attr.path().is_ident("params")) {
        match attr.parse_args::<Options>() {
            Ok(options) => krate = options.krate,
            Err(error) => faults.parse(&error),
        }
    }
    let Data::Struct(data) = &input.data else {
        faults.add(&input.ident, "`Params` is derived for structs", "a choice between two is a field of type `Option`");
        return faults.errors();
    };
    let Fields::Named(fields) = &data.fields else {
        faults.add(&input.ident, "parameters have names", "give the fields names: checkpoints know parameters by them");
        return faults.errors();
    };
    let registers: Vec<TokenStream> =
        fields.named.iter().filter_map(|field| register(&krate, field, &mut faults)).collect();
    let name = &input.ident;
    let (impl_generics, ty_generics, where_clause) = input.generics.split_for_impl();
    let errors = faults.errors();
    quote_spanned! {Span::mixed_site()=>
        #[automatically_derived]
        impl #impl_generics #krate::params::Params for #name #ty_generics #where_clause {
            fn register(&mut self, registry: &mut #krate::params::Registry<'_>) {
                let _ = &registry;
                #(#registers)*
            }
        }
        #errors
    }
}

fn register(krate: &TokenStream, field: &Field, faults: &mut Faults) -> Option<TokenStream> {
    let said = match said(field) {
        Ok(said) => said,
        Err(error) => {
            faults.parse(&error);
            return None;
        }
    };
    if said.config {
        return None;
    }
    let (ident, ty) = (field.ident.as_ref()?, &field.ty);
    let name = said.name.unwrap_or_else(|| ident.to_string());
    let init = said.init.map(|init| quote!(.init(#init)));
    let precision = match said.precision {
        None => None,
        Some(word) if word == "activation" => Some(quote!(.activation())),
        Some(word) => {
            faults.add(&word, "the precision of a parameter is the recipe's, or `activation`", "");
            None
        }
    };
    let decay = said.decay.map(|decay| quote!(.decay(#decay)));
    let views = said.views.iter().map(|(name, share)| {
        let name = name.to_string();
        let share = share.as_ref().map_or_else(|| quote!(1), |share| own(share.to_token_stream()));
        quote!((#name, #share))
    });
    let views = (!said.views.is_empty()).then(|| quote!(.views(&[#(#views),*])));
    let at = quote!(#ty).into_iter().next().map_or_else(Span::call_site, |tree| tree.span());
    let params = quote_spanned!(at=> <#ty as #krate::params::Params>);
    Some(quote_spanned! {Span::mixed_site()=>
        registry.part(#name, #krate::params::Policy::default() #init #precision #decay #views, |registry| {
            #params::register(&mut self.#ident, registry);
        });
    })
}

/// `q`, or `q = self.shape.heads`.
fn view(input: ParseStream<'_>) -> syn::Result<(Ident, Option<Expr>)> {
    let name = input.parse()?;
    let share = input.peek(Token![=]).then(|| input.parse::<Token![=]>().and_then(|_| input.parse())).transpose()?;
    Ok((name, share))
}

/// An expression of the user whose `self` is that of the method around it.
fn own(tokens: TokenStream) -> TokenStream {
    let trees = tokens.into_iter().map(|tree| match tree {
        TokenTree::Ident(ident) if ident == "self" => {
            TokenTree::Ident(Ident::new("self", ident.span().resolved_at(Span::mixed_site())))
        }
        TokenTree::Group(group) => {
            let mut inner = Group::new(group.delimiter(), own(group.stream()));
            inner.set_span(group.span());
            TokenTree::Group(inner)
        }
        tree => tree,
    });
    trees.collect()
}

fn said(field: &Field) -> syn::Result<Said> {
    let mut said = Said::default();
    for attr in field.attrs.iter().filter(|attr| attr.path().is_ident("params")) {
        attr.parse_nested_meta(|meta| {
            let word = meta.path.require_ident()?.to_string();
            match word.as_str() {
                "config" => said.config = true,
                "name" => said.name = Some(meta.value()?.parse::<LitStr>()?.value()),
                "init" => said.init = Some(meta.value()?.parse()?),
                "precision" => said.precision = Some(meta.value()?.parse()?),
                "decay" => said.decay = Some(meta.value()?.parse()?),
                "views" => {
                    let inner;
                    parenthesized!(inner in meta.input);
                    let views = inner.parse_terminated(view, Token![,])?;
                    said.views = views.into_iter().collect();
                }
                _ => {
                    let text = "a field is `config`, or has `name`, `init`, `precision`, `decay`, `views(..)`";
                    return Err(meta.error(text));
                }
            }
            Ok(())
        })?;
    }
    Ok(said)
}
