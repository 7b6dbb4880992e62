//! What actions and messages cost, from the command line or a file.

use clap::Args;
use qeffect_core::ids::Stage;
use qeffect_core::plan::Checked;
use qeffect_core::schedule::Costs;
use qeffect_core::sim::CostModel;
use qeffect_view::trace;
use serde::Deserialize;

use super::output::Failure;

/// Costs of a simulated run.
#[derive(Args, Clone)]
pub struct CostArgs {
    /// Costs of F, I and W of every stage, or a file: costs per stage, or a trace
    #[arg(
        long,
        default_value = "1,1,1",
        value_name = "F,I,W|FILE",
        long_help = "Costs of F, I and W of every stage, in any unit of time, as in `4,5,3`; or a JSON file with a row per \
stage: `{\"stages\": [[4, 5, 3], [4, 5, 3]], \"latency\": 1, \"overlap\": 8}`, of which one row alone holds for all stages; \
or a trace (as `schedule show --format trace` writes), of which the median durations are taken, in nanoseconds. \
B costs I and W together, R costs F."
    )]
    costs: String,
    /// Time from the last byte of a message to its use on another rank
    #[arg(long, value_name = "TIME")]
    latency: Option<i64>,
    /// Bytes of a message between stages: one number for all, or one for each boundary
    #[arg(long, value_name = "BYTES,..", value_delimiter = ',')]
    message_bytes: Vec<i64>,
    /// Bytes that an edge carries in a unit of time
    #[arg(long, value_name = "BYTES")]
    bandwidth: Option<i64>,
    /// Cost of a whole overlap [default: the sum of its branches]
    #[arg(long, value_name = "TIME")]
    overlap: Option<i64>,
    /// Cost of an overlap of the forward of stage S with the backward of stage T
    #[arg(long = "pair", value_name = "S,T=TIME", value_parser = pair)]
    pairs: Vec<(u32, u32, i64)>,
}

fn pair(text: &str) -> Result<(u32, u32, i64), String> {
    let parse = || {
        let (stages, cost) = text.split_once('=')?;
        let (forward, backward) = stages.split_once(',')?;
        Some((forward.trim().parse().ok()?, backward.trim().parse().ok()?, cost.trim().parse().ok()?))
    };
    parse().ok_or_else(|| "write S,T=TIME, as in 0,7=8".to_owned())
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    stages: Vec<[i64; 3]>,
    #[serde(default)]
    latency: i64,
    #[serde(default)]
    message_bytes: Vec<i64>,
    #[serde(default)]
    bandwidth: Option<i64>,
    #[serde(default)]
    overlap: Option<i64>,
    #[serde(default)]
    pairs: Vec<(u32, u32, i64)>,
}

impl File {
    fn plain(stages: Vec<[i64; 3]>) -> File {
        File { stages, latency: 0, message_bytes: Vec::new(), bandwidth: None, overlap: None, pairs: Vec::new() }
    }
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

    /// Whether they may differ from stage to stage, and so ask for a number of stages.
    pub fn of_stages(&self) -> bool {
        self.read().is_ok_and(|file| file.stages.len() > 1 || !file.pairs.is_empty()) || !self.pairs.is_empty()
    }

    /// The cost model for that many stages.
    ///
    /// # Errors
    ///
    /// As [`CostArgs::model`].
    pub fn model_for(&self, stages_wanted: u32) -> Result<CostModel, Failure> {
        let File { stages, latency, message_bytes, bandwidth, overlap, pairs } = self.read()?;
        let count = stages_wanted as usize;
        if stages.len() != 1 && stages.len() != count {
            let message = format!("costs of {} stages, but the schedule has {count}", stages.len());
            return Err(Failure::Usage(message));
        }
        let latency = self.latency.unwrap_or(latency);
        let overlap = self.overlap.or(overlap);
        let bytes = if self.message_bytes.is_empty() { message_bytes } else { self.message_bytes.clone() };
        let transfer = transfer(&bytes, self.bandwidth.or(bandwidth), count)?;
        let pairs: Vec<_> = pairs.into_iter().chain(self.pairs.iter().copied()).collect();
        if let Some((forward, backward, _)) = pairs.iter().find(|(f, b, _)| f.max(b) >= &stages_wanted) {
            let message = format!("a pair of the stages {forward} and {backward}, but the schedule has {count}");
            return Err(Failure::Usage(message));
        }
        let all = stages.iter().flatten().chain([&latency]).chain(overlap.as_ref()).chain(pairs.iter().map(|p| &p.2));
        if let Some(bad) = all.into_iter().find(|cost| !(0..=MOST).contains(*cost)) {
            return Err(Failure::Usage(format!("a cost is {bad}: it must be from 0 to {MOST}")));
        }
        let stages = stages.into_iter().map(|[f, i, w]| Costs { f, i, w }).collect();
        let pairs = pairs.into_iter().map(|(f, b, cost)| ((Stage(f), Stage(b)), cost)).collect();
        Ok(CostModel { stages, latency, transfer, overlap, pairs })
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
            return Ok(File::plain(vec![costs]));
        }
        let text = std::fs::read_to_string(&self.costs).map_err(|error| Failure::file(&self.costs, &error))?;
        let wrong = |what: String| Failure::File(format!("{}: {what}", self.costs));
        if text.contains("\"traceEvents\"") {
            let stages = trace::profile(&text).map_err(wrong)?;
            return Ok(File::plain(stages.iter().map(|c| [c.f, c.i, c.w]).collect()));
        }
        serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))
    }
}

/// Time of each boundary's messages on the wire, rounded up.
fn transfer(bytes: &[i64], bandwidth: Option<i64>, stages: usize) -> Result<Vec<i64>, Failure> {
    let refuse = |what: String| Err(Failure::Usage(what));
    let Some(bandwidth) = bandwidth else {
        return match bytes {
            [] => Ok(Vec::new()),
            _ => refuse("bytes of messages take time only with a bandwidth: give --bandwidth too".to_owned()),
        };
    };
    if bytes.is_empty() {
        return refuse("a bandwidth needs the bytes of messages: give --message-bytes too".to_owned());
    }
    if bytes.len() != 1 && bytes.len() + 1 != stages {
        return refuse(format!("bytes of {} boundaries, but {stages} stages have {}", bytes.len(), stages - 1));
    }
    const MOST_BYTES: i64 = 1 << 48;
    if bandwidth < 1 {
        return refuse(format!("a bandwidth of {bandwidth} carries nothing"));
    }
    if let Some(bad) = bytes.iter().find(|bytes| !(0..=MOST_BYTES).contains(*bytes)) {
        return refuse(format!("a message has {bad} bytes: they must be from 0 to {MOST_BYTES}"));
    }
    let times: Vec<i64> = bytes.iter().map(|bytes| (bytes + bandwidth - 1) / bandwidth).collect();
    match times.iter().find(|time| **time > MOST) {
        Some(bad) => refuse(format!("a message takes {bad} on the wire: at most {MOST}")),
        None => Ok(times),
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
    match model.transfer.as_slice() {
        [] => {}
        [time] => text.push_str(&format!(", messages {time} on the wire")),
        times => {
            let most = times.iter().max().unwrap_or(&0);
            text.push_str(&format!(", messages up to {most} on the wire"));
        }
    }
    if !model.pairs.is_empty() {
        text.push_str(&format!(", {} costs of pairs", model.pairs.len()));
    }
    if let Some(overlap) = model.overlap {
        text.push_str(&format!(", overlap {overlap}"));
    }
    text
}
