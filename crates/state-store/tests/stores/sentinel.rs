//! `redis+sentinel://`: the store is where the sentinels say, also after a fail-over.

use super::terminator::{Authority, Behind};
use super::valkey::{Sentinel, wait_until};
use super::*;

fn claimed_later(keeper: &Keeper, id: &[u8]) -> (Hold, Vec<u8>) {
    wait_until(|| keeper.claim(&[(b"other", false)]).is_ok());
    taken(keeper, id)
}

#[test]
fn sequences_go_on_after_a_fail_over() {
    let mut primary = Valkey::on_network(&[]);
    let replica = Valkey::replica(&primary);
    let sentinel = Sentinel::start(&primary);
    sentinel.knows_a_replica();
    // Nothing listens on port 1: the next sentinel is asked.
    let location = format!("redis+sentinel://127.0.0.1:1,localhost:{}/main?db=1", sentinel.port);
    let keeper = keeper(&location);
    let hold = start(&keeper, b"n7", b"one");
    assert!(matches!(save(&keeper, &hold, b"two"), Saved::Done(_)));
    wait_until(|| replica.says("keyspace", "db1:keys=2"));
    primary.signal(Signal::KILL);
    let (hold, blob) = claimed_later(&keeper, b"n7");
    assert!(blob == b"one" || blob == b"two");
    assert!(matches!(save(&keeper, &hold, b"three"), Saved::Done(_)));
    // The old primary comes back as a replica, and takes over without a fault: its clients are moved.
    primary.start_again();
    wait_until(|| primary.says("replication", "master_link_status:up"));
    sentinel.knows_a_replica();
    wait_until(|| replica.says("replication", "state=online"));
    sentinel.query::<()>(&["SENTINEL", "FAILOVER", "main"]);
    wait_until(|| replica.says("replication", "role:slave"));
    let (hold, blob) = claimed_later(&keeper, b"n7");
    assert_eq!(blob, b"three");
    assert!(matches!(save(&keeper, &hold, b"four"), Saved::Done(_)));
    assert_eq!(taken(&self::keeper(&location), b"n7").1, b"four");
}

#[test]
fn sentinels_that_know_nothing_or_do_not_answer_are_errors() {
    let valkey = Valkey::on_network(&[]);
    let sentinel = Sentinel::start(&valkey);
    let fails = |location: &str| keeper(location).claim(&[(b"n7", true)]).unwrap_err();
    let error = fails(&format!("redis+sentinel://localhost:{},127.0.0.1:1/other", sentinel.port));
    assert!(matches!(&error, StoreError::Denied(why) if why.contains("'other'")), "{error}");
    let error = fails("redis+sentinel://127.0.0.1:1/main");
    assert!(matches!(&error, StoreError::Unreachable(why) if why.contains("sentinel 127.0.0.1:1")), "{error}");
    // A store is no sentinel.
    let error = fails(&format!("redis+sentinel://localhost:{}/main", valkey.port()));
    assert!(error.to_string().contains("SENTINEL"), "{error}");
    // A sentinel that has not noticed a change yet.
    valkey.command(&["REPLICAOF", "127.0.0.1", "1"]);
    let error = fails(&format!("redis+sentinel://localhost:{}/main", sentinel.port));
    assert!(matches!(&error, StoreError::Refuses(why) if why.contains("it is a replica")), "{error}");
}

#[test]
fn primary_and_sentinels_have_passwords_and_rights_of_their_own() {
    let primary = Valkey::on_network(&[]);
    let _replica = Valkey::replica(&primary);
    let sentinel = Sentinel::start(&primary);
    sentinel.query::<()>(&["ACL", "SETUSER", "default", "on", ">of-sentinel"]);
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, name).unwrap();
        path.display().to_string()
    };
    let settings = Settings { replicas: 1, ..SETTINGS };
    let with = |options: &str| {
        let options = format!("user=writer&password_file={}{options}", file("secret"));
        let location = Location::new(&format!("redis+sentinel://localhost:{}/main?{options}", sentinel.port)).unwrap();
        Keeper::new(state_store::open(&location, settings).unwrap(), "m", settings)
    };
    let of_sentinel = format!("&sentinel_password_file={}", file("of-sentinel"));
    let denied = |options: &str, word: &str| {
        let keeper = with(options);
        let error = keeper.reserve(vec![keeper.hold(b"n7").unwrap()]).unwrap_err();
        assert!(matches!(&error, StoreError::Denied(why) if why.contains(word)), "{error}");
    };
    primary.command(&writer(&["+role"]));
    denied("", "sentinel localhost");
    denied(&of_sentinel, "wait");
    primary.command(&writer(&["+wait"]));
    denied(&of_sentinel, "role");
    primary.command(&writer(&["+role", "+wait"]));
    start(&with(&of_sentinel), b"n7", b"one");
    // A user of the sentinels with the rights that docs/cluster.md lists.
    let of_asker = format!("&sentinel_user=asker&sentinel_password_file={}", file("of-asker"));
    let asker = |rights: &[&str]| {
        let words = ["ACL", "SETUSER", "asker", "on", ">of-asker", "-@all", "+auth"];
        sentinel.query_as::<()>("of-sentinel", &[&words, rights].concat());
    };
    asker(&[]);
    denied(&of_asker, "sentinel");
    asker(&["+sentinel|get-master-addr-by-name"]);
    start(&with(&of_asker), b"n7", b"one");
}

#[test]
fn sentinels_and_primary_are_reached_with_tls() {
    let valkey = Valkey::on_network(&[]);
    let before =
        Terminator::before(Behind::Port(valkey.port()), 0, |authority| authority.sign("127.0.0.1", 2099), false);
    // The sentinel speaks to the same port without TLS.
    let sentinel = Sentinel::of_port(before.port());
    let of_sentinel = Terminator::before(Behind::Port(sentinel.port), 0, Authority::server, false);
    let both = before.file("both.pem", &[before.authority.pem(), of_sentinel.authority.pem()].concat());
    let keeper = keeper(&of_sentinel.with_ca("rediss+sentinel", "/main", &both));
    let hold = start(&keeper, b"n7", b"one");
    assert!(matches!(save(&keeper, &hold, b"two"), Saved::Done(_)));
}
