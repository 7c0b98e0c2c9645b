//! JSON messages between Triton and this backend.

use triton_sys::{TRITONSERVER_Message, call};

use super::error::{Error, check};

/// Copies the JSON out of a message.
///
/// # Safety
/// `message` must be alive; it stays the caller's.
pub unsafe fn json(message: *mut TRITONSERVER_Message) -> Result<Vec<u8>, Error> {
    let (mut base, mut size) = (std::ptr::null(), 0);
    // SAFETY: the caller promises that the message is alive. Its text is copied while it is.
    unsafe {
        check(call!(TRITONSERVER_MessageSerializeToJson(message, &mut base, &mut size)))?;
        Ok(std::slice::from_raw_parts(base.cast::<u8>(), size).to_vec())
    }
}

/// Calls `use_it` with a message that has this JSON.
pub fn with_json(
    json: &[u8],
    use_it: impl FnOnce(*mut TRITONSERVER_Message) -> Result<(), Error>,
) -> Result<(), Error> {
    let mut message = std::ptr::null_mut();
    // SAFETY: the text lives during the call, which copies it.
    unsafe {
        let make = call!(TRITONSERVER_MessageNewFromSerializedJson(&mut message, json.as_ptr().cast(), json.len()));
        check(make)?;
    }
    let used = use_it(message);
    // SAFETY: made above, deleted once, after its last use.
    unsafe { check(call!(TRITONSERVER_MessageDelete(message)))? };
    used
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
