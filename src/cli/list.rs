//! `qeffect schedule list`: the library, compared at one size.

use std::process::ExitCode;

use clap::Args;
use qeffect_view::Scene;
use serde_json::{Value, json};

use super::costs::{CostArgs, describe};
use super::output::{Failure, Screen, table};
use super::source::{self, Parameters};

/// Arguments of `schedule list`.
#[derive(Args)]
#[command(after_help = "Example:\n  qeffect schedule list -p 8 -m 32 --costs 4,5,3")]
pub struct List {
    #[command(flatten)]
    parameters: Parameters,
    #[command(flatten)]
    costs: CostArgs,
}

impl List {
    /// Lists.
    ///
    /// # Errors
    ///
    /// Wrong arguments. A schedule that is refused at this size is listed as such.
    pub fn run(&self, screen: &Screen) -> Result<ExitCode, Failure> {
        let (ranks, microbatches) = self.parameters.size();
        if ranks < 1 || microbatches < 1 {
            return Err(Failure::Usage(format!("P = {ranks} and M = {microbatches}: each is at least 1")));
        }
        let virtual_stages = self.parameters.virtual_stages();
        let mut rows = vec![head()];
        let mut values = Vec::new();
        let mut costs = String::new();
        for entry in source::everything() {
            let size = self.parameters.for_entry(entry.name)?;
            let built = source::library(entry.name, &size);
            let mut value = json!({
                "name": entry.name,
                "summary": entry.summary,
                "params": entry.params,
                "virtual_stages": entry.virtual_stages,
                "v_shaped": entry.v_shaped,
                "eval": entry.eval,
            });
            let mut row =
                vec![entry.name.to_owned(), size.virtual_stages().unwrap_or(entry.virtual_stages).to_string()];
            let built = built.and_then(|checked| Ok((self.costs.model(&checked)?, checked)));
            match built {
                Ok((model, checked)) => {
                    costs = format!(", {} of each stage", describe(&model));
                    let scene = Scene::new(&checked, &model);
                    let peak = scene.peaks.iter().map(|p| p.slots).max().unwrap_or(0);
                    row.extend([
                        scene.makespan.to_string(),
                        format!("{:.1} %", scene.bubble_percent()),
                        scene.idle.to_string(),
                        peak.to_string(),
                    ]);
                    value["at"] = json!({
                        "ranks": ranks, "microbatches": microbatches, "makespan": scene.makespan,
                        "bubble": scene.bubble, "idle": scene.idle, "peak_slots": peak,
                    });
                }
                Err(Failure::Refused(refusal)) => {
                    let code = refusal.report.codes().first().map_or(String::new(), ToString::to_string);
                    row.extend(["".into(), "".into(), "".into(), "".into()]);
                    value["at"] = Value::Null;
                    value["refused"] = json!(code);
                }
                Err(Failure::Usage(message)) if self.costs.of_stages() => {
                    row.extend(["".into(), "".into(), "".into(), "".into()]);
                    value["at"] = Value::Null;
                    value["unsuited"] = json!(message);
                }
                Err(other) => return Err(other),
            }
            let refused =
                value.get("refused").and_then(Value::as_str).map(|code| format!("refused at this size [{code}]"));
            let refused = refused.or_else(|| value.get("unsuited").and_then(Value::as_str).map(str::to_owned));
            row.push(refused.unwrap_or_else(|| entry.summary.to_owned()));
            rows.push(row);
            values.push(value);
        }
        if screen.json {
            screen.value(&Value::Array(values))?;
        } else {
            let text = table(screen, &rows);
            let given = virtual_stages.map_or(String::new(), |v| format!(", V = {v} where it is a parameter"));
            screen.text(&format!("{text}\nat P = {ranks}, M = {microbatches}{given}{costs}; V: stages per rank, which are a V-th as large\n"))?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn head() -> Vec<String> {
    ["schedule", "V", "makespan", "bubble", "idle", "peak", "what it is"].map(str::to_owned).to_vec()
}
