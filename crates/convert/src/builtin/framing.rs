//! Cuts a signal that comes in chunks into frames that overlap. The samples that later frames need are a state.

use super::builder::{Builder, END};

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
    /// Adds the samples of the state and, in front of a sequence's first samples, what is there. The state has any length,
    /// and none at the beginning.
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

    /// Keeps the samples from where the next frame begins. Each frame in `signal` begins as far from its start as in `buffer`.
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
        let block = common_divisor(frame, hop);
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

const fn common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { common_divisor(b, a % b) }
}
