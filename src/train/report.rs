//! What a run leaves behind: metrics as JSON lines, a loss curve as SVG, a table.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use plotters::prelude::*;
use qeffect_core::measured::Span;
use serde::Serialize;
use sha2::{Digest, Sha256};

use super::{Result, TrainError, health};

/// One line of `metrics.jsonl`.
#[derive(Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Metric<'a> {
    /// What was run.
    Run {
        schedule: &'a str,
        proved: &'a str,
        recipe: &'a str,
        ranks: u32,
        stages: u32,
        microbatches: u32,
        parameters: usize,
        seed: u64,
        /// [`short`] of the session's identity: runs that differ in it need not have the same bits.
        identity: &'a str,
    },
    /// One training step. Loss in nats per byte.
    Step { step: u64, loss: f64, grad_norm: f64, lr: f64, tokens: u64, seconds: f64, bubble: f64, skipped: bool },
    /// How the state cells fared in a step.
    Health { step: u64, cells: Vec<health::Cell<'a>> },
    /// One evaluation over held-out bytes; `elapsed` counts from the first step, evaluations included.
    Eval { step: u64, loss: f64, bytes: u64, seconds: f64, elapsed: f64 },
}

/// The first 64 bits of a text's SHA-256, in hexadecimal.
pub fn short(text: &str) -> String {
    Sha256::digest(text).iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

/// A fresh folder under `runs/`, and the files in it.
pub struct RunFolder {
    path: PathBuf,
    metrics: BufWriter<File>,
}

impl RunFolder {
    /// Makes `root/name`, or `root/name-2`, … if that is taken.
    pub fn create(root: &Path, name: &str) -> Result<RunFolder> {
        fs::create_dir_all(root).map_err(|error| cannot("make the folder", root, error))?;
        let mut path = root.join(name);
        let mut n = 1;
        while let Err(error) = fs::create_dir(&path) {
            if error.kind() != std::io::ErrorKind::AlreadyExists {
                return Err(cannot("make the folder", &path, error));
            }
            n += 1;
            path = root.join(format!("{name}-{n}"));
        }
        let file = path.join("metrics.jsonl");
        let metrics = File::create(&file).map_err(|error| cannot("write", &file, error))?;
        Ok(RunFolder { path, metrics: BufWriter::new(metrics) })
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Appends a line to `metrics.jsonl`.
    pub fn record(&mut self, metric: &Metric<'_>) -> Result<()> {
        let file = &self.path.join("metrics.jsonl");
        serde_json::to_writer(&mut self.metrics, metric).map_err(|error| cannot("write", file, error))?;
        self.metrics.write_all(b"\n").map_err(|error| cannot("write", file, error))
    }

    /// Writes everything out and draws `loss.svg`.
    pub fn finish(&mut self, title: &str, train: &[(f64, f64)], held_out: &[(f64, f64)]) -> Result<PathBuf> {
        self.metrics.flush().map_err(|error| cannot("write", &self.path.join("metrics.jsonl"), error))?;
        let file = self.path.join("loss.svg");
        draw(&file, title, train, held_out).map_err(|error| cannot("draw", &file, error))?;
        Ok(file)
    }
}

/// Where the trace of a step goes. Made before the run, so that a wrong path is told then.
pub struct TraceFile {
    path: PathBuf,
    file: File,
}

impl TraceFile {
    /// A new file, or an old one emptied.
    pub fn create(path: &Path) -> Result<TraceFile> {
        let file = File::create(path).map_err(|error| cannot("create", path, error))?;
        Ok(TraceFile { path: path.to_owned(), file })
    }

    /// Writes what the ranks did.
    pub fn write(mut self, title: &str, ranks: &[Vec<Span>]) -> Result<()> {
        let text = qeffect_view::trace::measured(title, ranks);
        self.file.write_all(text.as_bytes()).map_err(|error| cannot("write", &self.path, error))
    }
}

fn cannot(action: &'static str, path: &Path, error: impl std::fmt::Display) -> TrainError {
    TrainError::File { action, path: path.to_owned(), reason: error.to_string() }
}

/// Loss against training tokens: every step thinly, a running mean, the held-out loss as points.
fn draw(
    file: &Path,
    title: &str,
    train: &[(f64, f64)],
    held_out: &[(f64, f64)],
) -> Result<(), Box<dyn std::error::Error>> {
    let right = train.last().map_or(1.0, |p| p.0);
    let points = || train.iter().chain(held_out).map(|p| p.1).filter(|y| y.is_finite());
    let (low, high) = (points().fold(f64::INFINITY, f64::min), points().fold(0.0, f64::max));
    let area = SVGBackend::new(file, (900, 520)).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .caption(title, ("sans-serif", 20))
        .margin(16)
        .x_label_area_size(44)
        .y_label_area_size(56)
        .build_cartesian_2d(0.0..right, (low - 0.1).max(0.0)..high + 0.1)?;
    let tokens = |x: &f64| if *x >= 1e6 { format!("{:.1} M", x / 1e6) } else { format!("{:.0} k", x / 1e3) };
    chart
        .configure_mesh()
        .label_style(("sans-serif", 13))
        .axis_desc_style(("sans-serif", 14))
        .x_desc("training tokens (bytes)")
        .y_desc("loss, nats per byte")
        .x_label_formatter(&tokens)
        .light_line_style(WHITE)
        .bold_line_style(RGBColor(225, 225, 225))
        .draw()?;
    // Blue and vermillion: apart for colour-blind readers, and by lightness in greyscale.
    let (pale, blue, red) = (RGBColor(176, 203, 226), RGBColor(0, 92, 158), RGBColor(213, 94, 0));
    chart
        .draw_series(LineSeries::new(train.iter().copied(), pale))?
        .label("step")
        .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], pale));
    chart
        .draw_series(LineSeries::new(smooth(train), blue.stroke_width(2)))?
        .label("mean of 20 steps")
        .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], blue.stroke_width(2)));
    chart
        .draw_series(held_out.iter().map(|p| Circle::new(*p, 5, red.filled())))?
        .label("held out")
        .legend(move |(x, y)| Circle::new((x + 9, y), 5, red.filled()));
    if let Some((x, y)) = held_out.last() {
        chart.draw_series(std::iter::once(Text::new(
            format!("{y:.3}"),
            (x - right * 0.045, y + (high - low) * 0.08),
            ("sans-serif", 15).into_font().color(&red),
        )))?;
    }
    chart
        .configure_series_labels()
        .label_font(("sans-serif", 13))
        .border_style(RGBColor(200, 200, 200))
        .background_style(WHITE)
        .draw()?;
    area.present()?;
    Ok(())
}

fn smooth(train: &[(f64, f64)]) -> Vec<(f64, f64)> {
    const WINDOW: usize = 20;
    train
        .iter()
        .enumerate()
        .map(|(n, (x, _))| {
            let window = &train[(n + 1).saturating_sub(WINDOW)..=n];
            (*x, window.iter().map(|p| p.1).sum::<f64>() / window.len() as f64)
        })
        .collect()
}
