//! Where ONNX Runtime reads the inputs of a session. On a GPU, it reads some on the host: those of nodes that only the CPU
//! has, and those that a kernel looks at itself, such as the bounds of a Slice.

use ort::sys::{OrtApiBase, OrtMemoryInfo, OrtSession, OrtStatusPtr};

use super::value;

/// `SessionGetMemoryInfoForInputs`, which came with this version of the API (ONNX Runtime 1.23). The `ort` crate asks for
/// version 17, so that older libraries serve, too.
const API: u32 = 23;

/// Its place among the functions of `OrtApi`, of which new versions have more behind.
const INDEX: usize = 380;

type MemoryInfoForInputs =
    unsafe extern "system" fn(*const OrtSession, *mut *const OrtMemoryInfo, usize) -> OrtStatusPtr;

/// A function of the loaded library that tells it.
#[derive(Clone, Copy)]
pub(super) struct InputPlaces(MemoryInfoForInputs);

impl InputPlaces {
    /// `None` if the library is older.
    ///
    /// # Safety
    /// `base` is a library's, which stays loaded.
    pub(super) unsafe fn of(base: &OrtApiBase) -> Option<Self> {
        // SAFETY: any number may be asked for.
        let api = unsafe { (base.GetApi)(API) };
        // SAFETY: an OrtApi of that version is a table of functions, of which INDEX is one of that type.
        (!api.is_null()).then(|| Self(unsafe { *api.cast::<MemoryInfoForInputs>().add(INDEX) }))
    }

    /// Of each input of a session, in its order, whether it is read on the host.
    ///
    /// # Safety
    /// The session is alive, and has that many inputs.
    pub(super) unsafe fn read_on_host(self, session: *const OrtSession, inputs: usize) -> Result<Vec<bool>, String> {
        let mut infos = vec![std::ptr::null(); inputs];
        // SAFETY: a live session, and room for each input.
        unsafe { value::check(self.0(session, infos.as_mut_ptr(), inputs))? };
        infos.into_iter().map(is_host).collect()
    }
}

/// An input that no node reads has no place.
fn is_host(info: *const OrtMemoryInfo) -> Result<bool, String> {
    if info.is_null() {
        return Ok(false);
    }
    // OrtMemoryInfoDeviceType_CPU and OrtMemTypeDefault. As numbers, since a new version may have more than the enums.
    const CPU: i32 = 0;
    const DEFAULT: i32 = 0;
    let (mut device, mut kind) = (CPU, DEFAULT);
    // SAFETY: the session's, which is alive; a C enum has the size of an i32.
    unsafe {
        (ort::api().MemoryInfoGetDeviceType)(info, (&raw mut device).cast());
        value::check((ort::api().MemoryInfoGetMemType)(info, (&raw mut kind).cast()))?;
    }
    // Pinned memory has another type.
    Ok(device == CPU || kind != DEFAULT)
}
