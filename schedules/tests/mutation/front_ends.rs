//! The ways in which a schedule reaches the checker, and the ledger that meets it at run time.

use std::collections::BTreeSet;
use std::fmt::Write;

use proc_macro2::{TokenStream, TokenTree};
use qeffect_core::action::{Item, Kind};
use qeffect_core::check::{Options, check};
use qeffect_core::code::Code;
use qeffect_core::diag::Report;
use qeffect_core::ids::{Microbatch, Rank, Stage};
use qeffect_core::lang;
use qeffect_core::ledger::{Ledger, LedgerError, Rolls, StageContract, Verdict};
use qeffect_core::plan::Op;
use qeffect_core::schedule::{Schedule, Transport};
use qeffect_core::tape::{TapeRef, WorkRef};
use qeffect_core::text::{read_csv, write_csv};
use quote::quote;

/// A schedule as a program: every action written out.
pub fn printed(schedule: &Schedule) -> String {
    let mut text = format!(
        "pub mutant<P, M> for ({}, {});\nranks: P; microbatches: M; stages: {}; place: |s| ",
        schedule.ranks, schedule.microbatches, schedule.stages
    );
    for (stage, rank) in schedule.placement.iter().enumerate().skip(1) {
        let _ = write!(text, "if s == {stage} {{ {rank} }} else {{ ");
    }
    let _ = writeln!(text, "{}{};", schedule.placement[0], " }".repeat(schedule.placement.len() - 1));
    match schedule.transport {
        Transport::Edge => {}
        Transport::RankEdge => text.push_str("transport: rank_edge;\n"),
        Transport::Rendezvous => text.push_str("transport: rendezvous;\n"),
    }
    if schedule.eval {
        text.push_str("eval;\n");
    }
    text.push_str("rank |r| {\n");
    for rank in 0..schedule.ranks {
        let _ = write!(text, "    if r == {rank} {{\n       ");
        let mut inside = false;
        for item in schedule.rank(Rank(rank)) {
            match item.kind {
                Kind::OverlapBegin => text.push_str(" overlap {"),
                Kind::OverlapBranch => {
                    text.push_str(if std::mem::replace(&mut inside, true) { " } {" } else { " {" });
                }
                Kind::OverlapEnd => {
                    inside = false;
                    text.push_str(" } }");
                }
                _ => {
                    let _ = write!(text, " {item};");
                }
            }
        }
        text.push_str("\n    }\n");
    }
    text.push_str("}\n");
    text
}

/// The codes in the report of a checked schedule.
pub fn codes<T>(verdict: Result<T, Report>) -> BTreeSet<Code> {
    verdict.err().map(|report| report.codes().into_iter().collect()).unwrap_or_default()
}

/// The codes that a program read from text gets.
pub fn program(text: &str) -> BTreeSet<Code> {
    codes(lang::read("mutant.sched", text).0.and_then(|program| {
        let values = program.instances[0].values.to_vec();
        check(lang::interpret(&program, &values)?, &Options::COMPILE_TIME)
    }))
}

/// The codes in the errors of the expansion of `schedule!`.
pub fn expanded(text: &str) -> BTreeSet<Code> {
    let tokens: TokenStream = text.parse().expect("a program is made of Rust tokens");
    let output: Vec<TokenTree> = crate::expand::expand(quote!(qeffect #tokens)).into_iter().collect();
    let is_error = |tree: &TokenTree| matches!(tree, TokenTree::Ident(ident) if ident == "compile_error");
    let errors = (0..output.len()).filter(|n| is_error(&output[*n]));
    errors
        .map(|n| {
            let message = output[n + 2].to_string();
            let code = message.split('[').filter_map(|part| Code::parse(part.split(']').next()?)).next();
            code.unwrap_or_else(|| panic!("an error without a code: {message}"))
        })
        .collect()
}

/// The codes that the schedule gets as a CSV, if a CSV of it says the same sizes and placement.
pub fn csv(schedule: &Schedule) -> Option<BTreeSet<Code>> {
    let text = write_csv(schedule).ok()?;
    let read = read_csv("mutant", "mutant.csv", &text).0.ok()?;
    let header = |s: &Schedule| (s.ranks, s.stages, s.microbatches, s.placement.clone(), s.eval);
    (header(&read) == header(schedule)).then(|| codes(check(read, &Options::AT_START)))
}

/// The codes with which the ledger meets a fault that the checker calls `code`: what is lost shows at the end
/// of the step, and a forward that never ran where its tape is wanted, or at the end of an evaluation.
pub fn at_run_time(code: Code, eval: bool) -> Vec<Code> {
    match code {
        Code::TapeNeverConsumed | Code::WorkNeverConsumed => vec![Code::CommitWithWork],
        Code::ForwardMissing if !eval => vec![Code::TapeBeforeForward, Code::RecomputeMisplaced],
        other => vec![other],
    }
}

/// Drives every rank's program through a ledger of its own, with a slot for every microbatch of every stage.
/// The first refusal, if any.
pub fn ledger(schedule: &Schedule) -> Option<Code> {
    let mut refusals = (0..schedule.ranks).filter_map(|rank| Drive::new(schedule, Rank(rank)).run().err());
    let first = refusals.next()?;
    Some(first.code)
}

struct Drive<'a> {
    items: &'a [Item],
    stages: Vec<Stage>,
    microbatches: u32,
    eval: bool,
    ledger: Ledger,
    tapes: Vec<Option<TapeRef>>,
    works: Vec<Option<WorkRef>>,
    /// Whether the program writes refresh, reduce and commit.
    written: [bool; 3],
}

impl<'a> Drive<'a> {
    fn new(schedule: &'a Schedule, rank: Rank) -> Drive<'a> {
        let stages: Vec<Stage> = schedule.stages_of(rank).collect();
        let contracts: Vec<StageContract> =
            stages.iter().map(|stage| StageContract { stage: *stage, forward_rolls: 1, backward_rolls: 1 }).collect();
        let slots = schedule.stages * schedule.microbatches;
        let items = schedule.rank(rank);
        let writes = |kind: Kind| schedule.items.iter().any(|item| item.kind == kind);
        Drive {
            items,
            stages,
            microbatches: schedule.microbatches,
            eval: schedule.eval,
            ledger: Ledger::new(rank, &contracts, schedule.microbatches, slots),
            tapes: (0..slots).map(|_| None).collect(),
            works: (0..slots).map(|_| None).collect(),
            written: [writes(Kind::Refresh), writes(Kind::Reduce), writes(Kind::Commit)],
        }
    }

    fn run(mut self) -> Result<(), LedgerError> {
        if self.eval {
            return self.evaluate();
        }
        self.ledger.begin_step()?;
        let [refresh, _, commit] = self.written;
        if !refresh {
            for stage in self.stages.clone() {
                self.ledger.begin_refresh(stage)?.finish();
            }
        }
        for item in self.items {
            self.action(item)?;
        }
        if !commit {
            self.commit()?;
        }
        self.ledger.begin_step().map(drop)
    }

    fn evaluate(mut self) -> Result<(), LedgerError> {
        for stage in &self.stages {
            self.ledger.fill(*stage)?;
        }
        self.ledger.begin_evaluation(self.microbatches)?;
        for item in self.items {
            self.ledger.begin_evaluate(item.stage, item.microbatch)?.finish();
        }
        self.ledger.end_evaluation()
    }

    fn commit(&mut self) -> Result<(), LedgerError> {
        if !self.written[1] {
            // What is not complete is left open, for the ledger to say what is missing.
            let all = Some((self.microbatches, self.microbatches));
            let complete = |stage: &Stage| self.ledger.contributions(*stage) == all;
            if self.ledger.pool().live() == 0 && self.stages.iter().all(complete) {
                for stage in self.stages.clone() {
                    self.ledger.begin_reduce(stage)?.finish();
                }
            }
        }
        let rolls: Vec<(Stage, Option<Rolls>)> =
            self.stages.iter().map(|stage| (*stage, self.ledger.rolls(*stage))).collect();
        let counted = |stage: Stage| rolls.iter().find(|(s, _)| *s == stage).and_then(|(_, r)| *r).unwrap_or_default();
        self.ledger.begin_agree(counted)?.finish();
        self.ledger.begin_commit()?.finish();
        self.ledger.settle(Verdict::Good).map(|_| ())
    }

    fn action(&mut self, item: &Item) -> Result<(), LedgerError> {
        let (stage, microbatch) = (item.stage, item.microbatch);
        let slot = stage.0 * self.microbatches + microbatch.0;
        match item.kind {
            Kind::Forward => {
                let (pending, token) = self.ledger.begin_forward(stage, microbatch, slot)?;
                self.tapes[slot as usize] = Some(pending.finish(token.rolled())?);
            }
            Kind::InputGrad => {
                let tape = self.tape(Op::InputGrad, stage, microbatch, slot)?;
                let (pending, token) = self.ledger.begin_input_grad(stage, microbatch, tape)?;
                self.works[slot as usize] = Some(pending.finish(token.rolled())?);
            }
            Kind::FullBackward => {
                let tape = self.tape(Op::FullBackward, stage, microbatch, slot)?;
                let (pending, token) = self.ledger.begin_full_backward(stage, microbatch, tape)?;
                pending.finish(token.rolled())?;
            }
            Kind::WeightGrad => {
                let Some(work) = self.works[slot as usize].take() else {
                    return Err(self.ledger.nothing_held(Op::WeightGrad, stage, microbatch));
                };
                self.ledger.begin_weight_grad(stage, microbatch, work)?.finish()?;
            }
            Kind::Recompute => {
                let tape = self.tape(Op::Recompute, stage, microbatch, slot)?;
                self.ledger.begin_recompute(stage, microbatch, &tape)?.finish();
                self.tapes[slot as usize] = Some(tape);
            }
            Kind::Refresh => self.ledger.begin_refresh(stage)?.finish(),
            Kind::Reduce => self.ledger.begin_reduce(stage)?.finish(),
            Kind::Commit => self.commit()?,
            _ => {}
        }
        Ok(())
    }

    fn tape(&mut self, op: Op, stage: Stage, microbatch: Microbatch, slot: u32) -> Result<TapeRef, LedgerError> {
        self.tapes[slot as usize].take().ok_or_else(|| self.ledger.nothing_held(op, stage, microbatch))
    }
}
