//! Memory of a GPU, and the copies between it and the host.
//!
//! All users of a GPU share one [`Device`]. Each instance of a model has a [`Queue`] with a stream of its own. ONNX
//! Runtime runs the instance's model on the same stream, so copies and runs are executed in the order in which they are
//! enqueued. A [`DeviceBuffer`] has one owner.
//!
//! Rules:
//! - The owner of a queue calls [`Queue::synchronise`] before it settles the leases of a payload. So no work still uses
//!   a slot that another sequence gets.
//! - A queue keeps memory alive until then if it is asked to ([`Queue::keep`]).
//! - Nothing waits for the whole device.
//!
//! Not for: deciding which bytes are copied where.

mod device;
mod driver;
mod foreign;
mod moves;
mod queue;
#[cfg(any(test, feature = "simulated-device"))]
mod simulated;

#[cfg(any(test, feature = "simulated-device"))]
pub use device::simulate;
pub use device::{
    Device, DeviceBuffer, DeviceMemory, OwnedStream, Pinned, Span, devices_for_cpu_instances, for_capture, for_run,
    for_session, while_nothing_is_captured,
};
#[cfg(any(test, feature = "simulated-device"))]
pub use driver::Counts;
pub use driver::DeviceError;
pub use foreign::{Foreign, fetch, write};
pub use queue::{Queue, QueueReport};
