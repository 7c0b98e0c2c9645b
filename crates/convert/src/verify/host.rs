//! Tensors in memory: random ones, parts of them, and their differences; and the types of elements that can be compared.

use half::{bf16, f16};
use ort::value::{IntoTensorElementType, PrimitiveTensorElementType, TensorElementType};

use crate::onnx::{DataType, element_count, is_float, type_bytes};

#[derive(Clone, Debug, PartialEq)]
pub struct Host {
    pub elem: i32,
    pub dims: Vec<i64>,
    pub bytes: Vec<u8>,
}

/// A tensor that a model takes, and its name.
pub type Feed = (String, Host);

pub struct Difference {
    pub largest: f64,
    /// Where: the number of the element.
    pub at: Option<usize>,
    /// The largest finite value of the first.
    pub scale: f64,
}

pub struct Random(u64);

impl Random {
    pub const fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub fn next(&mut self) -> f64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as f64 / (1_u64 << 52) as f64 - 1.0
    }
}

pub trait Element: PrimitiveTensorElementType + std::fmt::Debug + Clone + 'static {
    fn of_number(number: f64) -> Self;
    fn number(&self) -> f64;
    fn of_bytes(bytes: &[u8]) -> Self;
    fn bytes(&self) -> Vec<u8>;
}

macro_rules! element {
    ($type:ty, $number:ident => $of_number:expr, $element:ident => $number_of:expr) => {
        impl Element for $type {
            fn of_number($number: f64) -> Self {
                $of_number
            }

            fn number(&self) -> f64 {
                let $element = *self;
                $number_of
            }

            fn of_bytes(bytes: &[u8]) -> Self {
                Self::from_le_bytes(std::array::from_fn(|index| bytes.get(index).copied().unwrap_or_default()))
            }

            fn bytes(&self) -> Vec<u8> {
                self.to_le_bytes().to_vec()
            }
        }
    };
}

macro_rules! primitives {
    ($($type:ty),*) => { $(element!($type, number => number as $type, element => element as f64);)* };
}

primitives!(f32, f64, i8, i16, i32, i64, u8, u16, u32, u64);
element!(f16, number => Self::from_f64(number), element => element.to_f64());
element!(bf16, number => Self::from_f64(number), element => element.to_f64());

impl Element for bool {
    fn of_number(number: f64) -> Self {
        number != 0.0
    }

    fn number(&self) -> f64 {
        f64::from(*self)
    }

    fn of_bytes(bytes: &[u8]) -> Self {
        bytes.first().is_some_and(|&byte| byte != 0)
    }

    fn bytes(&self) -> Vec<u8> {
        vec![u8::from(*self)]
    }
}

/// Runs an expression with the type of ONNX elements. `None` if such elements can't be compared.
macro_rules! with_type {
    ($elem:expr, $T:ident => $run:expr) => {{
        use crate::onnx::DataType as Of;
        macro_rules! run {
            ($type:ty) => {{
                type $T = $type;
                Some($run)
            }};
        }
        match Of::try_from($elem).unwrap_or(Of::Undefined) {
            Of::Float => run!(f32),
            Of::Double => run!(f64),
            Of::Float16 => run!(half::f16),
            Of::Bfloat16 => run!(half::bf16),
            Of::Int8 => run!(i8),
            Of::Int16 => run!(i16),
            Of::Int32 => run!(i32),
            Of::Int64 => run!(i64),
            Of::Uint8 => run!(u8),
            Of::Uint16 => run!(u16),
            Of::Uint32 => run!(u32),
            Of::Uint64 => run!(u64),
            Of::Bool => run!(bool),
            _ => None,
        }
    }};
}
pub(crate) use with_type;

/// ONNX's number for a type of ONNX Runtime, if such elements can be compared.
pub fn of_runtime(of_runtime: TensorElementType) -> Option<i32> {
    let is = |elem: &i32| with_type!(*elem, T => T::into_tensor_element_type()) == Some(of_runtime);
    (DataType::Float.into()..=DataType::Bfloat16.into()).find(is)
}

pub fn is_comparable(elem: i32) -> bool {
    with_type!(elem, T => size_of::<T>()).is_some()
}

impl Host {
    pub fn random(elem: i32, dims: Vec<i64>, random: &mut Random) -> Self {
        let is_float = is_float(elem);
        // Integers are 0 and 1, which are within most vocabularies.
        let number = || if is_float { random.next() } else { f64::from(random.next() > 0.0) };
        let count = usize::try_from(element_count(&dims)).unwrap_or_default();
        let numbers: Vec<f64> = std::iter::repeat_with(number).take(count).collect();
        Self::of(elem, dims, &numbers)
    }

    pub fn filled_with(elem: i32, dims: Vec<i64>, value: f64) -> Self {
        let count = usize::try_from(element_count(&dims)).unwrap_or_default();
        Self::of(elem, dims, &vec![value; count])
    }

    /// Lengths of rows: half of the steps, all, a third, and so on. With three rows, neither an ascending nor a descending
    /// sort leaves them as they are. A single row has all steps.
    pub fn lengths(elem: i32, dims: Vec<i64>, steps: i64, multiple: i64) -> Self {
        let rows = element_count(&dims);
        let length = |row: i64| match row % 3 {
            0 if rows > 1 => (steps / multiple + 1) / 2 * multiple,
            2 => (steps / multiple + 2) / 3 * multiple,
            _ => steps,
        };
        let lengths: Vec<f64> = (0..rows).map(|row| length(row) as f64).collect();
        Self::of(elem, dims, &lengths)
    }

    /// How much of each row's length lies in these steps.
    pub fn lengths_within(&self, start: i64, count: i64) -> Self {
        let within = |length: f64| (length - start as f64).clamp(0.0, count as f64);
        let lengths: Vec<f64> = self.numbers().into_iter().map(within).collect();
        Self::of(self.elem, self.dims.clone(), &lengths)
    }

    pub fn of(elem: i32, dims: Vec<i64>, numbers: &[f64]) -> Self {
        let bytes = with_type!(elem, T => numbers.iter().flat_map(|&number| T::of_number(number).bytes()).collect());
        let bytes = bytes.unwrap_or_default();
        Self { elem, dims, bytes }
    }

    fn size(&self) -> usize {
        type_bytes(self.elem).max(1)
    }

    pub fn part(&self, axis: usize, start: i64, count: i64) -> Self {
        let mut dims = self.dims.clone();
        let (length, inner) = (dims[axis] as usize, element_count(&dims[axis + 1..]) as usize * self.size());
        dims[axis] = count;
        let (start, end) = (start as usize * inner, (start + count) as usize * inner);
        // A tensor without elements has no blocks, of any size.
        let bytes = self.bytes.chunks((length * inner).max(1)).flat_map(|block| &block[start..end]).copied().collect();
        Self { elem: self.elem, dims, bytes }
    }

    /// The entry of one row. A tensor without an axis for rows is the same for all.
    pub fn row(&self, axis: Option<usize>, row: i64) -> Self {
        axis.map_or_else(|| self.clone(), |axis| self.part(axis, row, 1))
    }

    pub fn of_rows<'a>(rows: impl IntoIterator<Item = &'a Self>, axis: Option<usize>) -> Self {
        let rows: Vec<&Self> = rows.into_iter().collect();
        axis.map_or_else(|| rows[0].clone(), |axis| Self::joined(&rows, axis))
    }

    pub fn joined(parts: &[&Self], axis: usize) -> Self {
        let mut dims = parts[0].dims.clone();
        // A scalar has no axis to join along.
        if axis >= dims.len() {
            return parts[0].clone();
        }
        let outer = element_count(&dims[..axis]) as usize;
        dims[axis] = parts.iter().map(|part| part.dims[axis]).sum();
        let mut bytes = Vec::new();
        for block in 0..outer {
            for part in parts {
                let size = part.bytes.len() / outer.max(1);
                bytes.extend_from_slice(&part.bytes[block * size..(block + 1) * size]);
            }
        }
        Self { elem: parts[0].elem, dims, bytes }
    }

    pub fn position(&self, element: usize, axis: usize) -> i64 {
        element as i64 / element_count(&self.dims[axis + 1..]) % self.dims[axis]
    }

    pub fn difference(&self, other: &Self) -> Difference {
        let (mine, theirs) = (self.numbers(), other.numbers());
        let mut found = Difference { largest: 0.0, at: None, scale: 0.0 };
        for (at, (a, b)) in mine.iter().zip(&theirs).enumerate() {
            if a.is_finite() {
                found.scale = found.scale.max(a.abs());
            }
            let same = a == b || a.is_nan() && b.is_nan();
            let difference = if same { 0.0 } else { (a - b).abs() };
            // If only one side is a number, they are infinitely far apart.
            if difference > found.largest || difference.is_nan() {
                (found.largest, found.at) = (if difference.is_nan() { f64::INFINITY } else { difference }, Some(at));
            }
        }
        found
    }

    pub fn numbers(&self) -> Vec<f64> {
        let elements = self.bytes.chunks(self.size());
        with_type!(self.elem, T => elements.map(|bytes| T::of_bytes(bytes).number()).collect()).unwrap_or_default()
    }
}
