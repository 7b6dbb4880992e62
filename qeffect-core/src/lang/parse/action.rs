//! Actions and overlaps.

use super::expr::count;
use super::stmt::{Entry, stmt};
use super::{Parse, Parser};
use crate::action::Kind;
use crate::code::Code;
use crate::diag::Diagnostic;
use crate::lang::ast::*;
use crate::lang::token::TokenKind;
use crate::origin::Origin;

/// Reads one argument of an action.
enum Argument {
    Value(ExprId),
    List(Vec<ExprId>, Origin),
}

impl Parser<'_> {
    pub(super) fn overlap(&mut self) -> Parse<Entry> {
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
    pub(super) fn action(&mut self) -> Parse<Entry> {
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
    pub(super) fn stage_action(&mut self) -> Parse<Entry> {
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
}
