//! What is written, and in which order.

use state_store::{Op, Reply, Settings, Store};

use super::*;

/// A store that notes what is written, and may be down.
#[derive(Default)]
struct Noting {
    written: Mutex<Vec<String>>,
    is_down: Mutex<bool>,
}

impl Store for Noting {
    fn apply(&self, operations: &[(&[u8], Op<'_>)]) -> Result<Vec<Reply>, StoreError> {
        if *self.is_down.lock() {
            return Err(StoreError::Unreachable("down".to_owned()));
        }
        let text = |(key, operation): &(&[u8], Op<'_>)| {
            let operation = match operation {
                Op::Save { blob, .. } => format!("save {}", String::from_utf8_lossy(blob)),
                Op::Restore { blob, .. } => format!("restore {}", String::from_utf8_lossy(blob)),
                Op::Release { blob, .. } => {
                    format!("release {}", String::from_utf8_lossy(blob.unwrap_or(b"-")))
                }
                Op::End { .. } => "end".to_owned(),
                _ => "other".to_owned(),
            };
            format!("{} {operation}", String::from_utf8_lossy(key))
        };
        self.written.lock().extend(operations.iter().map(text));
        Ok(operations.iter().map(|_| Reply::Done).collect())
    }

    fn is_shared(&self) -> bool {
        false
    }
}

struct Bench {
    store: Arc<Noting>,
    keeper: Arc<Keeper>,
    queue: Arc<Queue>,
}

impl Bench {
    fn new() -> Self {
        let store = Arc::new(Noting::default());
        let settings =
            Settings { ttl: Duration::from_secs(60), timeout: Duration::from_secs(1), server: None, replicas: 0 };
        let keeper = Arc::new(Keeper::new(store.clone(), "m", settings));
        Self { store, keeper, queue: Arc::default() }
    }

    /// A sequence that the store has.
    fn hold(&self, key: &[u8]) -> Hold {
        let hold = self.keeper.hold(key).unwrap();
        let Saved::Done(hold) = self.keeper.save(&[Change::Begin(&hold, false)]).unwrap().remove(0) else {
            unreachable!("the store takes all")
        };
        self.store.written.lock().clear();
        hold
    }

    fn put(&self, key: &[u8], hold: &Hold, what: What) {
        let (key, hold) = (key.to_vec(), hold.clone());
        let now = Instant::now();
        self.queue.put(Entry { lane: 0, key, hold, what, steps: 1, saved: 0, since: now, is_wanted: false });
    }

    /// Writes what is queued.
    fn write(&self) -> bool {
        let entries = self.queue.take(Duration::ZERO).unwrap();
        write(&self.queue, &self.keeper, entries, &|_| {})
    }

    fn written(&self) -> Vec<String> {
        std::mem::take(&mut *self.store.written.lock())
    }
}

fn state(text: &str) -> What {
    What::State(text.as_bytes().to_vec())
}

#[test]
fn the_newest_state_of_each_sequence_is_written() {
    let bench = Bench::new();
    let (one, other) = (bench.hold(b"1"), bench.hold(b"2"));
    bench.put(b"1", &one, state("a"));
    bench.put(b"2", &other, state("x"));
    bench.put(b"1", &one, state("b"));
    bench.put(b"2", &other, What::Release(None));
    assert!(bench.write());
    assert_eq!(bench.written(), ["m:2 release x", "m:1 save b"]);
    assert!(bench.queue.oldest().is_none());
    bench.put(b"1", &one, What::End);
    assert!(bench.write());
    assert_eq!(bench.written(), ["m:1 end"]);
}

#[test]
fn what_the_store_did_not_take_is_written_later_unless_there_is_something_newer() {
    let bench = Bench::new();
    let (one, other) = (bench.hold(b"1"), bench.hold(b"2"));
    *bench.store.is_down.lock() = true;
    bench.put(b"1", &one, state("a"));
    bench.put(b"2", &other, state("x"));
    let since = bench.queue.oldest();
    let entries = bench.queue.take(Duration::ZERO).unwrap();
    assert!(matches!(bench.queue.take_back(b"1"), Waiting::InFlight));
    bench.put(b"1", &one, state("b"));
    bench.put(b"2", &other, What::Release(None));
    assert!(!write(&bench.queue, &bench.keeper, entries, &|_| {}));
    assert!(bench.queue.is_down());
    assert_eq!((bench.queue.oldest(), bench.queue.len()), (since, 2));
    *bench.store.is_down.lock() = false;
    assert!(bench.write());
    let mut written = bench.written();
    written.sort();
    assert_eq!(written, ["m:1 save b", "m:2 release x"]);
    assert!(!bench.queue.is_down());
}

#[test]
fn a_state_that_waits_is_taken_back_unless_another_server_wants_it() {
    let bench = Bench::new();
    let (one, other) = (bench.hold(b"1"), bench.hold(b"2"));
    bench.put(b"1", &one, What::Release(Some(b"a".to_vec())));
    let Waiting::State(entry) = bench.queue.take_back(b"1") else { panic!("it waits") };
    assert!(matches!(&entry.what, What::Release(Some(bytes)) if bytes == b"a"));
    assert!(matches!(bench.queue.take_back(b"1"), Waiting::Nothing));
    bench.put(b"1", &one, What::Release(Some(b"b".to_vec())));
    bench.put(b"2", &other, What::End);
    bench.queue.want(b"1");
    // An END has to be written before the store is asked, as long as the store is there.
    assert!([b"1", b"2"].iter().all(|key| matches!(bench.queue.take_back(*key), Waiting::InFlight)));
    bench.queue.note(false);
    assert!(matches!(bench.queue.take_back(b"2"), Waiting::Nothing));
}

#[test]
fn the_queue_is_bounded_and_writes_at_most_a_part_of_it_together() {
    let bench = Bench::new();
    let holds: Vec<_> = (0..100_u8).map(|key| bench.hold(&[key])).collect();
    let large = vec![0; MOST_BYTES / 100 + 1];
    for (key, hold) in (0..100).zip(&holds) {
        assert!(!bench.queue.is_full());
        bench.put(&[key], hold, What::State(large.clone()));
    }
    assert!(bench.queue.is_full() && !bench.queue.refuses(1000) && bench.queue.refuses(MOST_BYTES));
    assert!(bench.write());
    assert_eq!(bench.written().len(), 1);
    assert!(!bench.queue.is_full());
    for (key, hold) in (0..100).zip(&holds) {
        bench.put(&[key], hold, What::End);
    }
    assert!(bench.write());
    assert_eq!(bench.written().len(), MOST_TOGETHER);
}

#[test]
fn the_thread_writes_what_is_left_when_it_is_stopped() {
    let bench = Bench::new();
    let one = bench.hold(b"1");
    let writer = start_writer(&bench.queue, &bench.keeper, |_| {}).unwrap();
    bench.put(b"1", &one, state("a"));
    drop(writer);
    assert_eq!(bench.written(), ["m:1 save a"]);
    // Without the store it stops all the same.
    *bench.store.is_down.lock() = true;
    let writer = start_writer(&bench.queue, &bench.keeper, |_| {}).unwrap();
    bench.put(b"1", &one, state("b"));
    drop(writer);
    assert_eq!(bench.written(), [""; 0]);
}
