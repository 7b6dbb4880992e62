//! Statements and blocks, with recovery after each broken one.

use super::foreign::not_in_language;
use super::{Broken, Parse, Parser};
use crate::code::Code;
use crate::diag::Diagnostic;
use crate::lang::ast::*;
use crate::lang::draft::UNRESOLVED;
use crate::lang::token::TokenKind;
use crate::origin::Origin;

/// One entry of a block.
pub(super) enum Entry {
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

pub(super) fn stmt(kind: StmtKind, origin: Origin) -> Entry {
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
    pub(super) fn end_of_statement(&mut self) -> Parse<()> {
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
    pub(super) fn condition(&mut self) -> Parse<ExprId> {
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
