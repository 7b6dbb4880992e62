//! Expressions: precedence climbing with Rust's precedences.

use super::foreign::not_in_language;
use super::{MAX_HEIGHT, Parse, Parser, too_deep};
use crate::code::Code;
use crate::diag::Diagnostic;
use crate::lang::ast::*;
use crate::lang::draft::UNRESOLVED;
use crate::lang::token::TokenKind;
use crate::origin::Origin;

impl Parser<'_> {
    /// An expression.
    pub(super) fn expr(&mut self) -> Parse<ExprId> {
        self.expr_above(0)
    }

    fn expr_above(&mut self, floor: u8) -> Parse<ExprId> {
        let start = self.here();
        let first = self.nested(Self::unary)?;
        self.climb(first, floor, start)
    }

    /// Goes on with an expression whose first operand was read: operators of precedence > `floor`.
    pub(super) fn climb(&mut self, first: ExprId, floor: u8, start: Origin) -> Parse<ExprId> {
        let mut left = first;
        loop {
            if self.draft.height(left) > MAX_HEIGHT {
                return Err(self.fault(too_deep(start)));
            }
            if self.is_word("as") {
                self.cast();
                continue;
            }
            let TokenKind::Punct(text) = *self.peek() else { return Ok(left) };
            if matches!(text, "&" | "|" | "^" | "<<" | ">>") {
                let origin = self.here();
                self.fault(not_in_language(origin, "a bit operator", "use `*`, `/`, `%`, `&&` or `||`"));
                self.bump();
                self.expr_above(5)?;
                continue;
            }
            let Some(op) = BinaryOp::parse(text) else { return Ok(left) };
            if op.precedence() <= floor {
                return Ok(left);
            }
            let chained = op.compares()
                && matches!(self.draft.exprs[left as usize].kind, ExprKind::Binary(o, ..) if o.compares())
                && !self.tokens[self.at - 1..self.at].iter().any(|t| t.kind == TokenKind::Close(')'));
            let at = self.bump();
            if chained {
                let fault =
                    Diagnostic::new(Code::Syntax, at, "comparisons cannot be chained").help("write `a < b && b < c`");
                self.fault(fault);
                left = self.draft.expr(ExprKind::Broken, start);
            }
            let right = self.expr_above(op.precedence())?;
            let origin = self.since(start);
            left = self.draft.expr(ExprKind::Binary(op, left, right), origin);
        }
    }

    /// `as T`: reported, then read over.
    fn cast(&mut self) {
        if let Some(fault) = self.foreign() {
            self.fault(fault);
        }
        self.bump();
        while self.ident().is_some() || self.is_punct("::") {
            self.bump();
        }
    }

    fn unary(&mut self) -> Parse<ExprId> {
        let start = self.here();
        match *self.peek() {
            TokenKind::Punct(op @ ("-" | "!")) => {
                self.bump();
                let operand = self.nested(Self::unary)?;
                let kind = if op == "-" { ExprKind::Neg(operand) } else { ExprKind::Not(operand) };
                let origin = self.since(start);
                Ok(self.draft.expr(kind, origin))
            }
            TokenKind::Punct("&" | "&&" | "*") => {
                if let Some(fault) = self.foreign() {
                    self.fault(fault);
                }
                self.bump();
                self.eat_word("mut");
                self.nested(Self::unary)
            }
            _ => {
                let operand = self.primary()?;
                self.postfix(operand, start)
            }
        }
    }

    /// Method calls, and what else may follow an operand in Rust.
    pub(super) fn postfix(&mut self, first: ExprId, start: Origin) -> Parse<ExprId> {
        let mut value = first;
        loop {
            if self.draft.height(value) > MAX_HEIGHT {
                return Err(self.fault(too_deep(start)));
            }
            match self.peek() {
                TokenKind::Punct(".") => value = self.method(value, start)?,
                TokenKind::Punct("?") => {
                    if let Some(fault) = self.foreign() {
                        self.fault(fault);
                    }
                    self.bump();
                }
                TokenKind::Open('[') => {
                    let origin = self.here();
                    let fault = not_in_language(origin, "indexing", "use a helper closure: `let f = |i| ..;`");
                    return Err(self.fault(fault));
                }
                TokenKind::Open('(') => {
                    let origin = self.here();
                    return Err(self.syntax(origin, "only a helper closure can be called, by its name"));
                }
                _ => return Ok(value),
            }
        }
    }

    fn method(&mut self, receiver: ExprId, start: Origin) -> Parse<ExprId> {
        self.bump();
        let origin = self.here();
        let Some(name) = self.ident() else {
            return match self.peek() {
                TokenKind::Int(_) => Err(self.fault(not_in_language(origin, "a field", "name the parts with `let`"))),
                _ => Err(self.expected("a method")),
            };
        };
        self.bump();
        if !self.is_open('(') {
            return Err(self.fault(not_in_language(origin, "a field", "name the parts with `let`")));
        }
        if matches!(name, "rev" | "step_by") {
            let help = format!("put the range in parentheses: `(a..b).{name}(..)`").replace("rev(..)", "rev()");
            let message = format!("`{name}` belongs to the range of a `for`");
            return Err(self.fault(Diagnostic::new(Code::Syntax, origin, message).help(help)));
        }
        let builtin = Builtin::ALL.into_iter().find(|b| b.text() == name);
        if builtin.is_none() && name != "abs" {
            let what = format!("the method `{name}`");
            let help = "numbers have `min`, `max`, `abs`, `rem_euclid` and `div_euclid`";
            return Err(self.fault(not_in_language(origin, &what, help)));
        }
        let args = self.arguments()?;
        let whole = self.since(start);
        let kind = match (builtin, args.as_slice()) {
            (Some(builtin), [operand]) => ExprKind::Builtin(builtin, receiver, *operand),
            (None, []) => ExprKind::Abs(receiver),
            (builtin, args) => {
                let want = usize::from(builtin.is_some());
                let message = format!("`.{name}()` takes {}, found {}", count(want, "argument"), args.len());
                self.fault(Diagnostic::new(Code::WrongArguments, self.since(origin), message));
                ExprKind::Broken
            }
        };
        Ok(self.draft.expr(kind, whole))
    }

    /// `( a, b )`
    pub(super) fn arguments(&mut self) -> Parse<Vec<ExprId>> {
        self.want_open('(')?;
        let mut args = Vec::new();
        while !self.is_close(')') {
            args.push(self.expr()?);
            if !self.is_close(')') && !self.eat_punct(",") {
                return Err(self.expected("`,` or `)`"));
            }
        }
        self.want_close(')')?;
        Ok(args)
    }

    fn primary(&mut self) -> Parse<ExprId> {
        let start = self.here();
        match self.peek() {
            TokenKind::Int(Some(value)) => {
                self.bump();
                Ok(self.draft.expr(ExprKind::Int(*value), start))
            }
            TokenKind::Int(None) | TokenKind::Other(_) => {
                // A literal that cannot be: say so, and read on.
                if let Some(fault) = self.foreign() {
                    self.fault(fault);
                }
                self.bump();
                Ok(self.draft.expr(ExprKind::Broken, start))
            }
            TokenKind::Ident(text) => self.word(text, start),
            TokenKind::Open('(') => {
                self.bump();
                if self.is_close(')') {
                    let fault = not_in_language(start, "`()`", "every value is an integer or a bool");
                    return Err(self.fault(fault));
                }
                let inner = self.expr()?;
                match self.peek() {
                    TokenKind::Punct(",") => {
                        let fault = not_in_language(start, "a tuple", "name the parts with `let`");
                        Err(self.fault(fault))
                    }
                    TokenKind::Punct(".." | "..=") => Err(self.expected("`)`")),
                    _ => {
                        self.want_close(')')?;
                        Ok(inner)
                    }
                }
            }
            TokenKind::Open('{') => {
                let block = self.block()?;
                let origin = self.since(start);
                Ok(self.draft.expr(ExprKind::Block(block), origin))
            }
            TokenKind::Punct("+") => {
                let fault =
                    Diagnostic::new(Code::Syntax, start, "expected a value, found `+`").help("`x += 1` counts up");
                Err(self.fault(fault))
            }
            _ => Err(self.expected("a value")),
        }
    }

    fn word(&mut self, text: &str, start: Origin) -> Parse<ExprId> {
        match text {
            "true" | "false" => {
                self.bump();
                return Ok(self.draft.expr(ExprKind::Bool(text == "true"), start));
            }
            "if" => {
                let parts = self.if_parts()?;
                return Ok(self.if_value(parts));
            }
            _ => {}
        }
        if let Some(fault) = self.foreign() {
            return Err(self.fault(fault));
        }
        if super::foreign::is_reserved(text) {
            return Err(self.expected("a value"));
        }
        self.bump();
        let name = self.draft.name(text);
        if !self.is_open('(') {
            return Ok(self.draft.expr(ExprKind::Var { name, slot: UNRESOLVED }, start));
        }
        let args = self.arguments()?;
        let origin = self.since(start);
        Ok(self.draft.call(name, &args, origin))
    }

    /// `|a, b|`, with the bars.
    pub(super) fn closure_params(&mut self) -> Parse<Vec<Binding>> {
        let mut params = Vec::new();
        if self.eat_punct("||") {
            return Ok(params);
        }
        self.want_punct("|")?;
        while !self.is_punct("|") {
            let (name, origin) = self.want_name("a parameter")?;
            params.push(Binding { name, slot: UNRESOLVED, origin });
            self.type_annotation();
            if !self.is_punct("|") && !self.eat_punct(",") {
                return Err(self.expected("`,` or `|`"));
            }
        }
        self.want_punct("|")?;
        Ok(params)
    }

    /// `|a, b| value`
    pub(super) fn closure(&mut self) -> Parse<u32> {
        let start = self.here();
        let params = self.closure_params()?;
        let body = self.expr()?;
        let origin = self.since(start);
        Ok(self.draft.lambda(&params, body, origin))
    }

    /// `: i64` after a name: reported, then read over.
    pub(super) fn type_annotation(&mut self) {
        if !self.is_punct(":") {
            return;
        }
        let start = self.bump();
        while self.ident().is_some() || self.is_punct("::") || self.is_punct("&") {
            self.bump();
        }
        let origin = self.since(start);
        self.fault(not_in_language(origin, "a type", "types are inferred: remove it"));
    }
}

/// `1 argument`, `2 arguments`
pub(crate) fn count(n: usize, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}
