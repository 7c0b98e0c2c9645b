//! A request of several rows. Each row is run and answered like a request of its own. The client gets one response,
//! when all rows have their answers.

use std::sync::Arc;

use parking_lot::Mutex;
use rows::strings;
use rows::tensor::{DataType, element_count};

use super::error::{Code, Error};
use super::input::{Elements, HeldElements, NotCopied, Piece, RawDims, RawInput, copy_buffers, copy_part};
use super::raw::{OutputMemory, RawRequest, RowOutput};

pub(super) struct Part {
    pub whole: Arc<Whole>,
    pub row: usize,
}

/// The request that its rows share. It is answered when the last row is, and released when it is dropped.
pub(super) struct Whole {
    raw: RawRequest,
    /// By row; `None` if the row has no answer yet, or the response has been made.
    answers: Mutex<Vec<Option<RowAnswer>>>,
}

/// The outputs of a row, or the error that it is answered with.
type RowAnswer = Result<Vec<RowOutput>, Error>;

impl Part {
    /// Cuts the row out of an input of the whole request, and copies it. An input that has no such row is returned as it
    /// is: the check of its shape refuses it.
    pub fn row_of(&self, mut input: RawInput) -> Result<RawInput, Error> {
        let rows = self.whole.answers.lock().len();
        let mut dims: Box<[i64]> = input.dims.as_slice().into();
        match dims.first_mut() {
            Some(batch) if *batch == rows as i64 => *batch = 1,
            _ => return Ok(input),
        }
        let Elements::Lent(buffers) = &input.elements else { return Ok(input) };
        let not_copied = |error| match error {
            NotCopied::Memory(error) => Error::new(Code::Unavailable, error.to_string()),
            NotCopied::Gpu(gpu, error) => {
                Error::new(Code::Unavailable, format!("an input in memory of GPU {gpu} cannot be read: {error}"))
            }
        };
        let row = if input.data_type == Some(DataType::Bytes) {
            let bytes = copy_buffers(buffers).map_err(not_copied)?;
            let each = element_count(&dims).unwrap_or(usize::MAX);
            // Without strings the row is empty, and the check of their number refuses it.
            let of_row = strings::elements(&bytes).skip(self.row.saturating_mul(each)).take(each);
            let of_row = of_row.collect::<Option<Vec<_>>>().unwrap_or_default();
            let mut row = vec![0; strings::written_bytes(of_row.iter().copied())];
            strings::write(of_row.iter().copied(), &mut row);
            row
        } else {
            let each = buffers.iter().map(Piece::byte_len).sum::<usize>() / rows;
            copy_part(buffers, self.row * each..(self.row + 1) * each).map_err(not_copied)?
        };
        (input.dims, input.elements) = (RawDims::Owned(dims), Elements::Held(HeldElements::Bytes(Arc::new(row))));
        Ok(input)
    }
}

impl Whole {
    pub fn new(raw: RawRequest, rows: usize) -> Arc<Self> {
        Arc::new(Self { raw, answers: Mutex::new((0..rows).map(|_| None).collect()) })
    }

    /// Takes the answer of a row. The last one sends the response: the outputs of all rows, or the first row's error.
    pub fn answer(&self, row: usize, answer: RowAnswer) -> Result<(), Error> {
        let mut answers = self.answers.lock();
        answers[row] = Some(answer);
        if answers.iter().any(Option::is_none) {
            return Ok(());
        }
        let named = |(row, answer): (usize, RowAnswer)| {
            answer.map_err(|Error { code, message }| Error::new(code, format!("{message} (row {row} of the request)")))
        };
        let rows: Result<Vec<_>, Error> = answers.iter_mut().flat_map(Option::take).enumerate().map(named).collect();
        // Sending calls into the front end of Triton, so it needs no lock held.
        drop(answers);
        self.send(rows)
    }

    /// Sends the response. Its outputs have the rows one after another, so rows of different shapes are an error.
    fn send(&self, rows: Result<Vec<Vec<RowOutput>>, Error>) -> Result<(), Error> {
        let response = self.raw.response()?;
        let filled = rows.and_then(|rows| {
            let first = rows.first().map_or(&[][..], Vec::as_slice);
            for (index, output) in first.iter().enumerate() {
                let outputs = rows.iter().filter_map(|row| row.get(index));
                let is_like = |of: &RowOutput| of.name == output.name && of.dims.get(1..) == output.dims.get(1..);
                if outputs.clone().filter(|of| is_like(of)).count() < rows.len() {
                    let name = output.name.to_string_lossy();
                    let text = format!(
                        "output '{name}' has rows of different shapes, which one response cannot carry; the rows have \
                         run: send sequences with such outputs in separate requests"
                    );
                    return Err(Error::new(Code::InvalidArg, text));
                }
                let mut dims = output.dims.clone();
                if let Some(batch) = dims.first_mut() {
                    // An END that is not inferred has no row.
                    *batch = outputs.clone().filter_map(|of| of.dims.first()).sum();
                }
                let bytes = outputs.clone().map(|of| of.bytes.len()).sum();
                match response.output(&output.name, output.data_type, &dims, bytes)? {
                    OutputMemory::Host(mut memory) => {
                        outputs.for_each(|of| memory.write(&of.bytes));
                        memory.finish();
                    }
                    OutputMemory::Gpu(memory) => {
                        let all: Vec<u8> = outputs.flat_map(|of| of.bytes.iter().copied()).collect();
                        for written in gpu_rows::write(vec![(memory, all.as_slice())]) {
                            written.map_err(|error| Error::new(Code::Unavailable, error.to_string()))?;
                        }
                    }
                }
            }
            Ok(())
        });
        response.send(filled.err(), true)
    }
}

impl Drop for Whole {
    fn drop(&mut self) {
        self.raw.release();
    }
}
