//! The short-time Fourier transform and its inverse, for models that take spectra.

use std::num::NonZeroUsize;

use super::builder::{Builder, END};
use super::framing::{AUDIO, CACHE, FRAMES, Framing, MOST_SAMPLES, NEXT_CACHE, Window, add_spectrum, inverse};
use super::options::{BuiltinError, Options};
use crate::onnx::schema::ModelProto;
use crate::report::{STEPS_MULTIPLE, StepsMultiple};

/// How much smaller the sum of overlapping windows may be at one sample than at another.
const LEAST_OVERLAP: f64 = 0.01;
const OVERLAP: &str = "overlap_cache";
const NEXT_OVERLAP: &str = "overlap_cache_next";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    /// `spectrum`, `[batch, bins, frames, 2]`: real and imaginary parts.
    Complex,
    /// `magnitude` and `phase`, `[batch, frames, bins]`, the phase in radians.
    Polar,
}

struct Transform {
    framing: Framing,
    window: Vec<f64>,
    layout: Layout,
}

/// Frames that overlap at one sample, each with nodes of its own.
const MOST_HOPS: usize = 64;

fn read_framing(options: &mut Options) -> Result<Framing, BuiltinError> {
    let frame = options.int("frame", 512, 4..=MOST_SAMPLES)?;
    let hop = options.int("hop", 256, 1..=MOST_SAMPLES)?;
    Ok(Framing { frame, hop })
}

fn check_framing(options: &Options, Framing { frame, hop }: Framing) -> Result<(), BuiltinError> {
    let (least, most) = (frame.div_ceil(MOST_HOPS), frame - 1);
    if (least..=most).contains(&hop) {
        return Ok(());
    }
    Err(options.wrong("hop", format!("a whole number from {least} to {most} is expected with this frame")))
}

fn read_layout(options: &mut Options) -> Result<Layout, BuiltinError> {
    options.choice("layout", &[("complex", Layout::Complex), ("polar", Layout::Polar)])
}

impl Transform {
    fn read(options: &mut Options) -> Result<Self, BuiltinError> {
        let framing = read_framing(options)?;
        let windows = [
            ("sqrt_hann", Window::SqrtHann),
            ("hann", Window::Hann),
            ("hamming", Window::Hamming),
            ("rectangular", Window::Rectangular),
        ];
        let window = options.choice("window", &windows)?;
        let layout = read_layout(options)?;
        options.finish()?;
        check_framing(options, framing)?;
        let Framing { frame, hop } = framing;
        let made = Self { framing, window: window.weights(frame, true), layout };
        let overlap = made.overlap();
        let largest = overlap.iter().copied().fold(0.0, f64::max);
        if overlap.iter().any(|&sum| sum < LEAST_OVERLAP * largest) {
            let allowed = format!(
                "frames of {frame} samples with this window don't overlap enough at a hop of {hop} to give the samples \
                 back: a smaller hop, or rectangular, is expected"
            );
            return Err(options.wrong("window", allowed));
        }
        Ok(made)
    }

    fn bins(&self) -> usize {
        self.framing.frame / 2 + 1
    }

    /// The sum of the windows at each sample of a hop, where a sample is weighed before and behind the spectrum.
    fn overlap(&self) -> Vec<f64> {
        let hop = self.framing.hop;
        (0..hop).map(|at| self.window.iter().skip(at).step_by(hop).map(|weight| weight * weight).sum()).collect()
    }
}

pub fn stft(options: &mut Options) -> Result<ModelProto, BuiltinError> {
    let made = Transform::read(options)?;
    let (Framing { frame, hop }, bins) = (made.framing, made.bins());
    let mut graph = Builder::new("stft");
    graph.input(AUDIO, "batch samples");
    let kept = frame - hop;
    graph.input(CACHE, &format!("batch {kept}"));
    graph.along("Concat", 1, &[CACHE, AUDIO], "buffer");
    let (from, end) = (graph.ints("kept", &[-(kept as i64)]), graph.ints("end", &[END]));
    graph.slice(1, "buffer", (&from, &end), NEXT_CACHE);
    made.framing.cut(&mut graph, "buffer");
    add_spectrum(&mut graph, FRAMES, &made.window, (frame, bins), "parts");
    match made.layout {
        Layout::Complex => {
            let shape = graph.ints("shape_of_parts", &[0, 0, 2, bins as i64]);
            graph.node("Reshape", &["parts", &shape], "pairs_of_parts");
            graph.transpose(&[0, 3, 1, 2], "pairs_of_parts", "spectrum");
            graph.output("spectrum", &format!("batch {bins} frames 2"));
        }
        Layout::Polar => {
            polar(&mut graph, bins as i64);
            graph.output("magnitude", &format!("batch frames {bins}"));
            graph.output("phase", &format!("batch frames {bins}"));
        }
    }
    graph.output(NEXT_CACHE, &format!("batch {kept}"));
    // The state has a fixed length, so it can't hold a part of a hop.
    let multiple = NonZeroUsize::new(hop).map(|multiple| StepsMultiple { input: AUDIO.to_owned(), axis: 1, multiple });
    let mut model = graph.model(options.described());
    model.set_metadata(STEPS_MULTIPLE, Some(serde_json::json!(multiple.as_slice()).to_string()));
    Ok(model)
}

pub fn istft(options: &mut Options) -> Result<ModelProto, BuiltinError> {
    let made = Transform::read(options)?;
    let (Framing { frame, hop }, bins) = (made.framing, made.bins());
    let mut graph = Builder::new("istft");
    parts(&mut graph, made.layout, bins, false);
    // Where windows overlap more, each counts less, as in torch.istft.
    let overlap = made.overlap();
    let weights: Vec<f64> = made.window.iter().enumerate().map(|(at, weight)| weight / overlap[at % hop]).collect();
    let hops = frame.div_ceil(hop);
    // Zeros fill up the last hop, so that a frame can be cut into whole hops and each is added by itself.
    let matrix = inverse(&weights, hops * hop);
    let matrix = graph.floats("windowed_inverse_transform", &[2 * bins, hops * hop], &matrix);
    graph.node("MatMul", &["parts", &matrix], FRAMES);
    add_overlap(&mut graph, FRAMES, hops as i64, hop as i64);
    Ok(graph.model(options.described()))
}

pub fn irfft(options: &mut Options) -> Result<ModelProto, BuiltinError> {
    let frame = options.int("frame", 512, 4..=MOST_SAMPLES)?;
    let layout = read_layout(options)?;
    let has_mask = options.flag("mask", false)?;
    options.finish()?;
    if has_mask && layout != Layout::Polar {
        return Err(options.wrong("mask", "true needs layout=polar, where it is multiplied with magnitudes"));
    }
    let bins = frame / 2 + 1;
    let mut graph = Builder::new("irfft");
    parts(&mut graph, layout, bins, has_mask);
    let matrix = graph.floats("inverse_transform", &[2 * bins, frame], &inverse(&vec![1.0; frame], frame));
    graph.node("MatMul", &["parts", &matrix], FRAMES);
    graph.output(FRAMES, &format!("batch frames {frame}"));
    Ok(graph.model(options.described()))
}

pub fn overlap_add(options: &mut Options) -> Result<ModelProto, BuiltinError> {
    let framing = read_framing(options)?;
    options.finish()?;
    check_framing(options, framing)?;
    let Framing { frame, hop } = framing;
    let mut graph = Builder::new("overlap_add");
    graph.input(FRAMES, &format!("batch frames {frame}"));
    let hops = frame.div_ceil(hop);
    let whole = if frame == hops * hop {
        FRAMES
    } else {
        let padding = graph.ints("padding_of_frames", &[0, 0, 0, 0, 0, (hops * hop - frame) as i64]);
        graph.node("Pad", &[FRAMES, &padding], "whole_hops");
        "whole_hops"
    };
    add_overlap(&mut graph, whole, hops as i64, hop as i64);
    Ok(graph.model(options.described()))
}

/// Real and imaginary parts of a spectrum that is an input: `parts`, `[batch, frames, 2 · bins]`. A mask, one more
/// input, is multiplied with magnitudes.
fn parts(graph: &mut Builder, layout: Layout, bins: usize, has_mask: bool) {
    let by_frames = format!("batch frames {bins}");
    match layout {
        Layout::Complex => {
            graph.input("spectrum", &format!("batch {bins} frames 2"));
            graph.transpose(&[0, 2, 3, 1], "spectrum", "pairs_of_parts");
            let shape = graph.ints("shape_of_parts", &[0, 0, 2 * bins as i64]);
            graph.node("Reshape", &["pairs_of_parts", &shape], "parts");
        }
        Layout::Polar => {
            graph.input("magnitude", &by_frames);
            graph.input("phase", &by_frames);
            let mut magnitude = "magnitude";
            if has_mask {
                graph.input("mask", &by_frames);
                graph.node("Mul", &[magnitude, "mask"], "masked_magnitude");
                magnitude = "masked_magnitude";
            }
            graph.node("Cos", &["phase"], "cosines");
            graph.node("Sin", &["phase"], "sines");
            graph.node("Mul", &[magnitude, "cosines"], "real");
            graph.node("Mul", &[magnitude, "sines"], "imaginary");
            graph.along("Concat", 2, &["real", "imaginary"], "parts");
        }
    }
}

fn polar(graph: &mut Builder, bins: i64) {
    let [none, real_end, end] = [("none", 0), ("bins", bins), ("end", END)].map(|(name, at)| graph.ints(name, &[at]));
    graph.slice(2, "parts", (&none, &real_end), "real");
    graph.slice(2, "parts", (&real_end, &end), "imaginary");
    graph.node("Mul", &["real", "real"], "real_squares");
    graph.node("Mul", &["imaginary", "imaginary"], "imaginary_squares");
    graph.node("Add", &["real_squares", "imaginary_squares"], "power");
    graph.node("Sqrt", &["power"], "magnitude");
    // ONNX has no atan2: the arctangent is right where the real part is positive, and half a turn away where it is
    // negative.
    use std::f64::consts::{FRAC_PI_2, PI};
    let constants = [("zero", 0.0), ("unit", 1.0), ("half_turn", PI), ("half_turn_back", -PI), ("quarter", FRAC_PI_2)];
    let [zero, unit, half_turn, half_turn_back, quarter] = constants.map(|(name, value)| graph.float(name, value));
    graph.node("Equal", &["real", &zero], "is_upright");
    graph.node("Where", &["is_upright", &unit, "real"], "divisor");
    graph.node("Div", &["imaginary", "divisor"], "slope");
    graph.node("Atan", &["slope"], "arctangent");
    graph.node("Less", &["imaginary", &zero], "is_below");
    graph.node("Where", &["is_below", &half_turn_back, &half_turn], "half_turns");
    graph.node("Less", &["real", &zero], "is_behind");
    graph.node("Where", &["is_behind", "half_turns", &zero], "turns");
    graph.node("Add", &["arctangent", "turns"], "angle");
    graph.node("Sign", &["imaginary"], "side");
    graph.node("Mul", &["side", &quarter], "upright_angle");
    graph.node("Where", &["is_upright", "upright_angle", "angle"], "phase");
}

/// Adds up frames, `[batch, frames, hops · hop]`, where they overlap. The sums that later frames still add to are a
/// state.
fn add_overlap(graph: &mut Builder, frames: &str, hops: i64, hop: i64) {
    graph.input(OVERLAP, &format!("batch {} {hop}", hops - 1));
    graph.length(1, frames, "frame_count");
    let (before, behind) = (graph.ints("no_padding", &[0, 0, 0, 0]), graph.ints("none", &[0]));
    // The last frame reaches hops - 1 hops further than its own, so there are that many more sums than frames.
    graph.along("Concat", 0, &[&before, "frame_count", &behind], "padding");
    graph.node("Pad", &[OVERLAP, "padding"], "earlier_sums");
    let mut sums = vec!["earlier_sums".to_owned()];
    for part in 0..hops {
        let [from, to] = [part, part + 1].map(|hops| graph.ints(&format!("sample_{}", hops * hop), &[hops * hop]));
        let (samples, sum) = (format!("hop_{part}_of_frames"), format!("sum_{part}"));
        graph.slice(2, frames, (&from, &to), &samples);
        let padding = graph.ints(&format!("padding_{part}"), &[0, part, 0, 0, hops - 1 - part, 0]);
        graph.node("Pad", &[&samples, &padding], &sum);
        sums.push(sum);
    }
    graph.node("Sum", &sums.iter().map(String::as_str).collect::<Vec<_>>(), "sums");
    let end = graph.ints("end", &[END]);
    graph.slice(1, "sums", (&behind, "frame_count"), "complete_sums");
    graph.slice(1, "sums", ("frame_count", &end), NEXT_OVERLAP);
    let shape = graph.ints("shape_of_samples", &[0, -1]);
    graph.node("Reshape", &["complete_sums", &shape], AUDIO);
    graph.output(AUDIO, "batch samples");
    graph.output(NEXT_OVERLAP, &format!("batch {} {hop}", hops - 1));
}
