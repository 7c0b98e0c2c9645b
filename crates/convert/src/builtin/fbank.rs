//! Log mel filter banks of speech, as recognisers take them: Kaldi's, and those of NeMo's streaming models.

use super::builder::{Builder, END};
use super::framing::{AUDIO, Beginning, FRAMES, Framing, MOST_SAMPLES, Window, add_spectrum};
use super::options::{BuiltinError, Options};
use crate::onnx::schema::ModelProto;

pub const FEATURES: &str = "features";
/// What Kaldi adds to no energy: the smallest step of a 32-bit float at 1.
const KALDI_FLOOR: f64 = 1.192_092_9e-7;
/// What NeMo adds to each energy, 2^-24.
const NEMO_GUARD: f64 = 1.0 / 16_777_216.0;
const NOT_REPEATABLE: &str = "noise would give other features each time";

struct Bank {
    sample_hz: f64,
    framing: Framing,
    preemphasis: f64,
    window: Vec<f64>,
    mel: MelBank,
    scale: f64,
    /// Samples of frames that aren't complete are kept for the next request.
    has_state: bool,
}

impl Bank {
    fn fft_length(&self) -> usize {
        self.framing.frame.next_power_of_two()
    }

    /// The bins that triangles may have. Kaldi's and NeMo's end below the highest frequency of the spectrum, where a
    /// triangle has no weight.
    fn bins(&self) -> usize {
        self.fft_length() / 2
    }

    fn bin_hz(&self) -> f64 {
        self.sample_hz / self.fft_length() as f64
    }

    /// The samples, as large as the recogniser knows them.
    fn scaled(&self, builder: &mut Builder) -> &'static str {
        builder.input(AUDIO, "batch samples");
        if self.scale == 1.0 {
            return AUDIO;
        }
        let scale = builder.float("scale", self.scale);
        builder.node("Mul", &[AUDIO, &scale], "scaled_audio");
        "scaled_audio"
    }

    /// The energies of the mel bands of `frames`, `[batch, frames, bands]`.
    fn energies(&self, builder: &mut Builder, frames: &str) {
        let bins = self.bins();
        add_spectrum(builder, frames, &self.window, (self.fft_length(), bins), "spectrum");
        builder.node("Mul", &["spectrum", "spectrum"], "squares");
        // The squares of real and imaginary parts are added with equal weights.
        let weights = self.mel.weights(bins, self.bin_hz()).repeat(2);
        let weights = builder.floats("mel_weights", &[2 * bins, self.mel.count], &weights);
        builder.node("MatMul", &["squares", &weights], "mel_energies");
    }
}

pub fn kaldi(options: &mut Options) -> Result<ModelProto, BuiltinError> {
    let bank = read(
        options,
        MelScale::Kaldi,
        &[
            ("povey", Window::Povey),
            ("hamming", Window::Hamming),
            ("hanning", Window::Hann),
            ("rectangular", Window::Rectangular),
        ],
    )?;
    let snips = options.flag("snip_edges", true)?;
    let removes_offset = options.flag("remove_dc_offset", true)?;
    let floor = options.number("mel_floor", KALDI_FLOOR, 1e-30..=1.0)?;
    options.only("dither", "0", NOT_REPEATABLE)?;
    options.finish()?;
    check(options, &bank)?;
    let Framing { frame, hop } = bank.framing;
    let mut graph = Builder::new("fbank_kaldi");
    let audio = bank.scaled(&mut graph);
    let beginning = if snips { Beginning::Nothing } else { Beginning::Mirrored(frame / 2 - hop / 2) };
    if !snips && !bank.has_state {
        let why =
            "only true is possible with snip_edges=false, because the state tells where a sequence begins".to_owned();
        return Err(options.wrong("state", why));
    }
    let buffer = if bank.has_state { Framing::join(&mut graph, audio, beginning) } else { audio };
    bank.framing.cut(&mut graph, buffer);
    let frames = if removes_offset { without_offset(&mut graph, frame) } else { FRAMES };
    let frames = emphasized_alone(&mut graph, frames, frame, bank.preemphasis);
    bank.energies(&mut graph, frames);
    let floor = graph.float("mel_floor", floor);
    graph.node("Max", &["mel_energies", &floor], "floored_energies");
    graph.node("Log", &["floored_energies"], FEATURES);
    graph.output(FEATURES, &format!("batch frames {}", bank.mel.count));
    if bank.has_state {
        bank.framing.keep(&mut graph, buffer);
    }
    Ok(graph.model(options.described()))
}

pub fn nemo(options: &mut Options) -> Result<ModelProto, BuiltinError> {
    let bank = read(
        options,
        MelScale::Slaney,
        &[("hann", Window::Hann), ("hamming", Window::Hamming), ("rectangular", Window::Rectangular)],
    )?;
    let guard = options.number("log_zero_guard_value", NEMO_GUARD, 1e-30..=1.0)?;
    let whole = "per_feature and all_features normalize over a whole recording, which a stream doesn't know; NeMo's streaming \
                 models have NA";
    options.only("normalize", "NA", whole)?;
    options.only("dither", "0", NOT_REPEATABLE)?;
    options.finish()?;
    check(options, &bank)?;
    let mut graph = Builder::new("mel_nemo");
    let audio = bank.scaled(&mut graph);
    // A frame has its number of hops in its middle, so the first one begins in front of the recording. The pre-emphasis
    // of its first sample needs one more.
    let beginning = Beginning::Zeros(bank.framing.frame / 2 + 1);
    let buffer = if bank.has_state { Framing::join(&mut graph, audio, beginning) } else { audio };
    let signal = emphasized(&mut graph, buffer, bank.preemphasis);
    bank.framing.cut(&mut graph, signal);
    bank.energies(&mut graph, FRAMES);
    let guard = graph.float("log_zero_guard_value", guard);
    graph.node("Add", &["mel_energies", &guard], "guarded_energies");
    graph.node("Log", &["guarded_energies"], "log_energies");
    graph.transpose(&[0, 2, 1], "log_energies", FEATURES);
    graph.output(FEATURES, &format!("batch {} frames", bank.mel.count));
    if bank.has_state {
        bank.framing.keep(&mut graph, buffer);
    }
    Ok(graph.model(options.described()))
}

/// Reads the options that both kinds have. Their defaults are the same.
fn read(options: &mut Options, scale: MelScale, windows: &[(&str, Window)]) -> Result<Bank, BuiltinError> {
    let sample_hz = options.int("sample_frequency", 16000, 1000..=192_000)? as f64;
    let count = options.int("num_mel_bins", 80, 1..=512)?;
    let mut samples = |option, default| -> Result<usize, BuiltinError> {
        let milliseconds = options.number(option, default, 1.0..=200.0)?;
        // Kaldi drops the fraction of a sample, too. A length such as 0.03 × 1000 must not lose a sample by rounding.
        Ok((milliseconds * sample_hz / 1000.0 + 1e-6) as usize)
    };
    let (frame, hop) = (samples("frame_length", 25.0)?, samples("frame_shift", 10.0)?);
    let window = options.choice("window_type", windows)?;
    let preemphasis = options.number("preemphasis_coefficient", 0.97, 0.0..=1.0)?;
    let low_hz = options.number("low_freq", if scale == MelScale::Kaldi { 20.0 } else { 0.0 }, 0.0..=96_000.0)?;
    let high = options.number("high_freq", 0.0, -96_000.0..=96_000.0)?;
    let scale_of_samples = options.number("scale", 1.0, 1e-6..=1e6)?;
    Ok(Bank {
        sample_hz,
        framing: Framing { frame, hop },
        preemphasis,
        window: window.weights(frame.max(2), false),
        // As in Kaldi, 0 means the highest frequency, and a negative number is below it.
        mel: MelBank { scale, count, low_hz, high_hz: if high > 0.0 { high } else { sample_hz / 2.0 + high } },
        scale: scale_of_samples,
        has_state: options.flag("state", true)?,
    })
}

fn check(options: &Options, bank: &Bank) -> Result<(), BuiltinError> {
    let Framing { frame, hop } = bank.framing;
    if !(4..=MOST_SAMPLES).contains(&frame) {
        return Err(
            options.wrong("frame_length", format!("a frame of 4 to {MOST_SAMPLES} samples is expected, not {frame}"))
        );
    }
    if hop == 0 || hop >= frame {
        return Err(options.wrong("frame_shift", format!("less than frame_length is expected, {frame} samples")));
    }
    let MelBank { low_hz, high_hz, count, .. } = bank.mel;
    let nyquist = bank.sample_hz / 2.0;
    if high_hz > nyquist || high_hz <= low_hz {
        let allowed = format!(
            "a frequency above low_freq, {low_hz} Hz, is expected, up to {nyquist} Hz; 0 means {nyquist} Hz, and a \
             negative number is below it"
        );
        return Err(options.wrong("high_freq", allowed));
    }
    if let Some(band) = bank.mel.empty_band(bank.bins(), bank.bin_hz()) {
        let allowed = format!(
            "the spectrum of {} bins has none for band {band}: fewer bands or a longer frame is expected than {count} of \
             {frame} samples",
            bank.bins()
        );
        return Err(options.wrong("num_mel_bins", allowed));
    }
    Ok(())
}

fn without_offset(graph: &mut Builder, frame: usize) -> &'static str {
    let axis = graph.ints("axis_2", &[2]);
    let length = graph.float("frame_length", frame as f64);
    graph.node("ReduceSum", &[FRAMES, &axis], "sums");
    graph.node("Div", &["sums", &length], "means");
    graph.node("Sub", &[FRAMES, "means"], "centered_frames");
    "centered_frames"
}

/// Pre-emphasis within each frame, as Kaldi does: the first sample takes itself for the one before.
fn emphasized_alone(graph: &mut Builder, frames: &str, frame: usize, coefficient: f64) -> &'static str {
    let (begin, one) = (graph.ints("none", &[0]), graph.ints("one", &[1]));
    let last = graph.ints("last_sample", &[frame as i64 - 1]);
    graph.slice(2, frames, (&begin, &one), "first_samples");
    graph.slice(2, frames, (&begin, &last), "samples_before_others");
    graph.along("Concat", 2, &["first_samples", "samples_before_others"], "samples_before");
    difference(graph, frames, coefficient)
}

/// Pre-emphasis of the whole signal. The result is one sample shorter.
fn emphasized(graph: &mut Builder, signal: &str, coefficient: f64) -> &'static str {
    let (begin, one) = (graph.ints("none", &[0]), graph.ints("one", &[1]));
    let (last, end) = (graph.ints("last_sample", &[-1]), graph.ints("end", &[END]));
    graph.slice(1, signal, (&begin, &last), "samples_before");
    graph.slice(1, signal, (&one, &end), "samples");
    difference(graph, "samples", coefficient)
}

fn difference(graph: &mut Builder, samples: &str, coefficient: f64) -> &'static str {
    let coefficient = graph.float("preemphasis_coefficient", coefficient);
    graph.node("Mul", &["samples_before", &coefficient], "parts_before");
    graph.node("Sub", &[samples, "parts_before"], "emphasized");
    "emphasized"
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MelScale {
    /// Kaldi's: logarithmic, and triangles that are straight in mel, of height 1.
    Kaldi,
    /// Slaney's, as librosa has it: linear below 1000 Hz, and triangles that are straight in Hz, of equal area.
    Slaney,
}

/// Where Slaney's scale becomes logarithmic, in Hz and in mel, and its step there.
const BREAK_HZ: f64 = 1000.0;
const BREAK_MEL: f64 = 15.0;

fn slaney_step() -> f64 {
    6.4_f64.ln() / 27.0
}

impl MelScale {
    fn mel(self, hz: f64) -> f64 {
        match self {
            Self::Kaldi => 1127.0 * (1.0 + hz / 700.0).ln(),
            Self::Slaney if hz < BREAK_HZ => hz * BREAK_MEL / BREAK_HZ,
            Self::Slaney => BREAK_MEL + (hz / BREAK_HZ).ln() / slaney_step(),
        }
    }

    fn hz(self, mel: f64) -> f64 {
        match self {
            Self::Kaldi => 700.0 * ((mel / 1127.0).exp() - 1.0),
            Self::Slaney if mel < BREAK_MEL => mel * BREAK_HZ / BREAK_MEL,
            Self::Slaney => BREAK_HZ * ((mel - BREAK_MEL) * slaney_step()).exp(),
        }
    }

    /// The weight of a frequency in a triangle whose corners are given in mel.
    fn weight(self, hz: f64, [left, center, right]: [f64; 3]) -> f64 {
        let (at, [left, center, right], height) = match self {
            Self::Kaldi => (self.mel(hz), [left, center, right], 1.0),
            Self::Slaney => {
                let [left, center, right] = [left, center, right].map(|mel| self.hz(mel));
                (hz, [left, center, right], 2.0 / (right - left))
            }
        };
        height * ((at - left) / (center - left)).min((right - at) / (right - center)).max(0.0)
    }
}

#[derive(Clone, Copy, Debug)]
pub struct MelBank {
    pub scale: MelScale,
    pub count: usize,
    pub low_hz: f64,
    pub high_hz: f64,
}

impl MelBank {
    /// The weights of the frequencies `bin · hz` for `bins` bins, a row for each bin.
    pub fn weights(&self, bins: usize, hz: f64) -> Vec<f64> {
        let (low, high) = (self.scale.mel(self.low_hz), self.scale.mel(self.high_hz));
        let step = (high - low) / (self.count + 1) as f64;
        let corners = |band: usize| [0, 1, 2].map(|corner| low + step * (band + corner) as f64);
        let row = |bin: usize| (0..self.count).map(move |band| self.scale.weight(bin as f64 * hz, corners(band)));
        (0..bins).flat_map(row).collect()
    }

    /// The first band that has no bin, because too many bands share the spectrum.
    pub fn empty_band(&self, bins: usize, hz: f64) -> Option<usize> {
        let weights = self.weights(bins, hz);
        (0..self.count).find(|band| weights.iter().skip(*band).step_by(self.count).all(|&weight| weight == 0.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scales_go_there_and_back() {
        for scale in [MelScale::Kaldi, MelScale::Slaney] {
            for hz in [0.0, 20.0, 999.0, 1000.0, 1001.0, 8000.0] {
                assert!((scale.hz(scale.mel(hz)) - hz).abs() < 1e-9, "{scale:?} {hz}");
            }
        }
        assert!((MelScale::Slaney.mel(8000.0) - 45.245_640_471_924_965).abs() < 1e-9);
        assert!((MelScale::Kaldi.mel(8000.0) - 2_840.037_711_560_69).abs() < 1e-6);
    }

    #[test]
    fn each_frequency_is_shared_by_two_triangles() {
        let bank = MelBank { scale: MelScale::Kaldi, count: 20, low_hz: 0.0, high_hz: 8000.0 };
        let weights = bank.weights(256, 31.25);
        // Between the centers of the first and the last triangle.
        for bin in 8..200 {
            let sum: f64 = weights[bin * 20..(bin + 1) * 20].iter().sum();
            assert!((sum - 1.0).abs() < 1e-9, "{bin}: {sum}");
        }
        assert_eq!(bank.empty_band(256, 31.25), None);
        assert_eq!(MelBank { count: 200, ..bank }.empty_band(256, 31.25), Some(0));
    }
}
