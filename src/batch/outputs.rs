//! Writes outputs to where Triton wants them, the host or a GPU, and joins the outputs of the steps of a request.

use std::ops::Range;

use gpu_rows::{DeviceError, Foreign};
use rows::tensor::{DataType, Dims};
use rows::{reserve, strings};

use crate::binding::{Binding, Gathered};
use crate::error::{RequestError, RunError};
use crate::session::OutputCopy;
use crate::triton::{OutputMemory, Response, RowOutput};

/// Outputs of a batch whose responses are in memory of GPUs. They are written together, so that each GPU is waited for
/// once.
#[derive(Default)]
pub struct OnGpus<'r> {
    /// The outputs that are copied on the step's device.
    pub copies: Vec<OutputCopy<'r>>,
    writes: Vec<Write<'r>>,
}

struct Write<'r> {
    position: usize,
    output: String,
    to: Foreign<'r>,
    bytes: Vec<u8>,
}

impl<'r> OnGpus<'r> {
    /// Like [`deliver`], but an output for a GPU is kept for [`OnGpus::write`].
    pub fn fill<'p>(
        &mut self,
        position: usize,
        output: &str,
        memory: OutputMemory<'r>,
        pieces: impl Iterator<Item = &'p [u8]>,
    ) -> Result<(), RunError> {
        let OutputMemory::Gpu(to) = memory else { return deliver(output, memory, pieces) };
        let mut bytes = reserve(to.byte_len())?;
        pieces.for_each(|piece| bytes.extend_from_slice(piece));
        self.writes.push(Write { position, output: output.to_owned(), to, bytes });
        Ok(())
    }

    /// Writes what was kept. Returns the positions and errors of the rows whose outputs could not be written.
    pub fn write(self) -> Vec<(usize, RunError)> {
        let written = gpu_rows::write(self.writes.iter().map(|write| (write.to, write.bytes.as_slice())).collect());
        let error = |(write, written): (Write, Result<(), DeviceError>)| {
            let (name, gpu, source) = (write.output, write.to.gpu(), written.err()?);
            Some((write.position, RunError::OutputOnGpu { name, gpu, source }))
        };
        self.writes.into_iter().zip(written).filter_map(error).collect()
    }
}

/// Writes an output, which is these pieces one after another, to where Triton wants it.
pub fn deliver<'p>(output: &str, memory: OutputMemory, pieces: impl Iterator<Item = &'p [u8]>) -> Result<(), RunError> {
    match memory {
        OutputMemory::Host(mut bytes) => {
            pieces.for_each(|piece| bytes.write(piece));
            bytes.finish();
            Ok(())
        }
        on_gpu @ OutputMemory::Gpu(_) => {
            let mut alone = OnGpus::default();
            alone.fill(0, output, on_gpu, pieces)?;
            alone.write().pop().map_or(Ok(()), |(_, error)| Err(error))
        }
    }
}

#[derive(Default)]
pub(super) struct Gathering {
    outputs: Vec<Together>,
    bytes: usize,
    steps: usize,
}

struct Together {
    /// The output of the first step. Its bytes are in `steps`.
    first: RowOutput,
    /// `None` if every step has the same value, such as the id of the sequence.
    how: Option<Gathered>,
    /// Elements along the axis of [`Gathered::Joined`], of all steps.
    length: i64,
    /// The bytes of each step.
    steps: Vec<Vec<u8>>,
}

impl Gathering {
    /// Counts a step whose outputs have `bytes` bytes.
    pub fn count(&mut self, bytes: usize, most_bytes: usize) -> Result<(), RequestError> {
        self.bytes = self.bytes.saturating_add(bytes);
        self.steps += 1;
        // The limit is for what several steps add up to. A single step is answered as in a model without steps.
        if self.steps > 1 && self.bytes > most_bytes {
            return Err(RunError::AnswerTooLarge { bytes: self.bytes, limit: most_bytes }.into());
        }
        Ok(())
    }

    pub fn add(&mut self, binding: &Binding, step: Vec<RowOutput>, most_bytes: usize) -> Result<(), RequestError> {
        self.count(step.iter().map(|output| output.bytes.len()).sum(), most_bytes)?;
        if self.outputs.is_empty() {
            let how = |output: &RowOutput| {
                let bound = binding.outputs.iter().find(|bound| bound.c_name == output.name && bound.is_response);
                bound.and_then(|bound| bound.gathered)
            };
            let first = |mut first: RowOutput| {
                let how = how(&first);
                let length = how.and_then(joined_axis).map_or(0, |axis| first.dims[axis]);
                let steps = vec![std::mem::take(&mut first.bytes)];
                Together { first, how, length, steps }
            };
            self.outputs = step.into_iter().map(first).collect();
            return Ok(());
        }
        for (together, output) in self.outputs.iter_mut().zip(step) {
            together.add(output)?;
        }
        Ok(())
    }

    pub fn deliver(self, response: &Response) -> Result<(), RequestError> {
        for together in self.outputs {
            let dims = together.dims(self.steps);
            let RowOutput { name, data_type, .. } = &together.first;
            let bytes = together.steps.iter().map(Vec::len).sum();
            let memory = response.output(name, *data_type, &dims, bytes)?;
            deliver(&name.to_string_lossy(), memory, together.pieces())?;
        }
        Ok(())
    }
}

const fn joined_axis(how: Gathered) -> Option<usize> {
    match how {
        Gathered::Joined { axis } => Some(axis),
        Gathered::Stacked { .. } => None,
    }
}

impl Together {
    fn add(&mut self, output: RowOutput) -> Result<(), RequestError> {
        let Some(how) = self.how else { return Ok(()) };
        let axis = joined_axis(how);
        let is_like = |(at, (one, other)): (usize, (&i64, &i64))| one == other || axis == Some(at);
        let mut dims = self.first.dims.iter().zip(&output.dims).enumerate();
        if self.first.dims.len() != output.dims.len() || !dims.all(is_like) {
            let name = self.first.name.to_string_lossy().into_owned();
            let (first, later) = (Dims(&self.first.dims).to_string(), Dims(&output.dims).to_string());
            return Err(RunError::UnequalSteps { name, first, later }.into());
        }
        self.length += axis.map_or(0, |axis| output.dims[axis]);
        self.steps.push(output.bytes);
        Ok(())
    }

    /// Pieces of each step between those of others.
    fn outer(&self) -> usize {
        let axis = match self.how {
            None => 0,
            Some(Gathered::Stacked { at }) => at,
            Some(Gathered::Joined { axis }) => axis,
        };
        self.first.dims[..axis].iter().map(|&dim| usize::try_from(dim).unwrap_or(0)).product()
    }

    fn dims(&self, steps: usize) -> Vec<i64> {
        let mut dims = self.first.dims.to_vec();
        match self.how {
            None => {}
            Some(Gathered::Stacked { at }) => dims.insert(at, steps as i64),
            Some(Gathered::Joined { axis }) => dims[axis] = self.length,
        }
        dims
    }

    /// The bytes of all steps, row-major: for each index of the dimensions before the axis, the pieces of all steps.
    fn pieces(&self) -> impl Iterator<Item = &[u8]> {
        let outer = self.outer();
        let cut = |bytes: &Vec<u8>| -> Vec<Range<usize>> {
            // A single piece is all of the bytes, even for strings.
            if outer > 1 && self.first.data_type == DataType::Bytes {
                return string_pieces(bytes, outer);
            }
            let each = bytes.len() / outer.max(1);
            (0..outer).map(|piece| piece * each..(piece + 1) * each).collect()
        };
        let cut: Vec<_> = self.steps.iter().map(cut).collect();
        let places = (0..outer).flat_map(move |piece| (0..self.steps.len()).map(move |step| (step, piece)));
        places.map(move |(step, piece)| self.steps[step].get(cut[step][piece].clone()).unwrap_or_default())
    }
}

/// The ranges of `outer` parts in the bytes of strings. Each part has the same number of strings.
fn string_pieces(bytes: &[u8], outer: usize) -> Vec<Range<usize>> {
    let lengths: Vec<usize> = strings::elements(bytes).map(|of| strings::written_bytes(of.into_iter())).collect();
    let each = lengths.len() / outer.max(1);
    let mut from = 0;
    let piece = |piece: usize| {
        let bytes: usize = lengths[piece * each..(piece + 1) * each].iter().sum();
        let range = from..from + bytes;
        from += bytes;
        range
    };
    (0..outer).map(piece).collect()
}
