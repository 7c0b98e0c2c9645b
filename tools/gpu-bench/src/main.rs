//! What only a GPU can show of the backend's moves: how fast they are, that they are right, and what a broken one does.
//! One JSON object a line.

mod check;
mod fault;
mod movement;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use serde::Serialize;

/// Measures and checks how states move on a GPU.
#[derive(Parser)]
struct Arguments {
    /// Number of the GPU.
    #[arg(long, default_value_t = 0, global = true)]
    gpu: i32,
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// How fast rows move between slots and batches, against copies of the same bytes.
    Movement(movement::Effort),
    /// Whether rows move as they do on the host: random layouts, very many rows, and one row of more than 4 GiB.
    Check(check::Effort),
    /// Writes to an address that is not allocated, and expects the driver's error from then on.
    Fault,
}

/// A line of a check.
#[derive(Serialize)]
struct Finding {
    check: &'static str,
    found: String,
    allowed: &'static str,
    verdict: Verdict,
}

#[derive(Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    Right,
    Wrong,
    #[serde(rename = "left out")]
    LeftOut,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let done = match &arguments.what {
        What::Movement(effort) => movement::run(arguments.gpu, effort).map(|()| true),
        What::Check(effort) => check::run(arguments.gpu, effort),
        What::Fault => fault::run(arguments.gpu),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Prints a line; whether it is not of a fault.
fn print(finding: &Finding) -> bool {
    print_line(finding);
    finding.verdict != Verdict::Wrong
}

fn print_line(line: &impl Serialize) {
    match serde_json::to_string(line) {
        Ok(line) => println!("{line}"),
        Err(error) => eprintln!("{error}"),
    }
}
