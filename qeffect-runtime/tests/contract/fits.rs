//! What does not fit into the memory of a device is refused with the table, before anything is allocated.

use std::sync::{Arc, Mutex};

use qeffect_core::bind::Gradients;
use qeffect_core::check::{self, Options};
use qeffect_core::plan::Checked;
use qeffect_core::token::{Bwd, Fwd, Token};
use qeffect_runtime::act::Act;
use qeffect_runtime::capture::CaptureMode;
use qeffect_runtime::cpu::CpuDevice;
use qeffect_runtime::cuda::{DryRun, LANES};
use qeffect_runtime::cx::Cx;
use qeffect_runtime::device::{Buf, BufSpec, Caps, Device, DeviceError, Memory};
use qeffect_runtime::error::{Error, Result};
use qeffect_runtime::gpt::{GptConfig, GptStage};
use qeffect_runtime::op::Effects;
use qeffect_runtime::session::{Session, SessionConfig};
use qeffect_runtime::stage::{Stage, StageSpec};
use qeffect_schedules::zb_h1;

use crate::common::batch;
use crate::watched::OPTIM;

const MICROBATCHES: u32 = 4;

fn model() -> GptConfig {
    let recipe = "fp8-delayed:history=4".parse().unwrap();
    GptConfig { vocab: 64, hidden: 64, heads: 2, ffn: 128, layers: 2, seq: 16, sequences: 1, recipe }
}

fn config(capture: CaptureMode) -> SessionConfig {
    SessionConfig { capture, ..SessionConfig::new(OPTIM, model().tokens()) }
}

fn schedule() -> Checked {
    zb_h1::<2, 4>().clone()
}

fn stages() -> Vec<GptStage> {
    model().stages(&[1, 1]).unwrap()
}

/// The cpu in the place of a GPU whose memory has an end.
struct Small {
    device: CpuDevice,
    name: &'static str,
    memory: Memory,
    /// Bytes of each buffer.
    taken: Arc<Mutex<Vec<usize>>>,
}

type Taken = Arc<Mutex<Vec<usize>>>;

/// Workspaces of which a third was taken before anybody asked.
fn small(name: &'static str, all: usize, taken: &Taken) -> Box<dyn Device> {
    let workspaces = all / 3;
    let memory = Memory { free: all - workspaces, workspaces, lanes: LANES };
    // A footprint is that of a GPU.
    let device = CpuDevice::with_caps(DryRun::new().caps());
    Box::new(Small { device, name, memory, taken: Arc::clone(taken) })
}

impl Device for Small {
    qeffect_runtime::hand_on!(device: caps spec issue write read poison instantiate launch drop_graph);

    fn name(&self) -> &str {
        self.name
    }
    fn memory(&self) -> Result<Option<Memory>, DeviceError> {
        Ok(Some(self.memory))
    }
    fn alloc(&mut self, spec: BufSpec) -> Result<Buf, DeviceError> {
        self.taken.lock().unwrap().push(spec.bytes());
        self.device.alloc(spec)
    }
}

/// The table, if the session is refused.
fn refused<S: Stage>(session: Result<Session<S>>, taken: &Taken) -> Option<String> {
    let error = session.err()?;
    assert!(matches!(&error, Error::Config(_)), "{error}");
    assert!(taken.lock().unwrap().is_empty(), "{} buffers were made", taken.lock().unwrap().len());
    Some(error.to_string())
}

#[test]
fn on_one_device_just_enough_fits_and_a_byte_less_is_refused() {
    for capture in CaptureMode::ALL {
        let footprint = Session::footprint(schedule(), stages(), config(capture)).unwrap();
        let taken = Taken::default();
        let open =
            |all: usize| Session::on_one_device(schedule(), stages(), config(capture), small("gpu", all, &taken));
        let said = refused(open(footprint.peak() - 1), &taken).expect("a byte less is refused");
        assert!(said.starts_with("gpu: the run does not fit into "), "{said}");
        assert!(said.ends_with(&footprint.to_string()), "{said}\n{footprint}");

        let mut session = open(footprint.peak()).unwrap();
        session.step(batch(&model(), 0, MICROBATCHES)).unwrap();
        let held = footprint.state + footprint.tapes + footprint.works + footprint.messages;
        assert_eq!(taken.lock().unwrap().iter().sum::<usize>(), held, "{capture}");
        // The blocks that buffers lie in have room for what an evaluation of this model takes.
        let forward = check::check(schedule().schedule.forward_only(), &Options::AT_START).unwrap();
        let evaluation = session.evaluation(forward).unwrap();
        session.evaluate(&evaluation, batch(&model(), 0, MICROBATCHES)).unwrap();
        session.step(batch(&model(), 1, MICROBATCHES)).unwrap();
        let after: usize = taken.lock().unwrap().iter().sum();
        let room = footprint.device - LANES * (32 << 20);
        assert!(after - held <= room + footprint.evaluation, "{capture}: {held} → {after}, {footprint}");
    }
}

/// However many steps there are.
#[test]
fn later_steps_take_no_more() {
    let model = GptConfig { seq: 256, ..model() };
    for capture in CaptureMode::ALL {
        for gradients in [Gradients::Copied, Gradients::Direct, Gradients::Coalesced] {
            let schedule = match gradients {
                Gradients::Coalesced => schedule().coalesced(2).unwrap(),
                Gradients::Copied | Gradients::Direct => schedule(),
            };
            let config = SessionConfig { capture, gradients, ..SessionConfig::new(OPTIM, model.tokens()) };
            let stages = || model.stages(&[1, 1]).unwrap();
            let footprint = Session::footprint(schedule.clone(), stages(), config).unwrap();
            let held = footprint.state + footprint.tapes + footprint.works + footprint.messages;
            let taken = Taken::default();
            let mut session =
                Session::on_one_device(schedule, stages(), config, small("gpu", 1 << 40, &taken)).unwrap();
            for step in 0..4 {
                session.step(batch(&model, step, MICROBATCHES)).unwrap();
                assert_eq!(taken.lock().unwrap().iter().sum::<usize>(), held, "{capture}, {gradients:?}, step {step}");
            }
        }
    }
}

/// Bytes of the blocks that buffers lie in, as a GPU takes them.
fn blocks(buffers: &[usize]) -> usize {
    const BLOCK: usize = 32 << 20;
    let (mut all, mut left) = (0, 0);
    for bytes in buffers.iter().map(|bytes| bytes.next_multiple_of(256)) {
        if bytes > left {
            left = bytes.max(BLOCK);
            all += left;
        }
        left -= bytes;
    }
    all
}

/// A stage whose evaluation computes with more than a step of training does.
struct Hungry(GptStage);

impl Stage for Hungry {
    type Tape = <GptStage as Stage>::Tape;
    type Work = <GptStage as Stage>::Work;

    fn spec(&self) -> &StageSpec {
        self.0.spec()
    }
    fn effects(&self) -> Effects {
        self.0.effects()
    }
    fn forward(&self, cx: &mut Cx<'_>, x: &[Act], token: Token<Fwd>) -> Result<(Vec<Act>, Self::Tape, Token<Fwd>)> {
        self.0.forward(cx, x, token)
    }
    fn input_grad(
        &self,
        cx: &mut Cx<'_>,
        dy: &[Act],
        tape: Self::Tape,
        token: Token<Bwd>,
    ) -> Result<(Vec<Act>, Self::Work, Token<Bwd>)> {
        self.0.input_grad(cx, dy, tape, token)
    }
    fn weight_grad(&self, cx: &mut Cx<'_>, work: Self::Work) -> Result<()> {
        self.0.weight_grad(cx, work)
    }
    fn evaluate(&self, cx: &mut Cx<'_>, x: &[Act]) -> Result<Vec<Act>> {
        let more = cx.lease(4096, 8192)?;
        let y = self.0.evaluate(cx, x)?;
        cx.free(more)?;
        Ok(y)
    }
}

/// An evaluation that the blocks of a step have no room for: what it takes is what was told.
#[test]
fn an_evaluation_counts() {
    let told = config(CaptureMode::Step);
    let stages = || stages().into_iter().map(Hungry).collect();
    let footprint = Session::footprint(schedule(), stages(), told).unwrap();
    assert_eq!(footprint.peak(), footprint.bytes() + footprint.evaluation + footprint.search);
    let taken = Taken::default();
    let open = |all| Session::on_one_device(schedule(), stages(), told, small("gpu", all, &taken));
    let said = refused(open(footprint.peak() - 1), &taken).expect("it trains, and cannot be evaluated");
    assert!(said.contains("\nevaluation                              134.2 MB\n"), "{said}");

    let mut session = open(footprint.peak()).unwrap();
    session.step(batch(&model(), 0, MICROBATCHES)).unwrap();
    let before = blocks(&taken.lock().unwrap());
    let forward = check::check(schedule().schedule.forward_only(), &Options::AT_START).unwrap();
    let evaluation = session.evaluation(forward).unwrap();
    session.evaluate(&evaluation, batch(&model(), 0, MICROBATCHES)).unwrap();
    let after = blocks(&taken.lock().unwrap());
    // One per rank, of 64 MiB.
    assert_eq!((after - before, footprint.evaluation), (128 << 20, 128 << 20));
}

#[test]
fn ranks_are_held_against_their_own_devices_and_share_what_they_share() {
    let taken = Taken::default();
    let plenty = 1 << 40;
    let open = |capture, names: [&'static str; 2], all: [usize; 2]| {
        taken.lock().unwrap().clear();
        let of = |rank: qeffect_core::ids::Rank| Ok(small(names[rank.index()], all[rank.index()], &taken));
        Session::with_devices(schedule(), stages(), config(capture), of)
    };
    for capture in CaptureMode::ALL {
        let refused = |names, all| refused(open(capture, names, all), &taken);
        let said = refused(["a", "b"], [plenty, 1 << 20]).expect("b is too small");
        assert!(said.starts_with("b: the run does not fit into 1.0 MB of free device memory\n"), "{said}");
        assert!(said.contains("\nactivations and tapes ") && said.contains("\ntogether "), "{said}");
        assert!(refused(["a", "b"], [1 << 20, plenty]).expect("a is too small").starts_with("a: "));
        // The least that the larger one takes, to the byte.
        let (mut less, mut enough) = (1 << 20, plenty);
        while enough - less > 1 {
            let middle = less + (enough - less) / 2;
            match refused(["a", "b"], [middle; 2]) {
                Some(_) => less = middle,
                None => enough = middle,
            }
        }
        let mut session = open(capture, ["a", "b"], [enough; 2]).unwrap();
        session.step(batch(&model(), 0, MICROBATCHES)).unwrap();
        drop(session);
        // Both on one: memory that is free is free once, workspaces are each one's own.
        let said = refused(["one", "one"], [enough; 2]).expect("half of it is missing");
        assert!(said.starts_with("one: the run does not fit into "), "{said}");
        assert!(refused(["one", "one"], [3 * enough; 2]).is_none());
    }
}

/// A device that does not tell takes everything, as before; caps are the device's own.
#[test]
fn a_device_without_an_end_is_not_asked_for_more() {
    let device = CpuDevice::with_caps(Caps::default());
    assert_eq!(device.memory(), Ok(None));
    let odd = GptConfig { recipe: "f32".parse().unwrap(), ..model() };
    let session = |device: Box<dyn Device>| {
        let stages = odd.stages(&[1, 1]).unwrap();
        Session::on_one_device(schedule(), stages, SessionConfig::new(OPTIM, odd.tokens()), device).map(drop)
    };
    session(Box::new(device)).unwrap();
    // Refused by the rehearsal as the device itself would refuse it.
    let said = session(small("gpu", 1 << 40, &Taken::default())).unwrap_err().to_string();
    assert!(said.contains("recipe f32 does not run on gpu"), "{said}");
}
