//! A tensor of a batch, in a buffer of ours where the model runs; and rows in and out of it.

use std::sync::Arc;

use gpu_rows::{Change, Device, Pieces, Pinned, Queue, RowIn, Span};
use rows::tensor::{Chunk, DataType, GappedRow, RowAt, RowLayout, StorageType, element_count};
use rows::{Buffer, NoMemory, copies};

use super::copier::Copier;
use super::spec::RowContent;
use super::value::{MemoryKind, Value};
use crate::memory::{Bytes, BytesMut, MemoryError, TensorMemory};

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
    pub(super) by_rows: Vec<Option<Value>>,
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
        self.reserve()
    }

    /// Makes room for the elements in the current shape.
    pub(super) fn reserve(&mut self) -> Result<(), MemoryError> {
        if self.bytes > self.memory.byte_len()
            || (self.is_exact() && self.bytes != self.memory.byte_len())
            || (self.device.is_some() && matches!(self.memory, TensorMemory::Host(_)))
        {
            self.by_rows.clear();
            let more = if self.is_exact() { Some(self.bytes) } else { self.bytes.checked_next_power_of_two() };
            let bytes = more.ok_or(NoMemory { bytes: self.bytes })?;
            self.memory = TensorMemory::new(self.device.as_ref(), bytes)?;
        }
        Ok(())
    }

    /// Whether the buffer has no more bytes than the current shape needs. (A simulated device checks its memory itself.)
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

    /// A row of the buffer on the device. Panics if it is not within.
    pub(super) fn row(&self, layout: RowLayout, at: RowAt) -> RowIn {
        row_of(layout, self.memory.address() as u64, self.memory.byte_len(), at)
    }

    pub(super) fn memory(&self) -> MemoryKind {
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
}

impl BatchTensor {
    /// Writes a row.
    pub fn put_row(
        &mut self,
        copier: &Copier,
        layout: RowLayout,
        at: RowAt,
        content: RowContent,
    ) -> Result<(), MemoryError> {
        let Some(mut queue) = copier.queue() else {
            let batch = self.host_mut()?;
            match content {
                RowContent::Zeros => copies::zero(layout, batch, at),
                RowContent::Stored(StorageType::Exact, row) => copies::put(layout, row.host(), batch, at),
                RowContent::Stored(StorageType::Fp16, row) => copies::put_widened(layout, row.host(), batch, at),
            }
            return Ok(());
        };
        let to = self.row_for(&mut queue, layout, at);
        let RowContent::Stored(storage, row) = content else {
            // SAFETY: a row of a buffer that the queue keeps.
            unsafe { queue.zero_row(layout, to) };
            return Ok(());
        };
        assert_eq!(row.byte_len(), storage.row_bytes(layout), "row of another size");
        let change = change_from(storage);
        match row {
            // SAFETY: as above.
            Bytes::Host(row) => unsafe { queue.upload_row(layout, row, to, change)? },
            Bytes::Device(row) => {
                keep_span(&mut queue, row);
                // SAFETY: as above, and memory of a slot or a state that the queue keeps, too.
                unsafe { queue.move_row(layout, RowIn::alone(row.address()), to, change) };
            }
        }
        Ok(())
    }

    /// Writes a row around its gap, and fills the gap with this byte.
    pub fn put_gapped_row(
        &mut self,
        copier: &Copier,
        at: &GappedRow,
        content: RowContent,
        padding: u8,
    ) -> Result<(), MemoryError> {
        if let RowContent::Stored(storage, row) = content {
            assert_eq!(row.byte_len(), storage.bytes(at.row_bytes()), "row of another size");
        }
        let Some(mut queue) = copier.queue() else {
            let batch = self.host_mut()?;
            copies::fill_window(at.gap_chunks(), batch, padding);
            match content {
                RowContent::Zeros => copies::zero_window(at.chunks(), batch),
                RowContent::Stored(StorageType::Exact, row) => {
                    copies::put_window(at.chunks(), row.host().into(), batch)
                }
                RowContent::Stored(StorageType::Fp16, row) => {
                    copies::put_window_widened(at.chunks(), row.host(), batch)
                }
            }
            return Ok(());
        };
        if let TensorMemory::Device(buffer) = &self.memory {
            queue.keep(buffer.memory().clone());
        }
        let (batch, bytes) = (self.memory.address() as u64, self.memory.byte_len());
        let to = |from: u64, storage: StorageType, chunks: &mut dyn Iterator<Item = Chunk>| {
            Pieces::join(chunks.map(|chunk| {
                let to = batch + checked(chunk, bytes) as u64;
                (from + storage.bytes(chunk.alone) as u64, to, chunk.bytes as u64)
            }))
        };
        let gap = to(0, StorageType::Exact, &mut at.gap_chunks());
        // SAFETY: parts of a buffer that the queue keeps.
        unsafe {
            match padding {
                0 => queue.zero_pieces(&gap),
                byte => queue.upload_pieces(&gap, &vec![byte; at.gap_bytes()], Change::None)?,
            }
        }
        match content {
            RowContent::Zeros => {
                let pieces = to(0, StorageType::Exact, &mut at.chunks());
                // SAFETY: as above.
                unsafe { queue.zero_pieces(&pieces) };
            }
            RowContent::Stored(storage, Bytes::Host(row)) => {
                let pieces = to(0, storage, &mut at.chunks());
                // SAFETY: as above.
                unsafe { queue.upload_pieces(&pieces, row, change_from(storage))? };
            }
            RowContent::Stored(storage, Bytes::Device(row)) => {
                keep_span(&mut queue, row);
                let pieces = to(row.address(), storage, &mut at.chunks());
                // SAFETY: as above, and memory of a state that the queue keeps, too.
                unsafe { queue.move_pieces(&pieces, change_from(storage)) };
            }
        }
        Ok(())
    }

    /// Copies a row from one place to another.
    pub fn repeat_row(&mut self, copier: &Copier, layout: RowLayout, from: RowAt, to: RowAt) {
        match copier.queue() {
            Some(mut queue) => {
                let (from, to) = (self.row_for(&mut queue, layout, from), self.row_for(&mut queue, layout, to));
                // SAFETY: rows of a buffer that the queue keeps.
                unsafe { queue.move_row(layout, from, to, Change::None) };
            }
            None => copies::shift(layout, self.buffer_mut(), from, to),
        }
    }

    /// Copies a row of another tensor of the same rows.
    pub fn copy_row(&mut self, copier: &Copier, layout: RowLayout, source: &Self, from: RowAt, to: RowAt) {
        match copier.queue() {
            Some(mut queue) => {
                let (from, to) = (source.row_for(&mut queue, layout, from), self.row_for(&mut queue, layout, to));
                // SAFETY: rows of buffers that the queue keeps.
                unsafe { queue.move_row(layout, from, to, Change::None) };
            }
            None => copies::transfer(layout, source.buffer(), from, self.buffer_mut(), to),
        }
    }

    /// Takes a row out, to be stored.
    pub fn take_row(&self, copier: &Copier, layout: RowLayout, from: RowAt, to: BytesMut, storage: StorageType) {
        match (to, copier.queue()) {
            (BytesMut::Device(to), Some(mut queue)) => {
                let from = self.row_for(&mut queue, layout, from);
                let to = row_alone(&mut queue, layout, to, storage);
                // SAFETY: a row of a buffer, and memory of a slot, both of which the queue keeps.
                unsafe { queue.move_row(layout, from, to, change_to(storage)) };
            }
            (to, _) => take_on_host(layout, self.buffer(), from, to.host(), storage),
        }
    }

    /// Gives a row the values that it would have after it was stored. Returns whether no finite value has become infinite;
    /// on a device that isn't known.
    pub fn round_row(&mut self, copier: &Copier, layout: RowLayout, at: RowAt, storage: StorageType) -> bool {
        match storage {
            StorageType::Exact => return true,
            StorageType::Fp16 => {}
        }
        match copier.queue() {
            Some(mut queue) => {
                let row = self.row_for(&mut queue, layout, at);
                // SAFETY: a row of a buffer that the queue keeps.
                unsafe { queue.move_row(layout, row, row, Change::Round) };
                true
            }
            None => copies::round_to_fp16(layout, self.buffer_mut(), at),
        }
    }

    /// A row on the device, for what is about to be enqueued; the queue keeps the buffer.
    fn row_for(&self, queue: &mut Queue, layout: RowLayout, at: RowAt) -> RowIn {
        if let TensorMemory::Device(buffer) = &self.memory {
            queue.keep(buffer.memory().clone());
        }
        self.row(layout, at)
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

/// A row of a batch in so many bytes of a device. Panics if it is not within them.
pub(super) fn row_of(layout: RowLayout, address: u64, bytes: usize, at: RowAt) -> RowIn {
    let RowAt { position, rows } = at;
    // Where a row is one piece, it may be behind the first `rows` rows: a larger batch has left it there.
    let pieces_to_end = layout.outer.saturating_sub(1).saturating_mul(rows).saturating_add(position + 1);
    let end = pieces_to_end.saturating_mul(layout.inner_bytes);
    assert!(layout.row_bytes() == 0 || end <= bytes, "row {position} of {rows} is not in {bytes} bytes");
    RowIn { address, index: position, rows }
}

/// Memory of a device that a row of a batch is taken to, to be stored; the queue keeps it. Panics if it has another
/// size.
pub(super) fn row_alone(queue: &mut Queue, layout: RowLayout, span: Span, storage: StorageType) -> RowIn {
    assert_eq!(span.byte_len(), storage.row_bytes(layout), "row of another size");
    keep_span(queue, span);
    RowIn::alone(span.address())
}

/// Lets a queue keep memory as long as something is under way that uses it.
pub(super) fn keep_span(queue: &mut Queue, span: Span) {
    if let Some(memory) = span.memory() {
        queue.keep(memory.clone());
    }
}

/// Takes a row out of a batch on the host, to be stored.
pub(super) fn take_on_host(layout: RowLayout, batch: &[u8], at: RowAt, row: &mut [u8], storage: StorageType) {
    match storage {
        StorageType::Exact => copies::take(layout, batch, at, row),
        StorageType::Fp16 => copies::take_narrowed(layout, batch, at, row),
    }
}

/// As [`take_on_host`], without the gap of the row.
pub(super) fn take_gapped_on_host(at: &GappedRow, batch: &[u8], row: &mut [u8], storage: StorageType) {
    assert_eq!(row.len(), storage.bytes(at.row_bytes()), "row of another size");
    match storage {
        StorageType::Exact => copies::take_window(at.chunks(), batch, row),
        StorageType::Fp16 => copies::take_window_narrowed(at.chunks(), batch, row),
    }
}

/// The pieces of a row of `bytes` bytes at `batch`, to be stored without its gap.
pub(super) fn pieces_to_take(at: &GappedRow, batch: u64, bytes: usize, to: u64, storage: StorageType) -> Vec<Pieces> {
    Pieces::join(at.chunks().map(|chunk| {
        let from = batch + checked(chunk, bytes) as u64;
        (from, to + storage.bytes(chunk.alone) as u64, storage.bytes(chunk.bytes) as u64)
    }))
}

/// The first byte of a chunk in a batch of `bytes` bytes. Panics if it is not within them.
fn checked(chunk: Chunk, bytes: usize) -> usize {
    assert!(chunk.in_batch + chunk.bytes <= bytes, "a chunk beyond the end of its batch");
    chunk.in_batch
}

/// What a move does with the stored values of a row that is put into a batch.
const fn change_from(storage: StorageType) -> Change {
    match storage {
        StorageType::Exact => Change::None,
        StorageType::Fp16 => Change::Widen,
    }
}

/// What a move does with the values of a row that is taken out to be stored.
pub(super) const fn change_to(storage: StorageType) -> Change {
    match storage {
        StorageType::Exact => Change::None,
        StorageType::Fp16 => Change::Narrow,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use gpu_rows::OwnedStream;
    use rows::tensor::{Gap, WindowLayout};

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
            let copier = device.as_ref().map_or(Copier::on_host(), |device| {
                Copier::on_device(Queue::new(OwnedStream::open(device).unwrap(), Arc::default()).unwrap())
            });
            let mut tensor = BatchTensor::new(DataType::Fp32, Some(batch_axis), device.as_ref()).unwrap();
            tensor.shape(&dims, rows).unwrap();
            // What an earlier batch has left.
            let whole = RowLayout::new(DataType::Fp32, &dims, Some(batch_axis)).unwrap();
            let old = vec![255; whole.row_bytes()];
            for position in 0..rows {
                let content = RowContent::Stored(StorageType::Exact, Bytes::Host(&old));
                tensor.put_row(&copier, whole, RowAt { position, rows }, content).unwrap();
            }
            copier.synchronise().unwrap();
            let steps = dims[axis] as usize;
            let gapped = |position: usize| {
                let (from, length) = (gaps[position].0 % (steps + 1), gaps[position].1);
                let gap = Gap { from, length: length % (steps - from + 1) };
                let at = RowAt { position, rows };
                (gap, GappedRow::new(DataType::Fp32, &dims, Some(batch_axis), axis, gap, at).unwrap())
            };
            for position in 0..rows {
                let (_, row) = gapped(position);
                let values = stored(storage, storage.bytes(row.row_bytes()), position);
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
                tensor.put_gapped_row(&copier, &row, content, padding).unwrap();
                copier.synchronise().unwrap();
            }
            let batch = match &tensor.memory {
                TensorMemory::Host(buffer) => buffer.bytes()[..tensor.bytes].to_vec(),
                TensorMemory::Device(buffer) => copier.read(Bytes::Device(buffer.span(0, tensor.bytes))).unwrap(),
            };
            for position in 0..rows {
                let (gap, row) = gapped(position);
                let bytes = storage.bytes(row.row_bytes());
                let expected = if position == 2 { vec![0; bytes] } else { stored(storage, bytes, position) };
                let mut taken = vec![1; bytes];
                take_gapped_on_host(&row, &batch, &mut taken, storage);
                prop_assert_eq!(&taken, &expected, "row {} on a device: {}", position, on_device);
                let window = WindowLayout::new(DataType::Fp32, &dims, Some(batch_axis), axis).unwrap();
                let in_gap = copies::pieces_of_window(window.chunks(position, rows, gap.from, gap.length), &batch);
                prop_assert!(in_gap.flatten().all(|&byte| byte == padding), "the padding is filled");
                let Some(device) = &device else { continue };
                let target = device.allocate(bytes.max(1)).unwrap();
                let pieces = pieces_to_take(&row, tensor.memory.address() as u64, tensor.bytes, target.address(), storage);
                // SAFETY: rows of this tensor and a buffer, which live until the wait in `read`.
                unsafe { copier.queue().unwrap().move_pieces(&pieces, change_to(storage)) };
                prop_assert_eq!(copier.read(Bytes::Device(target.span(0, bytes))).unwrap(), expected);
            }
        }
    }
}
