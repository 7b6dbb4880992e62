//! From a schedule to its JSON.

use std::fmt::Write;

use qeffect_core::action::{Item, Kind};
use qeffect_core::ids::Rank;
use qeffect_core::schedule::{Bounds, Compare, Expect, Measure, Schedule, Transport, Update};
use serde::Serialize;

use super::{BoundsOf, BytesOf, CompareName, ExpectOf, FORMAT, MeasureName, TransportName, UpdateName, VERSION};

/// Writes a schedule; [`read_schedule`](super::read_schedule) gives it back, but for the places where things stood.
pub fn write_schedule(schedule: &Schedule) -> String {
    let mut out = String::from("{\n");
    let mut field = |name: &str, value: String| {
        let _ = writeln!(out, "  \"{name}\": {value},");
    };
    field("format", json(&FORMAT));
    field("version", json(&VERSION));
    field("name", json(&schedule.name));
    if !schedule.params.is_empty() {
        field("params", json(&schedule.params));
    }
    field("microbatches", json(&schedule.microbatches));
    field("placement", json(&schedule.placement.iter().map(|rank| rank.0).collect::<Vec<_>>()));
    let transport = match schedule.transport {
        Transport::Edge => TransportName::Edge,
        Transport::RankEdge => TransportName::RankEdge,
        Transport::Rendezvous => TransportName::Rendezvous,
    };
    if transport != TransportName::default() {
        field("transport", json(&transport));
    }
    let update = match schedule.update {
        Update::Microbatch => UpdateName::Microbatch,
        Update::Step => UpdateName::Step,
        Update::None => UpdateName::None,
    };
    if update != UpdateName::default() {
        field("update", json(&update));
    }
    if schedule.eval {
        field("eval", json(&true));
    }
    if schedule.coalesce != 1 {
        field("coalesce", json(&schedule.coalesce));
    }
    if let Some(bytes) = &schedule.bytes {
        let [tape, work, input, budget] =
            [&bytes.tape, &bytes.work, &bytes.input, &bytes.budget].map(|sizes| sizes.to_vec());
        field("bytes", json(&BytesOf { tape, work, input, budget }));
    }
    if !schedule.bounds.is_empty() {
        let bounds = |b: &Bounds| BoundsOf { slots: b.slots, tapes: b.tapes, works: b.works };
        field("bounds", json(&schedule.bounds.iter().map(bounds).collect::<Vec<_>>()));
    }
    if !schedule.expects.is_empty() {
        field("expects", json(&schedule.expects.iter().map(expect_of).collect::<Vec<_>>()));
    }
    out.push_str("  \"programs\": [");
    for rank in 0..schedule.ranks {
        out.push_str(if rank == 0 { "\n    [" } else { ",\n    [" });
        program(&mut out, schedule.rank(Rank(rank)));
        out.push(']');
    }
    out.push_str("\n  ]\n}\n");
    out
}

fn json<T: Serialize + ?Sized>(value: &T) -> String {
    serde_json::to_string(value).expect("plain data always has a JSON form")
}

fn expect_of(expect: &Expect) -> ExpectOf {
    let (measure, costs) = match expect.measure {
        Measure::Bubble(costs) => (MeasureName::Bubble, Some(costs)),
        Measure::Idle(costs) => (MeasureName::Idle, Some(costs)),
        Measure::Peak => (MeasureName::Peak, None),
    };
    let compare = match expect.compare {
        Compare::AtMost => CompareName::AtMost,
        Compare::Below => CompareName::Below,
        Compare::Equal => CompareName::Equal,
        Compare::AtLeast => CompareName::AtLeast,
        Compare::Above => CompareName::Above,
    };
    ExpectOf { measure, costs: costs.map(|c| [c.f, c.i, c.w]), compare, bound: expect.bound }
}

fn program(out: &mut String, items: &[Item]) {
    let mut separator = "";
    let mut at = 0;
    while at < items.len() {
        let item = items[at];
        let group = items[at + 1..].iter().take_while(|next| next.kind == Kind::WeightGradJoin).count();
        match item.kind {
            Kind::OverlapBegin => {
                let _ = write!(out, "{separator}{{\"overlap\": [");
                separator = "";
            }
            Kind::OverlapBranch => {
                let first = items[at - 1].kind == Kind::OverlapBegin;
                out.push_str(if first { "[" } else { "], [" });
                separator = "";
            }
            Kind::OverlapEnd => {
                out.push_str("]]}");
                separator = ", ";
            }
            _ if group > 0 => {
                let members: Vec<String> =
                    items[at..=at + group].iter().map(|item| format!("\"{}\"", text(item))).collect();
                let _ = write!(out, "{separator}{{\"coalesced\": [{}]}}", members.join(", "));
                separator = ", ";
                at += group;
            }
            _ => {
                let _ = write!(out, "{separator}\"{}\"", text(&item));
                separator = ", ";
            }
        }
        at += 1;
    }
}

fn text(item: &Item) -> String {
    match item.kind {
        Kind::Refresh => format!("{}REFRESH", item.stage),
        Kind::Reduce => format!("{}REDUCE", item.stage),
        Kind::Commit => "COMMIT".to_owned(),
        kind => format!("{}{}{}", item.stage, kind.letter().unwrap_or('?'), item.microbatch),
    }
}
