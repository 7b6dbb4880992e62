//! What actions and messages cost, from the command line or a file.

use clap::Args;
use qeffect_core::plan::Checked;
use qeffect_core::schedule::Costs;
use qeffect_core::sim::CostModel;
use serde::Deserialize;

use super::output::Failure;

/// Costs of a simulated run.
#[derive(Args, Clone)]
pub struct CostArgs {
    /// Costs of F, I and W of every stage, or a JSON file with costs per stage
    #[arg(
        long,
        default_value = "1,1,1",
        value_name = "F,I,W|FILE",
        long_help = "Costs of F, I and W of every stage, in any unit of time, as in `4,5,3`; or a JSON file with a row per \
stage: `{\"stages\": [[4, 5, 3], [4, 5, 3]], \"latency\": 1, \"overlap\": 8}`, of which one row alone holds for all stages. \
B costs I and W together, R costs F."
    )]
    costs: String,
    /// Time that a message between ranks takes
    #[arg(long, value_name = "TIME")]
    latency: Option<i64>,
    /// Cost of a whole overlap [default: the sum of its branches]
    #[arg(long, value_name = "TIME")]
    overlap: Option<i64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    stages: Vec<[i64; 3]>,
    #[serde(default)]
    latency: i64,
    #[serde(default)]
    overlap: Option<i64>,
}

/// Most that an action may cost: sums over the largest schedules stay far from overflow.
const MOST: i64 = 1 << 32;

impl CostArgs {
    /// The cost model for a schedule.
    ///
    /// # Errors
    ///
    /// If the costs cannot be read, are negative, or belong to another number of stages.
    pub fn model(&self, checked: &Checked) -> Result<CostModel, Failure> {
        self.model_for(checked.schedule.stages)
    }

    /// The cost model for that many stages.
    ///
    /// # Errors
    ///
    /// As [`CostArgs::model`].
    pub fn model_for(&self, stages_wanted: u32) -> Result<CostModel, Failure> {
        let File { stages, latency, overlap } = self.read()?;
        let count = stages_wanted as usize;
        if stages.len() != 1 && stages.len() != count {
            let message = format!("costs of {} stages, but the schedule has {count}", stages.len());
            return Err(Failure::Usage(message));
        }
        let latency = self.latency.unwrap_or(latency);
        let overlap = self.overlap.or(overlap);
        let all = stages.iter().flatten().chain([&latency]).chain(overlap.as_ref());
        if let Some(bad) = all.into_iter().find(|cost| !(0..=MOST).contains(*cost)) {
            return Err(Failure::Usage(format!("a cost is {bad}: it must be from 0 to {MOST}")));
        }
        let stages = stages.into_iter().map(|[f, i, w]| Costs { f, i, w }).collect();
        Ok(CostModel { stages, latency, overlap })
    }

    fn read(&self) -> Result<File, Failure> {
        let numbers: Result<Vec<i64>, _> = self.costs.split(',').map(|cost| cost.trim().parse()).collect();
        if let Ok(numbers) = numbers {
            let costs = <[i64; 3]>::try_from(numbers).map_err(|numbers| {
                Failure::Usage(format!(
                    "`--costs {}` has {} numbers: give those of F, I and W",
                    self.costs,
                    numbers.len()
                ))
            })?;
            return Ok(File { stages: vec![costs], latency: 0, overlap: None });
        }
        let text = std::fs::read_to_string(&self.costs).map_err(|error| Failure::file(&self.costs, &error))?;
        serde_json::from_str(&text).map_err(|error| Failure::File(format!("{}: {error}", self.costs)))
    }
}

/// `costs F 4, I 5, W 3, latency 1`.
pub fn describe(model: &CostModel) -> String {
    let mut text = match model.stages.as_slice() {
        [c] => format!("costs F {}, I {}, W {}", c.f, c.i, c.w),
        stages => format!("costs of {} stages", stages.len()),
    };
    if model.latency > 0 {
        text.push_str(&format!(", latency {}", model.latency));
    }
    if let Some(overlap) = model.overlap {
        text.push_str(&format!(", overlap {overlap}"));
    }
    text
}
