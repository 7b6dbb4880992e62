//! From Rust tokens to the tokens of the schedule language, keeping every span.
//!
//! An [`Origin`] is a run of tokens of [`Source`], so an error about it underlines from the first
//! of them to the last.

use std::borrow::Cow;

use proc_macro2::{Delimiter, Group, Spacing, Span, TokenStream, TokenTree};
use qeffect_core::lang::token::{PUNCTS, Token, TokenKind};
use qeffect_core::origin::Origin;

/// What stands in front of the schedule's name: kept as it is for the emitted items.
#[derive(Default, Clone)]
pub struct Front {
    /// Attributes, doc comments included.
    pub attributes: TokenStream,
    /// The lines of the doc comments.
    pub docs: Vec<String>,
    /// Visibility, possibly empty.
    pub visibility: TokenStream,
}

/// The program as tokens of the language, and where each of them stands.
pub struct Source {
    /// Tokens for the parser; the last one is `End`.
    pub tokens: Vec<Token>,
    /// Span of each token.
    pub spans: Vec<Span>,
    /// Attributes and visibility.
    pub front: Front,
}

impl Source {
    /// Reads a program. Attributes and visibility in front of the name are set aside.
    pub fn read(input: TokenStream) -> Source {
        let mut trees: Vec<TokenTree> = input.into_iter().collect();
        let (front, at) = split_front(&mut trees);
        let mut source = Source { tokens: Vec::new(), spans: Vec::new(), front };
        for line in source.front.docs.clone() {
            source.push(TokenKind::Doc(Cow::Owned(line)), Span::call_site());
        }
        source.read_trees(&trees[at..]);
        let end = source.spans.last().copied().unwrap_or_else(Span::call_site);
        source.push(TokenKind::End, end);
        source
    }

    fn push(&mut self, kind: TokenKind, span: Span) {
        self.tokens.push(Token { kind, origin: Origin::token(self.tokens.len()) });
        self.spans.push(span);
    }

    fn read_trees(&mut self, trees: &[TokenTree]) {
        let mut at = 0;
        while let Some(tree) = trees.get(at) {
            at += match tree {
                TokenTree::Group(group) => self.read_group(group),
                TokenTree::Ident(ident) => {
                    self.push(TokenKind::Ident(Cow::Owned(ident.to_string())), ident.span());
                    1
                }
                TokenTree::Literal(literal) => {
                    self.push(literal_kind(&literal.to_string()), literal.span());
                    1
                }
                TokenTree::Punct(punct) => match doc_attribute(&trees[at..]) {
                    Some(line) => {
                        self.push(TokenKind::Doc(Cow::Owned(line)), punct.span());
                        2
                    }
                    None => self.read_punct(&trees[at..]),
                },
            };
        }
    }

    fn read_group(&mut self, group: &Group) -> usize {
        let inner: Vec<TokenTree> = group.stream().into_iter().collect();
        let (open, close) = match group.delimiter() {
            Delimiter::Parenthesis => ('(', ')'),
            Delimiter::Bracket => ('[', ']'),
            Delimiter::Brace => ('{', '}'),
            // A fragment that a macro of the user's captured. An expression stays one: `2 * $n`.
            Delimiter::None if has_operator(&inner) => ('(', ')'),
            Delimiter::None => {
                self.read_trees(&inner);
                return 1;
            }
        };
        self.push(TokenKind::Open(open), group.span_open());
        self.read_trees(&inner);
        self.push(TokenKind::Close(close), group.span_close());
        1
    }

    /// Joins punctuation as Rust does: the longest operator of the language that the adjoining
    /// characters spell.
    fn read_punct(&mut self, trees: &[TokenTree]) -> usize {
        let mut text = String::new();
        let mut first = None;
        for tree in trees.iter().take(3) {
            let TokenTree::Punct(punct) = tree else { break };
            first.get_or_insert(punct.span());
            text.push(punct.as_char());
            if punct.spacing() == Spacing::Alone {
                break;
            }
        }
        let span = first.unwrap_or_else(Span::call_site);
        match PUNCTS.iter().find(|operator| text.starts_with(**operator)) {
            Some(operator) => {
                self.push(TokenKind::Punct(operator), span);
                operator.len()
            }
            None => {
                // A lifetime: its name belongs to it.
                let name = match trees.get(1) {
                    Some(TokenTree::Ident(ident)) if text.starts_with('\'') => Some(ident.to_string()),
                    _ => None,
                };
                let taken = 1 + usize::from(name.is_some());
                let text = format!("{}{}", &text[..1], name.unwrap_or_default());
                self.push(TokenKind::Other(Cow::Owned(text)), span);
                taken
            }
        }
    }

    /// Span of the first and of the last token of a place.
    pub fn spans_of(&self, origin: Origin) -> (Span, Span) {
        self.try_spans_of(origin).unwrap_or_else(|| (Span::call_site(), Span::call_site()))
    }

    /// The same; none for what nobody wrote.
    pub fn try_spans_of(&self, origin: Origin) -> Option<(Span, Span)> {
        let first = self.spans.get(origin.first()).filter(|_| origin.is_some())?;
        let last = self.spans.get(origin.last()).unwrap_or(first);
        Some((*first, *last))
    }
}

/// The token trees of a stream, with invisible groups opened.
fn flatten(stream: TokenStream) -> Vec<TokenTree> {
    stream
        .into_iter()
        .flat_map(|tree| match tree {
            TokenTree::Group(group) if group.delimiter() == Delimiter::None => flatten(group.stream()),
            tree => vec![tree],
        })
        .collect()
}

fn has_operator(trees: &[TokenTree]) -> bool {
    trees.len() > 1 && trees.iter().any(|tree| matches!(tree, TokenTree::Punct(punct) if punct.as_char() != ';'))
}

/// Attributes and visibility, and how many trees they take. A captured `$vis` is opened.
fn split_front(trees: &mut Vec<TokenTree>) -> (Front, usize) {
    let mut front = Front::default();
    let mut at = 0;
    loop {
        match &trees[at..] {
            [TokenTree::Group(group), ..] if group.delimiter() == Delimiter::None => {
                let inner = flatten(group.stream());
                trees.splice(at..=at, inner);
            }
            [TokenTree::Punct(hash), TokenTree::Group(group), ..]
                if hash.as_char() == '#' && group.delimiter() == Delimiter::Bracket =>
            {
                front.docs.extend(doc_attribute(&trees[at..]));
                front.attributes.extend(trees[at..at + 2].iter().cloned());
                at += 2;
            }
            [TokenTree::Ident(word), rest @ ..] if word == "pub" && front.visibility.is_empty() => {
                let taken = match rest {
                    [TokenTree::Group(group), ..] if group.delimiter() == Delimiter::Parenthesis => 2,
                    _ => 1,
                };
                front.visibility.extend(trees[at..at + taken].iter().cloned());
                at += taken;
            }
            _ => return (front, at),
        }
    }
}

/// The line of `#[doc = "line"]`, which is also what `/// line` becomes.
fn doc_attribute(trees: &[TokenTree]) -> Option<String> {
    let [TokenTree::Punct(hash), TokenTree::Group(group), ..] = trees else { return None };
    if hash.as_char() != '#' || group.delimiter() != Delimiter::Bracket {
        return None;
    }
    let inner = flatten(group.stream());
    let [TokenTree::Ident(doc), TokenTree::Punct(equals), TokenTree::Literal(text)] = inner.as_slice() else {
        return None;
    };
    (doc == "doc" && equals.as_char() == '=').then(|| string_value(&text.to_string())).flatten()
}

/// The value of a string literal as it stands in source.
fn string_value(text: &str) -> Option<String> {
    if let Some(raw) = text.strip_prefix('r') {
        return Some(raw.trim_matches('#').strip_prefix('"')?.strip_suffix('"')?.to_owned());
    }
    let mut out = String::new();
    let mut chars = text.strip_prefix('"')?.strip_suffix('"')?.chars();
    while let Some(c) = chars.next() {
        if c != '\\' {
            out.push(c);
            continue;
        }
        match chars.next()? {
            'n' => out.push('\n'),
            't' => out.push('\t'),
            'r' => out.push('\r'),
            '0' => out.push('\0'),
            'u' => {
                let code: String = chars.by_ref().skip(1).take_while(|c| *c != '}').collect();
                out.push(char::from_u32(u32::from_str_radix(&code, 16).ok()?)?);
            }
            other => out.push(other),
        }
    }
    Some(out)
}

/// An integer of the language, or something that it does not have.
fn literal_kind(text: &str) -> TokenKind {
    let digits: String = text.chars().filter(|c| *c != '_').collect();
    let (radix, digits) = match digits.get(..2) {
        Some("0x") => (16, &digits[2..]),
        Some("0o") => (8, &digits[2..]),
        Some("0b") => (2, &digits[2..]),
        _ => (10, digits.as_str()),
    };
    if digits.is_empty() || !digits.chars().all(|c| c.is_digit(radix)) {
        return TokenKind::Other(Cow::Owned(text.to_owned()));
    }
    TokenKind::Int(i64::from_str_radix(digits, radix).ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use quote::quote;

    fn kinds(input: TokenStream) -> Vec<TokenKind> {
        Source::read(input).tokens.into_iter().map(|token| token.kind).collect()
    }

    fn ident(text: &str) -> TokenKind {
        TokenKind::Ident(Cow::Owned(text.to_owned()))
    }

    #[test]
    fn puncts_are_joined_as_in_rust() {
        let spelled: Vec<_> = kinds(quote!(a ..= b && c <= -1 || d += 1 .. -1))
            .into_iter()
            .filter_map(|kind| if let TokenKind::Punct(text) = kind { Some(text) } else { None })
            .collect();
        assert_eq!(spelled, ["..=", "&&", "<=", "-", "||", "+=", "..", "-"]);
        // Apart in the source means apart: `| |` is an empty parameter list nowhere.
        let apart: TokenStream = "| | x".parse().unwrap();
        assert_eq!(kinds(apart)[..2], [TokenKind::Punct("|"), TokenKind::Punct("|")]);
        let joined: TokenStream = "..-1".parse().unwrap();
        assert_eq!(kinds(joined)[..2], [TokenKind::Punct(".."), TokenKind::Punct("-")]);
    }

    #[test]
    fn literals() {
        let input: TokenStream = r#"1_000 0xff 9223372036854775808 1.5 "s" 7usize 'a"#.parse().unwrap();
        let kinds = kinds(input);
        assert_eq!(kinds[..3], [TokenKind::Int(Some(1000)), TokenKind::Int(Some(255)), TokenKind::Int(None)]);
        assert!(kinds[3..7].iter().all(|kind| matches!(kind, TokenKind::Other(_))), "{kinds:?}");
        assert_eq!(kinds.len(), 8);
    }

    #[test]
    fn attributes_and_visibility_are_set_aside() {
        let input: TokenStream = "/// a \"quoted\" line\n#[cfg(all())] pub(crate) name<P>;".parse().unwrap();
        let source = Source::read(input);
        assert_eq!(source.front.docs, [" a \"quoted\" line"]);
        assert_eq!(source.front.visibility.to_string().replace(' ', ""), "pub(crate)");
        assert!(source.front.attributes.to_string().contains("cfg"));
        assert_eq!(source.tokens[0].kind, TokenKind::Doc(Cow::Borrowed(" a \"quoted\" line")));
        assert_eq!(source.tokens[1].kind, ident("name"));
    }

    fn invisible(stream: TokenStream) -> TokenTree {
        TokenTree::Group(Group::new(Delimiter::None, stream))
    }

    #[test]
    fn captured_fragments_are_transparent() {
        let (sum, call, vis) = (invisible(quote!(a + 1)), invisible(quote!(F(r, m))), invisible(quote!(pub(crate))));
        assert_eq!(kinds(quote!(2 * #sum)), kinds(quote!(2 * (a + 1))));
        assert_eq!(kinds(quote!(#call;)), kinds(quote!(F(r, m);)));
        let source = Source::read(quote!(#vis name;));
        assert!(!source.front.visibility.is_empty());
        assert_eq!(source.tokens[0].kind, ident("name"));
    }

    #[test]
    fn origins_number_the_tokens() {
        let source = Source::read(quote!(name<P>; rank |r| { F(r, 0); }));
        for (n, token) in source.tokens.iter().enumerate() {
            assert_eq!((token.origin.first(), token.origin.last()), (n, n));
        }
        assert_eq!(source.spans.len(), source.tokens.len());
        assert!(source.try_spans_of(Origin::NONE).is_none());
    }
}
