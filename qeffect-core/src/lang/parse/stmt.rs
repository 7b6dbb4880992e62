//! Statements and blocks, with recovery after each broken one.

use super::expr::count;
use super::foreign::not_in_language;
use super::{Broken, Parse, Parser};
use crate::action::Kind;
use crate::code::Code;
use crate::diag::Diagnostic;
use crate::lang::ast::*;
use crate::lang::draft::UNRESOLVED;
use crate::lang::token::TokenKind;
use crate::origin::Origin;

/// One entry of a block.
enum Entry {
    Stmt(Stmt),
    Tail(ExprId),
}

/// An `if` before it is known whether it is a statement or a value.
pub(super) struct IfParts {
    condition: ExprId,
    then: BlockId,
    otherwise: Else,
    keyword: Origin,
    origin: Origin,
}

enum Else {
    None,
    Block(BlockId),
    If(Box<IfParts>),
}

/// Reads one argument of an action.
enum Argument {
    Value(ExprId),
    List(Vec<ExprId>, Origin),
}

fn stmt(kind: StmtKind, origin: Origin) -> Entry {
    Entry::Stmt(Stmt { kind, origin })
}

impl Parser<'_> {
    /// `{ .. }`. A broken statement does not break the block.
    pub(super) fn block(&mut self) -> Parse<BlockId> {
        let open = self.here();
        self.nested(|p| {
            p.want_open('{')?;
            p.block_rest(open)
        })
        .inspect_err(|_| {
            if self.here() == open && self.is_open('{') {
                self.skip_group();
            }
        })
    }

    fn block_rest(&mut self, open: Origin) -> Parse<BlockId> {
        let mut stmts = Vec::new();
        let mut tail = None;
        loop {
            match self.peek() {
                TokenKind::Close('}') => {
                    self.bump();
                    break;
                }
                TokenKind::End => {
                    self.syntax(open, "this `{` is never closed");
                    break;
                }
                TokenKind::Doc(_) | TokenKind::Punct(";") => {
                    self.bump();
                    continue;
                }
                _ => {}
            }
            match self.statement() {
                Ok(Entry::Stmt(s)) => stmts.push(s),
                Ok(Entry::Tail(value)) => tail = Some(value),
                Err(Broken) => self.recover(false),
            }
        }
        Ok(self.draft.block(&stmts, tail, open))
    }

    fn statement(&mut self) -> Parse<Entry> {
        let start = self.here();
        let opens = |c| *self.peek_at(1) == TokenKind::Open(c);
        match self.peek() {
            TokenKind::Open('{') => {
                let block = self.block()?;
                let value = self.draft.blocks[block as usize].tail;
                if let Some(value) = value {
                    let origin = self.since(start);
                    let whole = self.draft.expr(ExprKind::Block(block), origin);
                    return self.value_at_end(whole, value);
                }
                Ok(stmt(StmtKind::Block(block), start))
            }
            TokenKind::Ident(word) => match &**word {
                "let" => self.let_stmt().map(Entry::Stmt),
                "if" => self.if_stmt(),
                "for" => self.for_stmt(),
                "while" => self.while_stmt(),
                "loop" => {
                    let fault = self.foreign();
                    self.draft.faults.extend(fault);
                    self.bump();
                    Ok(stmt(StmtKind::Block(self.block()?), start))
                }
                "overlap" if opens('{') => self.overlap(),
                "F" | "I" | "W" | "B" | "R" if opens('(') => self.action(),
                "refresh" | "reduce" if opens('(') => self.stage_action(),
                "commit" if opens('(') || matches!(self.peek_at(1), TokenKind::Punct(";") | TokenKind::Close('}')) => {
                    self.bump();
                    if self.is_open('(') {
                        let args = self.arguments()?;
                        self.want_count("commit", "nothing", 0, args.len(), start);
                    }
                    self.end_of_statement()?;
                    Ok(stmt(StmtKind::Commit, start))
                }
                _ => self.other_stmt(),
            },
            _ => self.other_stmt(),
        }
    }

    /// `;`, or the brace behind the last statement. A missing `;` breaks nothing if what follows
    /// can start a statement.
    fn end_of_statement(&mut self) -> Parse<()> {
        if self.eat_punct(";") || self.is_close('}') {
            return Ok(());
        }
        self.missing_semicolon()
    }

    fn missing_semicolon(&mut self) -> Parse<()> {
        let next_line = self.ident().is_some() && self.foreign().is_none();
        let broken = self.expected("`;`");
        if next_line { Ok(()) } else { Err(broken) }
    }

    /// `let x = e;` or `let f = |a| e;`, in a rank or at the top level.
    pub(super) fn let_stmt(&mut self) -> Parse<Stmt> {
        self.bump();
        let mut_at = self.here();
        let mutable = self.eat_word("mut");
        if self.is_open('(') || self.is_open('[') || self.is_punct("&") {
            let origin = self.here();
            return Err(self.fault(not_in_language(origin, "a pattern", "name one variable per `let`")));
        }
        let (name, origin) = self.want_name("a name")?;
        self.type_annotation();
        match self.let_value(name, mutable) {
            Ok(kind) => {
                if mutable && matches!(kind, StmtKind::Helper { .. }) {
                    let fault = Diagnostic::new(Code::Syntax, mut_at, "a helper closure cannot be `mut`");
                    self.fault(fault.help("remove `mut`"));
                }
                Ok(Stmt { kind, origin })
            }
            Err(Broken) => {
                // The name is known all the same: later uses of it are no faults of their own.
                self.recover(false);
                let value = self.draft.expr(ExprKind::Broken, origin);
                Ok(Stmt { kind: StmtKind::Let { name, slot: UNRESOLVED, mutable: true, value }, origin })
            }
        }
    }

    fn let_value(&mut self, name: NameId, mutable: bool) -> Parse<StmtKind> {
        self.want_punct("=")?;
        let kind = if self.is_punct("|") || self.is_punct("||") {
            let text = &self.draft.names[name as usize];
            if matches!(&**text, "F" | "I" | "W" | "B" | "R" | "refresh" | "reduce" | "commit") {
                let message = format!("`{text}` is an action and cannot name a helper closure");
                let origin = self.tokens[self.at.saturating_sub(2)].origin;
                self.syntax(origin, message);
            }
            StmtKind::Helper { name, lambda: self.closure()? }
        } else {
            StmtKind::Let { name, slot: UNRESOLVED, mutable, value: self.expr()? }
        };
        if !self.eat_punct(";") {
            self.missing_semicolon()?;
        }
        Ok(kind)
    }

    /// A condition; if it is broken, reading goes on at the block.
    fn condition(&mut self) -> Parse<ExprId> {
        if self.is_word("let") {
            let origin = self.here();
            self.fault(not_in_language(origin, "`let` in a condition", "compare with `==`"));
        } else {
            let value = self.expr();
            match value {
                Ok(value) if self.is_open('{') => return Ok(value),
                Ok(_) => {
                    self.expected("`{`");
                }
                Err(Broken) => {}
            }
        }
        self.recover(true);
        if !self.is_open('{') {
            return Err(Broken);
        }
        let origin = self.here();
        Ok(self.draft.expr(ExprKind::Broken, origin))
    }

    pub(super) fn if_parts(&mut self) -> Parse<IfParts> {
        let keyword = self.bump();
        let condition = self.condition()?;
        let then = self.block()?;
        let otherwise = if !self.eat_word("else") {
            Else::None
        } else if self.is_word("if") {
            Else::If(Box::new(self.nested(Self::if_parts)?))
        } else {
            Else::Block(self.block()?)
        };
        let origin = self.since(keyword);
        Ok(IfParts { condition, then, otherwise, keyword, origin })
    }

    fn if_tail(&self, parts: &IfParts) -> Option<ExprId> {
        self.draft.blocks[parts.then as usize].tail.or_else(|| match &parts.otherwise {
            Else::None => None,
            Else::Block(block) => self.draft.blocks[*block as usize].tail,
            Else::If(parts) => self.if_tail(parts),
        })
    }

    /// The `if` as a value: both ways must have one.
    pub(super) fn if_value(&mut self, parts: IfParts) -> ExprId {
        let otherwise = match parts.otherwise {
            Else::None => {
                let fault = Diagnostic::new(Code::TypeMismatch, parts.keyword, "an `if` without `else` has no value")
                    .help("add `else { .. }`");
                self.fault(fault);
                return self.draft.expr(ExprKind::Broken, parts.origin);
            }
            Else::Block(block) => block,
            Else::If(inner) => {
                let origin = inner.origin;
                let value = self.if_value(*inner);
                self.draft.block(&[], Some(value), origin)
            }
        };
        self.draft.expr(ExprKind::If(parts.condition, parts.then, otherwise), parts.origin)
    }

    fn if_kind(&mut self, parts: IfParts) -> StmtKind {
        let otherwise = match parts.otherwise {
            Else::None => None,
            Else::Block(block) => Some(block),
            Else::If(inner) => {
                let origin = inner.keyword;
                let kind = self.if_kind(*inner);
                Some(self.draft.block(&[Stmt { kind, origin }], None, origin))
            }
        };
        StmtKind::If { condition: parts.condition, then: parts.then, otherwise }
    }

    fn if_stmt(&mut self) -> Parse<Entry> {
        let parts = self.if_parts()?;
        match self.if_tail(&parts) {
            Some(value) => {
                let whole = self.if_value(parts);
                self.value_at_end(whole, value)
            }
            None => {
                let origin = parts.keyword;
                Ok(stmt(self.if_kind(parts), origin))
            }
        }
    }

    /// A block with a value: the value of the block around it, or of no use.
    fn value_at_end(&mut self, whole: ExprId, value: ExprId) -> Parse<Entry> {
        if self.is_close('}') {
            return Ok(Entry::Tail(whole));
        }
        let origin = self.draft.exprs[value as usize].origin;
        self.fault(unused(origin));
        let value = self.draft.block(&[], None, origin);
        Ok(stmt(StmtKind::Block(value), origin))
    }

    fn for_stmt(&mut self) -> Parse<Entry> {
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

    fn while_stmt(&mut self) -> Parse<Entry> {
        let start = self.bump();
        let condition = self.condition()?;
        let body = self.block()?;
        Ok(stmt(StmtKind::While { condition, body }, start))
    }

    fn overlap(&mut self) -> Parse<Entry> {
        let start = self.bump();
        let open = self.want_open('{')?;
        let mut branches = Vec::new();
        loop {
            match self.peek() {
                TokenKind::Close('}') => {
                    self.bump();
                    break;
                }
                TokenKind::End => {
                    self.syntax(open, "this `{` is never closed");
                    break;
                }
                TokenKind::Punct(";" | ",") => {
                    self.bump();
                }
                TokenKind::Open('{') => branches.push(self.block()?),
                _ => {
                    self.expected("`{`: each branch of an overlap is a block");
                    self.recover(false);
                    branches.push(self.draft.block(&[], None, start));
                }
            }
        }
        if branches.len() < 2 {
            let fault = Diagnostic::new(Code::Syntax, start, "an overlap needs two branches or more")
                .help("`overlap { { F(a, m); } { B(b, n); } }`");
            self.fault(fault);
        }
        let branches = self.draft.list(&branches);
        Ok(stmt(StmtKind::Overlap { branches }, start))
    }

    /// `F(s, m);` or `W(s, [m0, m1]);`
    fn action(&mut self) -> Parse<Entry> {
        let letter = self.ident().unwrap_or("");
        let kind = match letter {
            "F" => Kind::Forward,
            "I" => Kind::InputGrad,
            "W" => Kind::WeightGrad,
            "B" => Kind::FullBackward,
            _ => Kind::Recompute,
        };
        let start = self.bump();
        self.want_open('(')?;
        let mut args = Vec::new();
        while !self.is_close(')') {
            args.push(self.action_argument()?);
            if !self.is_close(')') && !self.eat_punct(",") {
                return Err(self.expected("`,` or `)`"));
            }
        }
        self.want_close(')')?;
        let origin = self.since(start);
        self.want_count(letter, "a stage and a microbatch", 2, args.len(), origin);
        let mut args = args.into_iter();
        let kind = match (args.next(), args.next()) {
            (Some(Argument::Value(stage)), Some(Argument::Value(microbatch))) => {
                StmtKind::Action { kind, stage, microbatch }
            }
            (Some(Argument::Value(stage)), Some(Argument::List(members, at))) => {
                if kind != Kind::WeightGrad {
                    let message = format!("`{letter}` takes one microbatch: only `W` can take a list");
                    self.fault(Diagnostic::new(Code::WrongArguments, at, message));
                }
                if members.is_empty() {
                    let message = "a coalesced weight gradient needs at least one microbatch";
                    self.fault(Diagnostic::new(Code::WrongArguments, at, message));
                }
                StmtKind::Group { stage, microbatches: self.draft.list(&members) }
            }
            (Some(Argument::List(_, at)), _) => {
                self.fault(Diagnostic::new(Code::WrongArguments, at, "the first argument is one stage"));
                StmtKind::Commit
            }
            _ => StmtKind::Commit,
        };
        self.end_of_statement()?;
        Ok(stmt(kind, origin))
    }

    fn action_argument(&mut self) -> Parse<Argument> {
        if !self.is_open('[') {
            return self.expr().map(Argument::Value);
        }
        let start = self.bump();
        let mut members = Vec::new();
        while !self.is_close(']') {
            members.push(self.expr()?);
            if !self.is_close(']') && !self.eat_punct(",") {
                return Err(self.expected("`,` or `]`"));
            }
        }
        self.want_close(']')?;
        Ok(Argument::List(members, self.since(start)))
    }

    /// `refresh(s);`, `reduce(s);`
    fn stage_action(&mut self) -> Parse<Entry> {
        let word = self.ident().unwrap_or("");
        let start = self.bump();
        let args = self.arguments()?;
        let origin = self.since(start);
        self.want_count(word, "a stage", 1, args.len(), origin);
        let kind = match args.first() {
            Some(stage) if word == "refresh" => StmtKind::Refresh(*stage),
            Some(stage) => StmtKind::Reduce(*stage),
            None => StmtKind::Commit,
        };
        self.end_of_statement()?;
        Ok(stmt(kind, origin))
    }

    pub(super) fn want_count(&mut self, name: &str, what: &str, want: usize, found: usize, origin: Origin) -> bool {
        if want != found {
            let message = format!("`{name}` takes {what}, found {}", count(found, "argument"));
            self.fault(Diagnostic::new(Code::WrongArguments, origin, message));
        }
        want == found
    }

    /// An assignment, the value of the block, or a value that nobody uses.
    fn other_stmt(&mut self) -> Parse<Entry> {
        let start = self.here();
        if let Some(fault) = self.foreign().filter(|f| f.code == Code::NotInLanguage) {
            let reference = matches!(self.peek(), TokenKind::Punct("*" | "&" | "&&"));
            if !reference {
                return Err(self.fault(fault));
            }
        }
        let value = self.expr()?;
        if self.is_close('}') {
            return Ok(Entry::Tail(value));
        }
        let origin = self.since(start);
        let TokenKind::Punct(text @ (";" | "=" | "+=" | "-=" | "*=" | "/=" | "%=")) = *self.peek() else {
            return Err(self.expected("`;`"));
        };
        if text == ";" {
            self.fault(self.unused_value(value, origin));
            return Err(Broken);
        }
        let at = self.bump();
        let op = BinaryOp::parse(text.trim_end_matches('='));
        let operand = self.expr()?;
        self.end_of_statement()?;
        match self.draft.exprs[value as usize].kind {
            ExprKind::Var { name, .. } => {
                Ok(stmt(StmtKind::Assign { name, slot: UNRESOLVED, op, value: operand }, start))
            }
            ExprKind::Broken => Ok(stmt(StmtKind::Block(self.draft.block(&[], None, start)), start)),
            _ => {
                let message = "only a variable can be assigned";
                self.fault(Diagnostic::new(Code::Syntax, origin, message).label(at, "assigned here"));
                Ok(stmt(StmtKind::Block(self.draft.block(&[], None, start)), start))
            }
        }
    }

    fn unused_value(&self, value: ExprId, origin: Origin) -> Diagnostic {
        match self.draft.exprs[value as usize].kind {
            ExprKind::Call { name, .. } => {
                let name = &self.draft.names[name as usize];
                Diagnostic::new(Code::Syntax, origin, format!("`{name}(..)` is not an action"))
                    .help("actions are `F`, `I`, `W`, `B` and `R` of a stage and a microbatch, `refresh(s)`, `reduce(s)` and `commit`")
            }
            _ => unused(origin),
        }
    }
}

fn unused(origin: Origin) -> Diagnostic {
    Diagnostic::new(Code::Syntax, origin, "this value is never used").help("name it with `let`, or remove it")
}
