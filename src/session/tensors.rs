//! A tensor of a step, in our own buffer where the model runs; and copies of rows into it and out of it.

use std::cell::RefCell;
use std::sync::Arc;

use super::spec::RowContent;
use super::value::{MemoryKind, Value};
use crate::memory::device::{Change, Device, Pinned, Queue, RowIn};
use crate::memory::{Buffer, Bytes, MemoryError, Span, Store, rows};
use crate::tensor::{DataType, RowLayout, element_count};

/// Tensors over one buffer, one for each number of rows that was asked for.
pub(super) struct Tensors {
    pub data_type: DataType,
    pub batch_axis: Option<usize>,
    /// Where the buffer is, if not on the host.
    pub device: Option<Arc<Device>>,
    /// Dimensions, with the number of rows of the last use.
    pub dims: Vec<i64>,
    pub bytes: usize,
    /// Over the buffer, so they must be dropped before it.
    pub by_rows: Vec<Option<Value>>,
    pub store: Store,
    /// The host's side of a buffer on a device.
    pub staging: Option<Pinned>,
}

impl Tensors {
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
            store: Store::Host(Buffer::new(0)?),
            staging: None,
        })
    }

    /// With a buffer for up to `rows` rows of `dims` that is never replaced.
    pub fn for_rows(&self, dims: &[i64], rows: usize) -> Result<Self, MemoryError> {
        let mut tensors = Self::new(self.data_type, self.batch_axis, self.device.as_ref())?;
        tensors.set_dims(dims, rows)?;
        tensors.store = Store::new(tensors.device.as_ref(), tensors.bytes)?;
        Ok(tensors)
    }

    /// Makes room for `rows` rows of `dims` (whose batch axis is ignored). If the shape is another than the last one,
    /// the elements are undefined.
    pub fn shape(&mut self, dims: &[i64], rows: usize) -> Result<(), MemoryError> {
        self.set_dims(dims, rows)?;
        self.reserve()
    }

    /// Makes room for the elements in the current shape.
    pub fn reserve(&mut self) -> Result<(), MemoryError> {
        if self.bytes > self.store.byte_len() || (self.device.is_some() && matches!(self.store, Store::Host(_))) {
            self.by_rows.clear();
            let bytes = self.bytes.checked_next_power_of_two().ok_or(MemoryError::Host { bytes: self.bytes })?;
            self.store = Store::new(self.device.as_ref(), bytes)?;
        }
        Ok(())
    }

    /// The elements in the current shape, for the host to read and write.
    pub fn host(&self) -> &[u8] {
        match (&self.store, &self.staging) {
            (Store::Host(buffer), _) => &buffer.bytes()[..self.bytes],
            (_, Some(staging)) => &staging.bytes()[..self.bytes],
            (_, None) => &[],
        }
    }

    /// As [`Tensors::host`], to write. A tensor on a device must be uploaded afterwards.
    pub fn host_mut(&mut self) -> Result<&mut [u8], MemoryError> {
        self.reserve_staging(self.bytes)?;
        Ok(match (&mut self.store, &mut self.staging) {
            (Store::Host(buffer), _) => &mut buffer.bytes_mut()[..self.bytes],
            (_, Some(staging)) => &mut staging.bytes_mut()[..self.bytes],
            (_, None) => &mut [],
        })
    }

    /// Makes room on the host for the elements of a tensor on a device.
    pub fn reserve_staging(&mut self, bytes: usize) -> Result<(), MemoryError> {
        let has_room = self.staging.as_ref().is_some_and(|staging| staging.byte_len() >= bytes);
        if let Some(device) = self.device.as_ref().filter(|_| !has_room) {
            self.staging = Some(device.allocate_pinned(bytes.next_power_of_two())?);
        }
        Ok(())
    }

    /// Gives the buffer back if it has more than `most` bytes. The elements are lost.
    pub fn give_back(&mut self, most: usize) {
        if self.store.byte_len() <= most {
            return;
        }
        if let Ok(empty) = Buffer::new(0) {
            self.by_rows.clear();
            self.store = Store::Host(empty);
            self.staging = None;
        }
    }

    /// Enqueues a copy of what the host has to the device.
    ///
    /// # Safety
    /// Until the queue has been waited for, these tensors live and are not used by the host.
    pub unsafe fn upload(&self, queue: &mut Queue) -> Result<(), MemoryError> {
        match (&self.store, &self.staging) {
            // SAFETY: both are of these tensors.
            (Store::Device(buffer), Some(staging)) => Ok(unsafe { queue.upload(staging, buffer, self.bytes) }?),
            _ => Ok(()),
        }
    }

    /// Lets a queue keep the buffer until the work that uses it is done.
    fn keep_in(&self, queue: &mut Queue) {
        if let Store::Device(buffer) = &self.store {
            queue.keep(buffer.memory().clone());
        }
    }

    /// Row number `index` of `rows` of the buffer on the device. Panics if the buffer has no such row.
    pub fn row(&self, layout: RowLayout, index: usize, rows: usize) -> RowIn {
        row_of(layout, self.store.address() as u64, self.store.byte_len(), index, rows)
    }

    pub fn memory(&self) -> MemoryKind {
        match (&self.store, &self.device) {
            (Store::Device(_), Some(device)) => MemoryKind::of(device),
            _ => MemoryKind::Host,
        }
    }

    pub fn set_dims(&mut self, dims: &[i64], rows: usize) -> Result<(), MemoryError> {
        let is_batch = |axis: usize| Some(axis) == self.batch_axis;
        let known = self.dims.len() == dims.len()
            && self.dims.iter().zip(dims).enumerate().all(|(axis, (old, new))| old == new || is_batch(axis));
        if !known {
            self.dims = dims.to_vec();
            self.by_rows.clear();
        }
        self.set_rows(rows)
    }

    pub fn set_rows(&mut self, rows: usize) -> Result<(), MemoryError> {
        if let Some(axis) = self.batch_axis {
            self.dims[axis] = rows as i64;
        }
        let bytes = element_count(&self.dims).and_then(|count| count.checked_mul(self.data_type.byte_size()?));
        self.bytes = bytes.ok_or(MemoryError::Host { bytes: usize::MAX })?;
        Ok(())
    }

    /// The tensor over the buffer in the current shape.
    pub fn value(&mut self) -> Result<*mut ort::sys::OrtValue, String> {
        let (memory, rows) = (self.memory(), self.batch_axis.map_or(0, |axis| self.dims[axis] as usize));
        if self.by_rows.len() <= rows {
            self.by_rows.resize_with(rows + 1, || None);
        }
        let slot = &mut self.by_rows[rows];
        if let Some(value) = slot {
            return Ok(value.as_ptr());
        }
        if self.bytes > self.store.byte_len() {
            return Err(format!("{} bytes do not make {:?}", self.store.byte_len(), self.dims));
        }
        // SAFETY: the buffer is large enough for these dimensions; the values are dropped before the buffer is
        // replaced, and with it.
        let value = unsafe { Value::over(memory, self.store.address(), self.bytes, &self.dims, self.data_type) }?;
        Ok(slot.insert(value).as_ptr())
    }
}

/// Puts a row of a state into place.
pub(super) fn put(
    queue: &mut Option<RefCell<Queue>>,
    tensors: &mut Tensors,
    layout: RowLayout,
    (index, rows): (usize, usize),
    content: RowContent,
) -> Result<(), MemoryError> {
    let bytes = layout.row_bytes();
    let Some(queue) = queue else {
        let batch = tensors.host_mut()?;
        match content {
            RowContent::Zeros => rows::zero(layout, batch, index, rows),
            RowContent::Exact(row) => rows::put(layout, row.host(), batch, index, rows),
            RowContent::Fp16(row) => rows::put_widened(layout, row.host(), batch, index, rows),
        }
        return Ok(());
    };
    let (queue, to) = (queue.get_mut(), tensors.row(layout, index, rows));
    tensors.keep_in(queue);
    let (row, wanted, change) = match content {
        RowContent::Zeros => {
            // SAFETY: a row of a buffer that the queue keeps.
            unsafe { queue.zero_row(layout, to) };
            return Ok(());
        }
        RowContent::Exact(row) => (row, bytes, Change::None),
        RowContent::Fp16(row) => (row, bytes / 2, Change::Widen),
    };
    assert_eq!(row.byte_len(), wanted, "row of another size");
    match row {
        // SAFETY: as above.
        Bytes::Host(row) => unsafe { queue.upload_row(layout, row, to, change)? },
        Bytes::Device(row) => {
            keep_span(queue, row);
            // SAFETY: as above, and memory of a slot or a state that the queue keeps, too.
            unsafe { queue.move_row(layout, RowIn::alone(row.address()), to, change) };
        }
    }
    Ok(())
}

/// Row number `index` of a batch of `rows`, in `bytes` bytes of a device. Panics if they have no such row.
pub(super) fn row_of(layout: RowLayout, address: u64, bytes: usize, index: usize, rows: usize) -> RowIn {
    // A row that is one piece may lie behind the first `rows` rows, because a larger batch has left it there.
    let pieces_to_end = layout.outer.saturating_sub(1).saturating_mul(rows).saturating_add(index + 1);
    let end = pieces_to_end.saturating_mul(layout.inner_bytes);
    assert!(layout.row_bytes() == 0 || end <= bytes, "row {index} of {rows} is not in {bytes} bytes");
    RowIn { address, index, rows }
}

/// The memory of a device that a row of a batch is copied to, as fp16 if it is kept so. The queue keeps that memory.
/// Panics if it has another size.
pub(super) fn row_alone(queue: &mut Queue, layout: RowLayout, span: Span, as_fp16: bool) -> RowIn {
    let wanted = if as_fp16 { layout.row_bytes() / 2 } else { layout.row_bytes() };
    assert_eq!(span.byte_len(), wanted, "row of another size");
    keep_span(queue, span);
    RowIn::alone(span.address())
}

/// Lets a queue keep memory until the work that uses it is done.
fn keep_span(queue: &mut Queue, span: Span) {
    if let Some(memory) = span.memory() {
        queue.keep(memory.clone());
    }
}

/// Copies a row out of a batch on the host, as fp16 if it is kept so.
pub(super) fn take_on_host(
    layout: RowLayout,
    batch: &[u8],
    (index, rows): (usize, usize),
    row: &mut [u8],
    as_fp16: bool,
) {
    if as_fp16 {
        rows::take_narrowed(layout, batch, index, rows, row);
    } else {
        rows::take(layout, batch, index, rows, row);
    }
}

/// How a row changes that may be kept as fp16.
pub(super) const fn narrowing(as_fp16: bool) -> Change {
    if as_fp16 { Change::Narrow } else { Change::None }
}

/// All bytes of a batch buffer on the host.
pub(super) fn host_bytes(tensors: &mut Tensors) -> &mut [u8] {
    match &mut tensors.store {
        Store::Host(buffer) => buffer.bytes_mut(),
        Store::Device(_) => &mut [],
    }
}
