//! Checks the protocol in every order of its steps, with two servers that crash or pause between any two steps, a
//! client that sends each request to either of them and may give up waiting, and a store that may lose its last write.
//!
//! The store is the real [`Op::apply`]. A server is what `workers` does at `durability: step`: check or claim, or make
//! the record of a START, run, save, bring back a lost record, answer. A pause is a step that comes late. Time does not
//! pass: no record expires.

use state_store::{Op, Record, Reply, Token};
use stateright::{Checker, Model, Property};

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
    /// Asks the store whether the sequence in its memory is still its own.
    Check,
    Claim,
    /// Makes the record of a START, or notes which one it replaces.
    Reserve(State),
    /// Runs, and saves the state that comes of it; the token of the sequence that this one replaces.
    Save(State, Option<Token>),
    Restore(State),
    Answer(Result<State, Refusal>),
}

/// What a client can do about an error: go on, or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Refusal {
    /// `SEQUENCE_MOVED`: nothing has changed, send it again.
    Moved,
    /// `SEQUENCE_MISSING`
    Missing,
    /// `SEQUENCE_ALREADY_EXISTS`
    Exists,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Server {
    /// The token that it believes in, and the state in its memory.
    memory: Option<(u8, State)>,
    /// What it works on; the life in which the client sent it, and whether the client still waits.
    work: Option<(Request, Phase, u8, bool)>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    record: Option<Record<Vec<u8>>>,
    /// The record before the last write.
    before: Option<Record<Vec<u8>>>,
    servers: [Server; 2],
    next_token: u8,
    /// The life that the client is in; 0: it has not begun.
    life: u8,
    is_over: bool,
    /// It doesn't know what became of its START or END, so it uses the id no more.
    is_unsure: bool,
    /// Its START was refused, or it doesn't know what became of it.
    may_only_start: bool,
    /// [`Protocol::rejects`]
    rejects: bool,
    /// Whether the store has the END of each life.
    ended: [bool; 4],
    /// The steps of the last answer in this life.
    acknowledged: u8,
    crashes_left: u8,
    give_ups_left: u8,
    losses_left: u8,
    seen: Seen,
}

/// What has happened, for the properties.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Seen {
    foreign: bool,
    lost_step: bool,
    resurrected: bool,
    made_twice: bool,
    adopted: bool,
    fenced: bool,
    restored: bool,
    lost_write: bool,
    /// The last life that has ended.
    last_life: u8,
    /// A START has replaced a sequence.
    replaced: bool,
    /// A START that was sent again was refused, because the first one had run.
    began_once: bool,
    /// The client has begun the id anew without an END that it knows of.
    begun_anew: bool,
    /// The steps of this life that were answered.
    answered: [bool; 8],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Action {
    Send(usize, Request),
    Work(usize),
    GiveUp(usize),
    Crash(usize),
    LoseLastWrite,
}

struct Protocol {
    /// `on_duplicate_start` is `reject`. Then the client sends a START again that was not answered, also to the other
    /// server, and uses an id once. With `restart`, it uses an id again, and after a START that was not answered only
    /// if that has looked into the store.
    rejects: bool,
    /// How often the client begins the id, and the steps that it makes each time.
    lives: u8,
    steps: u8,
    crashes: u8,
    give_ups: u8,
    losses: u8,
}

fn token(number: u8) -> Token {
    Token::from_bytes([number; Token::BYTES])
}

impl World {
    fn waits(&self) -> bool {
        self.servers.iter().any(|server| matches!(server.work, Some((.., true))))
    }

    fn new_token(&mut self) -> u8 {
        self.next_token += 1;
        self.next_token
    }

    /// The store applies an operation.
    fn apply(&mut self, operation: Op<'_>) -> Reply {
        let mut after = self.record.clone();
        let reply = operation.apply_to(&mut after);
        if after != self.record {
            match (&self.record, &after) {
                // A record without a state has begun, and nothing of it was saved.
                (_, Some(Record::Live { blob, .. })) => {
                    // A late START may save the state that the sequence began with. No client uses that.
                    let is_new = self.rejects && blob.get(1) == Some(&0);
                    self.seen.resurrected |= blob.first().is_some_and(|life| !is_new && self.ended[usize::from(*life)]);
                }
                (Some(Record::Live { blob, .. }), _) => {
                    blob.first().into_iter().for_each(|life| self.ended[usize::from(*life)] = true);
                }
                _ => {}
            }
            self.before = std::mem::replace(&mut self.record, after);
        }
        reply
    }

    /// A server makes the next step for its request.
    fn work(&mut self, number: usize) {
        let Some((request, phase, life, waits)) = self.servers[number].work else { return };
        let memory = self.servers[number].memory;
        let next = |world: &mut Self, phase| world.servers[number].work = Some((request, phase, life, waits));
        match phase {
            Phase::Check => {
                let Some((of_memory, _)) = memory else { return next(self, Phase::Claim) };
                let reply = self.apply(Op::Check { token: token(of_memory) });
                if matches!(reply, Reply::Done | Reply::Absent) {
                    return next(self, self.after_run(number, request));
                }
                self.servers[number].memory = None;
                next(self, Phase::Claim);
            }
            Phase::Claim => {
                let new = self.new_token();
                match self.apply(Op::Resume { token: token(new), asks: false }) {
                    Reply::Taken(blob) => {
                        self.seen.adopted = true;
                        self.servers[number].memory = Some((new, (blob[0], blob[1])));
                        next(self, self.after_run(number, request));
                    }
                    _ => next(self, Phase::Answer(Err(Refusal::Missing))),
                }
            }
            Phase::Reserve(state) => {
                let new = self.new_token();
                let old = match self.apply(Op::Reserve { token: token(new) }) {
                    Reply::Lives(_) if self.rejects => return next(self, Phase::Answer(Err(Refusal::Exists))),
                    Reply::Lives(old) => Some(old),
                    _ => None,
                };
                self.servers[number].memory = Some((new, state));
                next(self, Phase::Save(state, old));
            }
            Phase::Save(state, old) => {
                let blob = [state.0, state.1];
                let of_memory = memory.map_or(0, |memory| memory.0);
                let reply = self.apply(match (request, old) {
                    (Request::Start, Some(_)) => {
                        Op::Replace { old: old.as_slice(), token: token(of_memory), blob: &blob }
                    }
                    (Request::Start | Request::Step, _) => Op::Save { token: token(of_memory), blob: &blob },
                    (Request::End, _) => Op::End { token: token(of_memory), old: &[], answer: b"" },
                });
                match (reply, request) {
                    (Reply::Done, Request::Start | Request::Step) => {
                        self.seen.replaced |= old.is_some();
                        self.servers[number].memory = Some((of_memory, state));
                        next(self, Phase::Answer(Ok(state)));
                    }
                    (Reply::Done | Reply::Ended | Reply::Absent, Request::End) => {
                        self.servers[number].memory = None;
                        next(self, Phase::Answer(Ok(state)));
                    }
                    (Reply::Absent, Request::Start | Request::Step) => next(self, Phase::Restore(state)),
                    _ => self.lose(number),
                }
            }
            Phase::Restore(state) => {
                let of_memory = memory.map_or(0, |memory| memory.0);
                if self.apply(Op::Restore { token: token(of_memory), blob: &[state.0, state.1] }) != Reply::Done {
                    return self.lose(number);
                }
                self.seen.restored = true;
                self.servers[number].memory = Some((of_memory, state));
                next(self, Phase::Answer(Ok(state)));
            }
            Phase::Answer(answer) => {
                self.servers[number].work = None;
                if waits {
                    self.answer(request, life, answer);
                }
            }
        }
    }

    /// The state after a request, which the server has to save.
    fn after_run(&self, number: usize, request: Request) -> Phase {
        let state = self.servers[number].memory.map_or((0, 0), |memory| memory.1);
        Phase::Save(if request == Request::Step { (state.0, state.1 + 1) } else { state }, None)
    }

    /// A save has found another owner: the server forgets the sequence.
    fn lose(&mut self, number: usize) {
        self.seen.fenced = true;
        self.servers[number].memory = None;
        if let Some((_, phase, ..)) = &mut self.servers[number].work {
            *phase = Phase::Answer(Err(Refusal::Moved));
        }
    }

    /// The client gets an answer.
    fn answer(&mut self, request: Request, life: u8, answer: Result<State, Refusal>) {
        let (of, steps) = match answer {
            Ok(state) => state,
            // It may send the request again.
            Err(Refusal::Moved) => return self.may_only_start |= request == Request::Start,
            Err(Refusal::Missing) => return self.is_over = true,
            // Its first START has run.
            Err(Refusal::Exists) => return self.seen.began_once = true,
        };
        self.seen.foreign |= of != life;
        match request {
            Request::Start => (self.acknowledged, self.seen.answered) = (0, [false; 8]),
            Request::Step => {
                let answered = &mut self.seen.answered[usize::from(steps)];
                self.seen.made_twice |= *answered;
                *answered = true;
                self.seen.lost_step |= steps <= self.acknowledged;
                self.acknowledged = steps;
            }
            Request::End => {
                self.is_over = true;
                self.seen.last_life = self.seen.last_life.max(self.life);
            }
        }
    }
}

impl Model for Protocol {
    type State = World;
    type Action = Action;

    fn init_states(&self) -> Vec<World> {
        vec![World {
            record: None,
            before: None,
            servers: Default::default(),
            next_token: 0,
            life: 0,
            is_over: true,
            is_unsure: false,
            may_only_start: false,
            rejects: self.rejects,
            ended: [false; 4],
            acknowledged: 0,
            crashes_left: self.crashes,
            give_ups_left: self.give_ups,
            losses_left: self.losses,
            seen: Seen::default(),
        }]
    }

    fn actions(&self, world: &World, actions: &mut Vec<Action>) {
        for number in 0..world.servers.len() {
            let server = &world.servers[number];
            if server.work.is_none() && !world.waits() && !world.is_unsure {
                // The servers are alike, so the first of all requests goes to the first server.
                let may_start = if self.rejects && world.life > 0 {
                    world.may_only_start
                } else {
                    world.life < self.lives && (world.life > 0 || number == 0)
                };
                actions.extend(may_start.then_some(Action::Send(number, Request::Start)));
                if !world.is_over && !world.may_only_start {
                    actions.extend((world.acknowledged < self.steps).then_some(Action::Send(number, Request::Step)));
                    actions.push(Action::Send(number, Request::End));
                }
            }
            if let Some((.., waits)) = server.work {
                actions.push(Action::Work(number));
                actions.extend((waits && world.give_ups_left > 0).then_some(Action::GiveUp(number)));
            }
            let is_up = server.work.is_some() || server.memory.is_some();
            actions.extend((is_up && world.crashes_left > 0).then_some(Action::Crash(number)));
        }
        actions.extend((world.losses_left > 0 && world.record != world.before).then_some(Action::LoseLastWrite));
    }

    fn next_state(&self, world: &World, action: Action) -> Option<World> {
        let mut world = world.clone();
        match action {
            Action::Send(number, request) => {
                let phase = if request == Request::Start {
                    world.life += u8::from(!(self.rejects && world.may_only_start));
                    world.seen.begun_anew |= !world.is_over && !self.rejects;
                    world.is_over = false;
                    world.may_only_start = false;
                    Phase::Reserve((world.life, 0))
                } else {
                    Phase::Check
                };
                world.servers[number].work = Some((request, phase, world.life, true));
            }
            Action::Work(number) => world.work(number),
            Action::GiveUp(number) => {
                world.give_ups_left -= 1;
                if let Some((request, phase, _, waits)) = &mut world.servers[number].work {
                    *waits = false;
                    match request {
                        Request::Step => {}
                        // It may send its START to the other server. A START that has not looked yet would replace that
                        // one.
                        Request::Start if self.rejects || !matches!(phase, Phase::Reserve(_)) => {
                            world.may_only_start = true;
                        }
                        Request::Start | Request::End => world.is_unsure = true,
                    }
                }
            }
            Action::Crash(number) => {
                world.crashes_left -= 1;
                let server = std::mem::take(&mut world.servers[number]);
                match server.work {
                    Some((Request::Start, .., true)) if self.rejects => world.may_only_start = true,
                    Some((Request::Start | Request::End, .., true)) => world.is_unsure = true,
                    _ => {}
                }
            }
            Action::LoseLastWrite => {
                world.losses_left -= 1;
                world.seen.lost_write = true;
                world.record = world.before.clone();
                if let Some(Record::Live { blob, .. }) = &world.record
                    && let Some(life) = blob.first()
                {
                    // Then it was the END that the store has lost.
                    world.ended[usize::from(*life)] = false;
                }
            }
        }
        Some(world)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(
                "no foreign state, unless the store has lost a START that replaced a sequence",
                |_, world: &World| !world.seen.foreign || (world.seen.lost_write && world.seen.begun_anew),
            ),
            Property::always("no resurrection of an ended sequence", |_, world: &World| !world.seen.resurrected),
            Property::always("one writer: no step is answered twice", |_, world: &World| {
                !world.seen.made_twice || world.seen.lost_write
            }),
            Property::always("no loss of an answered step, unless the store has lost it", |_, world: &World| {
                !world.seen.lost_step || world.seen.lost_write
            }),
            Property::sometimes("all lives end", |of: &Self, world: &World| world.seen.last_life == of.lives),
            Property::sometimes("a server goes on with another one's sequence", |_, world: &World| world.seen.adopted),
            Property::sometimes("a late save is refused", |_, world: &World| world.seen.fenced),
            Property::sometimes("a START replaces a sequence, or is refused", |of: &Self, world: &World| {
                if of.rejects { world.seen.began_once } else { world.seen.replaced }
            }),
            Property::sometimes("a lost record comes back", |_, world: &World| world.seen.restored),
        ]
    }
}

#[test]
fn the_protocol_holds_in_every_order() {
    // Two steps in two lives; and three lives, so that a late START of the second one meets the third one.
    for (rejects, lives, steps) in [(true, 1, 2), (false, 2, 2), (false, 3, 1)] {
        // What holds without a lost write is checked too: a path need not use what it may.
        let protocol = Protocol { rejects, lives, steps, crashes: 1, give_ups: 1, losses: 1 };
        let checker = protocol.checker().threads(2).spawn_bfs().join();
        checker.assert_properties();
        println!("{} states", checker.unique_state_count());
    }
}
