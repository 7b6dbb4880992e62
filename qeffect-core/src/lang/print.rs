//! The text of a program: canonical, and read back to the same program.

use core::fmt::{self, Write};

use super::ast::*;
use crate::schedule::{Compare, Transport, Update};

/// The canonical text of a program.
pub fn print(program: &Program) -> String {
    let helpers = program.stmts.iter().filter_map(|stmt| match stmt.kind {
        StmtKind::Helper { name, .. } => Some(program.text(name)),
        _ => None,
    });
    let mut printer = Printer { p: program, out: String::new(), indent: 0, helpers: helpers.collect() };
    printer.program().expect("writing to a string cannot fail");
    printer.out
}

struct Printer<'p> {
    p: &'p Program,
    out: String,
    indent: usize,
    /// Names of helper closures: one of them may hide a function of the language.
    helpers: Vec<&'p str>,
}

impl Write for Printer<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.out.push_str(text);
        Ok(())
    }
}

impl Printer<'_> {
    fn line(&mut self) -> fmt::Result {
        self.out.push('\n');
        let width = 4 * self.indent;
        write!(self, "{:width$}", "")
    }

    fn program(&mut self) -> fmt::Result {
        let p = self.p;
        for line in p.docs.iter() {
            match line.is_empty() {
                true => writeln!(self, "///")?,
                false => writeln!(self, "/// {line}")?,
            }
        }
        self.write_str(&p.name)?;
        if !p.params.is_empty() {
            let names: Vec<_> = p.params.iter().map(|b| p.text(b.name)).collect();
            write!(self, "<{}>", names.join(", "))?;
        }
        for (n, instance) in p.instances.iter().enumerate() {
            self.write_str(if n == 0 { " for " } else { ", " })?;
            let values: Vec<_> = instance.values.iter().map(i64::to_string).collect();
            write!(self, "({})", values.join(", "))?;
        }
        self.write_str(";\n")?;
        for stmt in p.statements(p.lets) {
            self.line()?;
            self.stmt(stmt)?;
        }
        if p.blocks[p.lets as usize].len > 0 {
            self.out.push('\n');
        }
        self.header()?;
        self.out.push('\n');
        write!(self, "\nrank |{}| ", p.text(p.rank.name))?;
        self.block(p.body)?;
        self.out.push('\n');
        Ok(())
    }

    fn field(&mut self, name: &str, value: ExprId) -> fmt::Result {
        write!(self, "\n{name}: ")?;
        self.expr(value, 0)?;
        self.write_str(";")
    }

    fn header(&mut self) -> fmt::Result {
        let h = &self.p.header;
        self.field("ranks", h.ranks)?;
        self.field("microbatches", h.microbatches)?;
        self.field("stages", h.stages)?;
        for (name, lambda) in
            ["place", "slots", "tapes", "works"].into_iter().zip([Some(h.place), h.bounds[0], h.bounds[1], h.bounds[2]])
        {
            if let Some(lambda) = lambda {
                write!(self, "\n{name}: ")?;
                self.lambda(lambda)?;
                self.write_str(";")?;
            }
        }
        if let Some(transport) = h.transport {
            let word = match transport {
                Transport::Edge => "edge",
                Transport::RankEdge => "rank_edge",
                Transport::Rendezvous => "rendezvous",
            };
            write!(self, "\ntransport: {word};")?;
        }
        if let Some(update) = h.update {
            let word = match update {
                Update::Microbatch => "microbatch",
                Update::Step => "step",
                Update::None => "none",
            };
            write!(self, "\nupdate: {word};")?;
        }
        if let Some(bytes) = h.bytes {
            self.write_str("\nbytes(tape = ")?;
            self.lambda(bytes.tape)?;
            self.write_str(", work = ")?;
            self.lambda(bytes.work)?;
            if let Some(input) = bytes.input {
                self.write_str(", input = ")?;
                self.lambda(input)?;
            }
            self.write_str(", budget = ")?;
            self.lambda(bytes.budget)?;
            self.write_str(");")?;
        }
        if let Some(coalesce) = h.coalesce {
            self.field("coalesce", coalesce)?;
        }
        if h.eval {
            self.write_str("\neval;")?;
        }
        for line in h.expects.iter() {
            self.expect(line)?;
        }
        Ok(())
    }

    fn expect(&mut self, line: &ExpectLine) -> fmt::Result {
        let measure = match line.measure {
            MeasureKind::Bubble => "bubble",
            MeasureKind::Idle => "idle",
            MeasureKind::Peak => "peak",
        };
        write!(self, "\nexpect {measure}")?;
        if line.measure != MeasureKind::Peak {
            self.arguments(self.p.list(line.costs))?;
        }
        let compare = match line.compare {
            Compare::AtMost => "<=",
            Compare::Below => "<",
            Compare::Equal => "==",
            Compare::AtLeast => ">=",
            Compare::Above => ">",
        };
        write!(self, " {compare} ")?;
        self.expr(line.bound, 0)?;
        if let Some(condition) = line.condition {
            self.write_str(" if ")?;
            self.expr(condition, 0)?;
        }
        self.write_str(";")
    }

    fn lambda(&mut self, lambda: u32) -> fmt::Result {
        let names: Vec<_> = self.p.parameters(lambda).iter().map(|b| self.p.text(b.name)).collect();
        write!(self, "|{}| ", names.join(", "))?;
        self.expr(self.p.lambdas[lambda as usize].body, 0)
    }

    fn block(&mut self, id: BlockId) -> fmt::Result {
        let tail = self.p.blocks[id as usize].tail;
        let stmts = self.p.statements(id);
        if stmts.is_empty() && tail.is_none() {
            return self.write_str("{}");
        }
        self.write_str("{")?;
        self.indent += 1;
        for stmt in stmts {
            self.line()?;
            self.stmt(stmt)?;
        }
        if let Some(tail) = tail {
            self.line()?;
            self.expr(tail, 0)?;
        }
        self.indent -= 1;
        self.line()?;
        self.write_str("}")
    }

    fn stmt(&mut self, stmt: &Stmt) -> fmt::Result {
        let p = self.p;
        match stmt.kind {
            StmtKind::Let { name, mutable, value, .. } => {
                write!(self, "let {}{} = ", if mutable { "mut " } else { "" }, p.text(name))?;
                self.expr(value, 0)?;
                self.write_str(";")
            }
            StmtKind::Helper { name, lambda } => {
                write!(self, "let {} = ", p.text(name))?;
                self.lambda(lambda)?;
                self.write_str(";")
            }
            StmtKind::Assign { name, op, value, .. } => {
                write!(self, "{} {}= ", p.text(name), op.map_or("", BinaryOp::text))?;
                self.expr(value, 0)?;
                self.write_str(";")
            }
            StmtKind::If { condition, then, otherwise } => {
                self.write_str("if ")?;
                self.expr(condition, 0)?;
                self.write_str(" ")?;
                self.block(then)?;
                let Some(otherwise) = otherwise else { return Ok(()) };
                self.write_str(" else ")?;
                match (p.statements(otherwise), p.blocks[otherwise as usize].tail) {
                    ([inner @ Stmt { kind: StmtKind::If { .. }, .. }], None) => self.stmt(inner),
                    _ => self.block(otherwise),
                }
            }
            StmtKind::For { name, range, inclusive, walk, body, .. } => {
                write!(self, "for {} in ", p.text(name))?;
                self.range(range, inclusive, walk)?;
                self.write_str(" ")?;
                self.block(body)
            }
            StmtKind::While { condition, body } => {
                self.write_str("while ")?;
                self.expr(condition, 0)?;
                self.write_str(" ")?;
                self.block(body)
            }
            StmtKind::Block(block) => self.block(block),
            StmtKind::Action { kind, stage, microbatch } => {
                self.write_char(kind.letter().unwrap_or('?'))?;
                self.arguments(&[stage, microbatch])?;
                self.write_str(";")
            }
            StmtKind::Group { stage, microbatches } => {
                self.write_str("W(")?;
                self.expr(stage, 0)?;
                self.write_str(", [")?;
                self.commas(p.list(microbatches))?;
                self.write_str("]);")
            }
            StmtKind::Overlap { branches } => {
                self.write_str("overlap {")?;
                self.indent += 1;
                for branch in p.list(branches) {
                    self.line()?;
                    self.block(*branch)?;
                }
                self.indent -= 1;
                self.line()?;
                self.write_str("}")
            }
            StmtKind::Refresh(stage) | StmtKind::Reduce(stage) => {
                self.write_str(if matches!(stmt.kind, StmtKind::Refresh(_)) { "refresh" } else { "reduce" })?;
                self.arguments(&[stage])?;
                self.write_str(";")
            }
            StmtKind::Commit => self.write_str("commit;"),
        }
    }

    fn range(&mut self, range: u32, inclusive: bool, walk: Walk) -> fmt::Result {
        let list = &self.p.lists[range as usize..];
        let dots = if inclusive { "..=" } else { ".." };
        if walk != Walk::Up {
            self.write_str("(")?;
        }
        self.expr(list[0], 0)?;
        self.write_str(dots)?;
        self.expr(list[1], 0)?;
        if walk != Walk::Up {
            self.write_str(")")?;
        }
        for method in match walk {
            Walk::Up => &[][..],
            Walk::Down => &["rev"],
            Walk::UpBy => &["step_by"],
            Walk::DownBy => &["rev", "step_by"],
            Walk::UpByReversed => &["step_by", "rev"],
        } {
            match *method {
                "rev" => self.write_str(".rev()")?,
                _ => {
                    self.write_str(".step_by")?;
                    self.arguments(&list[2..3])?;
                }
            }
        }
        Ok(())
    }

    fn arguments(&mut self, args: &[ExprId]) -> fmt::Result {
        self.write_str("(")?;
        self.commas(args)?;
        self.write_str(")")
    }

    fn commas(&mut self, args: &[ExprId]) -> fmt::Result {
        for (n, arg) in args.iter().enumerate() {
            if n > 0 {
                self.write_str(", ")?;
            }
            self.expr(*arg, 0)?;
        }
        Ok(())
    }

    /// An expression as operand of something that binds with `floor`; 0 where none is needed.
    fn expr(&mut self, id: ExprId, floor: u8) -> fmt::Result {
        const UNARY: u8 = 6;
        let p = self.p;
        let kind = p.exprs[id as usize].kind;
        let binds = match kind {
            ExprKind::Binary(op, ..) => op.precedence(),
            ExprKind::Neg(_) | ExprKind::Not(_) => UNARY,
            ExprKind::If(..) | ExprKind::Block(_) => 1,
            _ => UNARY + 1,
        };
        if binds < floor {
            self.write_str("(")?;
            self.expr(id, 0)?;
            return self.write_str(")");
        }
        match kind {
            ExprKind::Int(value) => write!(self, "{value}"),
            ExprKind::Bool(value) => write!(self, "{value}"),
            ExprKind::Var { name, .. } => self.write_str(p.text(name)),
            ExprKind::Neg(a) => {
                self.write_str("-")?;
                self.expr(a, UNARY)
            }
            ExprKind::Not(a) => {
                self.write_str("!")?;
                self.expr(a, UNARY)
            }
            ExprKind::Binary(op, a, b) => {
                // Comparisons do not chain, everything else groups to the left.
                let left = if op.compares() { binds + 1 } else { binds };
                // An `if` or block as the first operand would end a statement.
                let left = left.max(2);
                self.expr(a, if matches!(op, BinaryOp::Or) && !self.is_block(a) { binds } else { left })?;
                write!(self, " {} ", op.text())?;
                self.expr(b, binds + 1)
            }
            ExprKind::Builtin(builtin @ (Builtin::Min | Builtin::Max), a, b)
                if !self.helpers.contains(&builtin.text()) =>
            {
                self.write_str(builtin.text())?;
                self.arguments(&[a, b])
            }
            ExprKind::Builtin(builtin, a, b) => {
                self.expr(a, UNARY + 1)?;
                write!(self, ".{}", builtin.text())?;
                self.arguments(&[b])
            }
            ExprKind::Abs(a) if !self.helpers.contains(&"abs") => {
                self.write_str("abs")?;
                self.arguments(&[a])
            }
            ExprKind::Abs(a) => {
                self.expr(a, UNARY + 1)?;
                self.write_str(".abs()")
            }
            ExprKind::Call { name, lambda, args } => {
                self.write_str(p.text(name))?;
                let arity = p.lambdas[lambda as usize].arity;
                self.arguments(p.list(List { start: args, len: arity }))
            }
            ExprKind::If(condition, then, otherwise) => {
                self.write_str("if ")?;
                self.expr(condition, 0)?;
                self.write_str(" ")?;
                self.block(then)?;
                self.write_str(" else ")?;
                let block = &p.blocks[otherwise as usize];
                match block.tail {
                    Some(tail) if block.len == 0 && matches!(p.exprs[tail as usize].kind, ExprKind::If(..)) => {
                        self.expr(tail, 0)
                    }
                    _ => self.block(otherwise),
                }
            }
            ExprKind::Block(block) => self.block(block),
            ExprKind::Broken => self.write_str("_"),
        }
    }

    fn is_block(&self, id: ExprId) -> bool {
        matches!(self.p.exprs[id as usize].kind, ExprKind::If(..) | ExprKind::Block(_))
    }
}
