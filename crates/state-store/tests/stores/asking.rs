//! A server that saves late is asked for a sequence before another one takes it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use super::*;

fn server(location: &str) -> Keeper {
    let settings = Settings { server: Some(Token::random().unwrap()), ..SETTINGS };
    Keeper::new(state_store::open(&Location::new(location).unwrap(), settings).unwrap(), "model/1", settings)
}

fn begin(keeper: &Keeper, id: &[u8]) -> Hold {
    let hold = keeper.hold(id).unwrap();
    match keeper.save(&[Change::Begin(&hold, true)]).unwrap().remove(0) {
        Saved::Done(hold) => hold,
        other => panic!("{other:?}"),
    }
}

fn claim_until_taken(keeper: &Keeper, id: &[u8]) -> Vec<u8> {
    let until = Instant::now() + Duration::from_secs(10);
    while Instant::now() < until {
        match claim(keeper, id) {
            Claimed::Taken(_, blob) => return blob,
            Claimed::Asked => thread::sleep(Duration::from_millis(2)),
            other => panic!("{other:?}"),
        }
    }
    panic!("it is not released");
}

#[test]
fn a_sequence_that_has_begun_and_was_not_saved_is_not_taken() {
    let stores = Stores::new();
    for location in stores.locations() {
        let old = server(&location);
        // What an older sequence of the id had is gone.
        start(&old, b"n7", b"older");
        let hold = begin(&old, b"n7");
        let other = server(&location);
        assert!(matches!(claim(&other, b"n7"), Claimed::Unsaved));
        assert!(matches!(save(&old, &hold, b"one"), Saved::Done(_)));
        assert_eq!(taken(&other, b"n7").1, b"one");
    }
}

#[test]
fn a_living_owner_is_asked_and_releases_its_newest_state() {
    let stores = Stores::new();
    let [_, socket, tls] = stores.locations();
    asked_and_released(&socket, || {});
    asked_and_released(&tls, || {});
}

/// `waits` until the owner listens.
pub fn asked_and_released(location: &str, waits: impl FnOnce()) {
    let (owner, other) = (Arc::new(server(location)), server(location));
    let hold = begin(&owner, b"n7");
    assert!(matches!(save(&owner, &hold, b"saved"), Saved::Done(_)));
    let (hears, stop) = (owner.clone(), Arc::new(AtomicBool::new(false)));
    let (stops, is_ready) = (stop.clone(), Arc::new(AtomicBool::new(false)));
    let ready = is_ready.clone();
    let listener = thread::spawn(move || {
        let mut asked = 0;
        let heard = hears.listen(&mut |id| {
            ready.store(true, Ordering::Release);
            if let Some(id) = id {
                assert!(id == b"n7" || id == b"n9");
                asked += 1;
                if asked == 3 && id == b"n7" {
                    let released = hears.save(&[Change::Release(&hold, Some(b"newest"))]).unwrap().remove(0);
                    assert!(matches!(released, Saved::Done(_)));
                }
            }
            !stops.load(Ordering::Acquire)
        });
        heard.unwrap();
        asked
    });
    while !is_ready.load(Ordering::Acquire) && !listener.is_finished() {
        thread::yield_now();
    }
    if listener.is_finished() {
        // Panics with the reason.
        listener.join().unwrap();
        panic!("it does not listen");
    }
    waits();
    assert_eq!(claim_until_taken(&other, b"n7"), b"newest");
    // The next one was not released, so another server waits before it starts the id anew.
    let next = other.hold(b"n9").unwrap();
    begin(&owner, b"n9");
    assert!(matches!(other.save(&[Change::Begin(&next, true)]).unwrap()[0], Saved::Asked));
    assert!(matches!(other.save(&[Change::Begin(&next, false)]).unwrap()[0], Saved::Done(_)));
    // A name that is not asked for is not heard, and a server doesn't ask itself.
    let mine = begin(&other, b"n8");
    assert!(matches!(save(&other, &mine, b"mine"), Saved::Done(_)));
    assert_eq!(claim_until_taken(&other, b"n8"), b"mine");
    stop.store(true, Ordering::Release);
    assert!(listener.join().unwrap() >= 4);
}

#[test]
fn an_owner_that_is_gone_or_late_is_not_waited_for() {
    let valkey = Valkey::start(&[]);
    let (owner, other) = (server(&valkey.location("")), server(&valkey.location("")));
    let hold = begin(&owner, b"n7");
    assert!(matches!(save(&owner, &hold, b"saved"), Saved::Done(_)));
    // It does not listen.
    assert_eq!(taken(&other, b"n7").1, b"saved");
    assert!(matches!(save(&owner, &hold, b"late"), Saved::Moved));
    assert!(matches!(owner.save(&[Change::Release(&hold, None)]).unwrap()[0], Saved::Moved));
}

#[test]
fn a_sequence_that_began_without_the_store_never_replaces_another_one() {
    let stores = Stores::new();
    for location in stores.locations() {
        let keeper = server(&location);
        let new = || keeper.hold(b"n7").unwrap();
        // There is a record that it can't know.
        start(&keeper, b"n7", b"other");
        assert!(matches!(save(&keeper, &new(), b"mine"), Saved::Moved));
        let (other, blob) = taken(&keeper, b"n7");
        assert_eq!(blob, b"other");
        assert!(matches!(keeper.save(&[Change::End(&new(), b"")]).unwrap()[0], Saved::Moved));
        assert!(matches!(keeper.save(&[Change::End(&other, b"")]).unwrap()[0], Saved::Done(_)));
        assert!(matches!(save(&keeper, &new(), b"mine"), Saved::Ended));
        // There is none.
        let free = keeper.hold(b"n8").unwrap();
        assert!(matches!(save(&keeper, &free, b""), Saved::Done(_)));
        assert!(matches!(save(&keeper, &free, b"mine"), Saved::Done(_)));
        assert_eq!(taken(&keeper, b"n8").1, b"mine");
    }
}
