//! `#[effect(..)]` on an `impl Op`: the hidden state that an op reads, writes or folds, as an item of its trait.

use proc_macro2::{Ident, TokenStream, TokenTree};
use quote::{ToTokens, quote};
use syn::parse::{Parse, ParseStream};
use syn::punctuated::Punctuated;
use syn::{Block, Expr, ExprReturn, ImplItem, ItemImpl, Local, Stmt, Token, parenthesized};

use crate::faults::Faults;
use crate::options::{Options, crate_path};

/// What was declared.
#[derive(Default)]
struct Declared {
    krate: TokenStream,
    /// `read`, `write` or `fold`, and a role.
    cells: Vec<(Ident, Ident)>,
}

impl Parse for Declared {
    fn parse(input: ParseStream<'_>) -> syn::Result<Declared> {
        let mut declared = Declared { krate: Options::default().krate, cells: Vec::new() };
        while !input.is_empty() {
            if input.peek(Token![crate]) {
                declared.krate = crate_path(input)?;
                continue;
            }
            let how: Ident = input.parse()?;
            if !["read", "write", "fold"].contains(&how.to_string().as_str()) {
                return Err(syn::Error::new(how.span(), "an effect is `read(..)`, `write(..)` or `fold(..)`"));
            }
            let inner;
            parenthesized!(inner in input);
            for role in Punctuated::<Ident, Token![,]>::parse_terminated(&inner)? {
                if variant(&role).is_none() {
                    let text = "the state of an op is in the cells `input`, `weight` and `grad_output`";
                    return Err(syn::Error::new(role.span(), text));
                }
                if role == "weight" && how != "read" {
                    let text = "the cells of weights move once per step, in `refresh`: an op declares `read(weight)`";
                    return Err(syn::Error::new(how.span(), text));
                }
                declared.cells.push((how.clone(), role));
            }
            if input.peek(Token![,]) {
                input.parse::<Token![,]>()?;
            }
        }
        Ok(declared)
    }
}

fn variant(role: &Ident) -> Option<&'static str> {
    Some(match role.to_string().as_str() {
        "input" => "Input",
        "weight" => "Weight",
        "grad_output" => "GradOutput",
        _ => return None,
    })
}

/// Expands `#[effect]`.
pub fn expand(options: TokenStream, item: TokenStream) -> TokenStream {
    let mut faults = Faults::default();
    let declared = syn::parse2::<Declared>(options).unwrap_or_else(|error| {
        faults.parse(&error);
        Declared { krate: Options::default().krate, cells: Vec::new() }
    });
    let expanded = match syn::parse2::<ItemImpl>(item.clone()) {
        Ok(mut block) => {
            let moved: Vec<String> =
                declared.cells.iter().filter(|(how, _)| how != "read").map(|(_, role)| role.to_string()).collect();
            if faults.none() {
                check(&block, Some(&moved), &mut faults);
            }
            add(&mut block, &declared, &mut faults);
            block.to_token_stream()
        }
        Err(_) => {
            faults.add(&item, "`#[effect]` stands on an `impl Op`", "it says which state the op moves");
            item
        }
    };
    let errors = faults.errors();
    quote!(#expanded #errors)
}

fn add(block: &mut ItemImpl, declared: &Declared, faults: &mut Faults) {
    if let Some(ImplItem::Const(item)) =
        block.items.iter().find(|item| matches!(item, ImplItem::Const(c) if c.ident == "EFFECTS"))
    {
        faults.add(&item.ident, "the effects are declared twice", "`#[effect(..)]` writes this item: remove it here");
        return;
    }
    let krate = &declared.krate;
    let cells = declared.cells.iter().map(|(how, role)| {
        let how = Ident::new(&format!("{how}s"), how.span());
        let role = Ident::new(variant(role).unwrap_or("Input"), role.span());
        quote!(.#how(#krate::stage::Role::#role))
    });
    let item = syn::parse_quote! {
        const EFFECTS: #krate::op::Effects = #krate::op::Effects::NONE #(#cells)*;
    };
    block.items.insert(0, item);
}

/// Methods of the context that move state, and which.
const MOVES: [(&str, &str); 6] = [
    ("quantise_input", "input"),
    ("quantise_input_of", "input"),
    ("roll_forward", "input"),
    ("quantise_grad", "grad_output"),
    ("quantise_grad_of", "grad_output"),
    ("roll_backward", "grad_output"),
];

/// Checks F, I and W that are written by hand: state moves in F and I only, and only what is declared.
pub fn check(block: &ItemImpl, moved: Option<&[String]>, faults: &mut Faults) {
    for item in &block.items {
        let ImplItem::Fn(function) = item else { continue };
        let name = function.sig.ident.to_string();
        let body = function.block.to_token_stream();
        match name.as_str() {
            "weight_grad" => each_move(body, &mut |ident, _| {
                let help =
                    "quantise in `input_grad`, and retain the result for here: a weight gradient may run at any time";
                faults.add(ident, format!("`{ident}` moves state, and `weight_grad` has no token"), help);
            }),
            "evaluate" => each_move(body, &mut |ident, _| {
                let help = "`cx.quantise_frozen` reads the scale in force and leaves no trace";
                faults.add(ident, format!("`{ident}` moves state, and evaluation leaves none behind"), help);
            }),
            _ => {
                in_order(&function.block, faults);
                each_move(body, &mut |ident, cell| {
                    if let Some(moved) = moved
                        && !moved.iter().any(|declared| declared == cell)
                    {
                        let help = format!("declare it: `write({cell})`");
                        faults.add(ident, format!("`{ident}` moves the cell `{cell}`, which is not declared"), &help);
                    }
                });
            }
        }
    }
}

/// State moves in statements of their own, so that the order of effects is that of the text: what stands inside a larger
/// expression may run later, or not at all, as in a closure, behind `&&`, or in the arguments of a macro.
fn in_order(block: &Block, faults: &mut Faults) {
    for statement in &block.stmts {
        match statement {
            Stmt::Local(Local { init: Some(init), .. }) => {
                spine(&init.expr, faults);
                if let Some((_, otherwise)) = &init.diverge {
                    spine(otherwise, faults);
                }
            }
            Stmt::Expr(expr, _) => spine(expr, faults),
            Stmt::Macro(call) => nested(call, faults),
            Stmt::Local(_) | Stmt::Item(_) => {}
        }
    }
}

/// An expression whose value a statement takes: calls that move state may be all of it, or head one of its blocks.
fn spine(expr: &Expr, faults: &mut Faults) {
    match expr {
        Expr::Try(inner) => spine(&inner.expr, faults),
        Expr::Paren(inner) => spine(&inner.expr, faults),
        Expr::Return(ExprReturn { expr: Some(inner), .. }) => spine(inner, faults),
        Expr::Block(inner) => in_order(&inner.block, faults),
        Expr::If(inner) => {
            match &*inner.cond {
                Expr::Let(cond) => spine(&cond.expr, faults),
                cond => nested(cond, faults),
            }
            in_order(&inner.then_branch, faults);
            if let Some((_, otherwise)) = &inner.else_branch {
                spine(otherwise, faults);
            }
        }
        Expr::Match(inner) => {
            spine(&inner.expr, faults);
            for arm in &inner.arms {
                if let Some((_, guard)) = &arm.guard {
                    nested(guard, faults);
                }
                spine(&arm.body, faults);
            }
        }
        Expr::ForLoop(inner) => {
            nested(&inner.expr, faults);
            in_order(&inner.body, faults);
        }
        Expr::Assign(inner) => {
            nested(&inner.left, faults);
            spine(&inner.right, faults);
        }
        Expr::MethodCall(call) => {
            spine(&call.receiver, faults);
            nested(&call.args, faults);
        }
        other => nested(other, faults),
    }
}

fn nested(tokens: &impl ToTokens, faults: &mut Faults) {
    each_move(tokens.to_token_stream(), &mut |ident, _| {
        let help = "bind its result by `let` in a statement of its own: effects happen in the order of statements";
        faults.add(ident, format!("`{ident}` moves state inside an expression"), help);
    });
}

fn each_move(body: TokenStream, found: &mut impl FnMut(&Ident, &str)) {
    for tree in body {
        match tree {
            TokenTree::Ident(ident) => {
                if let Some((_, cell)) = MOVES.iter().find(|(name, _)| ident == *name) {
                    found(&ident, cell);
                }
            }
            TokenTree::Group(group) => each_move(group.stream(), found),
            _ => {}
        }
    }
}
