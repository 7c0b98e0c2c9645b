//! Cuts a signal that comes in chunks into overlapping frames, and keeps the samples that later frames need as a state.
//! Also window functions and the matrices of a Fourier transform, in 64 bits.

use std::f64::consts::TAU;

use super::builder::{Builder, END};
use crate::time::common_divisor;

// Samples in the longest frame: its Fourier transform has 64 MiB.
pub const MOST_SAMPLES: usize = 4096;
/// The input with the new samples.
pub const AUDIO: &str = "audio";
pub const CACHE: &str = "samples_cache";
pub const NEXT_CACHE: &str = "samples_cache_next";
/// The frames, `[batch, frames, frame]`.
pub const FRAMES: &str = "frames";
/// The samples that were kept and the new ones, with those in front of the beginning.
const BUFFER: &str = "buffer";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Beginning {
    /// Nothing: the first frame begins with the first sample.
    Nothing,
    /// So many samples, mirrored, as Kaldi does without `snip_edges`.
    Mirrored(usize),
    Zeros(usize),
}

/// Frames, and how far each begins after the one before, in samples.
#[derive(Clone, Copy, Debug)]
pub struct Framing {
    pub frame: usize,
    pub hop: usize,
}

impl Framing {
    /// Adds the samples of the state and, in front of a sequence's first samples, what is there. The state has any
    /// length, and none at the beginning.
    pub fn join(builder: &mut Builder, audio: &str, beginning: Beginning) -> &'static str {
        builder.input(CACHE, "batch kept");
        let joined = if beginning == Beginning::Nothing { BUFFER } else { "joined" };
        builder.along("Concat", 1, &[CACHE, audio], joined);
        match beginning {
            Beginning::Nothing => {}
            Beginning::Mirrored(samples) => mirror(builder, samples, joined),
            Beginning::Zeros(samples) => fill(builder, samples, joined),
        }
        BUFFER
    }

    /// Keeps the samples from where the next frame begins. Each frame in `signal` begins as far from its start as in
    /// `buffer`.
    pub fn keep(self, builder: &mut Builder, buffer: &str) {
        let hop = builder.ints("hop", &[self.hop as i64]);
        let end = builder.ints("end", &[END]);
        builder.node("Mul", &["frame_count", &hop], "next_frame");
        builder.slice(1, buffer, ("next_frame", &end), NEXT_CACHE);
        builder.output(NEXT_CACHE, "batch kept_next");
    }

    /// Cuts `signal`, `[batch, samples]`, into the frames that it has.
    pub fn cut(self, builder: &mut Builder, signal: &str) {
        let Self { frame, hop } = self;
        let hop_length = builder.ints("hop", &[hop as i64]);
        let overlap = builder.ints("overlap", &[(frame - hop) as i64]);
        let none = builder.ints("none", &[0]);
        builder.length(1, signal, "signal_length");
        builder.node("Sub", &["signal_length", &overlap], "length_after_overlap");
        builder.node("Max", &["length_after_overlap", &none], "length_of_frames");
        builder.node("Div", &["length_of_frames", &hop_length], "frame_count");
        // A frame is gathered from blocks of samples, which costs a fifth of gathering single samples.
        let block = common_divisor(frame as i64, hop as i64) as usize;
        let (first, step) = (builder.int("first", 0), builder.int("step", 1));
        let hop_in_blocks = builder.int("hop_in_blocks", (hop / block) as i64);
        let axis = builder.ints("axis_1", &[1]);
        let places: Vec<i64> = (0..(frame / block) as i64).collect();
        let places = builder.ints_of("places_in_frame", &[1, places.len() as i64], &places);
        builder.node("Squeeze", &["frame_count"], "count");
        builder.node("Range", &[&first, "count", &step], "frame_numbers");
        builder.node("Mul", &["frame_numbers", &hop_in_blocks], "beginnings");
        builder.node("Unsqueeze", &["beginnings", &axis], "beginnings_of_frames");
        builder.node("Add", &["beginnings_of_frames", &places], "places");
        if block == 1 {
            builder.along("Gather", 1, &[signal, "places"], FRAMES);
            return;
        }
        let block_length = builder.ints("block_length", &[block as i64]);
        builder.node("Div", &["signal_length", &block_length], "block_count");
        builder.node("Mul", &["block_count", &block_length], "length_of_blocks");
        builder.slice(1, signal, (&none, "length_of_blocks"), "whole_blocks");
        let shape = builder.ints("shape_of_blocks", &[0, -1, block as i64]);
        builder.node("Reshape", &["whole_blocks", &shape], "blocks");
        builder.along("Gather", 1, &["blocks", "places"], "blocks_of_frames");
        let shape = builder.ints("shape_of_frames", &[0, 0, frame as i64]);
        builder.node("Reshape", &["blocks_of_frames", &shape], FRAMES);
    }
}

/// Puts the first samples of a sequence in front of it, mirrored, as soon as there are enough. Until then the state is
/// shorter than that, and afterwards it isn't: it always has at least the overlap of two frames.
fn mirror(builder: &mut Builder, samples: usize, joined: &str) {
    let wanted = builder.ints("mirrored", &[samples as i64]);
    let none = builder.ints("none", &[0]);
    let (first, step) = (builder.int("first", 0), builder.int("step", 1));
    builder.length(1, CACHE, "kept_length");
    builder.length(1, joined, "joined_length");
    builder.node("Less", &["kept_length", &wanted], "is_not_mirrored");
    builder.node("GreaterOrEqual", &["joined_length", &wanted], "is_long_enough");
    builder.node("And", &["is_not_mirrored", "is_long_enough"], "is_mirrored_now");
    builder.node("Where", &["is_mirrored_now", &wanted, &none], "mirrored_length");
    builder.node("Squeeze", &["mirrored_length"], "mirrored_count");
    // ONNX Runtime 1.31 fuses a Gather of a Range that counts down to -1 into a Slice that takes nothing.
    builder.node("Range", &[&first, "mirrored_count", &step], "mirrored_numbers");
    builder.node("Sub", &["mirrored_count", &step], "farthest");
    builder.node("Sub", &["farthest", "mirrored_numbers"], "mirrored_places");
    builder.along("Gather", 1, &[joined, "mirrored_places"], "mirror_image");
    builder.along("Concat", 1, &["mirror_image", joined], BUFFER);
}

/// Puts zeros in front of a sequence. Then the state is never empty again.
fn fill(builder: &mut Builder, zeros: usize, joined: &str) {
    let wanted = builder.ints("zeros", &[zeros as i64]);
    let none = builder.ints("none", &[0]);
    let rest = builder.ints("no_more_padding", &[0, 0]);
    builder.length(1, CACHE, "kept_length");
    builder.node("Equal", &["kept_length", &none], "is_beginning");
    builder.node("Where", &["is_beginning", &wanted, &none], "zeros_length");
    builder.along("Concat", 0, &[&none, "zeros_length", &rest], "padding");
    builder.node("Pad", &[joined, "padding"], BUFFER);
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Window {
    /// Kaldi's own: a Hann window to the power of 0.85.
    Povey,
    Hamming,
    Hann,
    /// The root of a Hann window. Applied both before and after a spectrum, it weighs like one Hann window.
    SqrtHann,
    Rectangular,
}

impl Window {
    /// The weights of a frame's samples. The cosine of a periodic window is one sample longer than the frame, so that
    /// overlapping frames add up to a constant. A window of features isn't periodic, and ends as it begins.
    pub fn weights(self, length: usize, is_periodic: bool) -> Vec<f64> {
        let period = if is_periodic { length } else { length - 1 };
        let weight = |at: usize| {
            let cosine = (TAU * at as f64 / period as f64).cos();
            let hann = 0.5 - 0.5 * cosine;
            match self {
                Self::Povey => hann.powf(0.85),
                Self::Hamming => 0.54 - 0.46 * cosine,
                Self::Hann => hann,
                Self::SqrtHann => hann.sqrt(),
                Self::Rectangular => 1.0,
            }
        };
        (0..length).map(weight).collect()
    }
}

/// The turns of a Fourier transform: the real and the imaginary part of `exp(-2πi · at / length)`.
fn turns(length: usize) -> Vec<(f64, f64)> {
    // The sine of a half turn is 0, but no floating-point number is exactly π. A bin without an imaginary part must not
    // get a small one.
    let exact = |value: f64| if value.abs() < 1e-15 { 0.0 } else { value };
    let angle = |at: usize| TAU * at as f64 / length as f64;
    (0..length).map(|at| (exact(angle(at).cos()), exact(-angle(at).sin()))).collect()
}

/// Adds the spectrum of windowed frames: the real parts of `bins`, and then their imaginary parts.
pub fn add_spectrum(
    builder: &mut Builder,
    frames: &str,
    window: &[f64],
    (length, bins): (usize, usize),
    spectrum: &str,
) {
    let matrix = transform(window, length, bins);
    // A MatMul takes a third of the time of DFT or STFT in ONNX Runtime on a CPU (512 samples; half for a single
    // frame), and the backend knows how it treats the rows of a batch.
    let matrix = builder.floats("windowed_fourier_transform", &[window.len(), 2 * bins], &matrix);
    builder.node("MatMul", &[frames, &matrix], spectrum);
}

/// The matrix of the Fourier transform of windowed frames. It has a row for each sample, with the real parts of the
/// bins and then their imaginary parts. A frame that is shorter than `length` is followed by zeros.
fn transform(window: &[f64], length: usize, bins: usize) -> Vec<f64> {
    let turns = turns(length);
    let row = |(at, weight): (usize, &f64)| {
        let turn = |bin: usize| turns[at * bin % length];
        let real = (0..bins).map(|bin| turn(bin).0 * weight);
        let imaginary = (0..bins).map(|bin| turn(bin).1 * weight);
        real.chain(imaginary).collect::<Vec<_>>()
    };
    window.iter().enumerate().flat_map(row).collect()
}

/// The inverse for real samples: a row for the real part of each bin, then one for each imaginary part. Samples have
/// the `weights`, and zeros follow them up to `width`.
pub fn inverse(weights: &[f64], width: usize) -> Vec<f64> {
    let length = weights.len();
    let bins = length / 2 + 1;
    let turns = turns(length);
    // Bins in the middle also stand for their mirror images.
    let share = |bin: usize| if bin == 0 || 2 * bin == length { 1.0 } else { 2.0 };
    let row = |row: usize| {
        let (bin, is_imaginary) = (row % bins, row >= bins);
        let sample = |(at, weight): (usize, &f64)| {
            let (real, imaginary) = turns[at * bin % length];
            weight * share(bin) / length as f64 * if is_imaginary { imaginary } else { real }
        };
        let samples: Vec<f64> = weights.iter().enumerate().map(sample).collect();
        samples.into_iter().chain(std::iter::repeat_n(0.0, width - length))
    };
    (0..2 * bins).flat_map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_of_features_end_as_they_begin_and_periodic_ones_add_up() {
        for window in [Window::Povey, Window::Hamming, Window::Hann] {
            let weights = window.weights(25, false);
            assert!((0..25).all(|at| (weights[at] - weights[24 - at]).abs() < 1e-12));
            assert!((weights[12] - 1.0).abs() < 1e-12);
        }
        let weights = Window::SqrtHann.weights(8, true);
        assert!((0..4).all(|at| (weights[at].powi(2) + weights[at + 4].powi(2) - 1.0).abs() < 1e-12));
    }

    #[test]
    fn the_inverse_undoes_the_transform() {
        for length in [7, 8] {
            let ones = vec![1.0; length];
            let (forth, back) = (transform(&ones, length, length / 2 + 1), inverse(&ones, length + 1));
            let columns = 2 * (length / 2 + 1);
            for (from, to) in (0..length).flat_map(|from| (0..=length).map(move |to| (from, to))) {
                let product: f64 = (0..columns).map(|k| forth[from * columns + k] * back[k * (length + 1) + to]).sum();
                let expected = f64::from(from == to);
                assert!((product - expected).abs() < 1e-12, "{length}: {from} to {to}: {product}");
            }
        }
    }
}
