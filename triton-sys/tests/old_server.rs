//! A renamed server of an older API is found although it was loaded with RTLD_LOCAL. A small library in C plays it.

mod support;

use std::ptr;

use libloading::os::unix::RTLD_LOCAL;
use support::{OLD_SERVER, compile, open};
use triton_sys::{LoadError, TRITONSERVER_LOG_INFO, TRITONSERVER_LOG_WARN, Version, call};

const DECOY: &str = "int decoy(void) { return 0; }";

#[test]
fn a_renamed_local_server_is_found_and_errors_name_the_functions_that_it_lacks() {
    assert!(matches!(triton_sys::load(), Err(LoadError::NotFound { tried }) if tried.is_empty()));

    let decoy = compile("libtritonserver-decoy.so", DECOY);
    let _decoy = open(&decoy, RTLD_LOCAL);
    let error = triton_sys::load().err().expect("a decoy is no server").to_string();
    assert!(error.ends_with(&format!("(without it: {})", decoy.display())), "{error}");

    let server = open(&compile("libtritonserver-0badcafe.so", OLD_SERVER), RTLD_LOCAL);
    triton_sys::load().expect("the server is loaded now");
    // The table keeps the library in the process.
    drop(server);

    let versions = triton_sys::versions().expect("loaded");
    assert_eq!(versions.server, Version { major: 1, minor: 17 });
    assert_eq!(versions.backend, Version { major: 1, minor: 10 });
    // SAFETY: the function takes any level.
    unsafe {
        assert_eq!(call!(TRITONSERVER_LogIsEnabled(TRITONSERVER_LOG_INFO)), Ok(false));
        assert_eq!(call!(TRITONSERVER_LogIsEnabled(TRITONSERVER_LOG_WARN)), Ok(true));
    }
    // SAFETY: the function is missing, so nothing is called.
    let missing = unsafe { call!(TRITONSERVER_MetricObserve(ptr::null_mut(), 1.0)) }.unwrap_err();
    assert_eq!(
        missing.to_string(),
        "the Triton server has no TRITONSERVER_MetricObserve: its server API 1.17 and backend API \
         1.10 are likely too old, this library is written for server API 1.34 and backend API 1.19"
    );
}
