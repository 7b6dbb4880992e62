//! The trace of a step that was run, in the same form as that of a simulated one.

use std::collections::BTreeMap;
use std::time::Duration;

use qeffect_core::action::Kind;
use qeffect_core::ids::Stage;
use qeffect_core::measured::Span;
use qeffect_core::plan::{Direction, Op};
use serde_json::{Value, json};

use super::write;
use crate::scene::describe;

/// The trace of a measured step: per rank, what it did in the order in which it did it.
///
/// Actions are named as in [`render`](super::render), so that [`profile`](super::profile) takes their costs; beside
/// them stand the messages (`send 0F3`, `wait 0F3`, named by what made them), with an arrow each, and what surrounds
/// the actions: `refresh 0`, `reduce 0`, `agree`, `commit`.
pub fn measured(title: &str, ranks: &[Vec<Span>]) -> String {
    let mut events = vec![name("process_name", 0, title)];
    for rank in 0..ranks.len() {
        events.push(name("thread_name", rank, &format!("rank {rank}")));
        events
            .push(json!({"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": rank, "args": {"sort_index": rank}}));
    }
    let mut waits = BTreeMap::new();
    for (rank, spans) in ranks.iter().enumerate() {
        for span in spans {
            if let Some(Message { sends: false, key, .. }) = message(span) {
                waits.insert(key, (rank, span.end));
            }
        }
    }
    for (rank, spans) in ranks.iter().enumerate() {
        for span in spans {
            events.push(slice(rank, span));
            if let Some(Message { sends: true, key, tensor }) = message(span)
                && let Some((to, end)) = waits.get(&key)
            {
                let arrow = |phase: &str, rank: usize, at: Duration| json!({"ph": phase, "id": key, "name": tensor, "cat": "message", "pid": 0, "tid": rank, "ts": micros(at)});
                events.push(arrow("s", rank, span.start));
                // Inside the wait, or the arrow would bind to what follows.
                let mut head = arrow("f", *to, end.saturating_sub(Duration::from_nanos(1)));
                head["bp"] = json!("e");
                events.push(head);
            }
        }
    }
    write(&events)
}

fn name(event: &str, thread: usize, name: &str) -> Value {
    json!({"ph": "M", "name": event, "pid": 0, "tid": thread, "args": {"name": name}})
}

fn micros(time: Duration) -> f64 {
    time.as_nanos() as f64 / 1e3
}

fn slice(rank: usize, span: &Span) -> Value {
    let (name, category) = label(span);
    json!({
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": 0,
        "tid": rank,
        "ts": micros(span.start),
        "dur": micros(span.end.saturating_sub(span.start)),
        "args": {"stage": span.stage.0, "microbatch": span.microbatch.0},
    })
}

fn label(span: &Span) -> (String, &'static str) {
    let Span { op, stage, microbatch, .. } = span;
    if let Some(kind) = kind(*op) {
        let letter = kind.letter().unwrap_or('?');
        return (format!("{stage}{letter}{microbatch}"), &describe(kind)[2..]);
    }
    if let Some(Message { sends, key, .. }) = message(span) {
        let what = if sends { "send" } else { "wait" };
        return (format!("{what} {key}"), "message");
    }
    let what = match op {
        Op::Refresh => format!("refresh {stage}"),
        Op::Reduce => format!("reduce {stage}"),
        Op::Agree => "agree".into(),
        Op::Commit => "commit".into(),
        op => format!("{op:?}").to_lowercase(),
    };
    (what, "step")
}

const fn kind(op: Op) -> Option<Kind> {
    match op {
        Op::Forward => Some(Kind::Forward),
        Op::InputGrad => Some(Kind::InputGrad),
        Op::WeightGrad | Op::WeightGradJoin => Some(Kind::WeightGrad),
        Op::FullBackward => Some(Kind::FullBackward),
        Op::Recompute => Some(Kind::Recompute),
        _ => None,
    }
}

/// One end of a message.
struct Message {
    sends: bool,
    /// The action that made what travels, the same at both ends: `0F3`; `1I3` for I and for B.
    key: String,
    tensor: &'static str,
}

fn message(span: &Span) -> Option<Message> {
    let (sends, direction) = match span.op {
        Op::SendForward => (true, Direction::Forward),
        Op::SendBackward => (true, Direction::Backward),
        Op::WaitForward => (false, Direction::Forward),
        Op::WaitBackward => (false, Direction::Backward),
        _ => return None,
    };
    let Stage(here) = span.stage;
    let maker = match (sends, direction) {
        (true, _) => here,
        (false, Direction::Forward) => here.checked_sub(1)?,
        (false, Direction::Backward) => here.checked_add(1)?,
    };
    let (letter, tensor) = match direction {
        Direction::Forward => ('F', "activation"),
        Direction::Backward => ('I', "gradient"),
    };
    Some(Message { sends, key: format!("{maker}{letter}{}", span.microbatch), tensor })
}
