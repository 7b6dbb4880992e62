//! The names that an expansion needs: the path of the crate that exported the wrapper, the
//! schedule's name and its parameters, read leniently so that a program with faults still gets its
//! items.

use proc_macro2::{Ident, Span, TokenStream};
use qeffect_core::lang::token::TokenKind;
use quote::{format_ident, quote};

use crate::tokens::Source;

/// Names for the emitted items.
pub struct Names {
    /// `$crate`, as the wrapper gave it.
    pub krate: TokenStream,
    /// The schedule, as the user wrote it.
    pub schedule: Ident,
    /// Its parameters, as the user wrote them.
    pub params: Vec<Ident>,
    /// The arguments of `build`: the parameters in the case of variables.
    pub args: Vec<Ident>,
}

impl Names {
    /// Reads `name<P, M>`; `None` where not even a name stands.
    pub fn read(krate: TokenStream, source: &Source) -> Option<Names> {
        let mut at = source.tokens.iter().position(|token| !matches!(token.kind, TokenKind::Doc(_)))?;
        let schedule = identifier(source, at)?;
        let mut params: Vec<Ident> = Vec::new();
        at += 1;
        if source.tokens[at].kind == TokenKind::Punct("<") {
            at += 1;
            while let Some(param) = identifier(source, at) {
                if !params.contains(&param) {
                    params.push(param);
                }
                at += 1;
                if source.tokens[at].kind != TokenKind::Punct(",") {
                    break;
                }
                at += 1;
            }
        }
        let args = arguments(&params);
        Some(Names { krate, schedule, params, args })
    }

    /// `$crate::__private::core`
    pub fn core(&self) -> TokenStream {
        let krate = &self.krate;
        quote!(#krate::__private::core)
    }

    /// `const P: i64, const M: i64`
    pub fn const_params(&self) -> TokenStream {
        let (params, core) = (&self.params, self.core());
        quote!(#(const #params: #core::template::Value),*)
    }

    /// The name as text.
    pub fn text(&self) -> String {
        self.schedule.to_string()
    }
}

fn identifier(source: &Source, at: usize) -> Option<Ident> {
    let token = source.tokens.get(at)?;
    match &token.kind {
        TokenKind::Ident(text) if !is_keyword(text) => Some(Ident::new(text, source.spans[at])),
        _ => None,
    }
}

/// Argument names: `P` becomes `p`, unless that is a keyword or taken.
fn arguments(params: &[Ident]) -> Vec<Ident> {
    let lower: Vec<String> = params.iter().map(|param| param.to_string().to_lowercase()).collect();
    lower
        .iter()
        .enumerate()
        .map(|(n, name)| {
            let taken = lower.iter().filter(|other| *other == name).count() > 1;
            let plain = !taken && !is_keyword(name) && name.starts_with(|c: char| c.is_alphabetic());
            if plain { Ident::new(name, Span::mixed_site()) } else { format_ident!("parameter_{n}") }
        })
        .collect()
}

fn is_keyword(text: &str) -> bool {
    const KEYWORDS: &[&str] = &[
        "_", "abstract", "as", "async", "await", "become", "box", "break", "const", "continue", "crate", "do", "dyn",
        "else", "enum", "extern", "false", "final", "fn", "for", "gen", "if", "impl", "in", "let", "loop", "macro",
        "match", "mod", "move", "mut", "override", "priv", "pub", "ref", "return", "self", "Self", "static", "struct",
        "super", "trait", "true", "try", "type", "typeof", "unsafe", "unsized", "use", "virtual", "where", "while",
        "yield",
    ];
    text.starts_with("r#") || KEYWORDS.contains(&text)
}
