//! `qeffect schedule show`: pictures.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use qeffect_view::{Scene, html, svg, terminal, trace};
use serde_json::json;

use super::costs::CostArgs;
use super::output::{Failure, Screen};
use super::source::{self, Parameters, SCHEDULE_HELP, SCHEDULE_LONG_HELP};

/// A picture's form.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Picture {
    /// Ranks against time, for the terminal
    Timeline,
    /// One line per step and one column per rank, as PyTorch prints it
    Steps,
    /// A timeline for papers and pages
    Svg,
    /// One self-contained page with zoom and details
    Html,
    /// Chrome trace events, for Perfetto and chrome://tracing
    Trace,
}

/// Arguments of `schedule show`.
#[derive(Args)]
#[command(after_help = "\
Examples:
  qeffect schedule show zb_h1 -p 4 -m 8
  qeffect schedule show mine.csv --costs 4,5,3 --latency 1
  qeffect schedule show interleaved_1f1b -p 4 -m 8 -v 4 -o timeline.svg
  qeffect schedule show zb_v -p 8 -m 32 -o page.html")]
pub struct Show {
    #[arg(help = SCHEDULE_HELP, long_help = SCHEDULE_LONG_HELP)]
    schedule: String,
    #[command(flatten)]
    parameters: Parameters,
    #[command(flatten)]
    costs: CostArgs,
    /// The picture [default: told from the name of --output, else timeline]
    #[arg(short, long, value_enum)]
    format: Option<Picture>,
    /// File to write [default: standard output]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Most columns of a timeline, or most pixels of an SVG's time axis
    #[arg(long, value_name = "N")]
    width: Option<u32>,
    /// Only ASCII characters
    #[arg(long)]
    ascii: bool,
    /// Tooltips in the SVG
    #[arg(long)]
    tooltips: bool,
}

impl Show {
    /// Draws.
    ///
    /// # Errors
    ///
    /// If the schedule is refused, or a file cannot be read or written.
    pub fn run(&self, screen: &Screen) -> Result<ExitCode, Failure> {
        let checked = source::load(&self.schedule, &self.parameters)?;
        let scene = Scene::new(&checked, &self.costs.model(&checked)?);
        let picture = match (self.format, self.output.as_deref()) {
            (Some(picture), _) => picture,
            (None, Some(file)) if file != Path::new("-") => told(file)?,
            _ => Picture::Timeline,
        };
        let text = match picture {
            Picture::Timeline => terminal::render(
                &scene,
                &terminal::Options {
                    width: self.width.map_or(screen.width, |width| width as usize),
                    color: screen.color && self.output.is_none(),
                    ascii: self.ascii,
                    ..terminal::Options::default()
                },
            ),
            Picture::Steps => terminal::steps(&scene),
            Picture::Svg => {
                let width = self.width.unwrap_or(svg::Options::default().width);
                svg::render(&scene, &svg::Options { width, titles: self.tooltips })
            }
            Picture::Html => html::render(&[&scene]),
            Picture::Trace => trace::render(&[&scene]),
        };
        if screen.json && self.output.is_none() {
            screen.value(&json!({"schedule": self.schedule, "ok": true, "picture": text}))?;
            return Ok(ExitCode::SUCCESS);
        }
        screen.to(self.output.as_deref(), &text)?;
        Ok(ExitCode::SUCCESS)
    }
}

/// The picture that a file's name asks for.
fn told(file: &Path) -> Result<Picture, Failure> {
    match file.extension().and_then(|ending| ending.to_str()) {
        Some("svg") => Ok(Picture::Svg),
        Some("html" | "htm") => Ok(Picture::Html),
        Some("json") => Ok(Picture::Trace),
        Some("txt") | None => Ok(Picture::Timeline),
        Some(other) => Err(Failure::Usage(format!(
            "`.{other}` names no picture: it is .svg, .html, .json (a trace) or .txt, or say --format"
        ))),
    }
}
