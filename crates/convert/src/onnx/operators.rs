//! The operators that the converter knows, in groups that follow the same rules.
//!
//! To add an operator, add its name to its group. The compiler names the places where a new rule is missing:
//! [`ShapeRule`] is followed in `infer`, [`StepsRule`] in `time`. It doesn't name those that know an operator by its
//! name: `infer/tensor.rs` (values of shape arithmetic), `join/opsets.rs` and `batch/follow.rs`.

use std::collections::HashMap;
use std::sync::LazyLock;

use Domain::{Both, Microsoft, Onnx};

#[derive(Clone, Copy, Debug)]
pub struct Operator {
    domain: Domain,
    /// With fewer inputs, a node is malformed.
    pub least_inputs: usize,
    pub shape: ShapeRule,
    pub steps: StepsRule,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Domain {
    Onnx,
    /// `com.microsoft`, for operators of ONNX Runtime.
    Microsoft,
    Both,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShapeRule {
    ArgReduce,
    Broadcast,
    Concat,
    ConcatFromSequence,
    Constant,
    ConstantOfShape,
    Conv,
    ConvTranspose,
    DequantizeLinear,
    DynamicQuantizeLinear,
    /// That of the first input, whose elements it treats one by one.
    Each,
    Einsum,
    Expand,
    Flatten,
    FusedMatMul,
    Gather,
    GatherElements,
    Gemm,
    GlobalPool,
    If,
    Loop,
    MatMul,
    MatMulIntegerToFloat,
    OneHot,
    Open,
    OptionalGetElement,
    Pad,
    Pool,
    QLinearConv,
    QLinearMatMul,
    QuantizeLinear,
    Range,
    Recurrent,
    Reduce,
    Reshape,
    Resize,
    /// That of the first input.
    Same,
    Scan,
    SequenceEmpty,
    SequenceInsert,
    Shape,
    Size,
    Slice,
    Split,
    Squeeze,
    Tile,
    TopK,
    Transpose,
    Unsqueeze,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepsRule {
    ArgReduce,
    Attention,
    BatchNormalization,
    Concat,
    ConvTranspose,
    CumSum,
    DynamicQuantizeLinear,
    DynamicQuantizeMatMul,
    Einsum,
    ElementWise,
    Elements,
    Expand,
    Gather,
    Gemm,
    GlobalNormalization,
    GlobalPool,
    If,
    LayerNormalization,
    Loop,
    LpNormalization,
    MatMul,
    MeanVarianceNormalization,
    OneHot,
    Pad,
    QLinearConv,
    QLinearMatMul,
    Quantize,
    Recurrent,
    Reduce,
    Reshape,
    Resize,
    ReverseSequence,
    Scan,
    ScatterND,
    /// Collects a tensor for each step.
    Sequence,
    /// Reads only how many steps there are.
    Size,
    Slice,
    Softmax,
    Split,
    TopK,
    Transpose,
    /// It is not known, so the node is refused.
    Unknown,
    Window,
}

impl StepsRule {
    /// Whether the rule itself looks at parameters that depend on the number of steps. Other rules must not get any.
    pub const fn looks_at_sizes(self) -> bool {
        matches!(
            self,
            Self::Concat
                | Self::DynamicQuantizeMatMul
                | Self::ElementWise
                | Self::Expand
                | Self::Gather
                | Self::Gemm
                | Self::MatMul
                | Self::Pad
                | Self::Recurrent
                | Self::Reshape
                | Self::Resize
                | Self::Slice
        )
    }
}

/// Operators that compute a quantization scale at run time, over all elements of their first input.
pub const SCALES_AT_RUN_TIME: [&str; 3] = ["DynamicQuantizeLinear", "DynamicQuantizeLSTM", "DynamicQuantizeMatMul"];

pub fn find(name: &str) -> Option<&'static Operator> {
    // Rules are looked up several times for each node and each number of steps, so a walk through the groups would be
    // slow.
    static BY_NAME: LazyLock<HashMap<&str, Operator>> = LazyLock::new(|| {
        let named = |&(names, domain, least_inputs, shape, steps): &Group| {
            names.split(' ').map(move |name| (name, Operator { domain, least_inputs, shape, steps }))
        };
        GROUPS.iter().flat_map(named).collect()
    });
    BY_NAME.get(name)
}

/// Whether ONNX Runtime has an operator of this name that is known here.
pub fn is_of_onnx_runtime(name: &str) -> bool {
    find(name).is_some_and(|operator| operator.domain != Onnx)
}

/// Names that follow the same rules, their domain, the fewest inputs, and the rules.
type Group = (&'static str, Domain, usize, ShapeRule, StepsRule);

const GROUPS: &[Group] = &[
    (
        "Abs Acos Acosh Asin Asinh Atan Atanh BitwiseNot Cast CastLike Ceil Celu Clip Cos Cosh Dropout Elu Erf Exp \
         Floor HardSigmoid HardSwish Identity IsInf IsNaN LeakyRelu Log Mish Neg Not Reciprocal Relu Round Selu \
         Shrink Sigmoid Sign Silu Sin Sinh Softplus Softsign Sqrt Swish Tan Tanh ThresholdedRelu",
        Onnx,
        1,
        ShapeRule::Each,
        StepsRule::ElementWise,
    ),
    (
        "Add And BitShift BitwiseAnd BitwiseOr BitwiseXor Div Equal Greater GreaterOrEqual Less LessOrEqual Max Mean \
         Min Mod Mul Or PRelu Pow Sub Sum Where Xor",
        Onnx,
        1,
        ShapeRule::Broadcast,
        StepsRule::ElementWise,
    ),
    ("ArgMax ArgMin", Onnx, 1, ShapeRule::ArgReduce, StepsRule::ArgReduce),
    ("Attention", Both, 1, ShapeRule::Open, StepsRule::Attention),
    ("AveragePool LpPool MaxPool", Onnx, 1, ShapeRule::Pool, StepsRule::Window),
    ("BatchNormalization", Onnx, 1, ShapeRule::Same, StepsRule::BatchNormalization),
    ("BiasGelu QLinearAdd QLinearMul", Microsoft, 1, ShapeRule::Broadcast, StepsRule::ElementWise),
    ("Concat", Onnx, 1, ShapeRule::Concat, StepsRule::Concat),
    ("ConcatFromSequence", Onnx, 1, ShapeRule::ConcatFromSequence, StepsRule::Unknown),
    ("Constant", Onnx, 1, ShapeRule::Constant, StepsRule::Unknown),
    ("ConstantOfShape", Onnx, 1, ShapeRule::ConstantOfShape, StepsRule::Unknown),
    ("Conv ConvInteger", Onnx, 2, ShapeRule::Conv, StepsRule::Window),
    ("ConvTranspose", Onnx, 2, ShapeRule::ConvTranspose, StepsRule::ConvTranspose),
    ("CumSum", Onnx, 2, ShapeRule::Same, StepsRule::CumSum),
    ("DequantizeLinear", Both, 2, ShapeRule::DequantizeLinear, StepsRule::Quantize),
    ("DynamicQuantizeLSTM", Microsoft, 1, ShapeRule::Recurrent, StepsRule::Recurrent),
    ("DynamicQuantizeLinear", Onnx, 1, ShapeRule::DynamicQuantizeLinear, StepsRule::DynamicQuantizeLinear),
    ("DynamicQuantizeMatMul", Microsoft, 2, ShapeRule::MatMul, StepsRule::DynamicQuantizeMatMul),
    ("Einsum", Onnx, 1, ShapeRule::Einsum, StepsRule::Einsum),
    ("Expand", Onnx, 2, ShapeRule::Expand, StepsRule::Expand),
    ("FastGelu QLinearLeakyRelu QLinearSigmoid QuickGelu", Microsoft, 1, ShapeRule::Each, StepsRule::ElementWise),
    ("Flatten", Onnx, 1, ShapeRule::Flatten, StepsRule::Reshape),
    ("FusedConv", Microsoft, 2, ShapeRule::Conv, StepsRule::Window),
    ("FusedGemm", Microsoft, 2, ShapeRule::Gemm, StepsRule::Gemm),
    ("FusedMatMul", Microsoft, 2, ShapeRule::FusedMatMul, StepsRule::MatMul),
    ("GRU LSTM RNN", Onnx, 1, ShapeRule::Recurrent, StepsRule::Recurrent),
    ("Gather", Onnx, 2, ShapeRule::Gather, StepsRule::Gather),
    ("GatherElements", Onnx, 2, ShapeRule::GatherElements, StepsRule::Elements),
    ("Gelu", Both, 1, ShapeRule::Each, StepsRule::ElementWise),
    ("Gemm", Onnx, 2, ShapeRule::Gemm, StepsRule::Gemm),
    ("GlobalAveragePool GlobalLpPool GlobalMaxPool", Onnx, 1, ShapeRule::GlobalPool, StepsRule::GlobalPool),
    ("GroupNormalization InstanceNormalization", Onnx, 1, ShapeRule::Same, StepsRule::GlobalNormalization),
    ("GroupQueryAttention MultiHeadAttention", Microsoft, 1, ShapeRule::Open, StepsRule::Attention),
    ("Hardmax LogSoftmax Softmax", Onnx, 1, ShapeRule::Same, StepsRule::Softmax),
    ("If", Onnx, 1, ShapeRule::If, StepsRule::If),
    ("LRN", Onnx, 1, ShapeRule::Same, StepsRule::Unknown),
    (
        "LayerNormalization RMSNormalization SimplifiedLayerNormalization",
        Onnx,
        1,
        ShapeRule::Same,
        StepsRule::LayerNormalization,
    ),
    ("Loop", Onnx, 1, ShapeRule::Loop, StepsRule::Loop),
    ("LpNormalization", Onnx, 1, ShapeRule::Same, StepsRule::LpNormalization),
    ("MatMul MatMulInteger", Onnx, 2, ShapeRule::MatMul, StepsRule::MatMul),
    ("MatMulIntegerToFloat", Microsoft, 2, ShapeRule::MatMulIntegerToFloat, StepsRule::MatMul),
    ("MeanVarianceNormalization", Onnx, 1, ShapeRule::Same, StepsRule::MeanVarianceNormalization),
    ("OneHot", Onnx, 1, ShapeRule::OneHot, StepsRule::OneHot),
    ("OptionalGetElement", Onnx, 1, ShapeRule::OptionalGetElement, StepsRule::Unknown),
    ("Pad", Onnx, 1, ShapeRule::Pad, StepsRule::Pad),
    ("QLinearConv", Onnx, 1, ShapeRule::QLinearConv, StepsRule::QLinearConv),
    ("QLinearMatMul", Onnx, 1, ShapeRule::QLinearMatMul, StepsRule::QLinearMatMul),
    ("QuantizeLinear", Both, 2, ShapeRule::QuantizeLinear, StepsRule::Quantize),
    ("Range", Both, 1, ShapeRule::Range, StepsRule::Unknown),
    (
        "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum \
         ReduceSumSquare",
        Onnx,
        1,
        ShapeRule::Reduce,
        StepsRule::Reduce,
    ),
    ("Reshape", Onnx, 1, ShapeRule::Reshape, StepsRule::Reshape),
    ("Resize Upsample", Onnx, 1, ShapeRule::Resize, StepsRule::Resize),
    ("ReverseSequence", Onnx, 1, ShapeRule::Open, StepsRule::ReverseSequence),
    ("Scan", Onnx, 1, ShapeRule::Scan, StepsRule::Scan),
    ("ScatterElements", Onnx, 2, ShapeRule::Same, StepsRule::Elements),
    ("ScatterND", Onnx, 1, ShapeRule::Same, StepsRule::ScatterND),
    ("SequenceEmpty", Onnx, 1, ShapeRule::SequenceEmpty, StepsRule::Unknown),
    ("SequenceInsert", Onnx, 1, ShapeRule::SequenceInsert, StepsRule::Sequence),
    ("Shape", Onnx, 1, ShapeRule::Shape, StepsRule::Size),
    ("Size", Onnx, 1, ShapeRule::Size, StepsRule::Size),
    ("Slice", Onnx, 1, ShapeRule::Slice, StepsRule::Slice),
    ("Split", Onnx, 1, ShapeRule::Split, StepsRule::Split),
    ("Squeeze", Onnx, 1, ShapeRule::Squeeze, StepsRule::Reshape),
    ("Tile", Onnx, 2, ShapeRule::Tile, StepsRule::Expand),
    ("TopK", Onnx, 1, ShapeRule::TopK, StepsRule::TopK),
    ("Transpose", Onnx, 1, ShapeRule::Transpose, StepsRule::Transpose),
    ("Unsqueeze", Onnx, 1, ShapeRule::Unsqueeze, StepsRule::Reshape),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_name_is_in_two_groups() {
        let mut names: Vec<&str> = GROUPS.iter().flat_map(|group| group.0.split(' ')).collect();
        names.sort_unstable();
        assert!(names.is_sorted_by(|a, b| a < b));
        assert!(names.iter().all(|name| find(name).is_some()));
    }
}
