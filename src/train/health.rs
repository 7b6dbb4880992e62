//! How the state cells of a run fare: a table of the worst for people, all of them for the metrics.

use std::fmt::Write as _;

use qeffect_runtime::session::CellHealth;
use serde::Serialize;

/// Cells of a table.
const SHOWN: usize = 6;

/// A cell, in a line of `metrics.jsonl`. An amax that is infinite is `null` there: JSON has no such number.
#[derive(Serialize)]
pub struct Cell<'a> {
    name: &'a str,
    stage: u32,
    format: &'static str,
    scale: f32,
    amax: f32,
    casts: u64,
    elements: u64,
    saturated: u64,
    underflowed: u64,
    not_finite: u64,
    frozen: bool,
}

impl<'a> From<&'a CellHealth> for Cell<'a> {
    fn from(cell: &'a CellHealth) -> Cell<'a> {
        let CellHealth { ref name, scale, amax, casts, elements, saturated, underflowed, not_finite, frozen, .. } =
            *cell;
        let (stage, format) = (cell.stage.0, cell.format.dtype().name());
        Cell { name, stage, format, scale, amax, casts, elements, saturated, underflowed, not_finite, frozen }
    }
}

/// The worst cells of a step, the very worst first.
pub fn table(step: u64, cells: &[CellHealth]) -> String {
    let mut worst: Vec<&CellHealth> = cells.iter().collect();
    worst.sort_by(|a, b| a.worse_first(b));
    let shown = &worst[..worst.len().min(SHOWN)];
    let mut text = format!("step {step:>5}  FP8 health, the worst {} of {} cells", shown.len(), cells.len());
    let width = shown.iter().map(|cell| cell.name.len()).max().unwrap_or(0).max(4);
    let _ = write!(
        text,
        "\n  {:<width$}  {:>6}  {:>9}  {:>9}  {:>9}  {:>9}",
        "cell", "format", "amax", "scale", "saturated", "underflow"
    );
    for cell in shown {
        let CellHealth { name, amax, scale, not_finite, .. } = cell;
        let format = cell.format.dtype().name();
        let _ = write!(
            text,
            "\n  {name:<width$}  {format:>6}  {amax:>9.3e}  {scale:>9.3e}  {:>9}  {:>9}",
            percent(cell.saturated_share()),
            percent(cell.underflowed_share())
        );
        if *not_finite > 0 {
            let _ = write!(text, "  {not_finite} not finite");
        }
        if cell.frozen {
            text.push_str("  frozen");
        }
    }
    text
}

fn percent(share: f64) -> String {
    if share > 0.0 && share < 5e-5 { "<0.01 %".into() } else { format!("{:.2} %", 100.0 * share) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use qeffect_core::fp8::Fp8;
    use qeffect_core::ids::Stage;
    use qeffect_runtime::stage::Role;

    #[test]
    fn a_table_has_the_worst_cells_first() {
        let cell = |name: &str, saturated, underflowed| CellHealth {
            stage: Stage(0),
            name: name.into(),
            role: Role::Input,
            format: Fp8::E4M3,
            scale: 448.0,
            frozen: false,
            amax: 1.5,
            casts: 4,
            elements: 100_000,
            saturated,
            underflowed,
            not_finite: 0,
        };
        let mut cells: Vec<CellHealth> = (0..7).map(|n| cell(&format!("blocks.{n}.qkv.input"), 0, n)).collect();
        cells.push(cell("blocks.7.fc1.input", 250, 0));
        cells.push(CellHealth { frozen: true, ..cell("head.weight", 0, 0) });
        cells.push(CellHealth { not_finite: 3, amax: f32::INFINITY, ..cell("head.input", 0, 0) });
        let text = table(12, &cells);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "step    12  FP8 health, the worst 6 of 10 cells");
        assert_eq!(lines[2], "  head.input            e4m3        inf    4.480e2     0.00 %     0.00 %  3 not finite");
        assert_eq!(lines[3], "  head.weight           e4m3    1.500e0    4.480e2     0.00 %     0.00 %  frozen");
        assert_eq!(lines[4], "  blocks.7.fc1.input    e4m3    1.500e0    4.480e2     0.25 %     0.00 %");
        assert_eq!(lines[5], "  blocks.6.qkv.input    e4m3    1.500e0    4.480e2     0.00 %     0.01 %");
        assert_eq!(lines.len(), 8);
        let json = serde_json::to_value(Cell::from(&cells[9])).unwrap();
        assert_eq!((&json["amax"], &json["not_finite"]), (&serde_json::Value::Null, &serde_json::json!(3)));
    }
}
