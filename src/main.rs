//! The `qeffect` command: schedules, training runs, and what error codes mean.

mod cli;

fn main() -> std::process::ExitCode {
    cli::main()
}
