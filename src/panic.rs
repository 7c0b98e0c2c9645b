//! The guard against panics. None may unwind into Triton, which is C++.

#![forbid(unsafe_code)]

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::JoinHandle;

/// A panic in the code of this library, which is a bug; the server lives on.
#[derive(Clone, Debug, thiserror::Error)]
#[error("the stateful backend panicked: {0}; please report it")]
pub struct Panic(pub String);

#[cfg(panic = "abort")]
compile_error!("with panic = \"abort\" a panic would end the whole server: build with panic = \"unwind\"");

/// Calls `work`; a panic in it becomes an error.
///
/// What `work` has changed stays changed. That is safe: a request or a lease that a panic drops is answered and given
/// back, and every step writes its buffers anew.
pub fn catch<T>(work: impl FnOnce() -> T) -> Result<T, Panic> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|payload| Panic(text(payload.as_ref())))
}

/// Calls `work`, and logs a panic in it.
pub fn catch_and_log<T>(work: impl FnOnce() -> T) -> Option<T> {
    catch(work).inspect_err(|panic| log::error!("{panic}")).ok()
}

/// Calls `work`, which may fail; a panic in it becomes an error of the same type.
pub fn catch_result<T, E: From<Panic>>(work: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
    catch(work)?
}

/// Waits for the end of a thread, and logs if it has panicked. `what`: "a thread that …".
pub fn join(thread: JoinHandle<()>, what: &str) {
    if thread.join().is_err() {
        log::error!("{what} has panicked");
    }
}

fn text(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_else(|| "without a message".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_an_error_with_its_message() {
        assert_eq!(catch(|| 7).unwrap(), 7);
        let error = catch(|| -> i32 { panic!("number {}", 7) }).unwrap_err();
        assert!(error.to_string().contains("number 7"), "{error}");
        assert!(catch(|| std::panic::panic_any(5)).is_err());
        assert!(matches!(catch_result(|| Err::<i32, _>(Panic("own".to_owned()))), Err(Panic(text)) if text == "own"));
        assert!(matches!(catch_result::<i32, Panic>(|| panic!("caught")), Err(Panic(text)) if text == "caught"));
    }
}
