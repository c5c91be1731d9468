// cuBLAS, cuDNN, NCCL and the driver of a GPU that computes nothing, see cuda.cpp. Each operation is one launch.

#include <cudnn_graph.h>

#include <cstring>

#include "null_gpu.h"

namespace {

struct Handle {  // of cuBLAS or cuDNN
  cudaStream_t stream = nullptr;
  int math_mode = 0, pointer_mode = 0;
};

struct Communicator {
  int size, rank;
};

Handle* handle_of(cudnnHandle_t handle) { return reinterpret_cast<Handle*>(handle); }

int make(void** descriptor) {  // that nothing is read from
  *descriptor = new char[256]();
  return 0;
}

}  // namespace

#define NOTHING(name) \
  API int name() { return 0; }

// cuBLAS

API int cublasCreate_v2(Handle** made) {
  *made = new Handle;
  return null_gpu_count_unsafe("cublasCreate");
}

API int cublasSetStream_v2(Handle* handle, cudaStream_t stream) {
  handle->stream = stream;
  return 0;
}

API int cublasSetMathMode(Handle* handle, int mode) {
  handle->math_mode = mode;
  return 0;
}

API int cublasGetMathMode(Handle* handle, int* mode) {
  *mode = handle->math_mode;
  return 0;
}

API int cublasSetPointerMode_v2(Handle* handle, int mode) {
  handle->pointer_mode = mode;
  return 0;
}

API int cublasGetPointerMode_v2(Handle* handle, int* mode) {
  *mode = handle->pointer_mode;
  return 0;
}

#define PRODUCT(name) \
  API int name(Handle* handle, ...) { return null_gpu_launch(handle->stream, #name); }

PRODUCT(cublasGemmEx)
PRODUCT(cublasGemmStridedBatchedEx)
PRODUCT(cublasSgemm_v2)
PRODUCT(cublasSgemmEx)
PRODUCT(cublasSgemmStridedBatched)
PRODUCT(cublasSgemv_v2)

API int cublasLtMatmulDescCreate(void** made, int, int) { return make(made); }
API int cublasLtMatmulPreferenceCreate(void** made) { return make(made); }
API int cublasLtMatrixLayoutCreate(void** made, int, uint64_t, uint64_t, int64_t) { return make(made); }

API int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void* best, int* found) {
  memset(best, 0, 96);  // sizeof(cublasLtMatmulHeuristicResult_t): state 0, which is success
  *found = 1;
  return 0;
}

API int cublasLtMatmul(void*, void*, const void*, const void*, void*, const void*, void*, const void*, const void*, void*,
                       void*, void*, const void*, void*, size_t, cudaStream_t stream) {
  return null_gpu_launch(stream, "cublasLtMatmul");
}

NOTHING(cublasDestroy_v2)
NOTHING(cublasSetWorkspace_v2)
NOTHING(cublasLtMatmulDescDestroy)
NOTHING(cublasLtMatmulDescSetAttribute)
NOTHING(cublasLtMatmulPreferenceDestroy)
NOTHING(cublasLtMatmulPreferenceSetAttribute)
NOTHING(cublasLtMatrixLayoutDestroy)
NOTHING(cublasLtMatrixLayoutSetAttribute)

// cuDNN: convolutions by its graphs of operations, batch norm by its older functions

API cudnnStatus_t cudnnCreate(cudnnHandle_t* made) {
  *made = reinterpret_cast<cudnnHandle_t>(new Handle);
  return null_gpu_count_unsafe("cudnnCreate") ? CUDNN_STATUS_INTERNAL_ERROR : CUDNN_STATUS_SUCCESS;
}

API cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
  handle_of(handle)->stream = stream;
  return CUDNN_STATUS_SUCCESS;
}

API cudnnStatus_t cudnnGetStream(cudnnHandle_t handle, cudaStream_t* stream) {
  *stream = handle_of(handle)->stream;
  return CUDNN_STATUS_SUCCESS;
}

API size_t cudnnGetVersion() { return CUDNN_VERSION; }
API size_t cudnnGetCudartVersion() { return CUDART_VERSION; }
API const char* cudnnGetErrorString(cudnnStatus_t) { return "refused by the null GPU"; }

API void cudnnGetLastErrorString(char* text, size_t size) {
  if (size) *text = 0;
}

API cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t, cudnnBackendDescriptor_t* made) {
  make(made);
  return CUDNN_STATUS_SUCCESS;
}

API cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t, cudnnBackendAttributeName_t name,
                                           cudnnBackendAttributeType_t type, int64_t, int64_t* number, void* values) {
  if (number) *number = name == CUDNN_ATTR_ENGINEHEUR_RESULTS || type == CUDNN_TYPE_INT64;
  bool is_count = name == CUDNN_ATTR_OPERATIONGRAPH_ENGINE_GLOBAL_COUNT;
  if (type == CUDNN_TYPE_INT64 && values) *static_cast<int64_t*>(values) = is_count;  // else the bytes of a workspace
  return CUDNN_STATUS_SUCCESS;
}

API cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t, cudnnBackendDescriptor_t) {
  int error = null_gpu_launch(handle_of(handle)->stream, "cudnnBackendExecute");
  return error ? CUDNN_STATUS_EXECUTION_FAILED : CUDNN_STATUS_SUCCESS;
}

API cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t) { return CUDNN_STATUS_SUCCESS; }
API cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t) { return CUDNN_STATUS_SUCCESS; }

API cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t, cudnnBackendAttributeName_t,
                                           cudnnBackendAttributeType_t, int64_t, const void*) {
  return CUDNN_STATUS_SUCCESS;
}

API int cudnnCreateTensorDescriptor(void** made) { return make(made); }
NOTHING(cudnnDestroyTensorDescriptor)
NOTHING(cudnnSetTensorNdDescriptor)
API int cudnnCreateActivationDescriptor(void** made) { return make(made); }

#define BATCH_NORM(name) \
  API int name(Handle* handle, ...) { return null_gpu_launch(handle->stream, #name); }

BATCH_NORM(cudnnBatchNormalizationForwardTrainingEx)
BATCH_NORM(cudnnBatchNormalizationForwardInference)
BATCH_NORM(cudnnBatchNormalizationBackwardEx)

API int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void*, int, int, void*, void*, void*, void*, void*,
                                                                 size_t* bytes) {
  *bytes = 1024;
  return 0;
}

API int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void*, int, int, void*, void*, void*, void*, void*, void*, void*,
                                                          size_t* bytes) {
  *bytes = 1024;
  return 0;
}

API int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void*, int, int, void*, void*, size_t* bytes) {
  *bytes = 0;
  return 0;
}

// NCCL: no rank hears of another

API int ncclGetVersion(int* version) {
  *version = 22705;
  return 0;
}

API int ncclGetUniqueId(void* id) {
  memset(id, 7, 128);
  return 0;
}

struct Id {
  char bytes[128];
};

API int ncclCommInitRank(Communicator** made, int size, Id, int rank) {
  *made = new Communicator{size, rank};
  return 0;
}

API int ncclCommInitRankConfig(Communicator** made, int size, Id id, int rank, void*) {
  return ncclCommInitRank(made, size, id, rank);
}

API int ncclCommInitRankScalable(Communicator** made, int size, int rank, int, Id*, void*) {
  return ncclCommInitRank(made, size, {}, rank);
}

API int ncclCommCount(Communicator* communicator, int* size) {
  *size = communicator->size;
  return 0;
}

API int ncclCommUserRank(Communicator* communicator, int* rank) {
  *rank = communicator->rank;
  return 0;
}

API int ncclCommGetAsyncError(Communicator*, int* error) {
  *error = 0;
  return 0;
}

API int ncclAllReduce(const void*, void*, size_t, int, int, Communicator*, cudaStream_t stream) {
  return null_gpu_launch(stream, "ncclAllReduce");
}

API int ncclAllGather(const void*, void*, size_t, int, Communicator*, cudaStream_t stream) {
  return null_gpu_launch(stream, "ncclAllGather");
}

API int ncclBroadcast(const void*, void*, size_t, int, int, Communicator*, cudaStream_t stream) {
  return null_gpu_launch(stream, "ncclBroadcast");
}

API int ncclCommDestroy(Communicator*) {
  null_gpu_leave();
  return 0;
}

API int ncclCommAbort(Communicator* communicator) { return ncclCommDestroy(communicator); }
API const char* ncclGetErrorString(int) { return "refused by the null GPU"; }
API const char* ncclGetLastError(void*) { return ""; }
NOTHING(ncclCommDeregister)
NOTHING(ncclCommFinalize)
NOTHING(ncclCommRegister)
NOTHING(ncclGroupEnd)
NOTHING(ncclGroupStart)

// The driver, of which PyTorch's compiler of kernels needs to find these

API int cuCtxGetCurrent(void** context) { return make(context); }
NOTHING(cuCtxSetCurrent)
NOTHING(cuDeviceGet)
NOTHING(cuDeviceGetAttribute)
API int cuDevicePrimaryCtxGetState(int, unsigned*, int* is_active) {
  *is_active = 1;
  return 0;
}

NOTHING(cuDevicePrimaryCtxRetain)
NOTHING(cuFuncGetAttribute)
NOTHING(cuFuncSetAttribute)
NOTHING(cuFuncSetCacheConfig)
NOTHING(cuGetErrorString)
NOTHING(cuLaunchCooperativeKernel)
NOTHING(cuLaunchKernel)
NOTHING(cuLinkAddData_v2)
NOTHING(cuLinkComplete)
NOTHING(cuLinkCreate_v2)
NOTHING(cuModuleGetFunction)
NOTHING(cuModuleLoad)
NOTHING(cuModuleLoadData)
NOTHING(cuModuleLoadDataEx)
NOTHING(cuModuleUnload)
NOTHING(cuOccupancyMaxActiveBlocksPerMultiprocessor)
NOTHING(cuPointerGetAttribute)
NOTHING(cuTensorMapEncodeTiled)
