//! Contexts, built-in graphs and texts of tokens in joined graphs.

use std::fs;
use std::path::PathBuf;

use stateful_convert::join::{JoinOptions, Joined, Search, contexts, join};
use stateful_convert::onnx::schema::NodeProto;
use stateful_convert::onnx::{Dim, read};
use stateful_convert::report::StartsAt;

use crate::command::{command, path, text};
use crate::common::{Build, folder, node};
use crate::join::{checked, parts, refusal, wired};
use crate::search::{decoder_joint, encoder};

/// Two elements of `y` for each request, `[batch, 2, 3]`.
fn first() -> Vec<u8> {
    Build::new().input("x", "batch 2 3").output("y", "batch 2 3").node(node("Tanh", "x", "y")).bytes()
}

/// Differences of the first and the last element of a window of `w`, `[N, w, 3]`.
fn window(length: &str) -> Vec<u8> {
    let build = Build::new().input("w", &format!("N {length} 3")).output("z", "N 1 3");
    let build = build.ints("none", &[1], &[0]).ints("one", &[1], &[1]).ints("last", &[1], &[-1]);
    let build = build.ints("end", &[1], &[i64::MAX]);
    let slice = |name: &str, inputs: &[&str]| NodeProto::make("Slice", name, inputs, &[name]);
    let build = build.node(slice("a", &["w", "none", "one", "one"])).node(slice("b", &["w", "last", "end", "one"]));
    build.node(node("Sub", "b a", "z")).bytes()
}

fn with(text: &str) -> JoinOptions {
    JoinOptions { contexts: contexts(text).unwrap(), ..wired("<<<a.y, b.w>>>") }
}

fn state(joined: &Joined) -> (String, String) {
    let [state] = joined.converted.report.states.as_slice() else { panic!("{:?}", joined.converted.report.states) };
    (state.pair.to_string(), stateful_convert::onnx::bracketed(&state.dims))
}

#[test]
fn an_inner_input_keeps_the_end_of_what_it_got() {
    let (first, second) = (first(), window("7"));
    let models: [(&str, &[u8]); 2] = [("a", &first), ("b", &second)];
    for text in ["b.w=5", "b.w=5@1", "b.w=5@1:zeros"] {
        let joined = checked(&models, &with(text));
        let expected = ("<<<b.w.context, b.w.context_next>>>".to_owned(), "[batch, 5, 3]".to_owned());
        assert_eq!(state(&joined), expected);
        assert!(joined.plan.has_context("b.w"));
    }
}

#[test]
fn a_window_may_come_whole_at_first() {
    let (first, second) = (first(), window("T"));
    let joined = checked(&[("a", &first), ("b", &second)], &with("b.w=5@1:whole"));
    assert_eq!(state(&joined).1, "[batch, b.w.context_length, 3]");
    assert_eq!(joined.converted.report.states[0].starts_at, StartsAt::Unchanged);
    // The length differs from that of the next value, or ONNX Runtime would share their memory.
    let graph = read(joined.converted.model.into()).unwrap().graph.unwrap();
    let next = graph.output.iter().find(|output| output.name() == "b.w.context_next").unwrap();
    assert_eq!(next.dims().unwrap()[1].to_string(), "b.w.context_length_next");
}

#[test]
fn an_input_of_requests_may_have_a_context_for_a_later_graph_only() {
    let (first, second) = (first(), window("7"));
    let options = JoinOptions { wires: wired("<<<a.x, b.w>>>").wires, ..with("b.w=5") };
    let joined = checked(&[("a", &first), ("b", &second)], &options);
    assert_eq!(joined.converted.report.inputs.len(), 1);
    assert_eq!(state(&joined).0, "<<<b.w.context, b.w.context_next>>>");
}

#[test]
fn contexts_that_cannot_be_are_refused_by_name() {
    let (first, second, open) = (first(), window("7"), window("T"));
    let of_seven: [(&str, &[u8]); 2] = [("a", &first), ("b", &second)];
    for (text, expected) in [
        (
            "b.w=4",
            "'a.y' (FLOAT [batch, 2, 3]) can't be wired to 'b.w' (FLOAT [N, 7, 3]): axis 1 takes 7 elements, and the 4 of its \
             context and 2 new ones come; write another wire",
        ),
        ("b.w=5@0", "context of 'b.w': axis 0 isn't there, or it is the batch: it is [N, 7, 3]"),
        ("b.w=5@3", "context of 'b.w': axis 3 isn't there"),
        ("b.w=1", "context of 'b.w': write its axis, as in b.w=1@1: it is [N, 7, 3]"),
        ("b.w=9", "context of 'b.w': write its axis"),
        ("b.w=5@1 b.w=5@1", "context of 'b.w': it is given twice"),
        ("b.w=2147483647@1", "context of 'b.w': it would have 2147483647 elements, and 1 to 67108864 are expected"),
        ("b.q=5", "graph 'b' has no input 'q' (it has w)"),
        ("c.w=5", "'c.w' names no graph"),
    ] {
        let error = refusal(&of_seven, &with(text));
        assert!(error.contains(expected), "{text}: {error}");
    }
    let wide = Build::new().input("x", "batch T F").output("y", "batch T F").node(node("Tanh", "x", "y")).bytes();
    let taken = Build::new().input("w", "N T F").output("z", "N T F").node(node("Neg", "w", "z")).bytes();
    let error = refusal(&[("a", &wide), ("b", &taken)], &with("b.w=4@1"));
    let expected = "context of 'b.w': it would have several open dimensions: give axis 2 a length with dims";
    assert_eq!(error, expected);
    // Requests carry the input, so the backend gives it its context.
    let options = JoinOptions { wires: Vec::new(), ..with("b.w=4@1:whole") };
    let joined = join(&parts(&[("a", &first), ("b", &open)]), &options).unwrap();
    assert!(!joined.plan.has_context("b.w") && joined.converted.report.states.is_empty());
}

#[test]
fn a_graph_of_one_row_makes_a_model_of_one_row() {
    let first = first();
    let one = Build::new().input("y", "1 2 3").output("z", "1 2 3").node(node("Neg", "y", "z")).bytes();
    let last = Build::new().input("z", "N 2 3").output("q", "N 2 3").node(node("Abs", "z", "q")).bytes();
    let joined = checked(&[("a", &first), ("b", &one), ("c", &last)], &wired(""));
    let report = &joined.converted.report;
    let dims = |dims: &[Dim]| stateful_convert::onnx::bracketed(dims);
    assert_eq!((dims(&report.inputs[0].dims), dims(&report.outputs[0].dims)), ("[1, 2, 3]".into(), "[1, 2, 3]".into()));
}

/// The recogniser with an LSTM predictor: 12 tokens and the blank.
fn recogniser() -> [Vec<u8>; 2] {
    [encoder("x", "outputs", "N 8 T").bytes(), decoder_joint().bytes()]
}

#[test]
fn tokens_have_texts() {
    let [encoder, decoder_joint] = recogniser();
    let models: [(&str, &[u8]); 2] = [("encoder", &encoder), ("decoder_joint", &decoder_joint)];
    let options = |count: usize| JoinOptions {
        search: Some(Search::parse("transducer blank=12 max_tokens=3").unwrap()),
        pieces: Some((0..count).map(|number| format!("▁{number}")).collect()),
        ..wired("<<<encoder.outputs, decoder_joint.encoder_outputs>>>")
    };
    let joined = checked(&models, &options(13));
    let outputs: Vec<&str> = joined.converted.report.outputs.iter().map(|output| output.name.as_str()).collect();
    assert_eq!(outputs, ["tokens", "tokens_length", "frames", "pieces"]);
    let error = join(&parts(&models), &options(12)).unwrap_err().to_string();
    let expected = "search: tokens: the file has 12 pieces, and the logits 'decoder_joint.outputs' have 13 tokens";
    assert_eq!(error, expected);
}

/// A head that takes filter banks, `head.onnx`.
fn head() -> PathBuf {
    let folder = folder();
    let head = Build::new().input("features", "N T 80").output("score", "N T 1").weights("w", &[80, 1]);
    fs::write(folder.join("head.onnx"), head.node(node("MatMul", "features w", "score")).bytes()).unwrap();
    folder
}

#[test]
fn built_in_graphs_are_parts() {
    let folder = head();
    let head = folder.join("head.onnx");
    // Its input would be too short for a frame with the first length that is tried.
    for options in [&[][..], &["num_mel_bins=80", "scale=32768"], &["state=false"]] {
        let words = [&["join", "fbank:kaldi"], options, &[path(&head), "--dry-run"]].concat();
        let done = command(&words);
        let said = text(&done.stdout);
        let has_state = !options.contains(&"state=false");
        assert!(done.status.success() && said.contains("fbank.audio"), "{}", text(&done.stderr));
        assert_eq!(said.contains("fbank.samples_cache"), has_state, "{said}");
    }
    for (words, expected) in [
        (
            &["fbank:kaldi", "num_mel_bins=0", path(&head)][..],
            "fbank:kaldi: num_mel_bins=0: a whole number from 1 to 512",
        ),
        (
            &["fbank:kaldi", "num_mel_bins=40", path(&head)],
            "'fbank.features' (FLOAT [batch, frames, 40]) can't be wired",
        ),
        (
            &["fbank:kaldi", "snip_edges=false", "state=false", path(&head)],
            "only true is possible with snip_edges=false",
        ),
        (&["fbank:kaldi", "fbank:kaldi"], "two graphs have the name 'fbank': write NAME=FILE for one of them"),
        (&["a=", path(&head)], "a file or a built-in graph is expected, as in NAME=FILE, not 'a='"),
        (&["fbank:htk", path(&head)], "'fbank:htk' is no built-in graph: fbank:kaldi, mel:nemo, stft,"),
    ] {
        let done = command(&[&["join"], words, &["--dry-run"]].concat());
        assert!(!done.status.success() && text(&done.stderr).contains(expected), "{}", text(&done.stderr));
    }
}

#[test]
fn contexts_and_texts_of_the_command_are_refused_by_name() {
    let folder = head();
    let head = folder.join("head.onnx");
    let tokens = folder.join("tokens.txt");
    fs::write(&tokens, "a 0\nb").unwrap();
    let search = format!("ctc blank=0 tokens={}", path(&tokens));
    for (arguments, expected) in [
        (&["--input-context", "head.features"][..], "--input-context: 'graph.input=68@1' is expected"),
        (&["--input-context", "fbank.audio=64@1"], "--input-context: 'fbank.audio' is an input of requests"),
        (&["--search", &search], "tokens.txt: line 2, 'b': a piece and its number are expected"),
        (&["--search", "ctc blank=0 tokens=/none.txt"], "/none.txt: it can't be read"),
    ] {
        let done = command(&[&["join", "fbank:kaldi", path(&head), "--dry-run"], arguments].concat());
        assert!(!done.status.success() && text(&done.stderr).contains(expected), "{}", text(&done.stderr));
    }
}
