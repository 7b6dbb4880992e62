//! What an editor works with: whatever is wrong with a stage, its function stands in the expansion as it was written, once,
//! beside the errors, and its type is there for those that call it.

use proc_macro2::{TokenStream, TokenTree};
use quote::{ToTokens, quote};
use syn::{Item, ItemFn};

use super::expand;

/// Tokens one by one, groups opened, without spans.
fn flat(tokens: TokenStream) -> Vec<String> {
    tokens
        .into_iter()
        .flat_map(|tree| match tree {
            TokenTree::Group(group) => {
                let mut inner = flat(group.stream());
                inner.insert(0, format!("{:?}", group.delimiter()));
                inner.push(")".into());
                inner
            }
            other => vec![other.to_string()],
        })
        .collect()
}

fn count(all: &[String], part: &[String]) -> usize {
    all.windows(part.len()).filter(|window| *window == part).count()
}

/// Whether errors stand in an expansion. The function is there, and so is its type.
fn faulty(name: &str, function: TokenStream) -> bool {
    let expansion = flat(expand(TokenStream::new(), function.clone()));
    assert_eq!(count(&expansion, &flat(function)), 1, "{name}: the function is not there as it was");
    let ident = syn::Ident::new(name, proc_macro2::Span::call_site());
    assert_eq!(count(&expansion, &flat(quote!(struct #ident {}))), 1, "{name}: its type is not there");
    count(&expansion, &flat(quote!(::core::compile_error!))) > 0
}

/// Every function of the cases for the compiler, which say what is wrong with each.
#[test]
fn a_faulty_stage_keeps_its_function() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/ui/stage");
    let (mut functions, mut refused) = (0, 0);
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "rs") {
            continue;
        }
        for item in syn::parse_file(&std::fs::read_to_string(&path).unwrap()).unwrap().items {
            let Item::Fn(ItemFn { mut attrs, vis, sig, block }) = item else { continue };
            let Some(at) = attrs.iter().position(|attr| attr.path().is_ident("stage")) else { continue };
            attrs.remove(at);
            let name = sig.ident.to_string();
            functions += 1;
            refused += usize::from(faulty(&name, ItemFn { attrs, vis, sig, block }.into_token_stream()));
        }
    }
    // Of the others rustc says what is wrong.
    assert!(functions > 25 && refused > 18 && refused < functions, "{refused} of {functions}");
}

#[test]
fn a_body_that_is_being_typed_keeps_its_function() {
    for body in [
        "let h = linear(x, &w.);",
        "let h = ",
        "let h = linear(x, &w.up) linear(h, &w.)",
        "x.",
        "let (a, b) = ; a",
        "for layer in &w. { x = block(x, layer); } x",
        "if w. { x } else { }",
        "add(x, )?.",
        "=",
    ] {
        let function: TokenStream = format!("pub fn mlp(x: Act, w: &Mlp) -> Act {{ {body} }}").parse().unwrap();
        assert!(faulty("mlp", function), "{body}");
    }
    assert!(!faulty(
        "mlp",
        quote!(
            fn mlp(x: Act, w: &Mlp) -> Act {
                linear(x, &w.up)
            }
        )
    ));
}
