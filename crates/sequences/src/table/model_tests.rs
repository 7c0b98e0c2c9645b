//! Tests the table with random operations against a simulation of Triton's `oldest` scheduler.
//!
//! The simulation knows the true incarnation of each request. The instance is busy, idle for a short time, or idle for
//! so long that core drops all sequences. The whole process may be stopped while core has requests in its queue.
//! Clients keep the rules for using an id again, or break them. In no case may a request get the slot of another
//! incarnation.

#![allow(clippy::unwrap_used, reason = "only tests and fuzz targets use this")]

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use super::*;
use crate::SequenceId;

const CORE_SLOTS: usize = 6;
const QUIET: Duration = Duration::from_millis(20);
/// Core hands over its requests to an instance that is idle for so many looks.
const LOOKS: u32 = 4;
const DROPPED: Duration = Duration::from_secs(10);

/// A request in the simulated core.
#[derive(Clone, Copy, Debug)]
struct Sent {
    id: u64,
    incarnation: u64,
    start: bool,
    end: bool,
    core_slot: usize,
}

#[derive(Default)]
struct CoreSlot {
    queue: VecDeque<Sent>,
    in_flight: Option<Sent>,
    id: Option<u64>,
}

/// Triton's `oldest` scheduler for one instance. Each sequence has a slot, and each slot has one request in flight.
/// When this request is released, the slot's next request joins the common queue. Core forms up to two payloads ahead.
struct Core {
    batch: usize,
    slots: Vec<CoreSlot>,
    /// For each id with a sequence, its slot and incarnation.
    active: HashMap<u64, (usize, u64)>,
    queue: VecDeque<Sent>,
    payloads: VecDeque<Vec<Sent>>,
    incarnations: u64,
    /// Requests that have a slot, and whose threads have not put them into its queue yet.
    late: VecDeque<Sent>,
}

impl Core {
    fn new(batch: usize) -> Self {
        Self {
            batch,
            slots: (0..CORE_SLOTS).map(|_| CoreSlot::default()).collect(),
            active: HashMap::new(),
            queue: VecDeque::new(),
            payloads: VecDeque::new(),
            incarnations: 0,
            late: VecDeque::new(),
        }
    }

    /// Sends a request to core. Returns it if core accepts it. `late`: the thread that brings it pauses when core has
    /// chosen its slot.
    fn send(&mut self, id: u64, start: bool, end: bool, late: bool) -> Option<Sent> {
        let core_slot = match self.active.get(&id) {
            Some(&(slot, _)) => slot,
            None if start => self.slots.iter().position(|slot| slot.id.is_none())?,
            None => return None,
        };
        if start {
            self.incarnations += 1;
            self.active.insert(id, (core_slot, self.incarnations));
            self.slots[core_slot].id = Some(id);
        }
        let sent = Sent { id, incarnation: self.active[&id].1, start, end, core_slot };
        if end {
            self.active.remove(&id);
        }
        self.late.push_back(sent);
        if !late {
            self.arrive();
        }
        Some(sent)
    }

    /// Puts what is late into the queues of its slots.
    fn arrive(&mut self) {
        // The last one comes first. Those of one slot keep their order: docs/sequences.md names what happens otherwise.
        while let Some(&Sent { core_slot, .. }) = self.late.back() {
            let of_slot: Vec<Sent> = self.late.iter().filter(|sent| sent.core_slot == core_slot).copied().collect();
            self.late.retain(|sent| sent.core_slot != core_slot);
            self.slots[core_slot].queue.extend(of_slot);
            self.advance(core_slot);
        }
    }

    /// Moves the next request of a slot to the common queue, if the slot has none in flight.
    fn advance(&mut self, slot: usize) {
        let slot = &mut self.slots[slot];
        if slot.in_flight.is_none()
            && let Some(next) = slot.queue.pop_front()
        {
            slot.in_flight = Some(next);
            if next.end {
                // The slot takes the next sequence, whose START waits for the release of this END. Another START of the
                // id, in another slot, may overtake it.
                slot.id = None;
            }
            self.queue.push_back(next);
        }
    }

    fn form(&mut self) {
        if self.payloads.len() < 2 && !self.queue.is_empty() {
            let take = self.batch.min(self.queue.len());
            self.payloads.push_back(self.queue.drain(..take).collect());
        }
    }

    fn release(&mut self, sent: Sent) {
        self.slots[sent.core_slot].in_flight = None;
        self.advance(sent.core_slot);
    }

    /// Whether core has a request that it can hand over.
    fn has_work(&self) -> bool {
        !(self.queue.is_empty() && self.payloads.is_empty())
    }

    /// Drops the sequences that have no request, because they have been idle for too long.
    fn drop_idle(&mut self) {
        let Self { active, slots, .. } = self;
        let is_idle = |slot: &CoreSlot| slot.in_flight.is_none() && slot.queue.is_empty();
        active.retain(|_, (slot, _)| !is_idle(&slots[*slot]));
        slots.iter_mut().filter(|slot| is_idle(slot)).for_each(|slot| slot.id = None);
    }
}

#[derive(Clone, Copy, Debug)]
pub enum Op {
    Send {
        id: u64,
        start: bool,
        end: bool,
    },
    /// The same, by a client that sends on several connections: it overtakes this one.
    SendLate {
        id: u64,
        start: bool,
        end: bool,
    },
    /// Plans a sequence, which the client sends later.
    Plan {
        id: u64,
        requests: usize,
        end: bool,
    },
    /// Sends the next planned requests of an id without waiting for answers.
    SendNext {
        id: u64,
        requests: usize,
    },
    /// Core forms the next payload.
    Form,
    /// The instance admits the requests of a payload.
    Execute,
    /// The instance settles the oldest payload that has been executed.
    Settle,
    /// The clock looks at the table after a part of the quiet time, whatever core has in its queue.
    Look,
    /// The whole process is stopped for a long time. Then the clock looks at the table first.
    Stop,
    /// Core's queue becomes empty, and the instance is idle for a part of the quiet time.
    Pause,
    /// Core's queue becomes empty, and the instance is idle until the table waits for nothing.
    Quiet,
    /// The instance is idle for so long that core drops all sequences without a request.
    Silence,
}

/// Requests of an id that the client has sent and that are not answered.
#[derive(Default)]
struct InFlight {
    requests: usize,
    starts: usize,
}

/// Whether clients keep the rules for using an id again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clients {
    /// Clients wait for the answer to a START before they send the next one with the same id. They start a sequence
    /// over without END only when all its requests are answered.
    KeepRules,
    BreakRules,
}

struct World {
    core: Core,
    table: Sequences<(), (), Sent>,
    in_flight: BTreeMap<u64, InFlight>,
    /// The slot that the table gave to each incarnation.
    slots: BTreeMap<u64, SlotId>,
    /// Payloads that have been executed and are not settled yet.
    unsettled: VecDeque<Vec<(Sent, Option<SlotId>)>>,
    now: Instant,
    clients: Clients,
    /// For each planned request of an id, whether it is a START and whether it is an END.
    plans: BTreeMap<u64, VecDeque<(bool, bool)>>,
    /// Ids whose clients have broken a rule. Their requests may be refused.
    rule_broken: HashSet<u64>,
    /// Incarnations that were started over without END soon after their START, and those of the id that followed them.
    /// Their requests may be refused.
    started_over_soon: HashSet<u64>,
    /// Ids with a START since the last quiet time, each with whether a sequence of it was started over soon.
    started: HashMap<u64, bool>,
    /// The last incarnation of each id, if it has no END.
    without_end: HashMap<u64, u64>,
    /// Looks since the instance became idle.
    looks: u32,
    /// Ids whose requests may get the state of another sequence of the id (docs/sequences.md, "Known limit"): a START
    /// that broke a rule has failed, or they came on several connections at once.
    may_differ: HashSet<u64>,
    /// Whether every third START fails.
    starts_fail: bool,
}

impl World {
    fn send(&mut self, id: u64, start: bool, end: bool, late: bool) {
        let in_flight = self.in_flight.entry(id).or_default();
        let starts_over = start && self.core.active.contains_key(&id);
        let breaks = start && in_flight.starts > 0 || starts_over && in_flight.requests > 0;
        if breaks && self.clients == Clients::KeepRules {
            return;
        }
        let Some(sent) = self.core.send(id, start, end, late) else { return };
        if late {
            self.rule_broken.insert(id);
            self.may_differ.insert(id);
        }
        in_flight.requests += 1;
        in_flight.starts += usize::from(start);
        if breaks {
            self.rule_broken.insert(id);
        }
        if start {
            let earlier = self.without_end.insert(id, sent.incarnation);
            if let Some(over_soon) = self.started.get_mut(&id) {
                *over_soon |= earlier.is_some();
                self.started_over_soon.extend(earlier.into_iter().chain(over_soon.then_some(sent.incarnation)));
            } else {
                self.started.insert(id, false);
            }
        }
        if end {
            self.without_end.remove(&id);
        }
    }

    fn send_next(&mut self, id: u64) {
        if let Some((start, end)) = self.plans.get_mut(&id).and_then(VecDeque::pop_front) {
            self.send(id, start, end, false);
        }
    }

    fn execute(&mut self) {
        self.core.form();
        let Some(payload) = self.core.payloads.pop_front() else { return };
        let key = |id| Key { instance: 0, lane: None, id: SequenceId::Number(id) };
        let admission = |sent: &Sent| Admission { key: key(sent.id), start: sent.start, end: sent.end };
        let admissions: Vec<_> = payload.iter().map(admission).collect();
        self.looks = 0;
        self.table.begin_payload(0, self.now);
        self.table.prepare(0, &admissions, self.now);
        self.drop_states();
        while let Some(shortage) = self.table.prepare(0, &admissions, self.now) {
            assert_eq!(self.table.add_slab((), shortage.slab_slots, shortage.wanted), None);
        }
        let admitted = self.table.admit(0, &admissions, self.now);
        let mut rows = Vec::new();
        for (sent, admitted) in payload.into_iter().zip(admitted) {
            let slot = admitted.map(|admitted| admitted.slot);
            if let (true, Ok(slot)) = (sent.start, &slot) {
                self.slots.insert(sent.incarnation, *slot);
            }
            match &slot {
                Ok(slot) => {
                    let own = self.slots.get(&sent.incarnation);
                    let may_differ = self.may_differ.contains(&sent.id);
                    assert!(Some(slot) == own || may_differ, "{sent:?} got the slot of another incarnation");
                }
                Err(refusal) => {
                    assert!(matches!(refusal, Refusal::Unknown | Refusal::Ambiguous), "{refusal:?} for {sent:?}");
                    assert!(self.may_be_refused(sent.id, sent.incarnation), "{sent:?} was refused");
                }
            }
            rows.push((sent, slot.ok()));
        }
        self.unsettled.push_back(rows);
        self.release();
    }

    /// The instance drops the states of the sequences that are over, as it does in each turn.
    fn drop_states(&mut self) {
        self.table.take_over(0).into_iter().for_each(|slot| self.table.free(slot));
    }

    fn may_be_refused(&self, id: u64, incarnation: u64) -> bool {
        self.rule_broken.contains(&id) || self.started_over_soon.contains(&incarnation)
    }

    /// Releases the held requests that must be released. Returns whether there were any.
    fn release(&mut self) -> bool {
        let (released, releasing): (Vec<_>, Vec<_>) = self.table.take_released().into_iter().unzip();
        released.iter().for_each(|&sent| self.core.release(sent));
        self.table.have_been_released(releasing, self.now);
        !released.is_empty()
    }

    fn settle(&mut self) {
        let Some(rows) = self.unsettled.pop_front() else { return };
        let mut released = Vec::new();
        for (sent, slot) in rows {
            let in_flight = self.in_flight.get_mut(&sent.id).unwrap();
            in_flight.requests -= 1;
            in_flight.starts -= usize::from(sent.start);
            let fails = self.starts_fail && sent.start && sent.incarnation % 3 == 0;
            if fails {
                // The client knows it only now. The next STARTs of the id may come too soon after this one.
                self.slots.remove(&sent.incarnation);
                if !self.rule_broken.insert(sent.id) {
                    self.may_differ.insert(sent.id);
                }
            }
            let outcome = if fails { Outcome::Failed } else { Outcome::Advanced };
            let hold = slot.filter(|slot| self.table.settle(*slot, outcome, sent.end, self.now));
            released.extend(match hold {
                Some(slot) => self.table.hold(slot, sent),
                None => Some(sent),
            });
        }
        released.into_iter().for_each(|sent| self.core.release(sent));
        self.release();
        self.table.finish_payload(0, self.now);
        self.looks = 0;
        self.release();
    }

    /// Executes and settles until core has no request in its queue.
    fn drain(&mut self) {
        while self.core.has_work() || !self.unsettled.is_empty() {
            self.execute();
            self.settle();
        }
    }

    /// Sends what is planned, and empties core's queue.
    fn rest(&mut self) {
        self.core.arrive();
        while let Some(id) = self.plans.iter().find(|(_, plan)| !plan.is_empty()).map(|(id, _)| *id) {
            self.send_next(id);
        }
        self.drain();
    }

    /// Lets time pass, and then the clock looks at the table. Core hands over its requests before an idle
    /// instance has been looked at for the quiet time.
    fn look(&mut self, time: Duration) {
        self.core.arrive();
        if self.unsettled.is_empty() && self.core.has_work() {
            self.looks += 1;
            if self.looks >= LOOKS {
                self.execute();
            }
        }
        self.now += time;
        self.table.tick(0, self.now);
        self.drop_states();
        if self.release() {
            self.looks = 0;
        }
    }

    fn quiet(&mut self) {
        self.rest();
        // A pause may release requests, and the next one shows that core has nothing left of what follows them.
        for _ in 0..10 {
            for _ in 0..LOOKS {
                self.look(QUIET / LOOKS);
                self.drain();
            }
            if self.table.incarnations.known().1 == 0 {
                break;
            }
        }
        self.started.clear();
    }

    /// Waits until no request is in flight, and then until core drops all sequences.
    fn silence(&mut self) {
        while self.core.slots.iter().any(|slot| slot.in_flight.is_some()) {
            self.quiet();
        }
        self.quiet();
        self.now += DROPPED;
        self.core.drop_idle();
    }

    /// The process is stopped for so long that core drops its idle sequences when it goes on.
    fn stop(&mut self) {
        self.core.arrive();
        self.core.drop_idle();
        self.look(DROPPED * 2);
    }

    fn play(&mut self, op: Op) {
        match op {
            Op::Send { id, start, end } => self.send(id, start, end, false),
            Op::SendLate { id, start, end } => self.send(id, start, end, true),
            Op::Plan { id, requests, end } => {
                let flags = (0..requests).map(|at| (at == 0, end && at == requests - 1));
                self.plans.entry(id).or_default().extend(flags);
            }
            Op::SendNext { id, requests } => (0..requests).for_each(|_| self.send_next(id)),
            Op::Form => self.core.form(),
            Op::Execute => self.execute(),
            Op::Settle => self.settle(),
            Op::Look => self.look(QUIET / LOOKS),
            Op::Stop => self.stop(),
            Op::Pause => {
                self.rest();
                self.look(QUIET / LOOKS);
            }
            Op::Quiet => self.quiet(),
            Op::Silence => self.silence(),
        }
    }
}

/// Panics if the answers of the table differ from those of the simulation.
pub fn play(ops: Vec<Op>, batch: usize, clients: Clients, starts_fail: bool) {
    let policy = Policy {
        idle: Some(IdleLimits { limit: DROPPED * 1000, dropped_after: DROPPED }),
        quiet: QUIET,
        by_lane: false,
        queue_requests: CORE_SLOTS,
        has_place_for_all: true,
    };
    let limits = SlotLimits { reserve: CORE_SLOTS, ..SlotLimits::all_at_once(CORE_SLOTS) };
    let mut world = World {
        core: Core::new(batch),
        table: {
            let mut table = Sequences::new(policy, limits);
            table.add_slab((), CORE_SLOTS, 0);
            table
        },
        in_flight: BTreeMap::new(),
        slots: BTreeMap::new(),
        unsettled: VecDeque::new(),
        now: Instant::now(),
        clients,
        plans: BTreeMap::new(),
        rule_broken: HashSet::new(),
        started_over_soon: HashSet::new(),
        started: HashMap::new(),
        without_end: HashMap::new(),
        looks: 0,
        may_differ: HashSet::new(),
        starts_fail,
    };
    for op in ops {
        world.play(op);
    }
    for _ in 0..100 {
        world.quiet();
    }
    let core = &world.core;
    assert!(core.slots.iter().all(|slot| slot.in_flight.is_none() && slot.queue.is_empty()), "a request is stuck");
    for (id, (_, incarnation)) in &core.active {
        let slot = world.slots.get(incarnation);
        let is_live = slot.is_some_and(|slot| world.table.records.pool.record(*slot).is_some());
        assert!(is_live || world.may_be_refused(*id, *incarnation), "a live sequence was dropped");
    }
    let table = &mut world.table;
    let (chains, used_capacity) = (table.incarnations.known().0, table.incarnations.used_capacity());
    assert_eq!(table.take_released().len(), 0);
    assert_eq!(table.live(), used_capacity, "an incarnation that is over has a slot");
    assert_eq!(chains, used_capacity, "a chain without incarnations was not removed");
    world.now += DROPPED * 2000;
    for _ in 0..=LOOKS {
        world.look(QUIET / LOOKS);
    }
    let table = &mut world.table;
    assert_eq!((table.live(), table.incarnations.known(), table.take_released().len()), (0, (0, 0), 0));
}

#[cfg(test)]
mod properties {
    use proptest::prelude::*;

    use super::*;

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            12 => (1u64..5, prop::bool::weighted(0.35), prop::bool::weighted(0.3))
                .prop_map(|(id, start, end)| Op::Send { id, start, end }),
            18 => server_op(),
            6 => passing_time(),
        ]
    }

    /// The first two ids are those of clients that use several connections.
    fn op_of_several_connections() -> impl Strategy<Value = Op> {
        let flags = || (prop::bool::weighted(0.35), prop::bool::weighted(0.3));
        prop_oneof![
            6 => (1u64..3, flags()).prop_map(|(id, (start, end))| Op::SendLate { id, start, end }),
            12 => (1u64..6, flags()).prop_map(|(id, (start, end))| Op::Send { id, start, end }),
            24 => server_op(),
            2 => passing_time(),
        ]
    }

    fn op_of_clients_that_send_ahead() -> impl Strategy<Value = Op> {
        prop_oneof![
            20 => (1u64..5, 1usize..5, any::<bool>()).prop_map(|(id, requests, end)| Op::Plan { id, requests, end }),
            40 => (1u64..5, 1usize..9).prop_map(|(id, requests)| Op::SendNext { id, requests }),
            150 => server_op(),
            3 => passing_time(),
        ]
    }

    fn server_op() -> impl Strategy<Value = Op> {
        prop_oneof![Just(Op::Form), Just(Op::Execute), Just(Op::Settle)]
    }

    fn passing_time() -> impl Strategy<Value = Op> {
        prop_oneof![
            4 => Just(Op::Look),
            1 => Just(Op::Stop),
            1 => Just(Op::Pause),
            1 => Just(Op::Quiet),
            1 => Just(Op::Silence),
        ]
    }

    fn cases(normal: u32) -> ProptestConfig {
        ProptestConfig { cases: if cfg!(miri) { 4 } else { normal }, failure_persistence: None, ..Default::default() }
    }

    proptest! {
        #![proptest_config(cases(3000))]
        #[test]
        fn every_request_gets_the_state_of_its_own_incarnation(
            ops in prop::collection::vec(op(), 0..if cfg!(miri) { 40 } else { 200 }), batch in 1usize..5,
            starts_fail in any::<bool>(),
        ) {
            play(ops, batch, Clients::KeepRules, starts_fail);
        }

        #[test]
        fn clients_that_break_the_rules_get_their_own_state_or_none(
            ops in prop::collection::vec(op(), 0..if cfg!(miri) { 40 } else { 200 }), batch in 1usize..5,
            starts_fail in any::<bool>(),
        ) {
            play(ops, batch, Clients::BreakRules, starts_fail);
        }

        #[test]
        fn clients_that_use_several_connections_disturb_no_other_id(
            ops in prop::collection::vec(op_of_several_connections(), 0..if cfg!(miri) { 40 } else { 200 }),
            batch in 1usize..5, starts_fail in any::<bool>(),
        ) {
            play(ops, batch, Clients::BreakRules, starts_fail);
        }

        #[test]
        fn clients_that_send_several_starts_ahead_get_their_own_state_or_none(
            ops in prop::collection::vec(op_of_clients_that_send_ahead(), 0..if cfg!(miri) { 40 } else { 200 }),
            batch in 1usize..5, starts_fail in any::<bool>(),
        ) {
            play(ops, batch, Clients::BreakRules, starts_fail);
        }
    }
}
