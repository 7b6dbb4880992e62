//! What is wrong with an item that carries one of our attributes: collected, then shown in source order.

use proc_macro2::{Span, TokenStream, TokenTree};
use quote::ToTokens;

use crate::report::compile_error;

/// Faults of one item.
#[derive(Default)]
pub struct Faults(Vec<((Span, Span), String)>);

impl Faults {
    /// Adds a fault that underlines `at`: what is wrong, and one edit that mends it.
    pub fn add(&mut self, at: &impl ToTokens, message: impl Into<String>, help: &str) {
        self.at(span_of(at), message, help);
    }

    /// Adds a fault that underlines from the first span to the last.
    pub fn at(&mut self, at: (Span, Span), message: impl Into<String>, help: &str) {
        let mut message = message.into();
        if !help.is_empty() {
            message.push_str("\nhelp: ");
            message.push_str(help);
        }
        self.0.push((at, message));
    }

    /// Adds what the parser found.
    pub fn parse(&mut self, error: &syn::Error) {
        for error in error.clone() {
            self.at((error.span(), error.span()), error.to_string(), "");
        }
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// Whether there is none.
    pub fn none(&self) -> bool {
        self.0.is_empty()
    }

    /// As errors of the compiler.
    pub fn errors(&self) -> TokenStream {
        self.0.iter().map(|(at, message)| compile_error(*at, message)).collect()
    }
}

/// First and last token: `Span::join` needs a nightly compiler.
pub fn span_of(tokens: &impl ToTokens) -> (Span, Span) {
    let mut tokens = tokens.to_token_stream().into_iter();
    let Some(first) = tokens.next() else { return (Span::call_site(), Span::call_site()) };
    let last = tokens.last();
    let end = |tree: &TokenTree| match tree {
        TokenTree::Group(group) => group.span_close(),
        tree => tree.span(),
    };
    let start = match &first {
        TokenTree::Group(group) => group.span_open(),
        tree => tree.span(),
    };
    (start, end(last.as_ref().unwrap_or(&first)))
}
