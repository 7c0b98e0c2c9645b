//! The C ABI of Triton Inference Server's backend API, and nothing else.
//!
//! | where | what |
//! |---|---|
//! | `include/triton.h` | our own header of the objects, values and functions that are used |
//! | `build.rs` | turns it into the types below, the table [`Api`], [`SYMBOLS`] and [`entry_point`] |
//! | `resolve.rs` | [`load`]: finds the server that this process already runs and fills the table |
//!
//! Rules
//! - Nothing here is linked: a library that uses this crate has no undefined Triton symbol, so it
//!   loads into every host, also into one that keeps Triton to itself (`RTLD_LOCAL`).
//! - A function that the running server hasn't got is a [`MissingSymbol`] for whoever calls it, and
//!   nobody else's trouble.
//! - No panics, no ownership, no conversion: safe objects are made from this elsewhere.
//! - Values that come from C are newtypes over integers, never Rust enums: a newer server may send
//!   one that the header doesn't know.
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
//!     // SAFETY: the caller says that the request is alive; `flags` outlives the call.
//!     let error = unsafe { call!(TRITONBACKEND_RequestFlags(request, &mut flags)) }?;
//!     Ok(if error.is_null() { Ok(flags) } else { Err(error) })
//! }
//!
//! // Once, in TRITONBACKEND_Initialize; in this process there is no server.
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

/// Calls a function of [`api`]: `call!(NAME(arguments))` is a `Result` of what the function returns,
/// or of [`MissingSymbol`].
///
/// The cost is that of a call through a function pointer. The arguments are evaluated only where the
/// function exists. The `unsafe` block, and the reason why the call is sound, are the caller's.
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
