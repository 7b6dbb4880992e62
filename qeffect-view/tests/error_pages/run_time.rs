//! Makes each fault that only a running program has, and returns what is said of it.

use qeffect_core::arena::{ArenaError, Declared, Destination, GradArena, Places};
use qeffect_core::bind::{Gradients, RunFacts, bind};
use qeffect_core::check::{Options, check};
use qeffect_core::code::Code;
use qeffect_core::dtype::Dtype;
use qeffect_core::effects::{Access, CellEffect, StageEffects};
use qeffect_core::ids::{Microbatch, Rank, Stage};
use qeffect_core::lang;
use qeffect_core::ledger::{Ledger, LedgerError, Rolls, StageContract};
use qeffect_core::schedule::Update;
use qeffect_core::tape::TapeRef;
use qeffect_view::report::plain;

const STAGE: Stage = Stage(0);

/// Code and message, as a page shows it.
pub fn messages() -> Vec<(Code, String)> {
    let ledger = [stale_reference(), foreign_reference(), token(), not_quiescent(), no_slot(), incomplete()];
    let ledger = ledger.into_iter().map(|error| (error.code, format!("{error}\n")));
    let arena = arena().into_iter().map(|error| (error.code, format!("{error}\n")));
    ledger.chain(arena).chain(binds()).collect()
}

/// A rank with one stage and two microbatches, in its first step.
fn started(slots: u32) -> Ledger {
    let contract = StageContract { stage: STAGE, forward_rolls: 1, backward_rolls: 1 };
    let mut ledger = Ledger::new(Rank(0), &[contract], 2, slots);
    start(&mut ledger);
    ledger
}

fn start(ledger: &mut Ledger) {
    ledger.begin_step().unwrap();
    ledger.begin_refresh(STAGE).unwrap().finish();
}

fn forward(ledger: &mut Ledger, microbatch: u32, slot: u32) -> TapeRef {
    let (pending, token) = ledger.begin_forward(STAGE, Microbatch(microbatch), slot).unwrap();
    pending.finish(token.rolled()).unwrap()
}

fn stale_reference() -> LedgerError {
    let mut ledger = started(1);
    let tape = forward(&mut ledger, 0, 0);
    ledger.abort_step();
    start(&mut ledger);
    let _tape = forward(&mut ledger, 0, 0);
    ledger.begin_input_grad(STAGE, Microbatch(0), tape).unwrap_err()
}

fn foreign_reference() -> LedgerError {
    let mut ledger = started(2);
    let tape = forward(&mut ledger, 0, 0);
    let _tape = forward(&mut ledger, 1, 1);
    ledger.begin_input_grad(STAGE, Microbatch(1), tape).unwrap_err()
}

fn token() -> LedgerError {
    let mut ledger = started(1);
    let (pending, token) = ledger.begin_forward(STAGE, Microbatch(0), 0).unwrap();
    pending.finish(token.rolled().rolled()).unwrap_err()
}

fn not_quiescent() -> LedgerError {
    let mut ledger = started(1);
    let _tape = forward(&mut ledger, 0, 0);
    ledger.begin_evaluation(2).unwrap_err()
}

fn no_slot() -> LedgerError {
    let mut ledger = started(1);
    let _tape = forward(&mut ledger, 0, 0);
    ledger.begin_forward(STAGE, Microbatch(1), 0).unwrap_err()
}

fn incomplete() -> LedgerError {
    let mut ledger = started(1);
    let tape = forward(&mut ledger, 0, 0);
    let (pending, token) = ledger.begin_full_backward(STAGE, Microbatch(0), tape).unwrap();
    pending.finish(token.rolled()).unwrap();
    ledger.begin_agree(|_| Rolls { forward: 1, backward: 1 }).unwrap_err()
}

/// What an arena of two gradients says: one at the place of the other, one that has moved, and one whose write stopped.
fn arena() -> [ArenaError; 3] {
    let declared =
        |name: &str| Declared { name: name.into(), dtype: Dtype::F32, rows: 4, cols: 8, places: Places::PerMicrobatch };
    let at = |offset| Destination { device: 0, buffer: 3, offset, dtype: Dtype::F32, rows: 4, cols: 8 };
    let mut arena = GradArena::new(0, 1, [declared("blocks.0.qkv.weight"), declared("blocks.0.out.weight")]);
    arena.bind(0, 0, at(0)).unwrap();
    let shared = arena.bind(1, 0, at(64)).unwrap_err();
    arena.bind(1, 0, at(128)).unwrap();
    let write = arena.begin(1, 0).unwrap();
    let moved = arena.finish(write, &at(256)).unwrap_err();
    let write = arena.begin(0, 0).unwrap();
    arena.abort(write);
    [shared, moved, arena.complete(0).unwrap_err()]
}

const FACTS: RunFacts = RunFacts {
    update: Update::Microbatch,
    microbatches: 2,
    gradients: Gradients::Copied,
    allow_order_dependent: false,
};

/// What `bind` says of schedules that do not fit their run.
fn binds() -> Vec<(Code, String)> {
    let ascending = "for m in 0..M { F(r, m); } for m in 0..M { B(r, m); }";
    let forwards = "F(r, 1); F(r, 0); for m in 0..M { B(r, m); }";
    let weights = "for m in 0..M { F(r, m); I(r, m); } for m in (0..M).rev() { W(r, m); }";
    let scaled = StageEffects::SCALED;
    let undeclared = StageEffects { forward: CellEffect { access: Some(Access::Read), ..scaled.forward }, ..scaled };
    [
        (Code::OrderDependent, "", forwards, FACTS, vec![scaled]),
        (Code::RecipeTooStrict, "update: step;", ascending, FACTS, vec![scaled]),
        (Code::StageMismatch, "", ascending, FACTS, vec![scaled; 4]),
        (Code::BatchMismatch, "", ascending, RunFacts { microbatches: 8, ..FACTS }, vec![scaled]),
        (Code::GradientsUnsupported, "", weights, RunFacts { gradients: Gradients::Direct, ..FACTS }, vec![scaled]),
        (Code::EffectMismatch, "", ascending, FACTS, vec![undeclared]),
    ]
    .into_iter()
    .map(|(code, field, body, facts, stages)| {
        let header = format!("example<P, M>;\nranks: P; microbatches: M; stages: P; place: |s| s; {field}\n");
        let (program, map) = lang::read("example.sched", &format!("{header}rank |r| {{ {body} }}\n"));
        let schedule = lang::interpret(&program.unwrap(), &[1, 2]).unwrap();
        let report = bind(check(schedule, &Options::AT_START).unwrap(), facts, stages).unwrap_err();
        assert_eq!(report.codes(), [code]);
        (code, plain(&report, &map))
    })
    .collect()
}
