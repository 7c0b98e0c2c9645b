//! Servers that are killed between any two instructions, with a folder.

use std::env;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use super::{Change, Claimed, Saved, keeper, start};

const FOLDER: &str = "STATE_STORE_TEST_FOLDER";
const ID: &[u8] = b"n7";

/// Not a test of its own: the process that is killed. It counts in the state, and prints each number that is saved.
#[test]
fn victim() {
    let Some(folder) = env::var_os(FOLDER) else { return };
    let keeper = keeper(&format!("file:{}", Path::new(&folder).display()));
    let (mut hold, mut count) = match keeper.claim(&[(ID, false)]).unwrap().remove(0) {
        Claimed::Taken(hold, blob) => (hold, u64::from_le_bytes(blob[..8].try_into().unwrap())),
        _ => (start(&keeper, ID, &[0; 3000]), 0),
    };
    println!("begins at {count}");
    loop {
        count += 1;
        // Of different sizes, so that pages of the file are freed and used again.
        let mut blob = vec![0; 1000 + (count as usize * 997) % 5000];
        blob[..8].copy_from_slice(&count.to_le_bytes());
        hold = match keeper.save(&[Change::Step(&hold, &blob)]).unwrap().remove(0) {
            Saved::Done(hold) => hold,
            other => panic!("{other:?}"),
        };
        println!("saved {count}");
    }
}

#[test]
fn what_was_saved_before_a_kill_is_there_after_it() {
    let folder = tempfile::tempdir().unwrap();
    let mut last = 0;
    for round in 0..10_u64 {
        let victim = Command::new(env::current_exe().unwrap())
            .args(["--exact", "kill::victim", "--nocapture"])
            .env(FOLDER, folder.path())
            .stdout(Stdio::piped())
            .spawn();
        let mut victim = victim.unwrap();
        let mut lines = BufReader::new(victim.stdout.take().unwrap()).lines().map(Result::unwrap);
        let begins =
            lines.find_map(|line| line.rsplit_once("begins at ").map(|(_, count)| count.parse::<u64>().unwrap()));
        let begins = begins.unwrap();
        // The process may have saved once more before it was killed, without reporting it.
        assert!(begins == last || begins == last + 1, "{last} was saved, and the store has {begins}");
        for line in lines.by_ref().take(1 + (round * 7 % 11) as usize) {
            last = line.strip_prefix("saved ").unwrap().parse().unwrap();
        }
        victim.kill().unwrap();
        victim.wait().unwrap();
        // What it had printed before it was killed.
        for line in lines {
            last = line.strip_prefix("saved ").and_then(|count| count.parse().ok()).unwrap_or(last);
        }
    }
    assert!(last > 10);
}
