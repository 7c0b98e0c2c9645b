//! `redis+cluster://`: each record is on the primary of its slot, also after that has changed.

use std::collections::HashSet;

use super::asking::asked_and_released;
use super::terminator::{Authority, Behind};
use super::valkey::{free_port, wait_until};
use super::*;

/// Three primaries, and a replica of the first one.
struct ClusterOfFour {
    nodes: Vec<Valkey>,
}

impl ClusterOfFour {
    fn start() -> Self {
        let ports: Vec<_> = (0..4).map(|_| free_port().to_string()).collect();
        let node = |port: &String| {
            Valkey::on_network(&["--cluster-enabled", "yes", "--cluster-node-timeout", "1000", "--cluster-port", port])
        };
        let nodes: Vec<_> = ports.iter().map(node).collect();
        for (node, slots) in nodes.iter().zip([["0", "5460"], ["5461", "10922"], ["10923", "16383"]]) {
            node.command(&["CLUSTER", "ADDSLOTSRANGE", slots[0], slots[1]]);
        }
        for (number, (node, bus)) in nodes.iter().zip(&ports).enumerate() {
            node.command(&["CLUSTER", "SET-CONFIG-EPOCH", &(number + 1).to_string()]);
            nodes[0].command(&["CLUSTER", "MEET", "127.0.0.1", &node.port().to_string(), bus]);
        }
        let cluster = Self { nodes };
        cluster.wait_until(|node| {
            let told: String = node.ask(&["CLUSTER", "INFO"]);
            told.contains("cluster_known_nodes:4")
                && told.contains("cluster_size:3")
                && told.contains("cluster_state:ok")
        });
        let first = cluster.id(0);
        wait_until(|| cluster.nodes[3].ask::<String>(&["CLUSTER", "REPLICATE", &first]) == "OK");
        wait_until(|| cluster.nodes[3].says("replication", "master_link_status:up"));
        cluster
    }

    fn wait_until(&self, is_so: impl Fn(&Valkey) -> bool) {
        wait_until(|| self.nodes.iter().all(&is_so));
    }

    fn id(&self, node: usize) -> String {
        self.nodes[node].ask(&["CLUSTER", "MYID"])
    }

    /// Nothing listens on port 1: the next server is asked.
    fn location(&self) -> String {
        format!("redis+cluster://127.0.0.1:1,127.0.0.1:{}", self.nodes[1].port())
    }

    fn slot(&self, id: &str) -> u16 {
        self.nodes[0].ask(&["CLUSTER", "KEYSLOT", &format!("o{{model/1:{id}}}")])
    }

    /// The id of a sequence in one of these slots.
    fn id_in(&self, slots: std::ops::Range<u16>) -> String {
        let ids = (0..).map(|number| format!("n{number}"));
        ids.into_iter().find(|id| slots.contains(&self.slot(id))).unwrap()
    }
}

#[test]
fn a_cluster_does_what_records_promise() {
    let cluster = ClusterOfFour::start();
    let location = cluster.location();
    does_what_records_promise(&[open(&location)]);
    // One call for records of all servers.
    let keeper = keeper(&location);
    let ids: Vec<_> = (0..20).map(|number| format!("n{number}")).collect();
    assert_eq!(ids.iter().map(|id| cluster.slot(id) / 5461).collect::<HashSet<_>>().len(), 3);
    let holds = keeper.reserve(ids.iter().map(|id| keeper.hold(id.as_bytes()).unwrap()).collect()).unwrap();
    let starts: Vec<_> = holds.iter().zip(&ids).map(|(hold, id)| Change::Step(hold, id.as_bytes())).collect();
    assert!(keeper.save(&starts).unwrap().iter().all(|saved| matches!(saved, Saved::Done(_))));
    let claims: Vec<_> = ids.iter().map(|id| (id.as_bytes(), false)).collect();
    for (id, claimed) in ids.iter().zip(keeper.claim(&claims).unwrap()) {
        assert!(matches!(claimed, Claimed::Taken(_, blob) if blob == id.as_bytes()));
    }
    let listened = |node: &Valkey| !node.ask::<Vec<String>>(&["PUBSUB", "CHANNELS", "stateful:*"]).is_empty();
    asked_and_released(&location, || wait_until(|| cluster.nodes[..3].iter().all(listened)));
}

#[test]
fn a_cluster_is_reached_with_tls() {
    let valkey = Valkey::on_network(&["--cluster-enabled", "yes", "--cluster-port", &free_port().to_string()]);
    let identity = |authority: &Authority| authority.sign("127.0.0.1", 2099);
    let terminator = Terminator::before(Behind::Port(valkey.port()), 0, identity, false);
    // It names its servers with the ports of the terminator.
    valkey.command(&["CONFIG", "SET", "cluster-announce-port", &terminator.port().to_string()]);
    valkey.command(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]);
    wait_until(|| valkey.ask::<String>(&["CLUSTER", "INFO"]).contains("cluster_state:ok"));
    let ca = terminator.ca();
    let keeper = keeper(&format!("rediss+cluster://127.0.0.1:{}?ca={}", terminator.port(), ca.display()));
    let hold = start(&keeper, b"n7", b"one");
    assert!(matches!(save(&keeper, &hold, b"two"), Saved::Done(_)));
    assert_eq!(taken(&keeper, b"n7").1, b"two");
    // With the rights that docs/cluster.md lists.
    let secret = terminator.file("secret", "secret");
    let location = format!("redis+cluster://writer@127.0.0.1:{}?password_file={}", valkey.port(), secret.display());
    let with_rights = Keeper::new(open(&location), "m", SETTINGS);
    valkey.command(&writer(&[]));
    let error = with_rights.claim(&[(b"n7", true)]).unwrap_err();
    assert!(matches!(&error, StoreError::Denied(why) if why.contains("cluster")), "{error}");
    valkey.command(&writer(&["+cluster|slots"]));
    wait_until(|| with_rights.claim(&[(b"n7", true)]).is_ok());
    start(&with_rights, b"n7", b"one");
    // A server that is none of a cluster's.
    let alone = Valkey::on_network(&[]);
    let error =
        self::keeper(&format!("redis+cluster://localhost:{}", alone.port())).claim(&[(b"n7", true)]).unwrap_err();
    let words = ["'redis://HOST:PORT'", "cluster support disabled"];
    assert!(matches!(&error, StoreError::Denied(why) if words.iter().all(|word| why.contains(word))), "{error}");
}

/// A cluster of one server, which has all slots and serves those that it has.
fn alone() -> Valkey {
    let bus = free_port().to_string();
    let valkey = Valkey::on_network(&[
        "--cluster-enabled",
        "yes",
        "--cluster-port",
        &bus,
        "--cluster-require-full-coverage",
        "no",
    ]);
    valkey.command(&["CLUSTER", "ADDSLOTSRANGE", "0", "16383"]);
    wait_until(|| valkey.ask::<String>(&["CLUSTER", "INFO"]).contains("cluster_state:ok"));
    valkey
}

fn slot_of(valkey: &Valkey, id: &str) -> String {
    valkey.ask::<u16>(&["CLUSTER", "KEYSLOT", &format!("o{{model/1:{id}}}")]).to_string()
}

#[test]
fn a_slot_that_no_server_has_is_looked_for_again() {
    let valkey = alone();
    let location = format!("redis+cluster://127.0.0.1:{}", valkey.port());
    let (keeper, slot) = (keeper(&location), slot_of(&valkey, "n7"));
    let claims = |id: &[u8]| keeper.claim(&[(id, false)]);
    assert!(matches!(claims(b"n7").unwrap()[0], Claimed::Absent));
    valkey.command(&["CLUSTER", "DELSLOTS", &slot]);
    let error = claims(b"n7").unwrap_err();
    assert!(matches!(&error, StoreError::Refuses(why) if why.contains("ClusterDown")), "{error}");
    let words = format!("no server of the cluster has slot {slot}");
    wait_until(|| matches!(claims(b"n7"), Err(StoreError::Unreachable(why)) if why == words));
    assert!(claims(b"n8").is_ok());
    // Whoever takes it for a server without a cluster is told what to write.
    let error = self::keeper(&valkey.network()).claim(&[(b"n7", false)]).unwrap_err();
    assert!(matches!(&error, StoreError::Denied(why) if why.contains("'redis+cluster://HOST:PORT'")), "{error}");
    valkey.command(&["CLUSTER", "ADDSLOTS", &slot]);
    wait_until(|| claims(b"n7").is_ok());
}

#[test]
fn a_server_that_knows_no_slots_is_not_believed() {
    let (valkey, bus) = (alone(), free_port().to_string());
    let empty = Valkey::on_network(&["--cluster-enabled", "yes", "--cluster-port", &bus]);
    let location = format!("redis+cluster://127.0.0.1:{},127.0.0.1:{}", empty.port(), valkey.port());
    for _ in 0..8 {
        assert!(matches!(keeper(&location).claim(&[(b"n7", false)]).unwrap()[0], Claimed::Absent));
    }
    let error = keeper(&format!("redis+cluster://127.0.0.1:{}", empty.port())).claim(&[(b"n7", false)]).unwrap_err();
    assert!(matches!(&error, StoreError::Unreachable(why) if why.contains("knows no server")), "{error}");
}

#[test]
fn operations_go_on_with_the_slots_that_were_known() {
    let valkey = alone();
    let secret = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(secret.path(), "secret").unwrap();
    let user = format!("writer@127.0.0.1:{}?password_file={}", valkey.port(), secret.path().display());
    let settings = Settings { server: Some(Token::random().unwrap()), ..SETTINGS };
    let store = state_store::open(&Location::new(&format!("redis+cluster://{user}")).unwrap(), settings).unwrap();
    let keeper = Keeper::new(store, "m", settings);
    valkey.command(&writer(&["+cluster|slots"]));
    start(&keeper, b"n7", b"one");
    let slot: u16 = valkey.ask(&["CLUSTER", "KEYSLOT", "o{m:n8}"]);
    // The user may no longer ask which server has which slots. The keeper tries to after each error.
    valkey.command(&writer(&["-subscribe"]));
    valkey.command(&["CLUSTER", "DELSLOTS", &slot.to_string()]);
    for _ in 0..3 {
        assert!(keeper.claim(&[(b"n8", false)]).is_err());
        assert_eq!(taken(&keeper, b"n7").1, b"one");
        std::thread::sleep(Duration::from_millis(110));
    }
    // It may not listen: that is said once, and is tried again.
    let error = keeper.listen(&mut |_| true).unwrap_err();
    assert!(matches!(&error, StoreError::Denied(why) if why.contains("subscribe")), "{error}");
    let mut left = 3;
    let listened = keeper.listen(&mut |_| {
        left -= 1;
        left > 0
    });
    listened.unwrap();
}

#[test]
fn sequences_go_on_after_a_slot_has_moved() {
    let cluster = ClusterOfFour::start();
    let (keeper, id) = (keeper(&cluster.location()), cluster.id_in(0..5461));
    let hold = start(&keeper, id.as_bytes(), b"one");
    let (from, to, slot) = (&cluster.nodes[0], &cluster.nodes[1], cluster.slot(&id).to_string());
    let set = |node: &Valkey, words: [&str; 2]| node.command(&["CLUSTER", "SETSLOT", &slot, words[0], words[1]]);
    set(to, ["IMPORTING", &cluster.id(0)]);
    set(from, ["MIGRATING", &cluster.id(1)]);
    let keys: Vec<String> = from.ask(&["CLUSTER", "GETKEYSINSLOT", &slot, "10"]);
    assert_eq!(keys.len(), 2);
    let port = to.port().to_string();
    for key in &keys {
        let error = keeper.claim(&[(id.as_bytes(), false)]).unwrap_err();
        assert!(matches!(error, StoreError::Refuses(_)), "{error}");
        from.command(&["MIGRATE", "127.0.0.1", &port, key, "0", "5000"]);
    }
    let error = keeper.save(&[Change::Step(&hold, b"two")]).unwrap_err();
    assert!(matches!(error, StoreError::Refuses(_)), "{error}");
    set(to, ["NODE", &cluster.id(1)]);
    set(from, ["NODE", &cluster.id(1)]);
    assert!(matches!(save(&keeper, &hold, b"two"), Saved::Done(_)));
    assert_eq!(taken(&self::keeper(&cluster.location()), id.as_bytes()).1, b"two");
}

#[test]
fn sequences_go_on_after_a_fail_over_and_have_replicas() {
    let mut cluster = ClusterOfFour::start();
    let (first, other) = (cluster.id_in(0..5461), cluster.id_in(5461..10923));
    let settings = Settings { replicas: 1, ..SETTINGS };
    let store = state_store::open(&Location::new(&cluster.location()).unwrap(), settings).unwrap();
    let with_replica = Keeper::new(store, "model/1", settings);
    let hold = start(&with_replica, first.as_bytes(), b"one");
    assert!(matches!(save(&with_replica, &hold, b"two"), Saved::Done(_)));
    // Its primary has none.
    let error = with_replica.reserve(vec![with_replica.hold(other.as_bytes()).unwrap()]).unwrap_err();
    assert!(matches!(&error, StoreError::Refuses(why) if why.contains("0 of 1 replicas")), "{error}");
    // The second primary sends one of two starts to the first one, and has no replica for the other one. This keeper
    // learns where the slots are before one of them moves.
    let store = state_store::open(&Location::new(&cluster.location()).unwrap(), settings).unwrap();
    let with_replica = Keeper::new(store, "model/1", settings);
    taken(&with_replica, first.as_bytes());
    let (slot, id) = (cluster.slot(&other).to_string(), |node| cluster.id(node));
    cluster.nodes[0].command(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &id(1)]);
    cluster.nodes[1].command(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &id(0)]);
    let keys: Vec<String> = cluster.nodes[1].ask(&["CLUSTER", "GETKEYSINSLOT", &slot, "10"]);
    keys.iter().for_each(|key| cluster.nodes[1].command(&["DEL", key]));
    for node in [0, 1] {
        cluster.nodes[node].command(&["CLUSTER", "SETSLOT", &slot, "NODE", &id(0)]);
    }
    let second = (0..).map(|number| format!("s{number}")).find(|id| (5461..10923).contains(&cluster.slot(id))).unwrap();
    let hold = |id: &str| with_replica.hold(id.as_bytes()).unwrap();
    let error = with_replica.reserve(vec![hold(&other), hold(&second)]).unwrap_err();
    assert!(matches!(&error, StoreError::Refuses(why) if why.contains("0 of 1 replicas")), "{error}");
    let keeper = keeper(&cluster.location());
    let of_other = start(&keeper, other.as_bytes(), b"one");
    cluster.nodes[0].signal(Signal::STOP);
    let began = Instant::now();
    let error = keeper.claim(&[(first.as_bytes(), false)]).unwrap_err();
    assert!(matches!(error, StoreError::Unreachable(_)), "{error}");
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    cluster.nodes[0].signal(Signal::KILL);
    wait_until(|| keeper.claim(&[(b"in the first", false), (first.as_bytes(), false)]).is_ok());
    let (hold, blob) = taken(&keeper, first.as_bytes());
    assert_eq!(blob, b"two");
    assert!(matches!(save(&keeper, &hold, b"three"), Saved::Done(_)));
    assert!(matches!(save(&keeper, &of_other, b"two"), Saved::Done(_)));
}
