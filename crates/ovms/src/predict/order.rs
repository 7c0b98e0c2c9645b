//! Requests of one sequence reach Triton one after the other, in the order in which they came.
//!
//! Unary calls on one HTTP/2 connection may overtake each other on their way into Triton, so a request is sent when the
//! one before it has been answered. A sequence without a request under way takes no memory here.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::{Mutex as Lock, OwnedMutexGuard};
use tonic::Code;

use crate::triton::Failure;

/// Requests of one sequence that may wait while another one runs: as many as the backend lets wait by default.
const WAITING_MAX: usize = 100;

type Key = (Arc<str>, u64);

#[derive(Debug, Default)]
pub struct Order {
    sequences: Arc<Mutex<HashMap<Key, Queue>>>,
}

#[derive(Debug, Default)]
struct Queue {
    // tokio's mutex is fair: it goes to waiting requests in the order in which they asked.
    lock: Arc<Lock<()>>,
    requests: usize,
}

impl Order {
    /// Waits until the requests of the sequence that came earlier are answered. The next one may go when the turn is
    /// dropped.
    pub async fn turn(&self, model: &str, id: u64) -> Result<Turn, Failure> {
        let key = (Arc::from(model), id);
        let lock = {
            let mut sequences = self.sequences.lock();
            let queue = sequences.entry(Key::clone(&key)).or_default();
            // One of them runs.
            if queue.requests > WAITING_MAX {
                let text = format!("{WAITING_MAX} requests of sequence {id} wait already; wait for their answers");
                return Err(Failure::new(Code::Unavailable, text));
            }
            queue.requests += 1;
            queue.lock.clone()
        };
        // Before the wait, so that a client that gives up leaves the queue when this future is dropped.
        let mut turn = Turn { sequences: self.sequences.clone(), key, guard: None };
        turn.guard = Some(lock.lock_owned().await);
        Ok(turn)
    }
}

/// A place in a queue, and the right to send a request once `turn` has returned it.
#[derive(Debug)]
pub struct Turn {
    sequences: Arc<Mutex<HashMap<Key, Queue>>>,
    key: Key,
    guard: Option<OwnedMutexGuard<()>>,
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.guard = None;
        let mut sequences = self.sequences.lock();
        if let Some(queue) = sequences.get_mut(&self.key) {
            queue.requests -= 1;
            if queue.requests == 0 {
                sequences.remove(&self.key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::task::{Context, Poll, Waker};

    use futures_util::FutureExt;

    use super::*;

    fn poll<T>(future: &mut (impl Future<Output = T> + Unpin)) -> Poll<T> {
        future.poll_unpin(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn requests_go_in_the_order_of_arrival_and_leave_nothing() {
        let order = Order::default();
        let first = order.turn("m", 1).now_or_never().unwrap().unwrap();
        let (mut second, mut third) = (Box::pin(order.turn("m", 1)), Box::pin(order.turn("m", 1)));
        assert!(poll(&mut second).is_pending());
        assert!(poll(&mut third).is_pending());
        drop(first);
        assert!(poll(&mut third).is_pending(), "the second is before it");
        let Poll::Ready(Ok(turn)) = poll(&mut second) else { panic!("its turn has come") };
        drop(turn);
        assert!(poll(&mut third).is_ready());
        drop((second, third));
        assert!(order.sequences.lock().is_empty());
    }

    #[test]
    fn other_sequences_do_not_wait() {
        let order = Order::default();
        let _first = order.turn("m", 1).now_or_never().unwrap().unwrap();
        assert!(order.turn("m", 2).now_or_never().is_some());
        assert!(order.turn("n", 1).now_or_never().is_some());
    }

    #[test]
    fn a_request_that_gives_up_makes_room_for_the_next() {
        let order = Order::default();
        let first = order.turn("m", 1).now_or_never().unwrap().unwrap();
        let (mut second, mut third) = (Box::pin(order.turn("m", 1)), Box::pin(order.turn("m", 1)));
        assert!(poll(&mut second).is_pending());
        assert!(poll(&mut third).is_pending());
        drop(second);
        drop(first);
        assert!(poll(&mut third).is_ready());
    }

    #[test]
    fn too_many_waiting_requests_are_refused_until_one_is_answered() {
        let order = Order::default();
        let first = order.turn("m", 1).now_or_never().unwrap().unwrap();
        let mut waiting: Vec<_> = (0..WAITING_MAX).map(|_| Box::pin(order.turn("m", 1))).collect();
        assert!(waiting.iter_mut().all(|turn| poll(turn).is_pending()));
        let refused = order.turn("m", 1).now_or_never().unwrap().unwrap_err();
        assert_eq!(refused.code, Code::Unavailable);
        drop(first);
        assert!(order.turn("m", 1).now_or_never().is_none(), "it waits");
    }
}
