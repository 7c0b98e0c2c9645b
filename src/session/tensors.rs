//! Tensors of a run, in our buffers ([`BatchTensor`]) or made by ONNX Runtime ([`MadeTensor`]).

use std::sync::Arc;

use gpu_rows::{Device, Pinned, Queue};
use rows::tensor::{DataType, Part, StorageType, element_count};
use rows::{Buffer, NoMemory, copies};

use super::copier::{Copier, keep_alone};
use super::open::Session;
use super::value::{MemoryKind, SessionError, Value};
use crate::memory::{Bytes, BytesMut, MemoryError, TensorMemory};

#[derive(Clone, Copy)]
pub enum RowContent<'a> {
    Zeros,
    /// Elements that are stored so.
    Stored(StorageType, Bytes<'a>),
}

/// A tensor over a buffer that is kept between runs. ONNX Runtime gets one for each number of rows that was asked for.
pub struct BatchTensor {
    pub(super) data_type: DataType,
    pub(super) batch_axis: Option<usize>,
    /// Where the buffer is, if not on the host.
    pub(super) device: Option<Arc<Device>>,
    /// Dimensions, with the number of rows of the last use.
    pub(super) dims: Vec<i64>,
    pub(super) bytes: usize,
    /// Over the buffer, so they go before it.
    by_rows: Vec<Option<Value>>,
    pub(super) memory: TensorMemory,
    /// The host's side of a buffer on a device.
    pub(super) staging: Option<Pinned>,
}

impl BatchTensor {
    /// Without elements so far; on the device if there is one.
    pub fn new(
        data_type: DataType,
        batch_axis: Option<usize>,
        device: Option<&Arc<Device>>,
    ) -> Result<Self, MemoryError> {
        Ok(Self {
            data_type,
            batch_axis,
            device: device.cloned(),
            dims: Vec::new(),
            bytes: 0,
            by_rows: Vec::new(),
            memory: TensorMemory::Host(Buffer::new(0)?),
            staging: None,
        })
    }

    /// With a buffer for up to `rows` rows of `dims`, which is never replaced.
    pub fn for_rows(
        data_type: DataType,
        batch_axis: Option<usize>,
        device: Option<&Arc<Device>>,
        dims: &[i64],
        rows: usize,
    ) -> Result<Self, MemoryError> {
        let mut tensor = Self::new(data_type, batch_axis, device)?;
        tensor.set_dims(dims, rows)?;
        tensor.memory = TensorMemory::new(device, tensor.bytes)?;
        Ok(tensor)
    }

    /// Makes ready for `rows` rows of `dims` (whose batch axis is ignored). Contents are undefined when the shape
    /// differs from the last one.
    pub fn shape(&mut self, dims: &[i64], rows: usize) -> Result<(), MemoryError> {
        self.set_dims(dims, rows)?;
        if self.bytes > self.memory.byte_len()
            || (self.is_exact() && self.bytes != self.memory.byte_len())
            // Before its first use, and after `give_back`, the buffer is an empty one of the host.
            || (self.device.is_some() && matches!(self.memory, TensorMemory::Host(_)))
        {
            // The values are over the buffer, so they go first.
            self.by_rows.clear();
            // Rounded up, so that an input that grows by a step at a time does not get a new buffer at each.
            let more = if self.is_exact() { Some(self.bytes) } else { self.bytes.checked_next_power_of_two() };
            let bytes = more.ok_or(NoMemory { bytes: self.bytes })?;
            self.memory = TensorMemory::new(self.device.as_ref(), bytes)?;
        }
        Ok(())
    }

    /// Whether the buffer has no more bytes than the current shape needs. (A simulated device checks its memory
    /// itself.)
    const fn is_exact(&self) -> bool {
        cfg!(feature = "exact-buffers") && self.device.is_none()
    }

    /// The elements in the current shape, for the host to read and write.
    pub(super) fn host(&self) -> &[u8] {
        match (&self.memory, &self.staging) {
            (TensorMemory::Host(buffer), _) => &buffer.bytes()[..self.bytes],
            (_, Some(staging)) => &staging.bytes()[..self.bytes],
            (_, None) => &[],
        }
    }

    /// As [`BatchTensor::host`], to write; what is on a device must be uploaded then.
    pub(super) fn host_mut(&mut self) -> Result<&mut [u8], MemoryError> {
        self.reserve_staging(self.bytes)?;
        Ok(match (&mut self.memory, &mut self.staging) {
            (TensorMemory::Host(buffer), _) => &mut buffer.bytes_mut()[..self.bytes],
            (_, Some(staging)) => &mut staging.bytes_mut()[..self.bytes],
            (_, None) => &mut [],
        })
    }

    /// Makes room on the host for the elements of a tensor on a device.
    pub(super) fn reserve_staging(&mut self, bytes: usize) -> Result<(), MemoryError> {
        let has_room = self.staging.as_ref().is_some_and(|staging| staging.byte_len() >= bytes);
        if let Some(device) = self.device.as_ref().filter(|_| !has_room) {
            self.staging = Some(device.allocate_pinned(bytes.next_power_of_two())?);
        }
        Ok(())
    }

    /// Gives the buffer back if it has more than `most` bytes. The elements are lost.
    pub fn give_back(&mut self, most: usize) {
        if self.memory.byte_len() <= most {
            return;
        }
        if let Ok(empty) = Buffer::new(0) {
            self.by_rows.clear();
            self.memory = TensorMemory::Host(empty);
            self.staging = None;
        }
    }

    /// Enqueues a copy of what the host has to the device.
    ///
    /// # Safety
    /// Until the queue has been waited for, these tensors live and are not used by the host.
    pub(super) unsafe fn upload(&self, queue: &mut Queue) -> Result<(), MemoryError> {
        match (&self.memory, &self.staging) {
            // SAFETY: both are of these tensors.
            (TensorMemory::Device(buffer), Some(staging)) => Ok(unsafe { queue.upload(staging, buffer, self.bytes) }?),
            _ => Ok(()),
        }
    }

    /// The address of the buffer on the device, to copy a part of the batch. Panics if the buffer ends before the part.
    pub(super) fn address_for(&self, part: &Part) -> u64 {
        check_part(part, self.memory.byte_len());
        self.memory.address() as u64
    }

    fn memory(&self) -> MemoryKind {
        match (&self.memory, &self.device) {
            (TensorMemory::Device(_), Some(device)) => MemoryKind::of(device),
            _ => MemoryKind::Host,
        }
    }

    fn set_dims(&mut self, dims: &[i64], rows: usize) -> Result<(), MemoryError> {
        let is_batch = |axis: usize| Some(axis) == self.batch_axis;
        let known = self.dims.len() == dims.len()
            && self.dims.iter().zip(dims).enumerate().all(|(axis, (old, new))| old == new || is_batch(axis));
        if !known {
            self.dims = dims.to_vec();
            self.by_rows.clear();
        }
        self.set_rows(rows)
    }

    /// Makes ready for so many rows of the same dimensions.
    pub fn set_rows(&mut self, rows: usize) -> Result<(), MemoryError> {
        if let Some(axis) = self.batch_axis {
            self.dims[axis] = rows as i64;
        }
        let bytes = element_count(&self.dims).and_then(|count| count.checked_mul(self.data_type.byte_size()?));
        self.bytes = bytes.ok_or(NoMemory { bytes: usize::MAX })?;
        Ok(())
    }

    /// The tensor over the buffer in the current shape.
    pub(super) fn value(&mut self) -> Result<*mut ort::sys::OrtValue, String> {
        let (memory, rows) = (self.memory(), self.batch_axis.map_or(0, |axis| self.dims[axis] as usize));
        if self.by_rows.len() <= rows {
            self.by_rows.resize_with(rows + 1, || None);
        }
        // Making a tensor takes about 75 ns, and a small model runs in little more than 1 µs.
        let slot = &mut self.by_rows[rows];
        if let Some(value) = slot {
            return Ok(value.as_ptr());
        }
        if self.bytes > self.memory.byte_len() {
            return Err(format!("{} bytes do not make {:?}", self.memory.byte_len(), self.dims));
        }
        // SAFETY: the buffer is large enough for these dimensions; the values are dropped before the buffer is
        // replaced, and with it.
        let value = unsafe { Value::over(memory, self.memory.address(), self.bytes, &self.dims, self.data_type) }?;
        Ok(slot.insert(value).as_ptr())
    }

    /// Writes a part of the batch, such as a row.
    pub fn put(&mut self, copier: &Copier, part: &Part, content: RowContent) -> Result<(), MemoryError> {
        let Some(mut queue) = copier.queue() else {
            let batch = self.host_mut()?;
            match content {
                RowContent::Zeros => copies::fill(part, batch, 0),
                RowContent::Stored(storage, row) => copies::put(part, storage, row.host(), batch),
            }
            return Ok(());
        };
        let batch = self.keep(&mut queue, part);
        match content {
            // SAFETY: the part is within the buffer, which the queue keeps.
            RowContent::Zeros => unsafe { queue.zero(part, batch) },
            // SAFETY: as above.
            RowContent::Stored(storage, Bytes::Host(row)) => unsafe { queue.put_from_host(part, storage, row, batch)? },
            RowContent::Stored(storage, Bytes::Device(row)) => {
                let alone = keep_alone(&mut queue, part, row, storage);
                // SAFETY: as above, and memory of a slot or a state that has the size of the part, which the queue
                // keeps, too.
                unsafe { queue.put(part, storage, alone, batch) };
            }
        }
        Ok(())
    }

    /// Fills a part of the batch with this byte.
    pub fn fill(&mut self, copier: &Copier, part: &Part, byte: u8) -> Result<(), MemoryError> {
        if byte == 0 {
            return self.put(copier, part, RowContent::Zeros);
        }
        if copier.device().is_none() {
            copies::fill(part, self.host_mut()?, byte);
            return Ok(());
        }
        self.put(copier, part, RowContent::Stored(StorageType::Exact, Bytes::Host(&vec![byte; part.bytes()])))
    }

    pub fn repeat(&mut self, copier: &Copier, from: &Part, to: &Part) {
        match copier.queue() {
            Some(mut queue) => {
                let (source, target) = (self.keep(&mut queue, from), self.keep(&mut queue, to));
                // SAFETY: both are within the buffer, which the queue keeps.
                unsafe { queue.transfer(from, source, to, target) };
            }
            None => copies::shift(from, to, self.buffer_mut()),
        }
    }

    /// Copies a row of another tensor of the same rows.
    pub fn copy_from(&mut self, copier: &Copier, source: &Self, from: &Part, to: &Part) {
        match copier.queue() {
            Some(mut queue) => {
                let (source, target) = (source.keep(&mut queue, from), self.keep(&mut queue, to));
                // SAFETY: each is within its buffer, and the queue keeps both.
                unsafe { queue.transfer(from, source, to, target) };
            }
            None => copies::transfer(from, source.buffer(), to, self.buffer_mut()),
        }
    }

    /// Takes a part of the batch out, to be stored.
    pub fn take(&self, copier: &Copier, part: &Part, to: BytesMut, storage: StorageType) {
        match (to, copier.queue()) {
            (BytesMut::Device(to), Some(mut queue)) => {
                let batch = self.keep(&mut queue, part);
                let alone = keep_alone(&mut queue, part, to, storage);
                // SAFETY: the part is within the buffer, and has the size of the memory of a slot; the queue keeps
                // both.
                unsafe { queue.take(part, storage, batch, alone) };
            }
            (to, _) => copies::take(part, storage, self.buffer(), to.host()),
        }
    }

    /// Gives a row the values that it would have after it was stored. Returns whether no finite value has become
    /// infinite; on a device that isn't known.
    pub fn round(&mut self, copier: &Copier, part: &Part, storage: StorageType) -> bool {
        if storage == StorageType::Exact {
            return true;
        }
        let Some(mut queue) = copier.queue() else { return copies::round_to_fp16(part, self.buffer_mut()) };
        let batch = self.keep(&mut queue, part);
        // SAFETY: the part is within the buffer, which the queue keeps.
        unsafe { queue.round_to_fp16(part, batch) };
        true
    }

    /// As [`BatchTensor::address_for`], for what is about to be enqueued; the queue keeps the buffer.
    fn keep(&self, queue: &mut Queue, part: &Part) -> u64 {
        if let TensorMemory::Device(buffer) = &self.memory {
            queue.keep(buffer.memory().clone());
        }
        self.address_for(part)
    }

    /// All bytes of a buffer on the host.
    fn buffer(&self) -> &[u8] {
        match &self.memory {
            TensorMemory::Host(buffer) => buffer.bytes(),
            TensorMemory::Device(_) => &[],
        }
    }

    fn buffer_mut(&mut self) -> &mut [u8] {
        match &mut self.memory {
            TensorMemory::Host(buffer) => buffer.bytes_mut(),
            TensorMemory::Device(_) => &mut [],
        }
    }
}

/// A tensor that ONNX Runtime made for an output of open shape. A later run can read it as it is.
pub struct MadeTensor {
    pub(super) value: Arc<Value>,
    /// Dimensions, including the number of rows.
    pub dims: Vec<i64>,
    /// Bytes of its elements; 0 for strings.
    pub(super) bytes: usize,
    pub(super) is_on_device: bool,
    /// Last: the tensor goes back to its allocator.
    pub(super) _session: Arc<Session>,
}

impl MadeTensor {
    /// Copies a part, such as a row, to where it is stored. Can copy from a device to the host, and then waits. A copy
    /// on a device is done after [`Copier::synchronise`]; the queue keeps the tensor until then.
    pub fn take(&self, copier: &Copier, part: &Part, to: BytesMut, storage: StorageType) -> Result<(), SessionError> {
        match (to, copier.queue()) {
            (BytesMut::Device(span), Some(mut queue)) => {
                let batch = self.address_for(part)?;
                let alone = keep_alone(&mut queue, part, span, storage);
                queue.keep(self.value.clone());
                // SAFETY: the part is within this tensor, and has the size of the memory of a state; the queue keeps
                // both.
                unsafe { queue.take(part, storage, batch, alone) };
            }
            (to, Some(mut queue)) if self.is_on_device && self.bytes > 0 => {
                let batch = self.download(&mut queue)?;
                copies::take(part, storage, &batch.bytes()[..self.bytes], to.host());
            }
            (to, _) => copies::take(part, storage, self.host()?, to.host()),
        }
        Ok(())
    }

    /// The elements of a tensor on a device, after a wait.
    fn download(&self, queue: &mut Queue) -> Result<Pinned, SessionError> {
        let mut batch = queue.device().allocate_pinned(self.bytes).map_err(MemoryError::from)?;
        // SAFETY: the tensor has that many bytes; both live until the wait below. Where that fails the device has
        // failed, and copies nothing more.
        unsafe { queue.download(self.address()?, &mut batch, self.bytes) }?;
        queue.synchronise()?;
        Ok(batch)
    }

    /// The elements, which are on the host.
    pub(super) fn host(&self) -> Result<&[u8], SessionError> {
        assert!(!self.is_on_device || self.bytes == 0, "a tensor on a device is read on the host");
        // SAFETY: the size is that of the dimensions, and the tensor is on the host.
        unsafe { self.value.bytes(self.bytes) }.map_err(SessionError::Run)
    }

    /// The address of the elements, to copy a part of them on the device. Panics if they end before the part.
    pub(super) fn address_for(&self, part: &Part) -> Result<u64, SessionError> {
        check_part(part, self.bytes);
        self.address()
    }

    pub(super) fn address(&self) -> Result<u64, SessionError> {
        self.value.address().map_err(SessionError::Run)
    }
}

/// Panics if a batch of so many bytes of a device ends before the part.
pub(super) fn check_part(part: &Part, bytes: usize) {
    assert!(part.end() <= bytes, "a part that ends at byte {} of a batch of {bytes}", part.end());
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use gpu_rows::OwnedStream;
    use rows::tensor::{Gap, RowAt, RowLayout, WindowLayout};

    /// Numbers that fp16 can represent, as they are stored.
    fn stored(storage: StorageType, bytes: usize, seed: usize) -> Vec<u8> {
        let values = (0..).map(|index| (seed * 100 + index) as f32);
        match storage {
            StorageType::Exact => values.take(bytes / 4).flat_map(f32::to_ne_bytes).collect(),
            StorageType::Fp16 => {
                values.take(bytes / 2).flat_map(|value| half::f16::from_f32(value).to_ne_bytes()).collect()
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 8 } else { 200 }, failure_persistence: None, ..Default::default() })]
        #[test]
        fn rows_are_put_around_their_gaps_and_taken_without_them(
            mut dims in prop::collection::vec(1i64..5, 2..5), axes in (0usize..12, 0usize..12), rows in 1usize..5,
            gaps in prop::collection::vec((0usize..9, 0usize..9), 4), on_device: bool, from_host: bool, is_narrow: bool, padding in prop::sample::select(vec![0u8, 63]),
        ) {
            let (batch_axis, axis) = (axes.0 % dims.len(), axes.1 % dims.len());
            prop_assume!(batch_axis != axis);
            dims[batch_axis] = rows as i64;
            let storage = if is_narrow { StorageType::Fp16 } else { StorageType::Exact };
            gpu_rows::simulate();
            let device = on_device.then(|| Device::open(0).unwrap());
            let copier = device.as_ref().map_or(Copier::default(), |device| {
                Copier::on_device(Queue::new(OwnedStream::open(device).unwrap(), Arc::default()).unwrap())
            });
            let mut tensor = BatchTensor::new(DataType::Fp32, Some(batch_axis), device.as_ref()).unwrap();
            tensor.shape(&dims, rows).unwrap();
            // What an earlier batch has left.
            let whole = RowLayout::new(DataType::Fp32, &dims, Some(batch_axis)).unwrap();
            let old = vec![255; whole.row_bytes()];
            for position in 0..rows {
                let content = RowContent::Stored(StorageType::Exact, Bytes::Host(&old));
                tensor.put(&copier, &whole.row(RowAt { position, rows }), content).unwrap();
            }
            copier.synchronise().unwrap();
            let steps = dims[axis] as usize;
            let layout = WindowLayout::new(DataType::Fp32, &dims, Some(batch_axis), axis).unwrap();
            let gap_and_row = |position: usize| {
                let (from, length) = (gaps[position].0 % (steps + 1), gaps[position].1);
                let gap = Gap { from, length: length % (steps - from + 1) };
                let at = RowAt { position, rows };
                (layout.window(at, gap.steps()), layout.around(at, gap).unwrap())
            };
            for position in 0..rows {
                let (gap, row) = gap_and_row(position);
                let values = stored(storage, storage.bytes(row.bytes()), position);
                let buffer = device.as_ref().map(|device| device.allocate(values.len().max(1)).unwrap());
                let bytes = match &buffer {
                    Some(buffer) if !from_host => {
                        let span = buffer.span(0, values.len());
                        copier.write(&values, BytesMut::Device(span)).unwrap();
                        copier.end_phase();
                        Bytes::Device(span)
                    }
                    _ => Bytes::Host(&values),
                };
                let content = if position == 2 { RowContent::Zeros } else { RowContent::Stored(storage, bytes) };
                tensor.fill(&copier, &gap, padding).unwrap();
                tensor.put(&copier, &row, content).unwrap();
                copier.synchronise().unwrap();
            }
            let batch = match &tensor.memory {
                TensorMemory::Host(buffer) => buffer.bytes()[..tensor.bytes].to_vec(),
                TensorMemory::Device(buffer) => copier.read(Bytes::Device(buffer.span(0, tensor.bytes))).unwrap(),
            };
            for position in 0..rows {
                let (gap, row) = gap_and_row(position);
                let bytes = storage.bytes(row.bytes());
                let expected = if position == 2 { vec![0; bytes] } else { stored(storage, bytes, position) };
                let mut taken = vec![1; bytes];
                copies::take(&row, storage, &batch, &mut taken);
                prop_assert_eq!(&taken, &expected, "row {} on a device: {}", position, on_device);
                let in_gap = copies::pieces(&gap, &batch);
                prop_assert!(in_gap.flatten().all(|&byte| byte == padding), "the padding is filled");
                let Some(device) = &device else { continue };
                let target = device.allocate(bytes.max(1)).unwrap();
                tensor.take(&copier, &row, BytesMut::Device(target.span(0, bytes)), storage);
                prop_assert_eq!(copier.read(Bytes::Device(target.span(0, bytes))).unwrap(), expected);
            }
        }
    }
}
