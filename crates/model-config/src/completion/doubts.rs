//! Warnings about configurations that are probably mistakes: a misspelt control input, one whose name contradicts its kind
//! or its values, and two initial values for one state. Each is served as it is written.

use crate::config::{Control, ControlKind, PartialConfig, StatePair, States, similarity};
use crate::onnx::Signature;

const OF_START: &[&str] = &["start", "starts", "begin", "begins", "first", "init", "initial", "reset", "new", "bos"];
const OF_END: &[&str] = &["end", "ends", "last", "final", "finish", "stop", "eos"];
/// Words of inputs that are 0 where a sequence begins or ends, and 1 elsewhere.
const OF_OTHERS: &[&str] = &["not", "no", "non", "keep", "carry", "continue", "cont", "mask", "inverted", "inv"];

/// The warnings for a model with these states.
pub fn warnings(config: &PartialConfig, signature: &Signature, pairs: &[StatePair]) -> Vec<String> {
    let names = signature.input_names();
    let is_input = |control: &&Control| names.contains(&control.name.as_str());
    let doubtful = config.controls().iter().filter(is_input).filter_map(contradiction);
    let unfed = unfed_inputs(config, signature, pairs);
    let alike = |name: &str| unfed.iter().find(|input| similarity(input, name).is_some());
    let misspelt = config.controls().iter().filter(|control| !is_input(control)).filter_map(|control| {
        let (name, input) = (&control.name, alike(&control.name)?);
        Some(format!("control_input '{name}' is ignored, because the model has no such input{}", if_meant(input)))
    });
    let absent = config.states.declared.iter().filter(|state| !names.contains(&state.pair.input.as_str()));
    let absent = absent.map(|state| {
        let name = &state.pair.input;
        let meant = alike(name).map_or(String::new(), |input| if_meant(input));
        format!("'sequence_batching.state' '{name}' is ignored, because the model has no such input{meant}")
    });
    doubtful.chain(misspelt).chain(absent).chain(two_initial_values(&config.states)).collect()
}

fn if_meant(input: &str) -> String {
    format!("; if '{input}' is meant, correct the name")
}

/// Warns of the first state with an `initial_state` and an entry of `initial_states`.
fn two_initial_values(states: &States) -> Option<String> {
    let is_declared =
        |name: &str| states.declared.iter().any(|state| state.pair.input == name && state.initial.is_some());
    let (name, _) = states.initial.iter().find(|(name, _)| is_declared(name))?;
    Some(format!(
        "state '{name}' has an initial_state in 'sequence_batching.state', which counts, and a value in parameter \
         'initial_states': remove the one that is wrong"
    ))
}

/// The inputs that the configuration doesn't name.
fn unfed_inputs<'a>(config: &PartialConfig, signature: &'a Signature, pairs: &[StatePair]) -> Vec<&'a str> {
    let taken = config.taken();
    let is_fed = |name: &str| {
        taken.contains(&name)
            || config.inputs.iter().any(|input| input.name == name)
            || pairs.iter().any(|pair| pair.input == name)
    };
    signature.input_names().into_iter().filter(|name| !is_fed(name)).collect()
}

/// Warns if a control's name contradicts its kind or its values.
fn contradiction(control: &Control) -> Option<String> {
    let (values, of_kind) = match control.kind {
        ControlKind::Start(values) => (values, Some(("first", OF_START, OF_END, "CONTROL_SEQUENCE_END"))),
        ControlKind::End(values) => (values, Some(("last", OF_END, OF_START, "CONTROL_SEQUENCE_START"))),
        ControlKind::Ready(values) => (values, None),
        ControlKind::CorrelationId(_) => return None,
    };
    let words = words(&control.name);
    let has = |of: &[&str]| words.iter().any(|word| of.contains(&word.as_str()));
    let name = &control.name;
    if let Some((kind, own, other, meant)) = of_kind
        && has(other)
        && !has(own)
    {
        return Some(format!(
            "control_input '{name}' is true in the {kind} request of a sequence, and by its name {meant} may be meant: \
             correct its kind if it is"
        ));
    }
    if values.yes != 0.0 || values.no == 0.0 || has(OF_OTHERS) {
        return None;
    }
    let (is_true, is_false) = match of_kind {
        Some((kind, ..)) => (format!("the {kind} request of a sequence"), "in the others"),
        None => ("rows with a request".to_owned(), "for padding"),
    };
    Some(format!(
        "control_input '{name}' is 0 for {is_true} and {} {is_false}: the first of the two values is the one for false, so \
         swap them if that is wrong",
        values.no
    ))
}

/// The words of a name, in small letters: `seqStart_1` has `seq` and `start`.
fn words(name: &str) -> Vec<String> {
    let mut spaced = String::new();
    let mut was_lower = false;
    for letter in name.chars() {
        if was_lower && letter.is_uppercase() {
            spaced.push(' ');
        }
        was_lower = letter.is_lowercase();
        spaced.extend(letter.to_lowercase());
    }
    spaced.split(|letter: char| !letter.is_alphabetic()).filter(|word| !word.is_empty()).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::FalseTrue;

    #[test]
    fn a_name_is_taken_apart_into_words() {
        assert_eq!(words("seqStart_1"), ["seq", "start"]);
        assert_eq!(words("START"), ["start"]);
    }

    #[test]
    fn names_that_say_nothing_or_the_same_raise_no_doubt() {
        let (usual, inverted) = (FalseTrue { no: 0.0, yes: 1.0 }, FalseTrue { no: 1.0, yes: 0.0 });
        let doubt = |name: &str, kind| contradiction(&Control { name: name.to_owned(), kind });
        for name in ["START", "c", "is_first", "start_end"] {
            assert_eq!(doubt(name, ControlKind::Start(usual)), None);
        }
        for name in ["not_start", "keepState", "keep1", "mask"] {
            assert_eq!(doubt(name, ControlKind::Start(inverted)), None);
        }
        for (name, kind, said) in [
            ("END", ControlKind::Start(usual), "'END' is true in the first request of a sequence"),
            ("reset", ControlKind::End(usual), "CONTROL_SEQUENCE_START may be meant"),
            ("START", ControlKind::Start(inverted), "is 0 for the first request of a sequence and 1 in the others"),
            ("READY", ControlKind::Ready(inverted), "is 0 for rows with a request and 1 for padding"),
        ] {
            assert!(doubt(name, kind).is_some_and(|doubt| doubt.contains(said)), "{name}");
        }
    }
}
