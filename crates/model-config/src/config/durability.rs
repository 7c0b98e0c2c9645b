//! Whether sequences outlive their server: `state_store`, `durability` and the parameters for details.

use std::fmt;
use std::time::Duration;

use state_store::Location;

use super::parameters::{OF_STATE_STORE, Parameters};
use super::raw::{Result, bad};
use super::scheduling::YEAR;

const TTL_MS: u64 = 3_600_000;
const INTERVAL: Duration = Duration::from_secs(1);
const KEPT_ANSWER_BYTES: usize = 64 << 10;
// Half of what a store takes, so that there is room for a state.
const MOST_KEPT_BYTES: usize = 256 << 20;

/// The values of `durability`. With `none`, sequences end with their server.
const LEVELS: [(&str, Option<Durability>); 4] = [
    ("none", None),
    ("drain", Some(Durability::Drain)),
    ("interval", Some(Durability::Interval(INTERVAL))),
    ("step", Some(Durability::Step)),
];

/// When the steps of a sequence are saved (`durability`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    Drain,
    /// At most so long after they are made.
    Interval(Duration),
    /// Before they are answered.
    Step,
}

/// Where the states of a model's sequences are kept besides the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateStore {
    pub location: Location,
    pub durability: Durability,
    /// How many replicas of the store have a step before it is answered (`replicas`).
    pub replicas: u32,
    /// A sequence that was not saved for this long is forgotten.
    pub ttl: Duration,
    /// The most bytes of an answer that is kept for a client that sends its request again (`max_kept_answer_bytes`).
    /// Only with [`Durability::Step`].
    pub kept_answer_bytes: usize,
    /// The model is not served if the store can't be reached when it is loaded (`require_state_store`).
    pub is_required: bool,
}

impl fmt::Display for StateStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { location, durability, replicas, ttl, .. } = self;
        match durability {
            Durability::Step if *replicas > 0 => {
                write!(f, "each step is saved in {location} and {replicas} of its replicas before its answer")?;
            }
            Durability::Step => write!(f, "each step is saved in {location} before its answer")?,
            Durability::Interval(interval) => write!(f, "steps are saved in {location} within {interval:?}")?,
            Durability::Drain => write!(f, "sequences are saved in {location} when they leave the server")?,
        }
        write!(f, ", and stay there for {ttl:?}")
    }
}

impl StateStore {
    /// `None` if sequences end with their server. `by_server`: what the server's command line says.
    pub(super) fn new(
        parameters: &Parameters,
        by_server: Option<&Location>,
        is_decoupled: bool,
    ) -> Result<Option<Self>> {
        let read = |text| Location::new(text).map_err(|error| bad("state_store", hidden(text), error.to_string()));
        let location = parameters.text("state_store").map(read).transpose()?;
        let level = parameters.choice("durability", &LEVELS)?;
        let interval = parameters.number("save_interval_ms", 1u64.., "a number of milliseconds, 1 or more,")?;
        if let Some(interval) = interval.filter(|_| !matches!(level, Some(Some(Durability::Interval(_))))) {
            return Err(bad("save_interval_ms", interval, "it has an effect only with 'durability: interval'"));
        }
        let kept = parameters.number("max_kept_answer_bytes", 0usize..=MOST_KEPT_BYTES, "0 to 268435456 bytes")?;
        if let Some(kept) = kept.filter(|_| level.is_some_and(|level| level != Some(Durability::Step))) {
            return Err(bad("max_kept_answer_bytes", kept, "it has an effect only with 'durability: step'"));
        }
        let ttl = parameters.number("state_store_ttl_ms", 1u64.., "a number of milliseconds, 1 or more,")?;
        let is_required = parameters.flag("require_state_store", false)?;
        let replicas = parameters.number("replicas", 0u32.., "a number, 0 or more,")?.unwrap_or_default();
        if is_decoupled && location.is_some() && level != Some(None) {
            let why = "a request gets several answers with 'model_transaction_policy { decoupled: true }', and they are sent \
                       before its last step is saved: leave one of the two out";
            return Err(bad("state_store", hidden(parameters.text("state_store").unwrap_or_default()), why));
        }
        // The store of the command line is for all models that can use one, so such a model goes without it.
        let by_server = by_server.filter(|_| !is_decoupled);
        let location = match (location.or_else(|| by_server.cloned()), level) {
            (_, Some(None)) | (None, None) => {
                let needs = [("require_state_store", is_required), ("replicas", replicas > 0)];
                let Some((name, _)) = needs.into_iter().find(|(_, needs)| *needs) else { return Ok(None) };
                let why = "there is no store, or 'durability' is 'none': write parameter 'state_store', or \
                           --backend-config=stateful,state-store=..., or leave this out";
                return Err(bad(name, parameters.text(name).unwrap_or_default(), why));
            }
            (None, Some(_)) => {
                let why = "there is no store to save in: write parameter 'state_store', or --backend-config=stateful,\
                           state-store=...";
                return Err(bad("durability", parameters.text("durability").unwrap_or_default(), why));
            }
            (Some(location), _) => location,
        };
        for (name, why) in [
            ("park_ms", "a sequence that was idle for too long stays in the store without it"),
            ("max_parked_sequences", "a sequence that was idle for too long stays in the store"),
            ("id_reuse", "ids are not used again, because the store may still have the old sequence"),
        ] {
            parameters.refuse(name, &format!("with 'state_store', {why}: leave it out"))?;
        }
        let ttl = Duration::from_millis(ttl.unwrap_or(TTL_MS)).min(YEAR);
        let durability = match (level.flatten(), interval) {
            (_, Some(interval)) => Durability::Interval(Duration::from_millis(interval).min(YEAR)),
            (level, None) => level.unwrap_or(Durability::Step),
        };
        if replicas > 0 && durability != Durability::Step {
            let why = "it has an effect only with 'durability: step', which waits for the store";
            return Err(bad("replicas", replicas, why));
        }
        if replicas > 0 && !location.has_replicas() {
            let why = "a folder has no replicas: name Valkey or Redis in 'state_store', or leave it out";
            return Err(bad("replicas", replicas, why));
        }
        let kept_answer_bytes = kept.unwrap_or(KEPT_ANSWER_BYTES);
        Ok(Some(Self { location, durability, replicas, ttl, kept_answer_bytes, is_required }))
    }

    /// Refuses the parameters for a model that core schedules.
    pub(super) fn check_core_schedules(parameters: &Parameters) -> Result<()> {
        // 'none' asks for what a model that core schedules has anyway.
        let is_none = |name: &str, text: &str| name == "durability" && text == "none";
        let given = OF_STATE_STORE.into_iter().filter_map(|name| Some((name, parameters.text(name)?)));
        let Some((name, value)) = given.into_iter().find(|(name, text)| !is_none(name, text)) else { return Ok(()) };
        let why = "with 'sequence_batching', Triton's core refuses the requests of a sequence that it has not started \
                   itself, so no server could continue another server's sequence: leave 'sequence_batching' and \
                   'scheduling' out, or this parameter";
        Err(bad(name, if name == "state_store" { hidden(value) } else { value.to_owned() }, why))
    }
}

// Errors show only the scheme of a location, because the rest may contain a password.
fn hidden(text: &str) -> String {
    text.split_once(':').map_or_else(|| text.to_owned(), |(scheme, _)| format!("{scheme}:..."))
}

#[cfg(test)]
mod tests {
    use super::super::raw::Parameter;
    use super::*;
    use std::collections::BTreeMap;

    fn parameters(given: &[(&str, &str)]) -> Parameters {
        let parameter = |value: &str| Parameter { string_value: value.to_owned() };
        let written: BTreeMap<_, _> =
            given.iter().map(|(name, value)| ((*name).to_owned(), parameter(value))).collect();
        Parameters::new(written).unwrap()
    }

    fn read(given: &[(&str, &str)], by_server: Option<&str>) -> Result<Option<String>, String> {
        let by_server = by_server.map(|text| Location::new(text).unwrap());
        let store = StateStore::new(&parameters(given), by_server.as_ref(), false);
        store.map(|store| store.map(|store| store.to_string())).map_err(|error| error.to_string())
    }

    #[test]
    fn a_store_comes_from_the_model_or_the_server_and_none_turns_it_off() {
        let of = |text: Option<String>| text.map(|text| text.split(' ').nth(5).unwrap_or_default().to_owned());
        assert_eq!(of(read(&[("state_store", "file:/a")], Some("file:/b")).unwrap()), Some("file:/a".to_owned()));
        assert_eq!(of(read(&[], Some("file:/b")).unwrap()), Some("file:/b".to_owned()));
        assert_eq!(read(&[("durability", "none")], Some("file:/b")), Ok(None));
        assert_eq!(read(&[], None), Ok(None));
        let text = read(&[("state_store", "file:/a"), ("state_store_ttl_ms", "5000")], None).unwrap().unwrap();
        assert!(text.contains("5s"), "{text}");
    }

    #[test]
    fn the_level_says_when_steps_are_saved() {
        let level = |given: &[(&str, &str)]| {
            let given: Vec<_> = given.iter().copied().chain([("state_store", "file:/a")]).collect();
            StateStore::new(&parameters(&given), None, false).unwrap().unwrap().durability
        };
        assert_eq!(level(&[]), Durability::Step);
        assert_eq!(level(&[("durability", "drain")]), Durability::Drain);
        assert_eq!(level(&[("durability", "interval")]), Durability::Interval(Duration::from_secs(1)));
        let given = [("durability", "interval"), ("save_interval_ms", "20")];
        assert_eq!(level(&given), Durability::Interval(Duration::from_millis(20)));
    }

    #[test]
    fn replicas_of_a_store_can_be_asked_for() {
        let read = |given: &[(&str, &str)]| read(given, Some("redis://x")).unwrap().unwrap();
        assert!(read(&[("replicas", "2")]).contains("2 of its replicas"));
        assert!(!read(&[("replicas", "0")]).contains("replicas"));
        assert!(read(&[("replicas", "0"), ("durability", "drain")]).contains("leave the server"));
    }

    #[test]
    fn contradictions_are_refused_by_name() {
        let cases = [
            (vec![("durability", "step")], "no store"),
            (vec![("durability", "interval")], "no store"),
            (vec![("durability", "always")], "'none', 'drain', 'interval', 'step'"),
            (vec![("state_store", "file:/a"), ("save_interval_ms", "5")], "only with 'durability: interval'"),
            (vec![("durability", "interval"), ("save_interval_ms", "0")], "1 or more"),
            (vec![("require_state_store", "true")], "no store"),
            (vec![("state_store", "file:/a"), ("durability", "none"), ("replicas", "1")], "no store"),
            (vec![("durability", "drain"), ("max_kept_answer_bytes", "5")], "only with 'durability: step'"),
            (vec![("state_store", "file:/a"), ("max_kept_answer_bytes", "-1")], "0 to 268435456"),
            (vec![("state_store", "http://x")], "'state_store' is 'http:...'"),
            (vec![("state_store", "redis://a:hush@x")], "password_file"),
            (vec![("state_store", "file:/a"), ("park_ms", "5")], "'park_ms'"),
            (vec![("state_store", "file:/a"), ("id_reuse", "ovms")], "'id_reuse'"),
            (vec![("state_store", "file:/a"), ("state_store_ttl_ms", "0")], "1 or more"),
            (vec![("state_store", "file:/a"), ("replicas", "1")], "no replicas"),
            (
                vec![("state_store", "redis://x"), ("replicas", "1"), ("durability", "interval")],
                "only with 'durability",
            ),
            (vec![("state_store", "redis://x"), ("replicas", "-1")], "0 or more"),
        ];
        for (given, wanted) in cases {
            let error = read(&given, None).unwrap_err();
            assert!(error.contains(wanted) && !error.contains("hush"), "{error}");
        }
    }

    #[test]
    fn an_answer_for_each_step_is_not_for_a_store() {
        let location = Location::new("file:/b").unwrap();
        let new = |given: &[(&str, &str)]| StateStore::new(&parameters(given), Some(&location), true);
        assert!(new(&[("state_store", "file:/a")]).unwrap_err().to_string().contains("decoupled"));
        assert_eq!(new(&[]).unwrap(), None);
        assert_eq!(new(&[("state_store", "file:/a"), ("durability", "none")]).unwrap(), None);
    }

    #[test]
    fn core_cannot_schedule_a_model_with_a_store() {
        let check = |given: &[(&str, &str)]| StateStore::check_core_schedules(&parameters(given));
        let error = check(&[("state_store", "redis://a:hush@x")]).unwrap_err().to_string();
        assert!(error.contains("core refuses") && !error.contains("hush"), "{error}");
        assert!(check(&[("durability", "step")]).is_err());
        assert!(check(&[("durability", "none")]).is_ok() && check(&[]).is_ok());
    }
}
