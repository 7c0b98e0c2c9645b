//! String tensors, and Triton's encoding of them.
//!
//! Triton encodes each element as its length (four bytes, little-endian) and its bytes. A string is whatever bytes the
//! client sent; nothing here requires UTF-8.

#![forbid(unsafe_code)]

use crate::tensor::Part;
use crate::{NoMemory, reserve};

const LENGTH_BYTES: usize = 4;

/// Elements of a string tensor, row-major. They share one allocation, because a client may send millions of short ones.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Strings {
    bytes: Vec<u8>,
    /// For each element, where its bytes end.
    ends: Vec<usize>,
}

impl Strings {
    /// The elements in `bytes`. Element `i` begins at `starts[i]` and ends where the next one begins.
    pub fn from_starts(bytes: Vec<u8>, mut starts: Vec<usize>) -> Self {
        if !starts.is_empty() {
            starts.remove(0);
            starts.push(bytes.len());
        }
        Self { bytes, ends: starts }
    }

    pub fn repeated(element: &[u8], count: usize) -> Result<Self, NoMemory> {
        let mut strings = Self { bytes: reserve(element.len().saturating_mul(count))?, ends: reserve(count)? };
        (0..count).for_each(|_| strings.push(element));
        Ok(strings)
    }

    pub const fn len(&self) -> usize {
        self.ends.len()
    }

    pub const fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The bytes of element `index`. Panics if there is no such element.
    pub fn get(&self, index: usize) -> &[u8] {
        let start = index.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.bytes[start..self.ends[index]]
    }

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

/// Decodes all elements; `None` if the bytes end within an element.
pub fn read(bytes: &[u8]) -> Result<Option<Strings>, NoMemory> {
    let Some(count) = count(bytes) else { return Ok(None) };
    // Room for all of them at once, because a push that found no memory would end the server.
    let mut strings = Strings { bytes: reserve(bytes.len() - count * LENGTH_BYTES)?, ends: reserve(count)? };
    elements(bytes).flatten().for_each(|element| strings.push(element));
    Ok(Some(strings))
}

/// Number of encoded elements; `None` if the bytes end within an element.
pub fn count(bytes: &[u8]) -> Option<usize> {
    elements(bytes).try_fold(0, |count, element| element.map(|_| count + 1))
}

/// Decodes the elements one by one. If the bytes end within an element, the last item is `None`.
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

/// Number of bytes that [`write()`] needs for the elements.
pub fn written_bytes<'a>(elements: impl Iterator<Item = &'a [u8]>) -> usize {
    elements.map(|element| element.len() + LENGTH_BYTES).sum()
}

/// Encodes elements into `rest`, which must have [`written_bytes`] bytes.
pub fn write<'a>(elements: impl Iterator<Item = &'a [u8]>, mut rest: &mut [u8]) {
    for element in elements {
        let (length, behind) = rest.split_at_mut(LENGTH_BYTES);
        length.copy_from_slice(&(element.len() as u32).to_le_bytes());
        let (bytes, behind) = behind.split_at_mut(element.len());
        bytes.copy_from_slice(element);
        rest = behind;
    }
}

/// The positions in the batch of the elements of a part, in their order. The part counts elements instead of bytes.
pub fn positions(part: &Part) -> impl Iterator<Item = usize> + Clone + use<> {
    part.chunks().flat_map(|chunk| chunk.in_batch..chunk.in_batch + chunk.bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::{RowAt, RowLayout};

    fn written(strings: &Strings) -> Vec<u8> {
        let mut bytes = vec![0; written_bytes(strings.iter())];
        write(strings.iter(), &mut bytes);
        bytes
    }

    #[test]
    fn any_bytes_are_decoded_as_they_were_encoded() {
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
    fn each_element_ends_where_the_next_one_starts() {
        let strings = Strings::from_starts(b"abcd".to_vec(), vec![0, 1, 1, 4]);
        assert_eq!(strings.iter().collect::<Vec<_>>(), [&b"a"[..], b"", b"bcd", b""]);
        assert!(Strings::from_starts(Vec::new(), Vec::new()).is_empty());
    }

    #[test]
    fn rows_lie_as_in_a_row_major_tensor() {
        let positions = |outer, inner_bytes, position| {
            positions(&RowLayout { outer, inner_bytes }.row(RowAt { position, rows: 2 })).collect::<Vec<_>>()
        };
        assert_eq!(positions(2, 1, 0), [0, 2]);
        assert_eq!(positions(2, 1, 1), [1, 3]);
        assert_eq!(positions(1, 3, 1), [3, 4, 5]);
    }
}
