//! Tokens to a program: recursive descent, statement by statement.
//!
//! One parser serves the text reader and the macro. A broken statement is reported at the token
//! where it stops making sense; reading goes on behind its `;` or its block, so that one run shows
//! every broken statement. What Rust has and the language has not is named as such.

mod action;
mod expr;
mod foreign;
mod header;
mod loops;
mod stmt;

pub(crate) use expr::count;

use std::borrow::Cow;

use super::ast::{Instance, NameId, Program};
use super::draft::Draft;
use super::resolve;
use super::token::{Token, TokenKind};
use crate::code::Code;
use crate::diag::{Diagnostic, Report};
use crate::origin::Origin;

/// What a parser has to say about a schedule.
#[derive(Clone, Debug)]
pub struct Parsed {
    /// The program; `None` if there is any fault.
    pub program: Option<Program>,
    /// Name, parameters and instances, as far as they can be read even in a broken schedule.
    pub signature: Option<Signature>,
    /// Everything that is wrong, in source order.
    pub faults: Vec<Diagnostic>,
}

impl Parsed {
    /// The program, or the report of what is wrong with it.
    pub fn into_result(self) -> Result<Program, Report> {
        self.program.ok_or_else(|| Report::from_faults(self.faults))
    }
}

/// The first line of a schedule.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Signature {
    /// Its name, and where it stands.
    pub name: (String, Origin),
    /// Its parameters.
    pub params: Vec<(String, Origin)>,
    /// Its declared instances.
    pub instances: Vec<Instance>,
}

/// Reads one schedule.
pub fn parse(tokens: &[Token]) -> Parsed {
    let mut parser = Parser { tokens, at: 0, depth: 0, draft: Draft::default() };
    let signature = parser.schedule();
    let mut draft = parser.draft;
    let program = resolve::resolve(&mut draft);
    let mut faults = draft.faults;
    faults.sort_by_key(|d| d.primary.origin);
    Parsed { program: program.filter(|_| faults.is_empty()), signature, faults }
}

/// A fault has been reported; the caller decides where to go on.
struct Broken;

type Parse<T> = Result<T, Broken>;

/// Deepest nesting of blocks and parentheses.
const MAX_DEPTH: usize = 64;
/// Highest tree: also bounds chains such as `a + a + ..`.
const MAX_HEIGHT: u32 = 256;

struct Parser<'a> {
    tokens: &'a [Token],
    at: usize,
    depth: usize,
    draft: Draft,
}

const END: TokenKind = TokenKind::End;

impl<'a> Parser<'a> {
    fn peek(&self) -> &'a TokenKind {
        self.peek_at(0)
    }

    fn peek_at(&self, n: usize) -> &'a TokenKind {
        self.tokens.get(self.at + n).map_or(&END, |t| &t.kind)
    }

    /// Place of the next token; at the end of input, of the last one.
    fn here(&self) -> Origin {
        self.tokens.get(self.at).or(self.tokens.last()).map_or(Origin::NONE, |t| t.origin)
    }

    /// From `start` to the last token taken.
    fn since(&self, start: Origin) -> Origin {
        self.at.checked_sub(1).and_then(|n| self.tokens.get(n)).map_or(start, |t| start.to(t.origin))
    }

    fn bump(&mut self) -> Origin {
        let origin = self.here();
        if !self.at_end() {
            self.at += 1;
        }
        origin
    }

    fn at_end(&self) -> bool {
        matches!(self.peek(), TokenKind::End)
    }

    fn is_punct(&self, text: &str) -> bool {
        matches!(self.peek(), TokenKind::Punct(p) if *p == text)
    }

    fn is_open(&self, c: char) -> bool {
        *self.peek() == TokenKind::Open(c)
    }

    fn is_close(&self, c: char) -> bool {
        *self.peek() == TokenKind::Close(c)
    }

    fn ident(&self) -> Option<&'a str> {
        match self.peek() {
            TokenKind::Ident(text) => Some(text),
            _ => None,
        }
    }

    fn is_word(&self, text: &str) -> bool {
        self.ident() == Some(text)
    }

    fn eat_punct(&mut self, text: &str) -> bool {
        let found = self.is_punct(text);
        self.at += usize::from(found);
        found
    }

    fn eat_word(&mut self, text: &str) -> bool {
        let found = self.is_word(text);
        self.at += usize::from(found);
        found
    }

    fn eat_open(&mut self, c: char) -> bool {
        let found = self.is_open(c);
        self.at += usize::from(found);
        found
    }

    fn fault(&mut self, diagnostic: Diagnostic) -> Broken {
        self.draft.faults.push(diagnostic);
        Broken
    }

    fn syntax(&mut self, origin: Origin, message: impl Into<String>) -> Broken {
        self.fault(Diagnostic::new(Code::Syntax, origin, message))
    }

    /// The next token is not what the grammar wants.
    fn expected(&mut self, what: &str) -> Broken {
        if let Some(diagnostic) = self.foreign() {
            return self.fault(diagnostic);
        }
        let found = describe(self.peek());
        let origin = self.here();
        let mut diagnostic = Diagnostic::new(Code::Syntax, origin, format!("expected {what}, found {found}"))
            .role(format!("expected {what}"));
        if self.is_punct("=") {
            diagnostic = diagnostic.help("`==` compares two values");
        }
        self.fault(diagnostic)
    }

    fn want_punct(&mut self, text: &str) -> Parse<Origin> {
        if self.is_punct(text) { Ok(self.bump()) } else { Err(self.expected(&format!("`{text}`"))) }
    }

    fn want_open(&mut self, c: char) -> Parse<Origin> {
        if self.is_open(c) { Ok(self.bump()) } else { Err(self.expected(&format!("`{c}`"))) }
    }

    fn want_close(&mut self, c: char) -> Parse<Origin> {
        if self.is_close(c) { Ok(self.bump()) } else { Err(self.expected(&format!("`{c}`"))) }
    }

    /// A name that a program may give: no word that Rust or the language keeps for itself.
    fn want_name(&mut self, what: &str) -> Parse<(NameId, Origin)> {
        let Some(text) = self.ident() else { return Err(self.expected(what)) };
        let origin = self.here();
        if foreign::is_reserved(text) {
            let message = format!("`{text}` is a keyword and cannot be a name");
            return Err(self.syntax(origin, message));
        }
        self.bump();
        Ok((self.draft.name(text), origin))
    }

    /// Runs `inner` one level deeper.
    fn nested<T>(&mut self, inner: impl FnOnce(&mut Self) -> Parse<T>) -> Parse<T> {
        if self.depth >= MAX_DEPTH {
            let origin = self.here();
            return Err(self.fault(too_deep(origin)));
        }
        self.depth += 1;
        let result = inner(self);
        self.depth -= 1;
        result
    }

    /// Skips what is left of a broken statement: behind its `;` or block, or up to the brace that
    /// closes the block around it. Stops before a block if `keep_block`.
    fn recover(&mut self, keep_block: bool) {
        let mut inner = 0usize;
        loop {
            match self.peek() {
                TokenKind::End => return,
                TokenKind::Punct(";") if inner == 0 => {
                    self.at += 1;
                    return;
                }
                TokenKind::Open('{') if inner == 0 && keep_block => return,
                TokenKind::Open('{') => {
                    self.skip_group();
                    let goes_on = matches!(self.peek(), TokenKind::Punct(_) | TokenKind::Close(')' | ']'))
                        || self.is_word("else");
                    if inner == 0 && !goes_on {
                        return;
                    }
                }
                TokenKind::Close('}') => return,
                TokenKind::Open(_) => {
                    inner += 1;
                    self.at += 1;
                }
                TokenKind::Close(_) => {
                    inner = inner.saturating_sub(1);
                    self.at += 1;
                }
                _ => self.skip_token(),
            }
        }
    }

    /// Skips a bracketed group, which may be open at the end of input.
    fn skip_group(&mut self) {
        let mut depth = 0usize;
        loop {
            match self.peek() {
                TokenKind::End => return,
                TokenKind::Open(_) => depth += 1,
                TokenKind::Close(_) => depth = depth.saturating_sub(1),
                _ => {}
            }
            self.skip_token();
            if depth == 0 {
                return;
            }
        }
    }

    /// A name in skipped text may be a definition that the rest of the program uses.
    fn skip_token(&mut self) {
        if let Some(text) = self.ident() {
            let name = self.draft.name(text);
            self.draft.doubtful.push(name);
        }
        self.at += 1;
    }
}

fn too_deep(origin: Origin) -> Diagnostic {
    Diagnostic::new(Code::LimitExceeded, origin, "this is nested too deeply")
        .help("name parts of it with `let`, or write a helper closure")
}

/// A token as messages name it.
fn describe(token: &TokenKind) -> Cow<'static, str> {
    match token {
        TokenKind::Ident(text) => format!("`{text}`").into(),
        TokenKind::Int(Some(n)) => format!("`{n}`").into(),
        TokenKind::Int(None) => "an integer".into(),
        TokenKind::Punct(text) => format!("`{text}`").into(),
        TokenKind::Open(c) | TokenKind::Close(c) => format!("`{c}`").into(),
        TokenKind::Doc(_) => "a documentation comment".into(),
        TokenKind::Other(text) => format!("`{text}`").into(),
        TokenKind::End => "the end of the schedule".into(),
    }
}
