//! What others met, done to a GPU as they did it: memory that is changed between replays, that holds what was there before, and
//! orders that were not thought of. Ids are those of `docs/cases.md`.

use std::sync::{Arc, Mutex};

use qeffect_core::bind::Gradients;
use qeffect_core::check::{Options, check};
use qeffect_core::code::Code;
use qeffect_core::dtype::Dtype;
use qeffect_core::fp8::Fp8;
use qeffect_core::ids::{Rank, Stage as StageId};
use qeffect_core::lang;
use qeffect_core::plan::{Checked, Op};
use qeffect_kernels::graph::Capture;
use qeffect_kernels::{Buffer, memory, module};
use qeffect_runtime::capture::CaptureMode;
use qeffect_runtime::cmd::Cmd;
use qeffect_runtime::cmd::effects::Mode;
use qeffect_runtime::cuda::CudaDevice;
use qeffect_runtime::device::{Buf, BufSpec, Device, DeviceError, GraphId};
use qeffect_runtime::session::{Session, SessionConfig};
use qeffect_schedules::{one_f_one_b, zb_h1, zb_v};

use crate::common::one_layer::{Bench, constant};
use crate::common::{Solo, batch};
use crate::rig::{alone, beside_others};
use crate::sessions::{blocks, in_groups, session};
use crate::training::{MICROBATCHES, OPTIM, RECIPES, Values, model, same};

fn gpu() -> Box<dyn Device> {
    Box::new(CudaDevice::new(0).unwrap())
}

fn is_codes(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::E4M3 | Dtype::E5M2)
}

/// What is done to a device behind the back of its session.
#[derive(Default)]
struct Done {
    /// Masters with their elements; of FP8 weights codes, transposed codes, factors, and histories of weights.
    masters: Vec<(String, Buf, usize)>,
    caches: Vec<(String, Buf)>,
    /// Of each graph: whether it has a forward, and whether it casts weights.
    graphs: Vec<[bool; 2]>,
    /// What the caches held when the masters were overwritten, and after the commit.
    before: Option<Vec<Vec<u8>>>,
    after: Option<Vec<Vec<u8>>>,
    /// Replays from there to the commit.
    replays: usize,
}

impl Done {
    /// Of what is cast: nothing else reads them before the optimizer.
    fn masters(&self) -> impl Iterator<Item = &(String, Buf, usize)> {
        let is_cast = |path: &str| self.caches.iter().any(|(name, _)| *name == format!("{path} (codes)"));
        self.masters.iter().filter(move |(path, ..)| is_cast(path))
    }
}

/// A GPU whose masters are overwritten after the first replay of a forward, and watched from then on to the next commit.
struct Overwritten {
    device: CudaDevice,
    done: Arc<Mutex<Done>>,
}

impl Overwritten {
    fn contents(&mut self, caches: &[(String, Buf)]) -> Vec<Vec<u8>> {
        let mut read = |buf: Buf| {
            let mut bytes = vec![0; self.device.spec(buf).unwrap().bytes()];
            self.device.read(buf, &mut bytes).unwrap();
            bytes
        };
        caches.iter().map(|(_, buf)| read(*buf)).collect()
    }
}

impl Device for Overwritten {
    qeffect_runtime::hand_on!(device: name caps spec issue write read poison drop_graph);

    fn alloc(&mut self, spec: BufSpec) -> Result<Buf, DeviceError> {
        let (name, elements) = (spec.name.clone(), spec.elements());
        let buf = self.device.alloc(spec)?;
        let mut done = self.done.lock().unwrap();
        if let Some(path) = name.strip_suffix(" (master)") {
            done.masters.push((path.into(), buf, elements));
        }
        let of_weight = ["(codes)", "(transposed codes)", "(factor)"].iter().any(|what| name.ends_with(what));
        if of_weight || name == "weight amax history" {
            done.caches.push((name, buf));
        }
        Ok(buf)
    }
    fn instantiate(&mut self, cmds: Vec<Cmd>) -> Result<GraphId, DeviceError> {
        let forward = cmds.iter().any(|cmd| ["embed", "attention"].contains(&cmd.name()));
        let written = cmds.iter().flat_map(|cmd| cmd.effects(|_| None)).filter(|access| access.mode != Mode::Read);
        let mut done = self.done.lock().unwrap();
        let casts = written.into_iter().any(|access| {
            let is_it = |(name, buf): &(String, Buf)| *buf == access.buf && name.ends_with("(codes)");
            done.caches.iter().any(is_it)
        });
        let graph = self.device.instantiate(cmds)?;
        assert_eq!(graph.index(), done.graphs.len());
        done.graphs.push([forward, casts]);
        Ok(graph)
    }
    fn launch(&mut self, graph: GraphId) -> Result<(), DeviceError> {
        self.device.launch(graph)?;
        let shared = Arc::clone(&self.done);
        let mut done = shared.lock().unwrap();
        let [forward, casts] = done.graphs[graph.index()];
        if done.before.is_none() && forward {
            for (_, buf, elements) in done.masters() {
                self.device.write(*buf, bytemuck::cast_slice(&vec![0.375f32; *elements]))?;
            }
            done.before = Some(self.contents(&done.caches));
        } else if done.before.is_some() && done.after.is_none() {
            let now = self.contents(&done.caches);
            if casts {
                done.after = Some(now);
            } else {
                assert!(done.before.as_ref() == Some(&now), "replay {} changed a cache", done.replays);
                done.replays += 1;
            }
        }
        Ok(())
    }
}

/// Case B11: masters that are overwritten after the first replay change nothing of codes, transposed codes, factors and maxima
/// of weights, nor of any loss, until the step is committed; the commit then changes all of them.
#[test]
fn overwritten_masters_are_not_seen_before_the_commit() {
    let Some(_turn) = beside_others() else { return };
    const M: u32 = 3;
    let config = model(RECIPES[0]);
    let checked = || zb_h1::build(1, i64::from(M)).unwrap();
    let how = (Gradients::Copied, CaptureMode::Action);
    let done = Arc::new(Mutex::new(Done::default()));
    let device = Overwritten { device: CudaDevice::new(0).unwrap(), done: Arc::clone(&done) };
    let mut overwritten = session(&config, checked(), how, Box::new(device)).unwrap();
    let mut plain = session(&config, checked(), how, gpu()).unwrap();
    let [found, want] =
        [&mut overwritten, &mut plain].map(|session| session.step(batch(&config, 0, M)).unwrap().losses);
    assert_eq!(found, want, "forwards read what was cached");
    let done = done.lock().unwrap();
    let weights = 4 * config.layers + 1;
    assert_eq!((done.masters().count(), done.caches.len()), (weights, 3 * weights + 1), "{:?}", done.caches);
    // F, I and W of three microbatches, but for the first F.
    assert!(done.replays >= 3 * M as usize - 1, "{} replays", done.replays);
    let (before, after) = (done.before.as_ref().unwrap(), done.after.as_ref().unwrap());
    for ((name, _), (before, after)) in done.caches.iter().zip(before.iter().zip(after)) {
        assert!(before != after, "{name} is as it was before the commit");
    }
}

/// A GPU on which everything in FP8 but weights is filled with one byte before every launch.
struct Filled {
    device: CudaDevice,
    byte: u8,
    codes: Arc<Mutex<Vec<(Buf, BufSpec)>>>,
}

impl Device for Filled {
    qeffect_runtime::hand_on!(device: name caps spec issue write read poison instantiate drop_graph);

    fn alloc(&mut self, spec: BufSpec) -> Result<Buf, DeviceError> {
        let buf = self.device.alloc(spec.clone())?;
        if is_codes(spec.dtype) && !spec.name.contains("codes") {
            self.codes.lock().unwrap().push((buf, spec));
        }
        Ok(buf)
    }
    fn launch(&mut self, graph: GraphId) -> Result<(), DeviceError> {
        for (buf, spec) in self.codes.lock().unwrap().iter() {
            self.device.write(*buf, &vec![self.byte; spec.bytes()])?;
        }
        self.device.launch(graph)
    }
}

/// Case B25: regions of groups, whose members have 16 and 32 tokens in blocks of 128, hold other bytes than zero before every
/// step: NaN of both signs in both formats. No loss, gradient, scale or maximum has another bit.
#[test]
fn what_lay_between_members_of_a_group_is_not_seen() {
    let Some(_turn) = beside_others() else { return };
    const FEW: u64 = 4;
    for sequences in [1, 2] {
        let config = qeffect_runtime::gpt::GptConfig { sequences, ..model(RECIPES[0]) };
        let tokens = config.tokens();
        assert_eq!(tokens, 16 * sequences);
        let how = (Gradients::Coalesced, CaptureMode::Step);
        let checked = || in_groups(zb_v::<2, 4>().clone(), Gradients::Coalesced);
        let run = |device: Box<dyn Device>| -> (Vec<Vec<f64>>, Values) {
            let mut session = session(&config, checked(), how, device).unwrap();
            let step = |step| session.step(batch(&config, step, MICROBATCHES)).unwrap().losses;
            let losses = (0..FEW).map(step).collect();
            (losses, session.snapshot().unwrap().values)
        };
        let (losses, values) = run(gpu());
        let finite = |bytes: &[u8]| bytes.as_chunks::<4>().0.iter().all(|x| f32::from_le_bytes(*x).is_finite());
        let floats = values.values().filter(|value| value.dtype == Dtype::F32);
        assert!(floats.into_iter().all(|value| finite(&value.bytes)));
        for byte in [0x7F, 0xFF] {
            let codes = Arc::default();
            let device = Filled { device: CudaDevice::new(0).unwrap(), byte, codes: Arc::clone(&codes) };
            let (found_losses, found) = run(Box::new(device));
            let what = format!("{tokens} tokens, filled with {byte:#x}");
            assert_eq!(found_losses, losses, "{what}");
            same(&values, &found, &what);
            let codes = codes.lock().unwrap();
            let regions = codes.iter().filter(|(_, spec)| spec.cols == 2 * 128).count();
            assert!(regions >= 2, "{what}: both sides of a product: {codes:?}");
        }
    }
}

/// Case B49: nothing is tracked by events from the first allocation on, and no call, whether in a capture, a replay or at the end
/// of what was captured, leaves a fault behind in the context.
#[test]
fn a_context_tracks_nothing_and_keeps_no_fault() {
    let Some(_turn) = alone() else { return };
    let context = module::context(0).unwrap();
    assert!(!context.is_event_tracking());
    let buffer = Buffer::<f32>::poisoned(&context, 1024).unwrap();
    {
        let lanes = [context.new_stream().unwrap(), context.new_stream().unwrap()];
        let events = [context.new_event(None).unwrap(), context.new_event(None).unwrap()];
        let capture = Capture::begin(&lanes, &events).unwrap();
        memory::fill(&lanes[1], buffer.span(), 3.0).unwrap();
        let graph = capture.end(&events).unwrap();
        context.check_err().unwrap();
        graph.launch(&lanes[0]).unwrap();
        lanes[0].synchronize().unwrap();
    }
    context.check_err().unwrap();
    assert_eq!(buffer.read().unwrap(), [3.0; 1024]);

    let mut device = CudaDevice::new(0).unwrap();
    let _older = device.stored_fault(); // tests before this one have made faults on purpose
    let [x, y] = ["x", "y"].map(|name| device.alloc(BufSpec::new(name, Dtype::F32, 4, 64)).unwrap());
    for round in 0..3 {
        let list = vec![Cmd::Fill { dst: x, value: round as f32 }, Cmd::Copy { src: x, dst: y }];
        let graph = device.instantiate(list).unwrap();
        device.stored_fault().unwrap();
        device.launch(graph).unwrap();
        let mut found = [0.0f32; 256];
        device.read(y, bytemuck::cast_slice_mut(&mut found)).unwrap();
        assert_eq!(found, [round as f32; 256]);
        device.drop_graph(graph).unwrap();
        device.stored_fault().unwrap();
    }
}

/// Case B01: of four microbatches the first has the largest maximum.
#[test]
fn the_first_of_four_microbatches_counts() {
    let Some(_turn) = beside_others() else { return };
    for (update, scale, history) in [("microbatch", 56.0, [0.0, 1.0, 1.0, 1.0]), ("step", 1.0, [8.0, 0.0, 0.0, 0.0])] {
        let recipe = format!("fp8-delayed:history=4,update={update}");
        let mut bench = Bench::on(gpu(), &recipe, 4, false);
        let step = |bench: &mut Bench, maxima: [f64; 4]| {
            bench.begin();
            for (m, amax) in (0..).zip(maxima) {
                let (_, tape) = bench.forward(m, &constant(amax));
                if (m, maxima[0]) == (0, 1.0) && update == "microbatch" {
                    assert_eq!(bench.scale("input"), 448.0, "8 has left the history");
                }
                let (_, work) = bench.input_grad(m, &constant(1.0), tape);
                bench.weight_grad(m, work).unwrap();
            }
        };
        step(&mut bench, [8.0, 1.0, 1.0, 1.0]);
        assert_eq!((bench.scale("input"), bench.floats("layer.input/history")), (scale, history.to_vec()), "{update}");
        assert!(bench.settle().commit);
        bench.shard.commit().unwrap();
        assert_eq!(bench.scale("input"), 56.0, "{update}");
        step(&mut bench, [1.0; 4]);
    }
}

/// Case B08: an update in place, at the address that the cache was made from, is in the cache after the commit; a plan that
/// does not make the cache current is refused before anything runs.
#[test]
fn an_update_in_place_is_in_the_cache_and_a_stale_one_is_refused() {
    let Some(_turn) = beside_others() else { return };
    let mut bench = Bench::starting_with(gpu(), "fp8-delayed:history=4,margin=1", 1, 1.0);
    let weight = |bench: &mut Bench| -> Vec<f32> {
        let factor = bench.floats("layer.weight/scale_inv")[0];
        let codes = &bench.shard.export().unwrap()["layer.weight/codes"];
        codes.bytes.iter().map(|code| Fp8::E4M3.decode(*code) * factor).collect()
    };
    for (is, next) in [(1.0, 2.0), (2.0, 4.0), (4.0, 4.0)] {
        assert!(weight(&mut bench).iter().all(|x| f64::from(*x) == is), "{is}");
        bench.begin();
        let (y, tape) = bench.forward(0, &constant(1.0));
        assert_eq!(y, constant(16.0 * is));
        let (_, work) = bench.input_grad(0, &constant(1.0), tape);
        bench.weight_grad(0, work).unwrap();
        assert!(bench.settle().commit);
        bench.shard.set_param("layer.weight", &[next; 256]).unwrap(); // as the optimizer would
        bench.shard.commit().unwrap();
    }

    let config = model(RECIPES[0]);
    let mut stale = one_f_one_b::build(1, i64::from(MICROBATCHES)).unwrap();
    let nodes: Vec<_> = stale.plan.nodes.iter().filter(|node| node.op != Op::Refresh).copied().collect();
    assert_eq!(nodes.len() + 1, stale.plan.nodes.len());
    stale.plan.starts = vec![0, nodes.len() as u32].into();
    stale.plan.nodes = nodes.into();
    // The session that finds out what it will take of the GPU goes through a step, which is refused.
    let refused = session(&config, stale, (Gradients::Copied, CaptureMode::Eager), gpu());
    let Err(error) = refused else { panic!("a plan without `refresh` has a session") };
    assert_eq!(error.code(), Some(Code::StaleCache), "{error}");
}

/// Three microbatches whose backwards are one full and two split ones, the last of them in the other order.
fn mixed() -> Checked {
    let text = "mixed<P, M>; ranks: P; microbatches: M; stages: P; place: |s| s; rank |r| { \
                for m in 0..M { F(r, m); } B(r, 0); I(r, 1); I(r, 2); W(r, 2); W(r, 1); }";
    let program = lang::read("mixed.sched", text).0.unwrap();
    check(lang::interpret(&program, &[1, 3]).unwrap(), &Options::AT_START).unwrap()
}

/// Case B56: full and split backwards in one step have the gradients of split ones alone, in every mode.
#[test]
fn full_and_split_backwards_give_the_bits_of_split_ones() {
    let Some(_turn) = beside_others() else { return };
    const FEW: u64 = 4;
    let config = model(RECIPES[0]);
    let mut solo = Solo::on(gpu(), &config, &[config.layers], 3, OPTIM, (Gradients::Copied, 1));
    let want: Vec<(Vec<f64>, Values)> = (0..FEW)
        .map(|step| {
            assert!(solo.step(&batch(&config, step, 3)).1.commit);
            (solo.shard.losses().unwrap(), solo.shard.export().unwrap())
        })
        .collect();
    for capture in CaptureMode::ALL {
        let mut found = session(&config, mixed(), (Gradients::Copied, capture), gpu()).unwrap();
        for step in 0..FEW {
            let what = format!("{capture}, step {step}");
            let losses = found.step(batch(&config, step, 3)).unwrap().losses;
            let (want_losses, values) = &want[step as usize];
            assert_eq!(losses, *want_losses, "{what}");
            same(values, &found.snapshot().unwrap().values, &what);
        }
    }
}

/// Cases B41 and B56: gradients of a stage are finished once, after the last action that adds to them has ended on the GPU,
/// whichever microbatch and kind of backward that is.
#[test]
fn gradients_are_finished_once_after_the_last_that_adds_to_them() {
    let Some(_turn) = beside_others() else { return };
    let config = model(RECIPES[0]);
    for (name, checked) in
        [("mixed", mixed()), ("zb_h1", zb_h1::build(2, 4).unwrap()), ("zb_v", zb_v::<2, 4>().clone())]
    {
        let microbatches = checked.schedule.microbatches;
        let stages = checked.schedule.stages;
        for capture in CaptureMode::ALL {
            let made = config.stages(&blocks(&config, stages)).unwrap();
            let session_config = SessionConfig { capture, ..SessionConfig::new(OPTIM, config.tokens()) };
            let mut session = Session::on_one_device(checked.clone(), made, session_config, gpu()).unwrap();
            for step in 0..2 {
                let (_, ranks) = session.step_measured(batch(&config, step, microbatches)).unwrap();
                for stage in (0..stages).map(StageId) {
                    let what = format!("{name}, {capture}, step {step}, stage {stage}");
                    let of = |ops: &'static [Op]| {
                        let spans = ranks.iter().flatten();
                        spans.filter(move |span| span.stage == stage && ops.contains(&span.op))
                    };
                    let reduces: Vec<_> = of(&[Op::Reduce]).collect();
                    let adding: Vec<_> = of(&[Op::WeightGrad, Op::FullBackward]).collect();
                    assert_eq!((reduces.len(), adding.len()), (1, microbatches as usize), "{what}");
                    let last = adding.iter().map(|span| span.end).max().unwrap();
                    assert!(last <= reduces[0].start, "{what}: {last:?}, {:?}", reduces[0]);
                    let rank = ranks.iter().position(|spans| spans.contains(reduces[0])).unwrap();
                    assert_eq!(checked.schedule.placement[stage.index()], Rank(rank as u32), "{what}");
                }
            }
        }
    }
}
