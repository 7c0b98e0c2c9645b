//! Checks the protocol of `durability: interval` and `drain` in every order of its steps: steps are saved after their answers,
//! STARTs are entered first, and a server that wants a sequence asks the owner.
//!
//! The store is the real [`Op::apply`], with the owner's name beside the record as the scripts of Redis keep it. Two servers do
//! what `workers/stored` does, and may crash between any two steps, or be late with any of them. A client sends each request to
//! either server. The store may lose its last write, and may not be there for a START. Time does not pass: no record expires.

use std::collections::BTreeSet;

use state_store::{Op, Record, Reply, Token};
use stateright::{Checker, Expectation, Model, Property};

/// A state: the life of the id that it belongs to, and its number of steps.
type State = (u8, u8);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Request {
    Start,
    Step,
    End,
}

/// What a server does next for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Phase {
    /// Enters the START. `true`: the owner of an older sequence is asked first.
    Enter(bool),
    /// Looks for the sequence in what is to be written, then in the store. `true`: the owner is asked first.
    Look(bool),
    Run,
    Answer(Result<State, Refusal>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Refusal {
    /// The store has no such sequence, or no state of it.
    Missing,
    /// The request can be sent again.
    Again,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Memory {
    token: u8,
    state: State,
    /// The steps that are known to be saved.
    saved: u8,
    /// The store may not have a record of it.
    is_new: bool,
    /// It has steps of which the writer has no snapshot.
    is_dirty: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum What {
    /// A state; `None`: it has begun while the store was not there.
    State(Option<State>),
    Release(Option<State>),
    End,
}

/// What is to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Entry {
    token: u8,
    is_new: bool,
    what: What,
    is_wanted: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Server {
    memory: Option<Memory>,
    /// One for each sequence, the youngest last.
    entries: Vec<Entry>,
    /// What it works on, and the life in which the client sent it.
    work: Option<(Request, Phase, u8)>,
    /// Another server has asked, and this one has not heard it.
    is_asked: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Store {
    record: Option<Record<Vec<u8>>>,
    /// The server that is asked.
    owner: Option<usize>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    store: Store,
    /// Before the last write.
    before: Store,
    servers: [Server; 2],
    next_token: u8,
    /// The lives that the client begins.
    lives: u8,
    /// The life that the client is in; 0: it has not begun.
    life: u8,
    is_over: bool,
    /// The store has the END of lives up to this one.
    ended_life: u8,
    /// The steps of the last answer in this life, and how many of them were said to be saved.
    answered: u8,
    told_saved: u8,
    crashes_left: u8,
    losses_left: u8,
    absences_left: u8,
    /// Requests that were sent again.
    repeats_left: u8,
    seen: Seen,
}

/// What has happened, for the properties.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Seen {
    foreign: bool,
    lost_step: bool,
    lost_saved_step: bool,
    resurrected: bool,
    overwritten: bool,
    released: bool,
    fenced: bool,
    refused_new: bool,
    all_lives: bool,
    crashed: bool,
    /// A server did not wait for an owner that lives.
    hurried: bool,
    lost_write: bool,
    /// A START ran while the store was not there.
    absent: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Action {
    Send(usize, Request),
    Work(usize),
    /// Works without waiting for the owner.
    Hurry(usize),
    /// The store is not there for a START.
    StartWithoutStore(usize),
    Snapshot(usize),
    Expire(usize),
    Hear(usize),
    Write(usize),
    Crash(usize),
    LoseLastWrite,
}

#[derive(Clone, Copy, Debug)]
struct Protocol {
    lives: u8,
    steps: u8,
    crashes: u8,
    losses: u8,
    absences: u8,
}

fn token(number: u8) -> Token {
    Token::from_bytes([number; Token::BYTES])
}

const fn bytes(state: State) -> [u8; 2] {
    [state.0, state.1]
}

impl World {
    /// The store applies an operation of a server.
    fn apply(&mut self, number: usize, operation: Op<'_>) -> Reply {
        let is_asking = matches!(operation, Op::Start { asks: true, .. } | Op::Resume { asks: true, .. });
        let is_live = matches!(self.store.record, Some(Record::Live { .. }));
        if is_asking && is_live && self.store.owner.is_some_and(|owner| owner != number) {
            if let Some(owner) = self.store.owner {
                self.servers[owner].is_asked = true;
            }
            return Reply::Asked;
        }
        let mut after = self.store.clone();
        let reply = operation.apply_to(&mut after.record);
        if matches!(reply, Reply::Done | Reply::Taken(_)) {
            match operation {
                Op::Start { .. } | Op::Resume { .. } | Op::Restore { .. } => after.owner = Some(number),
                Op::Release { .. } => after.owner = None,
                _ => {}
            }
        }
        if after != self.store {
            self.note_write(&after.record);
            self.before = std::mem::replace(&mut self.store, after);
        }
        reply
    }

    fn note_write(&mut self, after: &Option<Record<Vec<u8>>>) {
        let state = |record: &Option<Record<Vec<u8>>>| match record {
            Some(Record::Live { blob, .. }) if !blob.is_empty() => Some((blob[0], blob[1])),
            _ => None,
        };
        let (old, new) = (state(&self.store.record), state(after));
        if let (Some(old), Some(new)) = (old, new) {
            self.seen.overwritten |= new < old;
        }
        if let Some(new) = new {
            self.seen.resurrected |= new.0 <= self.ended_life;
        }
        if let (Some(old), Some(Record::Ended)) = (old, after) {
            self.ended_life = self.ended_life.max(old.0);
        }
    }

    /// Puts what a sequence has done to what is to be written.
    fn put(&mut self, number: usize, memory: Memory, what: What) {
        let entries = &mut self.servers[number].entries;
        if let Some(entry) = entries.iter_mut().find(|entry| entry.token == memory.token) {
            entry.what = match (entry.what, what) {
                (What::State(Some(state)) | What::Release(Some(state)), What::Release(None)) => {
                    What::Release(Some(state))
                }
                (_, newer) => newer,
            };
            return;
        }
        entries.push(Entry { token: memory.token, is_new: memory.is_new, what, is_wanted: false });
    }

    /// A server makes the next step for its request.
    fn work(&mut self, number: usize, is_in_a_hurry: bool) {
        let Some((request, phase, life)) = self.servers[number].work else { return };
        let next = |world: &mut Self, phase| world.servers[number].work = Some((request, phase, life));
        match phase {
            Phase::Enter(asks) => {
                self.next_token += 1;
                let new = self.next_token;
                let asks = asks && !is_in_a_hurry;
                self.note_hurry(number, is_in_a_hurry);
                if self.apply(number, Op::Start { token: token(new), blob: b"", asks }) == Reply::Asked {
                    self.next_token -= 1;
                    return;
                }
                self.begin(number, new, life, false);
                next(self, Phase::Run);
            }
            Phase::Look(asks) => {
                let entry = self.servers[number].entries.last().copied();
                match entry.map(|entry| (entry, entry.what)) {
                    // It has to be written first.
                    Some(
                        (Entry { is_wanted: true, .. }, _) | (_, What::End | What::Release(None) | What::State(None)),
                    ) => {
                        return;
                    }
                    Some((entry, What::State(Some(state)) | What::Release(Some(state)))) => {
                        self.servers[number].entries.pop();
                        let Entry { token, is_new, .. } = entry;
                        self.servers[number].memory = Some(Memory { token, state, saved: 0, is_new, is_dirty: true });
                        return next(self, Phase::Run);
                    }
                    None => {}
                }
                self.next_token += 1;
                let new = self.next_token;
                self.note_hurry(number, is_in_a_hurry);
                let asks = asks && !is_in_a_hurry;
                match self.apply(number, Op::Resume { token: token(new), asks }) {
                    Reply::Taken(blob) => {
                        let state = (blob[0], blob[1]);
                        self.seen.lost_saved_step |= state.0 == life && state.1 < self.told_saved;
                        let memory = Memory { token: new, state, saved: state.1, is_new: false, is_dirty: false };
                        self.servers[number].memory = Some(memory);
                        next(self, Phase::Run);
                    }
                    Reply::Asked => self.next_token -= 1,
                    _ => {
                        self.next_token -= 1;
                        next(self, Phase::Answer(Err(Refusal::Missing)));
                    }
                }
            }
            Phase::Run => {
                let Some(mut memory) = self.servers[number].memory else {
                    return next(self, Phase::Answer(Err(Refusal::Again)));
                };
                if request == Request::Step {
                    memory.state.1 += 1;
                    memory.is_dirty = true;
                }
                self.servers[number].memory = Some(memory);
                if request == Request::End {
                    self.put(number, memory, What::End);
                    self.servers[number].memory = None;
                }
                let saved = memory.saved;
                if memory.state.0 == self.life {
                    self.told_saved = self.told_saved.max(saved);
                }
                next(self, Phase::Answer(Ok(memory.state)));
            }
            Phase::Answer(answer) => {
                self.servers[number].work = None;
                self.answer(request, life, answer);
            }
        }
    }

    fn note_hurry(&mut self, number: usize, is_in_a_hurry: bool) {
        self.seen.hurried |= is_in_a_hurry && self.store.owner.is_some_and(|owner| owner != number);
    }

    /// A START has a token. An older sequence of the id on this server is over.
    fn begin(&mut self, number: usize, token: u8, life: u8, is_new: bool) {
        if let Some(older) = self.servers[number].memory.take() {
            self.put(number, older, What::End);
        }
        let memory = Memory { token, state: (life, 0), saved: 0, is_new, is_dirty: true };
        self.servers[number].memory = Some(memory);
        if is_new {
            self.put(number, memory, What::State(None));
        }
    }

    /// The writer of a server writes its first entry.
    fn write(&mut self, number: usize) {
        let Entry { token: of, is_new, what, .. } = self.servers[number].entries.remove(0);
        let state = match what {
            What::State(state) | What::Release(state) => state,
            What::End => None,
        };
        let blob = state.map(bytes);
        let blob = blob.as_ref().map_or(&[][..], <[u8; 2]>::as_slice);
        let operation = match what {
            What::State(_) | What::Release(Some(_)) if is_new => Op::Restore { token: token(of), blob },
            What::State(_) => Op::Save { token: token(of), blob },
            What::Release(state) => Op::Release { token: token(of), blob: state.map(|_| blob) },
            What::End => Op::End { token: token(of) },
        };
        let mut reply = self.apply(number, operation);
        if reply == Reply::Absent && state.is_some() {
            reply = self.apply(number, Op::Restore { token: token(of), blob });
        }
        self.seen.released |= matches!(what, What::Release(_)) && reply == Reply::Done;
        let Some(memory) = self.servers[number].memory.as_mut().filter(|memory| memory.token == of) else { return };
        match reply {
            Reply::Done => {
                memory.saved = state.map_or(memory.saved, |state| state.1);
                memory.is_new = false;
            }
            _ if is_new => self.seen.refused_new = true,
            // Another server has it.
            _ => {
                self.seen.fenced = true;
                self.servers[number].memory = None;
            }
        }
    }

    /// The client gets an answer.
    fn answer(&mut self, request: Request, life: u8, answer: Result<State, Refusal>) {
        let (of, steps) = match answer {
            Ok(state) => state,
            Err(Refusal::Again) => return self.repeats_left = self.repeats_left.saturating_sub(1),
            Err(Refusal::Missing) => {
                self.seen.lost_step |= self.answered > 0;
                return self.is_over = true;
            }
        };
        self.seen.foreign |= of != life;
        match request {
            Request::Start => (self.answered, self.told_saved) = (0, 0),
            Request::Step => {
                self.seen.lost_step |= steps <= self.answered;
                self.answered = steps;
            }
            Request::End => {
                self.is_over = true;
                self.seen.all_lives |= self.life == self.lives;
            }
        }
    }
}

impl Model for Protocol {
    type State = World;
    type Action = Action;

    fn init_states(&self) -> Vec<World> {
        let store = Store { record: None, owner: None };
        vec![World {
            before: store.clone(),
            store,
            servers: Default::default(),
            next_token: 0,
            lives: self.lives,
            life: 0,
            is_over: true,
            ended_life: 0,
            answered: 0,
            told_saved: 0,
            crashes_left: self.crashes,
            losses_left: self.losses,
            absences_left: self.absences,
            repeats_left: 1,
            seen: Seen::default(),
        }]
    }

    fn actions(&self, world: &World, actions: &mut Vec<Action>) {
        let waits = world.servers.iter().any(|server| server.work.is_some());
        for number in 0..world.servers.len() {
            let Server { memory, entries, work, is_asked } = &world.servers[number];
            if !waits && world.repeats_left > 0 {
                if world.is_over {
                    // The servers are alike, so the first of all requests goes to the first server.
                    let starts = world.life < self.lives && (world.life > 0 || number == 0);
                    actions.extend(starts.then_some(Action::Send(number, Request::Start)));
                } else {
                    actions.extend((world.answered < self.steps).then_some(Action::Send(number, Request::Step)));
                    actions.push(Action::Send(number, Request::End));
                }
            }
            match work {
                Some((_, phase @ (Phase::Enter(_) | Phase::Look(_)), _)) => {
                    actions.push(Action::Work(number));
                    let is_asking = world.store.owner.is_some_and(|owner| owner != number);
                    actions.extend(is_asking.then_some(Action::Hurry(number)));
                    let is_start = matches!(phase, Phase::Enter(_));
                    actions.extend((is_start && world.absences_left > 0).then_some(Action::StartWithoutStore(number)));
                }
                Some(_) => actions.push(Action::Work(number)),
                None => {
                    actions.extend(memory.filter(|of| of.is_dirty).map(|_| Action::Snapshot(number)));
                    actions.extend(memory.map(|_| Action::Expire(number)));
                }
            }
            // A sequence leaves after its request.
            let can_hear = *is_asked && !matches!(work, Some((_, Phase::Run, _)));
            actions.extend(can_hear.then_some(Action::Hear(number)));
            actions.extend((!entries.is_empty()).then_some(Action::Write(number)));
            let is_up = memory.is_some() || !entries.is_empty() || work.is_some();
            actions.extend((is_up && world.crashes_left > 0).then_some(Action::Crash(number)));
        }
        actions.extend((world.losses_left > 0 && world.store != world.before).then_some(Action::LoseLastWrite));
    }

    fn next_state(&self, world: &World, action: Action) -> Option<World> {
        let mut world = world.clone();
        match action {
            Action::Send(number, request) => {
                let phase = match request {
                    Request::Start => {
                        world.life += 1;
                        (world.is_over, world.answered, world.told_saved) = (false, 0, 0);
                        Phase::Enter(true)
                    }
                    _ if world.servers[number].memory.is_some() => Phase::Run,
                    _ => Phase::Look(true),
                };
                world.servers[number].work = Some((request, phase, world.life));
            }
            Action::Work(number) => world.work(number, false),
            Action::Hurry(number) => world.work(number, true),
            Action::StartWithoutStore(number) => {
                world.absences_left -= 1;
                world.seen.absent = true;
                world.next_token += 1;
                let (token, life) = (world.next_token, world.life);
                world.begin(number, token, life, true);
                world.servers[number].work = Some((Request::Start, Phase::Run, life));
            }
            Action::Snapshot(number) => {
                if let Some(memory) = &mut world.servers[number].memory {
                    memory.is_dirty = false;
                    let memory = *memory;
                    world.put(number, memory, What::State(Some(memory.state)));
                }
            }
            Action::Expire(number) => world.leave(number),
            Action::Hear(number) => {
                world.servers[number].is_asked = false;
                world.servers[number].entries.iter_mut().for_each(|entry| entry.is_wanted = true);
                world.leave(number);
            }
            Action::Write(number) => world.write(number),
            Action::Crash(number) => {
                world.crashes_left -= 1;
                world.seen.crashed = true;
                if let Some((request, ..)) = world.servers[number].work {
                    // The client doesn't know what became of it, and uses the id no more.
                    world.repeats_left = if request == Request::Step { world.repeats_left } else { 0 };
                }
                world.servers[number] = Server::default();
                // Nobody hears the channel of its name any more.
                for store in [&mut world.store, &mut world.before] {
                    store.owner = store.owner.filter(|owner| *owner != number);
                }
            }
            Action::LoseLastWrite => {
                world.losses_left -= 1;
                world.seen.lost_write = true;
                world.store = world.before.clone();
            }
        }
        Some(world)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        const fn is_excused(seen: &Seen) -> bool {
            seen.crashed || seen.hurried || seen.lost_write || seen.absent
        }
        vec![
            // A START that ran without the store, or did not wait for the owner of an older sequence, has not replaced it.
            Property::always("no foreign state", |_, world: &World| {
                !world.seen.foreign || world.seen.hurried || world.seen.absent || world.seen.lost_write
            }),
            Property::always("no resurrection of an ended sequence", |_, world: &World| {
                !world.seen.resurrected || world.seen.lost_write
            }),
            Property::always("one writer: nothing replaces a newer state in the store", |_, world: &World| {
                !world.seen.overwritten || world.seen.lost_write
            }),
            Property::always("no loss of a saved step, unless the store has lost it", |_, world: &World| {
                !world.seen.lost_saved_step || world.seen.lost_write
            }),
            Property::always(
                "a sequence that moves loses nothing, unless its owner died or was late",
                |_, world: &World| !world.seen.lost_step || is_excused(&world.seen),
            ),
            Property::sometimes("both lives end", |_, world: &World| world.seen.all_lives),
            Property::sometimes("an owner releases a sequence", |_, world: &World| world.seen.released),
            Property::sometimes("a late save is refused", |_, world: &World| world.seen.fenced),
            Property::sometimes("a sequence that began without the store is refused", |_, world: &World| {
                world.seen.refused_new
            }),
            Property::sometimes("a crash loses steps that were not saved", |_, world: &World| {
                world.seen.crashed && world.seen.lost_step
            }),
        ]
    }
}

impl World {
    /// The sequence of a server leaves it.
    fn leave(&mut self, number: usize) {
        if let Some(memory) = self.servers[number].memory.take() {
            self.put(number, memory, What::Release(memory.is_dirty.then_some(memory.state)));
        }
    }
}

/// Checks a protocol, and returns what can happen of what should be able to.
fn check(protocol: Protocol) -> BTreeSet<&'static str> {
    let checker = protocol.checker().threads(2).spawn_bfs().join();
    println!("{protocol:?}: {} states", checker.unique_state_count());
    let (always, sometimes): (Vec<_>, Vec<_>) =
        protocol.properties().into_iter().partition(|of| matches!(of.expectation, Expectation::Always));
    always.iter().for_each(|property| checker.assert_no_discovery(property.name));
    sometimes.iter().map(|property| property.name).filter(|name| checker.discovery(name).is_some()).collect()
}

#[test]
fn the_protocol_of_late_saves_holds_in_every_order() {
    let nothing = Protocol { lives: 2, steps: 1, crashes: 0, losses: 0, absences: 0 };
    let runs = [Protocol { crashes: 1, ..nothing }, Protocol { absences: 1, ..nothing }];
    let happens: BTreeSet<_> = runs.into_iter().flat_map(check).collect();
    assert_eq!(happens.len(), 5, "{happens:?}");
}

#[test]
#[ignore = "it takes minutes and gigabytes"]
fn the_protocol_of_late_saves_holds_with_all_faults_together() {
    check(Protocol { lives: 2, steps: 1, crashes: 0, losses: 1, absences: 0 });
    assert_eq!(check(Protocol { lives: 2, steps: 2, crashes: 1, losses: 1, absences: 1 }).len(), 5);
}
