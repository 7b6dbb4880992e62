//! Schedules as JSON, for programs; `docs/schedule.schema.json` is the format's schema.
//!
//! ```json
//! {
//!   "format": "qeffect-schedule",
//!   "version": 1,
//!   "name": "fill_drain",
//!   "microbatches": 1,
//!   "placement": [0, 1],
//!   "programs": [
//!     ["0F0", "0I0", "0W0"],
//!     ["1F0", "1B0"]
//!   ]
//! }
//! ```
//!
//! `placement` gives the rank of each stage, `programs` the actions of each rank in the letters of
//! PyTorch's CSV. What CSV cannot say is an object: `{"overlap": [["0F1"], ["1I0", "1W0"]]}` and
//! `{"coalesced": ["0W0", "0W1"]}`; `"0REFRESH"`, `"0REDUCE"` and `"COMMIT"` are actions as well.
//! Reading is strict, faults have line and column, and what is read has yet to be checked.

mod write;

use std::borrow::Cow;

use qeffect_core::action::{Item, Kind};
use qeffect_core::code::Code;
use qeffect_core::diag::{Diagnostic, Report};
use qeffect_core::ids::Rank;
use qeffect_core::origin::Origin;
use qeffect_core::schedule::{
    Bounds, Bytes, Compare, Costs, Expect, HeaderOrigins, Measure, Schedule, Transport, Update,
};
use qeffect_core::source::SourceMap;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

pub use write::write_schedule;

/// The value of `format`.
pub const FORMAT: &str = "qeffect-schedule";
/// The value of `version`.
pub const VERSION: u32 = 1;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Document<'a> {
    /// For editors that know the schema.
    #[serde(rename = "$schema")]
    _schema: Option<Cow<'a, str>>,
    #[serde(borrow)]
    format: &'a RawValue,
    #[serde(borrow)]
    version: &'a RawValue,
    name: String,
    #[serde(default)]
    params: Vec<(String, i64)>,
    #[serde(borrow)]
    microbatches: &'a RawValue,
    #[serde(borrow)]
    placement: &'a RawValue,
    #[serde(borrow)]
    programs: Vec<Vec<&'a RawValue>>,
    #[serde(default, borrow)]
    bounds: Option<&'a RawValue>,
    #[serde(default)]
    transport: TransportName,
    #[serde(default)]
    update: UpdateName,
    #[serde(default)]
    eval: bool,
    #[serde(default)]
    coalesce: Option<u32>,
    #[serde(default)]
    #[serde(borrow)]
    bytes: Option<&'a RawValue>,
    #[serde(default, borrow)]
    expects: Vec<&'a RawValue>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Compound<'a> {
    #[serde(default, borrow)]
    overlap: Option<Vec<Vec<&'a RawValue>>>,
    #[serde(default, borrow)]
    coalesced: Option<Vec<&'a RawValue>>,
}

#[derive(Serialize, Deserialize, Clone, Copy, PartialEq, Eq, Default)]
#[serde(rename_all = "snake_case")]
enum TransportName {
    #[default]
    Edge,
    RankEdge,
    Rendezvous,
}

#[derive(Serialize, Deserialize, Clone, Copy, PartialEq, Eq, Default)]
#[serde(rename_all = "snake_case")]
enum UpdateName {
    #[default]
    Microbatch,
    Step,
    None,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct BytesOf {
    tape: Vec<u64>,
    work: Vec<u64>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    input: Vec<u64>,
    budget: Vec<u64>,
}

#[derive(Serialize, Deserialize, Clone, Copy)]
#[serde(deny_unknown_fields)]
struct BoundsOf {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    slots: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tapes: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    works: Option<u32>,
}

#[derive(Serialize, Deserialize, Clone, Copy)]
#[serde(deny_unknown_fields)]
struct ExpectOf {
    measure: MeasureName,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    costs: Option<[i64; 3]>,
    compare: CompareName,
    bound: i64,
}

#[derive(Serialize, Deserialize, Clone, Copy)]
#[serde(rename_all = "snake_case")]
enum MeasureName {
    Bubble,
    Idle,
    Peak,
}

#[derive(Serialize, Deserialize, Clone, Copy)]
enum CompareName {
    #[serde(rename = "<=")]
    AtMost,
    #[serde(rename = "<")]
    Below,
    #[serde(rename = "==")]
    Equal,
    #[serde(rename = ">=")]
    AtLeast,
    #[serde(rename = ">")]
    Above,
}

/// Reads a schedule; the map draws reports about it. `file` is the name that messages show.
///
/// # Errors
///
/// What is no JSON, or not of this format. Whether the schedule is right is for
/// [`check`](qeffect_core::check::check).
pub fn read_schedule(file: &str, text: &str) -> (Result<Schedule, Report>, SourceMap) {
    let mut reader = Reader { text, map: SourceMap::new(file, text), faults: Vec::new(), items: Vec::new() };
    let schedule = reader.schedule();
    let result = match schedule {
        Some(schedule) if reader.faults.is_empty() => Ok(schedule),
        _ => Err(Report::from_faults(reader.faults)),
    };
    (result, reader.map)
}

struct Reader<'a> {
    text: &'a str,
    map: SourceMap,
    faults: Vec<Diagnostic>,
    items: Vec<Item>,
}

impl<'a> Reader<'a> {
    fn schedule(&mut self) -> Option<Schedule> {
        let document: Document<'a> = match serde_json::from_str(self.text) {
            Ok(document) => document,
            Err(error) => {
                self.broken(&error, None);
                return None;
            }
        };
        let format: Cow<'a, str> = self.value(document.format)?;
        let version: u32 = self.value(document.version)?;
        if format != FORMAT {
            self.fault(Code::Syntax, document.format, format!("`{format}` is another format than `{FORMAT}`"), None);
            return None;
        }
        if version != VERSION {
            self.fault(
                Code::Syntax,
                document.version,
                format!("version {version} is not known here"),
                Some(format!("this reads version {VERSION}")),
            );
            return None;
        }
        let microbatches = self.value(document.microbatches);
        let placement: Option<Vec<u32>> = self.value(document.placement);
        let bounds: Option<Vec<BoundsOf>> = match document.bounds {
            Some(bounds) => self.value(bounds),
            None => Some(Vec::new()),
        };
        let origins = HeaderOrigins {
            place: self.place(document.placement),
            microbatches: self.place(document.microbatches),
            bounds: [document.bounds.map_or(Origin::NONE, |bounds| self.place(bounds)); 3],
            ..HeaderOrigins::NONE
        };
        if let (Some(bounds), Some(raw)) = (&bounds, document.bounds)
            && !bounds.is_empty()
            && bounds.len() != document.programs.len()
        {
            let message = format!("bounds for {} ranks, but programs of {}", bounds.len(), document.programs.len());
            self.fault(Code::Header, raw, message, Some("give one entry per rank, or none".into()));
        }
        let bytes = match document.bytes {
            Some(raw) => self.bytes(raw, placement.as_ref().map(Vec::len), document.programs.len()),
            None => None,
        };
        let mut starts = vec![0];
        for program in &document.programs {
            program.iter().for_each(|action| self.action(action, Nesting::Program));
            starts.push(self.items.len() as u32);
        }
        let expects = document.expects.iter().filter_map(|expect| self.expect(expect)).collect::<Vec<_>>();
        let placement = placement?;
        Some(Schedule {
            name: document.name.into(),
            params: document.params.into_iter().map(|(name, value)| (name.into(), value)).collect(),
            ranks: document.programs.len() as u32,
            stages: placement.len() as u32,
            microbatches: microbatches?,
            placement: placement.into_iter().map(Rank).collect(),
            items: std::mem::take(&mut self.items).into(),
            starts: starts.into(),
            bounds: bounds?.into_iter().map(|b| Bounds { slots: b.slots, tapes: b.tapes, works: b.works }).collect(),
            expects: expects.into(),
            transport: match document.transport {
                TransportName::Edge => Transport::Edge,
                TransportName::RankEdge => Transport::RankEdge,
                TransportName::Rendezvous => Transport::Rendezvous,
            },
            update: match document.update {
                UpdateName::Microbatch => Update::Microbatch,
                UpdateName::Step => Update::Step,
                UpdateName::None => Update::None,
            },
            eval: document.eval,
            coalesce: document.coalesce.unwrap_or(1),
            bytes,
            origins,
        })
    }

    fn bytes(&mut self, raw: &'a RawValue, stages: Option<usize>, ranks: usize) -> Option<Bytes> {
        let BytesOf { tape, work, input, budget } = self.value(raw)?;
        let stages = stages?;
        let fits = |sizes: &Vec<u64>, count: usize| sizes.len() == count;
        if !fits(&tape, stages) || !fits(&work, stages) || !(input.is_empty() || fits(&input, stages)) {
            let help = format!("give {stages} sizes, one per stage");
            self.fault(Code::Header, raw, "sizes for another number of stages".into(), Some(help));
            return None;
        }
        if !fits(&budget, ranks) {
            let message = format!("budgets for {} ranks, but programs of {ranks}", budget.len());
            self.fault(Code::Header, raw, message, Some("give one budget per rank".into()));
            return None;
        }
        let origin = self.place(raw);
        Some(Bytes { tape: tape.into(), work: work.into(), input: input.into(), budget: budget.into(), origin })
    }

    fn action(&mut self, raw: &'a RawValue, nesting: Nesting) {
        match raw.get().as_bytes().first() {
            Some(b'"') => {
                let Some(text) = self.value::<Cow<'a, str>>(raw) else { return };
                let origin = self.place(raw);
                match action(&text, nesting) {
                    Ok((kind, stage, microbatch)) => self.items.push(Item::new(kind, stage, microbatch, origin.0)),
                    Err((code, message)) => {
                        let help = "an action is `<stage><type><microbatch>`, as in `0F1`";
                        self.faults.push(Diagnostic::new(code, origin, message).help(help));
                    }
                }
            }
            Some(b'{') if nesting != Nesting::Group => self.compound(raw, nesting),
            _ => {
                let message = format!("`{}` is no action here", shortened(raw.get()));
                self.fault(Code::Syntax, raw, message, Some("write actions as strings, `\"0F1\"`".into()));
            }
        }
    }

    fn compound(&mut self, raw: &'a RawValue, nesting: Nesting) {
        let Some(compound) = self.value::<Compound<'a>>(raw) else { return };
        match compound {
            Compound { overlap: Some(branches), coalesced: None } if nesting == Nesting::Program => {
                if branches.len() < 2 {
                    let message = format!("an overlap of {} branches", branches.len());
                    self.fault(Code::Syntax, raw, message, Some("an overlap has two branches or more".into()));
                    return;
                }
                let origin = self.place(raw).0;
                self.items.push(Item::new(Kind::OverlapBegin, 0, 0, origin));
                for branch in branches {
                    self.items.push(Item::new(Kind::OverlapBranch, 0, 0, origin));
                    branch.into_iter().for_each(|action| self.action(action, Nesting::Branch));
                }
                self.items.push(Item::new(Kind::OverlapEnd, 0, 0, origin));
            }
            Compound { overlap: None, coalesced: Some(members) } => {
                if members.is_empty() {
                    self.fault(Code::Syntax, raw, "a coalesced weight gradient without members".into(), None);
                }
                let first = self.items.len();
                members.into_iter().for_each(|member| self.action(member, Nesting::Group));
                for item in self.items.iter_mut().skip(first + 1) {
                    item.kind = Kind::WeightGradJoin;
                }
                let stages = self.items[first..].iter().map(|item| item.stage);
                if stages.clone().min() != stages.max() {
                    let message = "a coalesced weight gradient of several stages".into();
                    self.fault(Code::Syntax, raw, message, Some("write one per stage".into()));
                }
            }
            Compound { overlap: Some(_), coalesced: None } => {
                self.fault(Code::Syntax, raw, "an overlap inside an overlap".into(), None);
            }
            _ => self.fault(
                Code::Syntax,
                raw,
                format!("`{}` is no action", shortened(raw.get())),
                Some("write either `overlap` or `coalesced`".into()),
            ),
        }
    }

    fn expect(&mut self, raw: &'a RawValue) -> Option<Expect> {
        let expect: ExpectOf = self.value(raw)?;
        let costs = expect.costs.map(|[f, i, w]| Costs { f, i, w });
        let measure = match (expect.measure, costs) {
            (MeasureName::Bubble, Some(costs)) => Measure::Bubble(costs),
            (MeasureName::Idle, Some(costs)) => Measure::Idle(costs),
            (MeasureName::Peak, None) => Measure::Peak,
            (MeasureName::Peak, Some(_)) => {
                self.fault(Code::Header, raw, "a peak has no costs".into(), None);
                return None;
            }
            _ => {
                let help = Some("give the costs of F, I and W: `\"costs\": [1, 1, 1]`".into());
                self.fault(Code::Header, raw, "a bubble is measured at costs".into(), help);
                return None;
            }
        };
        let compare = match expect.compare {
            CompareName::AtMost => Compare::AtMost,
            CompareName::Below => Compare::Below,
            CompareName::Equal => Compare::Equal,
            CompareName::AtLeast => Compare::AtLeast,
            CompareName::Above => Compare::Above,
        };
        Some(Expect { measure, compare, bound: expect.bound, origin: self.place(raw) })
    }

    fn value<T: Deserialize<'a>>(&mut self, raw: &'a RawValue) -> Option<T> {
        match serde_json::from_str(raw.get()) {
            Ok(value) => Some(value),
            Err(error) => {
                self.broken(&error, Some(raw));
                None
            }
        }
    }

    /// Where a part of the text starts: raw values are slices of it.
    fn offset(&self, raw: &RawValue) -> usize {
        raw.get().as_ptr() as usize - self.text.as_ptr() as usize
    }

    fn place(&mut self, raw: &RawValue) -> Origin {
        let start = self.offset(raw);
        self.map.push(start..start + raw.get().len())
    }

    fn fault(&mut self, code: Code, raw: &RawValue, message: String, help: Option<String>) {
        let place = self.place(raw);
        let mut fault = Diagnostic::new(code, place, message);
        fault.help = help;
        self.faults.push(fault);
    }

    /// A fault that serde found, in the whole text or in a part of it.
    fn broken(&mut self, error: &serde_json::Error, part: Option<&RawValue>) {
        let (base, text) = part.map_or((0, self.text), |raw| (self.offset(raw), raw.get()));
        let line = text.split_inclusive('\n').take(error.line().saturating_sub(1)).map(str::len).sum::<usize>();
        let mut start = (line + error.column().saturating_sub(1)).min(text.len());
        while !text.is_char_boundary(start) {
            start -= 1;
        }
        let width = text[start..].chars().next().filter(|c| *c != '\n').map_or(0, char::len_utf8);
        // A number, string or word is wrong as a whole.
        let scalar = error.is_data() && !text.starts_with(['{', '[']);
        let message = error.to_string();
        let message = message.rsplit_once(" at line ").map_or(message.as_str(), |(head, _)| head);
        let range =
            match named(message).and_then(|name| text[..start + width].rfind(&name).map(|at| at..at + name.len())) {
                Some(name) => name,
                None if scalar => 0..text.len(),
                None => start..start + width,
            };
        let place = self.map.push(base + range.start..base + range.end);
        let message = message.replace("expected u32", "expected a whole number from 0 to 4294967295");
        self.faults.push(Diagnostic::new(Code::Syntax, place, message));
    }
}

/// The string that serde complains about, with its quotes: it has been read to its end by then.
fn named(message: &str) -> Option<String> {
    let name = ["unknown field `", "unknown variant `", "duplicate field `"]
        .iter()
        .find_map(|complaint| message.strip_prefix(complaint))?;
    let name = name.split_once("`, ").map_or_else(|| name.trim_end_matches('`'), |(name, _)| name);
    Some(format!("\"{name}\""))
}

/// What an action may be part of.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Nesting {
    Program,
    Branch,
    Group,
}

/// Reads `0F1`, `0REFRESH` or `COMMIT`.
fn action(text: &str, nesting: Nesting) -> Result<(Kind, u32, u32), (Code, String)> {
    let syntax = |message: String| Err((Code::Syntax, message));
    let word_at = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (stage, rest) = text.split_at(word_at);
    let number_at = rest.find(|c: char| !c.is_ascii_uppercase()).unwrap_or(rest.len());
    let (word, microbatch) = rest.split_at(number_at);
    let (kind, has_stage, has_microbatch) = match word {
        "F" => (Kind::Forward, true, true),
        "I" => (Kind::InputGrad, true, true),
        "W" => (Kind::WeightGrad, true, true),
        "B" => (Kind::FullBackward, true, true),
        "R" => (Kind::Recompute, true, true),
        "REFRESH" => (Kind::Refresh, true, false),
        "REDUCE" => (Kind::Reduce, true, false),
        "COMMIT" => (Kind::Commit, false, false),
        _ => return syntax(format!("`{text}` is no action")),
    };
    if nesting == Nesting::Group && kind != Kind::WeightGrad {
        return syntax(format!("`{text}` in a coalesced weight gradient"));
    }
    if has_stage == stage.is_empty() {
        return syntax(format!("`{text}` {} stage", if has_stage { "names no" } else { "takes no" }));
    }
    if has_microbatch == microbatch.is_empty() {
        return syntax(format!("`{text}` {} microbatch", if has_microbatch { "names no" } else { "takes no" }));
    }
    let number = |digits: &str| match digits {
        "" => Ok(0),
        digits if digits.bytes().all(|b| b.is_ascii_digit()) => {
            digits.parse().map_err(|_| (Code::OutOfRange, format!("`{digits}` in `{text}` is too large")))
        }
        junk => Err((Code::Syntax, format!("`{junk}` in `{text}` is no number"))),
    };
    Ok((kind, number(stage)?, number(microbatch)?))
}

/// The start of a long text, in one line.
fn shortened(text: &str) -> String {
    const MOST: usize = 40;
    let line: String = text.chars().take(MOST).map(|c| if c.is_control() { ' ' } else { c }).collect();
    if text.chars().nth(MOST).is_some() { format!("{line}…") } else { line }
}
