//! Mel filter banks: triangles between frequencies that are evenly spaced on a mel scale.

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

    /// How much of a frequency the triangle has whose corners are given in mel.
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
