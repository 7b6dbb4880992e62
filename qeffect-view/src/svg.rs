//! A timeline as SVG: one lane per rank, readable on white and on black, in colour and in grey.
//!
//! The file carries its own style, follows `prefers-color-scheme`, and needs no font, script or
//! other file. Idle time is hatched, so the bubble is something that one sees. With
//! [`Options::titles`] a browser shows key, times, slot and what is live under the pointer.

use core::fmt::Write;

use qeffect_core::action::Kind;

use crate::color::{self, Rgb, Theme};
use crate::scene::{Bar, FAMILIES, Scene, describe, family};

/// How a picture is drawn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Options {
    /// Most pixels of the time axis. Less is taken if every label has room.
    pub width: u32,
    /// Details of each action as a tooltip (the file grows fourfold).
    pub titles: bool,
}

impl Default for Options {
    fn default() -> Self {
        Options { width: 1240, titles: false }
    }
}

const LEFT: f64 = 64.0;
const TOP: f64 = 56.0;
const LANE: f64 = 28.0;
const PITCH: f64 = 36.0;
/// Width of the columns of numbers at the right.
const COLUMN: f64 = 44.0;
const MARGIN: f64 = 18.0;
/// Sizes of the labels, in pixels: the largest that fits is taken.
const SIZES: [f64; 3] = [11.0, 10.0, 9.0];

/// The picture.
pub fn render(scene: &Scene, options: &Options) -> String {
    let mut out = String::with_capacity(256 * scene.bars.len() + 8192);
    let plot = Plot::new(scene, options);
    plot.head(&mut out);
    plot.style(&mut out);
    plot.patterns(&mut out);
    plot.captions(&mut out);
    plot.axis(&mut out);
    for rank in 0..scene.ranks {
        plot.lane(&mut out, rank);
    }
    plot.legend(&mut out);
    out.push_str("</svg>\n");
    out
}

struct Plot<'a> {
    scene: &'a Scene,
    titles: bool,
    /// Pixels per unit of time.
    scale: f64,
    /// Pixels of the time axis.
    length: f64,
    width: f64,
    height: f64,
}

impl<'a> Plot<'a> {
    fn new(scene: &'a Scene, options: &Options) -> Plot<'a> {
        let shortest = scene.bars.iter().map(|bar| bar.end - bar.start).filter(|t| *t > 0).min().unwrap_or(1) as f64;
        let label = scene.bars.iter().map(|bar| ems(&scene.label(bar))).fold(0.0, f64::max);
        let span = scene.makespan.max(1) as f64;
        let comfortable = (label * SIZES[0] + 7.0) / shortest;
        let most = f64::from(options.width.max(240));
        let length = (comfortable * span).clamp(most.min(460.0), most);
        let columns = if scene.bars.iter().any(|b| b.item.kind == Kind::InputGrad) { 4.0 } else { 2.0 };
        Plot {
            scene,
            titles: options.titles,
            scale: length / span,
            length,
            width: LEFT + length + 10.0 + columns * COLUMN + MARGIN,
            height: TOP + PITCH * f64::from(scene.ranks) + 78.0,
        }
    }

    fn x(&self, time: i64) -> f64 {
        LEFT + time as f64 * self.scale
    }

    fn y(&self, rank: u32) -> f64 {
        TOP + PITCH * f64::from(rank)
    }

    fn head(&self, out: &mut String) {
        let (w, h) = (number(self.width), number(self.height));
        let title = escape(&self.scene.title());
        let _ = write!(
            out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {w} {h}\" width=\"{w}\" height=\"{h}\" role=\"img\" \
             aria-labelledby=\"t d\">\n<title id=\"t\">{title}</title>\n<desc id=\"d\">Timeline of {} ranks: makespan {}, \
             bubble {} ({:.1} %), idle inside a rank {}</desc>\n",
            self.scene.ranks,
            self.scene.makespan,
            self.scene.bubble,
            self.scene.bubble_percent(),
            self.scene.idle,
        );
    }

    fn style(&self, out: &mut String) {
        out.push_str(
            "<style>\n\
             svg{background:var(--page);font-family:system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;\
             font-variant-numeric:tabular-nums;--page:#fff;--ink:#141a22;--soft:#5b6673;--line:#dde2e8;--lane:#f3f5f7;--hatch:#c9d0d8}\n\
             text{fill:var(--ink);font-size:11px}\n\
             .h{font-size:16px;font-weight:600}.s{fill:var(--soft)}.e{text-anchor:end}.m{text-anchor:middle;dominant-baseline:central;font-weight:500}\n\
             .g{stroke:var(--line)}.idle{fill:var(--lane)}.ih{stroke:var(--hatch)}\n",
        );
        self.fills(out, Theme::Light);
        out.push_str("@media (prefers-color-scheme:dark){\nsvg{--page:#10151b;--ink:#e7ecf2;--soft:#9aa7b4;--line:#27303a;--lane:#181f27;--hatch:#36414d}\n");
        self.fills(out, Theme::Dark);
        out.push_str("}\n</style>\n");
    }

    /// Per kind and virtual stage: `.F0` the fill, `.F0t` its text. W's fill is a pattern of `.W0f`.
    fn fills(&self, out: &mut String, theme: Theme) {
        for kind in self.scene.kinds() {
            for number in 0..self.scene.virtual_stages {
                let fill = color::fill(kind, number, self.scene.virtual_stages, theme);
                let name = class(kind, number);
                let dot = if hatched(kind) { "f" } else { "" };
                let text = color::text_on(fill);
                let _ = write!(out, ".{name}{dot}{{fill:{}}}text.{name}t,.{name}t{{fill:{}}}", fill.hex(), text.hex());
                if hatched(kind) {
                    let _ = write!(out, ".{name}l{{stroke:{}}}", line_on(fill).hex());
                }
            }
            out.push('\n');
        }
    }

    fn patterns(&self, out: &mut String) {
        out.push_str("<defs>\n");
        out.push_str(
            "<pattern id=\"idle\" width=\"7\" height=\"7\" patternUnits=\"userSpaceOnUse\" patternTransform=\"rotate(45)\">\
             <rect class=\"idle\" width=\"7\" height=\"7\"/><path class=\"ih\" d=\"M0 0V7\" stroke-width=\"1.2\"/></pattern>\n",
        );
        for kind in self.scene.kinds().into_iter().filter(|kind| hatched(*kind)) {
            for number in 0..self.scene.virtual_stages {
                let name = class(kind, number);
                let _ = writeln!(
                    out,
                    "<pattern id=\"{name}\" width=\"5\" height=\"5\" patternUnits=\"userSpaceOnUse\" patternTransform=\"rotate(-45)\">\
                     <rect class=\"{name}f\" width=\"5\" height=\"5\"/><path class=\"{name}l\" d=\"M0 0V5\" stroke-width=\"1.3\"/></pattern>",
                );
            }
        }
        out.push_str("</defs>\n");
    }

    fn captions(&self, out: &mut String) {
        let scene = self.scene;
        let _ = writeln!(out, "<text class=\"h\" x=\"{MARGIN}\" y=\"27\">{}</text>", escape(&scene.title()));
        for (n, name) in self.columns().into_iter().enumerate() {
            let _ =
                writeln!(out, "<text class=\"s e\" x=\"{}\" y=\"{}\">{name}</text>", number(self.column(n)), TOP - 9.0);
        }
    }

    fn columns(&self) -> Vec<&'static str> {
        let split = self.scene.bars.iter().any(|b| b.item.kind == Kind::InputGrad);
        if split { vec!["idle", "slots", "tapes", "works"] } else { vec!["idle", "slots"] }
    }

    fn column(&self, n: usize) -> f64 {
        LEFT + self.length + 10.0 + COLUMN * (n as f64 + 1.0)
    }

    fn axis(&self, out: &mut String) {
        let step = step(54.0 / self.scale);
        let bottom = self.y(self.scene.ranks) - (PITCH - LANE) + 2.0;
        let mut time = 0;
        while time <= self.scene.makespan {
            let x = number(self.x(time));
            let _ = writeln!(out, "<path class=\"g\" d=\"M{x} {}V{}\"/>", TOP - 4.0, number(bottom));
            if self.x(self.scene.makespan) - self.x(time) > 26.0 || time == self.scene.makespan {
                let _ = writeln!(out, "<text class=\"s\" x=\"{x}\" y=\"{}\">{time}</text>", TOP - 9.0);
            }
            time += step;
        }
        let end = self.x(self.scene.makespan);
        let _ = writeln!(out, "<path class=\"g\" d=\"M{0} {1}V{2}\"/>", number(end), TOP - 4.0, number(bottom));
        if (self.scene.makespan % step) != 0 {
            let _ = writeln!(
                out,
                "<text class=\"s e\" x=\"{}\" y=\"{}\">{}</text>",
                number(end),
                TOP - 9.0,
                self.scene.makespan
            );
        }
    }

    fn lane(&self, out: &mut String, rank: u32) {
        let (y, middle) = (self.y(rank), self.y(rank) + LANE / 2.0);
        let _ = writeln!(
            out,
            "<g><text x=\"{MARGIN}\" y=\"{}\" dominant-baseline=\"central\">rank {rank}</text>",
            number(middle)
        );
        let _ = writeln!(
            out,
            "<rect fill=\"url(#idle)\" x=\"{LEFT}\" y=\"{}\" width=\"{}\" height=\"{LANE}\" rx=\"2\"/>",
            number(y),
            number(self.length)
        );
        for bar in self.scene.rank(rank) {
            self.bar(out, bar, y);
        }
        let peaks = self.scene.peaks[rank as usize];
        let idle = self.scene.makespan - self.scene.busy[rank as usize];
        let values = [idle, i64::from(peaks.slots), i64::from(peaks.tapes), i64::from(peaks.works)];
        for (n, value) in values.into_iter().take(self.columns().len()).enumerate() {
            let _ = write!(
                out,
                "<text class=\"e\" dominant-baseline=\"central\" x=\"{}\" y=\"{}\">{value}</text>",
                number(self.column(n)),
                number(middle)
            );
        }
        out.push_str("</g>\n");
    }

    fn bar(&self, out: &mut String, bar: &Bar, lane: f64) {
        let (x, right) = (self.x(bar.start), self.x(bar.end));
        let (y, height) = match bar.overlap {
            Some(branch) => {
                let part = LANE / f64::from(branch.of);
                (lane + part * f64::from(branch.number), part - if branch.number + 1 < branch.of { 1.0 } else { 0.0 })
            }
            None => (lane, LANE),
        };
        let gap = if right - x > 4.0 { 1.0 } else { 0.0 };
        let width = (right - x - gap).max(0.4);
        let name = class(bar.item.kind, bar.virtual_stage);
        let fill = if hatched(bar.item.kind) { format!("fill=\"url(#{name})\"") } else { format!("class=\"{name}\"") };
        let radius = if width > 6.0 { " rx=\"2\"" } else { "" };
        let (px, py, pw, ph) = (number(x), number(y), number(width), number(height));
        if self.titles {
            out.push_str("<g>");
        }
        let _ = write!(out, "<rect {fill} x=\"{px}\" y=\"{py}\" width=\"{pw}\" height=\"{ph}\"{radius}/>");
        if bar.virtual_stage > 0 && width > 2.0 {
            let share = f64::from(bar.virtual_stage) / f64::from(self.scene.virtual_stages - 1);
            let _ = write!(
                out,
                "<rect class=\"{name}t\" opacity=\".55\" x=\"{px}\" y=\"{}\" width=\"{}\" height=\"2.5\"/>",
                number(y + height - 2.5),
                number(width * share)
            );
        }
        if let Some((label, size)) = self.label(bar, width, height) {
            let lift = if bar.virtual_stage > 0 { 0.8 } else { 0.0 };
            let (cx, cy) = (number(x + width / 2.0), number(y + height / 2.0 - lift));
            let small = if size < SIZES[0] { format!(" style=\"font-size:{size}px\"") } else { String::new() };
            let _ = write!(out, "<text class=\"m {name}t\" x=\"{cx}\" y=\"{cy}\"{small}>{label}</text>");
        }
        if self.titles {
            let _ = write!(out, "<title>{}</title></g>", tooltip(bar));
        }
        out.push('\n');
    }

    /// The longest label that fits, `2F7`, `F7` or `7`, and the largest size at which it does. Boxes of one width and
    /// kind have labels of one form and size: that of the longest number.
    fn label(&self, bar: &Bar, width: f64, height: f64) -> Option<(String, f64)> {
        let letter = bar.letter();
        let forms = |stage: u32, microbatch: u32| {
            let short = format!("{letter}{microbatch}");
            let full = if self.scene.virtual_stages > 1 { format!("{stage}{short}") } else { short.clone() };
            [full, short, microbatch.to_string()]
        };
        let longest = forms(self.scene.stages.saturating_sub(1), self.scene.microbatches.saturating_sub(1));
        let sizes = SIZES.into_iter().filter(|size| size + 3.0 <= height);
        forms(bar.item.stage.0, bar.item.microbatch.0).into_iter().zip(longest).find_map(|(label, longest)| {
            let size = sizes.clone().find(|size| ems(&longest) * size + 2.0 <= width)?;
            Some((label, size))
        })
    }

    fn legend(&self, out: &mut String) {
        let scene = self.scene;
        let y = self.y(scene.ranks) + 14.0;
        let mut x = LEFT;
        let mut entry = |out: &mut String, swatches: Vec<(String, String)>, text: &str| {
            for (fill, stripe) in swatches {
                let _ = write!(
                    out,
                    "<rect {fill} x=\"{}\" y=\"{}\" width=\"18\" height=\"12\" rx=\"2\"/>",
                    number(x),
                    number(y)
                );
                out.push_str(&stripe.replace("{x}", &number(x)).replace("{y}", &number(y + 9.5)));
                x += 20.0;
            }
            let _ = writeln!(
                out,
                "<text x=\"{}\" y=\"{}\" dominant-baseline=\"central\">{text}</text>",
                number(x + 4.0),
                number(y + 6.0)
            );
            x += 4.0 + text.len() as f64 * 6.1 + 18.0;
        };
        for kind in scene.kinds() {
            let swatches = (0..scene.virtual_stages).map(|n| {
                let name = class(kind, n);
                let fill = if hatched(kind) { format!("fill=\"url(#{name})\"") } else { format!("class=\"{name}\"") };
                let share = if n > 0 { f64::from(n) / f64::from(scene.virtual_stages - 1) } else { 0.0 };
                let stripe = if n > 0 {
                    format!(
                        "<rect class=\"{name}t\" opacity=\".55\" x=\"{{x}}\" y=\"{{y}}\" width=\"{}\" height=\"2.5\"/>",
                        number(18.0 * share)
                    )
                } else {
                    String::new()
                };
                (fill, stripe)
            });
            entry(out, swatches.collect(), describe(kind));
        }
        entry(out, vec![("fill=\"url(#idle)\" class=\"g\"".into(), String::new())], "idle");
        let _ = writeln!(
            out,
            "<text x=\"{LEFT}\" y=\"{}\">makespan <tspan font-weight=\"600\">{}</tspan> · bubble <tspan font-weight=\"600\">{}</tspan> \
             ({:.1} % of the makespan) · idle inside a rank <tspan font-weight=\"600\">{}</tspan>{}</text>",
            number(y + 40.0),
            scene.makespan,
            scene.bubble,
            scene.bubble_percent(),
            scene.idle,
            if scene.virtual_stages > 1 { " · 2F7: stage 2, F, microbatch 7" } else { "" }
        );
    }
}

/// All that is known of a bar, in a few lines.
fn tooltip(bar: &Bar) -> String {
    let slot = bar.slot.map_or(String::new(), |slot| format!(", slot {slot}"));
    format!(
        "{} {}\nrank {}, step {}{slot}\n{} to {}\nlive: {} slots, {} tapes, {} works",
        bar.key(),
        &describe(bar.item.kind)[2..],
        bar.rank,
        bar.step,
        bar.start,
        bar.end,
        bar.live.slots,
        bar.live.tapes,
        bar.live.works
    )
}

/// W is hatched: in grey it is told apart even next to white.
fn hatched(kind: Kind) -> bool {
    family(kind) == Kind::WeightGrad
}

fn line_on(fill: Rgb) -> Rgb {
    let darker = |c: u8| (f64::from(c) * 0.74) as u8;
    Rgb(darker(fill.0), darker(fill.1), darker(fill.2))
}

fn class(kind: Kind, number: u32) -> String {
    debug_assert!(FAMILIES.contains(&family(kind)));
    format!("{}{number}", kind.letter().unwrap_or('x'))
}

/// Width of a label in ems, as wide as the widest common sans-serif font has it.
fn ems(label: &str) -> f64 {
    let em = |c: char| match c {
        'W' => 0.99,
        'I' => 0.30,
        'F' => 0.58,
        _ => 0.66,
    };
    label.chars().map(em).sum()
}

/// The smallest of 1, 2, 5, 10, 20, … that is no less than `least`.
pub(crate) fn step(least: f64) -> i64 {
    let mut power = 1;
    loop {
        for m in [1, 2, 5] {
            if (m * power) as f64 >= least {
                return m * power;
            }
        }
        power *= 10;
    }
}

/// A coordinate with at most two decimals.
fn number(value: f64) -> String {
    let text = format!("{value:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Text as XML content.
pub(crate) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '&' => out.push_str("&amp;"),
            '"' => out.push_str("&quot;"),
            c => out.push(c),
        }
    }
    out
}
