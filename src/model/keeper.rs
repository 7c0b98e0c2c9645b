//! Opens the store of a model's sequences.

use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use state_store::{Keeper, Location, Settings, StoreError, Token};

use crate::binding::Binding;
use crate::config::{Config, Durability};
use crate::error::LoadError;

/// How long a store on the network may take to answer.
const TIMEOUT: Duration = Duration::from_secs(1);

/// The open keepers of this process, each with its location and the prefix of its keys. Triton loads a model again before, or
/// while, it unloads the older instance.
static OPEN: Mutex<Vec<(String, Weak<Keeper>)>> = Mutex::new(Vec::new());

/// The store; `None` if sequences end with their server. A store that can't be reached now may be there later.
pub(super) fn keeper(config: &Config, binding: &Binding, version: u64) -> Result<Option<Arc<Keeper>>, LoadError> {
    let Some(of) = &config.state_store else { return Ok(None) };
    let unusable = |source| LoadError::StateStore { location: of.location.to_string(), source };
    let saves_later = of.durability != Durability::Step;
    let server = saves_later.then(Token::random).transpose().map_err(unusable)?;
    let settings = Settings { ttl: of.ttl, timeout: TIMEOUT, server, replicas: of.replicas };
    let store = state_store::open(&of.location, settings).map_err(unusable)?;
    // A server with another version of the model, or with other states, has other records.
    let space = format!("stateful:{}:{version}:{:08x}", config.model, states_hash(binding));
    let keeper = Keeper::new(store, &space, settings);
    match keeper.probe() {
        Ok(_) => {}
        Err(why @ (StoreError::Unreachable(_) | StoreError::Refuses(_))) if !of.is_required => log::warn!(
            "{}: parameter 'state_store' ({}): {why}; until it answers, {}",
            config.model,
            of.location,
            if saves_later { "nothing is saved" } else { "requests are refused" }
        ),
        Err(source) => return Err(unusable(source)),
    }
    let location = match &of.location {
        // The folder is there now, and may have several names.
        Location::File(folder) => folder.canonicalize().unwrap_or_else(|_| folder.clone()).display().to_string(),
        Location::Redis(_) => of.location.to_string(),
    };
    Ok(Some(open(format!("{location} {space}"), keeper)))
}

fn open(name: String, mut keeper: Keeper) -> Arc<Keeper> {
    let mut all = OPEN.lock();
    all.retain(|(_, open)| open.strong_count() > 0);
    keeper.follow(all.iter().filter(|(open, _)| *open == name).map(|(_, open)| open.clone()).collect());
    let keeper = Arc::new(keeper);
    all.push((name, Arc::downgrade(&keeper)));
    keeper
}

/// A hash of everything that a sequence of the model keeps: names, data types and dims.
fn states_hash(binding: &Binding) -> u32 {
    let mut text = String::new();
    for state in &binding.states {
        text += &format!("{} {:?} {:?};", binding.inputs[state.input].name, state.data_type, state.dims);
    }
    for (input, _, of) in binding.contexts() {
        let dims = binding.inputs[input].dims_of_part(of.axis, of.length as i64);
        text += &format!("{} {dims:?};", binding.context_name(input, of));
    }
    for &counter in &binding.counters {
        text += &format!("{};", binding.counter_name(counter));
    }
    for (input, _) in binding.request_inputs().filter(|(_, of)| of.is_held) {
        text += &format!("{} {:?};", input.name, input.data_type);
    }
    for (input, _, window) in binding.windows() {
        text += &format!("{} {:?};", binding.window_name(input, window), input.data_type);
    }
    crc32fast::hash(text.as_bytes())
}
