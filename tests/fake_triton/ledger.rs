//! What the stand-in for Triton remembers: what lives, what was called, and what should not have happened.

use std::collections::BTreeSet;

use parking_lot::Mutex;

/// Kinds of objects that are made and must be given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    Error,
    Message,
    Request,
    Response,
    Factory,
}

/// Which calls fail.
#[derive(Clone, Debug, Default)]
pub enum Faults {
    #[default]
    None,
    /// The call of this function after so many that succeed.
    Nth { function: &'static str, after: usize },
    /// Every call of this function.
    Always(&'static str),
    /// One call in so many, of any function.
    Random { random: Random, one_in: u64 },
}

/// Choices: those of a fuzzer's bytes, and behind their end numbers that look random and are the same for the same seed
/// (splitmix64).
#[derive(Clone, Debug)]
pub struct Random {
    seed: u64,
    /// The bytes that are left, the next one last.
    bytes: Vec<u8>,
}

impl Random {
    pub const fn new(seed: u64) -> Self {
        Self { seed, bytes: Vec::new() }
    }

    pub fn of_bytes(bytes: &[u8]) -> Self {
        Self { seed: 0, bytes: bytes.iter().rev().copied().collect() }
    }

    /// Whether the fuzzer's bytes are used up.
    pub fn is_used_up(&self) -> bool {
        self.bytes.is_empty()
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        let bytes = if limit <= 256 { 1 } else { 8 };
        if let Some(behind) = self.bytes.len().checked_sub(bytes) {
            return self.bytes.drain(behind..).fold(0, |number, byte| number << 8 | u64::from(byte)) % limit;
        }
        self.bytes.clear();
        self.seed = self.seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.seed ^ (self.seed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % limit
    }

    pub fn one_in(&mut self, chances: u64) -> bool {
        self.below(chances) == 0
    }

    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }
}

#[derive(Default)]
struct Ledger {
    live: BTreeSet<(Kind, usize)>,
    violations: Vec<String>,
    faults: Faults,
    failed: usize,
}

static LEDGER: Mutex<Option<Ledger>> = Mutex::new(None);

fn with<T>(work: impl FnOnce(&mut Ledger) -> T) -> T {
    work(LEDGER.lock().get_or_insert_default())
}

/// Forgets everything.
pub fn reset() {
    *LEDGER.lock() = None;
}

/// Notes that an object was made.
pub fn made(kind: Kind, address: usize) {
    with(|ledger| ledger.live.insert((kind, address)));
}

/// Notes that an object was given back. False if it does not live, which is a violation.
pub fn gone(kind: Kind, address: usize, by: &str) -> bool {
    let lived = with(|ledger| ledger.live.remove(&(kind, address)));
    if !lived {
        violation(format!("{by} on a {kind:?} that does not live"));
    }
    lived
}

/// Notes that an object is used; it should live.
pub fn used(kind: Kind, address: usize, by: &str) {
    if !with(|ledger| ledger.live.contains(&(kind, address))) {
        violation(format!("{by} on a {kind:?} that does not live"));
    }
}

/// How many of a kind live.
pub fn live(kind: Kind) -> usize {
    with(|ledger| ledger.live.iter().filter(|(of, _)| *of == kind).count())
}

/// Notes something that must not happen. Panics may not cross into the backend, so [`violations`] tells later.
pub fn violation(what: String) {
    with(|ledger| ledger.violations.push(what));
}

/// What should not have happened and did.
pub fn violations() -> Vec<String> {
    with(|ledger| ledger.violations.clone())
}

/// Decides which calls fail from now on. Returns how many calls have failed under the last decision.
pub fn set_faults(faults: Faults) -> usize {
    with(|ledger| {
        ledger.faults = faults;
        std::mem::take(&mut ledger.failed)
    })
}

/// Whether this call of the function is to fail.
pub fn fails(function: &str) -> bool {
    with(|ledger| {
        let fails = match &mut ledger.faults {
            Faults::None => false,
            Faults::Nth { function: named, after } if *named == function => {
                let now = *after == 0;
                *after = after.wrapping_sub(1);
                now
            }
            Faults::Nth { .. } => false,
            Faults::Always(named) => *named == function,
            Faults::Random { random, one_in } => random.one_in(*one_in),
        };
        ledger.failed += usize::from(fails);
        fails
    })
}
