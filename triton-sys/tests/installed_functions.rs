//! A test can install its own functions instead of a server's.

use std::ptr;

use triton_sys::{Api, TRITONBACKEND_Request, TRITONSERVER_Error, call};

unsafe extern "C" fn request_flags(_request: *mut TRITONBACKEND_Request, flags: *mut u32) -> *mut TRITONSERVER_Error {
    // SAFETY: the tests pass a pointer to a live integer.
    unsafe { *flags = 3 };
    ptr::null_mut()
}

#[test]
fn installed_functions_are_called_and_the_others_are_missing() {
    let api = Api { TRITONBACKEND_RequestFlags: Some(request_flags), ..Api::EMPTY };
    // SAFETY: the function does what Triton's function of this name promises, for any request.
    assert!(unsafe { triton_sys::install(api) });
    assert!(triton_sys::load().is_ok());

    let mut flags = 0;
    // SAFETY: the installed function does not read the request, and `flags` is alive.
    let error = unsafe { call!(TRITONBACKEND_RequestFlags(ptr::null_mut(), &mut flags)) };
    assert_eq!(error, Ok(ptr::null_mut()));
    assert_eq!(flags, 3);

    // SAFETY: the function is missing, so nothing is called.
    let missing = unsafe { call!(TRITONBACKEND_RequestRelease(ptr::null_mut(), 1)) }.unwrap_err();
    assert_eq!(missing.symbol, "TRITONBACKEND_RequestRelease");

    // SAFETY: an empty table has no function that could be wrong.
    assert!(!unsafe { triton_sys::install(Api::EMPTY) }, "the first table stays");
    assert!(triton_sys::api().TRITONBACKEND_RequestFlags.is_some());
}
