//! The stores do what records promise, and the protocol holds on them: with a real Valkey, and with servers that are
//! killed.

#![allow(clippy::unwrap_used, reason = "all of this is a test")]

mod asking;
mod cluster;
mod kill;
mod replicas;
mod sentinel;
mod terminator;
mod tls;
mod valkey;

use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use rustix::process::Signal;
use state_store::{
    Change, Claimed, Hold, Keeper, Location, Op, Record, Reply, Saved, Settings, Store, StoreError, Token,
};
use terminator::Terminator;
use valkey::Valkey;

const SETTINGS: Settings =
    Settings { ttl: Duration::from_secs(60), timeout: Duration::from_millis(300), server: None, replicas: 0 };

fn open(location: &str) -> Arc<dyn Store> {
    state_store::open(&Location::new(location).unwrap(), SETTINGS).unwrap()
}

fn keeper(location: &str) -> Keeper {
    Keeper::new(open(location), "model/1", SETTINGS)
}

/// A store of each kind.
struct Stores {
    valkey: Valkey,
    /// In front of the same Valkey.
    terminator: Terminator,
    folder: tempfile::TempDir,
}

impl Stores {
    fn new() -> Self {
        let valkey = Valkey::start(&[]);
        let terminator = Terminator::start(valkey.socket(), |authority| authority.server());
        Self { valkey, terminator, folder: tempfile::tempdir().unwrap() }
    }

    fn locations(&self) -> [String; 3] {
        // The sequences of the tests have the same ids in each.
        let tls = self.terminator.location("rediss", "/1");
        [format!("file:{}", self.folder.path().display()), self.valkey.location(""), tls]
    }
}

/// An operation with bytes of its own.
#[derive(Clone, Debug)]
enum Step {
    Start(u8),
    Reserve(u8),
    Replace([u8; 2], u8, Vec<u8>),
    Resume(u8),
    Check(u8),
    Release(u8, Option<Vec<u8>>),
    Save(u8, Vec<u8>),
    Restore(u8, Vec<u8>),
    End([u8; 2], u8, Vec<u8>),
}

impl Step {
    /// `old` gets the tokens of the records that may be there.
    fn operation<'a>(&'a self, old: &'a mut Vec<Token>) -> Op<'a> {
        let token = |number: &u8| Token::from_bytes([*number; Token::BYTES]);
        if let Self::Replace(of, ..) | Self::End(of, ..) = self {
            old.extend(of.iter().map(token));
        }
        match self {
            Self::Start(of) => Op::Start { token: token(of), asks: true },
            Self::Reserve(of) => Op::Reserve { token: token(of) },
            Self::Replace(_, of, blob) => Op::Replace { old, token: token(of), blob },
            Self::Resume(of) => Op::Resume { token: token(of), asks: true },
            Self::Release(of, blob) => Op::Release { token: token(of), blob: blob.as_deref() },
            Self::Check(of) => Op::Check { token: token(of) },
            Self::Save(of, blob) => Op::Save { token: token(of), blob },
            Self::Restore(of, blob) => Op::Restore { token: token(of), blob },
            Self::End(_, of, answer) => Op::End { token: token(of), old, answer },
        }
    }
}

/// What a record is after an operation, in plain words.
fn apply(record: &mut Option<Record>, step: &Step) -> Reply {
    let mut old = Vec::new();
    let operation = step.operation(&mut old);
    let owner = if let Some(Record::Live { token, .. }) = &*record { Some(*token) } else { None };
    let is_ours = |token| owner == Some(token);
    match (operation, &*record) {
        (Op::Reserve { .. }, Some(Record::Live { token, blob })) if !blob.is_empty() => Reply::Lives(*token),
        (Op::Start { token, .. } | Op::Reserve { token }, _) => {
            *record = Some(Record::Live { token, blob: Vec::new() });
            Reply::Done
        }
        (Op::Restore { token, blob }, None) => {
            *record = Some(Record::Live { token, blob: blob.to_vec() });
            Reply::Done
        }
        (_, None) => Reply::Absent,
        (Op::Replace { old, token, .. } | Op::End { token, old, .. }, Some(Record::Live { token: of_record, .. }))
            if token != *of_record && !old.contains(of_record) =>
        {
            Reply::Moved
        }
        (Op::Replace { token, blob, .. }, _) => {
            *record = Some(Record::Live { token, blob: blob.to_vec() });
            Reply::Done
        }
        (Op::Resume { .. }, Some(Record::Ended(answer))) if !answer.is_empty() => Reply::Answered(answer.clone()),
        (_, Some(Record::Ended(_))) => Reply::Ended,
        (Op::Resume { .. }, Some(Record::Live { blob, .. })) if blob.is_empty() => Reply::Unsaved,
        (Op::Resume { token, .. }, Some(Record::Live { blob, .. })) => {
            let blob = blob.clone();
            *record = Some(Record::Live { token, blob: blob.clone() });
            Reply::Taken(blob)
        }
        (Op::Check { token }, _) => {
            if is_ours(token) {
                Reply::Done
            } else {
                Reply::Moved
            }
        }
        (Op::Save { token, .. } | Op::Restore { token, .. } | Op::Release { token, .. }, _) if !is_ours(token) => {
            Reply::Moved
        }
        (Op::Release { blob: None, .. }, _) => Reply::Done,
        (Op::Save { token, blob } | Op::Restore { token, blob } | Op::Release { token, blob: Some(blob) }, _) => {
            *record = Some(Record::Live { token, blob: blob.to_vec() });
            Reply::Done
        }
        (Op::End { answer, .. }, _) => {
            *record = Some(Record::Ended(answer.to_vec()));
            Reply::Done
        }
    }
}

fn steps() -> impl Strategy<Value = Vec<(u8, Step)>> {
    let blob = || prop::collection::vec(any::<u8>(), 0..6);
    let step = prop_oneof![
        (0..3u8).prop_map(Step::Start),
        (0..3u8).prop_map(Step::Reserve),
        ([0..3u8, 0..3u8], 0..3u8, blob()).prop_map(|(old, token, blob)| Step::Replace(old, token, blob)),
        (0..3u8).prop_map(Step::Resume),
        (0..3u8).prop_map(Step::Check),
        (0..3u8, blob()).prop_map(|(token, blob)| Step::Save(token, blob)),
        (0..3u8, blob()).prop_map(|(token, blob)| Step::Restore(token, blob)),
        (0..3u8, prop::option::of(blob())).prop_map(|(token, blob)| Step::Release(token, blob)),
        ([0..3u8, 0..3u8], 0..3u8, blob()).prop_map(|(old, token, answer)| Step::End(old, token, answer)),
    ];
    prop::collection::vec((0..2u8, step), 1..40)
}

#[test]
fn every_store_does_what_records_promise() {
    let stores = Stores::new();
    does_what_records_promise(&stores.locations().map(|location| open(&location)));
}

fn does_what_records_promise(stores: &[Arc<dyn Store>]) {
    let run = Cell::new(0_u32);
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig { cases: 60, ..ProptestConfig::default() });
    let checked = runner.run(&steps(), |steps| {
        run.set(run.get() + 1);
        let keys = [0, 1].map(|number| format!("{}/{number}", run.get()));
        let mut records = [None, None];
        let wanted: Vec<_> = steps.iter().map(|(of, step)| apply(&mut records[usize::from(*of)], step)).collect();
        for store in stores {
            // One call for all: the operations of a call see those before them. Valkey explains what it refused after
            // the whole call, so it gets them one by one.
            let replies = if store.is_shared() {
                let one = |(of, step): &(u8, Step)| {
                    let key = keys[usize::from(*of)].as_bytes();
                    store.apply(&[(key, step.operation(&mut Vec::new()))]).unwrap().remove(0)
                };
                steps.iter().map(one).collect()
            } else {
                let mut old = vec![Vec::new(); steps.len()];
                let all = steps.iter().zip(&mut old);
                let all = all.map(|((of, step), old)| (keys[usize::from(*of)].as_bytes(), step.operation(old)));
                store.apply(&all.collect::<Vec<_>>()).unwrap()
            };
            prop_assert_eq!(&replies, &wanted);
        }
        Ok(())
    });
    checked.unwrap();
}

fn reserved(keeper: &Keeper, id: &[u8]) -> Hold {
    keeper.reserve(vec![keeper.hold(id).unwrap()]).unwrap().remove(0)
}

fn start(keeper: &Keeper, id: &[u8], blob: &[u8]) -> Hold {
    match save(keeper, &reserved(keeper, id), blob) {
        Saved::Done(hold) => hold,
        other => panic!("{other:?}"),
    }
}

fn save(keeper: &Keeper, hold: &Hold, blob: &[u8]) -> Saved {
    keeper.save(&[Change::Step(hold, blob)]).unwrap().remove(0)
}

fn claim(keeper: &Keeper, id: &[u8]) -> Claimed {
    keeper.claim(&[(id, true)]).unwrap().remove(0)
}

fn taken(keeper: &Keeper, id: &[u8]) -> (Hold, Vec<u8>) {
    match claim(keeper, id) {
        Claimed::Taken(hold, blob) => (hold, blob),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_sequence_goes_on_where_it_was_saved_and_its_old_owner_saves_nothing() {
    let stores = Stores::new();
    for location in stores.locations() {
        let (old, new) = (keeper(&location), keeper(&location));
        let hold = start(&old, b"n7", b"one");
        assert!(matches!(save(&old, &hold, b"two"), Saved::Done(_)));
        let (of_new, blob) = taken(&new, b"n7");
        assert_eq!(blob, b"two");
        assert!(matches!(save(&old, &hold, b"stale"), Saved::Moved));
        assert!(matches!(save(&new, &of_new, b"three"), Saved::Done(_)));
        assert_eq!(taken(&old, b"n7").1, b"three");
    }
}

#[test]
fn an_ended_sequence_does_not_come_back() {
    let stores = Stores::new();
    for location in stores.locations() {
        let (old, new) = (keeper(&location), keeper(&location));
        let hold = start(&old, b"n7", b"one");
        let (of_new, _) = taken(&new, b"n7");
        assert!(matches!(new.save(&[Change::End(&of_new, b"")]).unwrap()[0], Saved::Done(_)));
        assert!(matches!(save(&old, &hold, b"stale"), Saved::Ended));
        assert!(matches!(claim(&old, b"n7"), Claimed::Ended(answer) if answer.is_empty()));
        // The next life of the id has nothing of it, and nothing of the old owner reaches it.
        let next = start(&new, b"n7", b"next");
        assert!(matches!(save(&old, &hold, b"stale"), Saved::Moved));
        assert!(matches!(save(&new, &next, b"on"), Saved::Done(_)));
        assert!(matches!(claim(&new, b"n8"), Claimed::Absent));
    }
}

#[test]
fn the_answer_to_an_end_is_kept_until_the_id_is_used_again() {
    let stores = Stores::new();
    for location in stores.locations() {
        let keeper = keeper(&location);
        let hold = start(&keeper, b"n7", b"one");
        assert!(matches!(keeper.save(&[Change::End(&hold, b"bye")]).unwrap()[0], Saved::Done(_)));
        for _ in 0..2 {
            assert!(matches!(claim(&keeper, b"n7"), Claimed::Ended(answer) if answer == b"bye"));
        }
        let next = start(&keeper, b"n7", b"next");
        assert!(matches!(keeper.save(&[Change::End(&next, b"")]).unwrap()[0], Saved::Done(_)));
        assert!(matches!(claim(&keeper, b"n7"), Claimed::Ended(answer) if answer.is_empty()));
        let next = start(&keeper, b"n7", b"next");
        assert!(matches!(keeper.save(&[Change::End(&next, b"late")]).unwrap()[0], Saved::Done(_)));
        assert!(matches!(claim(&keeper, b"n7"), Claimed::Ended(answer) if answer == b"late"));
    }
}

#[test]
fn a_start_replaces_only_the_sequence_that_was_there_before_it_ran() {
    let stores = Stores::new();
    for location in stores.locations() {
        let (one, other) = (keeper(&location), keeper(&location));
        let old = start(&one, b"n7", b"old");
        let late = reserved(&one, b"n7");
        assert!(late.replaces() && !reserved(&one, b"n8").replaces());
        // It stays until the START has run, and its steps are saved.
        assert!(matches!(save(&one, &old, b"older"), Saved::Done(_)));
        let young = start(&other, b"n7", b"young");
        assert!(matches!(save(&one, &late, b"late"), Saved::Moved));
        assert!(matches!(one.save(&[Change::End(&late, b"")]).unwrap()[0], Saved::Moved));
        assert!(matches!(save(&other, &young, b"younger"), Saved::Done(_)));
        // A START that has saved nothing is not waited for.
        let (lost, next) = (reserved(&one, b"n9"), start(&other, b"n9", b"next"));
        assert!(matches!(save(&one, &lost, b"lost"), Saved::Moved));
        assert!(matches!(save(&other, &next, b"on"), Saved::Done(_)));
        // It ends meanwhile.
        let next = reserved(&one, b"n7");
        assert!(matches!(other.save(&[Change::End(&young, b"bye")]).unwrap()[0], Saved::Done(_)));
        assert!(matches!(save(&one, &next, b"next"), Saved::Done(_)));
        // Two STARTs of a server.
        let (second, mut third) = (reserved(&one, b"n7"), reserved(&one, b"n7"));
        assert!(second.replaces() && third.replaces());
        third.also_replaces([second.token()].into_iter());
        assert!(matches!(save(&one, &second, b"second"), Saved::Done(_)));
        assert!(matches!(save(&one, &third, b"third"), Saved::Done(_)));
        assert_eq!(taken(&other, b"n7").1, b"third");
        // A START that fails ends what it would have replaced.
        start(&other, b"n7", b"young");
        assert!(matches!(one.save(&[Change::End(&reserved(&one, b"n7"), b"")]).unwrap()[0], Saved::Done(_)));
        assert!(matches!(claim(&other, b"n7"), Claimed::Ended(_)));
    }
}

#[test]
fn a_record_that_the_store_has_lost_comes_back_from_its_owner() {
    let valkey = Valkey::start(&[]);
    let (owner, other) = (keeper(&valkey.location("")), keeper(&valkey.location("")));
    let hold = start(&owner, b"n7", b"one");
    valkey.command(&["FLUSHALL"]);
    assert!(matches!(claim(&other, b"n7"), Claimed::Absent));
    assert_eq!(owner.check(&[&hold]).unwrap(), [true]);
    assert!(matches!(save(&owner, &hold, b"two"), Saved::Done(_)));
    assert_eq!(taken(&other, b"n7").1, b"two");
    assert_eq!(owner.check(&[&hold]).unwrap(), [false]);
}

#[test]
fn a_record_expires_and_its_owner_does_not_bring_it_back() {
    let valkey = Valkey::start(&[]);
    let settings = Settings { ttl: Duration::from_millis(30), ..SETTINGS };
    let store = state_store::open(&Location::new(&valkey.location("")).unwrap(), settings).unwrap();
    let keeper = Keeper::new(store, "model/1", settings);
    let hold = start(&keeper, b"n7", b"one");
    std::thread::sleep(Duration::from_millis(200));
    assert!(matches!(claim(&keeper, b"n7"), Claimed::Absent));
    assert!(matches!(save(&keeper, &hold, b"three"), Saved::Absent));
}

#[test]
fn a_store_that_does_not_answer_is_an_error_within_its_time_and_serves_again_later() {
    let mut valkey = Valkey::start(&["--appendonly", "yes", "--appendfsync", "always"]);
    let keeper = keeper(&valkey.location(""));
    let hold = start(&keeper, b"n7", b"one");
    let fails = |keeper: &Keeper, within: Duration| {
        let began = Instant::now();
        let changes = [Change::Step(&hold, b"x"), Change::Step(&hold, b"x"), Change::Step(&hold, b"x")];
        let error = keeper.save(&changes).unwrap_err();
        assert!(matches!(error, StoreError::Unreachable(_)), "{error}");
        assert!(began.elapsed() < within, "{:?}", began.elapsed());
    };
    valkey.signal(Signal::STOP);
    fails(&keeper, Duration::from_secs(5));
    valkey.signal(Signal::CONT);
    valkey.signal(Signal::KILL);
    fails(&keeper, Duration::from_secs(5));
    valkey.start_again();
    let until = Instant::now() + Duration::from_secs(10);
    let claimed = loop {
        match keeper.claim(&[(b"n7", true)]) {
            Ok(mut claimed) => break claimed.remove(0),
            Err(_) if Instant::now() < until => std::thread::sleep(Duration::from_millis(20)),
            Err(error) => panic!("{error}"),
        }
    };
    assert!(matches!(claimed, Claimed::Taken(_, blob) if blob == b"one" || blob == b"x"));
}

#[test]
fn no_request_waits_for_the_requests_before_it_when_a_store_does_not_answer() {
    let mut valkey = Valkey::start(&[]);
    let keeper = keeper(&valkey.location(""));
    start(&keeper, b"n7", b"one");
    valkey.signal(Signal::STOP);
    let began = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..30 {
            scope.spawn(|| assert!(keeper.claim(&[(b"n7", true)]).is_err()));
        }
    });
    assert!(began.elapsed() < Duration::from_secs(3), "{:?}", began.elapsed());
}

#[test]
fn a_store_that_refuses_says_so() {
    let valkey = Valkey::start(&["--maxmemory-policy", "noeviction"]);
    let keeper = keeper(&valkey.location(""));
    let hold = start(&keeper, b"n7", b"one");
    let refused = |wanted: &str| {
        let error = keeper.save(&[Change::Step(&hold, b"two")]).unwrap_err();
        assert!(matches!(&error, StoreError::Refuses(why) if why.contains(wanted)), "{error}");
        let error = keeper.reserve(vec![keeper.hold(b"n8").unwrap()]).unwrap_err();
        assert!(matches!(&error, StoreError::Refuses(why) if why.contains(wanted)), "{error}");
    };
    valkey.command(&["CONFIG", "SET", "maxmemory", "1"]);
    refused("OOM");
    valkey.command(&["CONFIG", "SET", "maxmemory", "0"]);
    valkey.command(&["REPLICAOF", "127.0.0.1", "1"]);
    refused("replica");
    valkey.command(&["REPLICAOF", "NO", "ONE"]);
    assert!(matches!(save(&keeper, &hold, b"two"), Saved::Done(_)));
}

#[test]
fn users_and_passwords_are_checked_and_not_repeated() {
    let valkey = Valkey::start(&["--requirepass", "hush-hush"]);
    let file = tempfile::NamedTempFile::new().unwrap();
    let with = |password: &str, user: &str| {
        std::fs::write(file.path(), password).unwrap();
        let options = format!("?password_file={}{user}", file.path().display());
        Keeper::new(open(&valkey.location(&options)), "m", SETTINGS).claim(&[(b"n7", true)])
    };
    assert!(matches!(with("hush-hush", "").unwrap()[0], Claimed::Absent));
    assert!(matches!(with("hush-hush\n", "&user=default").unwrap()[0], Claimed::Absent));
    for error in [with("wrong-wrong", "").unwrap_err(), with("hush-hush", "&user=nobody").unwrap_err()] {
        assert!(matches!(error, StoreError::Denied(_)), "{error}");
        assert!(!format!("{error} {error:?}").contains("hush") && !error.to_string().contains("wrong-wrong"));
    }
    let without = Keeper::new(open(&valkey.location("")), "m", SETTINGS).claim(&[(b"n7", true)]).unwrap_err();
    assert!(matches!(without, StoreError::Denied(_)), "{without}");
    // A user that may not write.
    valkey.command_as("hush-hush", &["ACL", "SETUSER", "reader", "on", ">secret", "~*", "+@read"]);
    let reader = with("secret", "&user=reader").unwrap_err();
    assert!(matches!(reader, StoreError::Denied(_)), "{reader}");
    // One that may do what docs/cluster.md lists.
    valkey.command_as("hush-hush", &writer(&[]));
    std::fs::write(file.path(), "secret").unwrap();
    let options = format!("?db=1&user=writer&password_file={}", file.path().display());
    let keeper = Keeper::new(open(&valkey.location(&options)), "m", SETTINGS);
    let hold = start(&keeper, b"n7", b"one");
    assert!(matches!(save(&keeper, &hold, b"two"), Saved::Done(_)));
    let (hold, _) = taken(&keeper, b"n7");
    let other = reserved(&keeper, b"n8");
    let changes = [Change::End(&hold, b""), Change::End(&other, b"")];
    assert!(keeper.save(&changes).unwrap().iter().all(|saved| matches!(saved, Saved::Done(_))));
}

/// Makes a user with the rights that docs/cluster.md lists, and these.
fn writer<'a>(more: &[&'a str]) -> Vec<&'a str> {
    let user = "ACL SETUSER writer on >secret resetkeys";
    let rights = "-@all +get +set +hget +hset +exists +strlen +rename +unlink +pexpire +eval +auth +select +publish +subscribe \
                  +unsubscribe +punsubscribe ~o{m:* ~b{m:* resetchannels &stateful:*";
    user.split(' ').chain(rights.split_whitespace()).chain(more.iter().copied()).collect()
}

#[test]
fn a_network_without_a_store_is_an_error() {
    // Nothing listens on port 1.
    let keeper = keeper("redis://127.0.0.1:1");
    assert!(matches!(keeper.claim(&[(b"n7", true)]), Err(StoreError::Unreachable(_))));
}
