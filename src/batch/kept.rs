//! Answers that are kept in a store with the state after them, for a client that sends its request again.
//!
//! A client that lost an answer sends the request again, with the same `sequence_step`. The sequence is one step
//! further by then, so the request must not run: it gets the kept answer.

use std::ffi::CString;

use rows::tensor::DataType;
use sequences::SequenceId;
use serde::{Deserialize, Serialize};

use super::outputs::deliver;
use crate::error::RequestError;
use crate::model::RepeatKey;
use crate::snapshot::{Entry, entry};
use crate::triton::{Request, Response, ResponseCopy, RowOutput};

const MAGIC: &[u8; 8] = b"TRTANSWR";
/// Magic, checksum, and the lengths of the header and of the data.
const PREFIX_BYTES: usize = 20;
const MOST_HEADER_BYTES: usize = 1 << 20;

pub struct KeptAnswer {
    pub of: RepeatKey,
    /// Steps of the sequence after the request.
    pub made: u64,
    pub copy: ResponseCopy,
}

impl KeptAnswer {
    /// The answer to a request that is sent again. `id`: the sequence id to add; `None` if answers carry none.
    pub fn repeat(&self, request: &Request, id: Option<&SequenceId>) -> Result<Response, RequestError> {
        let Self { made, copy, .. } = self;
        let response = request.response()?;
        id.map_or(Ok(()), |id| response.set_sequence_id(id))?;
        for output in &copy.outputs {
            let memory = response.output(&output.name, output.data_type, &output.dims, output.bytes.len())?;
            deliver(&output.name.to_string_lossy(), memory, std::iter::once(output.bytes.as_slice()))?;
        }
        for (name, number) in &copy.numbers {
            response.set_number(name, usize::try_from(*number).unwrap_or_default())?;
        }
        copy.flags.iter().try_for_each(|(name, flag)| response.set_flag(name, *flag))?;
        let made = usize::try_from(*made).unwrap_or(usize::MAX);
        response.set_number(c"stateful_steps_made", made)?;
        response.set_number(c"stateful_steps_saved", made)?;
        Ok(response)
    }
}

#[derive(Serialize, Deserialize)]
struct Header {
    of: RepeatKey,
    made: u64,
    outputs: Vec<Entry>,
    numbers: Vec<(String, i64)>,
    flags: Vec<(String, bool)>,
}

/// Encodes an answer, which is stored in front of the state after it. Empty if it would have more than `most` bytes.
pub fn encode(of: RepeatKey, made: u64, copy: &ResponseCopy, most: usize) -> Vec<u8> {
    let text = |name: &CString| name.to_string_lossy().into_owned();
    let entry = |of: &RowOutput| entry(text(&of.name), of.data_type, &of.dims, of.bytes.len());
    let header = Header {
        of,
        made,
        outputs: copy.outputs.iter().map(entry).collect(),
        numbers: copy.numbers.iter().map(|(name, number)| (text(name), *number)).collect(),
        flags: copy.flags.iter().map(|(name, flag)| (text(name), *flag)).collect(),
    };
    let header = serde_json::to_vec(&header).unwrap_or_default();
    let data: usize = copy.outputs.iter().map(|output| output.bytes.len()).sum();
    if header.len() > MOST_HEADER_BYTES || PREFIX_BYTES + header.len() + data > most {
        return Vec::new();
    }
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(&[0; 4]);
    bytes.extend_from_slice(&(header.len() as u32).to_le_bytes());
    bytes.extend_from_slice(&(data as u32).to_le_bytes());
    bytes.extend_from_slice(&header);
    copy.outputs.iter().for_each(|output| bytes.extend_from_slice(&output.bytes));
    // The checksum also covers the lengths, so it is computed after them: a wrong length would cut off the state in the
    // wrong place.
    let checksum = crc32fast::hash(&bytes[12..]);
    bytes[8..12].copy_from_slice(&checksum.to_le_bytes());
    bytes
}

/// Splits an answer off, if there is one in front of a state. A damaged answer is left out; the state has its own
/// checksum.
pub fn split(bytes: &[u8]) -> (Option<KeptAnswer>, &[u8]) {
    let Some(prefix) = bytes.first_chunk::<PREFIX_BYTES>().filter(|prefix| prefix.starts_with(MAGIC)) else {
        return (None, bytes);
    };
    let number = |at: usize| prefix[at..].first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes) as usize);
    let (checksum, header, data) = (number(8), number(12), number(16));
    let end = PREFIX_BYTES.saturating_add(header).saturating_add(data);
    let Some((answer, rest)) = bytes.split_at_checked(end) else { return (None, bytes) };
    let is_whole = crc32fast::hash(&answer[12..]) as usize == checksum;
    (is_whole.then(|| decode(&answer[PREFIX_BYTES..], header)).flatten(), rest)
}

fn decode(bytes: &[u8], header: usize) -> Option<KeptAnswer> {
    let (header, mut data) = bytes.split_at_checked(header)?;
    let Header { of, made, outputs, numbers, flags } = serde_json::from_slice(header).ok()?;
    let mut copy = ResponseCopy::default();
    for Entry { name, datatype, shape, byte_size } in outputs {
        let (bytes, rest) = data.split_at_checked(byte_size)?;
        data = rest;
        let data_type = DataType::from_protocol_name(&datatype)?;
        let name = CString::new(name).ok()?;
        copy.outputs.push(RowOutput { name, data_type, dims: shape.into(), bytes: bytes.to_vec() });
    }
    // The names come from C strings, so none has a NUL.
    let name = |name: String| CString::new(name).unwrap_or_default();
    copy.numbers = numbers.into_iter().map(|(of, number)| (name(of), number)).collect();
    copy.flags = flags.into_iter().map(|(of, flag)| (name(of), flag)).collect();
    Some(KeptAnswer { of, made, copy })
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: RepeatKey = RepeatKey { step: 3, left: Some(7), ends: false, wants: 1 };

    fn copy() -> ResponseCopy {
        let output = |name: &str, bytes: &[u8]| RowOutput {
            name: CString::new(name).unwrap(),
            data_type: DataType::Int8,
            dims: smallvec::smallvec![1, bytes.len() as i64],
            bytes: bytes.to_vec(),
        };
        ResponseCopy {
            outputs: vec![output("ONE", &[1, 2, 3]), output("NONE", &[])],
            numbers: vec![(c"left".to_owned(), 5)],
            flags: vec![(c"stopped".to_owned(), true)],
        }
    }

    #[test]
    fn an_answer_in_front_of_a_state_is_read_back() {
        let mut bytes = encode(KEY, 4, &copy(), 1000);
        bytes.extend_from_slice(b"state");
        let (answer, rest) = split(&bytes);
        let answer = answer.unwrap();
        assert_eq!((answer.of, answer.made, rest), (KEY, 4, &b"state"[..]));
        assert_eq!((answer.copy.numbers, answer.copy.flags), (copy().numbers, copy().flags));
        for (read, wanted) in answer.copy.outputs.iter().zip(copy().outputs) {
            assert_eq!((&read.name, read.data_type), (&wanted.name, wanted.data_type));
            assert_eq!((&read.dims, &read.bytes), (&wanted.dims, &wanted.bytes));
        }
    }

    #[test]
    fn an_answer_that_is_too_large_is_not_kept() {
        let bytes = encode(KEY, 4, &copy(), 1000).len();
        assert_eq!(encode(KEY, 4, &copy(), bytes).len(), bytes);
        assert!(encode(KEY, 4, &copy(), bytes - 1).is_empty());
    }

    #[test]
    fn whatever_the_bytes_are_nothing_panics_and_a_damaged_answer_is_left_out() {
        assert!(matches!(split(b"TRTSTATE and more"), (None, b"TRTSTATE and more")));
        let whole = encode(KEY, 4, &copy(), 1000);
        for at in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[at] ^= 1;
            assert!(split(&bytes).0.is_none(), "byte {at}");
            assert!(split(&whole[..at]).0.is_none(), "{at} bytes");
        }
    }
}
