//! String tensors: rows of elements of any length, and the form in which Triton carries them.
//!
//! Triton writes an element as its length (four bytes, little-endian) and its bytes, one after another. A string is
//! whatever bytes the client sent; nothing here asks for UTF-8.

#![forbid(unsafe_code)]

use super::{MemoryError, reserve};
use crate::tensor::{Chunk, RowLayout};

const LENGTH_BYTES: usize = 4;

/// Elements of a string tensor, row-major. They lie in one piece of memory: a client may send millions of short ones.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Strings {
    /// All elements, one after another.
    bytes: Vec<u8>,
    /// Where each element ends.
    ends: Vec<usize>,
}

impl Strings {
    /// The elements in `bytes`, which begin at `starts` and end where the next one begins.
    pub fn from_starts(bytes: Vec<u8>, mut starts: Vec<usize>) -> Self {
        if !starts.is_empty() {
            starts.remove(0);
            starts.push(bytes.len());
        }
        Self { bytes, ends: starts }
    }

    /// How many elements.
    pub const fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Element number `index`.
    pub fn get(&self, index: usize) -> &[u8] {
        let start = index.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.bytes[start..self.ends[index]]
    }

    /// The elements.
    pub fn iter(&self) -> impl Iterator<Item = &[u8]> + Clone {
        (0..self.len()).map(|index| self.get(index))
    }

    fn push(&mut self, element: &[u8]) {
        self.bytes.extend_from_slice(element);
        self.ends.push(self.bytes.len());
    }
}

impl<T: AsRef<[u8]>> FromIterator<T> for Strings {
    fn from_iter<I: IntoIterator<Item = T>>(elements: I) -> Self {
        let mut strings = Self::default();
        elements.into_iter().for_each(|element| strings.push(element.as_ref()));
        strings
    }
}

/// Reads elements from Triton's form; `None` if a length says more than there is.
pub fn read(bytes: &[u8]) -> Result<Option<Strings>, MemoryError> {
    let Some(count) = count(bytes) else { return Ok(None) };
    let mut strings = Strings { bytes: reserve(bytes.len() - count * LENGTH_BYTES)?, ends: reserve(count)? };
    elements(bytes).flatten().for_each(|element| strings.push(element));
    Ok(Some(strings))
}

/// Number of elements in Triton's form; `None` if a length says more than there is.
pub fn count(bytes: &[u8]) -> Option<usize> {
    elements(bytes).try_fold(0, |count, element| element.map(|_| count + 1))
}

/// The elements in Triton's form, and a last `None` if a length says more than there is.
pub fn elements(mut rest: &[u8]) -> impl Iterator<Item = Option<&[u8]>> {
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let split = rest.split_first_chunk::<LENGTH_BYTES>();
        let split = split.and_then(|(length, behind)| behind.split_at_checked(u32::from_le_bytes(*length) as usize));
        rest = split.map_or(&[], |(_, behind)| behind);
        Some(split.map(|(element, _)| element))
    })
}

/// Bytes of the elements in Triton's form.
pub fn written_bytes<'a>(elements: impl Iterator<Item = &'a [u8]>) -> usize {
    elements.map(|element| element.len() + LENGTH_BYTES).sum()
}

/// Writes elements in Triton's form to where there are just as many bytes.
pub fn write<'a>(elements: impl Iterator<Item = &'a [u8]>, mut rest: &mut [u8]) {
    for element in elements {
        let (length, behind) = rest.split_at_mut(LENGTH_BYTES);
        length.copy_from_slice(&(element.len() as u32).to_le_bytes());
        let (bytes, behind) = behind.split_at_mut(element.len());
        bytes.copy_from_slice(element);
        rest = behind;
    }
}

/// Where the elements of the row at place `index` of a batch of `rows` lie, in their order. The layout counts elements,
/// not bytes.
pub fn places(layout: RowLayout, index: usize, rows: usize) -> impl Iterator<Item = usize> + Clone {
    (0..layout.outer).flat_map(move |outer| {
        let from = (outer * rows + index) * layout.inner_bytes;
        from..from + layout.inner_bytes
    })
}

/// Where the elements of a window lie in the batch, in their order. The chunks count elements, not bytes.
pub fn window_places(chunks: impl Iterator<Item = Chunk> + Clone) -> impl Iterator<Item = usize> + Clone {
    chunks.flat_map(|chunk| chunk.in_batch..chunk.in_batch + chunk.bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(strings: &Strings) -> Vec<u8> {
        let mut bytes = vec![0; written_bytes(strings.iter())];
        write(strings.iter(), &mut bytes);
        bytes
    }

    #[test]
    fn any_bytes_come_back() {
        let elements = [&b"one"[..], b"", &[0, 255, 0], b"four", b""];
        let strings: Strings = elements.iter().collect();
        assert_eq!(strings.iter().collect::<Vec<_>>(), elements);
        let bytes = written(&strings);
        assert_eq!((count(&bytes), read(&bytes)), (Some(5), Ok(Some(strings))));
        assert_eq!(read(&bytes[..bytes.len() - 1]), Ok(None));
        assert_eq!(read(&[255, 255, 255, 255, 1]), Ok(None));
        assert_eq!(read(&[]), Ok(Some(Strings::default())));
    }

    #[test]
    fn elements_are_where_the_next_one_ends() {
        let strings = Strings::from_starts(b"abcd".to_vec(), vec![0, 1, 1, 4]);
        assert_eq!(strings.iter().collect::<Vec<_>>(), [&b"a"[..], b"", b"bcd", b""]);
        assert!(Strings::from_starts(Vec::new(), Vec::new()).is_empty());
    }

    #[test]
    fn rows_lie_as_in_a_row_major_tensor() {
        let layout = RowLayout { outer: 2, inner_bytes: 1 };
        assert_eq!(places(layout, 0, 2).collect::<Vec<_>>(), [0, 2]);
        assert_eq!(places(layout, 1, 2).collect::<Vec<_>>(), [1, 3]);
        let layout = RowLayout { outer: 1, inner_bytes: 3 };
        assert_eq!(places(layout, 1, 2).collect::<Vec<_>>(), [3, 4, 5]);
    }
}
