//! A write to an address that is not allocated. The driver then refuses everything that the process asks of the GPU, and
//! the error has to say that only a restart helps.

use std::sync::Arc;

use gpu_rows::{Device, DeviceError, OwnedStream, Queue};
use rows::tensor::{Part, StorageType};

use crate::{Finding, Verdict, print};

/// In the first page, which is never allocated.
const NOWHERE: u64 = 16;
const HELP: &str = "restart the server";

/// Whether every error said what to do.
pub fn run(gpu: i32) -> Result<bool, DeviceError> {
    let device = Device::open(gpu)?;
    let row = device.allocate(64)?;
    let mut queue = Queue::new(OwnedStream::open(&device)?, Arc::default())?;
    // SAFETY: none: this is the fault that is looked for, and the process ends after it. The source lives until then.
    unsafe { queue.put(&Part::whole(16), StorageType::Exact, row.address(), NOWHERE) };
    let attempts = [
        ("the wait for a write to an address that is not allocated", queue.synchronise().err()),
        ("the next wait of the same stream", queue.synchronise().err()),
        ("an allocation afterwards", device.allocate(64).err()),
        ("a new stream afterwards", OwnedStream::open(&device).err()),
    ];
    Ok(attempts.map(|(check, error)| print(&judged(check, error))).iter().all(|is_right| *is_right))
}

fn judged(check: &'static str, error: Option<DeviceError>) -> Finding {
    let found = error.map_or_else(|| "no error".to_owned(), |error| error.to_string());
    let verdict = if found.contains(HELP) { Verdict::Right } else { Verdict::Wrong };
    Finding { check, found, allowed: "an error that says to restart the server", verdict }
}
