//! Bytes that lie on the host or on a device.

use std::sync::Arc;

use super::device::{Device, DeviceBuffer, DeviceMemory};
use super::{Buffer, MemoryError};

/// A part of a device's memory, borrowed like a slice. Its bytes are reached by what is enqueued only.
#[derive(Clone, Copy)]
pub struct Span<'a> {
    address: u64,
    bytes: usize,
    memory: Option<&'a Arc<DeviceMemory>>,
}

impl<'a> Span<'a> {
    /// No bytes.
    pub const fn none() -> Self {
        Self { address: 0, bytes: 0, memory: None }
    }

    /// What a queue keeps that works with it.
    pub const fn memory(self) -> Option<&'a Arc<DeviceMemory>> {
        self.memory
    }

    /// Where it begins.
    pub const fn address(self) -> u64 {
        self.address
    }

    /// How many bytes.
    pub const fn byte_len(self) -> usize {
        self.bytes
    }
}

impl DeviceBuffer {
    /// A part of the buffer. Panics if there is no such part.
    pub fn span(&self, offset: usize, bytes: usize) -> Span<'_> {
        assert!(offset + bytes <= self.byte_len(), "more than there is");
        Span { address: self.address() + offset as u64, bytes, memory: Some(self.memory()) }
    }
}

/// Bytes to read.
#[derive(Clone, Copy)]
pub enum Bytes<'a> {
    /// Of the host.
    Host(&'a [u8]),
    /// Of a device.
    Device(Span<'a>),
}

/// Bytes to write.
pub enum BytesMut<'a> {
    /// Of the host.
    Host(&'a mut [u8]),
    /// Of a device.
    Device(Span<'a>),
}

impl<'a> Bytes<'a> {
    /// How many.
    pub const fn byte_len(self) -> usize {
        match self {
            Self::Host(bytes) => bytes.len(),
            Self::Device(span) => span.byte_len(),
        }
    }

    /// Where they begin, on their side.
    pub fn address(self) -> *const u8 {
        match self {
            Self::Host(bytes) => bytes.as_ptr(),
            Self::Device(span) => std::ptr::with_exposed_provenance(span.address() as usize),
        }
    }

    /// Those of the host. Panics if they are not there.
    pub fn host(self) -> &'a [u8] {
        match self {
            Self::Host(bytes) => bytes,
            Self::Device(_) => panic!("bytes of a device are not the host's to read"),
        }
    }
}

impl<'a> BytesMut<'a> {
    /// Those of the host. Panics if they are not there.
    pub fn host(self) -> &'a mut [u8] {
        match self {
            Self::Host(bytes) => bytes,
            Self::Device(_) => panic!("bytes of a device are not the host's to write"),
        }
    }
}

/// The memory of a tensor, on the side where the model runs.
pub enum Store {
    /// On the host.
    Host(Buffer),
    /// On a device.
    Device(DeviceBuffer),
}

impl Store {
    /// Memory on the device, if there is one, else on the host, where it is zeroed.
    pub fn new(device: Option<&Arc<Device>>, bytes: usize) -> Result<Self, MemoryError> {
        Ok(match device {
            None => Self::Host(Buffer::new(bytes)?),
            Some(device) => Self::Device(device.allocate(bytes)?),
        })
    }

    /// How many bytes.
    pub const fn byte_len(&self) -> usize {
        match self {
            Self::Host(buffer) => buffer.len(),
            Self::Device(buffer) => buffer.byte_len(),
        }
    }

    /// Where they begin, on their side.
    pub fn address(&self) -> *mut u8 {
        match self {
            Self::Host(buffer) => buffer.as_ptr(),
            Self::Device(buffer) => std::ptr::with_exposed_provenance_mut(buffer.address() as usize),
        }
    }
}
