//! What built-in graphs say of their rows, their options on the page, and the command that writes them.

use std::path::Path;
use std::process::Command;

use stateful_convert::onnx::schema::ValueInfoProto;
use stateful_convert::onnx::write;
use stateful_convert::{InputAxis, OutputAxis, RowsInGraph, builtin, builtin_names, rows_stay_apart};

use crate::common::folder;

#[test]
fn the_rows_of_the_graphs_are_proved_apart() {
    let polar: &[&str] = &["layout=polar"];
    let variants = builtin_names().map(|name| (name, &[] as &[&str]));
    let others = [
        ("stft", polar),
        ("istft", polar),
        ("irfft", &["layout=polar", "mask=true"]),
        ("fbank:kaldi", &["snip_edges=false"] as &[&str]),
    ];
    for (name, options) in variants.chain(others) {
        let model = builtin(name, options).unwrap();
        let graph = model.graph.clone().unwrap();
        let inputs: Vec<InputAxis> =
            graph.input.iter().map(|input| InputAxis { input: input.name().to_owned(), axis: 0 }).collect();
        let outputs: Vec<OutputAxis> =
            graph.output.iter().map(|output| OutputAxis { output: output.name().to_owned(), axis: 0 }).collect();
        let fetched: Vec<&str> = graph.output.iter().map(ValueInfoProto::name).collect();
        let found = rows_stay_apart(write(&model).into(), &inputs, &outputs, &fetched);
        assert_eq!(found, RowsInGraph::Apart, "{name} {options:?}");
    }
}

#[test]
fn wrong_options_are_refused_with_what_is_allowed() {
    let why = |name: &str, options: &[&str]| builtin(name, options).unwrap_err().to_string();
    let names = "there is no built-in graph 'fbank': fbank:kaldi, mel:nemo, stft, istft, irfft, overlap_add are known";
    assert_eq!(why("fbank", &[]), names);
    let cases: [(&str, &[&str], &str); 18] = [
        ("fbank:kaldi", &["num_mel_bins=0"], "num_mel_bins=0: a whole number from 1 to 512 is expected"),
        ("fbank:kaldi", &["num_mel_bins=300"], "num_mel_bins=300: the spectrum of 256 bins has none for band 2"),
        (
            "fbank:kaldi",
            &["window_type=hann"],
            "window_type=hann: povey or hamming or hanning or rectangular is expected",
        ),
        ("fbank:kaldi", &["dither=1"], "dither=1: only 0 is possible, because noise"),
        ("fbank:kaldi", &["snip_edges=no"], "snip_edges=no: true or false is expected"),
        ("fbank:kaldi", &["frame_shift=25"], "frame_shift=25: less than frame_length is expected, 400 samples"),
        (
            "fbank:kaldi",
            &["sample_frequency=1000", "frame_length=2"],
            "frame_length=2: a frame of 4 to 4096 samples is expected, not 2",
        ),
        (
            "fbank:kaldi",
            &["high_freq=9000"],
            "high_freq=9000: a frequency above low_freq, 20 Hz, is expected, up to 8000 Hz",
        ),
        ("fbank:kaldi", &["low_freq=500", "high_freq=-7600"], "high_freq=-7600: a frequency above low_freq, 500 Hz"),
        ("fbank:kaldi", &["scale=0"], "scale=0: a number from 0.000001 to 1000000 is expected"),
        ("mel:nemo", &["normalize=per_feature"], "normalize=per_feature: only NA is possible"),
        ("stft", &["hop=512"], "hop=512: a whole number from 8 to 511 is expected with this frame"),
        (
            "stft",
            &["window=hann", "hop=500"],
            "window=hann: frames of 512 samples with this window don't overlap enough",
        ),
        ("istft", &["window=sqrt_hann", "hop=511"], "window=sqrt_hann: frames of 512 samples with this window"),
        ("overlap_add", &["hop=7"], "hop=7: a whole number from 8 to 511 is expected with this frame"),
        ("irfft", &["mask=true"], "mask=true: true needs layout=polar"),
        ("irfft", &["hop=256"], "irfft has no option 'hop': frame, layout, mask are known"),
        ("istft", &["bins=257"], "istft has no option 'bins': frame, hop, window, layout are known"),
    ];
    for (name, options, wanted) in cases {
        let said = why(name, options);
        assert!(said.starts_with(name) && said.contains(wanted), "{said}");
    }
}

#[test]
fn extreme_options_give_a_graph_or_are_refused() {
    let ends =
        |option: &str, values: &[&str]| values.iter().map(|value| format!("{option}={value}")).collect::<Vec<_>>();
    let all = [
        ends("sample_frequency", &["1000", "96000"]),
        ends("frame_length", &["1", "20", "200"]),
        ends("frame_shift", &["1", "19.999"]),
        ends("num_mel_bins", &["1", "512"]),
        ends("low_freq", &["0", "96000"]),
        ends("high_freq", &["-96000", "0", "96000"]),
    ];
    let mut choices: Vec<Vec<&str>> = vec![Vec::new()];
    for values in &all {
        let with = |value| choices.iter().map(move |choice| [choice.as_slice(), &[value]].concat());
        choices = values.iter().map(String::as_str).flat_map(with).collect();
    }
    for name in ["fbank:kaldi", "mel:nemo"] {
        let made = choices.iter().filter(|choice| builtin(name, choice).is_ok()).count();
        assert!((1..choices.len() / 2).contains(&made), "{name}: {made} of {}", choices.len());
    }
    for name in ["stft", "istft", "overlap_add"] {
        for (frame, hop) in [("4", "1"), ("4", "3"), ("4096", "64"), ("4096", "63"), ("4096", "4095")] {
            let options = [format!("frame={frame}"), format!("hop={hop}")];
            let found = builtin(name, &options.each_ref().map(String::as_str));
            // The window of a frame is 0 at its beginning, where 4095 samples bring no other frame.
            let is_wrong = hop == "63" || hop == "4095" && name != "overlap_add";
            assert_eq!(found.is_err(), is_wrong, "{name} {options:?}");
        }
    }
}

#[test]
fn the_page_lists_each_option_with_its_default() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/convert.md");
    let page = std::fs::read_to_string(page).unwrap();
    for name in builtin_names() {
        let model = builtin(name, &[]).unwrap();
        for option in model.doc_string().split_whitespace().skip(1) {
            let (option, value) = option.split_once('=').unwrap();
            let mut rows = page.lines().filter(|line| line.starts_with(&format!("| `{option}`")));
            assert!(
                rows.any(|row| row.split([' ', '|', ',', ';', '`']).any(|word| word == value)),
                "{name}: {option}={value}"
            );
        }
    }
}

#[test]
fn the_command_writes_a_model_as_the_others_do() {
    let folder = folder();
    let path = |name: &str| folder.join(name).to_str().unwrap().to_owned();
    let run = |arguments: &[&str]| {
        let program = env!("CARGO_BIN_EXE_stateful-convert");
        let done = Command::new(program).arg("graph").args(arguments).output().unwrap();
        (done.status.success(), String::from_utf8_lossy(&[done.stdout, done.stderr].concat()).into_owned())
    };
    let (is_done, said) = run(&["fbank:kaldi", "num_mel_bins=40", "-o", &path("fbank/1/model.onnx")]);
    assert!(is_done && said.contains("fbank:kaldi sample_frequency=16000 num_mel_bins=40"), "{said}");
    assert!(said.contains("features            FLOAT  [batch, frames, 40]"), "{said}");
    let config = std::fs::read_to_string(folder.join("fbank/config.pbtxt")).unwrap();
    assert!(config.starts_with("backend: \"stateful\"\n"), "{config}");
    let written = std::fs::read(folder.join("fbank/1/model.onnx")).unwrap();
    assert_eq!(written, write(&builtin("fbank:kaldi", &["num_mel_bins=40"]).unwrap()));
    let (is_done, said) = run(&["stft", "-o", &path("fronts/stft.onnx")]);
    assert!(is_done && folder.join("fronts/stft.onnx").exists(), "{said}");
    assert!(folder.join("fronts/config.pbtxt").exists());
    let (is_done, said) = run(&["istft", "-o", &path("alone/istft.onnx"), "--no-config"]);
    assert!(is_done && std::fs::read_dir(folder.join("alone")).unwrap().count() == 1, "{said}");
    let (is_done, said) = run(&["irfft", "-o", &path("parts/irfft.onnx")]);
    assert!(is_done && said.contains("it has no state, so it isn't served by itself: join it"), "{said}");
    assert_eq!(std::fs::read_dir(folder.join("parts")).unwrap().count(), 1);
    for (arguments, wanted) in [
        (&["stft", "-o", &path("fronts/stft.onnx")] as &[&str], "stft.onnx exists; --force replaces it"),
        (&["mel:nemo", "-o", &path("fbank/1/model.onnx")], "model.onnx exists; --force replaces it"),
        (&["mel:nemo", "-o", &path("fbank")], "/fbank is a folder: write the name of a file in it, such as"),
        (&["mel:nemo", "-o", &path("new")], "-o: the name of a file that ends with .onnx is expected, such as"),
        (
            &["stft", "hop=0", "-o", &path("new")],
            "stft: hop=0: a whole number from 1 to 4096 is expected; nothing was written",
        ),
        (&["fft", "-o", &path("new")], "there is no built-in graph 'fft'"),
        (&["stft"], "--output"),
    ] {
        let (is_done, said) = run(arguments);
        assert!(!is_done && said.contains(wanted), "{arguments:?}: {said}");
    }
    assert!(!folder.join("new").exists());
    assert!(run(&["istft", "-o", &path("fronts/stft.onnx"), "--force"]).0);
}
