//! A server in the global scope is found, whatever its file is called. `tritonserver` itself is such a server.

mod support;

use std::{ptr, thread};

use libloading::os::unix::RTLD_GLOBAL;
use support::{OLD_SERVER, compile, open};
use triton_sys::{TRITONSERVER_LOG_WARN, Version, call};

#[test]
fn a_server_in_the_global_scope_is_found_by_its_symbols_and_stays() {
    let server = open(&compile("libhost-of-triton.so", OLD_SERVER), RTLD_GLOBAL);
    let load = || triton_sys::load().map(|api| ptr::from_ref(api).addr()).ok();
    let tables: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(load)).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    assert!(tables[0].is_some());
    assert!(tables.iter().all(|table| *table == tables[0]), "one table for all threads");

    drop(server);
    // SAFETY: the function takes any level; the table keeps its library loaded.
    assert_eq!(unsafe { call!(TRITONSERVER_LogIsEnabled(TRITONSERVER_LOG_WARN)) }, Ok(true));
    assert!(triton_sys::api().TRITONSERVER_ErrorNew.is_none());
    let versions = triton_sys::versions().expect("loaded");
    assert_eq!(versions.server, Version { major: 1, minor: 17 });
}
