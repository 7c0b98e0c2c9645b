//! The value with which a state starts, as the configuration or the model gives it.

use std::collections::BTreeMap;

use rows::reserve;
use rows::strings::{self, Strings};
use rows::tensor::{DataType, Dims, element_count};

use super::bound::{Initial, InitialContent};
use super::elements::{element_bytes, read_npz};
use super::error::{BindingError, Result, names};
use crate::config::{Config, DeclaredState, InitialSources, InitialValue};
use crate::onnx::{all_agree, open_axes};

impl Initial {
    /// The value that the configuration gives for a state whose rows have `dims`, else that of the model, else zeros.
    pub(super) fn new(
        name: &str,
        data_type: DataType,
        dims: &[i64],
        declared: Option<&DeclaredState>,
        config: &Config,
        sources: &InitialSources,
    ) -> Result<Self> {
        // The model fixes the size of the other states.
        let limit = if dims.contains(&-1) { config.states.limits.per_sequence } else { usize::MAX };
        let file = |file: &str| sources.files.get(file).map(Vec::as_slice).unwrap_or_default();
        let value = |from: String| Value { name, from, data_type };
        if let Some(declaration) = declared
            && let Some(initial) = &declaration.initial
        {
            let row = dims;
            let dims = declared_dims(row, &initial.dims);
            let source = value("its initial_state".to_owned());
            if !all_agree(row, &dims) {
                let why = format!("its dims {} are not those of one sequence, {}", Dims(&initial.dims), Dims(row));
                return Err(source.error(why));
            }
            // A string takes at least the 4 bytes of its length.
            let bytes = element_count(&dims).and_then(|count| count.checked_mul(data_type.byte_size().unwrap_or(4)));
            if bytes.is_none_or(|bytes| bytes > limit) {
                let (given, most) = (Dims(&initial.dims), config.states.limits.per_sequence);
                return Err(source.error(format!(
                    "with dims {given} it is larger than a state may be (max_state_bytes_per_sequence, {most})"
                )));
            }
            let Some(name_of_file) = &initial.file else { return Ok(Self { dims, content: InitialContent::Zeros }) };
            return value(format!("file '{name_of_file}'")).read_bytes(&dims, file(name_of_file));
        }
        match config.states.initial.iter().find(|(of, _)| of == name) {
            Some((_, InitialValue::File(from))) => value(format!("file '{from}'")).read_bytes(dims, file(from)),
            Some((_, InitialValue::Array { file: from, name: array })) => {
                let of = array.as_ref().map_or(String::new(), |array| format!(", array '{array}'"));
                value(format!("file '{from}'{of}")).read_array(dims, file(from), array.as_deref(), limit)
            }
            Some((_, InitialValue::Metadata { keys, then_zeros })) => {
                let source = value(format!("the model's metadata '{}'", keys.join("+")));
                source.read_metadata(dims, keys, *then_zeros, &sources.metadata)
            }
            Some((_, InitialValue::List(values))) => value(INITIAL_STATES.to_owned()).read_list(dims, values),
            Some((_, InitialValue::Fill(text))) => value(INITIAL_STATES.to_owned()).fill(dims, text),
            None if sources.defaults.contains_key(name) => {
                let values: Vec<String> = sources.defaults[name].iter().map(f64::to_string).collect();
                value("the model's initializer".to_owned()).read_list(dims, &values)
            }
            None => {
                // Triton takes 1 for what a declared state leaves open. A cache that grows starts empty.
                let open = if declared.is_some() { 1 } else { 0 };
                let dims = dims.iter().map(|&dim| if dim < 0 { open } else { dim }).collect();
                Ok(Self { dims, content: InitialContent::Zeros })
            }
        }
    }
}

const INITIAL_STATES: &str = "parameter 'initial_states'";

/// The dims of a row, from those of the declared initial state, which may leave the batch axis out.
fn declared_dims(row: &[i64], initial: &[i64]) -> Vec<i64> {
    let mut dims = initial.to_vec();
    // The dims agree without the batch axis. If that holds for several axes, each of them is 1.
    let is_batch = |&axis: &usize| {
        let mut rest = row.to_vec();
        rest.remove(axis) == 1 && all_agree(&rest, initial)
    };
    if !all_agree(row, initial)
        && let Some(axis) = (0..row.len()).find(is_batch)
    {
        dims.insert(axis, 1);
    }
    dims
}

struct Value<'a> {
    name: &'a str,
    from: String,
    data_type: DataType,
}

impl Value<'_> {
    fn error(&self, why: String) -> BindingError {
        BindingError::Initial { name: self.name.to_owned(), from: self.from.clone(), why }
    }

    fn read_bytes(&self, dims: &[i64], bytes: &[u8]) -> Result<Initial> {
        let Some(size) = self.data_type.byte_size() else {
            let elements = strings::read(bytes)
                .map_err(|error| self.error(error.to_string()))?
                .ok_or_else(|| self.error("it is not a list of strings, each after its length".to_owned()))?;
            let dims = self.close(dims, elements.len())?;
            return Ok(Initial { dims, content: InitialContent::Strings(elements) });
        };
        if !bytes.len().is_multiple_of(size) {
            let why = format!("it has {} bytes, but an element of {} has {size}", bytes.len(), self.data_type);
            return Err(self.error(why));
        }
        let dims = self.close(dims, bytes.len() / size)?;
        Ok(Initial { dims, content: InitialContent::Bytes(bytes.to_vec()) })
    }

    fn read_list(&self, dims: &[i64], values: &[String]) -> Result<Initial> {
        let dims = self.close(dims, values.len())?;
        let content = match self.data_type {
            DataType::Bytes => InitialContent::Strings(values.iter().collect()),
            _ => InitialContent::Bytes(self.elements(values)?),
        };
        Ok(Initial { dims, content })
    }

    fn read_array(&self, dims: &[i64], bytes: &[u8], array: Option<&str>, limit: usize) -> Result<Initial> {
        let fits = |shape: &[i64]| {
            let closed = declared_dims(dims, shape);
            if all_agree(dims, &closed) {
                return Ok(closed);
            }
            Err(format!("its shape {} is not that of one sequence, {}", Dims(shape), Dims(dims)))
        };
        let content = read_npz(bytes, array, self.name, self.data_type, fits, limit);
        content.map(|(dims, content)| Initial { dims, content }).map_err(|why| self.error(why))
    }

    /// Numbers that are separated by a comma, spaces or line breaks, with or without the brackets of a list around
    /// them.
    fn read_metadata(
        &self,
        dims: &[i64],
        keys: &[String],
        then_zeros: bool,
        metadata: &BTreeMap<String, String>,
    ) -> Result<Initial> {
        let mut values = Vec::new();
        for key in keys {
            let Some(text) = metadata.get(key) else {
                let known: Vec<String> = metadata.keys().map(|key| format!("'{key}'")).collect();
                return Err(self.error(format!("the model has no metadata '{key}' (it has {})", names(&known))));
            };
            // A missing number would shift all numbers after it.
            if has_gap(text) {
                return Err(self.error(format!("metadata '{key}' has a comma without a number before it")));
            }
            let is_between = |letter: char| letter.is_whitespace() || [',', '[', ']'].contains(&letter);
            values.extend(text.split(is_between).filter(|value| !value.is_empty()).map(str::to_owned));
        }
        let wanted = element_count(dims).filter(|_| then_zeros).unwrap_or(0);
        if self.data_type == DataType::Bytes || values.len() >= wanted {
            return self.read_list(dims, &values);
        }
        let given = self.elements(&values)?;
        let mut bytes = self.repeated(&self.element("0")?, wanted)?;
        bytes[..given.len()].copy_from_slice(&given);
        Ok(Initial { dims: dims.to_vec(), content: InitialContent::Bytes(bytes) })
    }

    fn fill(&self, dims: &[i64], value: &str) -> Result<Initial> {
        let Some(count) = element_count(dims) else {
            let open = format!("the open dimension of {}", Dims(dims));
            return Err(self.error(format!("'{value}' does not say how long {open} is: list the elements")));
        };
        let content = if self.data_type == DataType::Bytes {
            let strings = Strings::repeated(value.as_bytes(), count);
            InitialContent::Strings(strings.map_err(|error| self.error(error.to_string()))?)
        } else {
            InitialContent::Bytes(self.repeated(&self.element(value)?, count)?)
        };
        Ok(Initial { dims: dims.to_vec(), content })
    }

    fn repeated(&self, element: &[u8], count: usize) -> Result<Vec<u8>> {
        // A dim of the model can be any number, so the allocation may fail, and must not end the server.
        let room = reserve(element.len().saturating_mul(count));
        let mut bytes = room.map_err(|error| self.error(error.to_string()))?;
        (0..count).for_each(|_| bytes.extend_from_slice(element));
        Ok(bytes)
    }

    fn elements(&self, values: &[String]) -> Result<Vec<u8>> {
        let elements = values.iter().map(|value| self.element(value)).collect::<Result<Vec<_>, _>>()?;
        Ok(elements.concat())
    }

    fn element(&self, value: &str) -> Result<Vec<u8>> {
        element_bytes(self.data_type, value).map_err(|why| self.error(why))
    }

    /// The dims of a row with `count` elements, which decide the one open dimension.
    fn close(&self, dims: &[i64], count: usize) -> Result<Vec<i64>> {
        let (row, mut closed) = (Dims(dims), dims.to_vec());
        let wanted = match open_axes(dims, None).as_slice() {
            [] => match element_count(dims) {
                Some(wanted) if wanted == count => return Ok(closed),
                wanted => format!("a row of {row} has {}", wanted.unwrap_or(usize::MAX)),
            },
            &[axis] => {
                closed[axis] = 1;
                let step = element_count(&closed).unwrap_or(0);
                // `step` is 0 if another dimension is. Then no length makes a row of these elements.
                if count.checked_rem(step) == Some(0) {
                    closed[axis] = (count / step) as i64;
                    return Ok(closed);
                }
                format!("a row of {row} has a multiple of {step}")
            }
            _ => format!("more than one dimension of {row} is open"),
        };
        let unit = self.data_type.byte_size().map_or(String::new(), |size| format!(" ({} bytes)", count * size));
        Err(self.error(format!("it has {count} elements{unit}, but {wanted}")))
    }
}

/// Whether a comma of a list has nothing before it.
fn has_gap(text: &str) -> bool {
    let mut parts = text.split(',').map(str::trim_end);
    // The last comma may end the list.
    parts.next_back();
    parts.any(|part| part.is_empty() || part.ends_with('['))
}
