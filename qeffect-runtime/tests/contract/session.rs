//! Sessions when something goes wrong: a failure anywhere puts everything back, a value that is not finite changes
//! nothing, and nobody waits for a rank that is gone.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use crate::common::batch;
use crate::common::settings::{adamw, small};
use qeffect_core::code::Code;
use qeffect_core::ids::Rank;
use qeffect_core::token::{Bwd, Fwd, Token};
use qeffect_runtime::act::Act;
use qeffect_runtime::capture::CaptureMode;
use qeffect_runtime::cx::Cx;
use qeffect_runtime::data::Windows;
use qeffect_runtime::error::{Error, Result};
use qeffect_runtime::gpt::{GptConfig, GptStage, GptTape, GptWork};
use qeffect_runtime::op::Effects;
use qeffect_runtime::optim::OptimConfig;
use qeffect_runtime::session::{Session, SessionConfig, Snapshot};
use qeffect_runtime::stage::{Stage, StageSpec};
use qeffect_schedules::{eval_v, one_f_one_b, zb_v};

const OPTIM: OptimConfig = adamw(40, 2, 4e-3, 1e-3);

fn model() -> GptConfig {
    small("fp8-delayed:history=4")
}

const fn session_config(config: &GptConfig) -> SessionConfig {
    SessionConfig::new(OPTIM, config.tokens())
}

/// What happens when the countdown reaches zero.
#[derive(Clone, Copy, PartialEq)]
enum Fault {
    Error,
    Panic,
}

/// A stage of the model whose actions count down to a fault.
struct Faulty {
    stage: GptStage,
    left: Arc<AtomicI64>,
    fault: Fault,
}

impl Faulty {
    fn count(&self) -> Result<()> {
        if self.left.fetch_sub(1, Ordering::SeqCst) != 1 {
            return Ok(());
        }
        assert!(self.fault == Fault::Error, "injected");
        Err(Error::Config("injected".into()))
    }
}

impl Stage for Faulty {
    type Tape = GptTape;
    type Work = GptWork;

    fn spec(&self) -> &StageSpec {
        self.stage.spec()
    }
    fn effects(&self) -> Effects {
        self.stage.effects()
    }
    fn forward(&self, cx: &mut Cx<'_>, x: &[Act], t: Token<Fwd>) -> Result<(Vec<Act>, GptTape, Token<Fwd>)> {
        let result = self.stage.forward(cx, x, t)?; // it has rolled and leased when it fails
        self.count()?;
        Ok(result)
    }
    fn input_grad(
        &self,
        cx: &mut Cx<'_>,
        dy: &[Act],
        tape: GptTape,
        token: Token<Bwd>,
    ) -> Result<(Vec<Act>, GptWork, Token<Bwd>)> {
        let result = self.stage.input_grad(cx, dy, tape, token)?;
        self.count()?;
        Ok(result)
    }
    fn weight_grad(&self, cx: &mut Cx<'_>, work: GptWork) -> Result<()> {
        self.stage.weight_grad(cx, work)?;
        self.count()
    }
    fn evaluate(&self, cx: &mut Cx<'_>, x: &[Act]) -> Result<Vec<Act>> {
        let result = self.stage.evaluate(cx, x)?;
        self.count()?;
        Ok(result)
    }
}

fn faulty(fault: Fault) -> (Session<Faulty>, Arc<AtomicI64>) {
    let (config, left) = (model(), Arc::new(AtomicI64::new(0)));
    let stages = config.stages(&[1, 1, 1, 1]).unwrap().into_iter();
    let stages = stages.map(|stage| Faulty { stage, left: left.clone(), fault }).collect();
    // In a replay no code of a stage runs.
    let session_config = SessionConfig { capture: CaptureMode::Eager, ..session_config(&config) };
    (Session::new(zb_v::<2, 4>().clone(), stages, session_config).unwrap(), left)
}

/// All that must not move when a step fails. The gradients of a failed step are nobody's.
fn state(snapshot: Snapshot) -> (BTreeMap<String, Vec<u8>>, Vec<String>) {
    let values = snapshot.values.into_iter().filter(|(name, _)| !name.ends_with("/gradient"));
    (
        values.map(|(name, value)| (name, value.bytes)).collect(),
        snapshot.versions.iter().map(|v| format!("{v:?}")).collect(),
    )
}

#[test]
fn a_failure_of_any_action_puts_every_rank_back() {
    let config = model();
    let data = |step| batch(&config, step, 4);
    let (mut whole, _) = faulty(Fault::Error);
    let (mut session, left) = faulty(Fault::Error);
    for step in 0..2 {
        whole.step(data(step)).unwrap();
        session.step(data(step)).unwrap();
    }
    let before = state(session.snapshot().unwrap());
    let actions = 2 * 2 * 4 * 3; // ranks, stages, microbatches, F I W
    for at in 1..=actions {
        left.store(at, Ordering::SeqCst);
        let error = session.step(data(2)).unwrap_err();
        assert!(matches!(&error, Error::Rank { source, .. } if matches!(**source, Error::Action { .. })), "{error}");
        assert!(error.to_string().ends_with(": injected"), "the cause, not its echo: {error}");
        assert_eq!(state(session.snapshot().unwrap()), before, "failed at action {at}: {error}");
    }
    left.store(0, Ordering::SeqCst);
    for step in 2..4 {
        let (found, wanted) = (session.step(data(step)).unwrap(), whole.step(data(step)).unwrap());
        assert_eq!((found.losses, found.grad_norm, found.epoch), (wanted.losses, wanted.grad_norm, wanted.epoch));
        assert_eq!(found.step, step + actions as u64, "attempts are counted");
    }
    assert_eq!(session.snapshot().unwrap(), whole.snapshot().unwrap());
}

#[test]
fn a_failed_evaluation_moves_nothing_either() {
    let config = model();
    let (mut session, left) = faulty(Fault::Error);
    let evaluation = session.evaluation(eval_v::<2, 4>().clone()).unwrap();
    session.step(batch(&config, 0, 4)).unwrap();
    let before = session.snapshot().unwrap();
    let losses = session.evaluate(&evaluation, batch(&config, 9, 4)).unwrap();
    for at in 1..=16 {
        left.store(at, Ordering::SeqCst);
        session.evaluate(&evaluation, batch(&config, 9, 4)).unwrap_err();
        assert_eq!(session.snapshot().unwrap(), before, "failed at action {at}");
    }
    assert_eq!(session.evaluate(&evaluation, batch(&config, 9, 4)).unwrap(), losses);
}

#[test]
fn a_panic_is_an_error_and_ends_the_session() {
    let config = model();
    let (mut session, left) = faulty(Fault::Panic);
    session.step(batch(&config, 0, 4)).unwrap();
    left.store(9, Ordering::SeqCst);
    let error = session.step(batch(&config, 1, 4)).unwrap_err();
    assert!(error.to_string().ends_with("a panic: injected"), "{error}");
    let again = session.step(batch(&config, 1, 4)).unwrap_err();
    assert!(matches!(again, Error::Broken(_)), "{again}");
    assert!(matches!(session.snapshot().unwrap_err(), Error::Broken(_)));
}

#[test]
fn a_value_that_is_not_finite_changes_nothing() {
    let config = model();
    let make = || {
        let stages = config.stages(&[2, 2]).unwrap();
        Session::new(one_f_one_b::<2, 4>().clone(), stages, session_config(&config)).unwrap()
    };
    let (mut whole, mut session) = (make(), make());
    for step in 0..3 {
        whole.step(batch(&config, step, 4)).unwrap();
        session.step(batch(&config, step, 4)).unwrap();
    }
    // On the second rank alone; the first must hear of it.
    let path = "blocks.2.ln1.bias";
    let values = session.param(path).unwrap();
    for bad in [f64::NAN, f64::INFINITY] {
        let mut broken = values.clone();
        broken[3] = bad;
        session.set_params(BTreeMap::from([(path.to_owned(), broken)])).unwrap();
        let before = state(session.snapshot().unwrap());
        let report = session.step(batch(&config, 3, 4)).unwrap();
        assert_eq!((report.skipped, report.epoch), (true, 3));
        assert_eq!(state(session.snapshot().unwrap()), before);
    }
    session.set_params(BTreeMap::from([(path.to_owned(), values)])).unwrap();
    let (found, wanted) = (session.step(batch(&config, 3, 4)).unwrap(), whole.step(batch(&config, 3, 4)).unwrap());
    assert_eq!((found.losses, found.epoch, found.step), (wanted.losses, 4, 5));
    assert_eq!(session.snapshot().unwrap(), whole.snapshot().unwrap());
}

#[test]
fn what_does_not_fit_is_refused_at_start_or_before_a_step() {
    let config = model();
    let new = |blocks: &[usize]| {
        Session::new(one_f_one_b::<2, 4>().clone(), config.stages(blocks).unwrap(), session_config(&config))
    };
    let error = new(&[1, 2, 1]).err().unwrap();
    assert_eq!(error.code(), Some(Code::StageMismatch), "{error}"); // case B50
    let mut session = new(&[2, 2]).unwrap();
    let code = |error: Error| error.code();
    assert_eq!(code(session.step(batch(&config, 0, 3)).unwrap_err()), Some(Code::BatchMismatch));
    let mut short = batch(&config, 0, 4);
    short[2].targets.pop();
    let error = session.step(short).unwrap_err();
    assert_eq!(error.to_string(), "microbatch 2 has 16 tokens and 15 targets, not 16 [QE0904]");
    let elsewhere = session.evaluation(eval_v::<2, 4>().clone()).err().unwrap();
    assert_eq!(elsewhere.code(), Some(Code::StageMismatch));
    let unknown = session.set_params(BTreeMap::from([("blocks.9".to_owned(), vec![])])).unwrap_err();
    assert_eq!(unknown.to_string(), "the model has no parameter `blocks.9`");
    // Nothing of this was a step.
    assert_eq!(session.step(batch(&config, 0, 4)).unwrap().step, 0);
}

#[test]
fn logits_are_those_of_the_loss() {
    let config = model();
    let stages = config.stages(&[1, 1, 1, 1]).unwrap();
    let mut session = Session::new(zb_v::<2, 4>().clone(), stages, session_config(&config)).unwrap();
    let evaluation = session.evaluation(eval_v::<2, 2>().clone()).unwrap();
    session.step(batch(&config, 0, 4)).unwrap();
    let data: Vec<Windows> = batch(&config, 5, 2);
    let losses = session.evaluate(&evaluation, data.clone()).unwrap();
    let logits = session.logits(&evaluation, data.clone()).unwrap();
    assert_eq!((losses.len(), logits.len()), (2, 2));
    for ((logits, loss), windows) in logits.iter().zip(&losses).zip(&data) {
        let rows = logits.chunks(config.vocab).zip(&windows.targets);
        let row_loss =
            |(row, target): (&[f64], &u32)| row.iter().map(|x| x.exp()).sum::<f64>().ln() - row[*target as usize];
        let mean = rows.map(row_loss).sum::<f64>() / config.tokens() as f64;
        assert!((mean - loss).abs() < 1e-5, "{mean} {loss}");
    }
}

#[test]
fn reports_say_where_the_time_went() {
    let config = model();
    let stages = config.stages(&[2, 2]).unwrap();
    let mut session = Session::new(one_f_one_b::<2, 4>().clone(), stages, session_config(&config)).unwrap();
    let report = session.step(batch(&config, 0, 4)).unwrap();
    assert_eq!((report.busy.len(), report.bytes.len()), (2, 2));
    assert!(report.busy.iter().all(|busy| !busy.is_zero() && *busy <= report.wall));
    assert!((0.0..1.0).contains(&report.bubble()));
    assert!(report.bytes.iter().all(|bytes| *bytes > 0));
    assert_eq!(report.tokens, 4 * config.tokens());
    assert_eq!(report.learning_rate, OPTIM.learning_rate(0));
    assert_eq!(session.schedule().schedule.placement[1], Rank(1));
}
