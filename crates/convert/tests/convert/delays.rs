//! Steps that wait for later ones: padding in front of time, and a cut at its end.

use stateful_convert::Options;
use stateful_convert::onnx::schema::NodeProto;
use stateful_convert::report::StartsAt;

use crate::common::{Build, assert_equal, checked, node, refusal, states};

/// `[time, batch, 4]`, and what is computed with `delayed`.
fn model(padding: [i64; 2], then: impl Fn(Build) -> Build) -> Build {
    let build = Build::new().input("x", "time batch 4").output("y", "time batch 4");
    let build = build.ints("pads", &[6], &[padding[0], 0, 0, padding[1], 0, 0]).weights("value", &[]);
    then(build.node(node("Pad", "x pads value", "padded")))
}

/// Steps `start` to `end` of the padded ones.
fn part(build: Build, name: &str, start: i64, end: i64) -> Build {
    let bounds = [format!("{name}_start"), format!("{name}_end")];
    let build = build.ints(&bounds[0], &[1], &[start]).ints(&bounds[1], &[1], &[end]);
    build.ints(&format!("{name}_axis"), &[1], &[0]).node(NodeProto::make(
        "Slice",
        name,
        &["padded", &bounds[0], &bounds[1], &format!("{name}_axis")],
        &[name],
    ))
}

fn assert_delays(name: &str, build: Build) {
    let (converted, compared) = checked(build.bytes(), &Options::default()).unwrap();
    assert_eq!(states(&converted), ["the.pad.frames_in"], "{name}");
    assert!(matches!(converted.report.states[0].starts_at, StartsAt::Value(_)), "{name}");
    assert_equal(name, &compared);
}

#[test]
fn a_step_may_be_combined_with_earlier_ones() {
    assert_delays(
        "the step before",
        model([1, 0], |build| part(build, "before", 0, -1).node(node("Sub", "x before", "y"))),
    );
    assert_delays(
        "three before, and one",
        model([3, 0], |build| {
            let build = part(part(build, "third", 0, -3), "first", 2, -1);
            build.node(node("Sub", "third first", "both")).node(node("Add", "x both", "y"))
        }),
    );
    assert_delays(
        "the steps themselves",
        model([2, 0], |build| {
            let build = part(part(build, "own", 2, i64::MAX), "second", 0, -2);
            build.node(node("Sub", "own second", "y"))
        }),
    );
    // As PyTorch's F.pad(x, (0, 0, 1, -1)).
    assert_delays("a pad that cuts", model([1, -1], |build| build.node(node("Sub", "x padded", "y"))));
    assert_delays(
        "a pad that cuts less",
        model([3, -1], |build| part(build, "second", 1, -1).node(node("Sub", "x second", "y"))),
    );
}

#[test]
fn a_convolution_may_follow_a_delay() {
    let build = model([3, -1], |build| {
        let build = build.node(node("Transpose", "padded", "channels").with_ints("perm", &[1, 2, 0]));
        let build = build.weights("k", &[4, 4, 3]).node(node("Conv", "channels k", "made"));
        build.node(NodeProto::make("Transpose", "back", &["made"], &["y"]).with_ints("perm", &[2, 0, 1]))
    });
    assert_delays("convolution", build);
}

#[test]
fn parts_of_the_padded_steps_that_reach_ahead_are_refused() {
    let ahead = model([1, 0], |build| part(build, "part", 1, -1).node(node("Relu", "part", "y")));
    assert!(refusal(ahead.bytes(), &Options::default()).contains("Slice 'part' takes certain steps"));
    let limited = model([1, 0], |build| part(build, "part", 0, 2000).node(node("Relu", "part", "y")));
    assert!(refusal(limited.bytes(), &Options::default()).contains("limits the length of the input"));
    let ahead = model([1, -2], |build| build.node(node("Relu", "padded", "y")));
    assert!(
        refusal(ahead.bytes(), &Options::default()).contains("Pad 'the pad' pads or crops the time axis at its end")
    );
}

#[test]
fn an_einsum_of_each_step_is_followed() {
    let build = Build::new().input("x", "time batch 4").output("y", "time 1 batch 3").recurrent_weights(3);
    let mut product = node("Einsum", "x k", "made");
    product = crate::common::with_text(product, "equation", "tbi, ij -> tbj");
    let build = build.weights("k", &[4, 4]).node(product);
    let build = build.node(node("GRU", "made w r b", "y").with_int("hidden_size", 3));
    let (converted, compared) = checked(build.bytes(), &Options::default()).unwrap();
    assert_eq!(states(&converted), ["the.gru.h_in"]);
    assert_equal("einsum", &compared);
}
