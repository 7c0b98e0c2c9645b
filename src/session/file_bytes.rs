//! Reads an ONNX file for protobuf's decoder, without large weights.

#![forbid(unsafe_code)]

use std::fs::File;
use std::io::{self, Read, Seek};
use std::path::Path;

use prost::bytes::{Buf, Bytes};

/// A file for protobuf's decoder. What the decoder skips is not read. After an error, the rest of the file is zeros.
pub struct FileBytes {
    file: File,
    chunk: Vec<u8>,
    /// Bytes of the chunk that have been taken.
    taken: usize,
    /// Bytes of the file behind the chunk.
    behind: usize,
    error: Option<io::Error>,
    /// Longer fields of bytes are skipped, and come out empty.
    most_bytes: usize,
}

impl FileBytes {
    const CHUNK_BYTES: usize = 16 * 1024;

    /// `most_bytes`: longer fields of bytes, such as weights, are skipped, and come out empty.
    pub fn open(path: &Path, most_bytes: usize) -> io::Result<Self> {
        let file = File::open(path)?;
        let behind = usize::try_from(file.metadata()?.len()).map_err(io::Error::other)?;
        let mut bytes = Self { file, chunk: Vec::new(), taken: 0, behind, error: None, most_bytes };
        bytes.read_chunk(0);
        Ok(bytes)
    }

    /// The first error, if there was one.
    pub fn check(&mut self) -> io::Result<()> {
        self.error.take().map_or(Ok(()), Err)
    }

    fn read_chunk(&mut self, skipped: usize) {
        self.behind -= skipped;
        self.taken = 0;
        self.chunk.resize(self.behind.min(Self::CHUNK_BYTES), 0);
        self.behind -= self.chunk.len();
        let sought = if skipped > 0 { self.file.seek_relative(skipped as i64) } else { Ok(()) };
        if let Err(error) = sought.and_then(|()| self.file.read_exact(&mut self.chunk)) {
            self.chunk.fill(0);
            self.error.get_or_insert(error);
        }
    }
}

impl Buf for FileBytes {
    fn remaining(&self) -> usize {
        self.chunk.len() - self.taken + self.behind
    }

    fn chunk(&self) -> &[u8] {
        &self.chunk[self.taken..]
    }

    fn advance(&mut self, count: usize) {
        let left = self.chunk.len() - self.taken;
        if count < left {
            self.taken += count;
        } else {
            self.read_chunk(count - left);
        }
    }

    fn copy_to_bytes(&mut self, count: usize) -> Bytes {
        if count > self.most_bytes {
            self.advance(count);
            return Bytes::new();
        }
        let mut copied = vec![0; count];
        self.copy_to_slice(&mut copied);
        copied.into()
    }
}
