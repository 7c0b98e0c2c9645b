//! Tests with a real libtritonserver, if `TRITONSERVER_LIB` is the path of one.

use std::ffi::CStr;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::{env, io, ptr};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use triton_sys::{SYMBOLS, TRITONSERVER_ERROR_NOT_FOUND, TRITONSERVER_TYPE_FP32, call};

const TEST: &str = "a_real_server_has_every_symbol_and_is_found_though_it_is_local";

#[test]
fn a_real_server_has_every_symbol_and_is_found_though_it_is_local() {
    let Some(path) = env::var_os("TRITONSERVER_LIB").map(PathBuf::from) else {
        say("skipped: a real server, TRITONSERVER_LIB names no libtritonserver");
        return;
    };
    if env::var_os("TRITON_SYS_WITH_LIBRARIES").is_some() {
        check(&path);
    } else {
        assert!(test_with_libraries_beside(&path).success());
    }
}

/// Runs the test again in a process that finds the libraries in the server's folder. Python packages
/// put them there, and the loader reads LD_LIBRARY_PATH only when a process starts.
fn test_with_libraries_beside(server: &Path) -> ExitStatus {
    let mut folders = vec![server.parent().expect("a path of a file").to_owned()];
    folders.extend(env::split_paths(&env::var_os("LD_LIBRARY_PATH").unwrap_or_default()));
    Command::new(env::current_exe().expect("a test is a file"))
        .args(["--exact", TEST, "--quiet"])
        .env("LD_LIBRARY_PATH", env::join_paths(folders).expect("no colon in the path"))
        .env("TRITON_SYS_WITH_LIBRARIES", "1")
        .status()
        .expect("this program runs once more")
}

fn check(path: &Path) {
    assert!(triton_sys::load().is_err(), "the test brings the server itself");
    // SAFETY: Triton's library may be loaded into any process.
    let server = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }
        .expect("TRITONSERVER_LIB names a libtritonserver that loads");

    let missing: Vec<_> = SYMBOLS
        .iter()
        // SAFETY: the symbol is only looked up.
        .filter(|name| unsafe { server.get::<*const ()>(**name) }.is_err())
        .collect();
    assert!(missing.is_empty(), "{missing:?}");

    triton_sys::load().expect("the server is loaded now");
    let offered = triton_sys::versions().expect("loaded");
    say(&format!("a real server offers {offered}"));
    values_go_there_and_back();
}

/// Prints to stderr directly, because the test harness hides the output of tests that pass.
fn say(line: &str) {
    writeln!(io::stderr(), "{line}").expect("stderr is open");
}

/// Passes a string, a number, an enumeration and an object through real functions.
fn values_go_there_and_back() {
    // SAFETY: the strings are constants, and the error is not used after it was deleted.
    unsafe {
        assert_eq!(call!(TRITONSERVER_StringToDataType(c"FP32".as_ptr())), Ok(TRITONSERVER_TYPE_FP32));
        assert_eq!(call!(TRITONSERVER_DataTypeByteSize(TRITONSERVER_TYPE_FP32)), Ok(4));

        let code = TRITONSERVER_ERROR_NOT_FOUND;
        let error = call!(TRITONSERVER_ErrorNew(code, c"no such sequence".as_ptr())).expect("there");
        assert_ne!(error, ptr::null_mut());
        assert_eq!(call!(TRITONSERVER_ErrorCode(error)), Ok(code));
        let message = CStr::from_ptr(call!(TRITONSERVER_ErrorMessage(error)).expect("there"));
        assert_eq!(message, c"no such sequence");
        call!(TRITONSERVER_ErrorDelete(error)).expect("there");
    }
}
