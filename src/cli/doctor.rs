//! `qeffect doctor`: what of CUDA is there, and what to do about what is not.

use std::fmt::Write;
use std::process::ExitCode;

use clap::Args;
use qeffect_kernels::Error;
use qeffect_kernels::probe::{Gpu, Library, Survey, survey};
use serde_json::{Value, json};

use super::output::{Failure, Screen};

/// Arguments of `doctor`.
#[derive(Args)]
#[command(after_help = "\
Examples:
  qeffect doctor
  qeffect --json doctor

Exit code 0 if training on this machine's GPUs finds everything it needs, 1 if something is missing.
Schedules, and training on the processor, need none of it.")]
pub struct Doctor {}

impl Doctor {
    /// Looks, and says what it found.
    ///
    /// # Errors
    ///
    /// If standard output cannot be written.
    pub fn run(&self, screen: &Screen) -> Result<ExitCode, Failure> {
        let survey = survey();
        let lacking = lacking(&survey);
        if screen.json {
            screen.value(&value(&survey, &lacking))?;
        } else {
            screen.text(&text(screen, &survey, &lacking))?;
        }
        Ok(if lacking.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(1) })
    }
}

/// What keeps this machine from training on its GPUs. One GPU needs no NCCL.
fn lacking(survey: &Survey) -> Vec<String> {
    let gpus = survey.gpus.as_deref().unwrap_or_default();
    let needed = |library: &Library| *library != Library::Nccl || gpus.len() > 1;
    let absent = survey.libraries.iter().filter(|(library, found)| found.is_err() && needed(library));
    let mut lacking: Vec<String> = absent.map(|(library, _)| library.to_string()).collect();
    match &survey.gpus {
        Ok(gpus) if gpus.iter().any(|gpu| gpu.arch().is_some()) => {}
        Ok(gpus) if gpus.is_empty() => lacking.push("a GPU".to_owned()),
        Ok(_) => lacking.push("a GPU with FP8 (compute capability 8.9 or newer)".to_owned()),
        // A driver that is not there has been named.
        Err(_) if survey.libraries.iter().any(|(library, found)| *library == Library::Driver && found.is_err()) => {}
        Err(Error::Library { library, found, .. }) => lacking.push(format!("a usable {library}: this one {found}")),
        Err(error) => lacking.push(error.to_string()),
    }
    lacking
}

fn text(screen: &Screen, survey: &Survey, lacking: &[String]) -> String {
    let mut out = survey.to_string();
    let _ = writeln!(out, "processor: {} threads", threads());
    let verdict = match lacking {
        [] => "ready to train on GPUs".to_owned(),
        _ => format!("not ready to train on GPUs: missing {}", lacking.join(", ")),
    };
    let _ = writeln!(out, "\n{}; schedules and training on the processor need no GPU", screen.bold(&verdict));
    out
}

fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn value(survey: &Survey, lacking: &[String]) -> Value {
    let library = |(library, found): &(Library, Result<qeffect_kernels::probe::Found, Error>)| match found {
        Ok(found) => json!({"name": library.to_string(), "found": true, "path": found.path.display().to_string()}),
        Err(error) => {
            let (why, advice) = match error {
                Error::Library { found, advice, .. } => (found.clone(), advice.clone()),
                other => (other.to_string(), library.advice().to_owned()),
            };
            json!({"name": library.to_string(), "found": false, "why": why, "advice": advice})
        }
    };
    let gpu = |gpu: &Gpu| {
        json!({
            "ordinal": gpu.ordinal,
            "name": gpu.name,
            "capability": [gpu.capability.0, gpu.capability.1],
            "multiprocessors": gpu.multiprocessors,
            "memory_bytes": gpu.memory,
            "fp8": gpu.arch().is_some(),
        })
    };
    json!({
        "ok": lacking.is_empty(),
        "missing": lacking,
        "libraries": survey.libraries.iter().map(library).collect::<Vec<_>>(),
        "driver_cuda": survey.driver.as_ref().ok().map(|(major, minor)| format!("{major}.{minor}")),
        "gpus": survey.gpus.as_ref().map(|gpus| gpus.iter().map(gpu).collect::<Vec<_>>()).unwrap_or_default(),
        "processor_threads": threads(),
    })
}
