//! The `qeffect` command: schedules without a GPU, and what error codes mean.

mod cli;

fn main() -> std::process::ExitCode {
    cli::main()
}
