//! What the tests share: ONNX Runtime, files of their own, and small models.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use ort::environment::Environment;
use stateful_convert::onnx::schema::{
    GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto, ValueInfoProto,
};
use stateful_convert::onnx::{DataType, Dim, write};
use stateful_convert::verify::{Compared, Given, Models, Source, VerifyError, environment, verify};
use stateful_convert::{ConvertError, Converted, Options, StatePair, convert};

/// ONNX Runtime: `ORT_DYLIB_PATH`, or the library of the repository's Python environment.
pub fn runtime() -> &'static Environment {
    static RUNTIME: OnceLock<Environment> = OnceLock::new();
    RUNTIME.get_or_init(|| environment(&library()).unwrap())
}

pub fn library() -> PathBuf {
    if let Some(path) = std::env::var_os("ORT_DYLIB_PATH").filter(|path| !path.is_empty()) {
        return path.into();
    }
    let lib = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.venv/lib");
    let python =
        lib.read_dir().unwrap().map(|entry| entry.unwrap().path()).find(|path| path.join("site-packages").exists());
    let folder = python.unwrap().join("site-packages/onnxruntime/capi");
    let is_library = |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().starts_with("libonnxruntime.so");
    folder.read_dir().unwrap().map(|entry| entry.unwrap().path()).find(is_library).unwrap()
}

/// A folder of one test.
pub fn folder() -> PathBuf {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let name = format!("{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::create_dir_all(&path).unwrap();
    path
}

/// A model of `exports/`.
pub fn export(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/exports").join(format!("{name}.onnx"))
}

/// Converts a model and compares it with the original.
pub fn checked(bytes: Vec<u8>, options: &Options) -> Result<(Converted, Vec<Compared>), ConvertError> {
    let converted = convert(bytes.clone().into(), options)?;
    let compared = compare(&bytes, &converted);
    Ok((converted, compared.unwrap()))
}

/// Compares a converted model with its original.
pub fn compare(original: &[u8], converted: &Converted) -> Result<Vec<Compared>, VerifyError> {
    let models = Models {
        original: Source::Bytes(converted.original.as_deref().unwrap_or(original)),
        converted: Source::Bytes(&converted.model),
        initial_states: converted.initial_states.as_deref().map(Source::Bytes),
    };
    verify(runtime(), &models, &converted.report, &Given::default())
}

/// In chunks of several lengths the answers are the original's. Some processors round a product of few rows otherwise
/// than one of many.
pub fn assert_equal(name: &str, compared: &[Compared]) {
    let chunks: Vec<_> = compared.iter().filter(|compared| !compared.what.starts_with("rows")).collect();
    assert!(chunks.len() >= 3, "{name}: {compared:?}");
    assert!(chunks.iter().all(|compared| compared.largest < 1e-6), "{name}: {compared:?}");
}

/// Why a model isn't converted.
pub fn refusal(bytes: Vec<u8>, options: &Options) -> String {
    convert(bytes.into(), options).unwrap_err().to_string()
}

pub fn pair(input: &str, output: &str) -> StatePair {
    StatePair { input: input.to_owned(), output: output.to_owned() }
}

/// The names of the states' inputs.
pub fn states(converted: &Converted) -> Vec<&str> {
    converted.report.states.iter().map(|state| state.pair.input.as_str()).collect()
}

/// A model in the making.
pub struct Build {
    pub graph: GraphProto,
    random: u64,
}

pub const FLOAT: i32 = DataType::Float as i32;

/// Dimensions from text, as in `batch time 4`.
pub fn dims(text: &str) -> Vec<Dim> {
    let dim = |word: &str| word.parse().map_or_else(|_| Dim::Symbol(word.to_owned()), Dim::Known);
    text.split_whitespace().map(dim).collect()
}

impl Build {
    pub fn new() -> Self {
        Self { graph: GraphProto { name: Some("test".to_owned()), ..GraphProto::default() }, random: 7 }
    }

    pub fn input(mut self, name: &str, shape: &str) -> Self {
        self.graph.input.push(ValueInfoProto::tensor(name, FLOAT, &dims(shape)));
        self
    }

    pub fn typed_input(mut self, name: &str, elem: DataType, shape: &str) -> Self {
        self.graph.input.push(ValueInfoProto::tensor(name, elem.into(), &dims(shape)));
        self
    }

    pub fn output(mut self, name: &str, shape: &str) -> Self {
        self.graph.output.push(ValueInfoProto::tensor(name, FLOAT, &dims(shape)));
        self
    }

    pub fn node(mut self, node: NodeProto) -> Self {
        self.graph.node.push(node);
        self
    }

    /// Random weights.
    pub fn weights(mut self, name: &str, shape: &[i64]) -> Self {
        let count = shape.iter().product::<i64>();
        let mut next = || {
            self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (self.random >> 40) as f32 / (1 << 24) as f32 - 0.5
        };
        let values = (0..count).map(|_| next()).collect();
        self.graph.initializer.push(TensorProto {
            name: Some(name.to_owned()),
            data_type: Some(FLOAT),
            dims: shape.to_vec(),
            float_data: values,
            ..TensorProto::default()
        });
        self
    }

    pub fn ints(mut self, name: &str, shape: &[i64], values: &[i64]) -> Self {
        self.graph.initializer.push(stateful_convert::onnx::int64s(name, shape, values));
        self
    }

    pub fn floats(mut self, name: &str, shape: &[i64], values: &[f32]) -> Self {
        self.graph.initializer.push(TensorProto {
            name: Some(name.to_owned()),
            data_type: Some(FLOAT),
            dims: shape.to_vec(),
            float_data: values.to_vec(),
            ..TensorProto::default()
        });
        self
    }

    /// The weights `w`, `r` and `b` of a recurrent layer: 4 features, 3 hidden.
    pub fn recurrent_weights(self, gates: i64) -> Self {
        let (rows, hidden) = (gates * 3, 3);
        self.weights("w", &[1, rows, 4]).weights("r", &[1, rows, hidden]).weights("b", &[1, 2 * rows])
    }

    pub fn bytes(self) -> Vec<u8> {
        self.bytes_of_opset(17)
    }

    pub fn bytes_of_opset(self, version: i64) -> Vec<u8> {
        let set =
            |domain: &str, version| OperatorSetIdProto { domain: Some(domain.to_owned()), version: Some(version) };
        let model = ModelProto {
            ir_version: Some(8),
            opset_import: vec![set("", version), set("com.microsoft", 1)],
            graph: Some(self.graph),
            ..ModelProto::default()
        };
        write(&model)
    }
}

/// A node of ONNX.
pub fn node(op: &str, inputs: &str, outputs: &str) -> NodeProto {
    let names = |text: &str| {
        text.split_whitespace().map(|name| if name == "-" { "" } else { name }.to_owned()).collect::<Vec<_>>()
    };
    let (inputs, outputs) = (names(inputs), names(outputs));
    let name = format!("the {}", op.to_lowercase());
    let inputs: Vec<&str> = inputs.iter().map(String::as_str).collect();
    let outputs: Vec<&str> = outputs.iter().map(String::as_str).collect();
    NodeProto::make(op, &name, &inputs, &outputs)
}

/// An attribute of text.
pub fn with_text(mut node: NodeProto, name: &str, value: &str) -> NodeProto {
    use stateful_convert::onnx::schema::{AttributeProto, attribute_proto::AttributeType};
    node.set(AttributeProto {
        name: Some(name.to_owned()),
        r#type: Some(AttributeType::String.into()),
        s: Some(value.as_bytes().to_vec()),
        ..AttributeProto::default()
    });
    node
}

/// An attribute of a graph.
pub fn with_graph(mut node: NodeProto, name: &str, graph: GraphProto) -> NodeProto {
    use stateful_convert::onnx::schema::{AttributeProto, attribute_proto::AttributeType};
    node.set(AttributeProto {
        name: Some(name.to_owned()),
        r#type: Some(AttributeType::Graph.into()),
        g: Some(graph),
        ..AttributeProto::default()
    });
    node
}
