//! How devices, sessions and graphs end: each way in a process of its own, which is over soon, whatever is dropped first and
//! whatever still runs.

use std::any::Any;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use qeffect_core::bind::Gradients;
use qeffect_core::dtype::Dtype;
use qeffect_kernels::graph::Capture;
use qeffect_kernels::{Buffer, memory, module};
use qeffect_runtime::capture::CaptureMode;
use qeffect_runtime::cmd::Cmd;
use qeffect_runtime::cuda::CudaDevice;
use qeffect_runtime::device::{BufSpec, Device, DeviceError, GraphId};
use qeffect_schedules::zb_h1;

use crate::common::batch;
use crate::rig::alone;
use crate::sessions::session;
use crate::training::{MICROBATCHES, RECIPES, model};

/// Names the way in a child.
const WAY: &str = "QEFFECT_TEST_WAY_TO_END";
/// From here on a child has [`SOON`].
const READY: &str = "ready to end";
const SOON: Duration = Duration::from_secs(10);

/// Ways to end, and whether the process tells of a failure: a panic.
const WAYS: [(&str, bool); 7] = [
    ("every order of streams, events, memory and graph", false),
    ("a device whose graph is running", false),
    ("a panic beside a device whose graph is running", true),
    ("an exit beside a device whose graph is running", false),
    ("a session after a step", false),
    ("a panic in the middle of a replayed step", true),
    ("a panic in the middle of a replayed step of two ranks", true),
];

/// Case B29, on one GPU.
#[test]
fn a_process_is_over_soon_however_its_devices_end() {
    let Some(_turn) = alone() else { return };
    for (way, fails) in WAYS {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "ends::in_a_process_of_its_own", "--nocapture", "--test-threads=1"])
            .env(WAY, way)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // Before that kernels may be compiled, and algorithms searched for.
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.is_ok_and(|line| line.contains(READY))), "{way}: not begun");
        let begun = Instant::now();
        let status = loop {
            match child.try_wait().unwrap() {
                Some(status) => break status,
                None if begun.elapsed() < SOON => std::thread::sleep(Duration::from_millis(5)),
                None => {
                    child.kill().unwrap();
                    panic!("{way}: not over after {SOON:?}");
                }
            }
        };
        println!("{way}: {status} after {:?}", begun.elapsed());
        assert_eq!(status.code(), Some(if fails { 101 } else { 0 }), "{way}");
    }
}

fn ready() {
    println!("\n{READY}");
    std::io::stdout().flush().unwrap();
}

/// A graph of some work, launched often and not waited for.
fn running() -> CudaDevice {
    let mut device = CudaDevice::new(0).unwrap();
    let mut matrix = |name: &str| device.alloc(BufSpec::new(name, Dtype::F32, 1024, 1024)).unwrap();
    let (x, y) = (matrix("x"), matrix("y"));
    let turn = |from, to| Cmd::SumSlots { slots: vec![from].into(), out: to };
    let mut list = vec![Cmd::Fill { dst: x, value: 1.0 }];
    list.extend((0..100).flat_map(|_| [turn(x, y), turn(y, x)]));
    let graph = device.instantiate(list).unwrap();
    (0..20).for_each(|_| device.launch(graph).unwrap());
    ready();
    device
}

/// A GPU whose n-th launch panics.
struct Panics {
    device: CudaDevice,
    launches: usize,
}

impl Device for Panics {
    qeffect_runtime::hand_on!(device: name caps alloc spec issue write read poison instantiate drop_graph);

    fn launch(&mut self, graph: GraphId) -> Result<(), DeviceError> {
        self.launches = self.launches.checked_sub(1).unwrap_or_else(|| {
            ready();
            panic!("in the middle of a step");
        });
        self.device.launch(graph)
    }
}

/// Streams, events, memory and graph, dropped in every order while the graph runs.
fn every_order() {
    let _keeper = module::context(0).unwrap(); // opening the GPU anew each time takes long
    ready();
    for n in 0..24 {
        let context = module::context(0).unwrap();
        let lanes = [context.new_stream().unwrap(), context.new_stream().unwrap()];
        let events = [context.new_event(None).unwrap(), context.new_event(None).unwrap()];
        let buffer = Buffer::<f32>::poisoned(&context, 1 << 24).unwrap();
        drop(context);
        let capture = Capture::begin(&lanes, &events).unwrap();
        (0..10).for_each(|value| memory::fill(&lanes[1], buffer.span(), value as f32).unwrap());
        let graph = capture.end(&events).unwrap();
        (0..10).for_each(|_| graph.launch(&lanes[0]).unwrap());
        let mut parts: Vec<Box<dyn Any>> = vec![Box::new(lanes), Box::new(events), Box::new(buffer), Box::new(graph)];
        let mut order = n;
        while !parts.is_empty() {
            let at = order % parts.len();
            order /= parts.len();
            drop(parts.swap_remove(at));
        }
    }
}

/// What a child does; nothing in the process that runs all tests.
#[test]
fn in_a_process_of_its_own() {
    let Ok(way) = std::env::var(WAY) else { return };
    let config = model(RECIPES[0]);
    let open = |device: Box<dyn Device>, ranks: i64, capture| {
        let checked = zb_h1::build(ranks, i64::from(MICROBATCHES)).unwrap();
        session(&config, checked, (Gradients::Copied, capture), device).unwrap()
    };
    match WAYS.iter().position(|(name, _)| *name == way) {
        Some(0) => every_order(),
        Some(1) => drop(running()),
        Some(2) => {
            let _device = running();
            panic!("beside a device");
        }
        Some(3) => {
            let _device = running();
            std::process::exit(0);
        }
        Some(4) => {
            let mut session = open(Box::new(CudaDevice::new(0).unwrap()), 2, CaptureMode::Step);
            session.step(batch(&config, 0, MICROBATCHES)).unwrap();
            ready();
            drop(session);
        }
        Some(ranks @ (5 | 6)) => {
            let device = Box::new(Panics { device: CudaDevice::new(0).unwrap(), launches: 30 });
            let mut session = open(device, ranks as i64 - 4, CaptureMode::Action);
            for step in 0..5 {
                session.step(batch(&config, step, MICROBATCHES)).unwrap();
            }
        }
        _ => panic!("no such way: {way}"),
    }
}
