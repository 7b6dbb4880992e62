//! Why a replay needs two waits: three processes, each 200 checks per protocol.
//!
//! A caller's stream makes an input, a graph on a stream of its own reads it and, after a delay, writes a state; the
//! caller's stream then reads that state. With the one-way protocol the graph's stream waits for the caller, and nothing
//! else: the caller reads what the last replay left. With the two-way protocol the caller also waits for an event at the
//! graph's tail. `cargo run --release -p qeffect-kernels --example stream_handoff`.

use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::{CudaContext, CudaStream, sys};
use qeffect_kernels::cache::Cache;
use qeffect_kernels::compile::Compiler;
use qeffect_kernels::{Buffer, Kernels, memory, module};

type Fault = Box<dyn std::error::Error>;

const PROCESSES: usize = 3;
const CHECKS: usize = 200;
const DELAY: Duration = Duration::from_micros(200);

#[derive(Clone, Copy, PartialEq, Eq)]
enum Protocol {
    OneWay,
    TwoWay,
}

/// How many of the checks read a state that the replay had not written yet.
fn stale_reads(
    context: &Arc<CudaContext>,
    kernels: &Kernels,
    caller: &Arc<CudaStream>,
    graphs: &Arc<CudaStream>,
    protocol: Protocol,
) -> Result<usize, Fault> {
    let input = Buffer::from_host(context, &[0u64])?;
    let state = Buffer::from_host(context, &[0u64])?;
    let seen = Buffer::<u64>::poisoned(context, CHECKS)?;
    let event = || context.new_event(Some(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING));

    kernels.delay(graphs, Duration::ZERO)?; // loads the kernel before it is captured
    context.synchronize()?;
    graphs.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
    let captured = kernels.delay(graphs, DELAY).and_then(|()| memory::copy(graphs, input.span(), state.span()));
    let graph = graphs.end_capture(sys::CUgraphInstantiate_flags(0));
    captured?;
    let graph = graph?.ok_or("the capture is empty")?;

    for check in 0..CHECKS {
        kernels.advance(caller, input.span(), None)?;
        let made = event()?;
        made.record(caller)?;
        graphs.wait(&made)?;
        graph.launch()?;
        if protocol == Protocol::TwoWay {
            let written = event()?;
            written.record(graphs)?;
            caller.wait(&written)?;
        }
        let place = seen.span().element(check).ok_or("a check too many")?;
        memory::copy(caller, state.span(), place)?;
        context.synchronize()?; // each check stands alone
    }
    Ok(seen.read()?.iter().enumerate().filter(|(check, seen)| **seen != *check as u64 + 1).count())
}

fn checks() -> Result<[usize; 2], Fault> {
    let context = module::context(0)?;
    let kernels = Kernels::load(&context, &Compiler::new(Cache::standard()))?;
    let (caller, graphs) = (context.new_stream()?, context.new_stream()?);
    let count = |protocol| stale_reads(&context, &kernels, &caller, &graphs, protocol);
    Ok([count(Protocol::OneWay)?, count(Protocol::TwoWay)?])
}

/// Runs the checks in a process of their own.
fn child() -> Result<[usize; 2], Fault> {
    let output = Command::new(std::env::current_exe()?).arg("--checks").output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let counts: Vec<usize> = text.split_whitespace().filter_map(|count| count.parse().ok()).collect();
    match (output.status.success(), counts.as_slice()) {
        (true, [one_way, two_way]) => Ok([*one_way, *two_way]),
        _ => Err(format!("the checks failed: {}", String::from_utf8_lossy(&output.stderr).trim()).into()),
    }
}

fn report() -> Result<ExitCode, Fault> {
    if let Err(error) = module::context(0) {
        println!("skipped: {error}");
        return Ok(ExitCode::SUCCESS);
    }
    println!("stale reads of {CHECKS}     one-way   two-way");
    let mut right = true;
    for process in 0..PROCESSES {
        let [one_way, two_way] = child()?;
        println!("process {process}              {one_way:>7}   {two_way:>7}");
        right &= one_way == CHECKS && two_way == 0;
    }
    Ok(if right { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn main() -> Result<ExitCode, Fault> {
    if std::env::args().any(|argument| argument == "--checks") {
        let [one_way, two_way] = checks()?;
        println!("{one_way} {two_way}");
        return Ok(ExitCode::SUCCESS);
    }
    report()
}
