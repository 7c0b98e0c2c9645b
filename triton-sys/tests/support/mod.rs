//! Small libraries in C that play a server.

use std::ffi::c_int;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use libloading::os::unix::{Library, RTLD_NOW};

/// A server that has the version functions and one more.
pub const OLD_SERVER: &str = "
    #include <stdbool.h>
    #include <stdint.h>
    static void* set(uint32_t* major, uint32_t* minor, uint32_t is) {
      *major = 1;
      *minor = is;
      return 0;
    }
    void* TRITONSERVER_ApiVersion(uint32_t* major, uint32_t* minor) { return set(major, minor, 17); }
    void* TRITONBACKEND_ApiVersion(uint32_t* major, uint32_t* minor) { return set(major, minor, 10); }
    bool TRITONSERVER_LogIsEnabled(uint32_t level) { return level == 1; }
";

/// Compiles C into a library of that file name.
pub fn compile(name: &str, source: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (input, output) = (folder.join(name).with_extension("c"), folder.join(name));
    fs::write(&input, source).expect("cargo's folder for tests is writable");
    let compiler = env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let status = Command::new(compiler)
        .args(["-shared", "-fPIC", "-o"])
        .args([&output, &input])
        .status()
        .expect("a C compiler, which Rust needs as well");
    assert!(status.success());
    output
}

/// Loads a library, with RTLD_LOCAL or RTLD_GLOBAL.
pub fn open(path: &Path, scope: c_int) -> Library {
    // SAFETY: these libraries have no initialisers.
    unsafe { Library::open(Some(path), RTLD_NOW | scope) }.expect("it was just compiled")
}
