//! Writes outputs to where Triton wants them: the host, or a GPU.

use gpu_rows::{DeviceError, Foreign};
use rows::reserve;

use crate::error::RunError;
use crate::session::OutputCopy;
use crate::triton::OutputMemory;

/// Outputs of a batch whose responses are in memory of GPUs. They are written together, so that each GPU is waited for once.
#[derive(Default)]
pub struct OnGpus<'r> {
    /// Those that are copied on the step's device.
    pub copies: Vec<OutputCopy<'r>>,
    /// The others.
    writes: Vec<Write<'r>>,
}

struct Write<'r> {
    /// The row's position in the batch.
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
