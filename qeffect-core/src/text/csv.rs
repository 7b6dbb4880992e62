//! Compute-only CSV: one row per rank, one action per cell, empty cells idle.

use std::borrow::Cow;
use std::fmt::Write;

use super::cell::{Cell, Field, cell, container, fault, rows};
use super::plan::is_lowered_word;
use super::words::spelt;
use crate::action::{Item, Kind};
use crate::code::Code;
use crate::diag::{Diagnostic, Place, Report};
use crate::ids::{Microbatch, Rank, Stage};
use crate::lang::MAX_RANKS;
use crate::origin::Origin;
use crate::schedule::{HeaderOrigins, Schedule, Transport, Update};
use crate::source::SourceMap;

/// What a compute cell says.
const COMPUTE: &[&str] = &["F", "I", "W", "B", "R"];
/// What PyTorch's schedules of one stage per rank say of a whole stage. Waiting for the reduction is
/// read over: nothing runs between it and the end of the step.
const OF_STAGE: &[&str] = &["REDUCE_GRAD", "WAIT_REDUCE_GRAD"];

/// Most actions named that are of a microbatch too many; the rest has the same cause.
const EXCESS_NAMED: usize = 8;

/// Whether a type may stand in a compute-only file.
pub(super) fn is_compute_only(word: &str) -> bool {
    COMPUTE.contains(&word) || OF_STAGE.contains(&word)
}

/// The kind that a compute type names.
pub(super) fn kind(word: &str) -> Option<Kind> {
    Some(match word {
        "F" => Kind::Forward,
        "I" => Kind::InputGrad,
        "W" => Kind::WeightGrad,
        "B" => Kind::FullBackward,
        "R" => Kind::Recompute,
        "REDUCE_GRAD" => Kind::Reduce,
        _ => return None,
    })
}

/// Reads a compute-only CSV; the map draws reports about it.
///
/// `name` becomes the schedule's name, `file` the name that messages show. Stages, microbatches and
/// placement are those that the rows show; a file without any backward is forward-only. Actions of the
/// last microbatches, if most stages do not run these, are refused.
pub fn read_csv(name: &str, file: &str, text: &str) -> (Result<Schedule, Report>, SourceMap) {
    let mut map = SourceMap::new(file, text);
    let result = rows(text, &mut map).and_then(|rows| {
        let mut reader = Reader::default();
        for row in &rows {
            row.iter().for_each(|field| reader.field(field));
            reader.starts.push(reader.items.len() as u32);
        }
        reader.schedule(name, rows.len())
    });
    (result.map_err(|faults| spelt(Report::from_faults(faults))), map)
}

#[derive(Default)]
struct Reader {
    items: Vec<Item>,
    starts: Vec<u32>,
    faults: Vec<Diagnostic>,
}

impl Reader {
    fn field(&mut self, field: &Field<'_>) {
        let Field { text, origin } = *field;
        if text.is_empty() {
            return;
        }
        if let Some((parts, name)) = container(text) {
            return self.overlap(&parts, name, origin);
        }
        if let Some(item) = self.item(text, origin) {
            self.items.push(item);
        }
    }

    fn item(&mut self, text: &str, origin: Origin) -> Option<Item> {
        match compute(text) {
            Ok(Cell { stage, word, microbatch }) => {
                Some(Item::new(kind(word)?, stage, microbatch.unwrap_or(0), origin.0))
            }
            Err(why) => {
                self.faults.push(fault(origin, why));
                None
            }
        }
    }

    /// `(0F1;1B0)OVERLAP_F_B`: parts that may run at once.
    fn overlap(&mut self, parts: &[&str], name: &str, origin: Origin) {
        if is_lowered_word(name) {
            self.faults.push(fault(origin, lowered(name)));
            return;
        }
        if name != "OVERLAP_F_B" || parts.len() < 2 {
            let message = format!("`({})` needs two actions or more and the name `OVERLAP_F_B`", parts.join(";"));
            let help = "write `(0F1;1B0)OVERLAP_F_B`";
            self.faults.push(Diagnostic::new(Code::Syntax, origin, message).help(help));
            return;
        }
        self.items.push(Item::new(Kind::OverlapBegin, 0, 0, origin.0));
        for part in parts {
            self.items.push(Item::new(Kind::OverlapBranch, 0, 0, origin.0));
            if let Some(item) = self.item(part, origin) {
                self.items.push(item);
            }
        }
        self.items.push(Item::new(Kind::OverlapEnd, 0, 0, origin.0));
    }

    fn schedule(mut self, name: &str, ranks: usize) -> Result<Schedule, Vec<Diagnostic>> {
        if ranks > MAX_RANKS as usize {
            let message = format!("the file has {ranks} rows, more than {MAX_RANKS} ranks");
            self.faults.push(Diagnostic::new(Code::LimitExceeded, Origin::NONE, message));
        }
        if self.faults.is_empty() {
            self.faults = oversized(&self.items);
        }
        if !self.faults.is_empty() {
            return Err(self.faults);
        }
        let mut starts = vec![0];
        starts.append(&mut self.starts);
        assemble(name, ranks as u32, self.items, starts)
    }
}

fn compute(text: &str) -> Result<Cell<'_>, (Code, String, Option<String>)> {
    cell(text, COMPUTE, OF_STAGE).map_err(|why| if is_lowered_word(text) { lowered(text) } else { why })
}

fn lowered(word: &str) -> (Code, String, Option<String>) {
    let word = word.trim_matches(|c: char| c.is_ascii_digit());
    let message = format!("`{word}` belongs to a lowered program, not to a compute-only one");
    (Code::Syntax, message, Some("remove it, or read the file as a lowered program with `read_plan`".to_owned()))
}

/// Numbers that the file cannot fill: there is an F for each of M microbatches of each stage.
pub(super) fn oversized(items: &[Item]) -> Vec<Diagnostic> {
    let most = items.len() as u32;
    let computes = items.iter().filter(|item| item.kind.is_compute());
    let large = computes.filter(|item| item.stage.0 >= most || item.microbatch.0 >= most);
    let fault = |item: &Item| {
        let message = format!("{item} cannot be: the file has {most} actions in all");
        Diagnostic::new(Code::OutOfRange, item.origin, message)
    };
    large.map(fault).collect()
}

/// A schedule from rows of items: the rest is read off them.
pub(super) fn assemble(
    name: &str,
    ranks: u32,
    items: Vec<Item>,
    starts: Vec<u32>,
) -> Result<Schedule, Vec<Diagnostic>> {
    let (mut microbatches, mut eval) = (0, true);
    // No stage lies beyond the number of items: see [`oversized`].
    let mut home: Vec<Option<Rank>> = Vec::new();
    for rank in 0..ranks {
        for item in &items[starts[rank as usize] as usize..starts[rank as usize + 1] as usize] {
            if item.kind.is_compute() {
                if home.len() <= item.stage.index() {
                    home.resize(item.stage.index() + 1, None);
                }
                home[item.stage.index()].get_or_insert(Rank(rank));
                microbatches = microbatches.max(item.microbatch.0 + 1);
                eval &= item.kind == Kind::Forward;
            }
        }
    }
    let stages = home.len() as u32;
    let mut faults = Vec::new();
    let mut placement = Vec::with_capacity(home.len());
    for (stage, rank) in home.iter().enumerate() {
        match rank {
            Some(rank) => placement.push(*rank),
            None => {
                let above =
                    items.iter().find(|item| item.stage.index() > stage).map_or(Origin::NONE, |item| item.origin);
                let message = format!("stage {stage} runs on no rank");
                faults.push(Diagnostic::new(Code::PlacementInvalid, above, message).role("a later stage"));
            }
        }
    }
    let eval = eval && stages > 0;
    if faults.is_empty() {
        faults = excess(&items, stages, microbatches, eval);
    }
    if faults.is_empty() {
        faults = unreduced(&items, stages);
    }
    if !faults.is_empty() {
        return Err(faults);
    }
    Ok(Schedule {
        name: Cow::Owned(name.to_owned()),
        params: Cow::Borrowed(&[]),
        ranks,
        stages,
        microbatches,
        placement: placement.into(),
        items: items.into(),
        starts: starts.into(),
        bounds: Cow::Borrowed(&[]),
        expects: Cow::Borrowed(&[]),
        transport: Transport::default(),
        update: Update::default(),
        eval,
        coalesce: 1,
        bytes: None,
        origins: HeaderOrigins::NONE,
    })
}

/// A file does not say how many microbatches there are. The last ones, where most of their forwards and backwards are
/// missing, are too many: fewer edits take them out than complete them, and those who have them are the odd ones out.
fn excess(items: &[Item], stages: u32, microbatches: u32, eval: bool) -> Vec<Diagnostic> {
    let mut actions = vec![0u64; microbatches as usize];
    for item in items {
        if matches!(item.kind, Kind::Forward | Kind::InputGrad | Kind::FullBackward) {
            actions[item.microbatch.index()] += 1;
        }
    }
    let (complete, what) = match eval {
        true => (u64::from(stages), "forwards"),
        false => (2 * u64::from(stages), "forwards and backwards"),
    };
    let kept = microbatches - actions.iter().rev().take_while(|found| 2 * **found < complete).count() as u32;
    if kept == 0 {
        return Vec::new(); // no microbatch is more usual than another
    }
    let fault = |item: &Item| {
        let (microbatch, found) = (item.microbatch, actions[item.microbatch.index()]);
        let message =
            format!("{item} names microbatch {microbatch}, of which the file has {found} of {complete} {what}");
        let fault = Diagnostic::new(Code::OutOfRange, item.origin, message)
            .note(format!("the file has microbatches 0 to {} without it", kept - 1))
            .help("take it out, or run the whole of that microbatch");
        match absent(items, item, kept) {
            Some(absent) => fault.note(format!("{absent} is missing")),
            None => fault,
        }
    };
    let beyond = items.iter().filter(|item| item.kind.is_compute() && item.microbatch.0 >= kept);
    beyond.take(EXCESS_NAMED).map(fault).collect()
}

/// What `like` says of a microbatch among the first `kept`, the lowest of which nothing says it.
fn absent(items: &[Item], like: &Item, kept: u32) -> Option<Item> {
    let mut found = vec![false; kept as usize];
    for item in items.iter().filter(|item| (item.kind, item.stage) == (like.kind, like.stage)) {
        if let Some(found) = found.get_mut(item.microbatch.index()) {
            *found = true;
        }
    }
    let microbatch = found.iter().position(|found| !found)? as u32;
    Some(Item { microbatch: Microbatch(microbatch), ..*like })
}

/// A file that reduces the gradients of some stage does so for every stage: on a rank that has no such
/// word the reduction would be inserted, and nobody would see that the file forgot it.
fn unreduced(items: &[Item], stages: u32) -> Vec<Diagnostic> {
    let mut last: Vec<Option<Origin>> = vec![None; stages as usize];
    let mut reduced = vec![false; stages as usize];
    let mut some = None;
    for item in items {
        // A word of a stage that runs nothing is the checker's to refuse.
        if item.stage.index() >= stages as usize {
            continue;
        }
        if item.kind == Kind::Reduce {
            reduced[item.stage.index()] = true;
            some.get_or_insert(*item);
        } else if is_gradient_of(item, item.stage) {
            last[item.stage.index()] = Some(item.origin);
        }
    }
    let Some(some) = some else { return Vec::new() };
    let missing = last.iter().zip(&reduced).enumerate().filter(|(_, (_, reduced))| !**reduced);
    let fault = |stage: usize, last: Origin| {
        let message = format!("stage {stage} has no `{stage}REDUCE_GRAD`, though stage {} has one", some.stage);
        Diagnostic::new(Code::ReduceMisplaced, last, message)
            .role("its last gradient")
            .label(some.origin, "the file writes reductions")
            .help(format!("write `{stage}REDUCE_GRAD` behind it, or no `REDUCE_GRAD` at all"))
    };
    missing.filter_map(|(stage, (last, _))| last.map(|last| fault(stage, last))).collect()
}

/// Writes a compute-only CSV as PyTorch does: no header, CRLF.
///
/// # Errors
///
/// What the format cannot say: coalesced weight gradients, branches of an overlap with more than one
/// action, recomputation, and refresh, commit, or a reduce that does not follow the last gradient.
pub fn write_csv(schedule: &Schedule) -> Result<String, Report> {
    let mut out = String::new();
    let mut faults = Vec::new();
    for rank in 0..schedule.ranks {
        let mut first = true;
        // Within an overlap: how many actions the branch has so far.
        let mut branch: Option<usize> = None;
        let items = schedule.rank(Rank(rank));
        for (index, item) in items.iter().enumerate() {
            if item.kind == Kind::Reduce && index > 0 && is_gradient_of(&items[index - 1], item.stage) {
                continue; // where lowering puts it
            }
            let separator = match (item.kind, branch) {
                (Kind::OverlapEnd, _) => ")OVERLAP_F_B",
                (Kind::OverlapBranch, _) | (_, Some(_)) => "",
                _ if first => "",
                _ => ",",
            };
            out.push_str(separator);
            first = false;
            let mut refuse = |why: &str| {
                let place = Place { origin: item.origin, item: Some((Rank(rank), index as u32)) };
                let message = format!("{item} cannot be written as compute-only CSV: {why}");
                faults.push(Diagnostic::new(Code::Syntax, place, message));
            };
            match (item.kind, &mut branch) {
                (Kind::OverlapBegin, branch) => {
                    *branch = Some(usize::MAX);
                    out.push('(');
                }
                (Kind::OverlapBranch, Some(count)) => {
                    match *count {
                        usize::MAX => {}
                        1 => out.push(';'),
                        _ => refuse("a branch of an overlap is one action there"),
                    }
                    *count = 0;
                }
                (Kind::OverlapEnd, Some(count)) => {
                    if *count != 1 {
                        refuse("a branch of an overlap is one action there");
                    }
                    branch = None;
                }
                (Kind::Forward | Kind::InputGrad | Kind::WeightGrad | Kind::FullBackward, count) => {
                    if let Some(count) = count {
                        *count += 1;
                    }
                    write_cell(&mut out, item.stage, item.kind, item.microbatch);
                }
                (Kind::Refresh | Kind::Reduce | Kind::Commit, _) => {
                    refuse("it has no bookkeeping; leave it out, it is inserted when the schedule is lowered");
                }
                (Kind::WeightGradJoin, _) => refuse("it has no coalesced weight gradient"),
                (Kind::Recompute, _) => refuse("it has no recomputation"),
                (Kind::OverlapBranch | Kind::OverlapEnd, None) => refuse("it stands outside an overlap"),
            }
        }
        out.push_str("\r\n");
    }
    if faults.is_empty() { Ok(out) } else { Err(Report::from_faults(faults)) }
}

fn is_gradient_of(item: &Item, stage: Stage) -> bool {
    let gradient = matches!(item.kind, Kind::InputGrad | Kind::WeightGrad | Kind::WeightGradJoin | Kind::FullBackward);
    gradient && item.stage == stage
}

fn write_cell(out: &mut String, stage: Stage, kind: Kind, microbatch: Microbatch) {
    let _ = write!(out, "{stage}{}{microbatch}", kind.letter().unwrap_or('?'));
}
