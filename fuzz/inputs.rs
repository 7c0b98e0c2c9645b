//! Inputs for a fuzz target where no fuzzer runs: its corpus, and random inputs that are the same each time.

use std::fs;
use std::path::Path;

/// Most bytes of a random input.
const BYTES_MAX: u64 = 600;

/// Runs a target on each file of its corpus, and on `count` random inputs. `STATEFUL_FUZZ_FACTOR` multiplies the
/// count. An input on which the target panics is printed.
pub fn run(name: &str, count: u64, target: impl Fn(&[u8])) {
    // Crates in other folders include this file, so the corpus may lie above the crate.
    let above = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    let mut folders = above.map(|folder| folder.join("fuzz/corpus").join(name));
    let folder = folders.find(|folder| folder.is_dir()).unwrap_or_else(|| panic!("there is no fuzz/corpus/{name}"));
    let entries = fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut files: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let corpus: Vec<Vec<u8>> = files.iter().map(|file| fs::read(file).unwrap()).collect();
    assert!(!corpus.is_empty(), "{} is empty", folder.display());
    let run_one = |bytes: &[u8]| {
        let _said = PrintInputOnPanic { name, bytes };
        target(bytes);
    };
    corpus.iter().for_each(|bytes| run_one(bytes));
    let factor = std::env::var("STATEFUL_FUZZ_FACTOR").map_or(1, |factor| factor.parse().unwrap());
    let mut chance = Chance(1);
    for _ in 0..count * factor {
        let mut bytes: Vec<u8> = if chance.below(2) == 0 {
            corpus[chance.below(corpus.len() as u64) as usize].clone()
        } else {
            (0..chance.below(BYTES_MAX)).map(|_| chance.below(256) as u8).collect()
        };
        for _ in 0..chance.below(5) {
            if !bytes.is_empty() {
                let at = chance.below(bytes.len() as u64) as usize;
                bytes[at] = chance.below(256) as u8;
            }
        }
        run_one(&bytes);
    }
}

/// Prints the input of a target that panics.
struct PrintInputOnPanic<'a> {
    name: &'a str,
    bytes: &'a [u8],
}

impl Drop for PrintInputOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let hex: String = self.bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            eprintln!("the target '{}' panicked on the input {hex} (xxd -r -p makes a file of it)", self.name);
        }
    }
}

/// Numbers that look random (splitmix64).
struct Chance(u64);

impl Chance {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % limit
    }
}
