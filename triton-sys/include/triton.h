// The part of Triton Inference Server's C ABI that this project uses.
//
// Rules of this file
//   - Plain C99. Names, parameter types and numbers are Triton's ABI. The comments are our own; no
//     text is copied from elsewhere.
//   - Only the functions that this backend needs. A function that is added here appears in `Api` and
//     `SYMBOLS` without further work.
//   - The number of every enumeration value is written out, because the numbers are the ABI.
//   - A function that returns `TRITONSERVER_Error*` returns null if it succeeded. Otherwise the
//     caller owns the error, and passes it on or gives it to TRITONSERVER_ErrorDelete.
//   - A getter returns a pointer that its object owns, unless the comment says "owned".
//
// Order: shared values, then TRITONSERVER_*, then TRITONBACKEND_* from the widest object to the
// smallest, and last the entry points that a backend offers to the server.

#ifndef TRITON_SYS_TRITON_H
#define TRITON_SYS_TRITON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/// Major version of the TRITONSERVER API that this header describes. Another major version has
/// another ABI.
#define TRITONSERVER_API_VERSION_MAJOR 1
/// Minor version of the TRITONSERVER API that this header was checked against (release 24.10).
#define TRITONSERVER_API_VERSION_MINOR 34
/// Major version of the TRITONBACKEND API that this header describes. Another major version has
/// another ABI.
#define TRITONBACKEND_API_VERSION_MAJOR 1
/// Minor version of the TRITONBACKEND API that this header was checked against (release 24.10).
#define TRITONBACKEND_API_VERSION_MINOR 19

// ---- Objects: opaque, Triton makes them ----

typedef struct TRITONSERVER_BufferAttributes TRITONSERVER_BufferAttributes;
typedef struct TRITONSERVER_Error TRITONSERVER_Error;
typedef struct TRITONSERVER_Message TRITONSERVER_Message;
typedef struct TRITONSERVER_Metric TRITONSERVER_Metric;
typedef struct TRITONSERVER_MetricArgs TRITONSERVER_MetricArgs;
typedef struct TRITONSERVER_MetricFamily TRITONSERVER_MetricFamily;
typedef struct TRITONSERVER_Parameter TRITONSERVER_Parameter;
typedef struct TRITONSERVER_Server TRITONSERVER_Server;

typedef struct TRITONBACKEND_Backend TRITONBACKEND_Backend;
typedef struct TRITONBACKEND_BackendAttribute TRITONBACKEND_BackendAttribute;
typedef struct TRITONBACKEND_Input TRITONBACKEND_Input;
typedef struct TRITONBACKEND_MemoryManager TRITONBACKEND_MemoryManager;
typedef struct TRITONBACKEND_Model TRITONBACKEND_Model;
typedef struct TRITONBACKEND_ModelInstance TRITONBACKEND_ModelInstance;
typedef struct TRITONBACKEND_Output TRITONBACKEND_Output;
typedef struct TRITONBACKEND_Request TRITONBACKEND_Request;
typedef struct TRITONBACKEND_Response TRITONBACKEND_Response;
typedef struct TRITONBACKEND_ResponseFactory TRITONBACKEND_ResponseFactory;

// ---- Enumerations: a newer server may have more values ----

/// Element type of a tensor.
typedef enum TRITONSERVER_DataType {
  TRITONSERVER_TYPE_INVALID = 0,
  TRITONSERVER_TYPE_BOOL = 1,
  TRITONSERVER_TYPE_UINT8 = 2,
  TRITONSERVER_TYPE_UINT16 = 3,
  TRITONSERVER_TYPE_UINT32 = 4,
  TRITONSERVER_TYPE_UINT64 = 5,
  TRITONSERVER_TYPE_INT8 = 6,
  TRITONSERVER_TYPE_INT16 = 7,
  TRITONSERVER_TYPE_INT32 = 8,
  TRITONSERVER_TYPE_INT64 = 9,
  TRITONSERVER_TYPE_FP16 = 10,
  TRITONSERVER_TYPE_FP32 = 11,
  TRITONSERVER_TYPE_FP64 = 12,
  TRITONSERVER_TYPE_BYTES = 13,
  TRITONSERVER_TYPE_BF16 = 14
} TRITONSERVER_DataType;

/// Type of the memory that a buffer is in. The memory type id that comes with it is the number of
/// the GPU.
typedef enum TRITONSERVER_MemoryType {
  TRITONSERVER_MEMORY_CPU = 0,
  TRITONSERVER_MEMORY_CPU_PINNED = 1,
  TRITONSERVER_MEMORY_GPU = 2
} TRITONSERVER_MemoryType;

/// Type of a parameter. Its value pointer points to the characters of a C string, an int64_t, a
/// bool, a double, or bytes.
typedef enum TRITONSERVER_ParameterType {
  TRITONSERVER_PARAMETER_STRING = 0,
  TRITONSERVER_PARAMETER_INT = 1,
  TRITONSERVER_PARAMETER_BOOL = 2,
  TRITONSERVER_PARAMETER_DOUBLE = 3,
  TRITONSERVER_PARAMETER_BYTES = 4
} TRITONSERVER_ParameterType;

/// Kind of device that an instance runs on.
typedef enum TRITONSERVER_InstanceGroupKind {
  TRITONSERVER_INSTANCEGROUPKIND_AUTO = 0,
  TRITONSERVER_INSTANCEGROUPKIND_CPU = 1,
  TRITONSERVER_INSTANCEGROUPKIND_GPU = 2,
  TRITONSERVER_INSTANCEGROUPKIND_MODEL = 3
} TRITONSERVER_InstanceGroupKind;

/// Level of a log line. The numbers are not ordered by severity.
typedef enum TRITONSERVER_LogLevel {
  TRITONSERVER_LOG_INFO = 0,
  TRITONSERVER_LOG_WARN = 1,
  TRITONSERVER_LOG_ERROR = 2,
  TRITONSERVER_LOG_VERBOSE = 3
} TRITONSERVER_LogLevel;

/// Code of an error. HTTP and gRPC turn it into their own status codes.
typedef enum TRITONSERVER_Error_Code {
  TRITONSERVER_ERROR_UNKNOWN = 0,
  TRITONSERVER_ERROR_INTERNAL = 1,
  TRITONSERVER_ERROR_NOT_FOUND = 2,
  TRITONSERVER_ERROR_INVALID_ARG = 3,
  TRITONSERVER_ERROR_UNAVAILABLE = 4,
  TRITONSERVER_ERROR_UNSUPPORTED = 5,
  TRITONSERVER_ERROR_ALREADY_EXISTS = 6,
  TRITONSERVER_ERROR_CANCELLED = 7
} TRITONSERVER_Error_Code;

/// Kind of a Prometheus metric.
typedef enum TRITONSERVER_MetricKind {
  TRITONSERVER_METRIC_KIND_COUNTER = 0,
  TRITONSERVER_METRIC_KIND_GAUGE = 1,
  TRITONSERVER_METRIC_KIND_HISTOGRAM = 2
} TRITONSERVER_MetricKind;

/// How Triton passes the files of a backend or of a model.
typedef enum TRITONBACKEND_ArtifactType {
  TRITONBACKEND_ARTIFACT_FILESYSTEM = 0
} TRITONBACKEND_ArtifactType;

// ---- Flags: bits of a uint32_t ----

/// Bits of TRITONBACKEND_RequestFlags.
typedef enum TRITONSERVER_RequestFlag {
  TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1,
  TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
} TRITONSERVER_RequestFlag;

/// Bits of TRITONBACKEND_RequestRelease.
typedef enum TRITONSERVER_RequestReleaseFlag {
  TRITONSERVER_REQUEST_RELEASE_ALL = 1,
  TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2
} TRITONSERVER_RequestReleaseFlag;

/// Bits of TRITONBACKEND_ResponseSend and TRITONBACKEND_ResponseFactorySendFlags.
typedef enum TRITONSERVER_ResponseCompleteFlag {
  TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
} TRITONSERVER_ResponseCompleteFlag;

// ==== TRITONSERVER ====

/// Version of the server API that the running server offers.
TRITONSERVER_Error* TRITONSERVER_ApiVersion(uint32_t* major, uint32_t* minor);

// ---- Error ----

/// Makes an error, owned; copies the message.
TRITONSERVER_Error* TRITONSERVER_ErrorNew(TRITONSERVER_Error_Code code, const char* msg);
/// Frees an error.
void TRITONSERVER_ErrorDelete(TRITONSERVER_Error* error);
/// Code of an error.
TRITONSERVER_Error_Code TRITONSERVER_ErrorCode(TRITONSERVER_Error* error);
/// Name of an error's code.
const char* TRITONSERVER_ErrorCodeString(TRITONSERVER_Error* error);
/// Message of an error.
const char* TRITONSERVER_ErrorMessage(TRITONSERVER_Error* error);

// ---- Log ----

/// Whether lines of this level are written at the moment.
bool TRITONSERVER_LogIsEnabled(TRITONSERVER_LogLevel level);
/// Writes one line to the server's log, as from that file and line.
TRITONSERVER_Error* TRITONSERVER_LogMessage(
    TRITONSERVER_LogLevel level, const char* filename, const int line, const char* msg);

// ---- Message: a JSON document ----

/// Parses JSON text of the given length into a message, owned.
TRITONSERVER_Error* TRITONSERVER_MessageNewFromSerializedJson(
    TRITONSERVER_Message** message, const char* base, size_t byte_size);
/// The message as JSON text, not terminated by a zero; valid as long as the message.
TRITONSERVER_Error* TRITONSERVER_MessageSerializeToJson(
    TRITONSERVER_Message* message, const char** base, size_t* byte_size);
/// Frees a message.
TRITONSERVER_Error* TRITONSERVER_MessageDelete(TRITONSERVER_Message* message);

// ---- Names of values; static strings ----

/// Name of a data type, without the "TYPE_" of a model's configuration.
const char* TRITONSERVER_DataTypeString(TRITONSERVER_DataType datatype);
/// Data type of that name, or INVALID.
TRITONSERVER_DataType TRITONSERVER_StringToDataType(const char* dtype);
/// Bytes of one element; 0 for BYTES, whose elements differ in size.
uint32_t TRITONSERVER_DataTypeByteSize(TRITONSERVER_DataType datatype);
/// Name of a memory type.
const char* TRITONSERVER_MemoryTypeString(TRITONSERVER_MemoryType memtype);

// ---- Parameter: a name with a value, used as a metric's label ----

/// Makes a parameter, owned; copies name and value. Null for BYTES.
TRITONSERVER_Parameter* TRITONSERVER_ParameterNew(
    const char* name, const TRITONSERVER_ParameterType type, const void* value);
/// Frees a parameter.
void TRITONSERVER_ParameterDelete(TRITONSERVER_Parameter* parameter);

// ---- Buffer attributes: the type, place and size of memory that is reported ----

/// Makes empty attributes, owned.
TRITONSERVER_Error* TRITONSERVER_BufferAttributesNew(
    TRITONSERVER_BufferAttributes** buffer_attributes);
/// Frees attributes.
TRITONSERVER_Error* TRITONSERVER_BufferAttributesDelete(
    TRITONSERVER_BufferAttributes* buffer_attributes);
/// Sets the type of the memory.
TRITONSERVER_Error* TRITONSERVER_BufferAttributesSetMemoryType(
    TRITONSERVER_BufferAttributes* buffer_attributes, TRITONSERVER_MemoryType memory_type);
/// Sets the number of the GPU.
TRITONSERVER_Error* TRITONSERVER_BufferAttributesSetMemoryTypeId(
    TRITONSERVER_BufferAttributes* buffer_attributes, int64_t memory_type_id);
/// Sets the number of bytes.
TRITONSERVER_Error* TRITONSERVER_BufferAttributesSetByteSize(
    TRITONSERVER_BufferAttributes* buffer_attributes, size_t byte_size);

// ---- Metrics: a family has a name and a kind, its metrics have labels and values ----

/// Registers a family, owned. UNSUPPORTED where the server was built without metrics.
TRITONSERVER_Error* TRITONSERVER_MetricFamilyNew(
    TRITONSERVER_MetricFamily** family, const TRITONSERVER_MetricKind kind, const char* name,
    const char* description);
/// Frees a family; its metrics must be freed before.
TRITONSERVER_Error* TRITONSERVER_MetricFamilyDelete(TRITONSERVER_MetricFamily* family);
/// Makes a counter or a gauge, owned. The labels are copied and stay the caller's.
TRITONSERVER_Error* TRITONSERVER_MetricNew(
    TRITONSERVER_Metric** metric, TRITONSERVER_MetricFamily* family,
    const TRITONSERVER_Parameter** labels, const uint64_t label_count);
/// Makes a metric of any kind, owned. Labels and args are copied and stay the caller's.
TRITONSERVER_Error* TRITONSERVER_MetricNewWithArgs(
    TRITONSERVER_Metric** metric, TRITONSERVER_MetricFamily* family,
    const TRITONSERVER_Parameter** labels, const uint64_t label_count,
    const TRITONSERVER_MetricArgs* args);
/// Frees a metric.
TRITONSERVER_Error* TRITONSERVER_MetricDelete(TRITONSERVER_Metric* metric);
/// Value of a counter or a gauge.
TRITONSERVER_Error* TRITONSERVER_MetricValue(TRITONSERVER_Metric* metric, double* value);
/// Adds to a gauge or a counter. A counter accepts no negative value.
TRITONSERVER_Error* TRITONSERVER_MetricIncrement(TRITONSERVER_Metric* metric, double value);
/// Sets a gauge.
TRITONSERVER_Error* TRITONSERVER_MetricSet(TRITONSERVER_Metric* metric, double value);
/// Adds an observation to a histogram.
TRITONSERVER_Error* TRITONSERVER_MetricObserve(TRITONSERVER_Metric* metric, double value);
/// Makes empty arguments for TRITONSERVER_MetricNewWithArgs, owned.
TRITONSERVER_Error* TRITONSERVER_MetricArgsNew(TRITONSERVER_MetricArgs** args);
/// Sets the upper bounds of a histogram's buckets.
TRITONSERVER_Error* TRITONSERVER_MetricArgsSetHistogram(
    TRITONSERVER_MetricArgs* args, const double* buckets, const uint64_t buckets_count);
/// Frees arguments.
TRITONSERVER_Error* TRITONSERVER_MetricArgsDelete(TRITONSERVER_MetricArgs* args);

// ==== TRITONBACKEND ====

/// Version of the backend API that the running server offers.
TRITONSERVER_Error* TRITONBACKEND_ApiVersion(uint32_t* major, uint32_t* minor);

// ---- Backend: lives from Initialize to Finalize ----

/// Name of the backend.
TRITONSERVER_Error* TRITONBACKEND_BackendName(TRITONBACKEND_Backend* backend, const char** name);
/// Settings from the server's command line as JSON. The server owns the message.
TRITONSERVER_Error* TRITONBACKEND_BackendConfig(
    TRITONBACKEND_Backend* backend, TRITONSERVER_Message** backend_config);
/// Folder of the backend's files.
TRITONSERVER_Error* TRITONBACKEND_BackendArtifacts(
    TRITONBACKEND_Backend* backend, TRITONBACKEND_ArtifactType* artifact_type,
    const char** location);
/// The server's allocator of pinned and GPU memory.
TRITONSERVER_Error* TRITONBACKEND_BackendMemoryManager(
    TRITONBACKEND_Backend* backend, TRITONBACKEND_MemoryManager** manager);
/// The pointer that we stored with the backend.
TRITONSERVER_Error* TRITONBACKEND_BackendState(TRITONBACKEND_Backend* backend, void** state);
/// Stores a pointer with the backend.
TRITONSERVER_Error* TRITONBACKEND_BackendSetState(TRITONBACKEND_Backend* backend, void* state);

// ---- Backend attributes: the backend sets them in GetBackendAttribute ----

/// Adds an instance group for models whose configuration has none.
TRITONSERVER_Error* TRITONBACKEND_BackendAttributeAddPreferredInstanceGroup(
    TRITONBACKEND_BackendAttribute* backend_attributes, const TRITONSERVER_InstanceGroupKind kind,
    const uint64_t count, const uint64_t* device_ids, const uint64_t id_count);
/// Sets whether the instances of a model may be initialised in parallel.
TRITONSERVER_Error* TRITONBACKEND_BackendAttributeSetParallelModelInstanceLoading(
    TRITONBACKEND_BackendAttribute* backend_attributes, bool enabled);

// ---- Memory manager ----

/// Allocates memory, owned. Fails with UNSUPPORTED if this is never possible for the type and id,
/// and with UNAVAILABLE if it is not possible now.
TRITONSERVER_Error* TRITONBACKEND_MemoryManagerAllocate(
    TRITONBACKEND_MemoryManager* manager, void** buffer, const TRITONSERVER_MemoryType memory_type,
    const int64_t memory_type_id, const uint64_t byte_size);
/// Frees an allocation. Type and id must be those of the allocation.
TRITONSERVER_Error* TRITONBACKEND_MemoryManagerFree(
    TRITONBACKEND_MemoryManager* manager, void* buffer, const TRITONSERVER_MemoryType memory_type,
    const int64_t memory_type_id);

// ---- Model: lives from ModelInitialize to ModelFinalize ----

/// Name of the model.
TRITONSERVER_Error* TRITONBACKEND_ModelName(TRITONBACKEND_Model* model, const char** name);
/// Version of the model.
TRITONSERVER_Error* TRITONBACKEND_ModelVersion(TRITONBACKEND_Model* model, uint64_t* version);
/// Folder of the model. It has the folders of the versions.
TRITONSERVER_Error* TRITONBACKEND_ModelRepository(
    TRITONBACKEND_Model* model, TRITONBACKEND_ArtifactType* artifact_type, const char** location);
/// Configuration of the model as JSON, owned. config_version must be 1.
TRITONSERVER_Error* TRITONBACKEND_ModelConfig(
    TRITONBACKEND_Model* model, const uint32_t config_version, TRITONSERVER_Message** model_config);
/// Whether the server asks us to complete the configuration.
TRITONSERVER_Error* TRITONBACKEND_ModelAutoCompleteConfig(
    TRITONBACKEND_Model* model, bool* auto_complete_config);
/// Gives the server the completed configuration. Only allowed in ModelInitialize. We still own the
/// message.
TRITONSERVER_Error* TRITONBACKEND_ModelSetConfig(
    TRITONBACKEND_Model* model, const uint32_t config_version, TRITONSERVER_Message* model_config);
/// The server that the model belongs to.
TRITONSERVER_Error* TRITONBACKEND_ModelServer(
    TRITONBACKEND_Model* model, TRITONSERVER_Server** server);
/// The backend that the model belongs to.
TRITONSERVER_Error* TRITONBACKEND_ModelBackend(
    TRITONBACKEND_Model* model, TRITONBACKEND_Backend** backend);
/// The pointer that we stored with the model.
TRITONSERVER_Error* TRITONBACKEND_ModelState(TRITONBACKEND_Model* model, void** state);
/// Stores a pointer with the model.
TRITONSERVER_Error* TRITONBACKEND_ModelSetState(TRITONBACKEND_Model* model, void* state);
/// Reports the memory that the model holds. We still own the array and its entries.
TRITONSERVER_Error* TRITONBACKEND_ModelReportMemoryUsage(
    TRITONBACKEND_Model* model, TRITONSERVER_BufferAttributes** usage, uint32_t usage_size);

// ---- Model instance: lives from ModelInstanceInitialize to ModelInstanceFinalize ----

/// Name of the instance.
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceName(
    TRITONBACKEND_ModelInstance* instance, const char** name);
/// Kind of device that the instance runs on.
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceKind(
    TRITONBACKEND_ModelInstance* instance, TRITONSERVER_InstanceGroupKind* kind);
/// Number of the GPU that the instance runs on. Only valid for kind GPU.
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceDeviceId(
    TRITONBACKEND_ModelInstance* instance, int32_t* device_id);
/// Host policy as JSON. The server owns the message.
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceHostPolicy(
    TRITONBACKEND_ModelInstance* instance, TRITONSERVER_Message** host_policy);
/// Whether the instance is passive: it is loaded but never executes.
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceIsPassive(
    TRITONBACKEND_ModelInstance* instance, bool* is_passive);
/// The model that the instance belongs to.
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceModel(
    TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Model** model);
/// The pointer that we stored with the instance.
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceState(
    TRITONBACKEND_ModelInstance* instance, void** state);
/// Stores a pointer with the instance.
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceSetState(
    TRITONBACKEND_ModelInstance* instance, void* state);
/// Reports the memory that the instance holds. We still own the array and its entries.
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceReportMemoryUsage(
    TRITONBACKEND_ModelInstance* instance, TRITONSERVER_BufferAttributes** usage,
    uint32_t usage_size);
/// Adds one request to the statistics. To be called before the request is released.
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceReportStatistics(
    TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request* request, const bool success,
    const uint64_t exec_start_ns, const uint64_t compute_start_ns, const uint64_t compute_end_ns,
    const uint64_t exec_end_ns);
/// Adds one execution of a batch to the statistics.
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceReportBatchStatistics(
    TRITONBACKEND_ModelInstance* instance, const uint64_t batch_size, const uint64_t exec_start_ns,
    const uint64_t compute_start_ns, const uint64_t compute_end_ns, const uint64_t exec_end_ns);

// ---- Request: we own it from a successful ModelInstanceExecute until we release it ----

/// Id that the client gave, or an empty string.
TRITONSERVER_Error* TRITONBACKEND_RequestId(TRITONBACKEND_Request* request, const char** id);
/// Whether the request has been cancelled.
TRITONSERVER_Error* TRITONBACKEND_RequestIsCancelled(
    TRITONBACKEND_Request* request, bool* is_cancelled);
/// Sequence id as a number; 0 if the client gave none. An error if the client gave a string.
TRITONSERVER_Error* TRITONBACKEND_RequestCorrelationId(TRITONBACKEND_Request* request, uint64_t* id);
/// Sequence id as a string. An error if the client gave a number or none.
TRITONSERVER_Error* TRITONBACKEND_RequestCorrelationIdString(
    TRITONBACKEND_Request* request, const char** id);
/// Bits of TRITONSERVER_RequestFlag.
TRITONSERVER_Error* TRITONBACKEND_RequestFlags(TRITONBACKEND_Request* request, uint32_t* flags);
/// Timeout that the client has set, in microseconds; 0 if it has set none. Since backend API 1.17.
TRITONSERVER_Error* TRITONBACKEND_InferenceRequestTimeoutMicroseconds(
    TRITONBACKEND_Request* request, uint64_t* timeout);
/// Number of parameters.
TRITONSERVER_Error* TRITONBACKEND_RequestParameterCount(
    TRITONBACKEND_Request* request, uint32_t* count);
/// Parameter at an index. The type of the parameter decides what the value points to.
TRITONSERVER_Error* TRITONBACKEND_RequestParameter(
    TRITONBACKEND_Request* request, const uint32_t index, const char** key,
    TRITONSERVER_ParameterType* type, const void** vvalue);
/// Number of inputs.
TRITONSERVER_Error* TRITONBACKEND_RequestInputCount(TRITONBACKEND_Request* request, uint32_t* count);
/// Name of the input at an index.
TRITONSERVER_Error* TRITONBACKEND_RequestInputName(
    TRITONBACKEND_Request* request, const uint32_t index, const char** input_name);
/// Input of that name.
TRITONSERVER_Error* TRITONBACKEND_RequestInput(
    TRITONBACKEND_Request* request, const char* name, TRITONBACKEND_Input** input);
/// Input at an index.
TRITONSERVER_Error* TRITONBACKEND_RequestInputByIndex(
    TRITONBACKEND_Request* request, const uint32_t index, TRITONBACKEND_Input** input);
/// Number of outputs that the client requests.
TRITONSERVER_Error* TRITONBACKEND_RequestOutputCount(
    TRITONBACKEND_Request* request, uint32_t* count);
/// Name of the requested output at an index.
TRITONSERVER_Error* TRITONBACKEND_RequestOutputName(
    TRITONBACKEND_Request* request, const uint32_t index, const char** output_name);
/// Releases the request, and everything that it owns. If this fails, we still own the request.
TRITONSERVER_Error* TRITONBACKEND_RequestRelease(
    TRITONBACKEND_Request* request, uint32_t release_flags);

// ---- Input: the request owns it ----

/// Properties of an input. Output pointers may be null. The byte size is the number of bytes that
/// arrived, which may differ from the size that the shape needs.
TRITONSERVER_Error* TRITONBACKEND_InputProperties(
    TRITONBACKEND_Input* input, const char** name, TRITONSERVER_DataType* datatype,
    const int64_t** shape, uint32_t* dims_count, uint64_t* byte_size, uint32_t* buffer_count);
/// One of the buffers of the input. The caller sets type and id to those that it prefers; the
/// function sets them to those of the buffer.
TRITONSERVER_Error* TRITONBACKEND_InputBuffer(
    TRITONBACKEND_Input* input, const uint32_t index, const void** buffer,
    uint64_t* buffer_byte_size, TRITONSERVER_MemoryType* memory_type, int64_t* memory_type_id);

// ---- Response: we own it until it is sent or deleted ----

/// Makes a response to a request, owned.
TRITONSERVER_Error* TRITONBACKEND_ResponseNew(
    TRITONBACKEND_Response** response, TRITONBACKEND_Request* request);
/// Makes a response from a factory, owned.
TRITONSERVER_Error* TRITONBACKEND_ResponseNewFromFactory(
    TRITONBACKEND_Response** response, TRITONBACKEND_ResponseFactory* factory);
/// Frees a response that has not been sent.
TRITONSERVER_Error* TRITONBACKEND_ResponseDelete(TRITONBACKEND_Response* response);
/// Adds an output tensor. The response owns it.
TRITONSERVER_Error* TRITONBACKEND_ResponseOutput(
    TRITONBACKEND_Response* response, TRITONBACKEND_Output** output, const char* name,
    const TRITONSERVER_DataType datatype, const int64_t* shape, const uint32_t dims_count);
/// Adds a string parameter.
TRITONSERVER_Error* TRITONBACKEND_ResponseSetStringParameter(
    TRITONBACKEND_Response* response, const char* name, const char* value);
/// Adds an integer parameter.
TRITONSERVER_Error* TRITONBACKEND_ResponseSetIntParameter(
    TRITONBACKEND_Response* response, const char* name, const int64_t value);
/// Adds a boolean parameter.
TRITONSERVER_Error* TRITONBACKEND_ResponseSetBoolParameter(
    TRITONBACKEND_Response* response, const char* name, const bool value);
/// Adds a floating point parameter. Since backend API 1.18.
TRITONSERVER_Error* TRITONBACKEND_ResponseSetDoubleParameter(
    TRITONBACKEND_Response* response, const char* name, const double value);
/// Sends the response. Triton owns it from now on, even if this fails. With an error that is not
/// null, the response reports a failure. We still own the error.
TRITONSERVER_Error* TRITONBACKEND_ResponseSend(
    TRITONBACKEND_Response* response, const uint32_t send_flags, TRITONSERVER_Error* error);

// ---- Output: the response owns it ----

/// The buffer to fill. The caller sets type and id to those that it prefers; the function sets them
/// to those of the buffer.
TRITONSERVER_Error* TRITONBACKEND_OutputBuffer(
    TRITONBACKEND_Output* output, void** buffer, const uint64_t buffer_byte_size,
    TRITONSERVER_MemoryType* memory_type, int64_t* memory_type_id);

// ---- Response factory: for responses that are sent after the request is released ----

/// Makes a factory, owned.
TRITONSERVER_Error* TRITONBACKEND_ResponseFactoryNew(
    TRITONBACKEND_ResponseFactory** factory, TRITONBACKEND_Request* request);
/// Frees a factory.
TRITONSERVER_Error* TRITONBACKEND_ResponseFactoryDelete(TRITONBACKEND_ResponseFactory* factory);
/// Sends flags without a response.
TRITONSERVER_Error* TRITONBACKEND_ResponseFactorySendFlags(
    TRITONBACKEND_ResponseFactory* factory, const uint32_t send_flags);

// ==== Entry points: a backend exports them, and the server calls them ====
//
// They are not looked up. In Rust they become types in the module `entry_point`, with which a
// backend checks its exports.

/// Called once, when the backend is loaded.
TRITONSERVER_Error* TRITONBACKEND_Initialize(TRITONBACKEND_Backend* backend);
/// Called once, when the server ends, and also after an Initialize that failed.
TRITONSERVER_Error* TRITONBACKEND_Finalize(TRITONBACKEND_Backend* backend);
/// Called before models are loaded, for the backend to set its attributes.
TRITONSERVER_Error* TRITONBACKEND_GetBackendAttribute(
    TRITONBACKEND_Backend* backend, TRITONBACKEND_BackendAttribute* backend_attributes);
/// Called when a model is loaded.
TRITONSERVER_Error* TRITONBACKEND_ModelInitialize(TRITONBACKEND_Model* model);
/// Called when a model is unloaded, after its instances are finalised, and also after a
/// ModelInitialize that failed.
TRITONSERVER_Error* TRITONBACKEND_ModelFinalize(TRITONBACKEND_Model* model);
/// Called when an instance of a model is made.
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceInitialize(TRITONBACKEND_ModelInstance* instance);
/// Called when an instance is removed, and also after a ModelInstanceInitialize that failed.
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceFinalize(TRITONBACKEND_ModelInstance* instance);
/// Called when a client asks whether the model is ready, by Triton 25.12 and newer. An error means that it is not.
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceReady(TRITONBACKEND_ModelInstance* instance);
/// Executes a payload of requests. If we return null, we own the requests, but not the array. If we
/// return an error, the server still owns them.
TRITONSERVER_Error* TRITONBACKEND_ModelInstanceExecute(
    TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request** requests,
    const uint32_t request_count);

#endif  // TRITON_SYS_TRITON_H
