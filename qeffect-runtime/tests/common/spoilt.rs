//! Steps in which a command leaves a NaN behind, one after the other for all kinds of commands, on any device and in any mode.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use qeffect_core::bind::Gradients;
use qeffect_core::code::Code;
use qeffect_core::plan::Checked;
use qeffect_runtime::capture::CaptureMode;
use qeffect_runtime::data::Windows;
use qeffect_runtime::device::Device;
use qeffect_runtime::error::Error;
use qeffect_runtime::gpt::{GptConfig, GptStage};
use qeffect_runtime::llama::{LlamaConfig, LlamaStage};
use qeffect_runtime::optim::OptimConfig;
use qeffect_runtime::session::{OnNonFinite, Session, SessionConfig};
use qeffect_runtime::stage::Stage;
use qeffect_schedules::{one_f_one_b, zb_h1};

use super::batch;
use super::how::with_recomputation;
use super::sites::{Open, Site, Sites};
use super::spoil::{FUSED, FUSED_OF_LLAMA, KINDS, KINDS_OF_LLAMA, kept};

/// The first, a middle and the last.
pub fn three(count: usize) -> Vec<usize> {
    let mut places = vec![0, count / 2, count - 1];
    places.dedup();
    places
}

/// Every one.
pub fn all(count: usize) -> Vec<usize> {
    (0..count).collect()
}

/// What is run, and how.
pub struct Spoilt<'a, S> {
    /// The sizes of the model, of whatever kind it is.
    pub config: GptConfig,
    pub stages: &'a dyn Fn() -> Vec<S>,
    pub checked: &'a Checked,
    pub optim: OptimConfig,
    pub gradients: Gradients,
    pub capture: CaptureMode,
    /// Whether commands are fused.
    pub fused: bool,
    /// Which commands of a kind leave a NaN behind, of how many.
    pub places: fn(usize) -> Vec<usize>,
    /// How many of them, by kind and part, write what nobody reads: a step with a NaN there is as good as any.
    pub unread: Unread,
}

/// Kind and part of a site, and how many.
type Unread = &'static [((&'static str, &'static str), usize)];

/// A session, and its sites.
type Opened<S> = (Session<S>, Arc<Mutex<Sites>>);

impl<S> Spoilt<'_, S>
where
    S: Stage + Send + 'static,
    S::Tape: Send,
    S::Work: Send,
{
    fn session(&self, on_nonfinite: OnNonFinite, device: Box<dyn Device>) -> Session<S> {
        let (gradients, capture) = (self.gradients, self.capture);
        let plain = SessionConfig::new(self.optim, self.config.tokens());
        let config = SessionConfig { gradients, capture, on_nonfinite, verify: true, ..plain };
        Session::on_one_device(self.checked.clone(), (self.stages)(), config, device).unwrap()
    }

    fn batch(&self, step: u64) -> Vec<Windows> {
        batch(&self.config, step, self.checked.schedule.microbatches)
    }

    /// A session that has taken two steps, and has seen what a step is made of.
    fn opened(&self, policy: OnNonFinite, device: Box<dyn Device>) -> Opened<S> {
        let (device, sites) = Open::boxed(device, self.fused);
        let mut session = self.session(policy, device);
        for step in 0..2 {
            sites.lock().unwrap().arm(None);
            session.step(self.batch(step)).unwrap();
        }
        (session, sites)
    }

    /// The chosen commands of each kind leave a NaN behind, in a session that skips bad steps and in one that stops there:
    /// nothing changes, and the next batch gives what it would have given without them. What is written where.
    pub fn a_nan_anywhere_changes_nothing(&self, device: impl Fn() -> Box<dyn Device>) -> BTreeSet<Site> {
        let mut clean = self.session(OnNonFinite::Skip, device());
        let good = (0..3).map(|step| clean.step(self.batch(step)).unwrap()).last().unwrap();
        let after = clean.snapshot().unwrap();
        let mut found = BTreeSet::new();
        for policy in [OnNonFinite::Skip, OnNonFinite::Stop] {
            let of = format!("{}, {:?}, {policy}", self.capture, self.gradients);
            let (mut session, mut sites) = self.opened(policy, device());
            let before = kept(session.snapshot().unwrap());
            let targets = sites.lock().unwrap().targets(self.places);
            let mut unread = BTreeMap::new();
            for target in targets {
                let (site, place) = target;
                let what = format!("{of}: a NaN in {} of {} {place} of rank {}", site.part, site.kind, site.rank);
                sites.lock().unwrap().arm(Some(target));
                found.insert(site);
                match (session.step(self.batch(2)), policy) {
                    (Ok(report), _) if !report.skipped => {
                        *unread.entry((site.kind, site.part)).or_insert(0) += 1;
                        assert_eq!((report.losses, report.grad_norm), (good.losses.clone(), good.grad_norm), "{what}");
                        assert!(session.snapshot().unwrap() == after, "{what}: nobody skipped it");
                        (session, sites) = self.opened(policy, device());
                        continue;
                    }
                    (Ok(report), OnNonFinite::Skip) => {
                        assert_eq!(report.epoch, 2, "{what}");
                        assert_eq!(report.mismatches.len(), usize::from(site.kind == "write_tag"), "{what}");
                    }
                    (Err(error), OnNonFinite::Stop) if site.kind == "write_tag" => {
                        assert_eq!(error.code(), Some(Code::KeyMismatch), "{what}: {error}");
                        assert!(error.to_string().contains("a slot holds stage "), "{what}: {error}");
                    }
                    (Err(Error::NotFinite { .. }), OnNonFinite::Stop) => {}
                    (other, _) => panic!("{what}: {other:?}"),
                }
                assert!(kept(session.snapshot().unwrap()) == before, "{what} changed something");
            }
            assert_eq!(unread, self.unread.iter().copied().collect(), "{of}: unread");
            sites.lock().unwrap().arm(None);
            session.step(self.batch(2)).unwrap();
            assert!(session.snapshot().unwrap() == after, "{of}");
        }
        let of_ranks: BTreeSet<u32> = found.iter().map(|site| site.rank).collect();
        let together = self.capture == CaptureMode::Step;
        let ranks = if together { 1 } else { self.checked.schedule.ranks };
        assert!(of_ranks.into_iter().eq(0..ranks), "{}: {found:?}", self.capture);
        found
    }
}

/// Kinds of action, and the schedule that has them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Actions {
    /// F, I and W, of ZB-H1.
    Split,
    /// F and B, of 1F1B.
    Whole,
    /// F, R, I and W, of ZB-H1.
    Again,
}

/// Microbatches of a group, where gradients are coalesced.
const GROUP: u32 = 2;

impl Actions {
    fn schedule(self, gradients: Gradients) -> Checked {
        let checked = match self {
            Actions::Split => zb_h1::<2, 4>().clone(),
            Actions::Whole => one_f_one_b::<2, 4>().clone(),
            Actions::Again => with_recomputation(&zb_h1::build(2, 2).unwrap(), |_| true),
        };
        if gradients == Gradients::Coalesced { checked.coalesced(GROUP).unwrap() } else { checked }
    }

    /// Three of a kind; all, where those of R have to be among them.
    const fn places(self) -> fn(usize) -> Vec<usize> {
        match self {
            Actions::Split | Actions::Whole => three,
            Actions::Again => all,
        }
    }

    /// One of these, where there is R.
    fn unread(self, of_r: Unread) -> Unread {
        if self == Actions::Again { of_r } else { &[] }
    }
}

/// R gives up the output of its stage, and F of what is run again its tape: on the first stage the last product and the sum
/// behind it, on the last one what is noted beside the loss; of two microbatches.
const UNREAD: Unread = &[(("add", ""), 2), (("cross_entropy", ""), 2), (("gemm", ""), 2)];

/// Beside these what F notes of each of five norms, and the sum in front of the last one, which goes on in registers.
const UNREAD_FUSED: Unread = &[
    (("add", ""), 2),
    (("cross_entropy", ""), 2),
    (("fused_layer_norm", "mean"), 10),
    (("fused_layer_norm", "rstd"), 10),
    (("fused_layer_norm", "sum"), 2),
    (("gemm", ""), 2),
];

/// The same of a Llama.
const UNREAD_FUSED_OF_LLAMA: Unread = &[
    (("add", ""), 2),
    (("cross_entropy", ""), 2),
    (("fused_rms_norm", "rstd"), 10),
    (("fused_rms_norm", "sum"), 2),
    (("gemm", ""), 2),
];

/// How a step is run.
#[derive(Clone, Copy, Debug)]
pub struct Run {
    pub actions: Actions,
    pub gradients: Gradients,
    pub capture: CaptureMode,
    /// Whether commands are fused.
    pub fused: bool,
}

impl Run {
    fn nothing_changes<S>(
        self,
        (config, optim): (GptConfig, OptimConfig),
        stages: &dyn Fn() -> Vec<S>,
        (kinds, unread): (&[&str], Unread),
        device: impl Fn() -> Box<dyn Device>,
    ) where
        S: Stage + Send + 'static,
        S::Tape: Send,
        S::Work: Send,
    {
        let Run { actions, gradients, capture, fused } = self;
        let checked = &actions.schedule(gradients);
        let (places, unread) = (actions.places(), actions.unread(unread));
        let spoilt = Spoilt { config, stages, checked, optim, gradients, capture, fused, places, unread };
        let found = spoilt.a_nan_anywhere_changes_nothing(device);
        println!("{self:?}: {} sites", found.len());
        for kind in kinds {
            assert!(found.iter().any(|site| site.kind == *kind), "{self:?}: no {kind} in {found:?}");
        }
    }

    /// A GPT of two blocks on two ranks.
    pub fn of_gpt(self, config: GptConfig, optim: OptimConfig, device: impl Fn() -> Box<dyn Device>) {
        let config = GptConfig { layers: 2, ..config };
        let stages = || config.stages(&[1, 1]).unwrap();
        let (kinds, unread) = if self.fused { (FUSED, UNREAD_FUSED) } else { (KINDS, UNREAD) };
        let mut kinds = kinds.to_vec();
        if self.gradients == Gradients::Coalesced {
            kinds.push("group_gemm");
        }
        self.nothing_changes::<GptStage>((config, optim), &stages, (&kinds, unread), device);
    }

    /// A Llama of these sizes, the ends of its tie on two ranks.
    pub fn of_llama(self, config: GptConfig, optim: OptimConfig, device: impl Fn() -> Box<dyn Device>) {
        let config = GptConfig { layers: 2, ..config };
        let GptConfig { vocab, hidden, heads, ffn, layers, seq, sequences, recipe } = config;
        let (kv_heads, rotary_base, tied) = (heads / 2, 500.0, true);
        let llama =
            LlamaConfig { vocab, hidden, heads, kv_heads, ffn, layers, seq, sequences, rotary_base, tied, recipe };
        let stages = || llama.stages(&[1, 1]).unwrap();
        let what = if self.fused { (FUSED_OF_LLAMA, UNREAD_FUSED_OF_LLAMA) } else { (KINDS_OF_LLAMA, UNREAD) };
        self.nothing_changes::<LlamaStage>((config, optim), &stages, what, device);
    }
}
