//! Bytes in memory of the host or of a device, and why there may be none.

use std::sync::Arc;

use gpu_rows::{Device, DeviceBuffer, Span};
use rows::{Buffer, NoMemory};

/// Why memory could not be allocated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemoryError {
    /// The host has too little memory.
    #[error(transparent)]
    Host(#[from] NoMemory),
    /// The device has too little memory, or it failed.
    #[error(transparent)]
    Device(#[from] gpu_rows::DeviceError),
}

/// Bytes to read.
#[derive(Clone, Copy)]
pub enum Bytes<'a> {
    /// In host memory.
    Host(&'a [u8]),
    /// In a device's memory.
    Device(Span<'a>),
}

/// Bytes to write.
pub enum BytesMut<'a> {
    /// In host memory.
    Host(&'a mut [u8]),
    /// In a device's memory.
    Device(Span<'a>),
}

impl<'a> Bytes<'a> {
    /// Number of bytes.
    pub const fn byte_len(self) -> usize {
        match self {
            Self::Host(bytes) => bytes.len(),
            Self::Device(span) => span.byte_len(),
        }
    }

    /// Address of the first byte; of a device's bytes, the address on the device.
    pub fn address(self) -> *const u8 {
        match self {
            Self::Host(bytes) => bytes.as_ptr(),
            Self::Device(span) => std::ptr::with_exposed_provenance(span.address() as usize),
        }
    }

    /// The bytes as a slice. Panics if they are on a device.
    pub fn host(self) -> &'a [u8] {
        match self {
            Self::Host(bytes) => bytes,
            Self::Device(_) => panic!("bytes on a device cannot be read as a slice"),
        }
    }
}

impl<'a> BytesMut<'a> {
    /// Number of bytes.
    pub const fn byte_len(&self) -> usize {
        match self {
            Self::Host(bytes) => bytes.len(),
            Self::Device(span) => span.byte_len(),
        }
    }

    /// The bytes as a slice. Panics if they are on a device.
    pub fn host(self) -> &'a mut [u8] {
        match self {
            Self::Host(bytes) => bytes,
            Self::Device(_) => panic!("bytes on a device cannot be written as a slice"),
        }
    }
}

/// The memory of a tensor: on the device where the model runs, or on the host.
pub enum TensorMemory {
    /// In host memory.
    Host(Buffer),
    /// In a device's memory.
    Device(DeviceBuffer),
}

impl TensorMemory {
    /// Allocates on the device, or on the host if `device` is `None`. Only host memory is zeroed.
    pub fn new(device: Option<&Arc<Device>>, bytes: usize) -> Result<Self, MemoryError> {
        Ok(match device {
            None => Self::Host(Buffer::new(bytes)?),
            Some(device) => Self::Device(device.allocate(bytes)?),
        })
    }

    /// Number of bytes.
    pub const fn byte_len(&self) -> usize {
        match self {
            Self::Host(buffer) => buffer.len(),
            Self::Device(buffer) => buffer.byte_len(),
        }
    }

    /// Address of the first byte; of memory on a device, the address on the device.
    pub fn address(&self) -> *mut u8 {
        match self {
            Self::Host(buffer) => buffer.as_ptr(),
            Self::Device(buffer) => std::ptr::with_exposed_provenance_mut(buffer.address() as usize),
        }
    }
}
