//! A trace made ready for a device: lists of commands between messages.

use qeffect_core::execute::Port;
use qeffect_core::ids::Stage as StageId;
use qeffect_core::ledger::{Action, StepEffects};

use super::CaptureMode;
use super::record::{Entry, Part, Trace};
use crate::act::Act;
use crate::cmd::Cmd;
use crate::device::{Device, GraphId};
use crate::error::Result;
use crate::stage::Role;

/// One step of a program.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Instr {
    Launch(GraphId),
    Send { port: Port, acts: Vec<Act> },
    Post { port: Port },
    Wait { port: Port, acts: Vec<Act> },
    Release { edge: u32 },
    Tie,
    Agree,
}

/// How often a program rolls the cells of a stage, counted over its commands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct RollCount {
    pub stage: StageId,
    pub role: Role,
    pub times: u64,
}

/// What is done at once.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Program {
    /// What it does in the eyes of the ledger.
    pub action: Action,
    pub instrs: Vec<Instr>,
    pub rolls: Vec<RollCount>,
}

impl Program {
    /// Cuts parts of a trace at their messages. `rolls` counts those of a list of commands.
    pub fn new(
        device: &mut dyn Device,
        action: Action,
        parts: impl IntoIterator<Item = Part>,
        rolls: impl Fn(&[Entry]) -> Vec<RollCount>,
    ) -> Result<Program> {
        let entries: Vec<Entry> = parts.into_iter().flat_map(|part| part.entries).collect();
        let rolls = rolls(&entries);
        let mut instrs = Vec::new();
        let mut run: Vec<Cmd> = Vec::new();
        for entry in entries {
            let instr = match entry {
                Entry::Cmd(cmd) => {
                    run.push(cmd);
                    continue;
                }
                Entry::Send { port, acts } => Instr::Send { port, acts },
                Entry::Post { port } => Instr::Post { port },
                Entry::Wait { port, acts } => Instr::Wait { port, acts },
                Entry::Release { edge } => Instr::Release { edge },
                Entry::Tie(_) => Instr::Tie,
                Entry::Agree(_) => Instr::Agree,
            };
            // Posts and releases touch no buffer: they may come before the commands that stand before them only if they
            // say no more than is true, which a post does and a release does not.
            if !matches!(instr, Instr::Post { .. }) {
                flush(device, &mut run, &mut instrs)?;
            }
            instrs.push(instr);
        }
        flush(device, &mut run, &mut instrs)?;
        Ok(Program { action, instrs, rolls })
    }

    /// Lists that it is made of.
    pub fn lists(&self) -> usize {
        self.instrs.iter().filter(|instr| matches!(instr, Instr::Launch(_))).count()
    }
}

fn flush(device: &mut dyn Device, run: &mut Vec<Cmd>, instrs: &mut Vec<Instr>) -> Result<()> {
    if !run.is_empty() {
        instrs.push(Instr::Launch(device.instantiate(std::mem::take(run))?));
    }
    Ok(())
}

/// A rank's captured step.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Captured {
    /// What the step does to the ledger.
    pub effects: StepEffects,
    pub programs: Programs,
}

/// The programs of a step.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Programs {
    /// One per call of the driver, in its order.
    Actions(Vec<Program>),
    /// One for the step.
    Step(Program),
    /// None: the step is part of a list of all ranks. What it rolls is counted here.
    Joint(Vec<RollCount>),
}

impl Captured {
    /// Makes a trace ready; `None` for eager.
    pub fn new(
        device: &mut dyn Device,
        mode: CaptureMode,
        trace: Trace,
        effects: StepEffects,
        rolls: impl Fn(&[Entry]) -> Vec<RollCount>,
    ) -> Result<Option<Captured>> {
        let programs = match mode {
            CaptureMode::Eager => return Ok(None),
            CaptureMode::Action => {
                let parts = trace.parts.into_iter();
                let programs = parts.map(|part| Program::new(device, part.action, [part], &rolls));
                Programs::Actions(programs.collect::<Result<_>>()?)
            }
            CaptureMode::Step => Programs::Step(Program::new(device, Action::Step, trace.parts, rolls)?),
        };
        Ok(Some(Captured { effects, programs }))
    }

    /// Lists of commands, each of which a step launches once.
    pub fn lists(&self) -> usize {
        match &self.programs {
            Programs::Actions(programs) => programs.iter().map(Program::lists).sum(),
            Programs::Step(program) => program.lists(),
            Programs::Joint(_) => 0,
        }
    }
}
