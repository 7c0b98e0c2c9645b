//! Errors of memory.

use rows::NoMemory;

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
