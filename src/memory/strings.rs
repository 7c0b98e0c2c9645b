//! String tensors: rows of elements of any length, and the form in which Triton carries them.
//!
//! Triton writes an element as its length (four bytes, little-endian) and its bytes, one after another. A string is
//! whatever bytes the client sent; nothing here asks for UTF-8.

#![forbid(unsafe_code)]

use crate::tensor::{Chunk, RowLayout};

/// Elements of a string tensor, row-major.
pub type Strings = Vec<Vec<u8>>;

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

/// Bytes of the elements in Triton's form.
pub fn written_bytes<'a>(strings: impl IntoIterator<Item = &'a Vec<u8>>) -> usize {
    strings.into_iter().map(|element| element.len() + LENGTH_BYTES).sum()
}

/// Writes elements in Triton's form.
pub fn write<'a>(strings: impl IntoIterator<Item = &'a Vec<u8>>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for element in strings {
        bytes.extend_from_slice(&(element.len() as u32).to_le_bytes());
        bytes.extend_from_slice(element);
    }
    bytes
}

/// As [`write`], to where there are just as many bytes.
pub fn write_to<'a>(strings: impl IntoIterator<Item = &'a Vec<u8>>, mut rest: &mut [u8]) {
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

/// The elements of the row at place `index` of a batch of `rows`. The layout counts elements, not bytes.
pub fn row(layout: RowLayout, batch: &[Vec<u8>], index: usize, rows: usize) -> impl Iterator<Item = &Vec<u8>> {
    (0..layout.outer).flat_map(move |outer| {
        let from = (outer * rows + index) * layout.inner_bytes;
        &batch[from..from + layout.inner_bytes]
    })
}

/// Puts a window's elements where its chunks lie, which count elements, not bytes.
pub fn put_window(chunks: impl Iterator<Item = Chunk>, alone: &[Vec<u8>], batch: &mut [Vec<u8>]) {
    for Chunk { in_batch, alone: from, bytes } in chunks {
        batch[in_batch..in_batch + bytes].clone_from_slice(&alone[from..from + bytes]);
    }
}

/// The elements of a window's chunks, which count elements, not bytes.
pub fn window(chunks: impl Iterator<Item = Chunk>, batch: &[Vec<u8>]) -> Strings {
    chunks.flat_map(|chunk| batch[chunk.in_batch..chunk.in_batch + chunk.bytes].iter().cloned()).collect()
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
        let bytes = write(&elements);
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
        assert_eq!(row(layout, &batch, 1, 2).cloned().collect::<Strings>(), strings(&[b"b0", b"b1"]));
    }
}
