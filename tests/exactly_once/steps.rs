//! As many random steps as the caller wants, with calls that fail, panics, wrong requests and cancelled ones.
//!
//! ```text
//! STATEFUL_STEPS=1000000 STATEFUL_SEED=1 cargo test --release --features fault-injection --test exactly_once -- --nocapture random_steps
//! ```
//!
//! A step is a request. Each seed is a model with one scheduler and about a thousand payloads. A seed that fails is
//! printed; with it as `STATEFUL_SEED`, its payloads come first. With `direct` they are the same again. With the other
//! schedulers they also depend on the timing of threads.
//!
//! Each request adds its sequence's number and 1 to the state. So a sum tells whose steps are in it, and how many.

use super::own::own;
use super::*;

/// Payloads of a seed.
const PAYLOADS: usize = 1000;

/// Sequence numbers, which are also the places of a payload with the strategy `direct`.
const IDS: u64 = 4;
/// So many steps have seen answers of every kind.
const ENOUGH: u64 = 15_000;

/// What came of the steps.
#[derive(Debug, Default)]
struct Tally {
    steps: u64,
    /// Answers whose sum was compared with the one that the sequence must have.
    compared: u64,
    /// Answers to requests whose state was not certain. Only the sequence's number was checked.
    of_their_own: u64,
    errors: u64,
    /// Answers that never left, because a call of Triton failed.
    lost: u64,
}

/// What a client knows of its sequence.
#[derive(Clone, Copy, Default, PartialEq)]
enum Known {
    /// It has a state with this number of steps.
    Live(f32),
    /// It does not exist: it never started, its END was answered, or the backend said so.
    #[default]
    Absent,
    /// A request failed or lost its answer, and may have changed the state.
    Unsure,
}

/// What clients know of their sequences.
#[derive(Default)]
struct Clients(BTreeMap<u64, Known>);

impl Clients {
    fn known(&self, of: u64) -> Known {
        self.0.get(&of).copied().unwrap_or_default()
    }

    fn is_live(&self, of: u64) -> bool {
        matches!(self.known(of), Known::Live(_))
    }

    /// Learns from the answer to the next request of a sequence.
    fn learn(&mut self, of: u64, request: &Request, tally: &mut Tally) {
        let Id::Number(id) = request.id else { panic!("{:?} is no number", request.id) };
        let (is_start, is_end) = (request.flags & START != 0, request.flags & END != 0);
        tally.steps += 1;
        let before = if is_start { Known::Live(0.0) } else { self.known(of) };
        let after = match (sum(request), request.error()) {
            (Some([numbers, steps]), _) => {
                assert_eq!(numbers, steps * id as f32, "sequence {id} has the state of another one");
                match before {
                    Known::Live(before) => assert_eq!(steps, before + 1.0, "sequence {id}"),
                    Known::Absent => panic!("sequence {id} does not exist, and has a state of {steps} steps"),
                    Known::Unsure => assert!(steps >= 1.0, "sequence {id}"),
                }
                *if before == Known::Unsure { &mut tally.of_their_own } else { &mut tally.compared } += 1;
                if is_end { Known::Absent } else { Known::Live(steps) }
            }
            (None, Some((code, _))) => {
                tally.errors += 1;
                match code {
                    TRITONSERVER_ERROR_ALREADY_EXISTS => self.known(of),
                    TRITONSERVER_ERROR_NOT_FOUND if !is_start => Known::Absent,
                    _ if is_start || is_end => Known::Unsure,
                    _ => self.known(of),
                }
            }
            (None, None) => {
                tally.lost += 1;
                Known::Unsure
            }
        };
        self.0.insert(of, after);
    }
}

/// A request that is wrong, cancelled or panics, now and then.
fn step(random: &mut Random, id: u64, flags: u32) -> Request {
    if random.one_in(20) {
        let mut wrong = wrong(id, flags);
        // Left out: it runs if the call that asks about cancellation fails, and then it adds the wrong number.
        wrong.retain(|(request, ..)| !request.cancelled);
        let chosen = random.below(wrong.len() as u64) as usize;
        return wrong.swap_remove(chosen).0;
    }
    let mut request = request(id, flags, [id as f32, 1.0]);
    if random.one_in(40) {
        request.cancelled = true;
    }
    if cfg!(feature = "fault-injection") && random.one_in(60) {
        request = request.with_parameter("inject_panic", random.pick(&STAGES));
    }
    request
}

fn flags(random: &mut Random, start_one_in: u64) -> u32 {
    let start = if random.one_in(start_one_in) { START } else { 0 };
    start | if random.one_in(8) { END } else { 0 }
}

fn faults(random: &mut Random) -> Faults {
    let one_in = random.pick(&[300, 100, 30, 10]);
    Faults::Random { random: Random::new(random.below(u64::MAX)), one_in }
}

/// The strategy `oldest`: core sends the next request of a sequence when it has the last one back, and refuses one that
/// is neither a START nor behind one without END.
fn oldest_with_faults(triton: &Triton, random: &mut Random, tally: &mut Tally) {
    // With too few slots, STARTs wait for a slot, which takes longer than all else.
    let slots = if random.one_in(8) { 6 } else { 16 };
    let (mut model, mut clients) = (load(triton, &oldest(slots)), Clients::default());
    model.instance.held_after = Duration::from_millis(1);
    let mut held: Vec<Arc<Request>> = Vec::new();
    let mut known_to_core = BTreeSet::new();
    for _ in 0..PAYLOADS {
        held.retain(|request| !request.is_released());
        let mut payload = Vec::new();
        for id in 1..=2 * IDS {
            if !random.one_in(3) && held.iter().all(|request| request.id != Id::Number(id)) {
                // A START of a live id waits until its earlier sequence has rested, which takes longer than all else.
                let start_one_in = match clients.known(id) {
                    _ if !known_to_core.contains(&id) => 1,
                    Known::Live(_) => 2000,
                    Known::Unsure => 50,
                    Known::Absent => 2,
                };
                let flags = flags(random, start_one_in);
                if flags & END == 0 {
                    known_to_core.insert(id)
                } else {
                    known_to_core.remove(&id)
                };
                payload.push(step(random, id, flags));
            }
        }
        let (payload, _) = model.run_with(faults(random), payload);
        for request in &payload {
            let Id::Number(id) = request.id else { continue };
            clients.learn(id, request, tally);
        }
        held.extend(payload);
    }
    wait_for_release(&held);
    model.unload();
}

/// The strategy `direct`: the place in the payload tells the sequence.
fn direct_with_faults(triton: &Triton, random: &mut Random, tally: &mut Tally) {
    let (model, mut clients) = (load(triton, &direct()), Clients::default());
    let mut ids = [0; IDS as usize];
    for _ in 0..PAYLOADS {
        let mut payload = Vec::new();
        for (lane, id) in (0..).zip(&mut ids) {
            let is_live = clients.is_live(lane);
            let flags = flags(random, if is_live { 20 } else { 1 });
            if flags & START != 0 {
                // No two lanes have the same number, so that each sum tells its lane.
                *id = 1 + lane + IDS * random.below(3);
            }
            payload.push(step(random, *id, flags));
        }
        let (payload, _) = model.run_with(faults(random), payload);
        for (lane, request) in (0..).zip(&payload) {
            clients.learn(lane, request, tally);
        }
    }
    model.unload();
}

/// A model that the backend schedules: any number of requests of a sequence are on their way.
fn own_with_faults(triton: &Triton, random: &mut Random, tally: &mut Tally) {
    let workers = (1 + random.below(3)).to_string();
    let model =
        load(triton, &own(&[("worker_count", &workers), ("max_sequence_number", "6"), ("max_queue_size", "8")]));
    let mut clients = Clients::default();
    for _ in 0..PAYLOADS / 50 {
        ledger::set_faults(faults(random));
        let mut sent = Vec::new();
        for _ in 0..50 {
            let payload = (0..=random.below(5)).map(|_| {
                let (id, flags) = (1 + random.below(2 * IDS), flags(random, 4));
                Arc::new(step(random, id, flags))
            });
            let payload: Vec<_> = payload.collect();
            model.instance.send(&payload);
            sent.extend(payload);
        }
        // A START may wait for a place, which the ENDs of the others free.
        let ends: Vec<_> = (1..=2 * IDS).map(|id| Arc::new(request(id, END, [id as f32, 1.0]))).collect();
        ends.iter().for_each(|end| model.instance.send(std::slice::from_ref(end)));
        sent.extend(ends);
        wait_for_release(&sent);
        ledger::set_faults(Faults::None);
        for request in &sent {
            let Id::Number(id) = request.id else { continue };
            clients.learn(id, request, tally);
        }
    }
    model.unload();
}

/// Prints the seed of a test that panics.
struct PrintSeedOnPanic(u64);

impl Drop for PrintSeedOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the steps of STATEFUL_SEED={} failed", self.0);
        }
    }
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name} is no number: {text}")))
}

#[test]
fn random_steps_with_faults_meet_no_wrong_state() {
    let (wanted, first) = (number("STATEFUL_STEPS", ENOUGH), number("STATEFUL_SEED", 1));
    let Some(triton) = Triton::start() else { return };
    #[cfg(feature = "fault-injection")]
    panics::silence();
    let (mut tally, mut seed, began) = (Tally::default(), first, Instant::now());
    while tally.steps < wanted {
        let _said = PrintSeedOnPanic(seed);
        let mut random = Random::new(seed);
        match seed % 3 {
            0 => oldest_with_faults(&triton, &mut random, &mut tally),
            1 => direct_with_faults(&triton, &mut random, &mut tally),
            _ => own_with_faults(&triton, &mut random, &mut tally),
        }
        triton.assert_clean();
        seed += 1;
    }
    println!("{tally:?} in {} s, seeds {first} to {}", began.elapsed().as_secs(), seed - 1);
    let Tally { steps, compared, errors, lost, .. } = tally;
    let has_seen_all = compared > steps / 4 && errors > 0 && lost > 0;
    assert!(has_seen_all || wanted < ENOUGH, "{tally:?}");
}
