//! String tensors: rows of elements of any length, and the form in which Triton carries them.
//!
//! Triton writes an element as its length (four bytes, little-endian) and its bytes, one after another. A string is
//! whatever bytes the client sent; nothing here asks for UTF-8.

#![forbid(unsafe_code)]

use crate::tensor::{Chunk, RowLayout};

/// Elements of a string tensor, row-major.
pub type Strings = Vec<Vec<u8>>;

/// Elements of a string tensor, row-major, as ONNX Runtime hands them over: a [`Vec`] for each would cost ten times what
/// a short one has.
#[derive(Default)]
pub struct Elements {
    /// All bytes.
    bytes: Vec<u8>,
    /// Where each begins.
    starts: Vec<usize>,
}

impl Elements {
    /// Elements that begin at `starts`, in order.
    pub const fn new(bytes: Vec<u8>, starts: Vec<usize>) -> Self {
        Self { bytes, starts }
    }

    /// How many there are.
    pub const fn len(&self) -> usize {
        self.starts.len()
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.starts.is_empty()
    }

    /// Element number `index`. Panics if there are fewer.
    pub fn get(&self, index: usize) -> &[u8] {
        let end = self.starts.get(index + 1).copied().unwrap_or(self.bytes.len());
        &self.bytes[self.starts[index]..end]
    }
}

const LENGTH_BYTES: usize = 4;

/// Reads elements from Triton's form; `None` if a length says more than there is.
pub fn read<'a>(pieces: impl Iterator<Item = &'a [u8]>) -> Option<Strings> {
    let whole: Vec<u8> = pieces.flatten().copied().collect();
    let mut rest = whole.as_slice();
    let mut strings = Strings::new();
    while !rest.is_empty() {
        let (length, behind) = rest.split_first_chunk::<LENGTH_BYTES>()?;
        let (element, behind) = behind.split_at_checked(u32::from_le_bytes(*length) as usize)?;
        strings.push(element.to_vec());
        rest = behind;
    }
    Some(strings)
}

/// The elements of Triton's form, up to where a length says more than there is.
pub fn elements(mut rest: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let (length, behind) = rest.split_first_chunk::<LENGTH_BYTES>()?;
        let (element, behind) = behind.split_at_checked(u32::from_le_bytes(*length) as usize)?;
        rest = behind;
        Some(element)
    })
}

/// Bytes of the elements in Triton's form.
pub fn written_bytes<'a>(strings: impl IntoIterator<Item = &'a [u8]>) -> usize {
    strings.into_iter().map(|element| element.len() + LENGTH_BYTES).sum()
}

/// Writes elements in Triton's form.
pub fn write<'a>(strings: impl IntoIterator<Item = &'a [u8]>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for element in strings {
        bytes.extend_from_slice(&(element.len() as u32).to_le_bytes());
        bytes.extend_from_slice(element);
    }
    bytes
}

/// As [`write`], to where there are just as many bytes.
pub fn write_to<'a>(strings: impl IntoIterator<Item = &'a [u8]>, mut rest: &mut [u8]) {
    for element in strings {
        let (length, behind) = rest.split_at_mut(LENGTH_BYTES);
        length.copy_from_slice(&(element.len() as u32).to_le_bytes());
        let (bytes, behind) = behind.split_at_mut(element.len());
        bytes.copy_from_slice(element);
        rest = behind;
    }
}

/// Puts a row's elements into place `index` of a batch of `rows`. The layout counts elements, not bytes.
pub fn put(layout: RowLayout, row: &[Vec<u8>], batch: &mut Strings, index: usize, rows: usize) {
    batch.resize(layout.row_bytes() * rows, Vec::new());
    for (at, element) in row.iter().enumerate() {
        let (outer, inner) = (at / layout.inner_bytes, at % layout.inner_bytes);
        batch[(outer * rows + index) * layout.inner_bytes + inner].clone_from(element);
    }
}

/// As [`put`], into a batch that borrows its elements and has all places.
pub fn put_borrowed<'a>(
    layout: RowLayout,
    row: impl Iterator<Item = &'a [u8]>,
    batch: &mut [&'a [u8]],
    index: usize,
    rows: usize,
) {
    for (at, element) in row.enumerate() {
        let (outer, inner) = (at / layout.inner_bytes, at % layout.inner_bytes);
        batch[(outer * rows + index) * layout.inner_bytes + inner] = element;
    }
}

/// The elements of the row at place `index` of a batch of `rows`. The layout counts elements, not bytes.
pub fn row(layout: RowLayout, batch: &Elements, index: usize, rows: usize) -> impl Iterator<Item = &[u8]> {
    (0..layout.outer).flat_map(move |outer| {
        let from = (outer * rows + index) * layout.inner_bytes;
        (from..from + layout.inner_bytes).map(|at| batch.get(at))
    })
}

/// Puts a window's elements where its chunks lie, which count elements, not bytes.
pub fn put_window(chunks: impl Iterator<Item = Chunk>, alone: &[Vec<u8>], batch: &mut [Vec<u8>]) {
    for Chunk { in_batch, alone: from, bytes } in chunks {
        batch[in_batch..in_batch + bytes].clone_from_slice(&alone[from..from + bytes]);
    }
}

/// The elements of a window's chunks, which count elements, not bytes.
pub fn window(chunks: impl Iterator<Item = Chunk>, batch: &Elements) -> impl Iterator<Item = &[u8]> {
    chunks.flat_map(|chunk| (chunk.in_batch..chunk.in_batch + chunk.bytes).map(|at| batch.get(at)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strings(elements: &[&[u8]]) -> Strings {
        elements.iter().map(|element| element.to_vec()).collect()
    }

    #[test]
    fn any_bytes_come_back_however_they_are_cut() {
        let elements = strings(&[b"one", b"", &[0, 255, 0], b"four"]);
        let bytes = write(elements.iter().map(Vec::as_slice));
        assert_eq!(bytes.len(), written_bytes(elements.iter().map(Vec::as_slice)));
        assert!(super::elements(&bytes).eq(elements.iter()));
        let mut written = vec![0; bytes.len()];
        write_to(super::elements(&bytes), &mut written);
        assert_eq!(written, bytes);
        for cut in 0..=bytes.len() {
            let (first, second) = bytes.split_at(cut);
            assert_eq!(read([first, second].into_iter()), Some(elements.clone()));
        }
        assert_eq!(read([&bytes[..bytes.len() - 1]].into_iter()), None);
        assert_eq!(read([&[255u8, 255, 255, 255, 1][..]].into_iter()), None);
        assert_eq!(read(std::iter::empty()), Some(Strings::new()));
    }

    #[test]
    fn rows_lie_as_in_a_row_major_tensor() {
        let layout = RowLayout { outer: 2, inner_bytes: 1 };
        let mut batch = Strings::new();
        put(layout, &strings(&[b"a0", b"a1"]), &mut batch, 0, 2);
        put(layout, &strings(&[b"b0", b"b1"]), &mut batch, 1, 2);
        assert_eq!(batch, strings(&[b"a0", b"b0", b"a1", b"b1"]));
        let mut borrowed: Vec<&[u8]> = vec![b""; 4];
        put_borrowed(layout, [&b"a0"[..], b"a1"].into_iter(), &mut borrowed, 0, 2);
        put_borrowed(layout, [&b"b0"[..], b"b1"].into_iter(), &mut borrowed, 1, 2);
        assert_eq!(borrowed, batch);
        let batch = Elements::new(b"a0b0a1b1".to_vec(), vec![0, 2, 4, 6]);
        assert!(row(layout, &batch, 1, 2).eq([b"b0", b"b1"]));
    }
}
