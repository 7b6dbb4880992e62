//! The tokens of the schedule language.
//!
//! Two readers make them: the text lexer, and the macro from Rust tokens. One parser reads them, so
//! grammar, recovery and messages are the same in both.

use std::borrow::Cow;

use crate::origin::Origin;

/// What a token is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum TokenKind {
    /// An identifier or keyword.
    Ident(Cow<'static, str>),
    /// An integer literal. `None`: it does not fit `i64`.
    Int(Option<i64>),
    /// An operator or separator, joined as in Rust: `..=`, `<=`, `&&`, `+=`, `;`.
    Punct(&'static str),
    /// An opening delimiter: `(`, `[` or `{`.
    Open(char),
    /// A closing delimiter.
    Close(char),
    /// A documentation comment, one line, without the slashes.
    Doc(Cow<'static, str>),
    /// Anything that the language does not have: a string, a float, a lifetime. With its text.
    Other(Cow<'static, str>),
    /// End of input.
    End,
}

/// A token and its place.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Token {
    /// What it is.
    pub kind: TokenKind,
    /// Where it stands.
    pub origin: Origin,
}

/// All operators, longest first: a lexer takes the first that fits.
pub const PUNCTS: &[&str] = &[
    "..=", "...", "<<=", ">>=", "..", "::", "->", "=>", "<=", ">=", "==", "!=", "&&", "||", "+=", "-=", "*=", "/=",
    "%=", "<<", ">>", "^=", "&=", "|=", "+", "-", "*", "/", "%", "<", ">", "=", "!", "|", "&", "^", ",", ";", ":", ".",
    "?", "@", "#", "$", "~",
];
