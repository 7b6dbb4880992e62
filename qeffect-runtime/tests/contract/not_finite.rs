//! A value that is not finite, wherever it arises, changes nothing in any mode.
//!
//! Every kind of action before the verdict leaves a NaN behind: F, I, W, B, R, refresh, reduce and agree. The commit alone
//! is not spoiled: it stands behind the gate, so it runs only where everything before it was finite, and nothing after it
//! could take back what it has written.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use crate::common::batch;
use crate::common::how::{HOW, How, with_recomputation};
use crate::common::spoil::{KINDS, KINDS_OF_LLAMA, kept};
use crate::common::spoilt::{Actions, Run};
use crate::watched::{OPTIM, Watch, model, session};
use qeffect_core::bind::Gradients;
use qeffect_core::code::Code;
use qeffect_core::plan::Checked;
use qeffect_runtime::capture::CaptureMode;
use qeffect_runtime::cpu::CpuDevice;
use qeffect_runtime::data::Windows;
use qeffect_runtime::device::{Caps, Device};
use qeffect_runtime::error::{Error, Result};
use qeffect_runtime::gpt::{GptConfig, GptStage};
use qeffect_runtime::llama::LlamaConfig;
use qeffect_runtime::session::{OnNonFinite, Session, SessionConfig, StepReport};
use qeffect_runtime::stage::Stage;
use qeffect_schedules::{eval_loop, one_f_one_b, zb_h1};

/// The first, middle and last of every kind of command.
fn targets(seen: &[&'static str]) -> Vec<usize> {
    let mut places: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    seen.iter().enumerate().for_each(|(at, name)| places.entry(name).or_default().push(at));
    let mut targets: Vec<usize> = places.values().flat_map(|at| [at[0], at[at.len() / 2], at[at.len() - 1]]).collect();
    targets.sort_unstable();
    targets.dedup();
    targets
}

/// What is run, and where NaNs arise in it.
struct Case<'a, S> {
    checked: &'a Checked,
    stages: &'a dyn Fn() -> Vec<S>,
    gradients: Gradients,
    kinds: &'a [&'static str],
    /// Chosen of the commands of a device.
    targets: fn(&[&'static str]) -> Vec<usize>,
    /// Which of them, by rank, write what nobody reads: a step with a NaN there is as good as any.
    unread: &'a [(usize, &'static str)],
}

type Watched<S> = (Session<S>, Vec<Arc<Mutex<Watch>>>);

impl<S> Case<'_, S>
where
    S: Stage + Send + 'static,
    S::Tape: Send,
    S::Work: Send,
{
    /// A session that has taken two steps, and what its devices have seen of the second.
    fn session(&self, how: How, on_nonfinite: OnNonFinite) -> Watched<S> {
        let (gradients, plain) = (self.gradients, SessionConfig::new(OPTIM, model().tokens()));
        let session_config = SessionConfig { on_nonfinite, gradients, verify: true, ..plain };
        let (mut session, watches) = session(how, self.checked, (self.stages)(), session_config);
        for step in 0..2 {
            watches.iter().for_each(|watch| watch.lock().unwrap().arm(None));
            session.step(self.batch(step)).unwrap();
        }
        (session, watches)
    }

    fn batch(&self, step: u64) -> Vec<Windows> {
        batch(&model(), step, self.checked.schedule.microbatches)
    }

    /// The third step, in which a command of a device leaves a NaN behind.
    fn spoiled(&self, (session, watches): &mut Watched<S>, device: usize, target: usize) -> Result<StepReport> {
        watches[device].lock().unwrap().arm(Some(target));
        let result = session.step(self.batch(2));
        watches[device].lock().unwrap().arm(None);
        result
    }

    /// In every way to run a step, every chosen command leaves a NaN behind, once in a session that skips bad steps and once
    /// in one that stops there.
    fn a_nan_anywhere_changes_nothing(&self) {
        HOW.into_iter().for_each(|how| self.changes_nothing(how));
    }

    fn changes_nothing(&self, how: How) {
        let (mut clean, _) = self.session(how, OnNonFinite::Skip);
        let [mut skips, mut stops] = [OnNonFinite::Skip, OnNonFinite::Stop].map(|policy| self.session(how, policy));
        let before = kept(skips.0.snapshot().unwrap());
        let seen: Vec<Vec<&str>> = skips.1.iter().map(|watch| watch.lock().unwrap().seen.clone()).collect();
        for kind in self.kinds {
            assert!(seen.iter().flatten().any(|name| name == kind), "{how:?}: no {kind}");
        }
        let (mut attempts, mut unread) = (2, Vec::new());
        for (at, seen) in seen.iter().enumerate() {
            for target in (self.targets)(seen) {
                let name = seen[target];
                let what = format!("{how:?}: a NaN from {name} ({target}) of device {at}");
                let report = self.spoiled(&mut skips, at, target).unwrap();
                if !report.skipped {
                    unread.push((at, name));
                    let mut good = self.session(how, OnNonFinite::Skip).0;
                    let wanted = good.step(self.batch(2)).unwrap();
                    assert_eq!((report.losses, report.grad_norm), (wanted.losses, wanted.grad_norm), "{what}");
                    assert!(kept(skips.0.snapshot().unwrap()) == kept(good.snapshot().unwrap()), "{what}");
                    (skips, attempts) = (self.session(how, OnNonFinite::Skip), 2);
                    continue;
                }
                let tags: Vec<String> = report.mismatches.iter().map(ToString::to_string).collect();
                match name {
                    "write_tag" => assert!(tags.len() == 1 && tags[0].starts_with("a slot holds stage "), "{tags:?}"),
                    _ => assert!(tags.is_empty(), "{what}: {tags:?}"),
                }
                assert_eq!((report.step, report.epoch), (attempts, 2), "{what}");
                assert!(kept(skips.0.snapshot().unwrap()) == before, "{what}");
                attempts += 1;

                let error = self.spoiled(&mut stops, at, target).unwrap_err();
                match name {
                    "write_tag" => assert_eq!(error.code(), Some(Code::KeyMismatch), "{what}: {error}"),
                    _ => {
                        assert!(matches!(error, Error::NotFinite { .. }), "{what}: {error}");
                        assert_eq!(error.code(), Some(Code::NonFinite), "{what}: {error}");
                    }
                }
                assert!(error.to_string().contains("; nothing has changed"), "{error}");
                assert!(kept(stops.0.snapshot().unwrap()) == before, "{what}");
            }
        }
        let device = |rank| if how == How::OneDevice { 0 } else { rank };
        let mut wanted: Vec<_> = self.unread.iter().map(|(rank, name)| (device(*rank), *name)).collect();
        wanted.sort_unstable();
        unread.sort_unstable();
        assert_eq!(unread, wanted, "{how:?}");
        assert!(attempts > 20, "{how:?}: {attempts}");
        // On with the next batch, as if the bad ones had never been.
        for step in 3..6 {
            let wanted = clean.step(self.batch(step)).unwrap();
            for session in [&mut skips.0, &mut stops.0] {
                let found = session.step(self.batch(step)).unwrap();
                let found = (found.losses, found.grad_norm, found.epoch);
                assert_eq!(found, (wanted.losses.clone(), wanted.grad_norm, step));
            }
        }
        let wanted = clean.snapshot().unwrap();
        assert_eq!(skips.0.snapshot().unwrap(), wanted, "{how:?}");
        assert_eq!(stops.0.snapshot().unwrap(), wanted, "{how:?}");
    }
}

fn of_gpt(config: GptConfig, checked: &Checked, gradients: Gradients, kinds: &[&'static str]) {
    let stages = || config.stages(&[1, 1]).unwrap();
    let case = Case::<GptStage> { checked, stages: &stages, gradients, kinds, targets, unread: &[] };
    case.a_nan_anywhere_changes_nothing();
}

#[test]
fn a_nan_in_f_i_w_refresh_reduce_or_agree_changes_nothing() {
    of_gpt(model(), zb_h1::<2, 4>(), Gradients::Copied, KINDS);
}

#[test]
fn a_nan_in_b_changes_nothing() {
    of_gpt(model(), one_f_one_b::<2, 4>(), Gradients::Copied, KINDS);
}

#[test]
fn a_nan_in_gradients_that_are_added_in_place_changes_nothing() {
    of_gpt(model(), zb_h1::<2, 4>(), Gradients::Direct, KINDS);
}

#[test]
fn a_nan_in_gradients_of_groups_changes_nothing() {
    let checked = zb_h1::<2, 4>().clone().coalesced(2).unwrap();
    of_gpt(model(), &checked, Gradients::Coalesced, &[KINDS, &["group_gemm"]].concat());
}

#[test]
fn a_nan_changes_nothing_where_state_moves_with_every_step() {
    let recipe = "fp8-delayed:history=4,update=step".parse().unwrap();
    let config = GptConfig { recipe, ..model() };
    let kinds: Vec<&str> = KINDS.iter().copied().filter(|kind| *kind != "roll").collect(); // by commit alone
    of_gpt(config, zb_h1::<2, 4>(), Gradients::Copied, &kinds);
}

/// The ends of the tie are on two ranks, and on one.
#[test]
fn a_nan_in_a_tied_model_changes_nothing() {
    let GptConfig { vocab, hidden, heads, ffn, layers, seq, sequences, recipe } = model();
    let (kv_heads, rotary_base, tied) = (1, 500.0, true);
    let config = LlamaConfig { vocab, hidden, heads, kv_heads, ffn, layers, seq, sequences, rotary_base, tied, recipe };
    for ranks in [2, 1] {
        let checked = zb_h1::build(ranks, 4).unwrap();
        let stages = || config.stages(if ranks == 2 { &[1, 1] } else { &[2] }).unwrap();
        let (kinds, gradients) = (KINDS_OF_LLAMA, Gradients::Copied);
        let case = Case { checked: &checked, stages: &stages, gradients, kinds, targets, unread: &[] };
        case.a_nan_anywhere_changes_nothing();
    }
}

/// Every command of a step, those of R among them.
#[test]
fn a_nan_in_r_changes_nothing() {
    let checked = with_recomputation(&zb_h1::build(2, 2).unwrap(), |_| true);
    let stages = || model().stages(&[1, 1]).unwrap();
    let case = Case::<GptStage> {
        checked: &checked,
        stages: &stages,
        gradients: Gradients::Copied,
        kinds: KINDS,
        targets: |seen| (0..seen.len()).collect(),
        // R gives up the output of its stage, and F of what is run again its tape.
        unread: &[(0, "add"), (0, "add"), (0, "gemm"), (0, "gemm"), (1, "cross_entropy"), (1, "cross_entropy")],
    };
    case.a_nan_anywhere_changes_nothing();
}

#[test]
fn stop_says_which_loss_was_not_finite() {
    let config = model();
    for how in HOW {
        let session_config =
            SessionConfig { on_nonfinite: OnNonFinite::Stop, ..SessionConfig::new(OPTIM, config.tokens()) };
        let (mut session, _) = session(how, zb_h1::<2, 4>(), config.stages(&[1, 1]).unwrap(), session_config);
        let evaluation = session.evaluation(eval_loop::build(2, 4, 1).unwrap()).unwrap();
        session.step(batch(&config, 0, 4)).unwrap();
        let path = "blocks.1.ln1.bias";
        let values = session.param(path).unwrap();
        let mut broken = values.clone();
        broken[0] = f64::INFINITY;
        session.set_params(BTreeMap::from([(path.to_owned(), broken)])).unwrap();
        let error = session.step(batch(&config, 1, 4)).unwrap_err().to_string();
        assert!(error.starts_with("step 1: "), "{how:?}: {error}");
        assert!(error.ends_with(" is not finite; nothing has changed [QE0906]"), "{how:?}: {error}");
        session.set_params(BTreeMap::from([(path.to_owned(), values)])).unwrap();
        let losses = session.evaluate(&evaluation, batch(&config, 2, 4)).unwrap();
        assert!(losses.iter().all(|loss| loss.is_finite()));
        assert_eq!(session.step(batch(&config, 1, 4)).unwrap().epoch, 2);
    }
}

/// On a device that fuses commands, as a GPU does: in what they keep of a matrix, and in what they take from it.
#[test]
fn a_nan_in_fused_commands_changes_nothing() {
    let caps = Caps { fp8_needs_transposes: true, fp8_multiple: 16, fuses: true, parallel: true, ..Caps::default() };
    let device = || Box::new(CpuDevice::with_caps(caps)) as Box<dyn Device>;
    let run = |actions, gradients| Run { actions, gradients, capture: CaptureMode::Step, fused: true };
    for gradients in [Gradients::Copied, Gradients::Direct, Gradients::Coalesced] {
        run(Actions::Split, gradients).of_gpt(model(), OPTIM, device);
    }
    run(Actions::Whole, Gradients::Coalesced).of_gpt(model(), OPTIM, device);
    run(Actions::Again, Gradients::Direct).of_gpt(model(), OPTIM, device);
    run(Actions::Split, Gradients::Copied).of_llama(model(), OPTIM, device);
    run(Actions::Again, Gradients::Coalesced).of_llama(model(), OPTIM, device);
}
