//! A tensor between the two protocols: its elements are one run of little-endian bytes, as in Triton's
//! `raw_input_contents`.

pub mod data_type;
pub mod proto;
#[cfg(test)]
mod tests;

use bytes::{BufMut, Bytes, BytesMut};

use rows::strings;
pub use rows::tensor::DataType;

use crate::failure::Failure;

/// A tensor without its name.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// The type of the elements.
    pub data_type: DataType,
    /// No dimension is negative, and there are as many elements as the dimensions say.
    pub shape: Vec<i64>,
    /// The elements; each string is preceded by its length in 4 bytes.
    pub content: Bytes,
}

impl Tensor {
    /// A tensor as Triton sent it. Fails if the content doesn't have the size that the shape says.
    pub fn new(data_type: DataType, shape: Vec<i64>, content: Bytes) -> Result<Self, String> {
        let tensor = Self { data_type, shape, content };
        let elements = element_count(&tensor.shape)
            .ok_or_else(|| format!("shape {:?} has a negative dimension or too many elements", tensor.shape))?;
        let fits = match data_type.byte_size() {
            Some(size) => elements.checked_mul(size) == Some(tensor.content.len()),
            None => strings::count(&tensor.content) == Some(elements),
        };
        if fits {
            Ok(tensor)
        } else {
            Err(format!("{} bytes for {:?} of {}", tensor.content.len(), tensor.shape, data_type.protocol_name()))
        }
    }

    /// The strings of a tensor of `BYTES`.
    pub fn strings(&self) -> impl Iterator<Item = Bytes> {
        strings::elements(&self.content).flatten().map(|string| self.content.slice_ref(string))
    }
}

/// The product of the dimensions; none if it is too large, or one of them is negative.
pub fn element_count(shape: &[i64]) -> Option<usize> {
    // Apart, because the product of the other dimensions may overflow.
    if shape.contains(&0) && shape.iter().all(|dimension| *dimension >= 0) {
        return Some(0);
    }
    shape.iter().try_fold(1_usize, |product, dimension| product.checked_mul(usize::try_from(*dimension).ok()?))
}

/// Appends a string as Triton has it in a content.
pub fn put_string(content: &mut BytesMut, string: &[u8]) -> Result<(), Failure> {
    let Ok(length) = u32::try_from(string.len()) else {
        return Err(Failure::invalid("Invalid string input - a string of 4 GiB or more"));
    };
    content.reserve(string.len() + 4);
    content.put_u32_le(length);
    content.put_slice(string);
    Ok(())
}
