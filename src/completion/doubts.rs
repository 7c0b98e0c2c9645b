//! Doubts about what is written and served as it is: a `control_input` that the model doesn't have beside an input that
//! nothing feeds, one whose kind or values its name contradicts, and a state with two initial values.

use crate::config::{Control, ControlKind, PartialConfig, StatePair, States};
use crate::session::Signature;

const OF_START: &[&str] = &["start", "starts", "begin", "begins", "first", "init", "initial", "reset", "new", "bos"];
const OF_END: &[&str] = &["end", "ends", "last", "final", "finish", "stop", "eos"];
const OF_READY: &[&str] = &["ready", "valid", "active"];
/// Words of inputs that are 0 where a sequence begins or ends, and 1 elsewhere.
const OF_OTHERS: &[&str] = &["not", "no", "non", "keep", "carry", "continue", "cont", "mask", "inverted", "inv"];

/// The warnings for a model with these states.
pub fn warnings(config: &PartialConfig, signature: &Signature, pairs: &[StatePair]) -> Vec<String> {
    let names = signature.input_names();
    let is_input = |control: &&Control| names.contains(&control.name.as_str());
    let doubtful = config.controls().iter().filter(is_input).flat_map(of_name);
    let unfed = unfed_default(config, signature, pairs);
    let misspelt = config.controls().iter().filter(|control| !is_input(control)).filter_map(|control| {
        unfed.map(|input| {
            format!(
                "control_input '{}' is no input of the model, so the model doesn't get it, and nothing feeds the model's \
                 input '{input}', which keeps its initializer's value: correct the name if it is meant for that",
                control.name
            )
        })
    });
    doubtful.chain(misspelt).chain(two_initial_values(&config.states)).collect()
}

/// Warns of states with an `initial_state` and an entry of `initial_states`.
fn two_initial_values(states: &States) -> Option<String> {
    let is_declared =
        |name: &str| states.declared.iter().any(|state| state.pair.input == name && state.initial.is_some());
    let (name, _) = states.initial.iter().find(|(name, _)| is_declared(name))?;
    Some(format!(
        "state '{name}' has an initial_state in 'sequence_batching.state', which counts, and a value in parameter \
         'initial_states': remove the one that is wrong"
    ))
}

/// An input with an initializer that is no state, and that the configuration doesn't name.
fn unfed_default<'a>(config: &PartialConfig, signature: &'a Signature, pairs: &[StatePair]) -> Option<&'a str> {
    let taken = config.taken();
    let is_fed = |name: &str| {
        taken.contains(&name)
            || config.inputs.iter().any(|input| input.name == name)
            || pairs.iter().any(|pair| pair.input == name)
    };
    signature.defaults.iter().map(|info| info.name.as_str()).find(|name| !is_fed(name))
}

/// What the name of a control input says against its kind and its values.
fn of_name(control: &Control) -> Option<String> {
    let (own, other, values, kind) = match control.kind {
        ControlKind::Start(values) => (OF_START, Some((OF_END, "CONTROL_SEQUENCE_END")), values, "first"),
        ControlKind::End(values) => (OF_END, Some((OF_START, "CONTROL_SEQUENCE_START")), values, "last"),
        ControlKind::Ready(values) => (OF_READY, None, values, ""),
        ControlKind::CorrelationId(_) => return None,
    };
    let words = words(&control.name);
    let has = |of: &[&str]| words.iter().any(|word| of.contains(&word.as_str()));
    let name = &control.name;
    if let Some((words, meant)) = other
        && has(words)
        && !has(own)
    {
        return Some(format!(
            "control_input '{name}' is true in the {kind} request of a sequence, and by its name {meant} may be meant: \
             correct its kind if it is"
        ));
    }
    let where_true =
        if other.is_some() { format!("the {kind} request of a sequence") } else { "each request".to_owned() };
    (values.yes == 0.0 && values.no != 0.0 && !has(OF_OTHERS)).then(|| {
        format!(
            "control_input '{name}' is 0 in {where_true} and {} elsewhere: the value for false comes first, so write the \
             two in the other order if that is wrong",
            values.no
        )
    })
}

/// The words of a name, in small letters: `seqStart_1` has `seq`, `start` and `1`.
fn words(name: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut was_lower = false;
    for letter in name.chars() {
        let begins = !letter.is_alphanumeric() || (was_lower && letter.is_uppercase());
        if begins {
            words.push(String::new());
        }
        if letter.is_alphanumeric() {
            words.last_mut().expect("there is one").extend(letter.to_lowercase());
        }
        was_lower = letter.is_lowercase();
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::FalseTrue;

    #[test]
    fn a_name_is_taken_apart_into_words() {
        assert_eq!(words("seqStart_1"), ["seq", "start", "1"]);
        assert_eq!(words("START"), ["start"]);
    }

    #[test]
    fn names_that_say_nothing_or_the_same_raise_no_doubt() {
        let (usual, inverted) = (FalseTrue { no: 0.0, yes: 1.0 }, FalseTrue { no: 1.0, yes: 0.0 });
        let doubt = |name: &str, kind| of_name(&Control { name: name.to_owned(), kind });
        for name in ["START", "c", "is_first", "start_end"] {
            assert_eq!(doubt(name, ControlKind::Start(usual)), None);
        }
        for name in ["not_start", "keepState", "mask"] {
            assert_eq!(doubt(name, ControlKind::Start(inverted)), None);
        }
        for (name, kind, said) in [
            ("END", ControlKind::Start(usual), "'END' is true in the first request of a sequence"),
            ("reset", ControlKind::End(usual), "CONTROL_SEQUENCE_START may be meant"),
            ("START", ControlKind::Start(inverted), "is 0 in the first request of a sequence and 1 elsewhere"),
            ("READY", ControlKind::Ready(inverted), "is 0 in each request"),
        ] {
            assert!(doubt(name, kind).is_some_and(|doubt| doubt.contains(said)), "{name}");
        }
    }
}
