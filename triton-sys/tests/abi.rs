//! Compares the generated numbers, sizes and signatures with the ABI, which is written down here a second time.

use std::collections::HashSet;
use std::ffi::{c_char, c_int, c_void};
use std::mem::size_of;

use triton_sys::*;

#[test]
fn enumerations_have_the_values_of_the_abi() {
    let groups: &[&[u32]] = &[
        &[
            TRITONSERVER_TYPE_INVALID.0,
            TRITONSERVER_TYPE_BOOL.0,
            TRITONSERVER_TYPE_UINT8.0,
            TRITONSERVER_TYPE_UINT16.0,
            TRITONSERVER_TYPE_UINT32.0,
            TRITONSERVER_TYPE_UINT64.0,
            TRITONSERVER_TYPE_INT8.0,
            TRITONSERVER_TYPE_INT16.0,
            TRITONSERVER_TYPE_INT32.0,
            TRITONSERVER_TYPE_INT64.0,
            TRITONSERVER_TYPE_FP16.0,
            TRITONSERVER_TYPE_FP32.0,
            TRITONSERVER_TYPE_FP64.0,
            TRITONSERVER_TYPE_BYTES.0,
            TRITONSERVER_TYPE_BF16.0,
        ],
        &[TRITONSERVER_MEMORY_CPU.0, TRITONSERVER_MEMORY_CPU_PINNED.0, TRITONSERVER_MEMORY_GPU.0],
        &[
            TRITONSERVER_PARAMETER_STRING.0,
            TRITONSERVER_PARAMETER_INT.0,
            TRITONSERVER_PARAMETER_BOOL.0,
            TRITONSERVER_PARAMETER_DOUBLE.0,
            TRITONSERVER_PARAMETER_BYTES.0,
        ],
        &[
            TRITONSERVER_INSTANCEGROUPKIND_AUTO.0,
            TRITONSERVER_INSTANCEGROUPKIND_CPU.0,
            TRITONSERVER_INSTANCEGROUPKIND_GPU.0,
            TRITONSERVER_INSTANCEGROUPKIND_MODEL.0,
        ],
        &[TRITONSERVER_LOG_INFO.0, TRITONSERVER_LOG_WARN.0, TRITONSERVER_LOG_ERROR.0, TRITONSERVER_LOG_VERBOSE.0],
        &[
            TRITONSERVER_ERROR_UNKNOWN.0,
            TRITONSERVER_ERROR_INTERNAL.0,
            TRITONSERVER_ERROR_NOT_FOUND.0,
            TRITONSERVER_ERROR_INVALID_ARG.0,
            TRITONSERVER_ERROR_UNAVAILABLE.0,
            TRITONSERVER_ERROR_UNSUPPORTED.0,
            TRITONSERVER_ERROR_ALREADY_EXISTS.0,
            TRITONSERVER_ERROR_CANCELLED.0,
        ],
        &[TRITONSERVER_METRIC_KIND_COUNTER.0, TRITONSERVER_METRIC_KIND_GAUGE.0, TRITONSERVER_METRIC_KIND_HISTOGRAM.0],
        &[TRITONBACKEND_ARTIFACT_FILESYSTEM.0],
    ];
    for group in groups {
        let counted: Vec<u32> = (0..).take(group.len()).collect();
        assert_eq!(*group, counted);
    }
}

#[test]
fn flags_have_the_bits_of_the_abi() {
    assert_eq!(TRITONSERVER_REQUEST_FLAG_SEQUENCE_START, 1u32);
    assert_eq!(TRITONSERVER_REQUEST_FLAG_SEQUENCE_END, 2u32);
    assert_eq!(TRITONSERVER_REQUEST_RELEASE_ALL, 1u32);
    assert_eq!(TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, 2u32);
    assert_eq!(TRITONSERVER_RESPONSE_COMPLETE_FINAL, 1u32);
}

#[test]
fn enumerations_are_as_large_as_a_c_int() {
    let sizes = [
        size_of::<TRITONSERVER_DataType>(),
        size_of::<TRITONSERVER_MemoryType>(),
        size_of::<TRITONSERVER_ParameterType>(),
        size_of::<TRITONSERVER_InstanceGroupKind>(),
        size_of::<TRITONSERVER_LogLevel>(),
        size_of::<TRITONSERVER_Error_Code>(),
        size_of::<TRITONSERVER_MetricKind>(),
        size_of::<TRITONBACKEND_ArtifactType>(),
        size_of::<TRITONSERVER_RequestFlag>(),
    ];
    assert_eq!(sizes, [size_of::<c_int>(); 9]);
}

#[test]
fn the_table_is_one_pointer_for_each_symbol() {
    assert_eq!(size_of::<Api>(), SYMBOLS.len() * size_of::<*const c_void>());
    let distinct: HashSet<_> = SYMBOLS.iter().collect();
    assert_eq!(distinct.len(), SYMBOLS.len());
    for name in SYMBOLS {
        assert!(name.starts_with("TRITONSERVER_") || name.starts_with("TRITONBACKEND_"), "{name}");
    }
}

#[test]
fn entry_points_are_types_and_never_looked_up() {
    assert!(!SYMBOLS.contains(&"TRITONBACKEND_ModelInstanceExecute"));
    assert!(!SYMBOLS.contains(&"TRITONBACKEND_Initialize"));
}

#[test]
fn the_header_is_for_the_apis_of_release_24_10() {
    assert_eq!(Versions::HEADER.to_string(), "server API 1.34 and backend API 1.19");
}

// The compiler checks these signatures. Together they have every kind of parameter.
type Error = *mut TRITONSERVER_Error;
const _: Option<unsafe extern "C" fn(*mut TRITONBACKEND_Request, *mut u32) -> Error> =
    Api::EMPTY.TRITONBACKEND_RequestFlags;
const _: Option<unsafe extern "C" fn(TRITONSERVER_LogLevel) -> bool> = Api::EMPTY.TRITONSERVER_LogIsEnabled;
const _: Option<unsafe extern "C" fn(TRITONSERVER_LogLevel, *const c_char, c_int, *const c_char) -> Error> =
    Api::EMPTY.TRITONSERVER_LogMessage;
const _: Option<
    unsafe extern "C" fn(
        *mut TRITONBACKEND_Input,
        *mut *const c_char,
        *mut TRITONSERVER_DataType,
        *mut *const i64,
        *mut u32,
        *mut u64,
        *mut u32,
    ) -> Error,
> = Api::EMPTY.TRITONBACKEND_InputProperties;
const _: Option<
    unsafe extern "C" fn(
        *mut TRITONBACKEND_Output,
        *mut *mut c_void,
        u64,
        *mut TRITONSERVER_MemoryType,
        *mut i64,
    ) -> Error,
> = Api::EMPTY.TRITONBACKEND_OutputBuffer;
const _: Option<
    unsafe extern "C" fn(
        *mut *mut TRITONSERVER_Metric,
        *mut TRITONSERVER_MetricFamily,
        *mut *const TRITONSERVER_Parameter,
        u64,
        *const TRITONSERVER_MetricArgs,
    ) -> Error,
> = Api::EMPTY.TRITONSERVER_MetricNewWithArgs;
const _: Option<unsafe extern "C" fn(*mut TRITONSERVER_Message, *mut *const c_char, *mut usize) -> Error> =
    Api::EMPTY.TRITONSERVER_MessageSerializeToJson;

unsafe extern "C" fn execute(
    _instance: *mut TRITONBACKEND_ModelInstance,
    _requests: *mut *mut TRITONBACKEND_Request,
    _request_count: u32,
) -> Error {
    std::ptr::null_mut()
}
const _: entry_point::TRITONBACKEND_ModelInstanceExecute = execute;
