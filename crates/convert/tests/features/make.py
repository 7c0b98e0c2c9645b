"""Makes the reference values of the built-in filter banks. `requirements.txt` has the versions.

    python make.py

kaldi-native-fbank computes Kaldi's, and numpy computes NeMo's by their definition, for the whole of `assets/speech.wav`.
Every 50th frame is committed, in `reference.npz`, so that tests need neither. Each array has the name of its options.
"""

import pathlib
import wave

import numpy as np

FOLDER = pathlib.Path(__file__).parent
RECORDING = FOLDER.parents[3] / "assets" / "speech.wav"
#: Of the committed frames.
EVERY = 50
RATE = 16000

#: By the name of an array: options of kaldi-native-fbank, by group.
KALDI: dict[str, dict[str, dict]] = {
    "kaldi": {},
    "kaldi snip_edges=false high_freq=-400": {"frame_opts": {"snip_edges": False}, "mel_opts": {"high_freq": -400.0}},
    "kaldi scale=32768 window_type=hamming num_mel_bins=40": {
        "frame_opts": {"window_type": "hamming"},
        "mel_opts": {"num_bins": 40},
        "samples": {"scale": 32768},
    },
    "kaldi window_type=hanning frame_length=32 frame_shift=8 preemphasis_coefficient=0 remove_dc_offset=false": {
        "frame_opts": {
            "window_type": "hanning",
            "frame_length_ms": 32.0,
            "frame_shift_ms": 8.0,
            "preemph_coeff": 0.0,
            "remove_dc_offset": False,
        },
    },
    "kaldi low_freq=100 high_freq=7000 num_mel_bins=23 window_type=rectangular": {
        "frame_opts": {"window_type": "rectangular"},
        "mel_opts": {"low_freq": 100.0, "high_freq": 7000.0, "num_bins": 23},
    },
}


def samples() -> np.ndarray:
    """The recording, between -1 and 1."""
    with wave.open(str(RECORDING)) as file:
        return np.frombuffer(file.readframes(file.getnframes()), np.int16).astype(np.float32) / np.float32(32768)


def kaldi(options: dict[str, dict]) -> np.ndarray:
    import kaldi_native_fbank

    made = kaldi_native_fbank.FbankOptions()
    made.frame_opts.dither = 0
    made.mel_opts.num_bins = 80
    for group in ("frame_opts", "mel_opts"):
        for name, value in options.get(group, {}).items():
            setattr(getattr(made, group), name, value)
    bank = kaldi_native_fbank.OnlineFbank(made)
    bank.accept_waveform(RATE, (samples() * np.float32(options.get("samples", {}).get("scale", 1))).tolist())
    # without the frames that reach beyond the end, which input_finished would add
    return np.stack([bank.get_frame(frame) for frame in range(bank.num_frames_ready)])


def slaney(count: int, bins: int, hz: float) -> np.ndarray:
    """Triangles of equal area between frequencies that are evenly spaced on Slaney's mel scale, `[count, bins]`."""
    mel = np.linspace(0, 15 + 27 * np.log(RATE / 2 / 1000) / np.log(6.4), count + 2)
    corners = np.where(mel < 15, mel * 1000 / 15, 1000 * np.exp((mel - 15) * np.log(6.4) / 27))
    frequencies = np.arange(bins) * hz
    triangles = [
        np.interp(frequencies, (left, center, right), (0, 1, 0)) * 2 / (right - left)
        for left, center, right in zip(corners, corners[1:], corners[2:], strict=False)
    ]
    return np.array(triangles)


def nemo(count: int) -> np.ndarray:
    """What NeMo's AudioToMelSpectrogramPreprocessor gives without normalization, dither and padding of its result."""
    x = samples().astype(np.float64)
    emphasized = np.concatenate([x[:1], x[1:] - 0.97 * x[:-1]])
    centered = np.pad(emphasized, 256)
    window = np.pad(np.hanning(400), 56)
    frames = np.lib.stride_tricks.sliding_window_view(centered, 512)[::160]
    power = np.abs(np.fft.rfft(frames * window)) ** 2
    features = np.log(power @ slaney(count, 257, RATE / 512).T + 2.0**-24)
    # those that reach beyond the end
    return features[: (len(x) - 200) // 160 + 1]


def main() -> None:
    made = {name: kaldi(options) for name, options in KALDI.items()}
    made |= {"nemo": nemo(80), "nemo num_mel_bins=128": nemo(128)}
    arrays = {name: values[::EVERY].astype(np.float32) for name, values in made.items()}
    np.savez_compressed(FOLDER / "reference.npz", **arrays)


if __name__ == "__main__":
    main()
