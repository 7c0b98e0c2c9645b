//! `replicas`: a write counts when replicas have it.

use super::valkey::wait_until;
use super::*;

fn with_replica(location: &str) -> Keeper {
    let settings = Settings { replicas: 1, ..SETTINGS };
    Keeper::new(state_store::open(&Location::new(location).unwrap(), settings).unwrap(), "model/1", settings)
}

fn refused<T: std::fmt::Debug>(result: Result<T, StoreError>) {
    let error = result.unwrap_err();
    let words = "0 of 1 replicas confirmed the write in time";
    assert!(matches!(&error, StoreError::Refuses(why) if why.contains(words)), "{error}");
}

#[test]
fn a_write_that_no_replica_has_is_refused() {
    let primary = Valkey::on_network(&[]);
    let (keeper, other) = (with_replica(&primary.location("")), keeper(&primary.location("")));
    refused(keeper.reserve(vec![keeper.hold(b"n7").unwrap()]));
    let mut replica = Valkey::replica(&primary);
    let hold = start(&keeper, b"n7", b"one");
    assert!(matches!(save(&keeper, &hold, b"two"), Saved::Done(_)));
    assert_eq!(keeper.check(&[&hold]).unwrap(), [true]);
    let (hold, blob) = taken(&keeper, b"n7");
    assert_eq!(blob, b"two");
    assert_eq!(replica.ask::<u32>(&["DBSIZE"]), 2);
    replica.signal(Signal::STOP);
    let began = Instant::now();
    refused(keeper.save(&[Change::Step(&hold, b"three")]));
    refused(keeper.claim(&[(b"n7", false)]));
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    // One that asks for no replica does not wait.
    let elsewhere = start(&other, b"n8", b"one");
    assert!(matches!(save(&other, &elsewhere, b"two"), Saved::Done(_)));
    replica.signal(Signal::CONT);
    let until = Instant::now() + Duration::from_secs(20);
    loop {
        match keeper.claim(&[(b"n7", false)]) {
            // The primary had taken it.
            Ok(claimed) => break assert!(matches!(&claimed[0], Claimed::Taken(_, blob) if blob == b"three")),
            Err(error) => assert!(Instant::now() < until, "{error}"),
        }
    }
}

#[test]
fn an_end_that_no_replica_has_is_refused_whoever_repeats_it() {
    let primary = Valkey::on_network(&[]);
    let mut replica = Valkey::replica(&primary);
    let owner = with_replica(&primary.location(""));
    let hold = start(&owner, b"n7", b"one");
    replica.signal(Signal::STOP);
    let end = || [Change::End(&hold, b"bye")];
    refused(owner.save(&end()));
    // Each has a connection that has written nothing yet.
    refused(with_replica(&primary.location("")).claim(&[(b"n7", false)]));
    refused(with_replica(&primary.location("")).save(&end()));
    replica.signal(Signal::CONT);
    wait_until(|| with_replica(&primary.location("")).claim(&[(b"n7", false)]).is_ok());
    assert!(matches!(claim(&owner, b"n7"), Claimed::Ended(answer) if answer == b"bye"));
    assert!(matches!(owner.save(&end()).unwrap()[0], Saved::Done(_)));
}

#[test]
fn a_connection_to_a_replica_is_given_up() {
    let valkey = Valkey::start(&[]);
    let keeper = keeper(&valkey.location(""));
    let hold = start(&keeper, b"n7", b"one");
    let connections = || {
        let text: String = valkey.ask(&["INFO", "stats"]);
        let line = text.lines().find_map(|line| line.strip_prefix("total_connections_received:"));
        line.unwrap().parse::<u64>().unwrap()
    };
    valkey.command(&["REPLICAOF", "127.0.0.1", "1"]);
    let before = connections();
    for _ in 0..3 {
        let error = keeper.save(&[Change::Step(&hold, b"two")]).unwrap_err();
        assert!(matches!(&error, StoreError::Refuses(why) if why.contains("replica")), "{error}");
    }
    // Two new ones of the keeper, and that of the question.
    assert_eq!(connections(), before + 3);
}
