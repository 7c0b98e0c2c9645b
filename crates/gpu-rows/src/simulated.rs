//! A device in host memory, for tests. It runs the kernel's source, compiled as C, and makes errors in its use visible:
//!
//! - It executes enqueued work as late as it may: when somebody waits, or before ONNX Runtime runs. So a copy gives
//!   wrong values if its source is changed or its target is read too early.
//! - It fills new memory and freed memory with patterns.
//! - From the moment at which the file `TRITON_STATEFUL_SIMULATED_FAILURE` exists, waits fail as after an illegal
//!   access.
//! - It stops the process if memory is freed before the work that uses it, if moves of one phase overlap, and if memory
//!   is not freed at the end.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Range;
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::OnceLock;

use memmap2::MmapMut;
use parking_lot::Mutex;

use super::driver::{Counts, DeviceError, Driver, Stream};
use super::moves::Moves;

/// The patterns of new memory and of freed memory.
const NEW: u8 = 0xab;
const FREED: u8 = 0xdd;

/// Bytes of freed memory that are kept, so that work that still uses them is found.
const QUARANTINE: usize = 8 << 20;

/// Bytes of the device's memory in a server, unless `TRITON_STATEFUL_SIMULATED_BYTES` sets them.
const BYTES: usize = 8 << 30;
/// The same in unit tests.
const BYTES_IN_UNIT_TESTS: usize = 64 << 20;

unsafe extern "C" {
    fn triton_stateful_emulate_move_rows(moves: *const u8, count: u32, tiles: u32);
}

pub struct Simulated {
    number: i32,
    total: usize,
    /// Once it exists, the device fails.
    failure: Option<PathBuf>,
    lost: OnceLock<DeviceError>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    streams: HashMap<usize, Vec<Work>>,
    next_stream: usize,
    /// Allocated memory, by its address.
    live: BTreeMap<u64, MmapMut>,
    /// Memory that was freed last.
    freed: VecDeque<MmapMut>,
    pinned: BTreeMap<u64, MmapMut>,
    counts: Counts,
}

enum Work {
    Copy { from: u64, to: u64, bytes: usize },
    MoveRows { table: u64, count: u32, tiles: u32 },
    Free { memory: MmapMut },
}

impl Simulated {
    /// `is_server`: it is a device of a server, not of a unit test.
    pub fn new(number: i32, is_server: bool) -> Self {
        let total = std::env::var("TRITON_STATEFUL_SIMULATED_BYTES").ok().and_then(|bytes| bytes.parse().ok());
        let failure = std::env::var_os("TRITON_STATEFUL_SIMULATED_FAILURE").map(PathBuf::from);
        let total = total.unwrap_or(if is_server { BYTES } else { BYTES_IN_UNIT_TESTS });
        Self { number, total, failure, lost: OnceLock::new(), state: Mutex::default() }
    }

    /// The error of a device that fails, from then on.
    fn check(&self, call: &'static str) -> Result<(), DeviceError> {
        if self.lost.get().is_none() && self.failure.as_ref().is_some_and(|file| file.exists()) {
            let why = "CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered".to_owned();
            self.lost.get_or_init(|| DeviceError::Lost { device: self.number, call, why });
        }
        self.lost.get().cloned().map_or(Ok(()), Err)
    }

    fn enqueue(&self, stream: Stream, work: Work) {
        let mut state = self.state.lock();
        state.counts.copies += usize::from(matches!(work, Work::Copy { .. }));
        let queue = state.streams.get_mut(&stream.0);
        expect(queue.is_some(), || "work is enqueued on a closed stream".to_owned());
        if let Some(queue) = queue {
            queue.push(work);
        }
    }
}

impl State {
    fn used(&self) -> usize {
        self.live.values().map(|memory| memory.len()).sum()
    }

    /// Executes all work that is enqueued on a stream.
    fn execute(&mut self, stream: Stream) {
        for work in self.streams.get_mut(&stream.0).map(std::mem::take).unwrap_or_default() {
            match work {
                Work::Copy { from, to, bytes } => {
                    self.expect_not_freed(from, bytes);
                    self.expect_not_freed(to, bytes);
                    // SAFETY: neither side has been freed, as checked above, and the caller of the function that
                    // enqueued the copy guarantees that both are allocated until now.
                    unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes) };
                }
                Work::MoveRows { table, count, tiles } => self.move_rows(table, count, tiles),
                Work::Free { mut memory } => {
                    memory.fill(FREED);
                    self.freed.push_back(memory);
                    while self.freed.iter().map(|memory| memory.len()).sum::<usize>() > QUARANTINE {
                        self.freed.pop_front();
                    }
                }
            }
        }
    }

    fn move_rows(&self, table: u64, count: u32, tiles: u32) {
        let bytes = count as usize * Moves::move_bytes();
        self.expect_live(table, bytes);
        // SAFETY: the table is allocated, as checked above, and a copy before has written it.
        let rows = unsafe { std::slice::from_raw_parts(table as *const u8, bytes) };
        let (mut read, mut written): (Vec<Range<u64>>, Vec<Range<u64>>) = Default::default();
        for (from, to) in Moves::touched(rows) {
            from.iter().for_each(|piece| self.expect_not_freed(piece.start, (piece.end - piece.start) as usize));
            to.iter().for_each(|piece| self.expect_live(piece.start, (piece.end - piece.start) as usize));
            read.extend(from);
            written.extend(to);
        }
        expect_apart(&mut written, &read);
        // SAFETY: the table has `count` moves. The code that enqueued them guarantees that the memory is allocated
        // until now.
        unsafe { triton_stateful_emulate_move_rows(rows.as_ptr(), count, tiles) };
    }

    /// Moves must write to memory of the device or to pinned memory.
    fn expect_live(&self, address: u64, bytes: usize) {
        let holds = |(&start, memory): (&u64, &MmapMut)| {
            address >= start && address + bytes as u64 <= start + memory.len() as u64
        };
        let is_live = self.live.range(..=address).next_back().is_some_and(holds)
            || self.pinned.range(..=address).next_back().is_some_and(holds);
        expect(is_live, || format!("{bytes} bytes at {address:#x} are used but not allocated"));
    }

    /// Moves and copies may read any memory, and copies may write any. Some of it is not allocated here, such as ONNX
    /// Runtime's. So this only checks that the bytes have not been freed here.
    fn expect_not_freed(&self, address: u64, bytes: usize) {
        let meets = |memory: &MmapMut| {
            let start = memory.as_ptr() as u64;
            start < address + bytes as u64 && address < start + memory.len() as u64
        };
        expect(!self.freed.iter().any(meets), || format!("{bytes} bytes at {address:#x} are used after being freed"));
    }
}

/// The addresses that enqueued work will read and write. The table of moves has not been copied to the device yet, so
/// this reads it from the source of its copy.
fn touched(work: &[Work]) -> Vec<Range<u64>> {
    let mut pieces = Vec::new();
    for one in work {
        match *one {
            Work::Copy { from, to, bytes } => pieces.extend([from, to].map(|at| at..at + bytes as u64)),
            Work::MoveRows { table, count, .. } => {
                let bytes = count as usize * Moves::move_bytes();
                let source = work.iter().find_map(|copy| match *copy {
                    Work::Copy { from, to, bytes } if (to..to + bytes as u64).contains(&table) => {
                        Some(from + (table - to))
                    }
                    _ => None,
                });
                let Some(source) = source else { continue };
                // SAFETY: the source of the copy is pinned memory, which its owner does not free before the copy is
                // complete.
                let rows = unsafe { std::slice::from_raw_parts(source as *const u8, bytes) };
                pieces.extend(Moves::touched(rows).into_iter().flat_map(|(from, to)| from.into_iter().chain(to)));
            }
            Work::Free { .. } => {}
        }
    }
    pieces
}

/// Checks that no move of a phase writes bytes that another one reads or writes.
fn expect_apart(written: &mut [Range<u64>], read: &[Range<u64>]) {
    written.sort_by_key(|piece| piece.start);
    let apart = written.windows(2).all(|pair| pair[0].end <= pair[1].start);
    expect(apart, || "two moves of a phase write the same bytes".to_owned());
    for piece in read {
        let next = written.partition_point(|written| written.end <= piece.start);
        let meets = written.get(next).is_some_and(|written| written.start < piece.end && written != piece);
        expect(!meets, || "a move reads bytes that another move of its phase writes".to_owned());
    }
}

/// Stops the process if `holds` is false, so that no test passes in spite of the error.
fn expect(holds: bool, what: impl FnOnce() -> String) {
    if !holds {
        eprintln!("simulated device: {}", what());
        std::process::abort();
    }
}

/// Pages that go back to the system when they are dropped. Tests of the memory that a server keeps depend on this.
fn pages(bytes: usize, content: u8) -> Option<MmapMut> {
    let mut pages = MmapMut::map_anon(bytes).ok()?;
    pages.fill(content);
    Some(pages)
}

impl Driver for Simulated {
    fn name(&self) -> String {
        "simulated in host memory".to_owned()
    }

    fn is_cuda(&self) -> bool {
        false
    }

    fn open_stream(&self) -> Result<Stream, DeviceError> {
        let mut state = self.state.lock();
        state.next_stream += 1;
        let stream = state.next_stream;
        state.streams.insert(stream, Vec::new());
        Ok(Stream(stream))
    }

    fn close_stream(&self, stream: Stream) {
        let mut state = self.state.lock();
        state.execute(stream);
        state.streams.remove(&stream.0);
    }

    fn allocate(&self, _: Stream, bytes: usize) -> Result<u64, DeviceError> {
        let mut state = self.state.lock();
        let free = self.total.saturating_sub(state.used());
        let memory = if bytes <= free { pages(bytes, NEW) } else { None };
        let memory = memory.ok_or(DeviceError::OutOfMemory { bytes, device: self.number, free, total: self.total })?;
        state.counts.allocations += 1;
        let address = memory.as_ptr() as u64;
        state.live.insert(address, memory);
        Ok(address)
    }

    unsafe fn free(&self, stream: Stream, address: u64) {
        let mut state = self.state.lock();
        let memory = state.live.remove(&address);
        expect(memory.is_some(), || format!("{address:#x} is freed but not allocated"));
        let Some(memory) = memory else { return };
        let freed = address..address + memory.len() as u64;
        let overlaps = |piece: &Range<u64>| piece.start < freed.end && freed.start < piece.end;
        let in_use = |work: &Vec<Work>| touched(work).iter().any(overlaps);
        let in_use = state.streams.iter().any(|(&other, work)| other != stream.0 && in_use(work));
        expect(!in_use, || format!("{address:#x} is freed while enqueued work uses it"));
        state.streams.entry(stream.0).or_default().push(Work::Free { memory });
        state.execute(stream);
    }

    fn allocate_pinned(&self, bytes: usize) -> Result<NonNull<u8>, DeviceError> {
        let none = DeviceError::OutOfPinned { bytes, device: self.number };
        let mut memory = pages(bytes, 0).ok_or(none.clone())?;
        let address = memory.as_mut_ptr();
        self.state.lock().pinned.insert(address as u64, memory);
        NonNull::new(address).ok_or(none)
    }

    unsafe fn free_pinned(&self, memory: NonNull<u8>, bytes: usize) {
        let known = self.state.lock().pinned.remove(&(memory.as_ptr() as u64));
        let is_known = known.is_some_and(|known| known.len() == bytes);
        expect(is_known, || "pinned memory is freed but not allocated".to_owned());
    }

    unsafe fn upload(&self, stream: Stream, from: *const u8, to: u64, bytes: usize) -> Result<(), DeviceError> {
        self.enqueue(stream, Work::Copy { from: from as u64, to, bytes });
        Ok(())
    }

    unsafe fn download(&self, stream: Stream, from: u64, to: *mut u8, bytes: usize) -> Result<(), DeviceError> {
        self.enqueue(stream, Work::Copy { from, to: to as u64, bytes });
        Ok(())
    }

    unsafe fn copy(&self, stream: Stream, from: u64, to: u64, bytes: usize) -> Result<(), DeviceError> {
        self.enqueue(stream, Work::Copy { from, to, bytes });
        Ok(())
    }

    unsafe fn move_rows(&self, stream: Stream, table: u64, count: u32, tiles: u32) -> Result<(), DeviceError> {
        self.state.lock().counts.launches += 1;
        self.enqueue(stream, Work::MoveRows { table, count, tiles });
        Ok(())
    }

    fn synchronise(&self, stream: Stream) -> Result<(), DeviceError> {
        let mut state = self.state.lock();
        state.counts.waits += 1;
        state.execute(stream);
        self.check("cuStreamSynchronize")
    }

    fn before_run(&self, stream: Stream) -> Result<(), DeviceError> {
        self.state.lock().execute(stream);
        Ok(())
    }

    fn end_capture(&self, _: Stream) -> Result<(), DeviceError> {
        Ok(())
    }

    fn memory(&self) -> Result<(usize, usize), DeviceError> {
        Ok((self.total.saturating_sub(self.state.lock().used()), self.total))
    }

    fn make_current(&self) -> Result<(), DeviceError> {
        self.lost.get().cloned().map_or(Ok(()), Err)
    }

    fn lost(&self) -> Option<&DeviceError> {
        self.lost.get()
    }

    fn counts(&self) -> Counts {
        self.state.lock().counts
    }
}

impl Drop for Simulated {
    fn drop(&mut self) {
        let state = self.state.get_mut();
        expect(state.live.is_empty(), || format!("{} allocations have not been freed", state.live.len()));
        expect(state.pinned.is_empty(), || format!("{} pinned allocations have not been freed", state.pinned.len()));
    }
}
