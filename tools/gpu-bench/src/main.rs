//! What only a GPU can show of the backend's moves: how fast they are, that they are right, and what a broken one does.
//! One JSON object a line.
//!
//! The speed is that of gather and scatter between slots and batches, as a step does them, against copies of the same
//! bytes on the device.

mod check;

use std::process::ExitCode;
use std::time::Instant;

use check::{Checks, print_line};
use clap::{Args, Parser, Subcommand};
use gpu_rows::{Device, DeviceError, Foreign, OwnedStream, Queue};
use rows::tensor::{RowAt, RowLayout, StorageType};
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
    Movement(Effort),
    /// Whether rows move as they do on the host: random layouts, very many rows, and one row of more than 4 GiB.
    Check(Checks),
    /// Writes to an address that is not allocated, and expects the driver's error from then on.
    Fault,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let done = match &arguments.what {
        What::Movement(effort) => movement(arguments.gpu, effort).map(|()| true),
        What::Check(effort) => check::run(arguments.gpu, effort),
        What::Fault => check::fault(arguments.gpu),
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

#[derive(Args)]
struct Effort {
    /// Rows of a batch.
    #[arg(long, default_value_t = 64)]
    rows: usize,
    /// Batches that are moved between two waits.
    #[arg(long, default_value_t = 50)]
    batches: usize,
    /// Times that each is measured; the median counts.
    #[arg(long, default_value_t = 11)]
    rounds: usize,
}

struct States {
    name: &'static str,
    /// States of a sequence.
    count: usize,
    /// The tensor of one, without the batch.
    layout: RowLayout,
    storage: StorageType,
}

/// What was measured. Bandwidths count what is written, in bytes a second.
#[derive(Serialize)]
struct Measured {
    device: String,
    states: &'static str,
    state_bytes: usize,
    states_a_sequence: usize,
    rows: usize,
    gather: f64,
    scatter: f64,
    copy: f64,
    gather_over_copy: f64,
    scatter_over_copy: f64,
    /// Microseconds of a batch, from the table to the end of the kernel.
    gather_us: f64,
}

fn movement(gpu: i32, effort: &Effort) -> Result<(), DeviceError> {
    let row = |bytes: usize| RowLayout { outer: 1, inner_bytes: bytes };
    let lstm = RowLayout { outer: 2, inner_bytes: 2048 };
    for (name, count, layout, storage) in [
        ("4 KiB", 1, row(4 << 10), StorageType::Exact),
        ("64 KiB", 1, row(64 << 10), StorageType::Exact),
        ("512 KiB", 1, row(512 << 10), StorageType::Exact),
        ("4 MiB", 1, row(4 << 20), StorageType::Exact),
        ("lstm: 2 of [2, B, 512]", 2, lstm, StorageType::Exact),
        ("forty of 1 KiB", 40, row(1 << 10), StorageType::Exact),
        // The kernel then moves smaller units than 16 bytes.
        ("64 KiB, not aligned", 1, row((64 << 10) - 4), StorageType::Exact),
        ("512 KiB, kept as fp16", 1, row(512 << 10), StorageType::Fp16),
    ] {
        print_line(&measure(gpu, effort, &States { name, count, layout, storage })?);
    }
    Ok(())
}

fn measure(gpu: i32, effort: &Effort, states: &States) -> Result<Measured, DeviceError> {
    let (device, rows) = (Device::open(gpu)?, effort.rows);
    let row_bytes = states.layout.row_bytes();
    let slot_bytes = row_bytes.next_multiple_of(64);
    // Only every second slot is used, so that no two rows are contiguous.
    let slots = device.allocate(2 * rows * states.count * slot_bytes)?;
    let batches = (0..states.count).map(|_| device.allocate(rows * row_bytes)).collect::<Result<Vec<_>, _>>()?;
    let (from, to) =
        (device.allocate(rows * states.count * row_bytes)?, device.allocate(rows * states.count * row_bytes)?);
    // Dropped before the buffers, and waits for what uses them.
    let mut queue = Queue::new(OwnedStream::open(&device)?, Default::default())?;
    let slot = |row: usize, state: usize| {
        // In an order that is no order.
        let place = (row * 37 + 11) % rows;
        slots.address() + ((2 * place * states.count + state) * slot_bytes) as u64
    };
    let in_batch = |position: usize| states.layout.row(RowAt { position, rows });
    let gather = |queue: &mut Queue| {
        for (state, batch) in batches.iter().enumerate() {
            for row in 0..rows {
                // SAFETY: rows of buffers that outlive the queue.
                unsafe { queue.put(&in_batch(row), states.storage, slot(row, state), batch.address()) };
            }
        }
        queue.flush()
    };
    let scatter = |queue: &mut Queue| {
        for (state, batch) in batches.iter().enumerate() {
            for row in 0..rows {
                // SAFETY: as above.
                unsafe { queue.take(&in_batch(row), states.storage, batch.address(), slot(row, state)) };
            }
        }
        queue.flush()
    };
    // SAFETY: both outlive the queue.
    let target = unsafe { Foreign::new(device.number(), to.address(), to.byte_len()) };
    // SAFETY: as above; both have the same size.
    let copy = |queue: &mut Queue| unsafe { queue.copy_out(from.address(), target) };
    let mut seconds = |task: &dyn Fn(&mut Queue) -> Result<(), DeviceError>| median(effort, &mut queue, task);
    let (gather, scatter, copy) = (seconds(&gather)?, seconds(&scatter)?, seconds(&copy)?);
    let bytes = (rows * states.count * row_bytes) as f64;
    Ok(Measured {
        device: device.name(),
        states: states.name,
        state_bytes: row_bytes,
        states_a_sequence: states.count,
        rows,
        gather: bytes / gather,
        scatter: bytes / scatter,
        copy: bytes / copy,
        gather_over_copy: copy / gather,
        scatter_over_copy: copy / scatter,
        gather_us: gather * 1e6,
    })
}

/// Seconds of a task, one of many that are enqueued between two waits.
fn median(
    effort: &Effort,
    queue: &mut Queue,
    task: &dyn Fn(&mut Queue) -> Result<(), DeviceError>,
) -> Result<f64, DeviceError> {
    let mut seconds = Vec::with_capacity(effort.rounds);
    for _ in 0..=effort.rounds {
        queue.synchronise()?;
        let begin = Instant::now();
        for _ in 0..effort.batches {
            task(queue)?;
        }
        queue.synchronise()?;
        seconds.push(begin.elapsed().as_secs_f64() / effort.batches as f64);
    }
    // The first round is for what is made once.
    seconds.remove(0);
    seconds.sort_by(f64::total_cmp);
    Ok(seconds[seconds.len() / 2])
}
