//! Sequences whose clients have gone: core never says so.

use std::time::Instant;

use super::Sequences;
use crate::state::pool::SlotId;

impl<S: Clone, C: Default, H, E> Sequences<S, C, H, E> {
    /// Drops the sequences of an instance that have lain idle for too long. Under load a request may wait in core for
    /// longer than a sequence may lie idle, so each stays until everything has come that was queued when its time was
    /// over.
    pub(super) fn expire(&mut self, instance: u32, now: Instant, released: &mut Vec<H>) {
        let limit = self.policy.idle_limit;
        let Some(of) = self.instances.get_mut(&instance) else { return };
        while let Some((&slot, &since)) = of.idle.front()
            && now >= since + limit
        {
            of.idle.pop_front();
            of.overdue.insert(slot);
            if let Some(record) = self.pool.record_mut(slot) {
                record.released_by = of.watermark.begun();
            }
        }
        let passed = of.watermark.passed();
        while let Some(slot) = self.instances.get(&instance).and_then(|of| of.overdue.front().copied())
            && self.pool.record(slot).is_none_or(|record| record.released_by <= passed)
        {
            self.drop_idle(slot, released);
        }
    }

    /// When [`Sequences::tick`] may have something to do again.
    pub fn next_tick(&self, now: Instant) -> Instant {
        let mut next = now + self.policy.idle_limit;
        for instance in self.instances.values() {
            if let Some((_, &since)) = instance.idle.front() {
                next = next.min(since + self.policy.idle_limit);
            }
            if self.held > 0 || !instance.overdue.is_empty() {
                next = next.min(instance.watermark.next_rest().unwrap_or(now + self.policy.quiet));
            }
            if let Some((due, _)) = instance.late_looks.front() {
                next = next.min(*due);
            }
        }
        next
    }

    /// Drops the sequence of an instance that has lain idle the longest, if core has certainly dropped it.
    pub(super) fn drop_longest_idle(&mut self, instance: u32, now: Instant, released: &mut Vec<H>) {
        let Some(of) = self.instances.get(&instance) else { return };
        let dropped_after = self.policy.dropped_after;
        let longest = of.idle.front().filter(|&(_, &since)| now >= since + dropped_after).map(|(slot, _)| slot);
        if let Some(&slot) = of.overdue.front().or(longest) {
            self.drop_idle(slot, released);
        }
    }

    fn drop_idle(&mut self, slot: SlotId, released: &mut Vec<H>) {
        self.counts.expired += 1;
        match self.pool.record(slot).map(|record| record.key.clone()) {
            Some(key) if key.lane.is_none() => self.remove_from_chain(slot, &key, released),
            Some(_) => self.remove_from_lane(slot),
            None => {}
        }
    }
}
