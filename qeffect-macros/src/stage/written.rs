//! `#[stage]` on an `impl`: F, I and W by hand, with the checks that generated ones get.

use proc_macro2::{Span, TokenStream};
use quote::{ToTokens, quote, quote_spanned};
use syn::{ImplItem, ItemImpl, Type};

use crate::effect;
use crate::faults::Faults;
use crate::options::Options;

const TRAITS: [&str; 3] = ["Op", "PureOp", "Stage"];

/// The block, with its effects where none are written, and a witness that what it retains cannot be copied.
pub fn expand(options: &Options, mut block: ItemImpl, faults: &mut Faults) -> TokenStream {
    let krate = &options.krate;
    let name =
        block.trait_.as_ref().and_then(|(_, path, _)| path.segments.last()).map(|segment| segment.ident.to_string());
    let Some(name) = name.filter(|name| TRAITS.contains(&name.as_str())) else {
        let help = "implement `Op` for what has a token and matrices, `PureOp` for the rest";
        faults.add(&block.self_ty, "`#[stage]` stands on an `impl` of `Op`, `PureOp` or `Stage`", help);
        return block.to_token_stream();
    };
    let declared =
        block.attrs.iter().any(|attr| attr.path().segments.last().is_some_and(|last| last.ident == "effect"))
            || block.items.iter().any(|item| matches!(item, ImplItem::Const(item) if item.ident == "EFFECTS"));
    let none: [String; 0] = [];
    effect::check(&block, (name == "Op" && !declared).then_some(&none[..]), faults);
    if name == "Op" && !declared {
        block.items.insert(
            0,
            syn::parse_quote! {
                const EFFECTS: #krate::op::Effects = #krate::op::Effects::NONE;
            },
        );
    }
    let retained = block.items.iter().filter_map(|item| match item {
        ImplItem::Type(ty) if ty.ident == "Tape" || ty.ident == "Work" => Some(&ty.ty),
        _ => None,
    });
    let affine = retained.filter(|ty| !matches!(ty, Type::Tuple(unit) if unit.elems.is_empty())).map(|ty| {
        let span = ty.to_token_stream().into_iter().next().map_or_else(Span::call_site, |tree| tree.span());
        quote_spanned! {span=>
            const _: fn() = || {
                // Of these two one applies to any type, both to one that is `Clone`: then it is not clear which is meant.
                trait ConsumedOnce<Which> { fn check() {} }
                impl<T> ConsumedOnce<()> for T {}
                #[allow(dead_code)]
                struct IsClone;
                impl<T: ::core::clone::Clone> ConsumedOnce<IsClone> for T {}
                let _ = <#ty as ConsumedOnce<_>>::check;
            };
        }
    });
    let affine: Vec<_> = affine.collect();
    quote!(#block #(#affine)*)
}
