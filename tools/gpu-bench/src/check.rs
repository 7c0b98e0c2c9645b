//! The kernel on the GPU against the host's copies (`crates/rows/src/copies.rs`), byte for byte, with what surrounds
//! the rows, and what the driver says after a broken move.

use std::sync::Arc;

use clap::Args;
use fastrand::Rng;
use gpu_rows::{Device, DeviceBuffer, DeviceError, OwnedStream, Queue};
use rows::copies;
use rows::tensor::{Part, RowAt, RowLayout, StorageType};
use serde::Serialize;

#[derive(Args)]
pub struct Checks {
    /// Random layouts.
    #[arg(long, default_value_t = 3000)]
    cases: usize,
    /// Rows of the large batch.
    #[arg(long, default_value_t = 100_000)]
    rows: usize,
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

/// Bytes around each tensor, which no move may change.
const GUARD: usize = 64;

pub fn run(gpu: i32, checks: &Checks) -> Result<bool, DeviceError> {
    let device = Device::open(gpu)?;
    // Each is printed before the next begins.
    let layouts = print(&random_layouts(&device, checks.cases)?);
    let many = print(&many_rows(&device, checks.rows)?);
    let large = print(&large_row(&device, 0)?);
    let by_bytes = print(&large_row(&device, 1)?);
    Ok(layouts && many && large && by_bytes)
}

/// Prints a line; whether it is not of a fault.
fn print(finding: &Finding) -> bool {
    print_line(finding);
    finding.verdict != Verdict::Wrong
}

pub fn print_line(line: &impl Serialize) {
    match serde_json::to_string(line) {
        Ok(line) => println!("{line}"),
        Err(error) => eprintln!("{error}"),
    }
}

/// `wrong`: what differs, of what was compared.
fn compared(check: &'static str, what: String, wrong: Option<String>) -> Finding {
    let verdict = if wrong.is_none() { Verdict::Right } else { Verdict::Wrong };
    let found = wrong.map_or_else(|| format!("{what}, all equal"), |wrong| format!("{what}; {wrong}"));
    Finding { check, found, allowed: "no byte differs from the host's copies", verdict }
}

fn queue(device: &Arc<Device>) -> Result<Queue, DeviceError> {
    Queue::new(OwnedStream::open(device)?, Arc::default())
}

fn uploaded(queue: &mut Queue, bytes: &[u8]) -> Result<DeviceBuffer, DeviceError> {
    let device = queue.device().clone();
    let (mut pinned, buffer) = (device.allocate_pinned(bytes.len())?, device.allocate(bytes.len())?);
    pinned.bytes_mut().copy_from_slice(bytes);
    // SAFETY: both stay allocated until the wait below.
    unsafe { queue.upload(&pinned, &buffer, bytes.len()) }?;
    queue.synchronise()?;
    Ok(buffer)
}

fn downloaded(queue: &mut Queue, address: u64, bytes: usize) -> Result<Vec<u8>, DeviceError> {
    let mut pinned = queue.device().allocate_pinned(bytes)?;
    // SAFETY: callers name allocated bytes; both stay allocated until the wait below.
    unsafe { queue.download(address, &mut pinned, bytes) }?;
    queue.synchronise()?;
    Ok(pinned.bytes().to_vec())
}

/// What a move of a random layout does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Put,
    Take,
    Upload,
    Zero,
    PutWidened,
    TakeNarrowed,
    Round,
}

const WAYS: [Way; 7] = [Way::Put, Way::Take, Way::Upload, Way::Zero, Way::PutWidened, Way::TakeNarrowed, Way::Round];

/// One move: a row alone, and a batch, each with bytes around it.
#[derive(Debug)]
struct Case {
    way: Way,
    layout: RowLayout,
    at: RowAt,
    /// Bytes before the batch, and before the row.
    offsets: (usize, usize),
}

impl Case {
    fn random(random: &mut Rng) -> Self {
        let way = WAYS[random.usize(..WAYS.len())];
        let converts = matches!(way, Way::PutWidened | Way::TakeNarrowed | Way::Round);
        let element = if converts { 4 } else { [1, 2, 3, 4, 8, 16][random.usize(..6)] };
        let most = if random.usize(..20) == 0 { 40_000 } else { 700 };
        let elements = random.usize(1..most);
        let rows = random.usize(1..=6);
        // Values of 4 bytes are aligned for themselves, as in every tensor.
        let offsets = match way {
            _ if converts => (GUARD + 4 * random.usize(..4), GUARD + 2 * random.usize(..8)),
            _ => (GUARD + random.usize(..16), GUARD + random.usize(..16)),
        };
        let layout = RowLayout { outer: random.usize(1..5), inner_bytes: elements * element };
        Self { way, layout, at: RowAt { position: random.usize(..rows), rows }, offsets }
    }

    fn row_bytes(&self) -> usize {
        let is_half = matches!(self.way, Way::PutWidened | Way::TakeNarrowed);
        self.layout.row_bytes() / if is_half { 2 } else { 1 }
    }

    /// What differs between the device and the host after the move.
    fn wrong(&self, queue: &mut Queue, random: &mut Rng) -> Result<Option<String>, DeviceError> {
        let mut batch = values(random, self.layout.row_bytes() * self.at.rows);
        let mut row = values(random, self.row_bytes());
        let before = (surrounded(&batch, self.offsets.0), surrounded(&row, self.offsets.1));
        let buffers = (uploaded(queue, &before.0)?, uploaded(queue, &before.1)?);
        let (in_batch, alone) =
            (buffers.0.address() + self.offsets.0 as u64, buffers.1.address() + self.offsets.1 as u64);
        let part = self.layout.row(self.at);
        let storage = match self.way {
            Way::PutWidened | Way::TakeNarrowed => StorageType::Fp16,
            _ => StorageType::Exact,
        };
        // SAFETY: the buffers have the batch and the row, and live until the downloads below have waited.
        unsafe {
            match self.way {
                Way::Put | Way::PutWidened => queue.put(&part, storage, alone, in_batch),
                Way::Take | Way::TakeNarrowed => queue.take(&part, storage, in_batch, alone),
                Way::Upload => queue.put_from_host(&part, storage, &row, in_batch)?,
                Way::Zero => queue.zero(&part, in_batch),
                Way::Round => queue.round_to_fp16(&part, in_batch),
            }
        }
        match self.way {
            Way::Put | Way::PutWidened | Way::Upload => copies::put(&part, storage, &row, &mut batch),
            Way::Take | Way::TakeNarrowed => copies::take(&part, storage, &batch, &mut row),
            Way::Zero => copies::fill(&part, &mut batch, 0),
            Way::Round => _ = copies::round_to_fp16(&part, &mut batch),
        }
        let wanted = [surrounded(&batch, self.offsets.0), surrounded(&row, self.offsets.1)];
        for (name, buffer, wanted) in [("the batch", &buffers.0, &wanted[0]), ("the row", &buffers.1, &wanted[1])] {
            let came = downloaded(queue, buffer.address(), wanted.len())?;
            if let Some(at) = first_difference(&came, wanted) {
                return Ok(Some(format!("{name} differs at byte {at} of {}: {self:?}", wanted.len())));
            }
        }
        Ok(None)
    }
}

/// Random bytes that are no NaN, as fp32 or fp16: a NaN may get other bits.
fn values(random: &mut Rng, bytes: usize) -> Vec<u8> {
    let mut made: Vec<u8> = std::iter::repeat_with(|| random.u8(..)).take(bytes).collect();
    // The high byte of each half: with this bit cleared, the exponent of neither type is all ones.
    made.iter_mut().skip(1).step_by(2).for_each(|byte| *byte &= !0x40);
    if random.bool() {
        // Numbers near 1. fp16 cannot represent most of them.
        let numbers = made.chunks_exact_mut(4);
        numbers.for_each(|number| {
            number.copy_from_slice(&(random.f32() * 4.0 - 2.0).to_ne_bytes());
            number[1] &= !0x40;
        });
    }
    made
}

fn surrounded(bytes: &[u8], before: usize) -> Vec<u8> {
    [&vec![0x5a; before], bytes, &[0x5a; GUARD]].concat()
}

fn first_difference(left: &[u8], right: &[u8]) -> Option<usize> {
    // The comparison of whole slices is much faster, and nearly always enough.
    if left == right { None } else { left.iter().zip(right).position(|(left, right)| left != right) }
}

fn random_layouts(device: &Arc<Device>, cases: usize) -> Result<Finding, DeviceError> {
    let mut random = Rng::with_seed(7);
    let mut queue = queue(device)?;
    let mut wrong = None;
    for _ in 0..cases {
        let case = Case::random(&mut random);
        wrong = case.wrong(&mut queue, &mut random)?;
        if wrong.is_some() {
            break;
        }
    }
    Ok(compared("random layouts, alignments and conversions", format!("{cases} moves on {}", device.name()), wrong))
}

/// Rows of two pieces that all join a batch at once, in another order, and leave it.
fn many_rows(device: &Arc<Device>, rows: usize) -> Result<Finding, DeviceError> {
    let layout = RowLayout { outer: 2, inner_bytes: 48 };
    let bytes = rows * layout.row_bytes();
    let mut random = Rng::with_seed(8);
    let mut order: Vec<usize> = (0..rows).collect();
    random.shuffle(&mut order);
    let slots = values(&mut random, bytes);
    let mut queue = queue(device)?;
    let on_device = uploaded(&mut queue, &slots)?;
    let (batch, back) = (device.allocate(bytes)?, device.allocate(bytes)?);
    let slot = |buffer: &DeviceBuffer, number: usize| buffer.address() + (number * layout.row_bytes()) as u64;
    let row = |position| layout.row(RowAt { position, rows });
    for (index, &number) in order.iter().enumerate() {
        // SAFETY: the buffers of these rows live until the downloads below have waited.
        unsafe { queue.put(&row(index), StorageType::Exact, slot(&on_device, number), batch.address()) };
    }
    queue.end_phase();
    for (index, &number) in order.iter().enumerate() {
        // SAFETY: as above.
        unsafe { queue.take(&row(index), StorageType::Exact, batch.address(), slot(&back, number)) };
    }
    let mut wanted = vec![0; bytes];
    for (position, &number) in order.iter().enumerate() {
        let alone = &slots[number * layout.row_bytes()..][..layout.row_bytes()];
        copies::put(&row(position), StorageType::Exact, alone, &mut wanted);
    }
    let came = [downloaded(&mut queue, batch.address(), bytes)?, downloaded(&mut queue, back.address(), bytes)?];
    let differs = |name, came: &[u8], wanted: &[u8]| {
        first_difference(came, wanted).map(|at| format!("{name} differs at byte {at} of {bytes}"))
    };
    let wrong = differs("the batch", &came[0], &wanted).or_else(|| differs("a slot", &came[1], &slots));
    Ok(compared("very many rows in one batch, and back", format!("{rows} rows of two pieces"), wrong))
}

/// The row of [`large_row`], of more than 4 GiB, is filled and compared in chunks.
const CHUNK: usize = 64 << 20;
const CHUNKS: usize = 65;
const WHOLE: usize = CHUNK * CHUNKS;

/// Moves a row of more than 4 GiB to an address that is `shift` bytes off, so that the kernel moves units of 16 bytes
/// or of one.
fn large_row(device: &Arc<Device>, shift: usize) -> Result<Finding, DeviceError> {
    let check = if shift == 0 { "one row of more than 4 GiB" } else { "one row of more than 4 GiB, byte by byte" };
    let buffers = device.allocate(WHOLE).and_then(|from| Ok((from, device.allocate(WHOLE + shift)?)));
    let (from, to) = match buffers {
        Err(error) if error.is_out_of_memory() => {
            let allowed = "needs twice as much memory of the device";
            return Ok(Finding { check, found: error.to_string(), allowed, verdict: Verdict::LeftOut });
        }
        buffers => buffers?,
    };
    let mut queue = queue(device)?;
    let pattern = values(&mut Rng::with_seed(9), CHUNK);
    let chunk = uploaded(&mut queue, &pattern)?;
    let (one, exact) = (Part::whole(CHUNK), StorageType::Exact);
    let place = |number: usize| from.address() + (number * CHUNK) as u64;
    // SAFETY: the buffers of these rows live until the downloads below have waited.
    unsafe {
        (0..CHUNKS).for_each(|number| queue.put(&one, exact, chunk.address(), place(number)));
        queue.end_phase();
        // So that no two chunks are equal.
        for number in 0..CHUNKS {
            queue.put_from_host(&Part::whole(8), exact, &number.to_ne_bytes(), place(number))?;
        }
        queue.end_phase();
        queue.put(&Part::whole(WHOLE), exact, place(0), to.address() + shift as u64);
    }
    let mut wrong = None;
    for number in 0..CHUNKS {
        let came = downloaded(&mut queue, to.address() + (number * CHUNK + shift) as u64, CHUNK)?;
        let difference = first_difference(&came[..8], &number.to_ne_bytes())
            .or_else(|| first_difference(&came[8..], &pattern[8..]).map(|at| at + 8));
        if let Some(at) = difference {
            wrong = Some(format!("it differs at byte {}", number * CHUNK + at));
            break;
        }
    }
    Ok(compared(check, format!("{WHOLE} bytes"), wrong))
}

/// Whether every error after a write to an address that is not allocated said what to do.
pub fn fault(gpu: i32) -> Result<bool, DeviceError> {
    let device = Device::open(gpu)?;
    let row = device.allocate(64)?;
    let mut queue = queue(&device)?;
    // In the first page, which is never allocated.
    let nowhere = 16;
    // SAFETY: none: this is the fault that is looked for, and the process ends after it. The source lives until then.
    unsafe { queue.put(&Part::whole(16), StorageType::Exact, row.address(), nowhere) };
    // After it, the driver refuses everything that the process asks of the GPU, so each must say that only a restart
    // helps.
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
