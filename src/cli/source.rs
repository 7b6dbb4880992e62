//! Where a schedule comes from: the library, or a file in one of four forms.

use std::io::Read;
use std::path::Path;

use clap::Args;
use qeffect_core::check::{self, Options, messages};
use qeffect_core::diag::Report;
use qeffect_core::lang::{self, Program};
use qeffect_core::plan::Checked;
use qeffect_core::schedule::{Schedule, Transport};
use qeffect_core::source::SourceMap;
use qeffect_core::text;
use qeffect_view::json;

use super::output::{Failure, Refusal};

/// What the help of SCHEDULE says.
pub const SCHEDULE_HELP: &str = "A schedule of the library (`qeffect schedule list`), or a file";
/// The long help of SCHEDULE.
pub const SCHEDULE_LONG_HELP: &str = "\
A schedule of the library, as `qeffect schedule list` names it, or a file: PyTorch's pipelining CSV (compute-only or \
lowered), JSON (docs/schedule.schema.json), or a program in the language of `schedule!`; `-` reads standard input. \
The form is told from the name (.csv, .json, .sched) or from the contents.";

/// Values of a schedule's parameters.
#[derive(Args, Clone, Default)]
pub struct Parameters {
    /// Ranks: the parameter P
    #[arg(short = 'p', long, value_name = "N")]
    pub ranks: Option<i64>,
    /// Microbatches per step: the parameter M
    #[arg(short = 'm', long, value_name = "N")]
    pub microbatches: Option<i64>,
    /// Virtual stages per rank: the parameter V
    #[arg(short = 'v', long, value_name = "N")]
    pub virtual_stages: Option<i64>,
    /// Any other parameter of a program
    #[arg(long = "set", value_name = "NAME=VALUE", value_parser = assignment)]
    pub set: Vec<(String, i64)>,
}

fn assignment(text: &str) -> Result<(String, i64), String> {
    let (name, value) = text.split_once('=').ok_or("write NAME=VALUE")?;
    let value = value.trim().parse().map_err(|_| format!("`{value}` is no whole number"))?;
    Ok((name.trim().to_owned(), value))
}

/// Ranks and microbatches of library schedules if nothing else is asked.
pub const DEFAULT_SIZE: (i64, i64) = (4, 8);

impl Parameters {
    fn get(&self, name: &str) -> Option<i64> {
        let set = self.set.iter().rev().find(|(known, _)| known == name).map(|(_, value)| *value);
        set.or(match name {
            "P" => self.ranks,
            "M" => self.microbatches,
            "V" => self.virtual_stages,
            _ => None,
        })
    }

    /// Ranks and microbatches for a schedule of the library.
    pub fn size(&self) -> (i64, i64) {
        (self.get("P").unwrap_or(DEFAULT_SIZE.0), self.get("M").unwrap_or(DEFAULT_SIZE.1))
    }

    /// Virtual stages per rank, if they were given.
    pub fn virtual_stages(&self) -> Option<i64> {
        self.get("V")
    }

    /// These for one schedule among all of the library: virtual stages where they are a parameter of it.
    ///
    /// # Errors
    ///
    /// A name that no schedule of the library has.
    pub fn for_entry(&self, name: &str) -> Result<Parameters, Failure> {
        self.only(&["P", "M", "V"], "a schedule of the library")?;
        let (ranks, microbatches) = self.size();
        let virtual_stages = self.get("V").filter(|_| general(name).is_some());
        Ok(Parameters { ranks: Some(ranks), microbatches: Some(microbatches), virtual_stages, set: Vec::new() })
    }

    /// Names that were given a value.
    fn given(&self) -> impl Iterator<Item = &str> {
        let short = [("P", self.ranks), ("M", self.microbatches), ("V", self.virtual_stages)];
        let short = short.into_iter().filter(|(_, value)| value.is_some()).map(|(name, _)| name);
        short.chain(self.set.iter().map(|(name, _)| name.as_str()))
    }

    fn only(&self, known: &[&str], what: &str) -> Result<(), Failure> {
        let mut names: Vec<&str> = self.given().collect();
        names.sort_unstable();
        if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(Failure::Usage(format!("`{}` is given twice", pair[0])));
        }
        match self.given().find(|name| !known.contains(name)) {
            Some(name) if known.is_empty() => {
                Err(Failure::Usage(format!("{what} has no parameters, but `{name}` is given")))
            }
            Some(name) => Err(Failure::Usage(format!("{what} has no parameter `{name}`: it has {}", known.join(", ")))),
            None => Ok(()),
        }
    }
}

/// The form of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Form {
    /// PyTorch's compute-only CSV.
    Csv,
    /// A lowered program with communication.
    Lowered,
    /// JSON.
    Json,
    /// The language of `schedule!`.
    Program,
}

impl Form {
    /// Told from the name, else from the contents.
    fn of(name: &str, text: &str) -> Form {
        let csv = if text::is_lowered(text) { Form::Lowered } else { Form::Csv };
        match Path::new(name).extension().and_then(|e| e.to_str()) {
            Some("csv") => csv,
            Some("json") => Form::Json,
            Some("sched" | "rs") => Form::Program,
            _ => match text.trim_start().chars().next() {
                Some('{') => Form::Json,
                Some(c) if c.is_ascii_digit() || c == '(' || c == ',' => csv,
                _ => Form::Program,
            },
        }
    }

    /// As messages call it.
    pub fn name(self) -> &'static str {
        match self {
            Form::Csv => "compute-only CSV",
            Form::Lowered => "lowered program",
            Form::Json => "JSON",
            Form::Program => "schedule program",
        }
    }
}

/// All schedules that have a name.
pub fn everything() -> impl Iterator<Item = &'static qeffect_schedules::Entry> {
    let (training, evaluation) = qeffect_schedules::library().split_at(
        qeffect_schedules::library().iter().position(|entry| entry.eval).unwrap_or(qeffect_schedules::library().len()),
    );
    training.iter().chain(qeffect_schedules::further()).chain(evaluation)
}

/// Reads and checks a schedule.
///
/// # Errors
///
/// If there is none of that name, it cannot be read, or the checker refuses it.
pub fn load(source: &str, parameters: &Parameters) -> Result<Checked, Failure> {
    load_on(source, parameters, None).map(|(checked, _)| checked)
}

/// As [`load`], judged on another transport than the schedule's own; with the form of the file, none for a schedule of
/// the library.
pub fn load_on(
    source: &str,
    parameters: &Parameters,
    transport: Option<Transport>,
) -> Result<(Checked, Option<Form>), Failure> {
    if qeffect_schedules::by_name(source).is_some() {
        let checked = library(source, parameters)?;
        if transport.is_none_or(|transport| transport == checked.schedule.transport) {
            return Ok((checked, None));
        }
        let checked = judge(checked.schedule, transport);
        let refused = |report| Failure::Refused(Box::new(Refusal { name: source.to_owned(), report, map: None }));
        return Ok((checked.map_err(refused)?, None));
    }
    let text = contents(source)?;
    let form = Form::of(source, &text);
    if form != Form::Program {
        parameters.only(&[], &format!("`{source}`"))?;
    }
    let name = Path::new(source).file_stem().and_then(|stem| stem.to_str()).unwrap_or("schedule");
    let (result, map) = match form {
        Form::Csv => in_words(finish(text::read_csv(name, source, &text), transport)),
        Form::Json => finish(json::read_schedule(source, &text), transport),
        Form::Lowered => in_words(lowered(name, source, &text, transport)),
        Form::Program => program(source, &text, parameters, transport)?,
    };
    match result {
        Ok(checked) => Ok((checked, Some(form))),
        Err(report) => Err(Failure::Refused(Box::new(Refusal { name: source.to_owned(), report, map: Some(map) }))),
    }
}

fn contents(source: &str) -> Result<String, Failure> {
    let mut bytes = Vec::new();
    let read = match source {
        "-" => std::io::stdin().lock().read_to_end(&mut bytes).map(|_| ()),
        path => std::fs::read(path).map(|read| bytes = read),
    };
    if let Err(error) = read {
        let is_name = !source.contains(['/', '.', '\\']) && error.kind() == std::io::ErrorKind::NotFound;
        return Err(if is_name { unknown(source) } else { Failure::file(source, &error) });
    }
    String::from_utf8(bytes).map_err(|_| Failure::File(format!("{source}: the file is not text in UTF-8")))
}

fn unknown(name: &str) -> Failure {
    let names = everything().map(|entry| entry.name);
    let near = names.min_by_key(|known| distance(name, known)).filter(|known| distance(name, known) <= 3);
    let hint = match near {
        Some(near) => format!("did you mean `{near}`?"),
        None => "`qeffect schedule list` shows the library".to_owned(),
    };
    Failure::Usage(format!("there is no schedule and no file `{name}`: {hint}"))
}

/// Edits that make one word of the other.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (n, from) in a.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], n + 1);
        for (m, to) in b.iter().enumerate() {
            let change = diagonal + usize::from(from != *to);
            diagonal = row[m + 1];
            row[m + 1] = change.min(row[m] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

/// A schedule of the library.
///
/// # Errors
///
/// If it has no such parameter, or the checker refuses the values.
pub fn library(name: &str, parameters: &Parameters) -> Result<Checked, Failure> {
    let entry = qeffect_schedules::by_name(name).ok_or_else(|| unknown(name))?;
    let general = general(name);
    let known: &[&str] = if general.is_some() { &["P", "M", "V"] } else { &["P", "M"] };
    parameters.only(known, &format!("`{name}`"))?;
    let (ranks, microbatches) = parameters.size();
    let result = match (general, parameters.get("V")) {
        (Some(build), Some(virtual_stages)) => build(ranks, microbatches, virtual_stages),
        _ => entry.checked(ranks, microbatches).map(std::borrow::Cow::into_owned),
    };
    result.map_err(|report| Failure::Refused(Box::new(Refusal { name: name.to_owned(), report, map: None })))
}

type Build = fn(i64, i64, i64) -> Result<Checked, Report>;

/// Schedules for any number of virtual stages.
fn general(name: &str) -> Option<Build> {
    match name {
        "interleaved_1f1b" => Some(qeffect_schedules::interleaved_1f1b::build),
        "interleaved_zb" => Some(qeffect_schedules::interleaved_zb::build),
        "kimi_k2" => Some(qeffect_schedules::kimi_k2::build),
        "looped_bfs" => Some(qeffect_schedules::looped_bfs::build),
        "eval" | "eval_loop" => Some(qeffect_schedules::eval_loop::build),
        _ => None,
    }
}

type Judged = (Result<Checked, Report>, SourceMap);

fn finish((schedule, map): (Result<Schedule, Report>, SourceMap), transport: Option<Transport>) -> Judged {
    (schedule.and_then(|schedule| judge(schedule, transport)), map)
}

/// Faults of a CSV name actions as the file does.
fn in_words((result, map): Judged) -> Judged {
    (result.map_err(text::spelt), map)
}

/// The checker's verdict, on the schedule's own transport or another one.
fn judge(mut schedule: Schedule, transport: Option<Transport>) -> Result<Checked, Report> {
    schedule.transport = transport.unwrap_or(schedule.transport);
    check::check(schedule, &Options::AT_START)
}

/// A lowered program: its actions are judged first, then its communication.
fn lowered(name: &str, file: &str, text: &str, transport: Option<Transport>) -> Judged {
    let (raw, map) = text::read_plan(name, file, text);
    let result = raw.and_then(|raw| {
        let placement = raw.schedule.placement.clone();
        let checked = judge(raw.schedule, transport)?;
        let faults = messages::check_on(&raw.nodes, &placement, checked.schedule.transport);
        if faults.is_empty() { Ok(checked) } else { Err(Report::from_faults(faults)) }
    });
    (result, map)
}

fn program(file: &str, text: &str, parameters: &Parameters, transport: Option<Transport>) -> Result<Judged, Failure> {
    let (program, map) = lang::read(file, text);
    let program = match program {
        Ok(program) => program,
        Err(report) => return Ok((Err(report), map)),
    };
    let values = values(&program, parameters)?;
    let result = lang::interpret(&program, &values).and_then(|schedule| {
        judge(schedule, transport).map_err(|mut report| {
            lang::annotate(&mut report, &program, &values);
            report
        })
    });
    Ok((result, map))
}

/// What is given, else the first declared instance.
fn values(program: &Program, parameters: &Parameters) -> Result<Vec<i64>, Failure> {
    let names: Vec<&str> = program.params.iter().map(|param| program.text(param.name)).collect();
    let what = format!("`{}`", program.name);
    parameters.only(&names, &what)?;
    let declared = program.instances.first().map(|instance| instance.values.to_vec());
    let value = |(n, name): (usize, &&str)| {
        let declared = declared.as_ref().and_then(|values| values.get(n).copied());
        parameters.get(name).or(declared).ok_or_else(|| {
            let flag = match *name {
                "P" => "-p N".to_owned(),
                "M" => "-m N".to_owned(),
                "V" => "-v N".to_owned(),
                name => format!("--set {name}=N"),
            };
            Failure::Usage(format!("{what} needs a value of `{name}`: give {flag}"))
        })
    };
    names.iter().enumerate().map(value).collect()
}
