//! The C ABI of Triton Inference Server's backend API.
//!
//! | file | content |
//! |---|---|
//! | `include/triton.h` | our own header: the objects, values and functions that we use |
//! | `build.rs` | generates from the header: types, the table [`Api`], [`SYMBOLS`] and [`entry_point`] |
//! | `resolve.rs` | [`load`]: finds the server that runs in this process, and fills the table |
//!
//! Rules
//! - Nothing is linked. A library that uses this crate has no undefined Triton symbol, so every host
//!   can load it, even one that has loaded Triton with `RTLD_LOCAL`.
//! - If the running server does not have a function, only a call of this function fails, with
//!   [`MissingSymbol`].
//! - This crate does not panic, own objects or convert values. Other crates make safe types from it.
//! - Values from C are newtypes over integers, never Rust enums, because a newer server may send a
//!   value that the header does not have.
//!
//! ```
//! use triton_sys::{MissingSymbol, TRITONBACKEND_Request, TRITONSERVER_Error, call};
//!
//! /// # Safety
//! ///
//! /// The request must be alive.
//! unsafe fn flags(
//!     request: *mut TRITONBACKEND_Request,
//! ) -> Result<Result<u32, *mut TRITONSERVER_Error>, MissingSymbol> {
//!     let mut flags = 0;
//!     // SAFETY: the caller guarantees that the request is alive; `flags` outlives the call.
//!     let error = unsafe { call!(TRITONBACKEND_RequestFlags(request, &mut flags)) }?;
//!     Ok(if error.is_null() { Ok(flags) } else { Err(error) })
//! }
//!
//! // A backend calls `load` once, in TRITONBACKEND_Initialize. This process has no server.
//! assert!(triton_sys::load().is_err());
//! ```

#[allow(missing_docs, non_camel_case_types, non_upper_case_globals, non_snake_case)]
#[allow(clippy::all, clippy::undocumented_unsafe_blocks)]
mod bindings {
    include!(concat!(env!("OUT_DIR"), "/bindings.rs"));
}
mod resolve;

pub use bindings::*;
pub use resolve::{LoadError, MissingSymbol, Version, Versions, api, error_new, install, load, versions};

/// Calls a function of [`api`]. `call!(NAME(arguments))` is `Ok` with the function's result, or
/// `Err` with a [`MissingSymbol`].
///
/// It costs as much as a call through a function pointer. It evaluates the arguments only if the
/// server has the function. The caller writes the `unsafe` block, and says why the call is sound.
#[macro_export]
macro_rules! call {
    ($function:ident($($argument:expr),* $(,)?)) => {
        match $crate::api().$function {
            ::core::option::Option::Some(function) => {
                ::core::result::Result::Ok(function($($argument),*))
            }
            ::core::option::Option::None => ::core::result::Result::Err(
                $crate::MissingSymbol::new(::core::stringify!($function)),
            ),
        }
    };
}
