//! Graphs against the commands one by one, and against themselves.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use qeffect_core::bind::Gradients;
use qeffect_core::dtype::Dtype;
use qeffect_kernels::graph::{Capture, Shape};
use qeffect_kernels::{Buffer, CudaStream, Span, memory, module};
use qeffect_runtime::capture::CaptureMode;
use qeffect_runtime::cmd::effects::Mode;
use qeffect_runtime::cmd::{Cmd, Operand};
use qeffect_runtime::cuda::CudaDevice;
use qeffect_runtime::device::{Buf, BufSpec, Device, DeviceError, GraphId};
use qeffect_runtime::fuse::fuse;
use qeffect_schedules::zb_v;

use crate::common::{Solo, batch};
use crate::rig::{Pair, beside_others};
use crate::sessions::{in_groups, session};
use crate::training::{MICROBATCHES, OPTIM, RECIPES, STEPS, Values, model, same, solo};

const PLACEMENTS: [Gradients; 2] = [Gradients::Copied, Gradients::Direct];

/// What a recorder has seen.
#[derive(Default)]
struct Seen {
    /// Commands of a step up to its measurement.
    list: Vec<Cmd>,
    done: bool,
    shapes: Vec<Shape>,
    /// Elements of every buffer.
    buffers: BTreeMap<Buf, usize>,
}

/// A GPU that writes down what it is asked to do.
struct Recorder {
    device: CudaDevice,
    seen: Arc<Mutex<Seen>>,
}

impl Device for Recorder {
    qeffect_runtime::hand_on!(device: name caps spec write read poison launch drop_graph);

    fn alloc(&mut self, spec: BufSpec) -> Result<Buf, DeviceError> {
        let elements = spec.elements();
        let buf = self.device.alloc(spec)?;
        self.seen.lock().unwrap().buffers.insert(buf, elements);
        Ok(buf)
    }
    fn issue(&mut self, cmd: &Cmd) -> Result<(), DeviceError> {
        let mut seen = self.seen.lock().unwrap();
        seen.done |= matches!(cmd, Cmd::SumSquares { .. });
        if !seen.done {
            seen.list.push(cmd.clone());
        }
        self.device.issue(cmd)
    }
    fn instantiate(&mut self, cmds: Vec<Cmd>) -> Result<GraphId, DeviceError> {
        let graph = self.device.instantiate(cmds)?;
        self.seen.lock().unwrap().shapes.push(self.device.graph_shape(graph)?);
        Ok(graph)
    }
}

/// A step up to its measurement is one graph; every later step launches it. Gradients that are added in place give the bits
/// of those that are copied and then summed, fused commands those of their parts.
// Case B23.
#[test]
fn a_replayed_step_gives_the_bits_of_the_eager_one() {
    let Some(_turn) = beside_others() else { return };
    for (recipe, gradients) in RECIPES.into_iter().flat_map(|recipe| PLACEMENTS.map(|placement| (recipe, placement))) {
        let config = model(recipe);
        let mut eager = solo(&config, Gradients::Copied);
        let want: Vec<(Vec<f64>, Values)> = (0..STEPS)
            .map(|step| {
                eager.step(&batch(&config, step, MICROBATCHES));
                (eager.shard.losses().unwrap(), eager.shard.export().unwrap())
            })
            .collect();
        for (lanes, fused) in [(1, false), (4, false), (4, true)] {
            let seen = Arc::new(Mutex::new(Seen::default()));
            let device = CudaDevice::with_lanes(0, lanes).unwrap();
            let device = Box::new(Recorder { device, seen: seen.clone() });
            let mut solo = Solo::on(device, &config, &[config.layers], MICROBATCHES, OPTIM, (gradients, 1));
            seen.lock().unwrap().list.clear(); // a step begins after the prologue
            seen.lock().unwrap().done = false;
            // What there is before a step outlives it; what a step leases does not.
            let kept: BTreeSet<Buf> = seen.lock().unwrap().buffers.keys().copied().collect();
            solo.step(&batch(&config, 0, MICROBATCHES));
            let mut list = std::mem::take(&mut seen.lock().unwrap().list);
            assert!(list.len() > 300, "{} commands", list.len());
            if fused {
                let (buffers, all) = (seen.lock().unwrap().buffers.clone(), list.len());
                list = fuse(list, &|buf| kept.contains(&buf), &|buf| buffers.get(&buf).copied());
                println!("{all} commands, {} after fusion", list.len());
                assert!(list.iter().any(|cmd| matches!(cmd, Cmd::Fused(_))));
            }
            let before = solo.shard.export().unwrap();
            let graph = solo.shard.device().instantiate(list.clone()).unwrap();
            let again = solo.shard.device().instantiate(list).unwrap();
            same(&before, &solo.shard.export().unwrap(), "making a graph changes nothing");
            solo.shard.device().drop_graph(again).unwrap();
            assert_eq!(solo.shard.device().launch(again), Err(DeviceError::UnknownGraph(again)));
            {
                let shapes = &seen.lock().unwrap().shapes;
                assert_eq!(shapes[0], shapes[1], "capturing twice gives the same graph");
                println!("{recipe}, {gradients:?}, {lanes} lanes, fused: {fused}: {:?}", shapes[0]);
            }
            for step in 1..STEPS {
                let what = format!("{recipe}, {gradients:?}, {lanes} lanes, fused: {fused}, step {step}");
                solo.shard.load(&batch(&config, step, MICROBATCHES)).unwrap();
                solo.shard.device().launch(graph).unwrap();
                solo.agree();
                solo.shard.commit().unwrap();
                assert!(solo.shard.verdict().unwrap().commit, "{what}");
                let (losses, values) = &want[step as usize];
                assert_eq!(solo.shard.losses().unwrap(), *losses, "{what}");
                same(values, &solo.shard.export().unwrap(), &what);
            }
        }
    }
}

/// A list that was captured.
struct List {
    names: BTreeSet<&'static str>,
    shape: Shape,
    /// How often codes of a weight are written, before the step is settled and after.
    casts: [usize; 2],
}

type Made = Arc<Mutex<Vec<List>>>;

/// A GPU that makes every graph twice and compares.
struct Twice {
    device: CudaDevice,
    made: Made,
}

impl Device for Twice {
    qeffect_runtime::hand_on!(device: name caps alloc spec issue write read poison launch drop_graph);

    fn instantiate(&mut self, cmds: Vec<Cmd>) -> Result<GraphId, DeviceError> {
        let names = cmds.iter().map(Cmd::name).collect();
        let (mut casts, mut settled) = ([0; 2], 0);
        for cmd in &cmds {
            let written = cmd.effects(|_| None).into_iter().filter(|access| access.mode != Mode::Read);
            for spec in written.filter_map(|access| self.device.spec(access.buf).ok()) {
                let codes = matches!(spec.dtype, Dtype::E4M3 | Dtype::E5M2) && spec.name.contains("weight");
                casts[settled] += usize::from(codes);
            }
            settled |= usize::from(matches!(cmd, Cmd::Settle { .. }));
        }
        let [graph, again] = [self.device.instantiate(cmds.clone())?, self.device.instantiate(cmds)?];
        let shape = self.device.graph_shape(graph)?;
        assert_eq!(self.device.graph_shape(again)?, shape, "capturing twice gives the same graph");
        self.device.drop_graph(again)?;
        self.made.lock().unwrap().push(List { names, shape, casts });
        Ok(graph)
    }
}

/// The step of a session, from its first forward to its commit, in as many lanes as a device has; making a graph of it
/// twice changes nothing of its numbers. No forward in it casts a weight: commit does, both layouts of each.
// Case B11.
#[test]
fn a_session_s_step_is_the_same_graph_when_it_is_captured_again() {
    let Some(_turn) = beside_others() else { return };
    let config = model(RECIPES[0]);
    for (gradients, capture) in [
        (Gradients::Copied, CaptureMode::Step),
        (Gradients::Direct, CaptureMode::Step),
        (Gradients::Coalesced, CaptureMode::Step),
        (Gradients::Coalesced, CaptureMode::Action),
    ] {
        let what = format!("{gradients:?}, {capture}");
        let checked = in_groups(zb_v::<2, 4>().clone(), gradients);
        let made = Made::default();
        let device = Box::new(Twice { device: CudaDevice::new(0).unwrap(), made: Arc::clone(&made) });
        let mut twice = session(&config, checked.clone(), (gradients, capture), device).unwrap();
        let plain = Box::new(CudaDevice::new(0).unwrap());
        let mut once = session(&config, checked, (gradients, capture), plain).unwrap();
        for step in 0..3 {
            let [found, want] =
                [&mut twice, &mut once].map(|session| session.step(batch(&config, step, MICROBATCHES)).unwrap().losses);
            assert_eq!(found, want, "{what}, step {step}");
        }
        same(&once.snapshot().unwrap().values, &twice.snapshot().unwrap().values, &what);
        let made = made.lock().unwrap();
        for name in ["embed", "cross_entropy", "sum_squares", "settle", "adamw"] {
            assert!(made.iter().any(|list| list.names.contains(name)), "{what}: no {name}");
        }
        for list in made.iter() {
            let forward = list.names.contains("embed") || list.names.contains("attention");
            assert!(!forward || list.casts[0] == 0, "{what}: {:?}", list.casts);
        }
        let casts: usize = made.iter().flat_map(|list| list.casts).sum();
        assert_eq!(casts, 2 * (4 * config.layers + 1), "{what}: four weights of a block and the head");
        println!("{what}: {} graphs, {} nodes", made.len(), made.iter().map(|list| list.shape.nodes).sum::<usize>());
    }
}

/// A capture that is given up after a fault leaves its streams as they were: they take work, and another capture.
// Case B23.
#[test]
fn a_capture_that_fails_leaves_its_streams_usable() {
    let Some(mut pair) = Pair::new() else { return };
    let context = module::context(0).unwrap();
    let lanes = [context.new_stream().unwrap(), context.new_stream().unwrap()];
    let events = [context.new_event(None).unwrap(), context.new_event(None).unwrap()];
    let buffer = Buffer::<f32>::poisoned(&context, 1024).unwrap();
    let fill = |lane: usize, value: f32| memory::fill(&lanes[lane], buffer.span(), value);
    for round in 0..3 {
        let capture = Capture::begin(&lanes, &events).unwrap();
        fill(1, -1.0).unwrap();
        // Waiting for a stream in its capture is a fault, as an allocation or a search would be; the capture is lost by it.
        assert!(lanes[1].synchronize().is_err());
        drop(capture);
        fill(0, round as f32).unwrap();
        lanes[0].synchronize().unwrap();
        assert_eq!(
            buffer.read().unwrap(),
            [round as f32; 1024],
            "work of the capture that was lost is not carried out"
        );

        let capture = Capture::begin(&lanes, &events).unwrap();
        fill(1, 10.0 + round as f32).unwrap();
        let graph = capture.end(&events).unwrap();
        graph.launch(&lanes[0]).unwrap();
        lanes[0].synchronize().unwrap();
        assert_eq!(buffer.read().unwrap(), [10.0 + round as f32; 1024]);
    }
    // A list that is refused while it is captured is no obstacle to the next one.
    let [x, y] = ["x", "y"].map(|name| pair.empty(name, Dtype::F32, 4, 4));
    let short = pair.empty("short", Dtype::F32, 1, 4);
    let list = |value, dst| vec![Cmd::Fill { dst: x, value }, Cmd::Copy { src: x, dst }];
    let error = pair.gpu.instantiate(list(1.0, short)).unwrap_err().to_string();
    assert!(error.contains("short"), "{error}");
    for device in [&mut pair.cpu as &mut dyn Device, &mut pair.gpu] {
        let graph = device.instantiate(list(2.0, y)).unwrap();
        device.launch(graph).unwrap();
    }
    pair.same("after a list that was refused", y);
}

/// The shape of the smallest graphs: nothing, one node without edges, and one node after another.
#[test]
fn a_graph_of_few_nodes_has_a_shape() {
    let Some(_turn) = beside_others() else { return };
    let context = module::context(0).unwrap();
    let (lanes, events) = ([context.new_stream().unwrap()], [context.new_event(None).unwrap()]);
    let buffer = Buffer::<f32>::poisoned(&context, 1024).unwrap();
    let mut digests = BTreeSet::new();
    for nodes in 0..3_usize {
        let capture = Capture::begin(&lanes, &events).unwrap();
        for value in 0..nodes {
            memory::fill(&lanes[0], buffer.span(), value as f32).unwrap();
        }
        let shape = capture.end(&events).unwrap().shape().unwrap();
        assert_eq!((shape.nodes, shape.edges), (nodes, nodes.saturating_sub(1)));
        digests.insert(shape.digest);
    }
    assert_eq!(digests.len(), 3);
}

/// Where a copy reads and writes, and how much, and where a fill writes what, are part of a graph's digest; the streams and
/// the time of a capture are not.
#[test]
fn graphs_of_other_copies_or_fills_have_other_digests() {
    let Some(mut pair) = Pair::new() else { return };
    let context = module::context(0).unwrap();
    let [a, b, c] = [0; 3].map(|_| Buffer::<f32>::poisoned(&context, 1024).unwrap());
    let [a, b, c] = [&a, &b, &c].map(Buffer::span);
    let half = |span: Span<f32>, end: usize| span.part(512 * end..512 * (end + 1)).unwrap();
    type Record<'a> = Box<dyn Fn(&CudaStream) -> Result<(), qeffect_kernels::Error> + 'a>;
    let records: [(&str, Record<'_>); 9] = [
        ("a copy", Box::new(|stream| memory::copy(stream, a, b))),
        ("to another place", Box::new(|stream| memory::copy(stream, a, c))),
        ("from another place", Box::new(|stream| memory::copy(stream, c, b))),
        ("of less", Box::new(|stream| memory::copy(stream, half(a, 0), half(b, 0)))),
        ("to the other half", Box::new(|stream| memory::copy(stream, half(a, 0), half(b, 1)))),
        ("a fill", Box::new(|stream| memory::fill(stream, a, 1.0))),
        ("of another value", Box::new(|stream| memory::fill(stream, a, 2.0))),
        ("of another place", Box::new(|stream| memory::fill(stream, b, 1.0))),
        ("of less", Box::new(|stream| memory::fill(stream, half(a, 0), 1.0))),
    ];
    let mut digests = BTreeMap::new();
    for (what, record) in &records {
        let shape = || {
            let (lanes, events) = ([context.new_stream().unwrap()], [context.new_event(None).unwrap()]);
            let capture = Capture::begin(&lanes, &events).unwrap();
            record(&lanes[0]).unwrap();
            capture.end(&events).unwrap().shape().unwrap()
        };
        let found = shape();
        assert_eq!((found.nodes, found.kernels, found.edges), (1, 0, 0), "{what}");
        assert_eq!(found, shape(), "{what}: captured twice");
        let other = digests.insert(found.digest, *what);
        assert_eq!(other, None, "{what}");
    }
    assert_eq!(digests.len(), records.len());

    // The same of a device's own graphs.
    let [x, y, z] = ["x", "y", "z"].map(|name| pair.empty(name, Dtype::Bf16, 8, 64));
    let list = |dst, value| vec![Cmd::Fill { dst: x, value }, Cmd::Copy { src: x, dst }];
    let mut digest = |dst, value| {
        let graph = pair.gpu.instantiate(list(dst, value)).unwrap();
        pair.gpu.graph_shape(graph).unwrap().digest
    };
    assert_eq!(digest(y, 1.0), digest(y, 1.0));
    assert_ne!(digest(y, 1.0), digest(z, 1.0), "another destination");
    assert_ne!(digest(y, 1.0), digest(y, 1.5), "another value");
}

/// A product that nobody has asked for before is looked up, or searched for, before the capture of its list begins; its
/// second list finds it in the table.
// Case B23.
#[test]
fn a_list_with_a_new_product_has_its_algorithm_before_it_is_captured() {
    let Some(mut pair) = Pair::new() else { return };
    let [m, n, k] = [24, 104, 56];
    let (a, b) = (pair.activation("a", m, k), pair.activation("b", k, n));
    let out = pair.empty("out", Dtype::Bf16, m, n);
    let operand = |buf| Operand { buf, scale_inv: None, transposed: false };
    let (a, b) = (operand(a), operand(b));
    let list = vec![Cmd::Gemm { m, n, k, a, b, bias: None, out, accumulate: false, fast: false }];
    let known = pair.gpu.algorithms();
    let graph = pair.gpu.instantiate(list.clone()).unwrap();
    let more = pair.gpu.algorithms();
    assert!(more.len() > known.len() && more.to_text().contains("24 × 104 × 56"), "{}", more.to_text());
    pair.gpu.launch(graph).unwrap();
    list.iter().for_each(|cmd| pair.cpu.issue(cmd).unwrap());
    pair.near("a new product", out, 1e-2);
    let again = pair.gpu.instantiate(list).unwrap();
    pair.gpu.launch(again).unwrap();
    pair.near("the same product", out, 1e-2);
    assert_ne!(graph, again);
}

/// Chains that share a GPU but no data, with a command that reads all of them: in whichever lane they run, and however
/// often, the sums are those of the commands one by one; a reader in the stream of commands never sees an older launch.
// Case B49.
#[test]
fn lanes_keep_their_orders_and_launches_wait_at_both_ends() {
    let Some(mut pair) = Pair::new() else { return };
    let (rows, cols) = (256, 1024);
    let start: Vec<Buf> = (0..6).map(|_| pair.master("start", rows, cols)).collect();
    let mut list = Vec::new();
    let mut ends = Vec::new();
    for first in &start {
        let mut at = *first;
        for link in 0..5 {
            let next = pair.empty("link", Dtype::F32, rows, cols);
            let slots = if link % 2 == 0 { vec![at, *first] } else { vec![*first, at, at] };
            list.push(Cmd::SumSlots { slots: slots.into(), out: next });
            at = next;
        }
        ends.push(at);
    }
    let total = pair.empty("total", Dtype::F32, rows, cols);
    list.push(Cmd::SumSlots { slots: ends.into(), out: total });
    let copy = pair.empty("copy", Dtype::F32, rows, cols);
    let graphs = [pair.cpu.instantiate(list.clone()).unwrap(), pair.gpu.instantiate(list).unwrap()];
    for round in 0..50 {
        // The stream of commands writes before a launch what the launch reads, and reads after it what it wrote.
        let feed = Cmd::Fill { dst: start[round % 6], value: round as f32 };
        pair.issue(feed);
        pair.cpu.launch(graphs[0]).unwrap();
        pair.gpu.launch(graphs[1]).unwrap();
        pair.issue(Cmd::Copy { src: total, dst: copy });
        if round % 10 == 9 {
            pair.same(&format!("round {round}"), copy);
        }
    }
    let shape = pair.gpu.graph_shape(graphs[1]).unwrap();
    assert_eq!((shape.nodes, shape.kernels), (31, 31));
}
