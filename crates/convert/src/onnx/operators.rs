//! The operators that the converter knows, one row each.
//!
//! To add an operator, add its row. The compiler names the places where a new rule is missing: [`ShapeRule`] is followed in
//! `infer`, [`StepsRule`] in `time`.

use Domain::{Both, Microsoft, Onnx};

/// An operator, and the rules that it follows.
#[derive(Clone, Copy, Debug)]
pub struct Operator {
    name: &'static str,
    domain: Domain,
    /// With fewer inputs, a node is malformed.
    pub least_inputs: usize,
    pub shape: ShapeRule,
    pub steps: StepsRule,
}

/// The domain that defines the operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Domain {
    Onnx,
    /// `com.microsoft`, for operators of ONNX Runtime.
    Microsoft,
    Both,
}

/// How the shapes of the outputs follow from the inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShapeRule {
    ArgReduce,
    /// All inputs broadcast.
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
    /// Nothing is known of them.
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

/// How the steps go through a node.
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
    /// Each element is computed from those at its position.
    ElementWise,
    /// Moves elements along one axis, by indices.
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
    /// Passes hidden states from step to step.
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

/// The operator of this name.
pub fn find(name: &str) -> Option<&'static Operator> {
    TABLE.binary_search_by(|row| row.name.cmp(name)).ok().map(|index| &TABLE[index])
}

/// Whether ONNX Runtime has an operator of this name that is known here.
pub fn is_of_onnx_runtime(name: &str) -> bool {
    find(name).is_some_and(|row| row.domain != Onnx)
}

const fn row(name: &'static str, domain: Domain, least_inputs: usize, shape: ShapeRule, steps: StepsRule) -> Operator {
    Operator { name, domain, least_inputs, shape, steps }
}

/// In the order of the names, so that they can be searched.
const TABLE: &[Operator] = &[
    row("Abs", Onnx, 1, ShapeRule::Each, StepsRule::ElementWise),
    row("Acos", Onnx, 1, ShapeRule::Each, StepsRule::ElementWise),
    row("Acosh", Onnx, 1, ShapeRule::Each, StepsRule::ElementWise),
    row("Add", Onnx, 1, ShapeRule::Broadcast, StepsRule::ElementWise),
    row("And", Onnx, 1, ShapeRule::Broadcast, StepsRule::ElementWise),
    row("ArgMax", Onnx, 1, ShapeRule::ArgReduce, StepsRule::ArgReduce),
    row("ArgMin", Onnx, 1, ShapeRule::ArgReduce, StepsRule::ArgReduce),
    row("Asin", Onnx, 1, ShapeRule::Each, StepsRule::ElementWise),
    row("Asinh", Onnx, 1, ShapeRule::Each, StepsRule::ElementWise),
    row("Atan", Onnx, 1, ShapeRule::Each, StepsRule::ElementWise),
    row("Atanh", Onnx, 1, ShapeRule::Each, StepsRule::ElementWise),
    row("Attention", Both, 1, ShapeRule::Open, StepsRule::Attention),
    row("AveragePool", Onnx, 1, ShapeRule::Pool, StepsRule::Window),
    row("BatchNormalization", Onnx, 1, ShapeRule::Same, StepsRule::BatchNormalization),
    row("BiasGelu", Microsoft, 1, ShapeRule::Broadcast, StepsRule::ElementWise),
    row("BitShift", Onnx, 1, ShapeRule::Broadcast, StepsRule::ElementWise),
    row("BitwiseAnd", Onnx, 1, ShapeRule::Broadcast, StepsRule::ElementWise),
    row("BitwiseNot", Onnx, 1, ShapeRule::Each, StepsRule::ElementWise),
    row("BitwiseOr", Onnx, 1, ShapeRule::Broadcast, StepsRule::ElementWise),
    row("BitwiseXor", Onnx, 1, ShapeRule::Broadcast, StepsRule::ElementWise),
    row("Cast", Onnx, 1, ShapeRule::Each, StepsRule::ElementWise),
    row("CastLike", Onnx, 1, ShapeRule::Each, StepsRule::ElementWise),
    row("Ceil", Onnx, 1, ShapeRule::Each, StepsRule::ElementWise),
    row("Celu", Onnx, 1, ShapeRule::Each, StepsRule::ElementWise),
    row("Clip", Onnx, 1, ShapeRule::Each, StepsRule::ElementWise),
    row("Concat", Onnx, 1, ShapeRule::Concat, StepsRule::Concat),
    row("ConcatFromSequence", Onnx, 1, ShapeRule::ConcatFromSequence, StepsRule::Unknown),
    row("Constant", Onnx, 1, ShapeRule::Constant, StepsRule::Unknown),
    row("ConstantOfShape", Onnx, 1, ShapeRule::ConstantOfShape, StepsRule::Unknown),
    row("Conv", Onnx, 2, ShapeRule::Conv, StepsRule::Window),
    row("ConvInteger", Onnx, 2, ShapeRule::Conv, StepsRule::Window),
    row("ConvTranspose", Onnx, 2, ShapeRule::ConvTranspose, StepsRule::ConvTranspose),
    row("Cos", Onnx, 1, ShapeRule::Each, StepsRule::ElementWise),
    row("Cosh", Onnx, 1, ShapeRule::Each, StepsRule::ElementWise),
    row("CumSum", Onnx, 2, ShapeRule::Same, StepsRule::CumSum),
    row("DequantizeLinear", Both, 2, ShapeRule::DequantizeLinear, StepsRule::Quantize),
    row("Div", Onnx, 1, ShapeRule::Broadcast, StepsRule::ElementWise),
    row("Dropout", Onnx, 1, ShapeRule::Each, StepsRule::ElementWise),
    row("DynamicQuantizeLSTM", Microsoft, 1, ShapeRule::Recurrent, StepsRule::Recurrent),
    row("DynamicQuantizeLinear", Onnx, 1, ShapeRule::DynamicQuantizeLinear, StepsRule::DynamicQuantizeLinear),
    row("DynamicQuantizeMatMul", Microsoft, 2, ShapeRule::MatMul, StepsRule::DynamicQuantizeMatMul),
    row("Einsum", Onnx, 1, ShapeRule::Einsum, StepsRule::Einsum),
    row("Elu", Onnx, 1, ShapeRule::Each, StepsRule::ElementWise),
    row("Equal", Onnx, 1, ShapeRule::Broadcast, StepsRule::ElementWise),
    row("Erf", Onnx, 1, ShapeRule::Each, StepsRule::ElementWise),
    row("Exp", Onnx, 1, ShapeRule::Each, StepsRule::ElementWise),
    row("Expand", Onnx, 2, ShapeRule::Expand, StepsRule::Expand),
    row("FastGelu", Microsoft, 1, ShapeRule::Each, StepsRule::ElementWise),
    row("Flatten", Onnx, 1, ShapeRule::Flatten, StepsRule::Reshape),
    row("Floor", Onnx, 1, ShapeRule::Each, StepsRule::ElementWise),
    row("FusedConv", Microsoft, 2, ShapeRule::Conv, StepsRule::Window),
    row("FusedGemm", Microsoft, 2, ShapeRule::Gemm, StepsRule::Gemm),
    row("FusedMatMul", Microsoft, 2, ShapeRule::FusedMatMul, StepsRule::MatMul),
    row("GRU", Onnx, 1, ShapeRule::Recurrent, StepsRule::Recurrent),
    row("Gather", Onnx, 2, ShapeRule::Gather, StepsRule::Gather),
    row("GatherElements", Onnx, 2, ShapeRule::GatherElements, StepsRule::Elements),
    row("Gelu", Both, 1, ShapeRule::Each, StepsRule::ElementWise),
    row("Gemm", Onnx, 2, ShapeRule::Gemm, StepsRule::Gemm),
    row("GlobalAveragePool", Onnx, 1, ShapeRule::GlobalPool, StepsRule::GlobalPool),
    row("GlobalLpPool", Onnx, 1, ShapeRule::GlobalPool, StepsRule::GlobalPool),
    row("GlobalMaxPool", Onnx, 1, ShapeRule::GlobalPool, StepsRule::GlobalPool),
    row("Greater", Onnx, 1, ShapeRule::Broadcast, StepsRule::ElementWise),
    row("GreaterOrEqual", Onnx, 1, ShapeRule::Broadcast, StepsRule::ElementWise),
    row("GroupNormalization", Onnx, 1, ShapeRule::Same, StepsRule::GlobalNormalization),
    row("GroupQueryAttention", Microsoft, 1, ShapeRule::Open, StepsRule::Attention),
    row("HardSigmoid", Onnx, 1, ShapeRule::Each, StepsRule::ElementWise),
    row("HardSwish", Onnx, 1, ShapeRule::Each, StepsRule::ElementWise),
    row("Hardmax", Onnx, 1, ShapeRule::Same, StepsRule::Softmax),
    row("Identity", Onnx, 1, ShapeRule::Each, StepsRule::ElementWise),
    row("If", Onnx, 1, ShapeRule::If, StepsRule::If),
    row("InstanceNormalization", Onnx, 1, ShapeRule::Same, StepsRule::GlobalNormalization),
    row("IsInf", Onnx, 1, ShapeRule::Each, StepsRule::ElementWise),
    row("IsNaN", Onnx, 1, ShapeRule::Each, StepsRule::ElementWise),
    row("LRN", Onnx, 1, ShapeRule::Same, StepsRule::Unknown),
    row("LSTM", Onnx, 1, ShapeRule::Recurrent, StepsRule::Recurrent),
    row("LayerNormalization", Onnx, 1, ShapeRule::Same, StepsRule::LayerNormalization),
    row("LeakyRelu", Onnx, 1, ShapeRule::Each, StepsRule::ElementWise),
    row("Less", Onnx, 1, ShapeRule::Broadcast, StepsRule::ElementWise),
    row("LessOrEqual", Onnx, 1, ShapeRule::Broadcast, StepsRule::ElementWise),
    row("Log", Onnx, 1, ShapeRule::Each, StepsRule::ElementWise),
    row("LogSoftmax", Onnx, 1, ShapeRule::Same, StepsRule::Softmax),
    row("Loop", Onnx, 1, ShapeRule::Loop, StepsRule::Loop),
    row("LpNormalization", Onnx, 1, ShapeRule::Same, StepsRule::LpNormalization),
    row("LpPool", Onnx, 1, ShapeRule::Pool, StepsRule::Window),
    row("MatMul", Onnx, 2, ShapeRule::MatMul, StepsRule::MatMul),
    row("MatMulInteger", Onnx, 2, ShapeRule::MatMul, StepsRule::MatMul),
    row("MatMulIntegerToFloat", Microsoft, 2, ShapeRule::MatMulIntegerToFloat, StepsRule::MatMul),
    row("Max", Onnx, 1, ShapeRule::Broadcast, StepsRule::ElementWise),
    row("MaxPool", Onnx, 1, ShapeRule::Pool, StepsRule::Window),
    row("Mean", Onnx, 1, ShapeRule::Broadcast, StepsRule::ElementWise),
    row("MeanVarianceNormalization", Onnx, 1, ShapeRule::Same, StepsRule::MeanVarianceNormalization),
    row("Min", Onnx, 1, ShapeRule::Broadcast, StepsRule::ElementWise),
    row("Mish", Onnx, 1, ShapeRule::Each, StepsRule::ElementWise),
    row("Mod", Onnx, 1, ShapeRule::Broadcast, StepsRule::ElementWise),
    row("Mul", Onnx, 1, ShapeRule::Broadcast, StepsRule::ElementWise),
    row("MultiHeadAttention", Microsoft, 1, ShapeRule::Open, StepsRule::Attention),
    row("Neg", Onnx, 1, ShapeRule::Each, StepsRule::ElementWise),
    row("Not", Onnx, 1, ShapeRule::Each, StepsRule::ElementWise),
    row("OneHot", Onnx, 1, ShapeRule::OneHot, StepsRule::OneHot),
    row("OptionalGetElement", Onnx, 1, ShapeRule::OptionalGetElement, StepsRule::Unknown),
    row("Or", Onnx, 1, ShapeRule::Broadcast, StepsRule::ElementWise),
    row("PRelu", Onnx, 1, ShapeRule::Broadcast, StepsRule::ElementWise),
    row("Pad", Onnx, 1, ShapeRule::Pad, StepsRule::Pad),
    row("Pow", Onnx, 1, ShapeRule::Broadcast, StepsRule::ElementWise),
    row("QLinearAdd", Microsoft, 1, ShapeRule::Broadcast, StepsRule::ElementWise),
    row("QLinearConv", Onnx, 1, ShapeRule::QLinearConv, StepsRule::QLinearConv),
    row("QLinearLeakyRelu", Microsoft, 1, ShapeRule::Each, StepsRule::ElementWise),
    row("QLinearMatMul", Onnx, 1, ShapeRule::QLinearMatMul, StepsRule::QLinearMatMul),
    row("QLinearMul", Microsoft, 1, ShapeRule::Broadcast, StepsRule::ElementWise),
    row("QLinearSigmoid", Microsoft, 1, ShapeRule::Each, StepsRule::ElementWise),
    row("QuantizeLinear", Both, 2, ShapeRule::QuantizeLinear, StepsRule::Quantize),
    row("QuickGelu", Microsoft, 1, ShapeRule::Each, StepsRule::ElementWise),
    row("RMSNormalization", Onnx, 1, ShapeRule::Same, StepsRule::LayerNormalization),
    row("RNN", Onnx, 1, ShapeRule::Recurrent, StepsRule::Recurrent),
    row("Range", Both, 1, ShapeRule::Range, StepsRule::Unknown),
    row("Reciprocal", Onnx, 1, ShapeRule::Each, StepsRule::ElementWise),
    row("ReduceL1", Onnx, 1, ShapeRule::Reduce, StepsRule::Reduce),
    row("ReduceL2", Onnx, 1, ShapeRule::Reduce, StepsRule::Reduce),
    row("ReduceLogSum", Onnx, 1, ShapeRule::Reduce, StepsRule::Reduce),
    row("ReduceLogSumExp", Onnx, 1, ShapeRule::Reduce, StepsRule::Reduce),
    row("ReduceMax", Onnx, 1, ShapeRule::Reduce, StepsRule::Reduce),
    row("ReduceMean", Onnx, 1, ShapeRule::Reduce, StepsRule::Reduce),
    row("ReduceMin", Onnx, 1, ShapeRule::Reduce, StepsRule::Reduce),
    row("ReduceProd", Onnx, 1, ShapeRule::Reduce, StepsRule::Reduce),
    row("ReduceSum", Onnx, 1, ShapeRule::Reduce, StepsRule::Reduce),
    row("ReduceSumSquare", Onnx, 1, ShapeRule::Reduce, StepsRule::Reduce),
    row("Relu", Onnx, 1, ShapeRule::Each, StepsRule::ElementWise),
    row("Reshape", Onnx, 1, ShapeRule::Reshape, StepsRule::Reshape),
    row("Resize", Onnx, 1, ShapeRule::Resize, StepsRule::Resize),
    row("ReverseSequence", Onnx, 1, ShapeRule::Open, StepsRule::ReverseSequence),
    row("Round", Onnx, 1, ShapeRule::Each, StepsRule::ElementWise),
    row("Scan", Onnx, 1, ShapeRule::Scan, StepsRule::Scan),
    row("ScatterElements", Onnx, 2, ShapeRule::Same, StepsRule::Elements),
    row("ScatterND", Onnx, 1, ShapeRule::Same, StepsRule::ScatterND),
    row("Selu", Onnx, 1, ShapeRule::Each, StepsRule::ElementWise),
    row("SequenceEmpty", Onnx, 1, ShapeRule::SequenceEmpty, StepsRule::Unknown),
    row("SequenceInsert", Onnx, 1, ShapeRule::SequenceInsert, StepsRule::Sequence),
    row("Shape", Onnx, 1, ShapeRule::Shape, StepsRule::Size),
    row("Shrink", Onnx, 1, ShapeRule::Each, StepsRule::ElementWise),
    row("Sigmoid", Onnx, 1, ShapeRule::Each, StepsRule::ElementWise),
    row("Sign", Onnx, 1, ShapeRule::Each, StepsRule::ElementWise),
    row("Silu", Onnx, 1, ShapeRule::Each, StepsRule::ElementWise),
    row("SimplifiedLayerNormalization", Onnx, 1, ShapeRule::Same, StepsRule::LayerNormalization),
    row("Sin", Onnx, 1, ShapeRule::Each, StepsRule::ElementWise),
    row("Sinh", Onnx, 1, ShapeRule::Each, StepsRule::ElementWise),
    row("Size", Onnx, 1, ShapeRule::Size, StepsRule::Size),
    row("Slice", Onnx, 1, ShapeRule::Slice, StepsRule::Slice),
    row("Softmax", Onnx, 1, ShapeRule::Same, StepsRule::Softmax),
    row("Softplus", Onnx, 1, ShapeRule::Each, StepsRule::ElementWise),
    row("Softsign", Onnx, 1, ShapeRule::Each, StepsRule::ElementWise),
    row("Split", Onnx, 1, ShapeRule::Split, StepsRule::Split),
    row("Sqrt", Onnx, 1, ShapeRule::Each, StepsRule::ElementWise),
    row("Squeeze", Onnx, 1, ShapeRule::Squeeze, StepsRule::Reshape),
    row("Sub", Onnx, 1, ShapeRule::Broadcast, StepsRule::ElementWise),
    row("Sum", Onnx, 1, ShapeRule::Broadcast, StepsRule::ElementWise),
    row("Swish", Onnx, 1, ShapeRule::Each, StepsRule::ElementWise),
    row("Tan", Onnx, 1, ShapeRule::Each, StepsRule::ElementWise),
    row("Tanh", Onnx, 1, ShapeRule::Each, StepsRule::ElementWise),
    row("ThresholdedRelu", Onnx, 1, ShapeRule::Each, StepsRule::ElementWise),
    row("Tile", Onnx, 2, ShapeRule::Tile, StepsRule::Expand),
    row("TopK", Onnx, 1, ShapeRule::TopK, StepsRule::TopK),
    row("Transpose", Onnx, 1, ShapeRule::Transpose, StepsRule::Transpose),
    row("Unsqueeze", Onnx, 1, ShapeRule::Unsqueeze, StepsRule::Reshape),
    row("Upsample", Onnx, 1, ShapeRule::Resize, StepsRule::Resize),
    row("Where", Onnx, 1, ShapeRule::Broadcast, StepsRule::ElementWise),
    row("Xor", Onnx, 1, ShapeRule::Broadcast, StepsRule::ElementWise),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_are_in_order() {
        assert!(TABLE.is_sorted_by(|a, b| a.name < b.name));
        assert!(TABLE.iter().all(|row| find(row.name).is_some_and(|found| found.name == row.name)));
    }
}
