//! Outputs on their way to answers: written to where Triton wants them, the host or a GPU; and those of the steps of a request,
//! put together.

use std::borrow::Cow;

use gpu_rows::{DeviceError, Foreign};
use rows::tensor::{DataType, Dims};
use rows::{NoMemory, reserve, strings};

use crate::binding::{Binding, Gathered};
use crate::error::{RequestError, RunError};
use crate::session::OutputCopy;
use crate::triton::{OutputMemory, Response, RowOutput};

/// Outputs of a batch whose responses are in memory of GPUs. They are written together, so that each GPU is waited for once.
#[derive(Default)]
pub struct OnGpus<'r> {
    /// Those that are copied on the step's device.
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
    /// As [`deliver`]; what goes to a GPU is kept for [`OnGpus::write`].
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
    /// Of the first step; its bytes are those of all steps, if they follow one another.
    first: RowOutput,
    /// `None`: every step has the same, such as the id of the sequence.
    how: Option<Gathered>,
    /// Elements along the axis of [`Gathered::Joined`], of all steps.
    length: i64,
    /// The bytes of each further step, if they interleave.
    others: Vec<Vec<u8>>,
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
            let first = |output: RowOutput| {
                let how = how(&output);
                let length = how.and_then(joined_axis).map_or(0, |axis| output.dims[axis]);
                Together { first: output, how, length, others: Vec::new() }
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
            let (dims, bytes) = (together.dims(self.steps), together.bytes()?);
            let RowOutput { name, data_type, .. } = &together.first;
            let memory = response.output(name, *data_type, &dims, bytes.len())?;
            deliver(&name.to_string_lossy(), memory, std::iter::once(&*bytes))?;
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
        if self.outer() <= 1 {
            // The steps follow one another, so there is nothing to put between them.
            let bytes = output.bytes.len();
            self.first.bytes.try_reserve(bytes).map_err(|_| NoMemory { bytes })?;
            self.first.bytes.extend_from_slice(&output.bytes);
        } else {
            self.others.push(output.bytes);
        }
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

    fn bytes(&self) -> Result<Cow<'_, [u8]>, RequestError> {
        let first = &self.first.bytes;
        if self.others.is_empty() {
            return Ok(Cow::Borrowed(first));
        }
        let outer = self.outer();
        let pieces = |bytes: &[u8]| {
            if self.first.data_type == DataType::Bytes {
                string_pieces(bytes, outer)
            } else {
                let each = bytes.len() / outer;
                (0..outer).map(|piece| piece * each..(piece + 1) * each).collect()
            }
        };
        let steps: Vec<_> = std::iter::once(first).chain(&self.others).collect();
        let cut: Vec<Vec<_>> = steps.iter().map(|bytes| pieces(bytes)).collect();
        let mut bytes = reserve(steps.iter().map(|bytes| bytes.len()).sum())?;
        // Row-major: the pieces of all steps for one index in front of the axis, before those for the next index.
        for piece in 0..outer {
            for (step, cut) in steps.iter().zip(&cut) {
                bytes.extend_from_slice(step.get(cut[piece].clone()).unwrap_or_default());
            }
        }
        Ok(Cow::Owned(bytes))
    }
}

/// Where each of `outer` parts with as many strings is in the bytes of strings.
fn string_pieces(bytes: &[u8], outer: usize) -> Vec<std::ops::Range<usize>> {
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
