//! In a process without Triton, loading fails with an error that says what was looked for.

use triton_sys::{MissingSymbol, TRITONSERVER_LOG_INFO, call};

#[test]
fn loading_fails_and_says_what_was_looked_for() {
    let error = triton_sys::load().err().expect("no server here").to_string();
    assert_eq!(
        error,
        "found no Triton server in this process: TRITONSERVER_ApiVersion is neither in the global \
         scope nor in a loaded library named libtritonserver* (none is loaded)"
    );
    assert_eq!(triton_sys::versions(), None);
}

#[test]
fn a_call_before_loading_is_an_error_and_not_a_crash() {
    // SAFETY: there is no server, so nothing is called.
    let error: MissingSymbol = unsafe { call!(TRITONSERVER_LogIsEnabled(TRITONSERVER_LOG_INFO)) }.unwrap_err();
    assert_eq!(error.to_string(), "TRITONSERVER_LogIsEnabled was called before a Triton server was found");
}

#[test]
fn arguments_of_a_missing_function_are_not_evaluated() {
    let mut evaluated = false;
    // SAFETY: there is no server, so nothing is called.
    let result = unsafe {
        call!(TRITONSERVER_ErrorDelete({
            evaluated = true;
            std::ptr::null_mut()
        }))
    };
    assert!(result.is_err());
    assert!(!evaluated);
}
