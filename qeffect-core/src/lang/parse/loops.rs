//! `for` with its ranges, and `while`.

use super::foreign::not_in_language;
use super::stmt::{Entry, stmt};
use super::{Broken, Parse, Parser};
use crate::lang::ast::*;
use crate::lang::draft::UNRESOLVED;
use crate::origin::Origin;

impl Parser<'_> {
    pub(super) fn for_stmt(&mut self) -> Parse<Entry> {
        let start = self.bump();
        let head = self.for_head();
        let Ok((name, origin, range)) = head else {
            // Read the body for its own faults.
            self.recover(true);
            if !self.is_open('{') {
                return Ok(stmt(StmtKind::Block(self.draft.block(&[], None, start)), start));
            }
            let body = self.block()?;
            return Ok(stmt(StmtKind::Block(body), start));
        };
        let (range, inclusive, walk) = match range {
            Ok(range) => range,
            Err(Broken) => {
                self.recover(true);
                let broken = self.draft.expr(ExprKind::Broken, origin);
                (self.draft.list(&[broken, broken]), false, Walk::Up)
            }
        };
        if !self.is_open('{') {
            return Err(self.expected("`{`"));
        }
        let body = self.block()?;
        let kind = StmtKind::For { name, slot: UNRESOLVED, range: range.start, inclusive, walk, body };
        Ok(stmt(kind, origin))
    }

    #[allow(clippy::type_complexity, reason = "used once, right above")]
    fn for_head(&mut self) -> Parse<(NameId, Origin, Parse<(List, bool, Walk)>)> {
        if self.is_open('(') {
            let origin = self.here();
            return Err(self.fault(not_in_language(origin, "a pattern", "a `for` has one variable")));
        }
        let (name, origin) = self.want_name("a name")?;
        if !self.eat_word("in") {
            return Err(self.expected("`in`"));
        }
        let mut range = self.range();
        if range.is_ok() && !self.is_open('{') {
            range = Err(self.expected("`{`"));
        }
        Ok((name, origin, range))
    }

    /// `a..b`, `a..=b`, `(a..b).rev()`, `(a..b).step_by(k)`, or both methods.
    fn range(&mut self) -> Parse<(List, bool, Walk)> {
        let start = self.here();
        let mut first = None;
        if self.eat_open('(') {
            let from = self.expr()?;
            if self.is_punct("..") || self.is_punct("..=") {
                let (to, inclusive) = self.range_end()?;
                self.want_close(')')?;
                return self.walk(from, to, inclusive);
            }
            self.want_close(')')?;
            let operand = self.postfix(from, start)?;
            first = Some(self.climb(operand, 0, start)?);
        }
        if self.is_open('[') {
            return Err(self.expected("a range"));
        }
        let from = match first {
            Some(first) => first,
            None => self.expr()?,
        };
        let (to, inclusive) = self.range_end()?;
        let list = self.draft.list(&[from, to]);
        Ok((list, inclusive, Walk::Up))
    }

    fn range_end(&mut self) -> Parse<(ExprId, bool)> {
        let inclusive = self.is_punct("..=");
        if !self.eat_punct("..") && !self.eat_punct("..=") {
            return Err(self.expected("`..`"));
        }
        Ok((self.expr()?, inclusive))
    }

    /// The methods behind a range in parentheses.
    fn walk(&mut self, from: ExprId, to: ExprId, inclusive: bool) -> Parse<(List, bool, Walk)> {
        let (mut walk, mut step) = (Walk::Up, None);
        while self.eat_punct(".") {
            let origin = self.here();
            let method = self.ident().unwrap_or("");
            self.bump();
            let args = match method {
                "rev" | "step_by" => self.arguments()?,
                _ => {
                    let what = format!("the method `{method}` of a range");
                    return Err(self.fault(not_in_language(origin, &what, "a range has `rev()` and `step_by(k)`")));
                }
            };
            let want = usize::from(method == "step_by");
            if !self.want_count(method, if want == 0 { "nothing" } else { "a step" }, want, args.len(), origin) {
                return Err(Broken);
            }
            walk = match (walk, method) {
                (Walk::Up, "rev") => Walk::Down,
                (Walk::Up, "step_by") => Walk::UpBy,
                (Walk::Down, "step_by") => Walk::DownBy,
                (Walk::UpBy, "rev") => Walk::UpByReversed,
                _ => {
                    let fault = not_in_language(origin, "this chain", "use `rev()` and `step_by(k)` once each");
                    return Err(self.fault(fault));
                }
            };
            step = args.first().copied().or(step);
        }
        let list = match step {
            Some(step) => self.draft.list(&[from, to, step]),
            None => self.draft.list(&[from, to]),
        };
        Ok((list, inclusive, walk))
    }

    pub(super) fn while_stmt(&mut self) -> Parse<Entry> {
        let start = self.bump();
        let condition = self.condition()?;
        let body = self.block()?;
        Ok(stmt(StmtKind::While { condition, body }, start))
    }
}
