//! Text to tokens, and the map back from an [`Origin`] to line and column.
//!
//! Never fails: what is no token of the language becomes [`TokenKind::Other`], and the parser says
//! what is wrong with it, in the same words as for Rust tokens.

use std::borrow::Cow;

use super::token::{PUNCTS, Token, TokenKind};
use crate::origin::Origin;
use crate::source::SourceMap;

/// Cuts a text into tokens; token `n` has the origin [`Origin::token`]`(n)`, the last one is
/// [`TokenKind::End`].
pub fn lex(file: impl Into<String>, text: &str) -> (Vec<Token>, SourceMap) {
    let mut map = SourceMap::new(file, text);
    let mut tokens = Vec::new();
    let mut lexer = Lexer { text, at: 0 };
    loop {
        lexer.skip_blanks();
        let start = lexer.at;
        let full = tokens.len() + 1 >= Origin::MAX_TOKENS;
        let kind = if full { TokenKind::End } else { lexer.token() };
        let end = kind == TokenKind::End;
        tokens.push(Token { kind, origin: Origin::token(tokens.len()) });
        map.push(start..lexer.at);
        if end {
            return (tokens, map);
        }
    }
}

struct Lexer<'a> {
    text: &'a str,
    at: usize,
}

impl Lexer<'_> {
    fn rest(&self) -> &str {
        &self.text[self.at..]
    }

    fn take_while(&mut self, keep: impl Fn(char) -> bool) {
        let rest = self.rest();
        self.at += rest.find(|c| !keep(c)).unwrap_or(rest.len());
    }

    /// Blanks and comments that document nothing.
    fn skip_blanks(&mut self) {
        loop {
            self.take_while(char::is_whitespace);
            let rest = self.rest();
            if rest.starts_with("//") && !is_doc(rest) {
                self.take_while(|c| c != '\n');
            } else if rest.starts_with("/*") {
                self.at += block_comment(rest);
            } else {
                return;
            }
        }
    }

    fn token(&mut self) -> TokenKind {
        let start = self.at;
        let Some(first) = self.rest().chars().next() else { return TokenKind::End };
        if is_doc(self.rest()) {
            self.take_while(|c| c != '\n');
            return TokenKind::Doc(owned(self.text[start + 3..self.at].trim_end_matches('\r')));
        }
        if first.is_alphabetic() || first == '_' {
            self.take_while(|c| c.is_alphanumeric() || c == '_');
            let quoted = matches!(&self.text[start..self.at], "r" | "b" | "c" | "br" | "cr") && {
                let rest = self.rest();
                rest.starts_with('"') || rest.starts_with("#\"") || rest.starts_with('\'')
            };
            if quoted {
                self.string();
                return TokenKind::Other(owned(&self.text[start..self.at]));
            }
            return TokenKind::Ident(owned(&self.text[start..self.at]));
        }
        if first.is_ascii_digit() {
            return self.number();
        }
        match first {
            '(' | '[' | '{' => {
                self.at += 1;
                return TokenKind::Open(first);
            }
            ')' | ']' | '}' => {
                self.at += 1;
                return TokenKind::Close(first);
            }
            '"' | '\'' => {
                self.string();
                return TokenKind::Other(owned(&self.text[start..self.at]));
            }
            _ => {}
        }
        if let Some(punct) = PUNCTS.iter().find(|p| self.rest().starts_with(**p)) {
            self.at += punct.len();
            return TokenKind::Punct(punct);
        }
        self.at += first.len_utf8();
        TokenKind::Other(owned(&self.text[start..self.at]))
    }

    /// Integers as in Rust, without suffix; a float or a suffixed literal is `Other`.
    fn number(&mut self) -> TokenKind {
        let start = self.at;
        self.take_while(|c| c.is_alphanumeric() || c == '_');
        let mut float = false;
        let after = self.rest().strip_prefix('.').map(|rest| rest.chars().next());
        if let Some(next) = after
            && !next.is_some_and(|c| c == '.' || c == '_' || c.is_alphabetic())
        {
            float = true;
            self.at += 1;
            self.take_while(|c| c.is_alphanumeric() || c == '_');
        }
        let text = &self.text[start..self.at];
        match (float, integer(text)) {
            (false, Some(value)) => TokenKind::Int(value),
            _ => TokenKind::Other(owned(text)),
        }
    }

    /// A quoted text, or a lifetime; ends at the end of the line if it is never closed.
    fn string(&mut self) {
        let rest = self.rest();
        let open = rest.find(['"', '\'']).unwrap_or(0);
        let quote = rest[open..].chars().next().unwrap_or('"');
        let mut escaped = false;
        for (n, c) in rest[open + 1..].char_indices() {
            let end = open + 1 + n;
            if c == quote && !escaped {
                self.at += end + c.len_utf8();
                return;
            }
            // `'a` is a lifetime or a label, not an open character literal.
            if c == '\n' || (quote == '\'' && n > 0 && !escaped && !(c.is_alphanumeric() || c == '_')) {
                self.at += end;
                return;
            }
            escaped = c == '\\' && !escaped;
        }
        self.at = self.text.len();
    }
}

/// `Some(None)`: an integer that does not fit; `None`: not an integer.
pub(crate) fn integer(text: &str) -> Option<Option<i64>> {
    let digits = text.replace('_', "");
    let (radix, digits) = match digits.get(..2) {
        Some("0x") => (16, &digits[2..]),
        Some("0o") => (8, &digits[2..]),
        Some("0b") => (2, &digits[2..]),
        _ => (10, &digits[..]),
    };
    (!digits.is_empty() && digits.chars().all(|c| c.is_digit(radix))).then(|| i64::from_str_radix(digits, radix).ok())
}

fn is_doc(rest: &str) -> bool {
    rest.starts_with("///") && !rest.starts_with("////")
}

/// Length of a block comment, which may be nested, and open at the end.
fn block_comment(text: &str) -> usize {
    let bytes = text.as_bytes();
    let (mut depth, mut at) = (0, 0);
    while at < bytes.len() {
        match bytes.get(at..at + 2) {
            Some(b"/*") => (depth, at) = (depth + 1, at + 2),
            Some(b"*/") => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            return at;
        }
    }
    text.len()
}

fn owned(text: &str) -> Cow<'static, str> {
    Cow::Owned(text.to_owned())
}
