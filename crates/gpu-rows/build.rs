//! Compiles the kernel's source as C, for devices that tests simulate.

fn main() {
    // Unit tests have such devices without asking, so it is always built. A release does not refer to it, and the
    // linker leaves it out.
    println!("cargo:rerun-if-changed=src");
    cc::Build::new().file("src/emulate.c").opt_level(2).compile("triton_stateful_emulated");
}
