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
}
