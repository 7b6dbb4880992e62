//! Runs a program for given parameters: the one interpreter.
//!
//! The macro, text files and `build` at run time all unroll schedules here. Arithmetic is checked
//! `i64`; overflow, division by zero and a program that does not end are faults with a place and
//! the values that led there. It walks the flat tree with one frame of slots: no hashing, and no
//! allocation per statement.

mod header;
mod visible;

pub use visible::{annotate, environment};

use self::visible::{Visible, context_note, instance_text, varying};
use super::ast::*;
use crate::action::{Item, Kind};
use crate::code::Code;
use crate::diag::{Diagnostic, Report};
use crate::ids::{Microbatch, Stage};
use crate::origin::Origin;
use crate::schedule::Schedule;

/// Most ranks of a schedule.
pub const MAX_RANKS: u32 = 1 << 16;
/// Most stages of a schedule.
pub const MAX_STAGES: u32 = 1 << 20;
/// Most microbatches of a schedule.
pub const MAX_MICROBATCHES: u32 = 1 << 24;
/// Most items of a schedule, over all ranks.
pub const MAX_ITEMS: usize = 1 << 26;
/// A loop that goes wrong fills this many, not the memory: any schedule may be this long.
const SMALL_SCHEDULE: u64 = 1 << 16;
/// Most loop rounds and closure calls of one rank.
pub const MAX_STEPS: u64 = 1 << 24;
/// Most loop rounds and closure calls of all ranks.
const MAX_STEPS_TOTAL: u64 = 1 << 29;
/// Faults collected before giving up.
const MAX_FAULTS: usize = 64;

/// Unrolls a program for the given values of its parameters.
///
/// A fault of one rank does not hide those of the next; of all faults, those of the first failing
/// phase are reported.
pub fn interpret(program: &Program, params: &[i64]) -> Result<Schedule, Report> {
    if params.len() != program.params.len() {
        let message = format!(
            "`{}` has {}, found {}",
            program.name,
            super::parse::count(program.params.len(), "parameter"),
            super::parse::count(params.len(), "value")
        );
        return Err(Report::from_faults(vec![Diagnostic::new(Code::Instance, program.name_origin, message)]));
    }
    let mut m = Machine::new(program, params);
    let schedule = m.schedule();
    if m.faults.is_empty()
        && let Some(schedule) = schedule
    {
        return Ok(schedule);
    }
    let family = m.faults.iter().map(|f| f.code.family()).min();
    m.faults.retain(|f| Some(f.code.family()) == family);
    Err(Report::from_faults(m.faults))
}

/// Why a run ended before its end.
struct Stop {
    /// `None`: the item that was looked for is reached.
    fault: Option<Diagnostic>,
    /// Visible variables, innermost first.
    visible: Vec<Visible>,
}

type Run<T> = Result<T, Box<Stop>>;

struct Machine<'p> {
    p: &'p Program,
    params: &'p [i64],
    frame: Vec<i64>,
    items: Vec<Item>,
    /// Number of items at which the run stops.
    limit: usize,
    /// Rounds and calls left.
    steps: u64,
    steps_total: u64,
    faults: Vec<Diagnostic>,
    /// Faults that do not stop the run are not recorded.
    quiet: bool,
}

impl<'p> Machine<'p> {
    fn new(p: &'p Program, params: &'p [i64]) -> Self {
        let mut frame = vec![0; p.frame as usize];
        for (binding, value) in p.params.iter().zip(params) {
            frame[binding.slot as usize] = *value;
        }
        Machine {
            p,
            params,
            frame,
            items: Vec::new(),
            limit: MAX_ITEMS,
            steps: MAX_STEPS,
            steps_total: MAX_STEPS_TOTAL,
            faults: Vec::new(),
            quiet: false,
        }
    }

    /// Records a fault; one per place and code is enough.
    fn record(&mut self, fault: Diagnostic) {
        let known = self.faults.iter().any(|f| f.primary.origin == fault.primary.origin && f.code == fault.code);
        if !known && !self.quiet && self.faults.len() < MAX_FAULTS {
            self.faults.push(fault);
        }
    }

    fn stopped(&mut self, mut stop: Stop) {
        if let Some(mut fault) = stop.fault.take() {
            stop.visible.reverse();
            let here = varying(self.p, &stop.visible);
            fault.notes.extend(context_note(&instance_text(self.p, self.params), &here));
            self.record(fault);
        }
    }

    /// All ranks' items; `None` after a fault that concerns the whole.
    fn ranks(&mut self, ranks: u32) -> Option<Vec<u32>> {
        let mut starts = Vec::with_capacity(ranks as usize + 1);
        starts.push(0);
        for rank in 0..ranks {
            let endless = match self.rank(rank) {
                Ok(()) => false,
                Err(stop) => {
                    let endless = stop.fault.as_ref().is_some_and(|f| f.code == Code::LimitExceeded);
                    self.stopped(*stop);
                    endless
                }
            };
            if endless || self.faults.len() >= MAX_FAULTS {
                return None;
            }
            starts.push(self.items.len() as u32);
        }
        Some(starts)
    }

    fn rank(&mut self, rank: u32) -> Run<()> {
        let binding = self.p.rank;
        self.frame[binding.slot as usize] = i64::from(rank);
        let before = MAX_STEPS.min(self.steps_total);
        self.steps = before;
        let result = self.block(self.p.body);
        self.steps_total -= before - self.steps;
        result.map(drop).map_err(|mut stop| {
            self.see(&mut stop.visible, core::iter::once((binding.name, binding.slot, true)));
            stop
        })
    }

    /// Variables that a block has introduced so far, last one first.
    fn lets(stmts: &'p [Stmt]) -> impl Iterator<Item = (NameId, u32, bool)> + use<'p> {
        stmts.iter().rev().filter_map(|stmt| match stmt.kind {
            StmtKind::Let { name, slot, mutable, .. } => Some((name, slot, mutable)),
            _ => None,
        })
    }

    /// Adds variables with their values, unless an inner one of that name hides them.
    #[cold]
    fn see(&self, seen: &mut Vec<Visible>, variables: impl Iterator<Item = (NameId, u32, bool)>) {
        for (name, slot, varies) in variables {
            if self.p.text(name) != "_" && !seen.iter().any(|v| v.name == name) {
                seen.push(Visible { name, value: self.frame[slot as usize], varies });
            }
        }
    }

    /// Runs a block; its value, or 0 if it has none.
    fn block(&mut self, id: BlockId) -> Run<i64> {
        let p = self.p;
        let block = &p.blocks[id as usize];
        let stmts = &p.stmts[block.start as usize..(block.start + block.len) as usize];
        for (n, stmt) in stmts.iter().enumerate() {
            if let Err(mut stop) = self.stmt(stmt) {
                self.see(&mut stop.visible, Self::lets(&stmts[..n]));
                return Err(stop);
            }
        }
        let Some(tail) = block.tail else { return Ok(0) };
        self.value(tail).map_err(|mut stop| {
            self.see(&mut stop.visible, Self::lets(stmts));
            stop
        })
    }

    #[inline]
    fn emit(&mut self, kind: Kind, stage: i64, microbatch: i64, origin: Origin) -> Run<()> {
        if self.items.len() >= self.limit {
            return Err(self.full(origin));
        }
        let (Ok(s), Ok(m)) = (u32::try_from(stage), u32::try_from(microbatch)) else {
            return self.out_of_range(kind, stage, microbatch, origin);
        };
        self.items.push(Item { kind, stage: Stage(s), microbatch: Microbatch(m), origin });
        Ok(())
    }

    #[cold]
    fn full(&self, origin: Origin) -> Box<Stop> {
        if self.quiet {
            return Box::new(Stop { fault: None, visible: Vec::new() });
        }
        stop(Code::LimitExceeded, origin, format!("the schedule has more than {} actions", self.limit))
    }

    /// A stage or microbatch that no schedule can have: below 0, or no `u32`. What is merely too
    /// large for this schedule is the checker's to say.
    #[cold]
    fn out_of_range(&mut self, kind: Kind, stage: i64, microbatch: i64, origin: Origin) -> Run<()> {
        let name = match kind {
            Kind::Refresh => format!("refresh({stage})"),
            Kind::Reduce => format!("reduce({stage})"),
            kind => format!("{}({stage}, {microbatch})", kind.letter().unwrap_or('?')),
        };
        let (what, value, field, id) = match u32::try_from(stage) {
            Err(_) => ("stage", stage, "stages", self.p.header.stages),
            Ok(_) => ("microbatch", microbatch, "microbatches", self.p.header.microbatches),
        };
        let end = self.value(id).unwrap_or(0);
        let message = format!("{name} names {what} {value}, which does not exist");
        let fault = Diagnostic::new(Code::OutOfRange, origin, message)
            .note(format!("`{field}:` is {end}: a {what} is one of 0..{end}"));
        Err(Box::new(Stop { fault: Some(fault), visible: Vec::new() }))
    }

    fn stmt(&mut self, stmt: &'p Stmt) -> Run<()> {
        match stmt.kind {
            StmtKind::Action { kind, stage, microbatch } => {
                let (stage, microbatch) = (self.value(stage)?, self.value(microbatch)?);
                self.emit(kind, stage, microbatch, stmt.origin)
            }
            StmtKind::Let { slot, value, .. } => {
                self.frame[slot as usize] = self.value(value)?;
                Ok(())
            }
            StmtKind::Assign { slot, op, value, .. } => {
                let value = self.value(value)?;
                let old = self.frame[slot as usize];
                self.frame[slot as usize] = match op {
                    None => value,
                    Some(op) => compute(op, old, value).ok_or_else(|| arithmetic(op, old, value, stmt.origin))?,
                };
                Ok(())
            }
            StmtKind::If { condition, then, otherwise } => {
                if self.value(condition)? != 0 {
                    self.block(then)?;
                } else if let Some(otherwise) = otherwise {
                    self.block(otherwise)?;
                }
                Ok(())
            }
            StmtKind::For { name, slot, range, inclusive, walk, body } => {
                let p = self.p;
                let (start, end) = (self.value(p.lists[range as usize])?, self.value(p.lists[range as usize + 1])?);
                let step = if walk.has_step() { self.step(p.lists[range as usize + 2])? } else { 1 };
                let Some((mut at, last, delta)) = rounds(start, end, inclusive, walk, step) else { return Ok(()) };
                loop {
                    self.frame[slot as usize] = at;
                    if let Err(mut stop) = self.tick(stmt.origin).and_then(|()| self.block(body)) {
                        self.see(&mut stop.visible, core::iter::once((name, slot, true)));
                        return Err(stop);
                    }
                    if at == last {
                        return Ok(());
                    }
                    at = at.wrapping_add(delta);
                }
            }
            StmtKind::While { condition, body } => {
                while self.value(condition)? != 0 {
                    self.tick(stmt.origin)?;
                    self.block(body)?;
                }
                Ok(())
            }
            StmtKind::Block(block) => self.block(block).map(drop),
            StmtKind::Helper { .. } => Ok(()),
            StmtKind::Group { stage, microbatches } => {
                let p = self.p;
                let stage = self.value(stage)?;
                for (n, id) in p.list(microbatches).iter().enumerate() {
                    let microbatch = self.value(*id)?;
                    match n {
                        0 => self.emit(Kind::WeightGrad, stage, microbatch, stmt.origin)?,
                        _ => self.emit(Kind::WeightGradJoin, stage, microbatch, p.exprs[*id as usize].origin)?,
                    }
                }
                Ok(())
            }
            StmtKind::Overlap { branches } => {
                let p = self.p;
                self.emit(Kind::OverlapBegin, 0, 0, stmt.origin)?;
                for branch in p.list(branches) {
                    self.emit(Kind::OverlapBranch, 0, 0, p.blocks[*branch as usize].origin)?;
                    self.block(*branch)?;
                }
                self.emit(Kind::OverlapEnd, 0, 0, stmt.origin)
            }
            StmtKind::Refresh(stage) => {
                let stage = self.value(stage)?;
                self.emit(Kind::Refresh, stage, 0, stmt.origin)
            }
            StmtKind::Reduce(stage) => {
                let stage = self.value(stage)?;
                self.emit(Kind::Reduce, stage, 0, stmt.origin)
            }
            StmtKind::Commit => self.emit(Kind::Commit, 0, 0, stmt.origin),
        }
    }

    #[inline]
    fn tick(&mut self, origin: Origin) -> Run<()> {
        if self.steps == 0 {
            return Err(endless(origin));
        }
        self.steps -= 1;
        Ok(())
    }

    fn step(&mut self, id: ExprId) -> Run<i64> {
        let step = self.value(id)?;
        if step > 0 {
            return Ok(step);
        }
        let origin = self.p.exprs[id as usize].origin;
        Err(stop(Code::Arithmetic, origin, format!("a range cannot be walked in steps of {step}")))
    }

    /// The value of an expression; names and literals without a call.
    #[inline(always)]
    fn value(&mut self, id: ExprId) -> Run<i64> {
        match self.p.exprs[id as usize].kind {
            ExprKind::Var { slot, .. } => Ok(self.frame[slot as usize]),
            ExprKind::Int(value) => Ok(value),
            _ => self.eval(id),
        }
    }

    fn eval(&mut self, id: ExprId) -> Run<i64> {
        let Expr { kind, origin } = self.p.exprs[id as usize];
        match kind {
            ExprKind::Binary(BinaryOp::And, a, b) => Ok(i64::from(self.value(a)? != 0 && self.value(b)? != 0)),
            ExprKind::Binary(BinaryOp::Or, a, b) => Ok(i64::from(self.value(a)? != 0 || self.value(b)? != 0)),
            ExprKind::Binary(op, a, b) => {
                let (a, b) = (self.value(a)?, self.value(b)?);
                compute(op, a, b).ok_or_else(|| arithmetic(op, a, b, origin))
            }
            ExprKind::Builtin(builtin, a, b) => {
                let (a, b) = (self.value(a)?, self.value(b)?);
                let value = match builtin {
                    Builtin::Min => Some(a.min(b)),
                    Builtin::Max => Some(a.max(b)),
                    Builtin::RemEuclid => a.checked_rem_euclid(b),
                    Builtin::DivEuclid => a.checked_div_euclid(b),
                };
                value.ok_or_else(|| euclid(builtin, a, b, origin))
            }
            ExprKind::Abs(a) => {
                let a = self.value(a)?;
                a.checked_abs().ok_or_else(|| stop(Code::Arithmetic, origin, format!("abs({a}) overflows an `i64`")))
            }
            ExprKind::Neg(a) => {
                let a = self.value(a)?;
                a.checked_neg().ok_or_else(|| stop(Code::Arithmetic, origin, format!("-({a}) overflows an `i64`")))
            }
            ExprKind::Not(a) => Ok(i64::from(self.value(a)? == 0)),
            ExprKind::Call { lambda, args, .. } => self.call(lambda, args, origin),
            ExprKind::If(condition, then, otherwise) => {
                let block = if self.value(condition)? != 0 { then } else { otherwise };
                self.block(block)
            }
            ExprKind::Block(block) => self.block(block),
            ExprKind::Int(value) => Ok(value),
            ExprKind::Bool(value) => Ok(i64::from(value)),
            ExprKind::Var { slot, .. } => Ok(self.frame[slot as usize]),
            ExprKind::Broken => Err(stop(Code::Syntax, origin, "this could not be read".to_owned())),
        }
    }

    fn call(&mut self, lambda: u32, args: u32, origin: Origin) -> Run<i64> {
        let p = self.p;
        self.tick(origin)?;
        let bindings = p.parameters(lambda);
        // All arguments are known before the first parameter is set: one may call the same closure.
        let mut values = [0; 8];
        let mut more = Vec::new();
        for n in 0..bindings.len() {
            let value = self.value(p.lists[args as usize + n])?;
            match values.get_mut(n) {
                Some(place) => *place = value,
                None => more.push(value),
            }
        }
        for (binding, value) in bindings.iter().zip(values.iter().chain(&more)) {
            self.frame[binding.slot as usize] = *value;
        }
        self.value(p.lambdas[lambda as usize].body).map_err(|mut stop| {
            self.see(&mut stop.visible, bindings.iter().map(|b| (b.name, b.slot, true)));
            stop
        })
    }
}

/// `None`: overflow, or division by zero.
#[inline(always)]
fn compute(op: BinaryOp, a: i64, b: i64) -> Option<i64> {
    match op {
        BinaryOp::Add => a.checked_add(b),
        BinaryOp::Sub => a.checked_sub(b),
        BinaryOp::Mul => a.checked_mul(b),
        BinaryOp::Div => a.checked_div(b),
        BinaryOp::Rem => a.checked_rem(b),
        BinaryOp::Eq => Some(i64::from(a == b)),
        BinaryOp::Ne => Some(i64::from(a != b)),
        BinaryOp::Lt => Some(i64::from(a < b)),
        BinaryOp::Le => Some(i64::from(a <= b)),
        BinaryOp::Gt => Some(i64::from(a > b)),
        BinaryOp::Ge => Some(i64::from(a >= b)),
        BinaryOp::And => Some(i64::from(a != 0 && b != 0)),
        BinaryOp::Or => Some(i64::from(a != 0 || b != 0)),
    }
}

/// First and last value of a loop and their distance; `None`: no round at all.
fn rounds(start: i64, end: i64, inclusive: bool, walk: Walk, step: i64) -> Option<(i64, i64, i64)> {
    let highest = if inclusive { end } else { end.checked_sub(1)? };
    if highest < start {
        return None;
    }
    // Fits: it never leaves start..=highest.
    let reach = (highest.wrapping_sub(start) as u64 / step as u64).wrapping_mul(step as u64) as i64;
    Some(match walk {
        Walk::Up => (start, highest, 1),
        Walk::Down => (highest, start, -1),
        Walk::UpBy => (start, start.wrapping_add(reach), step),
        Walk::DownBy => (highest, highest.wrapping_sub(reach), -step),
        Walk::UpByReversed => (start.wrapping_add(reach), start, -step),
    })
}

#[cold]
fn stop(code: Code, origin: Origin, message: String) -> Box<Stop> {
    Box::new(Stop { fault: Some(Diagnostic::new(code, origin, message)), visible: Vec::new() })
}

#[cold]
fn endless(origin: Origin) -> Box<Stop> {
    let mut stop =
        stop(Code::LimitExceeded, origin, format!("the schedule does not end within {MAX_STEPS} loop rounds"));
    if let Some(fault) = &mut stop.fault {
        fault.help = Some("a `while` ends when its condition is false: what makes it false here?".to_owned());
    }
    stop
}

#[cold]
fn arithmetic(op: BinaryOp, a: i64, b: i64, origin: Origin) -> Box<Stop> {
    let zero = b == 0 && matches!(op, BinaryOp::Div | BinaryOp::Rem);
    let what = if zero { "divides by zero" } else { "overflows an `i64`" };
    stop(Code::Arithmetic, origin, format!("{a} {} {b} {what}", op.text()))
}

#[cold]
fn euclid(builtin: Builtin, a: i64, b: i64, origin: Origin) -> Box<Stop> {
    let what = if b == 0 { "divides by zero" } else { "overflows an `i64`" };
    stop(Code::Arithmetic, origin, format!("{}({a}, {b}) {what}", builtin.text()))
}
