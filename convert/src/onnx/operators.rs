//! The operators that the converter knows, one row each.
//!
//! To add an operator, add its row. The compiler names the places where a new rule is missing: [`Shape`] is followed in
//! `infer`, [`Steps`] in `time`.

use Domain::{Both, Microsoft, Onnx};

/// An operator, and the rules that it follows.
#[derive(Clone, Copy, Debug)]
pub struct Operator {
    name: &'static str,
    domain: Domain,
    /// With fewer inputs, a node is malformed.
    pub least_inputs: usize,
    pub shape: Shape,
    pub steps: Steps,
}

/// Whose operator it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Domain {
    Onnx,
    /// Of ONNX Runtime, `com.microsoft`.
    Microsoft,
    Both,
}

/// How the shapes of the outputs follow from the inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
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
pub enum Steps {
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

impl Steps {
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

const fn row(name: &'static str, domain: Domain, least_inputs: usize, shape: Shape, steps: Steps) -> Operator {
    Operator { name, domain, least_inputs, shape, steps }
}

/// In the order of the names, so that they can be searched.
const TABLE: &[Operator] = &[
    row("Abs", Onnx, 1, Shape::Each, Steps::ElementWise),
    row("Acos", Onnx, 1, Shape::Each, Steps::ElementWise),
    row("Acosh", Onnx, 1, Shape::Each, Steps::ElementWise),
    row("Add", Onnx, 1, Shape::Broadcast, Steps::ElementWise),
    row("And", Onnx, 1, Shape::Broadcast, Steps::ElementWise),
    row("ArgMax", Onnx, 1, Shape::ArgReduce, Steps::ArgReduce),
    row("ArgMin", Onnx, 1, Shape::ArgReduce, Steps::ArgReduce),
    row("Asin", Onnx, 1, Shape::Each, Steps::ElementWise),
    row("Asinh", Onnx, 1, Shape::Each, Steps::ElementWise),
    row("Atan", Onnx, 1, Shape::Each, Steps::ElementWise),
    row("Atanh", Onnx, 1, Shape::Each, Steps::ElementWise),
    row("Attention", Both, 1, Shape::Open, Steps::Attention),
    row("AveragePool", Onnx, 1, Shape::Pool, Steps::Window),
    row("BatchNormalization", Onnx, 1, Shape::Same, Steps::BatchNormalization),
    row("BiasGelu", Microsoft, 1, Shape::Broadcast, Steps::ElementWise),
    row("BitShift", Onnx, 1, Shape::Broadcast, Steps::ElementWise),
    row("BitwiseAnd", Onnx, 1, Shape::Broadcast, Steps::ElementWise),
    row("BitwiseNot", Onnx, 1, Shape::Each, Steps::ElementWise),
    row("BitwiseOr", Onnx, 1, Shape::Broadcast, Steps::ElementWise),
    row("BitwiseXor", Onnx, 1, Shape::Broadcast, Steps::ElementWise),
    row("Cast", Onnx, 1, Shape::Each, Steps::ElementWise),
    row("CastLike", Onnx, 1, Shape::Each, Steps::ElementWise),
    row("Ceil", Onnx, 1, Shape::Each, Steps::ElementWise),
    row("Celu", Onnx, 1, Shape::Each, Steps::ElementWise),
    row("Clip", Onnx, 1, Shape::Each, Steps::ElementWise),
    row("Concat", Onnx, 1, Shape::Concat, Steps::Concat),
    row("ConcatFromSequence", Onnx, 1, Shape::ConcatFromSequence, Steps::Unknown),
    row("Constant", Onnx, 1, Shape::Constant, Steps::Unknown),
    row("ConstantOfShape", Onnx, 1, Shape::ConstantOfShape, Steps::Unknown),
    row("Conv", Onnx, 2, Shape::Conv, Steps::Window),
    row("ConvInteger", Onnx, 2, Shape::Conv, Steps::Window),
    row("ConvTranspose", Onnx, 2, Shape::ConvTranspose, Steps::ConvTranspose),
    row("Cos", Onnx, 1, Shape::Each, Steps::ElementWise),
    row("Cosh", Onnx, 1, Shape::Each, Steps::ElementWise),
    row("CumSum", Onnx, 2, Shape::Same, Steps::CumSum),
    row("DequantizeLinear", Both, 2, Shape::DequantizeLinear, Steps::Quantize),
    row("Div", Onnx, 1, Shape::Broadcast, Steps::ElementWise),
    row("Dropout", Onnx, 1, Shape::Each, Steps::ElementWise),
    row("DynamicQuantizeLSTM", Microsoft, 1, Shape::Recurrent, Steps::Recurrent),
    row("DynamicQuantizeLinear", Onnx, 1, Shape::DynamicQuantizeLinear, Steps::DynamicQuantizeLinear),
    row("DynamicQuantizeMatMul", Microsoft, 2, Shape::MatMul, Steps::DynamicQuantizeMatMul),
    row("Einsum", Onnx, 1, Shape::Einsum, Steps::Einsum),
    row("Elu", Onnx, 1, Shape::Each, Steps::ElementWise),
    row("Equal", Onnx, 1, Shape::Broadcast, Steps::ElementWise),
    row("Erf", Onnx, 1, Shape::Each, Steps::ElementWise),
    row("Exp", Onnx, 1, Shape::Each, Steps::ElementWise),
    row("Expand", Onnx, 2, Shape::Expand, Steps::Expand),
    row("FastGelu", Microsoft, 1, Shape::Each, Steps::ElementWise),
    row("Flatten", Onnx, 1, Shape::Flatten, Steps::Reshape),
    row("Floor", Onnx, 1, Shape::Each, Steps::ElementWise),
    row("FusedConv", Microsoft, 2, Shape::Conv, Steps::Window),
    row("FusedGemm", Microsoft, 2, Shape::Gemm, Steps::Gemm),
    row("FusedMatMul", Microsoft, 2, Shape::FusedMatMul, Steps::MatMul),
    row("GRU", Onnx, 1, Shape::Recurrent, Steps::Recurrent),
    row("Gather", Onnx, 2, Shape::Gather, Steps::Gather),
    row("GatherElements", Onnx, 2, Shape::GatherElements, Steps::Elements),
    row("Gelu", Both, 1, Shape::Each, Steps::ElementWise),
    row("Gemm", Onnx, 2, Shape::Gemm, Steps::Gemm),
    row("GlobalAveragePool", Onnx, 1, Shape::GlobalPool, Steps::GlobalPool),
    row("GlobalLpPool", Onnx, 1, Shape::GlobalPool, Steps::GlobalPool),
    row("GlobalMaxPool", Onnx, 1, Shape::GlobalPool, Steps::GlobalPool),
    row("Greater", Onnx, 1, Shape::Broadcast, Steps::ElementWise),
    row("GreaterOrEqual", Onnx, 1, Shape::Broadcast, Steps::ElementWise),
    row("GroupNormalization", Onnx, 1, Shape::Same, Steps::GlobalNormalization),
    row("GroupQueryAttention", Microsoft, 1, Shape::Open, Steps::Attention),
    row("HardSigmoid", Onnx, 1, Shape::Each, Steps::ElementWise),
    row("HardSwish", Onnx, 1, Shape::Each, Steps::ElementWise),
    row("Hardmax", Onnx, 1, Shape::Same, Steps::Softmax),
    row("Identity", Onnx, 1, Shape::Each, Steps::ElementWise),
    row("If", Onnx, 1, Shape::If, Steps::If),
    row("InstanceNormalization", Onnx, 1, Shape::Same, Steps::GlobalNormalization),
    row("IsInf", Onnx, 1, Shape::Each, Steps::ElementWise),
    row("IsNaN", Onnx, 1, Shape::Each, Steps::ElementWise),
    row("LRN", Onnx, 1, Shape::Same, Steps::Unknown),
    row("LSTM", Onnx, 1, Shape::Recurrent, Steps::Recurrent),
    row("LayerNormalization", Onnx, 1, Shape::Same, Steps::LayerNormalization),
    row("LeakyRelu", Onnx, 1, Shape::Each, Steps::ElementWise),
    row("Less", Onnx, 1, Shape::Broadcast, Steps::ElementWise),
    row("LessOrEqual", Onnx, 1, Shape::Broadcast, Steps::ElementWise),
    row("Log", Onnx, 1, Shape::Each, Steps::ElementWise),
    row("LogSoftmax", Onnx, 1, Shape::Same, Steps::Softmax),
    row("Loop", Onnx, 1, Shape::Loop, Steps::Loop),
    row("LpNormalization", Onnx, 1, Shape::Same, Steps::LpNormalization),
    row("LpPool", Onnx, 1, Shape::Pool, Steps::Window),
    row("MatMul", Onnx, 2, Shape::MatMul, Steps::MatMul),
    row("MatMulInteger", Onnx, 2, Shape::MatMul, Steps::MatMul),
    row("MatMulIntegerToFloat", Microsoft, 2, Shape::MatMulIntegerToFloat, Steps::MatMul),
    row("Max", Onnx, 1, Shape::Broadcast, Steps::ElementWise),
    row("MaxPool", Onnx, 1, Shape::Pool, Steps::Window),
    row("Mean", Onnx, 1, Shape::Broadcast, Steps::ElementWise),
    row("MeanVarianceNormalization", Onnx, 1, Shape::Same, Steps::MeanVarianceNormalization),
    row("Min", Onnx, 1, Shape::Broadcast, Steps::ElementWise),
    row("Mish", Onnx, 1, Shape::Each, Steps::ElementWise),
    row("Mod", Onnx, 1, Shape::Broadcast, Steps::ElementWise),
    row("Mul", Onnx, 1, Shape::Broadcast, Steps::ElementWise),
    row("MultiHeadAttention", Microsoft, 1, Shape::Open, Steps::Attention),
    row("Neg", Onnx, 1, Shape::Each, Steps::ElementWise),
    row("Not", Onnx, 1, Shape::Each, Steps::ElementWise),
    row("OneHot", Onnx, 1, Shape::OneHot, Steps::OneHot),
    row("OptionalGetElement", Onnx, 1, Shape::OptionalGetElement, Steps::Unknown),
    row("Or", Onnx, 1, Shape::Broadcast, Steps::ElementWise),
    row("PRelu", Onnx, 1, Shape::Broadcast, Steps::ElementWise),
    row("Pad", Onnx, 1, Shape::Pad, Steps::Pad),
    row("Pow", Onnx, 1, Shape::Broadcast, Steps::ElementWise),
    row("QLinearAdd", Microsoft, 1, Shape::Broadcast, Steps::ElementWise),
    row("QLinearConv", Onnx, 1, Shape::QLinearConv, Steps::QLinearConv),
    row("QLinearLeakyRelu", Microsoft, 1, Shape::Each, Steps::ElementWise),
    row("QLinearMatMul", Onnx, 1, Shape::QLinearMatMul, Steps::QLinearMatMul),
    row("QLinearMul", Microsoft, 1, Shape::Broadcast, Steps::ElementWise),
    row("QLinearSigmoid", Microsoft, 1, Shape::Each, Steps::ElementWise),
    row("QuantizeLinear", Both, 2, Shape::QuantizeLinear, Steps::Quantize),
    row("QuickGelu", Microsoft, 1, Shape::Each, Steps::ElementWise),
    row("RMSNormalization", Onnx, 1, Shape::Same, Steps::LayerNormalization),
    row("RNN", Onnx, 1, Shape::Recurrent, Steps::Recurrent),
    row("Range", Both, 1, Shape::Range, Steps::Unknown),
    row("Reciprocal", Onnx, 1, Shape::Each, Steps::ElementWise),
    row("ReduceL1", Onnx, 1, Shape::Reduce, Steps::Reduce),
    row("ReduceL2", Onnx, 1, Shape::Reduce, Steps::Reduce),
    row("ReduceLogSum", Onnx, 1, Shape::Reduce, Steps::Reduce),
    row("ReduceLogSumExp", Onnx, 1, Shape::Reduce, Steps::Reduce),
    row("ReduceMax", Onnx, 1, Shape::Reduce, Steps::Reduce),
    row("ReduceMean", Onnx, 1, Shape::Reduce, Steps::Reduce),
    row("ReduceMin", Onnx, 1, Shape::Reduce, Steps::Reduce),
    row("ReduceProd", Onnx, 1, Shape::Reduce, Steps::Reduce),
    row("ReduceSum", Onnx, 1, Shape::Reduce, Steps::Reduce),
    row("ReduceSumSquare", Onnx, 1, Shape::Reduce, Steps::Reduce),
    row("Relu", Onnx, 1, Shape::Each, Steps::ElementWise),
    row("Reshape", Onnx, 1, Shape::Reshape, Steps::Reshape),
    row("Resize", Onnx, 1, Shape::Resize, Steps::Resize),
    row("ReverseSequence", Onnx, 1, Shape::Open, Steps::ReverseSequence),
    row("Round", Onnx, 1, Shape::Each, Steps::ElementWise),
    row("Scan", Onnx, 1, Shape::Scan, Steps::Scan),
    row("ScatterElements", Onnx, 2, Shape::Same, Steps::Elements),
    row("ScatterND", Onnx, 1, Shape::Same, Steps::ScatterND),
    row("Selu", Onnx, 1, Shape::Each, Steps::ElementWise),
    row("SequenceEmpty", Onnx, 1, Shape::SequenceEmpty, Steps::Unknown),
    row("SequenceInsert", Onnx, 1, Shape::SequenceInsert, Steps::Sequence),
    row("Shape", Onnx, 1, Shape::Shape, Steps::Size),
    row("Shrink", Onnx, 1, Shape::Each, Steps::ElementWise),
    row("Sigmoid", Onnx, 1, Shape::Each, Steps::ElementWise),
    row("Sign", Onnx, 1, Shape::Each, Steps::ElementWise),
    row("Silu", Onnx, 1, Shape::Each, Steps::ElementWise),
    row("SimplifiedLayerNormalization", Onnx, 1, Shape::Same, Steps::LayerNormalization),
    row("Sin", Onnx, 1, Shape::Each, Steps::ElementWise),
    row("Sinh", Onnx, 1, Shape::Each, Steps::ElementWise),
    row("Size", Onnx, 1, Shape::Size, Steps::Size),
    row("Slice", Onnx, 1, Shape::Slice, Steps::Slice),
    row("Softmax", Onnx, 1, Shape::Same, Steps::Softmax),
    row("Softplus", Onnx, 1, Shape::Each, Steps::ElementWise),
    row("Softsign", Onnx, 1, Shape::Each, Steps::ElementWise),
    row("Split", Onnx, 1, Shape::Split, Steps::Split),
    row("Sqrt", Onnx, 1, Shape::Each, Steps::ElementWise),
    row("Squeeze", Onnx, 1, Shape::Squeeze, Steps::Reshape),
    row("Sub", Onnx, 1, Shape::Broadcast, Steps::ElementWise),
    row("Sum", Onnx, 1, Shape::Broadcast, Steps::ElementWise),
    row("Swish", Onnx, 1, Shape::Each, Steps::ElementWise),
    row("Tan", Onnx, 1, Shape::Each, Steps::ElementWise),
    row("Tanh", Onnx, 1, Shape::Each, Steps::ElementWise),
    row("ThresholdedRelu", Onnx, 1, Shape::Each, Steps::ElementWise),
    row("Tile", Onnx, 2, Shape::Tile, Steps::Expand),
    row("TopK", Onnx, 1, Shape::TopK, Steps::TopK),
    row("Transpose", Onnx, 1, Shape::Transpose, Steps::Transpose),
    row("Unsqueeze", Onnx, 1, Shape::Unsqueeze, Steps::Reshape),
    row("Upsample", Onnx, 1, Shape::Resize, Steps::Resize),
    row("Where", Onnx, 1, Shape::Broadcast, Steps::ElementWise),
    row("Xor", Onnx, 1, Shape::Broadcast, Steps::ElementWise),
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
