//! What only a GPU can show of the backend's moves: how fast they are, that they are right, and what a broken one does.
//! One JSON object a line.

mod check;
mod movement;

use std::process::ExitCode;
use std::sync::Arc;

use clap::{Parser, Subcommand};
use gpu_rows::{Device, DeviceError, OwnedStream, Queue};
use rows::tensor::{Part, StorageType};
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
        What::Fault => fault(arguments.gpu),
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

/// Whether every error after a write to an address that is not allocated said what to do.
fn fault(gpu: i32) -> Result<bool, DeviceError> {
    let device = Device::open(gpu)?;
    let row = device.allocate(64)?;
    let mut queue = Queue::new(OwnedStream::open(&device)?, Arc::default())?;
    // In the first page, which is never allocated.
    let nowhere = 16;
    // SAFETY: none: this is the fault that is looked for, and the process ends after it. The source lives until then.
    unsafe { queue.put(&Part::whole(16), StorageType::Exact, row.address(), nowhere) };
    // After it, the driver refuses everything that the process asks of the GPU, so each must say that only a restart helps.
    let attempts = [
        ("the wait for a write to an address that is not allocated", queue.synchronise().err()),
        ("the next wait of the same stream", queue.synchronise().err()),
        ("an allocation afterwards", device.allocate(64).err()),
        ("a new stream afterwards", OwnedStream::open(&device).err()),
    ];
    let judged = attempts.map(|(check, error)| {
        let found = error.map_or_else(|| "no error".to_owned(), |error| error.to_string());
        let verdict = if found.contains("restart the server") { Verdict::Right } else { Verdict::Wrong };
        print(&Finding { check, found, allowed: "an error that says to restart the server", verdict })
    });
    Ok(judged == [true; 4])
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
