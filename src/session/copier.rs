//! Copies of rows where a model runs: at once on the host; on a device they are collected and enqueued.

use std::sync::Arc;

use gpu_rows::{Device, Queue, Span};
use parking_lot::{Mutex, MutexGuard};
use rows::tensor::{Part, StorageType};

use crate::memory::{Bytes, BytesMut, MemoryError};

/// What copies rows for an instance, its step and its states. The default is one on the host.
#[derive(Clone, Default)]
pub struct Copier(Option<OnDevice>);

#[derive(Clone)]
struct OnDevice {
    device: Arc<Device>,
    queue: Arc<Mutex<Queue>>,
}

impl Copier {
    pub fn on_device(queue: Queue) -> Self {
        Self(Some(OnDevice { device: queue.device().clone(), queue: Arc::new(Mutex::new(queue)) }))
    }

    pub fn device(&self) -> Option<&Arc<Device>> {
        self.0.as_ref().map(|on| &on.device)
    }

    /// What is copied on a device from now on is copied after what has been so far: rows may be read that were written,
    /// and written that were read.
    pub fn end_phase(&self) {
        if let Some(mut queue) = self.queue() {
            queue.end_phase();
        }
    }

    /// Waits until everything that was copied on a device is there.
    pub fn synchronise(&self) -> Result<(), MemoryError> {
        match self.queue() {
            Some(mut queue) => Ok(queue.synchronise()?),
            None => Ok(()),
        }
    }

    /// The bytes, on the host; those of a device after a wait.
    pub fn read(&self, bytes: Bytes) -> Result<Vec<u8>, MemoryError> {
        match (bytes, &self.0) {
            (Bytes::Device(span), Some(on)) => {
                let mut pinned = on.device.allocate_pinned(span.byte_len())?;
                let mut queue = on.queue.lock();
                // SAFETY: the span is borrowed memory of the device; both live until the wait below. Where that fails
                // the device has failed, and copies nothing more.
                unsafe { queue.download(span.address(), &mut pinned, span.byte_len()) }?;
                queue.synchronise()?;
                Ok(pinned.bytes()[..span.byte_len()].to_vec())
            }
            (bytes, _) => Ok(bytes.host().to_vec()),
        }
    }

    /// Writes bytes of the host; on a device they are there after [`Copier::synchronise`].
    pub fn write(&self, from: &[u8], to: BytesMut) -> Result<(), MemoryError> {
        match (to, self.queue()) {
            (BytesMut::Device(span), Some(mut queue)) => {
                let (part, storage) = (Part::whole(from.len()), StorageType::Exact);
                let to = keep_alone(&mut queue, &part, span, storage);
                // SAFETY: memory of a slot or a state that has as many bytes, which the queue keeps.
                Ok(unsafe { queue.put_from_host(&part, storage, from, to) }?)
            }
            (to, _) => {
                to.host().copy_from_slice(from);
                Ok(())
            }
        }
    }

    pub(super) fn queue(&self) -> Option<MutexGuard<'_, Queue>> {
        self.0.as_ref().map(|on| on.queue.lock())
    }
}

/// The address of memory of a device where a part of a batch is alone, stored so; the queue keeps it. Panics if it has
/// another size.
pub(super) fn keep_alone(queue: &mut Queue, part: &Part, span: Span, storage: StorageType) -> u64 {
    assert_eq!(span.byte_len(), storage.bytes(part.bytes()), "row of another size");
    if let Some(memory) = span.memory() {
        queue.keep(memory.clone());
    }
    span.address()
}

/// The contract of a copier: on the host and on a device, the same calls leave the same bytes.
#[cfg(test)]
mod tests {
    use half::f16;
    use proptest::prelude::*;

    use super::super::tensors::{BatchTensor, RowContent};
    use super::*;
    use crate::memory::TensorMemory;
    use gpu_rows::OwnedStream;
    use rows::tensor::{DataType, RowAt, RowLayout};

    const ROWS: usize = 3;
    /// A row is two pieces of three numbers.
    const DIMS: [i64; 3] = [2, ROWS as i64, 3];
    const KEPT_AS: [StorageType; 4] = [StorageType::Exact, StorageType::Exact, StorageType::Fp16, StorageType::Fp16];

    type Row = [f32; 6];
    /// A row of one of two batches.
    type Place = (usize, usize);

    #[derive(Clone, Debug)]
    enum Op {
        Write { slot: usize, row: Row },
        Read { slot: usize },
        PutFromSlot { slot: usize, to: Place },
        PutFromHost { row: Row, kept_as: StorageType, to: Place },
        Zero { to: Place },
        Take { from: Place, slot: usize },
        Repeat { batch: usize, from: usize, to: usize },
        CopyFromOtherBatch { from: Place, to: usize },
        Round { at: Place, kept_as: StorageType },
    }

    fn op() -> impl Strategy<Value = Op> {
        let slot = 0..KEPT_AS.len();
        let place = (0usize..2, 0..ROWS);
        let row = prop::array::uniform6(-100_000f32..100_000.0);
        let kept_as = prop::sample::select(vec![StorageType::Exact, StorageType::Fp16]);
        prop_oneof![
            (slot.clone(), row.clone()).prop_map(|(slot, row)| Op::Write { slot, row }),
            slot.clone().prop_map(|slot| Op::Read { slot }),
            (slot.clone(), place.clone()).prop_map(|(slot, to)| Op::PutFromSlot { slot, to }),
            (row, kept_as.clone(), place.clone()).prop_map(|(row, kept_as, to)| Op::PutFromHost { row, kept_as, to }),
            place.clone().prop_map(|to| Op::Zero { to }),
            (place.clone(), slot).prop_map(|(from, slot)| Op::Take { from, slot }),
            (0usize..2, 0..ROWS, 1..ROWS).prop_map(|(batch, from, by)| Op::Repeat {
                batch,
                from,
                to: (from + by) % ROWS
            }),
            (place.clone(), 0..ROWS).prop_map(|(from, to)| Op::CopyFromOtherBatch { from, to }),
            (place, kept_as).prop_map(|(at, kept_as)| Op::Round { at, kept_as }),
        ]
    }

    /// What a row is after it was kept.
    fn kept(row: Row, kept_as: StorageType) -> Row {
        match kept_as {
            StorageType::Exact => row,
            StorageType::Fp16 => row.map(|value| f16::from_f32(value).to_f32()),
        }
    }

    fn stored(row: Row, kept_as: StorageType) -> Vec<u8> {
        match kept_as {
            StorageType::Exact => row.iter().flat_map(|value| value.to_ne_bytes()).collect(),
            StorageType::Fp16 => row.iter().flat_map(|&value| f16::from_f32(value).to_ne_bytes()).collect(),
        }
    }

    fn layout() -> RowLayout {
        RowLayout::new(DataType::Fp32, &DIMS, Some(1)).unwrap()
    }

    fn at((_, position): Place) -> Part {
        layout().row(RowAt { position, rows: ROWS })
    }

    struct Copied {
        copier: Copier,
        batches: [BatchTensor; 2],
        slots: Vec<TensorMemory>,
        /// Whether a copy of the phase has used a slot, and each row of the batches.
        used: ([bool; KEPT_AS.len()], [[bool; ROWS]; 2]),
    }

    impl Copied {
        fn new(on_device: bool) -> Self {
            gpu_rows::simulate();
            let device = on_device.then(|| Device::open(0).unwrap());
            let copier = device.as_ref().map_or(Copier::default(), |device| {
                Copier::on_device(Queue::new(OwnedStream::open(device).unwrap(), Arc::default()).unwrap())
            });
            let batch = || BatchTensor::for_rows(DataType::Fp32, Some(1), device.as_ref(), &DIMS, ROWS).unwrap();
            let slot = |kept_as: &StorageType| {
                TensorMemory::new(device.as_ref(), kept_as.bytes(layout().row_bytes())).unwrap()
            };
            let mut copied = Self {
                batches: [batch(), batch()],
                slots: KEPT_AS.iter().map(slot).collect(),
                copier,
                used: Default::default(),
            };
            for slot in 0..KEPT_AS.len() {
                copied.apply(&Op::Write { slot, row: Row::default() });
            }
            for place in places() {
                copied.apply(&Op::Zero { to: place });
            }
            copied
        }

        /// Begins a phase if the one that goes on has a copy that uses these.
        fn uses(&mut self, slot: Option<usize>, rows: &[Place]) {
            let (slots, batches) = &self.used;
            if slot.is_some_and(|slot| slots[slot]) || rows.iter().any(|&(batch, row)| batches[batch][row]) {
                self.copier.end_phase();
                self.used = Default::default();
            }
            slot.into_iter().for_each(|slot| self.used.0[slot] = true);
            rows.iter().for_each(|&(batch, row)| self.used.1[batch][row] = true);
        }

        fn apply(&mut self, op: &Op) {
            match *op {
                Op::Write { slot, .. } | Op::Read { slot } => self.uses(Some(slot), &[]),
                Op::PutFromSlot { slot, to: place } | Op::Take { from: place, slot } => self.uses(Some(slot), &[place]),
                Op::PutFromHost { to: at, .. } | Op::Zero { to: at } | Op::Round { at, .. } => self.uses(None, &[at]),
                Op::Repeat { batch, from, to } => self.uses(None, &[(batch, from), (batch, to)]),
                Op::CopyFromOtherBatch { from, to } => self.uses(None, &[from, (1 - from.0, to)]),
            }
            let Self { copier, batches, slots, .. } = self;
            match *op {
                Op::Write { slot, row } => {
                    copier.write(&stored(row, KEPT_AS[slot]), to_write(&mut slots[slot])).unwrap()
                }
                Op::Read { .. } => {}
                Op::PutFromSlot { slot, to } => {
                    let content = RowContent::Stored(KEPT_AS[slot], to_read(&slots[slot]));
                    batches[to.0].put(copier, &at(to), content).unwrap();
                }
                Op::PutFromHost { row, kept_as, to } => {
                    let row = stored(row, kept_as);
                    let content = RowContent::Stored(kept_as, Bytes::Host(&row));
                    batches[to.0].put(copier, &at(to), content).unwrap();
                }
                Op::Zero { to } => batches[to.0].put(copier, &at(to), RowContent::Zeros).unwrap(),
                Op::Take { from, slot } => {
                    batches[from.0].take(copier, &at(from), to_write(&mut slots[slot]), KEPT_AS[slot]);
                }
                Op::Repeat { batch, from, to } => {
                    batches[batch].repeat(copier, &at((batch, from)), &at((batch, to)));
                }
                Op::CopyFromOtherBatch { from, to } => {
                    let [first, second] = batches;
                    let (source, target) = if from.0 == 0 { (first, second) } else { (second, first) };
                    target.copy_from(copier, source, &at(from), &at((1 - from.0, to)));
                }
                Op::Round { at: place, kept_as } => {
                    batches[place.0].round(copier, &at(place), kept_as);
                }
            }
        }

        fn slot(&self, slot: usize) -> Vec<u8> {
            self.copier.read(to_read(&self.slots[slot])).unwrap()
        }

        /// The bytes of a row of a batch, through a slot of its own.
        fn row(&self, from: Place) -> Vec<u8> {
            let exact = StorageType::Exact;
            let mut slot = TensorMemory::new(self.copier.device(), layout().row_bytes()).unwrap();
            self.batches[from.0].take(&self.copier, &at(from), to_write(&mut slot), exact);
            self.copier.read(to_read(&slot)).unwrap()
        }
    }

    fn to_read(memory: &TensorMemory) -> Bytes<'_> {
        match memory {
            TensorMemory::Host(buffer) => Bytes::Host(buffer.bytes()),
            TensorMemory::Device(buffer) => Bytes::Device(buffer.span(0, buffer.byte_len())),
        }
    }

    fn to_write(memory: &mut TensorMemory) -> BytesMut<'_> {
        match memory {
            TensorMemory::Host(buffer) => BytesMut::Host(buffer.bytes_mut()),
            TensorMemory::Device(buffer) => BytesMut::Device(buffer.span(0, buffer.byte_len())),
        }
    }

    fn places() -> impl Iterator<Item = Place> {
        (0..2).flat_map(|batch| (0..ROWS).map(move |row| (batch, row)))
    }

    /// What the calls mean, in plain arrays.
    #[derive(Default)]
    struct Expected {
        batches: [[Row; ROWS]; 2],
        slots: [Row; KEPT_AS.len()],
    }

    impl Expected {
        fn apply(&mut self, op: &Op) {
            let Self { batches, slots } = self;
            match *op {
                Op::Write { slot, row } => slots[slot] = kept(row, KEPT_AS[slot]),
                Op::Read { .. } => {}
                Op::PutFromSlot { slot, to } => batches[to.0][to.1] = slots[slot],
                Op::PutFromHost { row, kept_as, to } => batches[to.0][to.1] = kept(row, kept_as),
                Op::Zero { to } => batches[to.0][to.1] = Row::default(),
                Op::Take { from, slot } => slots[slot] = kept(batches[from.0][from.1], KEPT_AS[slot]),
                Op::Repeat { batch, from, to } => batches[batch][to] = batches[batch][from],
                Op::CopyFromOtherBatch { from, to } => batches[1 - from.0][to] = batches[from.0][from.1],
                Op::Round { at, kept_as } => batches[at.0][at.1] = kept(batches[at.0][at.1], kept_as),
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..Default::default() })]
        #[test]
        fn on_the_host_and_on_a_device_the_same_calls_leave_the_same_bytes(ops in prop::collection::vec(op(), 1..60)) {
            for on_device in [false, true] {
                let (mut copied, mut expected) = (Copied::new(on_device), Expected::default());
                for op in &ops {
                    copied.apply(op);
                    expected.apply(op);
                    if let Op::Read { slot } = *op {
                        prop_assert_eq!(copied.slot(slot), stored(expected.slots[slot], KEPT_AS[slot]));
                    }
                }
                copied.copier.synchronise().unwrap();
                for (slot, (row, kept_as)) in expected.slots.into_iter().zip(KEPT_AS).enumerate() {
                    let expected = stored(row, kept_as);
                    prop_assert_eq!(copied.slot(slot), expected, "slot {}, on a device: {}", slot, on_device);
                }
                for place in places() {
                    let expected = stored(expected.batches[place.0][place.1], StorageType::Exact);
                    prop_assert_eq!(copied.row(place), expected, "row {:?}, on a device: {}", place, on_device);
                }
            }
        }
    }
}
