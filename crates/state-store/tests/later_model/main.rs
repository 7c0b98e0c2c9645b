//! Checks the protocol of `durability: interval` and `drain` in every order of its steps: steps are saved after their
//! answers, STARTs are entered first, and a server that wants a sequence asks the owner.
//!
//! The store is the real [`Op::apply`], with the owner's name beside the record as the scripts of Redis keep it. Two
//! servers do what `workers/stored` does, and may crash between any two steps, or be late with any of them. A client
//! sends each request to either server. The store may lose its last write, and may not be there for a START. Time does
//! not pass: no record expires.

mod world;

use std::collections::BTreeSet;

use stateright::{Checker, Expectation, Model, Property};
use world::{Phase, Request, Seen, Server, Store, What, World};

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
                // Other servers learn that its process has ended: no connection is subscribed to its channel.
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
            // A START that ran without the store, or did not wait for the owner of an older sequence, has not replaced
            // it.
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

/// Without a fault.
const CALM: Protocol = Protocol { lives: 2, steps: 1, crashes: 0, losses: 0, absences: 0 };

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
    let runs = [Protocol { crashes: 1, ..CALM }, Protocol { absences: 1, ..CALM }];
    let happens: BTreeSet<_> = runs.into_iter().flat_map(check).collect();
    assert_eq!(happens.len(), 5, "{happens:?}");
}

#[test]
#[ignore = "it takes minutes"]
fn the_protocol_of_late_saves_holds_with_two_faults() {
    let nothing = Protocol { lives: 2, steps: 1, crashes: 0, losses: 0, absences: 0 };
    check(Protocol { losses: 1, ..nothing });
    check(Protocol { crashes: 1, absences: 1, ..nothing });
    check(Protocol { crashes: 1, steps: 2, ..nothing });
}
