//! What the store, the two servers and the client have, and what each of them does.

use state_store::{Op, Record, Reply, Token};

/// A state: the life of the id that it belongs to, and its number of steps.
pub type State = (u8, u8);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Request {
    Start,
    Step,
    End,
}

/// What a server does next for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Enters the START. `true`: the owner of an older sequence is asked first.
    Enter(bool),
    /// Looks for the sequence in what is to be written, then in the store. `true`: the owner is asked first.
    Look(bool),
    Run,
    Answer(Result<State, Refusal>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Refusal {
    /// The store has no such sequence, or no state of it.
    Missing,
    /// The request can be sent again.
    Again,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Memory {
    pub token: u8,
    pub state: State,
    /// The steps that are known to be saved.
    pub saved: u8,
    /// The store may not have a record of it.
    pub is_new: bool,
    /// It has made steps since its last snapshot.
    pub is_dirty: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum What {
    /// A state; `None`: it has begun while the store was not there.
    State(Option<State>),
    Release(Option<State>),
    End,
}

/// What is to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Entry {
    pub token: u8,
    pub is_new: bool,
    pub what: What,
    pub is_wanted: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Server {
    pub memory: Option<Memory>,
    /// One for each sequence, the youngest last.
    pub entries: Vec<Entry>,
    /// What it works on, and the life in which the client sent it.
    pub work: Option<(Request, Phase, u8)>,
    /// Another server has asked, and this one has not heard it.
    pub is_asked: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Store {
    pub record: Option<Record<Vec<u8>>>,
    /// The server that is asked.
    pub owner: Option<usize>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct World {
    pub store: Store,
    /// Before the last write.
    pub before: Store,
    pub servers: [Server; 2],
    pub next_token: u8,
    /// The lives that the client begins.
    pub lives: u8,
    /// The life that the client is in; 0: it has not begun.
    pub life: u8,
    pub is_over: bool,
    /// The store has the END of lives up to this one.
    pub ended_life: u8,
    /// The steps of the last answer in this life, and how many of them were said to be saved.
    pub answered: u8,
    pub told_saved: u8,
    pub crashes_left: u8,
    pub losses_left: u8,
    pub absences_left: u8,
    /// Requests that were sent again.
    pub repeats_left: u8,
    pub seen: Seen,
}

/// What has happened, for the properties.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Seen {
    pub foreign: bool,
    pub lost_step: bool,
    pub lost_saved_step: bool,
    pub resurrected: bool,
    pub overwritten: bool,
    pub released: bool,
    pub fenced: bool,
    pub refused_new: bool,
    pub all_lives: bool,
    pub crashed: bool,
    /// A server did not wait for an owner that lives.
    pub hurried: bool,
    pub lost_write: bool,
    /// A START ran while the store was not there.
    pub absent: bool,
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
        if let (Some(old), Some(Record::Ended(_))) = (old, after) {
            self.ended_life = self.ended_life.max(old.0);
        }
    }

    /// Puts what a sequence has done to what is to be written.
    pub fn put(&mut self, number: usize, memory: Memory, what: What) {
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
    pub fn work(&mut self, number: usize, is_in_a_hurry: bool) {
        let Some((request, phase, life)) = self.servers[number].work else { return };
        let next = |world: &mut Self, phase| world.servers[number].work = Some((request, phase, life));
        match phase {
            Phase::Enter(asks) => {
                self.next_token += 1;
                let new = self.next_token;
                let asks = asks && !is_in_a_hurry;
                self.note_hurry(number, is_in_a_hurry);
                if self.apply(number, Op::Start { token: token(new), asks }) == Reply::Asked {
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
    pub fn begin(&mut self, number: usize, token: u8, life: u8, is_new: bool) {
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
    pub fn write(&mut self, number: usize) {
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
            What::End => Op::End { token: token(of), old: &[], answer: b"" },
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

    /// The sequence of a server leaves it.
    pub fn leave(&mut self, number: usize) {
        if let Some(memory) = self.servers[number].memory.take() {
            self.put(number, memory, What::Release(memory.is_dirty.then_some(memory.state)));
        }
    }
}
