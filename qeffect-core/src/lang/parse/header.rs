//! The first line and the header of a schedule.

use super::foreign::not_in_language;
use super::{Broken, Parse, Parser, Signature};
use crate::code::Code;
use crate::diag::Diagnostic;
use crate::lang::ast::*;
use crate::lang::draft::{Field, UNRESOLVED};
use crate::lang::nearest::nearest;
use crate::lang::token::TokenKind;
use crate::origin::Origin;
use crate::schedule::{Compare, Transport, Update};

/// What may stand at the top level.
const FIELDS: &[&str] = &[
    "ranks",
    "microbatches",
    "stages",
    "place",
    "slots",
    "tapes",
    "works",
    "transport",
    "update",
    "bytes",
    "coalesce",
    "eval",
    "expect",
    "rank",
    "let",
];

/// Fields that every schedule has, and how they look.
const REQUIRED: &[(&str, &str)] = &[
    ("ranks", "ranks: P;"),
    ("microbatches", "microbatches: M;"),
    ("stages", "stages: P;"),
    ("place", "place: |s| s;"),
    ("rank", "rank |r| { .. }"),
];

impl Parser<'_> {
    /// A whole schedule. Faults are collected; the signature is what a broken one still tells.
    pub(super) fn schedule(&mut self) -> Option<Signature> {
        self.prefix();
        let signature = match self.first_line() {
            Ok(()) => true,
            Err(Broken) => {
                // A forgotten `;` does not cost the first field.
                if !self.ident().is_some_and(|word| FIELDS.contains(&word)) {
                    self.recover(false);
                }
                self.draft.name.is_some()
            }
        };
        let mut seen: Vec<&'static str> = Vec::new();
        loop {
            match self.peek() {
                TokenKind::End => break,
                TokenKind::Doc(_) | TokenKind::Punct(";") => {
                    self.bump();
                }
                TokenKind::Close(_) => {
                    self.expected("a header field");
                    self.bump();
                }
                _ => {
                    if self.item(&mut seen).is_err() {
                        self.recover(false);
                    }
                }
            }
        }
        if signature {
            self.missing(&seen);
        }
        let (name, origin) = self.draft.name.clone()?;
        let params = self.draft.params.iter().map(|p| (self.draft.names[p.name as usize].clone(), p.origin)).collect();
        Some(Signature { name: (name, origin), params, instances: self.draft.instances.clone() })
    }

    /// Documentation, attributes and visibility belong to the reader.
    fn prefix(&mut self) {
        loop {
            match self.peek() {
                TokenKind::Doc(text) => {
                    self.draft.docs.push(text.strip_prefix(' ').unwrap_or(text).to_owned());
                    self.bump();
                }
                TokenKind::Punct("#") if *self.peek_at(1) == TokenKind::Open('[') => {
                    self.bump();
                    self.skip_group();
                }
                TokenKind::Ident(word) if word == "pub" => {
                    self.bump();
                    if self.is_open('(') {
                        self.skip_group();
                    }
                }
                _ => return,
            }
        }
    }

    /// `zb_h1<P, M> for (2, 4), (4, 8);`
    fn first_line(&mut self) -> Parse<()> {
        let Some(text) = self.ident() else { return Err(self.expected("the schedule's name")) };
        let (_, origin) = self.want_name("the schedule's name")?;
        self.draft.name = Some((text.to_owned(), origin));
        if self.eat_punct("<") {
            while !self.is_punct(">") {
                let (name, origin) = self.want_name("a parameter")?;
                if self.draft.params.iter().any(|p| p.name == name) {
                    let message = format!("the parameter `{}` is declared twice", self.draft.names[name as usize]);
                    self.syntax(origin, message);
                }
                self.draft.params.push(Binding { name, slot: UNRESOLVED, origin });
                self.type_annotation();
                if !self.is_punct(">") && !self.eat_punct(",") {
                    return Err(self.expected("`,` or `>`"));
                }
            }
            self.want_punct(">")?;
        }
        if self.eat_word("for") {
            while !self.is_punct(";") {
                self.instance()?;
                if !self.is_punct(";") && !self.eat_punct(",") {
                    return Err(self.expected("`,` or `;`"));
                }
            }
        }
        self.want_punct(";").map(drop)
    }

    /// `(2, 4)`, or `2` for one parameter.
    fn instance(&mut self) -> Parse<()> {
        let start = self.here();
        let mut values = Vec::new();
        if self.eat_open('(') {
            while !self.is_close(')') {
                values.push(self.instance_value()?);
                if !self.is_close(')') && !self.eat_punct(",") {
                    return Err(self.expected("`,` or `)`"));
                }
            }
            self.want_close(')')?;
        } else {
            values.push(self.instance_value()?);
        }
        let origin = self.since(start);
        let params = self.draft.params.len();
        if values.len() != params {
            let names: Vec<_> = self.draft.params.iter().map(|p| self.draft.names[p.name as usize].as_str()).collect();
            let message = format!(
                "this instance has {}, the schedule has {}",
                super::expr::count(values.len(), "value"),
                super::expr::count(params, "parameter")
            );
            let fault = Diagnostic::new(Code::Instance, origin, message);
            let fault =
                if params > 0 { fault.note(format!("the parameters are `{}`", names.join(", "))) } else { fault };
            self.fault(fault);
            return Ok(());
        }
        if let Some(first) = self.draft.instances.iter().find(|i| *i.values == *values) {
            let fault = Diagnostic::new(Code::Instance, origin, "this instance is declared twice")
                .role("declared again")
                .label(first.origin, "declared first");
            self.fault(fault);
            return Ok(());
        }
        self.draft.instances.push(Instance { values: values.into(), origin });
        Ok(())
    }

    fn instance_value(&mut self) -> Parse<i64> {
        let start = self.here();
        let negative = self.eat_punct("-");
        match *self.peek() {
            TokenKind::Int(Some(value)) => {
                self.bump();
                Ok(if negative { -value } else { value })
            }
            TokenKind::Ident(_) => {
                let fault = Diagnostic::new(Code::Instance, start, "the values of an instance are integer literals")
                    .help("a name has no value when the schedule is checked: write the number");
                Err(self.fault(fault))
            }
            _ => Err(self.expected("an integer")),
        }
    }

    fn item(&mut self, seen: &mut Vec<&'static str>) -> Parse<()> {
        let origin = self.here();
        let Some(word) = self.ident() else { return Err(self.expected("a header field")) };
        let Some(field) = FIELDS.iter().copied().find(|f| *f == word) else {
            if let Some(fault) = self.foreign() {
                return Err(self.fault(fault));
            }
            if matches!(word, "if" | "for" | "while" | "overlap" | "F" | "I" | "W" | "B" | "R") {
                let fault =
                    Diagnostic::new(Code::Syntax, origin, format!("`{word}` stands outside `rank |r| {{ .. }}`"))
                        .help("actions and loops belong to the body of a rank");
                return Err(self.fault(fault));
            }
            let mut fault = Diagnostic::new(Code::Header, origin, format!("there is no header field `{word}`"));
            fault.help = Some(match nearest(word, FIELDS.iter().copied()) {
                Some(near) => {
                    seen.push(near);
                    format!("did you mean `{near}`?")
                }
                None => format!("the fields are `{}`", FIELDS[..13].join("`, `")),
            });
            return Err(self.fault(fault));
        };
        match field {
            "let" => {
                let stmt = self.let_stmt()?;
                if let StmtKind::Let { mutable: true, value, .. } = stmt.kind
                    && self.draft.exprs[value as usize].kind != ExprKind::Broken
                {
                    let fault = not_in_language(stmt.origin, "`let mut` outside `rank`", "remove `mut`");
                    self.fault(fault);
                }
                self.draft.lets.push(stmt);
                return Ok(());
            }
            "expect" => return self.expect(),
            _ => {}
        }
        if seen.contains(&field) {
            let what = if field == "rank" { "`rank`".to_owned() } else { format!("the header field `{field}`") };
            self.fault(Diagnostic::new(Code::Header, origin, format!("{what} is repeated")));
        }
        seen.push(field);
        self.bump();
        match field {
            "rank" => return self.rank(origin),
            "bytes" => {
                self.draft.fields.bytes = Some(self.bytes(origin)?);
            }
            "eval" => {
                let mut value = true;
                if self.eat_punct(":") {
                    value = self.is_word("true");
                    if !self.eat_word("true") && !self.eat_word("false") {
                        return Err(self.expected("`true` or `false`"));
                    }
                }
                self.draft.fields.eval = Some((value, origin));
            }
            _ => {
                self.want_punct(":")?;
                self.field(field, origin)?;
            }
        }
        if self.eat_punct(";") {
            return Ok(());
        }
        let next = self.ident().is_some_and(|word| FIELDS.contains(&word));
        let broken = self.expected("`;`");
        if next { Ok(()) } else { Err(broken) }
    }

    fn field(&mut self, field: &str, origin: Origin) -> Parse<()> {
        match field {
            "ranks" => self.draft.fields.ranks = self.value(origin)?,
            "microbatches" => self.draft.fields.microbatches = self.value(origin)?,
            "stages" => self.draft.fields.stages = self.value(origin)?,
            "coalesce" => self.draft.fields.coalesce = self.value(origin)?,
            "place" => self.draft.fields.place = self.closure_field("place: |s| ..", origin)?,
            "slots" => self.draft.fields.bounds[0] = self.closure_field("slots: |r| ..", origin)?,
            "tapes" => self.draft.fields.bounds[1] = self.closure_field("tapes: |r| ..", origin)?,
            "works" => self.draft.fields.bounds[2] = self.closure_field("works: |r| ..", origin)?,
            "transport" => {
                let choices = [Transport::Edge, Transport::RankEdge, Transport::Rendezvous];
                let value = self.choice(field, &["edge", "rank_edge", "rendezvous"], &choices)?;
                self.draft.fields.transport = Some((value, origin));
            }
            _ => {
                let choices = [Update::Microbatch, Update::Step, Update::None];
                let value = self.choice(field, &["microbatch", "step", "none"], &choices)?;
                self.draft.fields.update = Some((value, origin));
            }
        }
        Ok(())
    }

    fn value(&mut self, origin: Origin) -> Parse<Field<ExprId>> {
        Ok(Some((self.expr()?, origin)))
    }

    fn closure_field(&mut self, shape: &str, origin: Origin) -> Parse<Field<u32>> {
        if !self.is_punct("|") && !self.is_punct("||") {
            let at = self.here();
            let fault = Diagnostic::new(Code::Syntax, at, "expected a closure").help(format!("write `{shape}`"));
            return Err(self.fault(fault));
        }
        let lambda = self.closure()?;
        let Lambda { arity, origin: whole, .. } = self.draft.lambdas[lambda as usize];
        if arity != 1 {
            let found = super::expr::count(arity as usize, "parameter");
            let message = format!("this closure takes one parameter, found {found}");
            self.fault(Diagnostic::new(Code::WrongArguments, whole, message).help(format!("write `{shape}`")));
        }
        Ok(Some((lambda, origin)))
    }

    fn choice<T: Copy>(&mut self, field: &str, words: &[&str], values: &[T]) -> Parse<T> {
        let origin = self.here();
        let found = self.ident().and_then(|word| words.iter().position(|w| *w == word));
        match found {
            Some(n) => {
                self.bump();
                Ok(values[n])
            }
            None => {
                let message = format!("`{field}` is one of `{}`", words.join("`, `"));
                let mut fault = Diagnostic::new(Code::Header, origin, message);
                if let Some(near) = self.ident().and_then(|word| nearest(word, words.iter().copied())) {
                    fault = fault.help(format!("did you mean `{near}`?"));
                }
                Err(self.fault(fault))
            }
        }
    }

    /// `bytes(tape = |s| a, work = |s| b, budget = |r| c)`
    fn bytes(&mut self, field: Origin) -> Parse<BytesLine> {
        const SHAPES: [(&str, &str); 4] = [
            ("tape", "tape = |s| .."),
            ("work", "work = |s| .."),
            ("budget", "budget = |r| .."),
            ("input", "input = |s| .."),
        ];
        self.want_open('(')?;
        let mut values = [None; 4];
        while !self.is_close(')') {
            let Some(n) = self.ident().and_then(|word| SHAPES.iter().position(|(name, _)| *name == word)) else {
                return Err(self.expected("`tape`, `work`, `input` or `budget`"));
            };
            let origin = self.bump();
            self.want_punct("=")?;
            let value = self.closure_field(SHAPES[n].1, origin)?.map(|(lambda, _)| lambda);
            if std::mem::replace(&mut values[n], value).is_some() {
                let message = format!("`{}` of `bytes` is repeated", SHAPES[n].0);
                self.fault(Diagnostic::new(Code::Header, origin, message));
            }
            if !self.is_close(')') && !self.eat_punct(",") {
                return Err(self.expected("`,` or `)`"));
            }
        }
        let end = self.want_close(')')?;
        match values {
            [Some(tape), Some(work), Some(budget), input] => Ok(BytesLine { tape, work, input, budget, origin: field }),
            _ => {
                let message = "`bytes` takes the sizes of tapes and works, and a budget for them";
                let help = "write `bytes(tape = |s| .., work = |s| .., budget = |r| ..);`";
                Err(self.fault(Diagnostic::new(Code::Header, end, message).help(help)))
            }
        }
    }

    /// `expect bubble(1, 1, 1) <= P - 1 if M >= P;`
    fn expect(&mut self) -> Parse<()> {
        let start = self.bump();
        let at = self.here();
        let (measure, want) = match self.ident() {
            Some("bubble") => (MeasureKind::Bubble, 3),
            Some("idle") => (MeasureKind::Idle, 3),
            Some("peak") => (MeasureKind::Peak, 0),
            found => {
                let help = found.and_then(|word| nearest(word, ["bubble", "idle", "peak"].into_iter()));
                let mut fault =
                    Diagnostic::new(Code::Header, at, "`expect` measures `bubble(f, i, w)`, `idle(f, i, w)` or `peak`");
                fault.help = help.map(|near| format!("did you mean `{near}`?"));
                return Err(self.fault(fault));
            }
        };
        let word = self.ident().unwrap_or("");
        self.bump();
        let costs = if self.is_open('(') { self.arguments()? } else { Vec::new() };
        let what = if want == 0 { "nothing" } else { "the costs of F, I and W" };
        let fits = self.want_count(word, what, want, costs.len(), self.since(at));
        let compare = match self.peek() {
            TokenKind::Punct("<=") => Compare::AtMost,
            TokenKind::Punct("<") => Compare::Below,
            TokenKind::Punct("==") => Compare::Equal,
            TokenKind::Punct(">=") => Compare::AtLeast,
            TokenKind::Punct(">") => Compare::Above,
            _ => return Err(self.expected("a comparison")),
        };
        self.bump();
        let bound = self.expr()?;
        let condition = if self.eat_word("if") { Some(self.expr()?) } else { None };
        let origin = self.since(start);
        if fits {
            let costs = self.draft.list(&costs);
            self.draft.fields.expects.push(ExpectLine { measure, costs, compare, bound, condition, origin });
        }
        self.want_punct(";").map(drop)
    }

    /// `rank |r| { .. }`
    fn rank(&mut self, origin: Origin) -> Parse<()> {
        let at = self.here();
        let params = self.closure_params()?;
        let binding = match params[..] {
            [binding] => binding,
            _ => {
                let fault = Diagnostic::new(Code::WrongArguments, self.since(at), "`rank` has one variable, the rank")
                    .help("write `rank |r| { .. }`");
                self.fault(fault);
                self.draft.doubtful.extend(params.iter().map(|p| p.name));
                let name = self.draft.name("_");
                Binding { name, slot: UNRESOLVED, origin: at }
            }
        };
        let body = self.block()?;
        self.draft.rank = Some((binding, body, origin));
        Ok(())
    }

    fn missing(&mut self, seen: &[&'static str]) {
        let Some((_, origin)) = self.draft.name else { return };
        let missing: Vec<_> = REQUIRED.iter().filter(|(field, _)| !seen.contains(field)).collect();
        if missing.is_empty() {
            return;
        }
        let names: Vec<_> = missing.iter().map(|(field, _)| format!("`{field}`")).collect();
        let shapes: Vec<_> = missing.iter().map(|(_, shape)| format!("`{shape}`")).collect();
        let fault = Diagnostic::new(Code::Header, origin, format!("the schedule has no {}", names.join(", ")))
            .help(format!("add {}", shapes.join(" ")));
        self.fault(fault);
    }
}
