//! The grammar of the command line, and its exit codes.
//!
//! | code | meaning |
//! |---|---|
//! | 0 | done |
//! | 1 | the schedule is refused, two schedules differ, no schedule keeps the limit, or `doctor` misses something |
//! | 2 | the command line is wrong |
//! | 3 | a file cannot be read or written |
//! | 4 | a training run has failed |

mod check;
mod convert;
mod costs;
mod diff;
mod doctor;
mod explain;
mod list;
mod output;
mod show;
mod simulate;
mod source;
mod synthesize;
mod train;

use std::process::ExitCode;

use clap::{Args, CommandFactory, Parser, Subcommand};

use self::output::{Color, Failure, Screen};

/// FP8 pipeline-parallel training whose schedules are proved before they run.
#[derive(Parser)]
#[command(name = "qeffect", version, max_term_width = 100, after_help = AFTER, after_long_help = AFTER)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    global: Global,
}

const AFTER: &str = "\
Examples:
  qeffect schedule list                          the library, compared at P = 4, M = 8
  qeffect schedule show zb_v -p 4 -m 8           a timeline in the terminal
  qeffect schedule show zb_v -o zb_v.html        the same as a page with zoom and details
  qeffect schedule check mine.csv                judge a schedule file
  qeffect train --config run.toml                train a model
  qeffect explain QE0401                         what a code means
  qeffect doctor                                 which CUDA libraries and GPUs are there

Exit codes: 0 done, 1 the schedule is refused or differs or something is missing, 2 wrong command line, 3 a file cannot be read or written, \
4 a training run has failed";

#[derive(Args)]
struct Global {
    /// Write JSON, for programs
    #[arg(long, global = true, help_heading = "Output")]
    json: bool,
    /// When to use colours
    #[arg(long, global = true, help_heading = "Output", value_enum, default_value_t = Color::Auto, value_name = "WHEN")]
    color: Color,
}

#[derive(Subcommand)]
enum Command {
    /// Look at, judge, convert and compare schedules
    #[command(subcommand)]
    Schedule(Box<ScheduleCommand>),
    Train(train::Train),
    /// Explain an error code
    Explain(explain::Explain),
    /// Look for CUDA libraries and GPUs, and say what to do for what is missing
    Doctor(doctor::Doctor),
    /// Write shell completions
    #[command(after_help = "Example:\n  qeffect completions bash > /etc/bash_completion.d/qeffect")]
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Write the manual pages of all commands, one after the other
    #[command(after_help = "Example:\n  qeffect man | man -l -")]
    Man,
}

#[derive(Subcommand)]
enum ScheduleCommand {
    /// List the library and compare it at one size
    List(list::List),
    /// Draw a timeline: terminal, SVG, HTML page or trace
    Show(show::Show),
    /// Judge schedules: ownership, order, versions, communication, bounds
    Check(check::Check),
    /// Run a schedule at given costs: makespan, bubble, critical path, peaks
    Simulate(simulate::Simulate),
    /// Convert between PyTorch's CSV, lowered programs and JSON
    Convert(convert::Convert),
    /// Compare two schedules
    Diff(diff::Diff),
    /// Find a schedule for given costs and a memory limit
    Synthesize(synthesize::Synthesize),
}

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        // Programs are told as they asked to be told.
        Err(error) if error.use_stderr() && std::env::args_os().any(|word| word == "--json") => {
            let message = error.render().to_string();
            let message = message.trim_start_matches("error: ").trim_end().to_owned();
            return Failure::Usage(message).report(&Screen::new(Color::Never, true));
        }
        Err(error) => error.exit(),
    };
    let screen = Screen::new(cli.global.color, cli.global.json);
    match run(&cli.command, &screen) {
        Ok(code) => code,
        Err(failure) => failure.report(&screen),
    }
}

fn run(command: &Command, screen: &Screen) -> Result<ExitCode, Failure> {
    match command {
        Command::Schedule(command) => match command.as_ref() {
            ScheduleCommand::List(args) => args.run(screen),
            ScheduleCommand::Show(args) => args.run(screen),
            ScheduleCommand::Check(args) => args.run(screen),
            ScheduleCommand::Simulate(args) => args.run(screen),
            ScheduleCommand::Convert(args) => args.run(screen),
            ScheduleCommand::Diff(args) => args.run(screen),
            ScheduleCommand::Synthesize(args) => args.run(screen),
        },
        Command::Train(args) => args.run(screen),
        Command::Explain(args) => args.run(screen),
        Command::Doctor(args) => args.run(screen),
        Command::Completions { shell } => {
            let mut text = Vec::new();
            clap_complete::generate(*shell, &mut Cli::command(), "qeffect", &mut text);
            screen.bytes(&text)?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Man => {
            let mut command = Cli::command().disable_help_subcommand(true);
            command.build();
            screen.bytes(&manual(command).map_err(|e| Failure::file("-", &e))?)?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// The page of a command, and behind it those of its subcommands.
fn manual(command: clap::Command) -> std::io::Result<Vec<u8>> {
    let inner: Vec<clap::Command> = command.get_subcommands().filter(|inner| !inner.is_hide_set()).cloned().collect();
    let title = command.get_display_name().unwrap_or(command.get_name()).to_owned();
    let mut text = Vec::new();
    clap_mangen::Man::new(command).title(title).render(&mut text)?;
    for inner in inner {
        text.extend(manual(inner)?);
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_grammar_is_sound() {
        Cli::command().debug_assert();
    }
}
