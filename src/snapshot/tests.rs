//! Snapshots that are written and read, damaged ones, and those of other models.

#![allow(clippy::unwrap_used, reason = "all of this is a test")]

use proptest::prelude::*;

use super::samples::{sealed, snapshot};
use super::*;
use crate::binding::{BoundContext, BoundWindow, Counter, InputAxis, Source};
use crate::config::FirstRequest;
use crate::store::test_binding;

fn why(bytes: &[u8]) -> String {
    Snapshot::decode(bytes, &test_binding(true)).unwrap_err().to_string()
}

#[test]
fn what_is_written_is_read() {
    let binding = test_binding(true);
    let written = snapshot();
    let read = Snapshot::decode(&written.encode(&binding).unwrap(), &binding).unwrap();
    assert_eq!((read.state, read.extras.steps), (written.state, 9));
    let [Some(HeldInput { dims, elements: HeldElements::Bytes(bytes), .. })] = read.extras.held.as_slice() else {
        panic!()
    };
    assert_eq!((&**dims, bytes.as_slice()), (&[1, 6][..], &[1; 24][..]));
}

#[test]
fn counters_are_kept_by_their_names() {
    let with_counters = |counters: &[Counter]| {
        let mut binding = (*test_binding(true)).clone();
        binding.counters = counters.to_vec();
        binding
    };
    let of_x = Counter::Elements(InputAxis { input: 4, axis: 1 });
    let binding = with_counters(&[Counter::Steps, of_x]);
    let mut written = snapshot();
    written.extras.counts = vec![3, 44];
    let bytes = written.encode(&binding).unwrap();
    assert_eq!(Snapshot::decode(&bytes, &binding).unwrap().extras.counts, [3, 44]);
    let other = Snapshot::decode(&bytes, &with_counters(&[of_x])).unwrap_err().to_string();
    assert_eq!(other, "is of another model: its counters are steps, elements(X@1), and the model's elements(X@1)");
    let none = Snapshot::decode(&snapshot().encode(&test_binding(true)).unwrap(), &binding).unwrap_err();
    assert!(none.to_string().contains("its counters are none"), "{none}");
}

#[test]
fn what_is_left_over_of_a_window_is_kept_and_is_less_than_one() {
    let with_window = |length: usize| {
        let mut binding = (*test_binding(true)).clone();
        let (input, ..) = binding.contexts().next().unwrap();
        let Source::Request(request) = &mut binding.inputs[input].source else { panic!() };
        request.window = Some(BoundWindow { axis: 1, length, element_bytes: 4, pads: false });
        binding
    };
    let binding = with_window(4);
    let mut written = snapshot();
    for left in [vec![], vec![7; 8]] {
        written.extras.left = vec![left.clone()];
        let bytes = written.encode(&binding).unwrap();
        assert_eq!(Snapshot::decode(&bytes, &binding).unwrap().extras.left, [left]);
    }
    let bytes = written.encode(&binding).unwrap();
    let refused = |binding: &Binding| Snapshot::decode(&bytes, binding).unwrap_err().to_string();
    assert_eq!(
        refused(&with_window(5)),
        "is of another model: its left-over elements are X=4@1, and the model's X=5@1"
    );
    assert!(refused(&test_binding(true)).contains("its left-over elements are X=4@1, and the model's none"));
    // As many would have made a step.
    written.extras.left = vec![vec![7; 16]];
    let whole = written.encode(&binding).unwrap();
    let error = Snapshot::decode(&whole, &binding).unwrap_err().to_string();
    assert_eq!(error, "is of another model: its 'X=4@1' is FP32 [1, 4], and the model's FP32 [1, -1]");
}

#[test]
fn a_context_of_the_same_size_along_another_axis_is_refused() {
    let with_context = |axis: usize, length: usize, first: FirstRequest| {
        let mut binding = (*test_binding(true)).clone();
        let (input, _, of) = binding.contexts().next().unwrap();
        binding.inputs[input].dims = vec![-1, length as i64, length as i64];
        let Source::Request(request) = &mut binding.inputs[input].source else { panic!() };
        request.context = Some(BoundContext { axis, length, first, ..of });
        binding
    };
    let bytes = snapshot().encode(&with_context(1, 2, FirstRequest::Zeros)).unwrap();
    for (axis, length, first, name) in [
        (2, 2, FirstRequest::Zeros, "X=2@2"),
        (1, 3, FirstRequest::Zeros, "X=3@1"),
        (1, 2, FirstRequest::Whole, "X=2@1:whole"),
    ] {
        let refused = Snapshot::decode(&bytes, &with_context(axis, length, first)).unwrap_err().to_string();
        assert_eq!(refused, format!("is of another model: its contexts are X=2@1, and the model's {name}"));
    }
    let mut wider = with_context(1, 2, FirstRequest::Zeros);
    let (input, ..) = wider.contexts().next().unwrap();
    wider.inputs[input].dims = vec![-1, 2, 5];
    let refused = Snapshot::decode(&bytes, &wider).unwrap_err().to_string();
    assert_eq!(refused, "is of another model: its 'X=2@1' is FP32 [1, 2, 2], and the model's FP32 [1, 2, 5]");
}

#[test]
fn zeros_are_written_as_such() {
    let binding = test_binding(true);
    let zeros = |dims: &[i64]| Initial { dims: dims.to_vec(), content: InitialContent::Zeros };
    let states = vec![zeros(&[1, 2]), zeros(&[1, 4]), zeros(&[1, 0]), zeros(&[1, 2])];
    let state = SequenceState { states, contexts: vec![vec![0; 8]] };
    let written = Snapshot { state, extras: Extras::default() };
    let read = Snapshot::decode(&written.encode(&binding).unwrap(), &binding).unwrap().state.states;
    assert_eq!(read[0].content, InitialContent::Bytes(vec![0; 8]));
    assert_eq!(read[3].content, InitialContent::Strings(["", ""].iter().collect()));
}

#[test]
fn a_damaged_one_is_refused_wherever_the_damage_is() {
    let whole = snapshot().encode(&test_binding(true)).unwrap();
    for length in 0..whole.len() {
        why(&whole[..length]);
    }
    for at in 0..whole.len() {
        let mut flipped = whole.clone();
        flipped[at] ^= 1 << (at % 8);
        why(&flipped);
    }
    let mut newer = whole.clone();
    newer[8] = 2;
    assert_eq!(why(&newer), "has format 2, and this server reads format 1");
    assert!(why(&[whole, vec![0]].concat()).contains("checksum"));
}

#[test]
fn a_header_longer_than_the_model_needs_is_refused_unread() {
    let whole = snapshot().encode(&test_binding(true)).unwrap();
    let header = &whole[PREFIX_BYTES..PREFIX_BYTES + u32::from_le_bytes(whole[16..20].try_into().unwrap()) as usize];
    let data = &whole[PREFIX_BYTES + header.len()..];
    let value: serde_json::Value = serde_json::from_slice(header).unwrap();
    let spaced = serde_json::to_vec_pretty(&value).unwrap();
    assert!(Snapshot::decode(&sealed(spaced, data), &test_binding(true)).is_ok());
    let mut long = sealed([header, &vec![b' '; 1_000_000]].concat(), data);
    let refused = why(&long);
    assert!(refused.starts_with("is of another model: its header has 100"), "{refused}");
    long[12] ^= 1;
    assert_eq!(why(&long), refused, "not even the checksum is computed");
}

#[test]
fn one_of_another_model_is_refused_with_what_differs() {
    let other = Snapshot { extras: Extras::default(), ..snapshot() };
    let without = test_binding(false);
    let of_two = SequenceState { states: other.state.states[..2].to_vec(), ..other.state.clone() };
    let bytes = Snapshot { state: of_two, ..other }.encode(&without).unwrap();
    assert_eq!(why(&bytes), "is of another model: its states are S0, S1, and the model's S0, S1, S2, S3");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]
    #[test]
    fn a_header_that_lies_is_refused_or_read_as_what_it_says(
        sizes in prop::collection::vec(prop_oneof![0usize..40, Just(usize::MAX), Just(1 << 40)], 6),
        dims in prop::collection::vec(prop_oneof![-2i64..9, Just(i64::MAX)], 4), data in 0usize..120,
    ) {
        let entry = |name: &str, datatype: &str, shape: &[i64], size: usize| {
            serde_json::json!({ "name": name, "datatype": datatype, "shape": shape, "byte_size": size })
        };
        let header = serde_json::json!({
            "states": [
                entry("S0", "FP32", &[1, dims[0]], sizes[0]), entry("S1", "FP32", &[1, 4], sizes[1]),
                entry("S2", "FP32", &[1, dims[1]], sizes[2]), entry("S3", "BYTES", &[1, dims[2]], sizes[3]),
            ],
            "contexts": [entry("X=2@1", "FP32", &[1, 2], sizes[4])],
            "held_inputs": [entry("X", "FP32", &[1, dims[3]], sizes[5])],
            "steps": 3,
        });
        let bytes = sealed(header.to_string(), &vec![0; data]);
        if let Ok(read) = Snapshot::decode(&bytes, &test_binding(true)) {
            prop_assert_eq!(read.state.states.iter().map(|state| state.dims.len()).collect::<Vec<_>>(), vec![2; 4]);
        }
    }

    #[test]
    fn random_bytes_are_refused(header in ".{0,60}", data in prop::collection::vec(any::<u8>(), 0..60)) {
        why(&sealed(&header, &data));
        why(&data);
    }
}
