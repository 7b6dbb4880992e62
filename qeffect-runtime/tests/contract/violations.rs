//! The violations that the contract is there for, injected one by one, in every mode: each is refused where it can first
//! be known, and has changed nothing.
//!
//! | injected | refused |
//! |---|---|
//! | into a program | by the checker, before there is a session |
//! | into a plan, past the checker | captured: when the step is written down, so there is no session; eager: before the action |
//! | into what an op does to hidden state | captured: as above; eager: at the action, or at `agree`; in an evaluation: at the action |
//! | into what ranks send each other | by the tag, before a byte is used; on one device when lists are merged |
//! | into data of a step | before the launch or the first action |
//! | into state, between steps | captured whole: before the launch; else: at the action, or at `agree` |
//!
//! Values that are not finite are in `not_finite.rs`; the same for the host's transaction alone in the ledger's own tests.

use std::collections::BTreeMap;

use crate::common::batch;
use crate::common::how::{HOW, How};
use crate::common::settings::{adamw, tiny};
use crate::watched;
use qeffect_core::check::{Options, check};
use qeffect_core::code::Code;
use qeffect_core::ids::{Microbatch, Rank, Stage as StageId};
use qeffect_core::lang;
use qeffect_core::ledger::{Ledger, Rolls, StageContract, Verdict};
use qeffect_core::plan::{Checked, Node, Op};
use qeffect_core::token::{Bwd, Fwd, Token};
use qeffect_runtime::act::Act;
use qeffect_runtime::capture::CaptureMode;
use qeffect_runtime::cpu::CpuDevice;
use qeffect_runtime::cx::Cx;
use qeffect_runtime::error::{Error, Result};
use qeffect_runtime::gpt::{GptConfig, GptStage, GptTape, GptWork};
use qeffect_runtime::op::Effects;
use qeffect_runtime::session::{Session, SessionConfig};
use qeffect_runtime::stage::{ParamId, Stage, StageSpec};
use qeffect_schedules::{eval_loop, zb_h1};

const MICROBATCHES: u32 = 4;

fn model() -> GptConfig {
    tiny("fp8-delayed:history=4,update=microbatch", 2)
}

fn config() -> SessionConfig {
    SessionConfig::new(adamw(50, 2, 4e-3, 1e-3), model().tokens())
}

/// What an op does to its stage's hidden state beside what it should.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fault {
    None,
    /// F rolls twice, and says that it rolled once.
    Doubled,
    /// F says that it rolled twice, and rolled once.
    Skipped,
    /// W rolls.
    OutOfTurn,
    /// F returns the token of another stage.
    Foreign,
    /// It declares to move no state, and moves it.
    Undeclared,
    /// An evaluation rolls.
    Evaluated,
    /// An evaluation is F of a training step.
    EvaluatedByForward,
    /// An evaluation asks for a gradient.
    EvaluatedWithGradient,
}

struct Faulty {
    inner: GptStage,
    id: StageId,
    fault: Fault,
}

impl Stage for Faulty {
    type Tape = GptTape;
    type Work = GptWork;

    fn spec(&self) -> &StageSpec {
        self.inner.spec()
    }

    fn effects(&self) -> Effects {
        if self.fault == Fault::Undeclared { Effects::NONE } else { self.inner.effects() }
    }

    fn forward(&self, cx: &mut Cx<'_>, x: &[Act], token: Token<Fwd>) -> Result<(Vec<Act>, GptTape, Token<Fwd>)> {
        let (y, tape, token) = self.inner.forward(cx, x, token)?;
        let token = match self.fault {
            Fault::Doubled => {
                drop(cx.roll_forward(Token::first(self.id))?);
                token
            }
            Fault::Skipped => token.rolled(),
            Fault::Foreign => (0..token.rolls()).fold(Token::first(StageId(9)), |token, _| token.rolled()),
            _ => token,
        };
        Ok((y, tape, token))
    }

    fn input_grad(
        &self,
        cx: &mut Cx<'_>,
        dy: &[Act],
        tape: GptTape,
        token: Token<Bwd>,
    ) -> Result<(Vec<Act>, GptWork, Token<Bwd>)> {
        self.inner.input_grad(cx, dy, tape, token)
    }

    fn weight_grad(&self, cx: &mut Cx<'_>, work: GptWork) -> Result<()> {
        if self.fault == Fault::OutOfTurn {
            drop(cx.roll_backward(Token::first(self.id))?);
        }
        self.inner.weight_grad(cx, work)
    }

    fn evaluate(&self, cx: &mut Cx<'_>, x: &[Act]) -> Result<Vec<Act>> {
        let token = Token::first(self.id);
        match self.fault {
            Fault::Evaluated => drop(cx.roll_forward(token)?),
            Fault::EvaluatedByForward => return Ok(self.inner.forward(cx, x, token)?.0),
            Fault::EvaluatedWithGradient => drop(cx.grad(ParamId(0))?),
            _ => {}
        }
        self.inner.evaluate(cx, x)
    }
}

/// A block each for two ranks; `fault` is in the second stage.
fn stages(fault: Fault) -> Vec<Faulty> {
    let faulty = |(inner, id)| Faulty { inner, id: StageId(id), fault: if id == 1 { fault } else { Fault::None } };
    model().stages(&[1, 1]).unwrap().into_iter().zip(0..).map(faulty).collect()
}

fn session(how: How, checked: &Checked, fault: Fault) -> Result<Session<Faulty>> {
    how.session(checked.clone(), stages(fault), config(), || Box::new(CpuDevice::new()))
}

#[test]
fn a_stage_that_declares_other_effects_than_its_state_has_is_refused_at_start() {
    let checked = zb_h1::build(2, i64::from(MICROBATCHES)).unwrap();
    for how in HOW {
        let Err(error) = session(how, &checked, Fault::Undeclared) else { panic!("{how:?}: not refused") };
        assert_eq!(error.code(), Some(Code::EffectMismatch), "{how:?}: {error}");
        let text = error.to_string();
        assert!(text.contains("stage 1 has the forward scaling state, which F rolls, and none"), "{text}");
        assert!(!text.contains("stage 0"), "{text}");
    }
}

/// All that must not move. Gradients of a step that failed are nobody's.
fn state(session: &Session<Faulty>) -> (BTreeMap<String, Vec<u8>>, String) {
    let snapshot = session.snapshot().unwrap();
    let values = snapshot.values.into_iter().filter(|(name, _)| !name.ends_with("/gradient"));
    (values.map(|(name, value)| (name, value.bytes)).collect(), format!("{:?}", snapshot.versions))
}

/// A step is refused and has changed nothing, twice.
fn step_is_refused(session: &mut Session<Faulty>, code: Code, what: &str) {
    let before = state(session);
    for attempt in 0..2 {
        let error = session.step(batch(&model(), 0, MICROBATCHES)).unwrap_err();
        assert_eq!(error.code(), Some(code), "{what}: {error}");
        assert!(state(session) == before, "{what}: attempt {attempt} left a trace: {error}");
        let read = session.gradient("blocks.1.fc1.weight").unwrap_err();
        assert!(matches!(read.code(), Some(Code::ArenaPoisoned)), "{what}: {read}");
    }
}

/// A fault that is known when a step is written down: captured, there is no session; eager, its step is refused.
fn refused(what: &str, checked: &Checked, fault: Fault, code: Code) {
    for how in HOW {
        let what = format!("{what}, {how:?}");
        match session(how, checked, fault) {
            Ok(mut session) => {
                assert!(how.is_eager(), "{what}: captured");
                step_is_refused(&mut session, code, &what);
            }
            Err(error) => {
                assert!(!how.is_eager(), "{what}: {error}");
                assert_eq!(error.code(), Some(code), "{what}: {error}");
            }
        }
    }
}

/// The plan of ZB-H1 on two ranks, with the nodes of one rank changed behind the checker's back.
fn edited(rank: u32, edit: impl FnOnce(&mut Vec<Node>)) -> Checked {
    let mut checked = zb_h1::<2, 4>().clone();
    let mut ranks: Vec<Vec<Node>> = (0..2).map(|rank| checked.plan.rank(Rank(rank)).to_vec()).collect();
    let before = ranks.clone();
    edit(&mut ranks[rank as usize]);
    assert_ne!(ranks, before, "nothing was injected");
    let starts = [0, ranks[0].len(), ranks[0].len() + ranks[1].len()];
    checked.plan.starts = starts.iter().map(|start| *start as u32).collect::<Vec<_>>().into();
    checked.plan.nodes = ranks.concat().into();
    checked
}

fn find(nodes: &[Node], op: Op, microbatch: u32) -> usize {
    nodes.iter().position(|node| (node.op, node.microbatch) == (op, Microbatch(microbatch))).unwrap()
}

/// A node once more, right behind itself.
fn doubled(rank: u32, op: Op, microbatch: u32) -> Checked {
    edited(rank, |nodes| {
        let at = find(nodes, op, microbatch);
        nodes.insert(at, nodes[at]);
    })
}

/// A node at the place of another one, before it.
fn moved(rank: u32, (op, microbatch): (Op, u32), (before, of): (Op, u32)) -> Checked {
    edited(rank, |nodes| {
        let node = nodes.remove(find(nodes, op, microbatch));
        nodes.insert(find(nodes, before, of), node);
    })
}

fn dropped(rank: u32, op: Op, microbatch: u32) -> Checked {
    edited(rank, |nodes| {
        nodes.remove(find(nodes, op, microbatch));
    })
}

/// The checker's verdict on one stage on one rank, with two microbatches.
fn judge(body: &str) -> Vec<Code> {
    let text = format!("case<P, M>; ranks: P; microbatches: M; stages: P; place: |s| s; rank |r| {{ {body} }}");
    let program = lang::read("case.sched", &text).0.unwrap();
    let verdict = check(lang::interpret(&program, &[1, 2]).unwrap(), &Options::AT_START);
    verdict.map_or_else(|report| report.codes(), |_| Vec::new())
}

const GOOD: &str = "F(0, 0); F(0, 1); I(0, 0); W(0, 0); I(0, 1); W(0, 1);";

/// Witness: without a fault everything runs, in every mode, and to the same state.
#[test]
fn without_a_fault_nothing_is_refused() {
    assert_eq!(judge(GOOD), []);
    let states = HOW.map(|how| {
        let mut session = session(how, zb_h1::<2, 4>(), Fault::None).unwrap();
        session.step(batch(&model(), 0, MICROBATCHES)).unwrap();
        state(&session)
    });
    assert!(states.iter().all(|state| *state == states[0]));
}

#[test]
fn a_tape_or_a_work_is_consumed_twice() {
    assert_eq!(judge(&GOOD.replace("I(0, 0);", "I(0, 0); I(0, 0);")), [Code::TapeConsumedTwice]);
    assert_eq!(judge(&GOOD.replace("W(0, 0);", "W(0, 0); W(0, 0);")), [Code::WorkConsumedTwice]);
    for rank in [0, 1] {
        refused("I twice", &doubled(rank, Op::InputGrad, 0), Fault::None, Code::TapeConsumedTwice);
        refused("W twice", &doubled(rank, Op::WeightGrad, 1), Fault::None, Code::WorkConsumedTwice);
    }
}

#[test]
fn a_consumer_runs_before_its_producer() {
    assert_eq!(judge("F(0, 0); I(0, 1); F(0, 1); I(0, 0); W(0, 0); W(0, 1);"), [Code::TapeBeforeForward]);
    assert_eq!(judge("F(0, 0); F(0, 1); W(0, 0); I(0, 0); I(0, 1); W(0, 1);"), [Code::WorkBeforeInputGrad]);
    let early = moved(1, (Op::InputGrad, 0), (Op::Forward, 0));
    refused("I before F", &early, Fault::None, Code::TapeBeforeForward);
    let early = moved(0, (Op::WeightGrad, 0), (Op::InputGrad, 0));
    refused("W before I", &early, Fault::None, Code::WorkBeforeInputGrad);
}

/// A slot is given to another microbatch while it is live, and a reference is used whose slot was given away since.
#[test]
fn a_slot_is_reused_while_its_tape_is_wanted() {
    let reused = edited(0, |nodes| {
        let slot = nodes[find(nodes, Op::Forward, 0)].slot;
        let second = find(nodes, Op::Forward, 1);
        nodes[second].slot = slot;
    });
    refused("F into a live slot", &reused, Fault::None, Code::SlotsExhausted);

    // A reference of an eager step that was aborted, kept over a replayed one.
    let stage = StageId(0);
    let contract = StageContract { stage, forward_rolls: 1, backward_rolls: 1 };
    let mut ledger = Ledger::new(Rank(0), &[contract], 1, 1);
    ledger.fill(stage).unwrap();
    let forward = |ledger: &mut Ledger| {
        ledger.begin_refresh(stage).unwrap().finish();
        let (pending, token) = ledger.begin_forward(stage, Microbatch(0), 0).unwrap();
        pending.finish(token.rolled()).unwrap()
    };
    let mut rehearsal = ledger.rehearsal().unwrap();
    rehearsal.begin_step().unwrap();
    let tape = forward(&mut rehearsal);
    let (pending, token) = rehearsal.begin_full_backward(stage, Microbatch(0), tape).unwrap();
    pending.finish(token.rolled()).unwrap();
    rehearsal.begin_reduce(stage).unwrap().finish();
    rehearsal.begin_agree(|_| Rolls { forward: 1, backward: 1 }).unwrap().finish();
    rehearsal.begin_commit().unwrap().finish();
    rehearsal.settle(Verdict::Good).unwrap();
    let effects = ledger.effects_of(&rehearsal).unwrap();

    ledger.begin_step().unwrap();
    let old = forward(&mut ledger);
    ledger.abort_step();
    ledger.begin_replay(&effects, |_| Rolls::default()).unwrap();
    ledger.settle(Verdict::Good).unwrap();
    ledger.begin_step().unwrap();
    let live = forward(&mut ledger);
    let refused = ledger.begin_input_grad(stage, Microbatch(0), old).unwrap_err();
    assert_eq!(refused.code, Code::StaleReference, "{refused}");
    let (pending, token) = ledger.begin_input_grad(stage, Microbatch(0), live).unwrap();
    pending.finish(token.rolled()).map(drop).unwrap(); // the live record is as it was
}

/// I of microbatch 0 is pointed at the slot in which microbatch 1 lives, and W likewise.
#[test]
fn the_tape_of_another_microbatch_is_consumed() {
    let at = |rank, op| {
        edited(rank, |nodes| {
            let slot = nodes[find(nodes, Op::Forward, 1)].slot;
            let node = find(nodes, op, 0);
            assert_ne!(nodes[node].slot, slot);
            nodes[node].slot = slot;
        })
    };
    refused("I of another tape", &at(0, Op::InputGrad), Fault::None, Code::KeyMismatch);
    // On the last rank W lags one microbatch behind I, so two works are live.
    refused("W of another work", &at(1, Op::WeightGrad), Fault::None, Code::KeyMismatch);
}

/// The weights have moved since the cache was made current: a step without `refresh`, and one with it at another place.
#[test]
fn a_forward_reads_a_cache_of_older_weights() {
    assert_eq!(judge(&GOOD.replace("F(0, 1);", "refresh(0); F(0, 1);")), [Code::StaleCache]);
    let early = "F(0, 0); I(0, 0); W(0, 0); commit; F(0, 1); I(0, 1); W(0, 1);";
    assert!(judge(early).contains(&Code::StaleCache), "{:?}", judge(early));
    for rank in [0, 1] {
        refused("no refresh", &dropped(rank, Op::Refresh, 0), Fault::None, Code::StaleCache);
    }
    let late = moved(0, (Op::Refresh, 0), (Op::Forward, 1));
    refused("refresh behind F", &late, Fault::None, Code::StaleCache);
    // Behind the commit: known before anything is launched where steps are captured.
    let after = edited(1, |nodes| {
        let forward = nodes[find(nodes, Op::Forward, 0)];
        nodes.push(forward);
    });
    for how in HOW.into_iter().filter(|how| !how.is_eager()) {
        let error = session(how, &after, Fault::None).map(drop).unwrap_err();
        assert_eq!(error.code(), Some(Code::StaleCache), "{how:?}: {error}");
    }
}

/// Scaling state is moved twice, not at all, by whom it does not belong to, or in another order.
#[test]
fn a_scaling_update_is_doubled_skipped_or_reordered() {
    let plan = zb_h1::<2, 4>();
    for fault in [Fault::Doubled, Fault::Skipped, Fault::OutOfTurn, Fault::Foreign] {
        refused(&format!("{fault:?}"), plan, fault, Code::TokenOutOfOrder);
    }
    assert_eq!(judge(&GOOD.replace("F(0, 1);", "F(0, 1); F(0, 1);")), [Code::ForwardRepeated]);
    refused("F twice", &doubled(0, Op::Forward, 3), Fault::None, Code::ForwardRepeated);
    refused("refresh twice", &doubled(1, Op::Refresh, 0), Fault::None, Code::RefreshMisplaced);
    // Two orders of F and of I: marked by the checker, refused when the session is bound.
    for body in [
        "for m in (0..M).rev() { F(r, m); } for m in 0..M { B(r, m); }",
        "for m in 0..M { F(r, m); } for m in (0..M).rev() { B(r, m); }",
    ] {
        let text = format!("case<P, M>; ranks: P; microbatches: M; stages: P; place: |s| s; rank |r| {{ {body} }}");
        let program = lang::read("case.sched", &text).0.unwrap();
        let schedule = lang::interpret(&program, &[2, i64::from(MICROBATCHES)]).unwrap();
        let checked = check(schedule, &Options::AT_START).unwrap();
        for how in HOW {
            let error = session(how, &checked, Fault::None).map(drop).unwrap_err();
            assert_eq!(error.code(), Some(Code::OrderDependent), "{how:?}: {error}");
        }
    }
}

/// A consumer reads before what it reads was written: an input before its message, a gradient before its sum, weights
/// before their update.
#[test]
fn a_consumer_reads_before_the_writer_has_written() {
    refused("F before its input", &dropped(1, Op::WaitForward, 0), Fault::None, Code::MessageEarly);
    refused("I before its gradient", &dropped(0, Op::WaitBackward, 2), Fault::None, Code::MessageEarly);
    let early = moved(0, (Op::SendForward, 0), (Op::Forward, 0));
    refused("a message before it is made", &early, Fault::None, Code::MessageEarly);
    assert_eq!(judge(&GOOD.replace("W(0, 1);", "reduce(0); W(0, 1);")), [Code::ReduceMisplaced]);
    let early = moved(1, (Op::Reduce, 0), (Op::WeightGrad, 3));
    refused("reduce before the last W", &early, Fault::None, Code::ReduceMisplaced);
    refused("commit of open gradients", &dropped(0, Op::Reduce, 0), Fault::None, Code::CommitWithWork);
    refused("commit on its own", &dropped(0, Op::Agree, 0), Fault::None, Code::CommitWithWork);
    // The caller: what a step writes is there when it is read, and not before.
    for how in HOW {
        let mut session = session(how, zb_h1::<2, 4>(), Fault::None).unwrap();
        let path = "blocks.0.fc1.weight";
        let error = session.gradient(path).unwrap_err();
        assert_eq!(error.code(), Some(Code::ArenaMissing), "{how:?}: {error}");
        let first = session.step(batch(&model(), 0, MICROBATCHES)).map(|_| session.gradient(path).unwrap()).unwrap();
        session.step(batch(&model(), 1, MICROBATCHES)).unwrap();
        assert_ne!(session.gradient(path).unwrap(), first, "{how:?}");
    }
}

/// Two messages change places on their way: both ends are sound, so only their tags can tell.
#[test]
fn a_message_of_another_microbatch_arrives() {
    let swapped = edited(0, |nodes| {
        let [first, second] = [0, 1].map(|m| find(nodes, Op::SendForward, m));
        let node = nodes.remove(first);
        nodes.insert(second, node); // behind the other one, whose place has moved up
    });
    for how in HOW {
        match session(how, &swapped, Fault::None) {
            Ok(mut session) => {
                assert_ne!(how, How::OneDevice);
                step_is_refused(&mut session, Code::FifoOrder, &format!("{how:?}"));
            }
            Err(error) => assert_eq!((how, error.code()), (How::OneDevice, Some(Code::FifoOrder)), "{error}"),
        }
    }
}

/// What the host gives to a step does not fit: nothing is launched, no action runs, and the next step does.
#[test]
fn a_batch_that_does_not_fit_is_refused_before_the_step() {
    for how in HOW {
        let [mut session, mut clean] = [0; 2].map(|_| session(how, zb_h1::<2, 4>(), Fault::None).unwrap());
        let before = state(&session);
        let error = session.step(batch(&model(), 0, MICROBATCHES - 1)).unwrap_err();
        assert_eq!(error.code(), Some(Code::BatchMismatch), "{how:?}: {error}");
        let mut short = batch(&model(), 0, MICROBATCHES);
        short[2].tokens.pop();
        let error: Error = session.step(short).unwrap_err();
        assert_eq!(error.code(), Some(Code::BatchMismatch), "{how:?}: {error}");
        assert!(state(&session) == before, "{how:?}");
        for session in [&mut session, &mut clean] {
            assert_eq!(session.step(batch(&model(), 0, MICROBATCHES)).unwrap().step, 0);
        }
        assert!(state(&session) == state(&clean), "{how:?}");
    }
}

/// An evaluation that moves state is refused before it does, and whatever comes next is none the worse for it.
#[test]
fn an_evaluation_moves_no_state() {
    let faults = [
        (Fault::Evaluated, Code::TokenOutOfOrder, "input cell"),
        (Fault::EvaluatedByForward, Code::TokenOutOfOrder, "input cell"),
        (Fault::EvaluatedWithGradient, Code::ArenaDuplicate, "gradient 0"),
    ];
    for (how, (fault, code, what_of)) in HOW.into_iter().flat_map(|how| faults.map(|fault| (how, fault))) {
        let what = format!("{how:?}, {fault:?}");
        let [mut faulty, mut clean] = [fault, Fault::None].map(|fault| session(how, zb_h1::<2, 4>(), fault).unwrap());
        let evaluation = faulty.evaluation(eval_loop::build(2, i64::from(MICROBATCHES), 1).unwrap()).unwrap();
        for step in 0..2 {
            let before = state(&faulty);
            let error = faulty.evaluate(&evaluation, batch(&model(), 9, MICROBATCHES)).unwrap_err();
            assert_eq!(error.code(), Some(code), "{what}: {error}");
            assert!(error.to_string().contains(what_of) && error.to_string().contains("an evaluation"), "{error}");
            assert!(error.to_string().starts_with("rank 1: "), "{what}: {error}");
            assert!(state(&faulty) == before, "{what}: {error}");
            for session in [&mut faulty, &mut clean] {
                session.step(batch(&model(), step, MICROBATCHES)).unwrap();
            }
            assert!(state(&faulty) == state(&clean), "{what}, step {step}");
        }
    }
}

/// What is wrong before a step starts is known before anything of it is launched, where it is launched as a whole: weights
/// were replaced, and the cache was not made from them, since the device failed.
#[test]
fn a_fault_of_the_host_launches_nothing() {
    let path = "blocks.1.fc1.weight";
    for how in HOW {
        let (mut session, watches) = watched::session(how, zb_h1::<2, 4>(), stages(Fault::None), config());
        session.step(batch(&model(), 0, MICROBATCHES)).unwrap();
        let watch = watches.last().unwrap(); // of the device of the second stage
        let values = session.param(path).unwrap().iter().map(|x| 2.0 * x).collect();
        let values = BTreeMap::from([(path.to_owned(), values)]);
        watch.lock().unwrap().fails = true;
        session.set_params(values.clone()).unwrap_err();
        watch.lock().unwrap().fails = false;
        let before = state(&session);
        let launches = watch.lock().unwrap().launches;
        assert_eq!(launches == 0, how.is_eager(), "{how:?}");
        for _ in 0..2 {
            let error = session.step(batch(&model(), 1, MICROBATCHES)).unwrap_err();
            assert_eq!(error.code(), Some(Code::StaleCache), "{how:?}: {error}");
            let of_second = error.to_string().starts_with("rank 1: ");
            assert!(of_second || how == How::OneDevice, "{how:?}: {error}"); // there the device failed for both
            if matches!(how, How::PerRank(CaptureMode::Step) | How::OneDevice) {
                assert_eq!(watch.lock().unwrap().launches, launches, "{how:?}");
            }
            assert!(state(&session) == before, "{how:?}: {error}");
        }
        session.set_params(values).unwrap();
        assert!(!session.step(batch(&model(), 1, MICROBATCHES)).unwrap().skipped, "{how:?}");
    }
}
