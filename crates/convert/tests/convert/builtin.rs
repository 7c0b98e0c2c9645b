//! Built-in graphs: any chunks give what the whole gives, and that is what Kaldi, NeMo and a plain Fourier transform
//! give.

use std::collections::HashMap;
use std::f64::consts::{PI, TAU};
use std::path::Path;

use ort::session::{Session, SessionInputValue};
use ort::value::Tensor;
use stateful_convert::onnx::schema::{GraphProto, ValueInfoProto};
use stateful_convert::onnx::{Dim, write};
use stateful_convert::{builtin, recordings};

use crate::common::runtime;

/// Kaldi-native-fbank rounds to 32 bits, which makes most of the difference from it.
const KALDI_BOUND: f64 = 3e-4;

/// NeMo's are those of its definition in 64 bits.
const NEMO_BOUND: f64 = 1e-4;

/// An array of floats.
#[derive(Clone, Debug, PartialEq)]
struct Array {
    dims: Vec<usize>,
    values: Vec<f32>,
}

impl Array {
    /// Entries along an axis.
    fn part(&self, axis: usize, start: usize, end: usize) -> Self {
        let inner: usize = self.dims[axis + 1..].iter().product();
        let block = self.dims[axis] * inner;
        let mut dims = self.dims.clone();
        dims[axis] = end - start;
        let blocks = self.values.chunks(block.max(1));
        Self { dims, values: blocks.flat_map(|block| &block[start * inner..end * inner]).copied().collect() }
    }

    /// Arrays joined along an axis.
    fn joined(parts: &[Self], axis: usize) -> Self {
        let mut dims = parts[0].dims.clone();
        dims[axis] = parts.iter().map(|part| part.dims[axis]).sum();
        let outer: usize = dims[..axis].iter().product();
        let mut values = Vec::new();
        for block in 0..outer {
            for part in parts {
                let size = part.values.len() / outer;
                values.extend_from_slice(&part.values[block * size..(block + 1) * size]);
            }
        }
        Self { dims, values }
    }

    fn largest_difference(&self, other: &Self) -> f64 {
        assert_eq!(self.dims, other.dims);
        let pairs = self.values.iter().zip(&other.values);
        pairs.map(|(a, b)| f64::from((a - b).abs())).fold(0.0, f64::max)
    }
}

/// A built-in graph in ONNX Runtime.
struct Graph {
    session: Session,
    graph: GraphProto,
}

type Arrays = HashMap<String, Array>;

fn is_cache(value: &ValueInfoProto) -> bool {
    value.name().contains("_cache")
}

impl Graph {
    fn new(name: &str, options: &[&str]) -> Self {
        let model = builtin(name, options).unwrap();
        let builder = Session::builder(runtime()).unwrap();
        let session = builder.with_intra_threads(1).unwrap().commit_from_memory(&write(&model)).unwrap();
        Self { session, graph: model.graph.unwrap() }
    }

    /// The states at the beginning: zeros, and none along an open axis.
    fn states(&self, rows: usize) -> Arrays {
        let dim = |dim: &Dim| if let Dim::Known(length) = dim { *length as usize } else { 0 };
        let state = |value: &ValueInfoProto| {
            let mut dims: Vec<usize> = value.dims().unwrap().iter().map(dim).collect();
            dims[0] = rows;
            let count = dims.iter().product();
            (value.name().to_owned(), Array { dims, values: vec![0.0; count] })
        };
        self.graph.input.iter().filter(|value| is_cache(value)).map(state).collect()
    }

    /// The outputs of a chunk. The states get their next values.
    fn run(&mut self, states: &mut Arrays, inputs: &Arrays) -> Arrays {
        let feeds: Vec<(String, SessionInputValue)> = states
            .iter()
            .chain(inputs)
            .map(|(name, array)| {
                let tensor = Tensor::from_array((array.dims.clone(), array.values.clone())).unwrap();
                (name.clone(), SessionInputValue::from(tensor))
            })
            .collect();
        let made = self.session.run(feeds).unwrap();
        let mut outputs = Arrays::new();
        for value in &self.graph.output {
            let (shape, values) = made[value.name()].try_extract_tensor::<f32>().unwrap();
            let dims = shape.iter().map(|&dim| dim as usize).collect();
            let array = Array { dims, values: values.to_vec() };
            match value.name().strip_suffix("_next") {
                Some(state) => _ = states.insert(state.to_owned(), array),
                None => _ = outputs.insert(value.name().to_owned(), array),
            }
        }
        outputs
    }

    /// The axis of an input or output that has the time.
    fn time(&self, name: &str) -> usize {
        let values = self.graph.input.iter().chain(&self.graph.output);
        let dims = values.filter(|value| value.name() == name).find_map(ValueInfoProto::dims).unwrap();
        let is_time = |dim: &Dim| matches!(dim, Dim::Symbol(name) if name == "samples" || name == "frames");
        dims.iter().position(is_time).unwrap()
    }

    /// The outputs of inputs that come in chunks of these lengths, as often as it takes.
    fn stepped(&mut self, inputs: &Arrays, mut length: impl FnMut() -> usize) -> Arrays {
        let (name, first) = inputs.iter().next().unwrap();
        let (total, rows) = (first.dims[self.time(name)], first.dims[0]);
        let mut states = self.states(rows);
        let mut made: HashMap<String, Vec<Array>> = HashMap::new();
        let mut start = 0;
        while start < total {
            let end = (start + length()).min(total);
            let chunk = |(name, array): (&String, &Array)| (name.clone(), array.part(self.time(name), start, end));
            let chunk = inputs.iter().map(chunk).collect();
            for (name, array) in self.run(&mut states, &chunk) {
                made.entry(name).or_default().push(array);
            }
            start = end;
        }
        made.into_iter().map(|(name, parts)| (name.clone(), Array::joined(&parts, self.time(&name)))).collect()
    }

    fn whole(&mut self, inputs: &Arrays) -> Arrays {
        self.stepped(inputs, || usize::MAX / 2)
    }
}

fn only(name: &str, array: Array) -> Arrays {
    HashMap::from([(name.to_owned(), array)])
}

/// Numbers that look random and are the same each time.
fn random(seed: u64) -> impl FnMut(usize) -> usize {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    move |below| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 33) as usize % below
    }
}

/// The recording of the repository, between -1 and 1: 16 kHz, 16 bits, one channel.
fn speech() -> Array {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/speech.wav");
    let bytes = std::fs::read(file).unwrap();
    let data = bytes.windows(4).position(|window| window == b"data").unwrap() + 8;
    let samples = bytes[data..].as_chunks::<2>().0.iter();
    let values: Vec<f32> = samples.map(|&sample| f32::from(i16::from_le_bytes(sample)) / 32768.0).collect();
    Array { dims: vec![1, values.len()], values }
}

/// Rows from different places of the recording.
fn rows(count: usize, length: usize) -> Array {
    let speech = speech();
    let row = |row: usize| speech.part(1, row * 150_000, row * 150_000 + length);
    Array::joined(&(0..count).map(row).collect::<Vec<_>>(), 0)
}

/// The committed frames, by options.
fn references() -> Vec<(String, Array)> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/features/reference.npz");
    let read = recordings::read(&file).unwrap().into_iter().map(|recording| {
        let values = recording.values.bytes.as_chunks::<4>().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect();
        let dims = recording.values.dims.iter().map(|&dim| dim as usize).collect();
        (recording.input, Array { dims, values })
    });
    read.collect()
}

/// Each committed frame is this much later.
const EVERY: usize = 50;

#[test]
fn features_of_a_recording_in_random_chunks_are_those_of_kaldi_and_nemo() {
    let audio = only("audio", speech());
    let references = references();
    assert_eq!(references.len(), 7);
    for (name, reference) in references {
        let (kind, options) = name.split_once(' ').unwrap_or((&name, ""));
        let (kind, bound) = if kind == "kaldi" { ("fbank:kaldi", KALDI_BOUND) } else { ("mel:nemo", NEMO_BOUND) };
        let mut graph = Graph::new(kind, &options.split_whitespace().collect::<Vec<_>>());
        let mut next = random(1);
        let features = graph.stepped(&audio, || next(20_000)).remove("features").unwrap();
        let axis = graph.time("features");
        let frames: Vec<Array> =
            (0..features.dims[axis]).step_by(EVERY).map(|frame| features.part(axis, frame, frame + 1)).collect();
        // NeMo's have the frames last.
        let frames: Vec<Array> =
            frames.into_iter().map(|frame| Array { dims: vec![1, frame.values.len()], ..frame }).collect();
        let difference = Array::joined(&frames, 0).largest_difference(&reference);
        assert!(difference < bound, "{name}: {difference}");
    }
}

#[test]
fn features_do_not_depend_on_the_chunks() {
    let variants: [(&str, &[&str]); 8] = [
        ("fbank:kaldi", &[]),
        ("fbank:kaldi", &["sample_frequency=22050", "snip_edges=false"]),
        // Frames that overlap by one sample, and no mirrored ones in front of them.
        ("fbank:kaldi", &["frame_length=10", "frame_shift=9.9375", "snip_edges=false", "num_mel_bins=20"]),
        ("fbank:kaldi", &["snip_edges=false"]),
        ("fbank:kaldi", &["sample_frequency=8000", "frame_shift=12.5", "low_freq=0", "num_mel_bins=20"]),
        // 401 and 160 samples have no common divisor.
        ("fbank:kaldi", &["frame_length=25.0625", "snip_edges=false"]),
        ("mel:nemo", &[]),
        ("mel:nemo", &["frame_length=20", "frame_shift=5", "num_mel_bins=64"]),
    ];
    for (name, options) in variants {
        let mut graph = Graph::new(name, options);
        let audio = only("audio", rows(3, 30_000));
        let whole = graph.whole(&audio);
        for longest in [40, 700, 9000] {
            let mut next = random(longest as u64);
            let stepped = graph.stepped(&audio, || next(longest));
            let difference = whole["features"].largest_difference(&stepped["features"]);
            assert!(difference < 1e-6, "{name} {options:?}: {difference} in chunks below {longest}");
        }
        for row in 0..3 {
            let alone = graph.whole(&only("audio", audio["audio"].part(0, row, row + 1)));
            let difference = whole["features"].part(0, row, row + 1).largest_difference(&alone["features"]);
            assert!(difference < 1e-6, "{name} {options:?}: {difference} in row {row}");
        }
    }
}

#[test]
fn a_chunk_that_completes_no_frame_gives_none() {
    // The first frame ends with sample 400, or with sample 280 if 120 mirrored samples are in front of the first.
    let chunks = [(0, 0, 0), (100, 0, 0), (179, 0, 0), (0, 0, 0), (1, 0, 1), (120, 1, 0), (0, 0, 0), (160, 1, 1)];
    for (is_mirrored, options) in [(false, &["snip_edges=true"]), (true, &["snip_edges=false"])] {
        let mut graph = Graph::new("fbank:kaldi", options);
        let mut states = graph.states(2);
        for (length, frames, mirrored) in chunks {
            let audio = only("audio", Array { dims: vec![2, length], values: vec![0.5; 2 * length] });
            let features = graph.run(&mut states, &audio).remove("features").unwrap();
            let wanted = if is_mirrored { mirrored } else { frames };
            assert_eq!(features.dims, [2, wanted, 80], "{options:?} {length}");
        }
    }
}

/// Options of both transforms, with the frame and the hop.
const TRANSFORMS: [(&[&str], usize, usize); 7] = [
    (&[], 512, 256),
    (&["layout=polar", "frame=512", "hop=128", "window=rectangular"], 512, 128),
    (&["window=hann", "hop=128"], 512, 128),
    (&["window=hann"], 512, 256),
    (&["window=hamming", "frame=320", "hop=160", "layout=polar"], 320, 160),
    // A frame that is no multiple of the hop, and one of an odd length.
    (&["window=hann", "frame=400", "hop=160"], 400, 160),
    (&["window=hamming", "frame=15", "hop=4"], 15, 4),
];

#[test]
fn a_spectrum_gives_back_the_samples_that_it_was_made_of() {
    for (options, frame, hop) in TRANSFORMS {
        let (mut forth, mut back) = (Graph::new("stft", options), Graph::new("istft", options));
        let length = 40_000 / hop * hop;
        let audio = rows(2, length);
        let mut next = random(3);
        let spectra = forth.stepped(&only("audio", audio.clone()), || hop * next(9));
        let whole = forth.whole(&only("audio", audio.clone()));
        for (name, values) in &whole {
            let difference = values.largest_difference(&spectra[name]);
            // A phase may turn around where there is nothing.
            assert!(difference < 1e-5 || name == "phase", "{options:?}: {difference} in {name}");
        }
        let answer = back.stepped(&spectra, || next(9)).remove("audio").unwrap();
        let shift = frame - hop;
        let difference = answer.part(1, shift, length).largest_difference(&audio.part(1, 0, length - shift));
        assert!(difference < 1e-5, "{options:?}: {difference} after {shift} samples");
    }
}

#[test]
fn a_spectrum_is_a_fourier_transform_of_windowed_frames() {
    for (options, frame, hop) in TRANSFORMS {
        let mut graph = Graph::new("stft", options);
        let audio = rows(1, 40 * hop);
        let made = graph.whole(&only("audio", audio.clone()));
        let window = options.iter().find_map(|option| option.strip_prefix("window=")).unwrap_or("sqrt_hann");
        let weight = |at: usize| {
            let hann = (TAU * at as f64 / frame as f64 / 2.0).sin().powi(2);
            match window {
                "sqrt_hann" => hann.sqrt(),
                "hann" => hann,
                "hamming" => 0.54 - 0.46 * (TAU * at as f64 / frame as f64).cos(),
                _ => 1.0,
            }
        };
        let number = 17;
        let sample = |at: usize| {
            let at = (number + 1) * hop + at;
            if at < frame { 0.0 } else { f64::from(audio.values[at - frame]) }
        };
        let bins = frame / 2 + 1;
        for bin in 0..bins {
            let (mut real, mut imaginary) = (0.0, 0.0);
            for at in 0..frame {
                let angle = TAU * (at * bin) as f64 / frame as f64;
                real += weight(at) * sample(at) * angle.cos();
                imaginary -= weight(at) * sample(at) * angle.sin();
            }
            let (real, imaginary): (f64, f64) = (real, imaginary);
            let difference = if let Some(spectrum) = made.get("spectrum") {
                let part = spectrum.part(2, number, number + 1).part(1, bin, bin + 1).values;
                (f64::from(part[0]) - real).abs().max((f64::from(part[1]) - imaginary).abs())
            } else {
                let of = |name: &str| f64::from(made[name].part(1, number, number + 1).values[bin]);
                let (magnitude, phase) = (of("magnitude"), of("phase"));
                assert!(phase.abs() < PI + 1e-6);
                (magnitude * phase.cos() - real).abs().max((magnitude * phase.sin() - imaginary).abs())
            };
            assert!(difference < 1e-4, "{options:?}: {difference} in bin {bin}");
        }
    }
}

#[test]
fn frames_are_transformed_masked_and_added_up() {
    for (frame, hop) in [(512, 128), (400, 160), (9, 2)] {
        let (frames, hops) = (format!("frame={frame}"), format!("hop={hop}"));
        let polar = ["layout=polar", &frames];
        let mut forth = Graph::new("stft", &[polar[0], polar[1], &hops, "window=rectangular"]);
        let mut back = Graph::new("irfft", &[polar[0], polar[1], "mask=true"]);
        let mut sum = Graph::new("overlap_add", &[&frames, &hops]);
        let audio = rows(2, 60 * hop);
        let mut next = random(5);
        let mut spectra = forth.stepped(&only("audio", audio.clone()), || hop * next(9));
        let mask = Array { values: vec![0.5; spectra["phase"].values.len()], ..spectra["phase"].clone() };
        spectra.insert("mask".to_owned(), mask);
        let frames = back.stepped(&spectra, || next(9));
        let made = sum.stepped(&frames, || next(9)).remove("audio").unwrap();
        for row in 0..2 {
            let sample = |at: usize| audio.values[row * 60 * hop + at] * 0.5;
            // A sample that is far from the beginning is in each frame that begins at it or less than a frame earlier.
            for at in frame..60 * hop - frame {
                let begins = |number: usize| (number + 1) * hop;
                let count = (0..60).filter(|&number| begins(number) > at && begins(number) <= at + frame).count();
                let wanted = sample(at) * count as f32;
                let came = made.values[row * 60 * hop + at + frame - hop];
                assert!((came - wanted).abs() < 1e-5, "{frame} {hop}: {came} for {wanted} at {at}");
            }
        }
    }
}

#[test]
fn phases_are_right_in_all_quadrants() {
    let mut graph = Graph::new("stft", &["frame=4", "hop=1", "window=rectangular", "layout=polar"]);
    // The middle bin of four samples is (a - c) - (b - d)i.
    for samples in
        [[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1], [1, 0, 0, 1], [0, 1, 0, 0], [0, 0, 0, 1], [0; 4], [0, 0, 1, 0]]
    {
        let values: Vec<f32> = samples.iter().map(|&sample| sample as f32).collect();
        let [a, b, c, d] = [0, 1, 2, 3].map(|at| f64::from(values[at]));
        let made = graph.whole(&only("audio", Array { dims: vec![1, 4], values }));
        let phase = f64::from(made["phase"].part(1, 3, 4).values[1]);
        assert!((phase - (d - b).atan2(a - c)).abs() < 1e-6, "{samples:?}: {phase}");
    }
}
