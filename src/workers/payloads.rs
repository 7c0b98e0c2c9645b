//! The path of a payload of a model whose sequences core schedules.
//!
//! Core calls Execute only when it has requests, and does not report that a client has gone away. So an instance gets
//! its turns from two threads: core's, and a clock that looks for sequences that are over while nothing comes. The
//! instance's lock keeps the turns apart. The table only notes that a sequence is over, whatever thread finds it out.
//! Its instance drops the state in its next turn, because it alone knows where the state is.

use std::sync::Arc;

use parking_lot::Mutex;

use super::clock::{Alarm, Thread, start_clock};
use crate::config::Strategy;
use crate::error::LoadError;
use crate::instance::Instance;
use crate::model::{Answered, Model};
use crate::responder::Responder;
use crate::triton::{self, Request};

/// A Triton instance of such a model. In this order: the clock stops, the answers are sent, the instance ends its
/// sequences.
pub struct Payloads {
    _clock: Thread,
    responder: Responder<Vec<Answered>>,
    instance: Arc<Mutex<Instance>>,
}

impl Payloads {
    pub fn new(triton: triton::Instance, model: Arc<Model>) -> Result<Self, LoadError> {
        // With `direct`, core may send a sequence's next request before the last one is released.
        let overlaps = matches!(model.config.strategy, Strategy::Oldest);
        let instance = Instance::new(triton, model)?;
        let (alarm, number) = (Arc::<Alarm>::default(), instance.number);
        let (sequences, instance) = (instance.sequences.clone(), Arc::new(Mutex::new(instance)));
        let (ticks, of_site, rings) = (instance.clone(), sequences.clone(), alarm.clone());
        let clock = start_clock(&alarm, move || {
            let next = ticks.lock().tick();
            // Without the lock of the instance, because it takes long to make or free a slab.
            of_site.adjust_slabs();
            of_site.publish();
            next.into_iter().for_each(|next| rings.by(next));
        })?;
        let responder = Responder::new(
            move |answered| sequences.settle(number, answered).into_iter().for_each(|next| alarm.by(next)),
            overlaps,
        );
        Ok(Self { _clock: clock, responder, instance })
    }

    /// Makes the answers of a payload and hands them to the responder, which sends them and releases the requests.
    pub fn execute(&self, requests: Vec<Request>) {
        let mut instance = self.instance.lock();
        let answered = instance.execute(requests);
        let requests = answered.len();
        self.responder.dispatch(answered, requests, || instance.next_run_ns());
    }
}
