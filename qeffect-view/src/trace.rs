//! Chrome's trace event format, which `chrome://tracing` and Perfetto open.
//!
//! One process per schedule, one thread per rank (and one more per further branch of overlaps),
//! one slice per action, arrows for messages between ranks, and a counter of what is live per rank.
//! One unit of time is one microsecond of the trace.

mod measured;

use std::collections::BTreeMap;

use qeffect_core::schedule::Costs;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::scene::{Bar, Scene, describe};

pub use measured::measured;

/// The trace of one or more schedules as JSON, one event per line.
pub fn render(scenes: &[&Scene]) -> String {
    let mut events = Vec::new();
    for (process, scene) in scenes.iter().enumerate() {
        Writer { process, scene, branches: branches(scene), events: &mut events }.write();
    }
    write(&events)
}

fn write(events: &[Value]) -> String {
    let lines: Vec<String> = events.iter().map(Value::to_string).collect();
    format!("{{\"displayTimeUnit\":\"ns\",\"traceEvents\":[\n{}\n]}}\n", lines.join(",\n"))
}

fn branches(scene: &Scene) -> u32 {
    scene.bars.iter().filter_map(|bar| bar.overlap.map(|branch| branch.of)).max().unwrap_or(1)
}

struct Writer<'a> {
    process: usize,
    scene: &'a Scene,
    branches: u32,
    events: &'a mut Vec<Value>,
}

impl Writer<'_> {
    fn write(&mut self) {
        let scene = self.scene;
        self.name("process_name", 0, &scene.title());
        for rank in 0..scene.ranks {
            for branch in 0..self.branches {
                let thread = rank * self.branches + branch;
                let name = if branch == 0 { format!("rank {rank}") } else { format!("rank {rank}, branch {branch}") };
                self.name("thread_name", thread, &name);
                self.events.push(json!({"ph": "M", "name": "thread_sort_index", "pid": self.process, "tid": thread, "args": {"sort_index": thread}}));
            }
        }
        for (at, bar) in scene.bars.iter().enumerate() {
            self.slice(bar);
            for need in &bar.needs {
                self.arrow(at, *need as usize);
            }
        }
        for rank in 0..scene.ranks {
            for bar in scene.rank(rank) {
                let live = json!({"tapes": bar.live.tapes, "works": bar.live.works});
                let name = format!("live on rank {rank}");
                self.events.push(json!({"ph": "C", "name": name, "pid": self.process, "ts": bar.start, "args": live}));
            }
            if let Some(last) = scene.rank(rank).last() {
                let name = format!("live on rank {rank}");
                let none = json!({"tapes": 0, "works": 0});
                self.events.push(json!({"ph": "C", "name": name, "pid": self.process, "ts": last.end, "args": none}));
            }
        }
    }

    fn name(&mut self, event: &str, thread: u32, name: &str) {
        self.events.push(json!({"ph": "M", "name": event, "pid": self.process, "tid": thread, "args": {"name": name}}));
    }

    fn thread(&self, bar: &Bar) -> u32 {
        bar.rank.0 * self.branches + bar.overlap.map_or(0, |branch| branch.number)
    }

    fn slice(&mut self, bar: &Bar) {
        self.events.push(json!({
            "ph": "X",
            "name": bar.key(),
            "cat": &describe(bar.item.kind)[2..],
            "pid": self.process,
            "tid": self.thread(bar),
            "ts": bar.start,
            "dur": bar.end - bar.start,
            "args": {
                "stage": bar.item.stage.0,
                "microbatch": bar.item.microbatch.0,
                "step": bar.step,
                "slot": bar.slot,
                "live slots": bar.live.slots,
                "live tapes": bar.live.tapes,
                "live works": bar.live.works,
            },
        }));
    }

    /// A message: from the end of its producer to the start of its consumer, if ranks differ.
    fn arrow(&mut self, to: usize, from: usize) {
        let (producer, consumer) = (&self.scene.bars[from], &self.scene.bars[to]);
        if producer.rank == consumer.rank {
            return;
        }
        let name = if producer.letter() == 'F' { "activation" } else { "gradient" };
        let mut end = |phase: &str, bar: &Bar, time: i64| {
            let mut event = json!({"ph": phase, "id": to, "name": name, "cat": "message", "pid": self.process, "tid": self.thread(bar), "ts": time});
            if phase == "f" {
                event["bp"] = json!("e");
            }
            self.events.push(event);
        };
        // Inside the producing slice, or the arrow would bind to the next one.
        end("s", producer, producer.end - i64::from(producer.end > producer.start));
        end("f", consumer, consumer.start);
    }
}

#[derive(Deserialize)]
struct Trace {
    #[serde(rename = "traceEvents")]
    events: Vec<Event>,
}

#[derive(Deserialize)]
struct Event {
    ph: String,
    #[serde(default)]
    name: String,
    #[serde(default)]
    pid: u64,
    /// Microseconds, as the format says.
    #[serde(default)]
    dur: f64,
}

/// Costs per stage from a trace, measured or simulated: the median duration of F, I and W, in
/// nanoseconds.
///
/// Actions are the complete events (`"ph": "X"`) named as in [`Bar::key`], `2F7`; other events, and
/// those of further processes, are passed over. Where a stage has B alone, it is divided evenly
/// between I and W.
///
/// # Errors
///
/// If the text is no trace, names no action, leaves out F or the backward of a stage, or has a duration
/// that is none.
pub fn profile(text: &str) -> Result<Vec<Costs>, String> {
    let trace: Trace = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let mut process = None;
    let mut found: BTreeMap<(u32, char), Vec<i64>> = BTreeMap::new();
    for event in trace.events.iter().filter(|event| event.ph == "X") {
        let Some((stage, letter)) = action(&event.name) else { continue };
        if *process.get_or_insert(event.pid) != event.pid {
            continue;
        }
        let nanoseconds = event.dur * 1e3;
        // A day is more than any action takes, and leaves sums far from overflow.
        if !(0.0..=86_400e9).contains(&nanoseconds) {
            return Err(format!("`{}` lasts {} microseconds", event.name, event.dur));
        }
        found.entry((stage, letter)).or_default().push(nanoseconds.round() as i64);
    }
    let stages = found.keys().map(|(stage, _)| stage + 1).max().ok_or("the trace has no action, as `0F0`")?;
    let median = |stage: u32, letter: char| {
        let mut all = found.get(&(stage, letter))?.clone();
        all.sort_unstable();
        Some(all[(all.len() - 1) / 2])
    };
    let costs = |stage: u32| {
        let missing = |what: &str| format!("stage {stage} has no {what} in the trace");
        let f = median(stage, 'F').ok_or_else(|| missing("F"))?;
        let (i, w) = match (median(stage, 'I'), median(stage, 'W'), median(stage, 'B')) {
            (Some(i), Some(w), _) => (i, w),
            (_, _, Some(b)) => (b - b / 2, b / 2),
            _ => return Err(missing("I and W, nor a B")),
        };
        Ok(Costs { f, i, w })
    };
    (0..stages).map(costs).collect()
}

/// Stage and letter of `2F7`.
fn action(name: &str) -> Option<(u32, char)> {
    let digits = name.find(|c: char| !c.is_ascii_digit())?;
    let (stage, rest) = name.split_at(digits);
    let letter = rest.chars().next().filter(|letter| "FIWB".contains(*letter))?;
    rest[1..].parse::<u32>().ok()?;
    Some((stage.parse().ok()?, letter))
}
