//! How the shared library is linked.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("linux") {
        // A function that is neither here nor in the libraries named is an error now, not when a server loads this:
        // Triton's are looked up at run time.
        // A sanitizer's functions are in the program that it is linked to.
        if std::env::var_os("CARGO_CFG_SANITIZE").is_none() {
            println!("cargo:rustc-cdylib-link-arg=-Wl,-z,defs");
        }
        println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libtriton_stateful.so");
    }
    // The kernel's source as C, for the device that tests simulate. Unit tests have one without asking, so it is always
    // built; a release does not refer to it, and the linker leaves it out.
    println!("cargo:rerun-if-changed=src/memory/device");
    cc::Build::new().file("src/memory/device/emulate.c").opt_level(2).compile("triton_stateful_emulated");
}
