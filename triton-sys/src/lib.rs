//! The C ABI of Triton Inference Server's backend API.
//!
//! | file | content |
//! |---|---|
//! | `include/triton.h` | our own header: the objects, values and functions that we use |
//! | `build.rs` | generates from the header: types, the table [`Api`], [`SYMBOLS`] and [`entry_point`] |
//! | this file | [`load`]: finds the server that runs in this process, and fills the table; [`call!`] |
//!
//! Rules
//! - Nothing is linked. A library that uses this crate has no undefined Triton symbol, so every host
//!   can load it, even one that has loaded Triton with `RTLD_LOCAL`.
//! - If the running server does not have a function, only a call of this function fails, with
//!   [`MissingSymbol`].
//! - This crate does not panic, own objects or convert values. Other crates make safe types from it.
//! - Values from C are newtypes over integers, never Rust enums, because a newer server may send a
//!   value that the header does not have.
//! - [`load`] loads no library. A backend is loaded by a server, so the server is there already. It looks
//!   in the global scope first, where `tritonserver` has its functions, or a host that loaded the library
//!   with `RTLD_GLOBAL`. Then it looks in loaded libraries whose file name begins with `libtritonserver`:
//!   Python packages load the library with `RTLD_LOCAL` and rename it, for example to
//!   `libtritonserver-717102f0.so`.
//! - The table stays for the life of the process, even if a second server calls Initialize. After a
//!   failure, the next [`load`] looks again.
//! - A server whose API has another major version is refused, because its functions may have other
//!   signatures. A smaller minor version is accepted: then only calls of missing functions fail.
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

use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::fmt;
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

pub use bindings::*;
use libloading::os::unix::Library;

static LOADED: OnceLock<Loaded> = OnceLock::new();

/// A server that was refused because of its major version. Only its TRITONSERVER_ErrorNew is used, to report this.
static REFUSED: OnceLock<Loaded> = OnceLock::new();

struct Loaded {
    api: Api,
    versions: Versions,
    /// Keeps Triton loaded as long as the table points into it.
    _library: Option<Library>,
}

/// Finds the running server and keeps its functions for [`api`]. Later calls return the same table.
pub fn load() -> Result<&'static Api, LoadError> {
    if let Some(loaded) = LOADED.get() {
        return Ok(&loaded.api);
    }
    let found = resolve()?;
    // Another thread may have been faster. It found the same functions.
    Ok(&LOADED.get_or_init(|| found).api)
}

/// The functions that [`load`] found. Before that, a table in which all functions are missing.
#[inline]
pub fn api() -> &'static Api {
    match LOADED.get() {
        Some(loaded) => &loaded.api,
        None => &Api::EMPTY,
    }
}

/// TRITONSERVER_ErrorNew of the server that [`load`] found, or of a server that it refused: the
/// backend reports the refusal with it.
pub fn error_new() -> Option<unsafe extern "C" fn(TRITONSERVER_Error_Code, *const c_char) -> *mut TRITONSERVER_Error> {
    let refused = || REFUSED.get().and_then(|refused| refused.api.TRITONSERVER_ErrorNew);
    api().TRITONSERVER_ErrorNew.or_else(refused)
}

/// The versions of the server that [`load`] found.
pub fn versions() -> Option<Versions> {
    LOADED.get().map(|loaded| loaded.versions)
}

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

/// Installs functions of a test instead of a server's: from now on [`load`] succeeds and [`api`]
/// returns `api`. Returns false, and changes nothing, if there is a table already.
///
/// # Safety
///
/// Each function must do what Triton's function of this name promises, for the objects that the test
/// passes to the code under test.
pub unsafe fn install(api: Api) -> bool {
    LOADED.set(Loaded { api, versions: Versions::HEADER, _library: None }).is_ok()
}

/// Version of an API.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// Changes when the ABI becomes incompatible.
    pub major: u32,
    /// Grows when functions are added.
    pub minor: u32,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// The versions of a server's two APIs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Versions {
    /// Version of the API of the functions `TRITONSERVER_*`.
    pub server: Version,
    /// Version of the API of the functions `TRITONBACKEND_*`.
    pub backend: Version,
}

impl Versions {
    /// The versions that this crate's header describes.
    pub const HEADER: Self = Self {
        server: Version { major: TRITONSERVER_API_VERSION_MAJOR, minor: TRITONSERVER_API_VERSION_MINOR },
        backend: Version { major: TRITONBACKEND_API_VERSION_MAJOR, minor: TRITONBACKEND_API_VERSION_MINOR },
    };

    fn compatible(self) -> Result<Self, LoadError> {
        if self.server.major == Self::HEADER.server.major && self.backend.major == Self::HEADER.backend.major {
            Ok(self)
        } else {
            Err(LoadError::OtherMajor { offered: self })
        }
    }
}

impl fmt::Display for Versions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "server API {} and backend API {}", self.server, self.backend)
    }
}

/// Why [`load`] failed.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// There is no server in this process.
    #[error(
        "found no Triton server in this process: TRITONSERVER_ApiVersion is neither in the global \
         scope nor in a loaded library named libtritonserver* ({})",
        describe(tried)
    )]
    NotFound {
        /// The loaded libraries that have a server's file name but not the function.
        tried: Vec<PathBuf>,
    },
    /// The server does not report its version.
    #[error("the Triton server in this process does not answer {function}")]
    NoVersion {
        /// The function that is missing or failed.
        function: &'static str,
    },
    /// The server's API has another major version.
    #[error(
        "the Triton server in this process offers {offered}; this library needs the major versions \
         of {}",
        Versions::HEADER
    )]
    OtherMajor {
        /// The versions of the server.
        offered: Versions,
    },
}

fn describe(tried: &[PathBuf]) -> String {
    if tried.is_empty() {
        return "none is loaded".to_owned();
    }
    let names: Vec<_> = tried.iter().map(|path| path.display().to_string()).collect();
    format!("without it: {}", names.join(", "))
}

/// The server does not have the function that was called, or no server has been found yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub struct MissingSymbol {
    /// The function's name.
    pub symbol: &'static str,
    /// The server's versions; `None` before [`load`] has found a server.
    pub offered: Option<Versions>,
}

impl MissingSymbol {
    /// The error of [`call!`](crate::call) for a function that is missing in the table.
    #[cold]
    pub fn new(symbol: &'static str) -> Self {
        Self { symbol, offered: versions() }
    }
}

impl fmt::Display for MissingSymbol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { symbol, offered } = self;
        match offered {
            Some(offered) => write!(
                f,
                "the Triton server has no {symbol}: its {offered} are likely too old, this library \
                 is written for {}",
                Versions::HEADER
            ),
            None => write!(f, "{symbol} was called before a Triton server was found"),
        }
    }
}

/// Looks up a function of the library.
///
/// # Safety
///
/// `F` must be the function's pointer type.
unsafe fn find<F: Copy>(library: &Library, name: &CStr) -> Option<F> {
    // SAFETY: the caller guarantees the type, and `Option` accepts a symbol that is null.
    let symbol = unsafe { library.get::<Option<F>>(name) };
    symbol.ok().and_then(|function| *function)
}

fn resolve() -> Result<Loaded, LoadError> {
    let library = server_library()?;
    // SAFETY: the library has TRITONSERVER_ApiVersion, so its functions of these names are Triton's.
    // `Loaded` keeps the library with the table. If the server has another major version, only the
    // two version functions and those for errors are called, which are the same in all versions.
    let api = unsafe { Api::from_library(&library) };
    let versions = Versions {
        server: version("TRITONSERVER_ApiVersion", api.TRITONSERVER_ApiVersion, &api)?,
        backend: version("TRITONBACKEND_ApiVersion", api.TRITONBACKEND_ApiVersion, &api)?,
    };
    let loaded = Loaded { api, versions, _library: Some(library) };
    match versions.compatible() {
        Ok(_) => Ok(loaded),
        Err(error) => {
            REFUSED.get_or_init(|| loaded);
            Err(error)
        }
    }
}

fn server_library() -> Result<Library, LoadError> {
    let global = Library::this();
    if let Some(function) = api_version(&global) {
        // A handle of the global scope would not keep the library loaded.
        let owner = path_of(function).and_then(|path| reopen(&path));
        return Ok(owner.filter(has_server).unwrap_or(global));
    }
    let tried = loaded_server_paths();
    let found = tried.iter().filter_map(|path| reopen(path)).find(has_server);
    found.ok_or(LoadError::NotFound { tried })
}

type ApiVersionFn = unsafe extern "C" fn(*mut u32, *mut u32) -> *mut TRITONSERVER_Error;

fn api_version(library: &Library) -> Option<ApiVersionFn> {
    // SAFETY: this is the function's type.
    unsafe { find(library, c"TRITONSERVER_ApiVersion") }
}

fn has_server(library: &Library) -> bool {
    api_version(library).is_some()
}

/// The file that a function was loaded from.
fn path_of(function: ApiVersionFn) -> Option<PathBuf> {
    let mut info = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: `dladdr` accepts any address, and `info` is writable.
    let known = unsafe { libc::dladdr(function as *const c_void, info.as_mut_ptr()) } != 0;
    // SAFETY: null pointers and zeros are valid values, so `info` is initialised even if nothing was written.
    let name = unsafe { info.assume_init() }.dli_fname;
    if !known || name.is_null() {
        return None;
    }
    // SAFETY: the loader owns the name, and keeps it as long as the library is loaded.
    Some(path_from(unsafe { CStr::from_ptr(name) }))
}

fn path_from(name: &CStr) -> PathBuf {
    PathBuf::from(OsStr::from_bytes(name.to_bytes()))
}

/// Opens another handle of a loaded library.
fn reopen(path: &Path) -> Option<Library> {
    let flags = libc::RTLD_LAZY | libc::RTLD_LOCAL | libc::RTLD_NOLOAD;
    // SAFETY: with RTLD_NOLOAD, nothing is loaded, so no initialiser of a library runs.
    unsafe { Library::open(Some(path), flags) }.ok()
}

fn version(function: &'static str, ask: Option<ApiVersionFn>, api: &Api) -> Result<Version, LoadError> {
    let ask = ask.ok_or(LoadError::NoVersion { function })?;
    let mut version = Version { major: 0, minor: 0 };
    // SAFETY: both pointers point to live integers, and the function does not keep them.
    let error = unsafe { ask(&mut version.major, &mut version.minor) };
    if error.is_null() {
        return Ok(version);
    }
    if let Some(delete) = api.TRITONSERVER_ErrorDelete {
        // SAFETY: the function gave us this error, and we do not use it again.
        unsafe { delete(error) };
    }
    Err(LoadError::NoVersion { function })
}

/// Paths of the loaded libraries that have a server's file name.
fn loaded_server_paths() -> Vec<PathBuf> {
    let mut paths = Vec::<PathBuf>::new();
    // SAFETY: `collect` gets this pointer. The vector outlives the call, and nothing else uses it
    // during the call.
    unsafe { libc::dl_iterate_phdr(Some(collect), (&raw mut paths).cast()) };
    paths
}

/// Collects the paths of libraries with a server's file name. It must not open them, because the loader holds its lock.
unsafe extern "C" fn collect(info: *mut libc::dl_phdr_info, _size: libc::size_t, paths: *mut c_void) -> c_int {
    // SAFETY: the loader passes a description that is valid during this call.
    let name = unsafe { (*info).dlpi_name };
    if !name.is_null() {
        // SAFETY: the name is a C string that the loader keeps during this call. `paths` is the
        // vector of `loaded_server_paths`, and nothing else borrows it.
        let (name, paths) = unsafe { (CStr::from_ptr(name), &mut *paths.cast::<Vec<PathBuf>>()) };
        let path = path_from(name);
        if is_server(&path) {
            paths.push(path);
        }
    }
    0
}

fn is_server(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.as_bytes().starts_with(b"libtritonserver"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_is_recognised_by_its_file_name_even_if_it_was_renamed() {
        for (path, expected) in [
            ("/opt/tritonserver/lib/libtritonserver.so", true),
            ("libtritonserver.so", true),
            ("/x/nvidia_pytriton.libs/libtritonserver-717102f0.so", true),
            ("/opt/libtritonserver/lib/libc.so.6", false),
            ("/opt/tritonserver/backends/python/libtriton_python.so", false),
            ("", false),
        ] {
            assert_eq!(is_server(Path::new(path)), expected, "{path}");
        }
    }

    #[test]
    fn another_major_version_is_refused_and_another_minor_version_is_not() {
        let offered = |server, backend| Versions {
            server: Version { major: server, minor: 3 },
            backend: Version { major: backend, minor: 99 },
        };
        assert!(offered(1, 1).compatible().is_ok());
        for (server, backend) in [(2, 1), (1, 2), (0, 1)] {
            let error = offered(server, backend).compatible().unwrap_err().to_string();
            let wanted = format!(
                "the Triton server in this process offers server API {server}.3 and backend API \
                 {backend}.99; this library needs the major versions of server API 1.34 and \
                 backend API 1.19"
            );
            assert_eq!(error, wanted);
        }
    }
}
