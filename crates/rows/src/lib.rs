//! Tensors in the memory of the host.
//!
//! | module | what it is |
//! |---|---|
//! | [`tensor`] | data types, shapes, and where a row is in a batch |
//! | [`layout`] | where each state lies within a slot |
//! | [`copies`] | copies of rows between batches and slots, with conversions to half precision and back |
//! | [`client`] | memory that Triton lends, which its client may write to at any time |
//! | [`strings`] | tensors of strings |
//!
//! Not for: memory of a device, or deciding which bytes are copied where.

pub mod client;
pub mod copies;
mod host;
pub mod layout;
pub mod strings;
pub mod tensor;

pub use host::Buffer;

/// The host has too little memory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot allocate {bytes} bytes of host memory")]
pub struct NoMemory {
    pub bytes: usize,
}

/// An empty vector with room for `count` elements. Use it where a request decides the count: if the memory cannot be
/// allocated, that request fails and the server lives.
pub fn reserve<T>(count: usize) -> Result<Vec<T>, NoMemory> {
    let mut made = Vec::new();
    let bytes = count.saturating_mul(size_of::<T>());
    made.try_reserve_exact(count).map_err(|_| NoMemory { bytes })?;
    Ok(made)
}

/// A vector of `count` zeros. Use it as [`reserve`] where a request decides the count.
pub fn zeros<T: Clone + Default>(count: usize) -> Result<Vec<T>, NoMemory> {
    let mut made = reserve(count)?;
    made.resize(count, T::default());
    Ok(made)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_that_no_memory_can_hold_is_an_error() {
        assert_eq!(reserve::<usize>(usize::MAX), Err(NoMemory { bytes: usize::MAX }));
        assert_eq!(zeros::<u8>(usize::MAX), Err(NoMemory { bytes: usize::MAX }));
        assert_eq!(zeros::<usize>(2), Ok(vec![0, 0]));
    }
}
