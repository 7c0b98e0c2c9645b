//! Which incarnation of an id receives, where there are several.

use super::{Phase, Record, Sequences};
use crate::sequence::contest::{Contest, Evidence};
use crate::sequence::id::Key;
use crate::state::pool::SlotId;

impl<S: Clone, C: Default, H, E> Sequences<S, C, H, E> {
    /// Whether a START may have been sent before that of the live sequence of its id. It then waited in core behind an
    /// END that was in the queue when the other START came, so it comes at most one emptying of the queue after that
    /// END, which came at most one after the other START.
    pub(super) fn may_be_late(&self, key: &Key) -> bool {
        let front = self.chains.get(key).and_then(|chain| chain.incarnations.first());
        let Some(front) = front.and_then(|slot| self.pool.record(*slot)) else { return false };
        let seen = self.total(key.instance).since(front.born);
        !Evidence { requests: seen.requests / 2, short_payloads: seen.short_payloads / 2 }
            .is_enough(self.policy.queue_requests)
    }

    pub(super) fn contest(&self, key: &Key, late: bool) -> Contest {
        Contest::new(late, self.now, self.payloads(key.instance))
    }

    /// Where the receiving incarnation has nothing in core's queue, it is over if it has certainly been started over.
    /// Else the next one gets its turn: its START is released. If core had more of it, that comes now, up to its END,
    /// and then the turn goes back. If nothing comes, then the id has been started over, and the incarnations that had
    /// their turn are over.
    pub(super) fn take_turns(
        &mut self,
        of_instance: Option<u32>,
        released: &mut Vec<H>,
        mut has_nothing_queued: impl FnMut(&mut Contest, &Key) -> bool,
    ) {
        let is_decidable = |key: &&Key| {
            of_instance.is_none_or(|instance| key.instance == instance) && !self.letting_go.contains_key(key)
        };
        let keys: Vec<Key> = self.contested.iter().filter(is_decidable).cloned().collect();
        for key in keys {
            let Some(chain) = self.chains.get_mut(&key) else { continue };
            let Some(contest) = &mut chain.contest else { continue };
            let front = chain.incarnations[0];
            let (nothing_queued, in_turn, late) = (has_nothing_queued(contest, &key), contest.in_turn, contest.late);
            if nothing_queued && self.is_idle(front) {
                match (in_turn, late) {
                    (true, _) => self.end_earlier(&key, released),
                    (false, true) => self.give_turn(&key, released),
                    (false, false) => {
                        self.end_if_idle(front, released);
                    }
                }
            }
        }
    }

    fn give_turn(&mut self, key: &Key, released: &mut Vec<H>) {
        let seen = self.payloads(key.instance);
        let Some(chain) = self.chains.get_mut(key) else { return };
        let is_held = |slot: &SlotId| self.pool.record(*slot).is_some_and(|record| record.held.is_some());
        let Some(next) = chain.incarnations.iter().position(is_held) else {
            // A START in the works will be held, and then it is to have its turn.
            let incarnations = chain.incarnations.clone();
            if incarnations.iter().all(|slot| self.is_idle(*slot)) {
                self.set_contest(key, None);
            }
            return;
        };
        self.doubtful.insert(chain.incarnations[0]);
        chain.incarnations[..=next].rotate_right(1);
        if let Some(contest) = &mut chain.contest {
            (contest.in_turn, contest.from) = (true, seen);
        }
        let front = chain.incarnations[0];
        let held = self.pool.record_mut(front).and_then(|record| record.held.take());
        self.release_held(key, held, released);
    }

    /// Ends the incarnations behind the receiving one that are neither held nor in the works.
    fn end_earlier(&mut self, key: &Key, released: &mut Vec<H>) {
        let Some(chain) = self.chains.get(key) else { return };
        let others = chain.incarnations[1..].to_vec();
        let one_shot = chain.contest.as_ref().is_some_and(|contest| contest.one_shot);
        // Decided: what is removed now leaves no new doubt about the receiving one.
        self.set_contest(key, None);
        for slot in others {
            let is_over = |record: &Record<C, H>| matches!(record.phase, Phase::Idle) && record.held.is_none();
            if self.pool.record(slot).is_some_and(is_over) {
                self.remove(slot, released);
                self.counts.ended += 1;
            }
        }
        let Some(chain) = self.chains.get(key) else { return };
        match chain.incarnations[..] {
            [front] if one_shot => {
                self.doubtful.insert(front);
            }
            [_] => {}
            _ => self.set_contest(key, Some(Contest { one_shot, ..self.contest(key, true) })),
        }
    }

    /// The only place where contests begin and end, so that `contested` has exactly the chains with one.
    pub(super) fn set_contest(&mut self, key: &Key, contest: Option<Contest>) {
        match contest {
            Some(_) => self.contested.insert(key.clone()),
            None => self.contested.remove(key),
        };
        if let Some(chain) = self.chains.get_mut(key) {
            chain.contest = contest;
        }
    }
}
