use proptest::prelude::*;

use super::*;
use rows::copies;
use rows::tensor::{RowAt, RowLayout};

const EXACT: StorageType = StorageType::Exact;

fn queue() -> Queue {
    queue_on(0)
}

fn queue_on(device: i32) -> Queue {
    let device = Device::open(device).unwrap();
    Queue::new(OwnedStream::open(&device).unwrap(), Arc::default()).unwrap()
}

/// A buffer on the device with these bytes.
fn device_bytes(queue: &mut Queue, bytes: &[u8]) -> DeviceBuffer {
    let device = queue.device().clone();
    let (mut pinned, buffer) = (device.allocate_pinned(bytes.len()).unwrap(), device.allocate(bytes.len()).unwrap());
    pinned.bytes_mut().copy_from_slice(bytes);
    // SAFETY: both stay allocated until the wait below.
    unsafe { queue.upload(&pinned, &buffer, bytes.len()) }.unwrap();
    queue.synchronise().unwrap();
    buffer
}

fn host_bytes(queue: &mut Queue, buffer: &DeviceBuffer) -> Vec<u8> {
    let mut pinned = queue.device().allocate_pinned(buffer.byte_len()).unwrap();
    // SAFETY: both have the buffer's number of bytes, and stay allocated until the wait below.
    unsafe { queue.download(buffer.address(), &mut pinned, buffer.byte_len()) }.unwrap();
    queue.synchronise().unwrap();
    pinned.bytes().to_vec()
}

/// Bytes of fp32 values. fp16 cannot represent most of them.
fn floats(count: usize) -> Vec<u8> {
    (0..count).flat_map(|i| (i as f32 * 1.001 - 7.3).to_ne_bytes()).collect()
}

#[derive(Clone, Copy, Debug)]
enum Way {
    Put,
    Take,
    Upload,
    Zero,
    PutWidened,
    TakeNarrowed,
    Round,
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..Default::default() })]
    /// Compares the kernel's source with the copies of `rows`.
    #[test]
    fn rows_move_as_they_do_on_the_host(
        outer in 1usize..5, elements in 1usize..700, rows in 1usize..6, index in 0usize..6,
        element in prop::sample::select(vec![1usize, 2, 3, 4, 8, 16]),
        way in prop::sample::select(vec![
            Way::Put, Way::Take, Way::Upload, Way::Zero, Way::PutWidened, Way::TakeNarrowed, Way::Round,
        ]),
    ) {
        let index = index % rows;
        let converts = matches!(way, Way::PutWidened | Way::TakeNarrowed | Way::Round);
        let element = if converts { 4 } else { element };
        let layout = RowLayout { outer, inner_bytes: elements * element };
        let row_bytes = layout.row_bytes() / if converts && !matches!(way, Way::Round) { 2 } else { 1 };
        let mut batch = floats(layout.row_bytes() * rows / 4 + 1);
        batch.truncate(layout.row_bytes() * rows);
        let mut row: Vec<u8> = (0..row_bytes).map(|i| (i % 120) as u8).collect();

        let mut queue = queue();
        let on_device = (device_bytes(&mut queue, &batch), device_bytes(&mut queue, &row));
        let part = layout.row(RowAt { position: index, rows });
        let (in_batch, alone) = (on_device.0.address(), on_device.1.address());
        let storage = if converts { StorageType::Fp16 } else { StorageType::Exact };
        // SAFETY: the buffers live until the end of the test, and have the batch and the row.
        unsafe {
            match way {
                Way::Put | Way::PutWidened => queue.put(&part, storage, alone, in_batch),
                Way::Take | Way::TakeNarrowed => queue.take(&part, storage, in_batch, alone),
                Way::Upload => queue.put_from_host(&part, storage, &row, in_batch).unwrap(),
                Way::Zero => queue.zero(&part, in_batch),
                Way::Round => queue.round_to_fp16(&part, in_batch),
            }
        }
        match way {
            Way::Put | Way::PutWidened | Way::Upload => copies::put(&part, storage, &row, &mut batch),
            Way::Take | Way::TakeNarrowed => copies::take(&part, storage, &batch, &mut row),
            Way::Zero => copies::fill(&part, &mut batch, 0),
            Way::Round => _ = copies::round_to_fp16(&part, &mut batch),
        }
        prop_assert_eq!(host_bytes(&mut queue, &on_device.0), batch);
        prop_assert_eq!(host_bytes(&mut queue, &on_device.1), row);
    }
}

#[test]
fn phases_follow_one_another_and_share_one_table() {
    let mut queue = queue();
    let part = Part::whole(100);
    let buffers: Vec<_> = (0..4u8).map(|value| device_bytes(&mut queue, &[value; 100])).collect();
    let at = |number: usize| buffers[number].address();
    // Each phase copies a buffer that the next phase overwrites.
    for number in 0..3 {
        // SAFETY: the buffers have the part, and live until the end of the test.
        unsafe { queue.put(&part, EXACT, at(number + 1), at(number)) };
        queue.end_phase();
    }
    // SAFETY: the buffer has the part, and lives until the end of the test.
    unsafe { queue.put_from_host(&part, EXACT, &[9; 100], at(3)) }.unwrap();
    queue.flush().unwrap();
    // SAFETY: the buffer has the part, and lives until the end of the test.
    unsafe { queue.zero(&part, at(0)) };
    queue.synchronise().unwrap();
    let values: Vec<_> = buffers.iter().map(|buffer| host_bytes(&mut queue, buffer)[99]).collect();
    assert_eq!(values, [0, 2, 3, 9]);
}

#[test]
fn memory_that_is_kept_lives_until_the_moves_that_use_it_have_happened() {
    let mut queue = queue();
    let (from, to) = (device_bytes(&mut queue, &[5; 8]), device_bytes(&mut queue, &[0; 8]));
    queue.keep(from.memory().clone());
    // SAFETY: the queue keeps the source, and the target lives until the end of the test.
    unsafe { queue.put(&Part::whole(8), EXACT, from.address(), to.address()) };
    let memory = Arc::downgrade(from.memory());
    drop(from);
    queue.flush().unwrap();
    assert!(memory.upgrade().is_some());
    queue.synchronise().unwrap();
    assert!(memory.upgrade().is_none(), "the wait releases the memory");
    assert_eq!(host_bytes(&mut queue, &to), [5; 8]);
}

#[test]
fn a_table_of_any_length_finds_room() {
    let mut queue = queue();
    let layout = RowLayout { outer: 1, inner_bytes: 8 };
    let rows = 3000;
    let (from, to) = (device_bytes(&mut queue, &floats(2 * rows)), device_bytes(&mut queue, &vec![0; 8 * rows]));
    for round in 0..5 {
        for index in 0..rows {
            let row = |position| layout.row(RowAt { position, rows });
            let (first, second) = (row((index + round) % rows), row(index));
            // SAFETY: the buffers of these rows live until the end of the test.
            unsafe { queue.transfer(&first, from.address(), &second, to.address()) };
        }
        queue.flush().unwrap();
    }
    let (from, to) = (host_bytes(&mut queue, &from), host_bytes(&mut queue, &to));
    assert_eq!(to[..8 * (rows - 4)], from[8 * 4..]);
}

#[test]
fn after_a_failure_nothing_is_executed_and_earlier_work_is_waited_for() {
    let mut queue = queue();
    let (before, after) = (device_bytes(&mut queue, &[1; 8]), device_bytes(&mut queue, &[1; 8]));
    let zero = |queue: &mut Queue, buffer: &DeviceBuffer| {
        // SAFETY: the buffer has these bytes, and lives until the end of the test.
        unsafe { queue.zero(&Part::whole(8), buffer.address()) };
    };
    zero(&mut queue, &before);
    queue.flush().unwrap();
    zero(&mut queue, &after);
    let failed =
        queue.keep_failure(Err(DeviceError::Failed { device: 0, call: "a test", why: "it says so".to_owned() }));
    assert!(failed.is_err() && queue.flush().is_err() && queue.before_run().is_err());
    assert!(queue.synchronise().is_err());
    let mut another = queue_on(0);
    assert_eq!(host_bytes(&mut another, &before), [0; 8]);
    assert_eq!(host_bytes(&mut another, &after), [1; 8]);
}

#[test]
fn a_table_is_enqueued_in_parts_if_there_is_no_memory_for_all_of_it() {
    // No other test allocates memory of this device.
    let mut queue = queue_on(7);
    let device = queue.device().clone();
    let rows = 3000;
    let layout = RowLayout { outer: 1, inner_bytes: 8 };
    let (from, to) = (device_bytes(&mut queue, &floats(2 * rows)), device_bytes(&mut queue, &vec![0; 8 * rows]));
    let (free, _) = device.driver.memory().unwrap();
    let full = device.allocate(free).unwrap();
    for index in 0..rows {
        let row = layout.row(RowAt { position: index, rows });
        // SAFETY: the buffers of these rows live until the end of the test.
        unsafe { queue.transfer(&row, from.address(), &row, to.address()) };
    }
    let row = vec![1; FIRST_ARENA];
    let large = Part::whole(row.len());
    // SAFETY: the queue refuses the move, so it is never executed.
    let refused = unsafe { queue.put_from_host(&large, EXACT, &row, to.address()) };
    assert!(matches!(refused, Err(DeviceError::OutOfMemory { device: 7, .. })));
    queue.synchronise().unwrap();
    drop(full);
    let (from, to) = (host_bytes(&mut queue, &from), host_bytes(&mut queue, &to));
    assert_eq!(to, from[..8 * rows]);
}

#[test]
fn an_allocation_that_is_too_large_is_refused_with_the_free_bytes() {
    let error = Device::open(0).unwrap().allocate(usize::MAX / 4).err().unwrap();
    assert!(matches!(error, DeviceError::OutOfMemory { device: 0, .. }), "{error}");
    assert!(error.to_string().contains("bytes are free"), "{error}");
}
