//! Window functions and the matrices of a Fourier transform, in 64 bits.

use std::f64::consts::TAU;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Window {
    /// Kaldi's own: a Hann window to the power of 0.85.
    Povey,
    Hamming,
    Hann,
    /// The root of a Hann window: used before and behind a spectrum, it weighs like a Hann window.
    SqrtHann,
    Rectangular,
}

impl Window {
    /// The weights of a frame's samples. A periodic window is one sample of its cosine longer than the frame, so that frames
    /// that overlap add up to a constant; one of features isn't, and ends as it begins.
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
    // The sine of a half turn is 0, and π has no exact number: a bin without an imaginary part must not get a small one.
    let exact = |value: f64| if value.abs() < 1e-15 { 0.0 } else { value };
    let angle = |at: usize| TAU * at as f64 / length as f64;
    (0..length).map(|at| (exact(angle(at).cos()), exact(-angle(at).sin()))).collect()
}

/// The Fourier transform of windowed frames: a row for each sample, the real parts of the bins and then their imaginary
/// parts in each. A frame that is shorter than `length` is followed by zeros.
pub fn transform(window: &[f64], length: usize, bins: usize) -> Vec<f64> {
    let turns = turns(length);
    let row = |(at, weight): (usize, &f64)| {
        let turn = |bin: usize| turns[at * bin % length];
        let real = (0..bins).map(|bin| turn(bin).0 * weight);
        let imaginary = (0..bins).map(|bin| turn(bin).1 * weight);
        real.chain(imaginary).collect::<Vec<_>>()
    };
    window.iter().enumerate().flat_map(row).collect()
}

/// The inverse for real samples: a row for the real part of each bin, then one for each imaginary part. Samples have the
/// `weights`, and zeros follow them up to `width`.
pub fn inverse(weights: &[f64], width: usize) -> Vec<f64> {
    let length = weights.len();
    let bins = length / 2 + 1;
    let turns = turns(length);
    // Bins in the middle stand for their mirror images, too.
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
