//! What tokens and expressions look like.

use proc_macro2::{Ident, TokenStream, TokenTree};
use quote::{ToTokens, quote};
use syn::{Expr, ExprCall, Pat, Path};

/// Without parentheses.
pub(super) fn strip(expr: &Expr) -> &Expr {
    match expr {
        Expr::Paren(inner) => strip(&inner.expr),
        Expr::Group(inner) => strip(&inner.expr),
        other => other,
    }
}

/// The op that a call by plain name calls.
pub(super) fn op_of(call: &ExprCall) -> Option<&Path> {
    let Expr::Path(path) = strip(&call.func) else { return None };
    let plain = path.qself.is_none()
        && path.path.segments.iter().all(|segment| !segment.ident.to_string().starts_with(char::is_uppercase));
    plain.then_some(&path.path)
}

/// `qkv` of `&w.qkv`.
pub(super) fn field_name(expr: &Expr) -> Option<String> {
    match expr {
        Expr::Reference(inner) => field_name(&inner.expr),
        Expr::Paren(inner) => field_name(&inner.expr),
        Expr::Field(field) => match &field.member {
            syn::Member::Named(ident) => Some(ident.to_string()),
            syn::Member::Unnamed(index) => Some(index.index.to_string()),
        },
        _ => None,
    }
}

/// Names that a pattern binds.
pub(super) fn idents(pat: &Pat) -> Vec<Ident> {
    match pat {
        Pat::Ident(ident) => vec![ident.ident.clone()],
        Pat::Type(inner) => idents(&inner.pat),
        Pat::Paren(inner) => idents(&inner.pat),
        Pat::Reference(inner) => idents(&inner.pat),
        Pat::Tuple(inner) => inner.elems.iter().flat_map(idents).collect(),
        Pat::TupleStruct(inner) => inner.elems.iter().flat_map(idents).collect(),
        Pat::Struct(inner) => inner.fields.iter().flat_map(|field| idents(&field.pat)).collect(),
        _ => Vec::new(),
    }
}

/// Names that `let` in a condition binds.
pub(super) fn condition_names(cond: &Expr) -> Vec<Ident> {
    match cond {
        Expr::Let(cond) => idents(&cond.pat),
        Expr::Paren(inner) => condition_names(&inner.expr),
        Expr::Binary(both) => [condition_names(&both.left), condition_names(&both.right)].concat(),
        _ => Vec::new(),
    }
}

/// Tokens one by one, with the two before and all after each; groups are entered.
pub(super) fn walk(tokens: TokenStream, visit: &mut impl FnMut([Option<&TokenTree>; 2], &TokenTree, &[TokenTree])) {
    let trees: Vec<TokenTree> = tokens.into_iter().collect();
    for (at, tree) in trees.iter().enumerate() {
        let before = [2, 1].map(|back| at.checked_sub(back).and_then(|at| trees.get(at)));
        visit(before, tree, &trees[at + 1..]);
        if let TokenTree::Group(group) = tree {
            walk(group.stream(), visit);
        }
    }
}

/// Tokens as text, for messages.
pub(super) fn text(tokens: &impl ToTokens) -> String {
    quote!(#tokens).to_string().replace("& ", "&")
}
