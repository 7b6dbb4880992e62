//! A program as the text of a Rust constant expression, for embedding.

use core::fmt::{self, Write};

use super::ast::*;
use super::embed::NIL;
use crate::action::Kind;

/// The program as a constant expression over the names of [`embed`](super::embed).
///
/// It compiles wherever those names are in scope, in a `static` or `const`, and its value equals
/// the program, places included.
pub fn constant(program: &Program) -> String {
    let mut out = String::new();
    write_program(&mut out, program).expect("writing to a string cannot fail");
    out
}

fn write_program(out: &mut String, p: &Program) -> fmt::Result {
    out.push_str("{\n");
    table(out, "DOCS", "Cow<'static, str>", &p.docs, |text| format!("s({text:?})"))?;
    table(out, "PARAMS", "Binding", &p.params, binding)?;
    table(out, "INSTANCES", "Instance", &p.instances, |i| format!("instance(&{:?}, {})", i.values, i.origin.0))?;
    table(out, "EXPECTS", "ExpectLine", &p.header.expects, expect)?;
    table(out, "NAMES", "Cow<'static, str>", &p.names, |text| format!("s({text:?})"))?;
    table(out, "EXPRS", "Expr", &p.exprs, expr)?;
    table(out, "STMTS", "Stmt", &p.stmts, stmt)?;
    table(out, "BLOCKS", "Block", &p.blocks, |b| {
        format!("block({}, {}, {}, {})", b.start, b.len, index(b.tail), b.origin.0)
    })?;
    table(out, "LAMBDAS", "Lambda", &p.lambdas, |l| {
        format!("lambda({}, {}, {}, {})", l.params, l.arity, l.body, l.origin.0)
    })?;
    table(out, "LISTS", "u32", &p.lists, u32::to_string)?;
    table(out, "BINDINGS", "Binding", &p.bindings, binding)?;
    writeln!(out, "Program {{")?;
    writeln!(out, "name: s({:?}), name_origin: Origin({}),", p.name, p.name_origin.0)?;
    writeln!(out, "docs: t(DOCS), params: t(PARAMS), instances: t(INSTANCES),")?;
    let (h, o) = (&p.header, &p.header.origins);
    writeln!(out, "header: Header {{")?;
    writeln!(out, "ranks: {}, microbatches: {}, stages: {}, place: {},", h.ranks, h.microbatches, h.stages, h.place)?;
    let [slots, tapes, works] = h.bounds.map(option);
    let transport = h.transport.map(|t| format!("Transport::{t:?}"));
    let update = h.update.map(|u| format!("Update::{u:?}"));
    writeln!(
        out,
        "bounds: [{slots}, {tapes}, {works}], transport: {}, update: {},",
        option(transport),
        option(update)
    )?;
    let bytes = h.bytes.map(|b| {
        let input = b.input.map_or("NIL".to_owned(), |lambda| lambda.to_string());
        format!("bytes({}, {}, {input}, {}, {})", b.tape, b.work, b.budget, b.origin.0)
    });
    writeln!(
        out,
        "bytes: {}, coalesce: {}, eval: {}, expects: t(EXPECTS),",
        option(bytes),
        option(h.coalesce),
        h.eval
    )?;
    let [a, b, c] = o.bounds.map(|origin| origin.0);
    writeln!(
        out,
        "origins: HeaderOrigins {{ name: Origin({}), place: Origin({}), microbatches: Origin({}), \
         bounds: [Origin({a}), Origin({b}), Origin({c})] }} }},",
        o.name.0, o.place.0, o.microbatches.0
    )?;
    writeln!(out, "lets: {}, rank: {}, body: {}, frame: {},", p.lets, binding(&p.rank), p.body, p.frame)?;
    writeln!(out, "names: t(NAMES), exprs: t(EXPRS), stmts: t(STMTS), blocks: t(BLOCKS), lambdas: t(LAMBDAS),")?;
    writeln!(out, "lists: t(LISTS), bindings: t(BINDINGS) }}")?;
    out.push_str("}\n");
    Ok(())
}

/// Ten entries a line keep both the file and its lines short.
fn table<T>(out: &mut String, name: &str, ty: &str, entries: &[T], entry: impl Fn(&T) -> String) -> fmt::Result {
    write!(out, "const {name}: &[{ty}] = &[")?;
    for line in entries.chunks(10) {
        let line: Vec<String> = line.iter().map(&entry).collect();
        write!(out, "\n{},", line.join(", "))?;
    }
    writeln!(out, "];")
}

fn option<T: fmt::Display>(value: Option<T>) -> String {
    value.map_or("None".to_owned(), |value| format!("Some({value})"))
}

fn index(value: Option<u32>) -> u32 {
    value.unwrap_or(NIL)
}

fn binding(b: &Binding) -> String {
    format!("binding({}, {}, {})", b.name, b.slot, b.origin.0)
}

fn expect(line: &ExpectLine) -> String {
    format!(
        "expect(MeasureKind::{:?}, ({}, {}), Compare::{:?}, {}, {}, {})",
        line.measure,
        line.costs.start,
        line.costs.len,
        line.compare,
        line.bound,
        index(line.condition),
        line.origin.0
    )
}

fn expr(expr: &Expr) -> String {
    let o = expr.origin.0;
    match expr.kind {
        ExprKind::Int(value) => format!("int({value}, {o})"),
        ExprKind::Bool(value) => format!("boolean({value}, {o})"),
        ExprKind::Var { name, slot } => format!("var({name}, {slot}, {o})"),
        ExprKind::Neg(a) => format!("neg({a}, {o})"),
        ExprKind::Not(a) => format!("not({a}, {o})"),
        ExprKind::Binary(op, a, b) => format!("bin({}, {a}, {b}, {o})", op as u8),
        ExprKind::Builtin(builtin, a, b) => format!("fun({}, {a}, {b}, {o})", builtin as u8),
        ExprKind::Abs(a) => format!("abs({a}, {o})"),
        ExprKind::Call { name, lambda, args } => format!("call({name}, {lambda}, {args}, {o})"),
        ExprKind::If(c, a, b) => format!("choose({c}, {a}, {b}, {o})"),
        ExprKind::Block(a) => format!("scope({a}, {o})"),
        ExprKind::Broken => unreachable!("a program that was handed out has no broken part"),
    }
}

fn stmt(stmt: &Stmt) -> String {
    let o = stmt.origin.0;
    match stmt.kind {
        StmtKind::Let { name, slot, mutable, value } => format!("let_({name}, {slot}, {mutable}, {value}, {o})"),
        StmtKind::Helper { name, lambda } => format!("helper({name}, {lambda}, {o})"),
        StmtKind::Assign { name, slot, op: None, value } => format!("set({name}, {slot}, {value}, {o})"),
        StmtKind::Assign { name, slot, op: Some(op), value } => {
            format!("change({name}, {slot}, {}, {value}, {o})", op as u8)
        }
        StmtKind::If { condition, then, otherwise } => format!("if_({condition}, {then}, {}, {o})", index(otherwise)),
        StmtKind::For { name, slot, range, inclusive, walk, body } => {
            format!("for_({name}, {slot}, {range}, {inclusive}, {}, {body}, {o})", walk as u8)
        }
        StmtKind::While { condition, body } => format!("while_({condition}, {body}, {o})"),
        StmtKind::Block(block) => format!("run({block}, {o})"),
        StmtKind::Action { kind, stage, microbatch } => {
            let name = match kind {
                Kind::Forward => "f",
                Kind::InputGrad => "i",
                Kind::FullBackward => "b",
                Kind::Recompute => "r",
                _ => "w",
            };
            format!("{name}({stage}, {microbatch}, {o})")
        }
        StmtKind::Group { stage, microbatches: List { start, len } } => format!("group({stage}, {start}, {len}, {o})"),
        StmtKind::Overlap { branches: List { start, len } } => format!("overlap({start}, {len}, {o})"),
        StmtKind::Refresh(stage) => format!("refresh({stage}, {o})"),
        StmtKind::Reduce(stage) => format!("reduce({stage}, {o})"),
        StmtKind::Commit => format!("commit({o})"),
    }
}
