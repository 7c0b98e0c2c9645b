//! The types of elements that can be compared.

use half::{bf16, f16};
use ort::value::{IntoTensorElementType, PrimitiveTensorElementType, TensorElementType};

use crate::onnx::DataType;

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
