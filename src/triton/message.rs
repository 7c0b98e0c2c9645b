//! JSON messages that Triton hands over.

use triton_sys::{TRITONSERVER_Message, call};

use super::error::{Error, check};

/// Copies the JSON out of a message.
///
/// # Safety
/// `message` must be alive; it stays the caller's.
pub unsafe fn json(message: *mut TRITONSERVER_Message) -> Result<Vec<u8>, Error> {
    let (mut base, mut size) = (std::ptr::null(), 0);
    // SAFETY: the message is alive by the caller's word; the text lies in it and is copied before it can go.
    unsafe {
        check(call!(TRITONSERVER_MessageSerializeToJson(message, &mut base, &mut size)))?;
        Ok(std::slice::from_raw_parts(base.cast::<u8>(), size).to_vec())
    }
}

/// As [`json`], and deletes the message.
///
/// # Safety
/// `message` must be alive and the caller's to delete.
pub unsafe fn take_json(message: *mut TRITONSERVER_Message) -> Result<Vec<u8>, Error> {
    // SAFETY: alive, and deleted once, after its last use.
    unsafe {
        let text = json(message);
        check(call!(TRITONSERVER_MessageDelete(message)))?;
        text
    }
}
