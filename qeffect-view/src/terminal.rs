//! Ranks against time, in characters.
//!
//! Labels are shown if they fit the width; a picture a few times too wide is folded into bands, and
//! one wider still is squeezed to a letter per column. Nothing is ever wider than asked for.
//!
//! ```text
//! time    0     2     4     6     8
//! rank 0  F0 F1 I0 W0 ·  ·  I1 W1 ·
//! rank 1  ·  F0 I0 F1 ...
//! ```

use core::fmt::Write;
use core::ops::Range;

use qeffect_core::action::Kind;

use crate::color::{self, Theme};
use crate::scene::{Bar, Scene, describe, family};

/// How a picture is written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Options {
    /// Columns at most; at least 40 are taken.
    pub width: usize,
    /// Colours, as escape sequences of 256-colour terminals.
    pub color: bool,
    /// Only characters of ASCII.
    pub ascii: bool,
    /// Surroundings that the colours are for.
    pub theme: Theme,
}

impl Default for Options {
    fn default() -> Self {
        Options { width: 100, color: false, ascii: false, theme: Theme::Dark }
    }
}

/// Most bands that a picture with labels is folded into.
const MOST_BANDS: usize = 8;

/// The picture, its legend and its numbers.
pub fn render(scene: &Scene, options: &Options) -> String {
    let ink = Ink { options, scene };
    let gutter = "rank ".len() + digits(u64::from(scene.ranks.saturating_sub(1))) + 2;
    let room = options.width.max(40) - gutter;
    let scale = Scale::choose(scene, room);
    let rows: Vec<Vec<Cell>> = (0..scene.ranks).map(|rank| ink.row(rank, &scale)).collect();
    let mut out = String::new();
    let _ = writeln!(out, "{}\n", scene.title());
    let bands = scale.bands(room);
    for (band, range) in bands.iter().enumerate() {
        let _ = writeln!(out, "{:gutter$}{}", "time", axis(&scale, range).trim_end());
        for (rank, row) in rows.iter().enumerate() {
            let name = format!("rank {rank}");
            let _ = writeln!(out, "{name:gutter$}{}", ink.paint(&row[range.clone()]));
        }
        if band + 1 < bands.len() {
            out.push('\n');
        }
    }
    out.push('\n');
    ink.legend(&mut out, &scale);
    summary(&mut out, scene);
    out
}

/// The programs alone, one line per step and one column per rank, as PyTorch prints them.
pub fn steps(scene: &Scene) -> String {
    let width = scene.bars.iter().map(|bar| bar.key().len()).max().unwrap_or(0).max("rank 0".len() + 1);
    let longest = (0..scene.ranks).map(|rank| scene.rank(rank).len()).max().unwrap_or(0);
    let head = "step ".len() + digits(longest.saturating_sub(1) as u64);
    let mut out = format!("{:head$}", "");
    for rank in 0..scene.ranks {
        let _ = write!(out, "  {:width$}", format!("rank {rank}"));
    }
    for step in 0..longest {
        out.truncate(out.trim_end().len());
        let _ = write!(out, "\n{:head$}", format!("step {step}"));
        for rank in 0..scene.ranks {
            let key = scene.rank(rank).get(step).map(Bar::key).unwrap_or_default();
            let _ = write!(out, "  {key:width$}");
        }
    }
    out.truncate(out.trim_end().len());
    out.push('\n');
    out
}

/// Makespan, bubbles and peaks, as lines of text.
pub fn summary(out: &mut String, scene: &Scene) {
    let percent = scene.bubble_percent();
    let _ = writeln!(
        out,
        "makespan {}   bubble {} ({percent:.1} % of the makespan)   idle inside a rank {}",
        scene.makespan, scene.bubble, scene.idle
    );
    let list = |name: &str, value: fn(&qeffect_core::plan::Peaks) -> u32| {
        let values: Vec<u32> = scene.peaks.iter().map(value).collect();
        match values.first() {
            Some(first) if values.len() > 1 && values.iter().all(|v| v == first) => format!("{name} {first} on each"),
            _ => format!("{name} {}", values.iter().map(u32::to_string).collect::<Vec<_>>().join(" ")),
        }
    };
    let lists = [list("slots", |p| p.slots), list("tapes", |p| p.tapes), list("works", |p| p.works)];
    let _ = writeln!(out, "peaks by rank: {}", lists.join(", "));
}

/// Columns per unit of time, as a fraction, so that positions are exact.
struct Scale {
    numerator: i64,
    denominator: i64,
    columns: usize,
    labels: bool,
}

impl Scale {
    fn choose(scene: &Scene, room: usize) -> Scale {
        let shortest = scene.bars.iter().map(|bar| bar.end - bar.start).filter(|t| *t > 0).min().unwrap_or(1);
        let label = scene.bars.iter().map(|bar| scene.label(bar).len()).max().unwrap_or(1) as i64;
        let columns = ceil(scene.makespan * (label + 1), shortest) as usize;
        if columns <= room.saturating_mul(MOST_BANDS) {
            // Whole columns per unit of time, if they fit: then equal costs look equal.
            let whole = ceil(label + 1, shortest);
            if whole as usize * (scene.makespan as usize) <= room.max(columns) {
                let columns = whole as usize * scene.makespan as usize;
                return Scale { numerator: whole, denominator: 1, columns, labels: true };
            }
            return Scale { numerator: label + 1, denominator: shortest, columns, labels: true };
        }
        let columns = room.min(scene.makespan.max(0) as usize);
        Scale { numerator: columns as i64, denominator: scene.makespan.max(1), columns, labels: false }
    }

    fn per_unit(&self) -> f64 {
        self.numerator as f64 / self.denominator as f64
    }

    /// Ranges of columns, of about equal width, each no wider than the room and cut between units.
    fn bands(&self, room: usize) -> Vec<Range<usize>> {
        let unit = if self.denominator == 1 { self.numerator as usize } else { 1 };
        let most = (room / unit).max(1) * unit;
        let count = self.columns.div_ceil(most).max(1);
        let width = self.columns.div_ceil(count).next_multiple_of(unit);
        (0..count).map(|n| (n * width).min(self.columns)..((n + 1) * width).min(self.columns)).collect()
    }

    fn column(&self, time: i64) -> usize {
        (((i128::from(time) * i128::from(self.numerator)) / i128::from(self.denominator)) as usize).min(self.columns)
    }

    /// The time at the left edge of a column, rounded up.
    fn time(&self, column: usize) -> i64 {
        ceil(column as i64 * self.denominator, self.numerator.max(1))
    }
}

/// Tick labels, as dense as they can stand.
fn axis(scale: &Scale, range: &Range<usize>) -> String {
    let mut out = String::new();
    let widest = digits(scale.time(range.end).max(0) as u64) + 2;
    let least = scale.time(widest).max(1);
    let power = 10i64.pow(least.ilog10());
    let step = [1, 2, 5, 10].map(|m| m * power).into_iter().find(|s| *s >= least).unwrap_or(least);
    let mut tick = scale.time(range.start).div_euclid(step) * step;
    while scale.column(tick) < range.end {
        if scale.column(tick) >= range.start {
            let column = scale.column(tick) - range.start;
            if column >= out.len() && column + digits(tick as u64) <= range.len() {
                let _ = write!(out, "{:pad$}{tick}", "", pad = column - out.len());
            }
        }
        tick += step;
        if scale.column(tick) == scale.columns {
            break;
        }
    }
    out
}

#[derive(Clone, Copy, PartialEq, Eq)]
struct Cell {
    character: char,
    paint: Option<(Kind, u32)>,
}

struct Ink<'a> {
    options: &'a Options,
    scene: &'a Scene,
}

impl Ink<'_> {
    fn idle(&self) -> char {
        if self.options.ascii { '.' } else { '·' }
    }

    fn row(&self, rank: u32, scale: &Scale) -> Vec<Cell> {
        let mut row = vec![Cell { character: self.idle(), paint: None }; scale.columns];
        if scale.labels && scale.denominator == 1 && !self.options.color {
            // One mark per unit of idle time.
            for (column, cell) in row.iter_mut().enumerate() {
                if column as i64 % scale.numerator != 0 {
                    cell.character = ' ';
                }
            }
        }
        for bar in self.scene.rank(rank) {
            let (start, end) = sequential(bar);
            let (from, to) = (scale.column(start), scale.column(end));
            let to = if to == from && end > start { (from + 1).min(scale.columns) } else { to };
            self.bar(bar, &mut row[from..to], scale.labels);
        }
        row
    }

    fn bar(&self, bar: &Bar, cells: &mut [Cell], labels: bool) {
        let paint = Some((family(bar.item.kind), bar.virtual_stage));
        let width = cells.len();
        let label = if labels { self.scene.label(bar) } else { bar.letter().to_string() };
        let label = if label.len() > width { bar.letter().to_string() } else { label };
        let rest = match (self.options.color || !labels, self.options.ascii) {
            (true, _) if labels => ' ',
            (true, _) => bar.letter(),
            (false, true) => '-',
            (false, false) => '─',
        };
        for (n, cell) in cells.iter_mut().enumerate() {
            let last = labels && n + 1 == width && width > 1 && n >= label.len();
            let character = label.chars().nth(n).unwrap_or(if last { ' ' } else { rest });
            *cell = Cell { character, paint: if last && !self.options.color { None } else { paint } };
        }
        // A thin gap ends a coloured bar, so that neighbours of one kind stay apart.
        if self.options.color
            && labels
            && width > 2
            && let Some(cell) = cells.last_mut()
            && cell.character == ' '
        {
            cell.paint = None;
        }
    }

    fn paint(&self, cells: &[Cell]) -> String {
        let mut out = String::new();
        for run in cells.chunk_by(|a, b| a.paint == b.paint) {
            let text: String = run.iter().map(|cell| cell.character).collect();
            match run[0].paint {
                Some((kind, number)) if self.options.color => self.colored(&mut out, kind, number, &text),
                None if self.options.color => {
                    let _ = write!(out, "\x1b[2m{text}\x1b[0m");
                }
                _ => out.push_str(&text),
            }
        }
        if self.options.color { out } else { out.trim_end().to_owned() }
    }

    fn colored(&self, out: &mut String, kind: Kind, number: u32, text: &str) {
        let fill = color::fill(kind, number, self.scene.virtual_stages, self.options.theme);
        let (back, front) = (fill.ansi256(), color::text_on(fill).ansi256());
        let _ = write!(out, "\x1b[48;5;{back}m\x1b[38;5;{front}m{text}\x1b[0m");
    }

    fn legend(&self, out: &mut String, scale: &Scale) {
        let mut parts = Vec::new();
        for kind in self.scene.kinds() {
            let mut part = String::new();
            if self.options.color {
                for number in 0..self.scene.virtual_stages {
                    let text = if number == 0 { format!(" {} ", kind.letter().unwrap_or('?')) } else { "  ".into() };
                    self.colored(&mut part, kind, number, &text);
                }
                let _ = write!(part, "{}", &describe(kind)[1..]);
            } else {
                part.push_str(describe(kind));
            }
            parts.push(part);
        }
        parts.push(format!("{} idle", self.idle()));
        let _ = writeln!(out, "{}", parts.join("   "));
        if scale.labels && self.scene.virtual_stages > 1 {
            let _ = writeln!(out, "2F7: stage 2, F, microbatch 7");
        }
        if !scale.labels {
            let _ = writeln!(out, "too wide for labels: a column is {:.1} units of time", 1.0 / scale.per_unit());
        }
    }
}

/// A line has no room for branches that run at once: they stand one after the other in their span.
fn sequential(bar: &Bar) -> (i64, i64) {
    let Some(branch) = bar.overlap else { return (bar.start, bar.end) };
    let within = |time: i64| {
        branch.start
            + ((time - branch.start) + i64::from(branch.number) * (branch.end - branch.start)) / i64::from(branch.of)
    };
    (within(bar.start), within(bar.end))
}

fn ceil(n: i64, by: i64) -> i64 {
    (n + by - 1) / by
}

fn digits(n: u64) -> usize {
    n.checked_ilog10().map_or(1, |n| n as usize + 1)
}
