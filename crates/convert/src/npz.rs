//! NumPy's .npz files: the headers of their arrays.
//!
//! Rule: a file may come from anywhere, so nothing is allocated or parsed before its size is known to be reasonable.

use std::fmt::Display;
use std::io::{self, Read};

use npyz::NpyHeader;

/// What NumPy adds to an array's name in an archive.
pub const EXTENSION: &str = ".npy";
const MAGIC: &[u8] = b"\x93NUMPY";
/// Most bytes of an array's header, as in NumPy.
const MAX_HEADER_BYTES: usize = 10_000;
// Most opening brackets of a header: with their depth, the parser's stack grows, and its time exponentially. An array
// of numbers or strings has two. A small record has four, and is then refused for its type.
const MAX_BRACKETS: usize = 4;
/// Most characters of a header that an error repeats.
const MAX_QUOTED: usize = 200;

/// Reads a header that can do no harm to its parser.
pub fn read_header(file: &mut impl Read) -> io::Result<NpyHeader> {
    // Magic, version, and the length, which has two bytes in version 1 and four in later ones.
    let mut header = Vec::new();
    file.by_ref().take(12).read_to_end(&mut header)?;
    let (text_at, length) = match header.as_slice() {
        &[_, _, _, _, _, _, 1, _, low, high, ..] => (10, u32::from(u16::from_le_bytes([low, high]))),
        &[_, _, _, _, _, _, _, _, a, b, c, d] => (12, u32::from_le_bytes([a, b, c, d])),
        short => (short.len(), 0),
    };
    let refused = |why: String| Err(io::Error::new(io::ErrorKind::InvalidData, why));
    let length = length as usize;
    if header.starts_with(MAGIC) && length > MAX_HEADER_BYTES {
        return refused(format!("its header has {length} bytes, and at most {MAX_HEADER_BYTES} are read"));
    }
    let rest = (text_at + length).saturating_sub(header.len());
    file.by_ref().take(rest.min(MAX_HEADER_BYTES) as u64).read_to_end(&mut header)?;
    let brackets = header[text_at..].iter().filter(|letter| b"([{".contains(letter)).count();
    if brackets > MAX_BRACKETS {
        return refused(format!("its header has {brackets} opening brackets, and that of numbers or strings has 2"));
    }
    NpyHeader::from_reader(header.as_slice())
}

/// The beginning of a text that may repeat a header.
pub fn brief(text: &dyn Display) -> String {
    let text = text.to_string();
    let line = text.lines().next().unwrap_or_default();
    let mut brief: String = line.chars().take(MAX_QUOTED).collect();
    if brief.len() < line.len() {
        brief += "...";
    }
    brief
}
