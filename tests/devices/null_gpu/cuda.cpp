// A GPU that computes nothing: CUDA's runtime by the calls that PyTorch makes. Preloaded, it stands before the real one.
//
// PyTorch's own host code runs unchanged: allocator, streams, graphs, autograd, and the choice of every kernel. Each kernel is
// counted by its name, and recorded where its stream is being captured. What CUDA forbids within a capture is refused with
// CUDA's error codes. `null_gpu_take_counts` tells what happened.
//
// NULL_GPU_NAME: T4 for a Tesla T4, else an H200. NULL_GPU_CARDS: how many, else 1.

#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "null_gpu.h"

namespace {

struct Graph {
  long nodes = 0;
};

struct Stream {
  int capture = 0;  // the number of the capture that it is part of, or 0
  Graph* graph = nullptr;
  bool is_broken = false;
  long work = 0;    // that was captured from it
  long joined = 0;  // as far as another stream of the capture has waited for it
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  std::thread::id thread;  // which began the capture; none where the stream joined it later
};

struct Event {
  Stream* stream = nullptr;
  int capture = 0;
  long work = 0;
};

struct Card {
  const char* name;
  size_t memory, l2;
  int major, minor, processors, threads, shared_memory, shared_memory_of_block;
};

const Card T4 = {"Tesla T4", 15843721216, 4 << 20, 7, 5, 40, 1024, 65536, 65536};
const Card H200 = {"NVIDIA H200", 150754820096, 60 << 20, 9, 0, 132, 2048, 233472, 232448};

std::recursive_mutex mutex;  // of all that follows
std::set<Stream*> streams;
Stream default_stream;
int captures = 0;
std::map<const void*, std::string> names;  // of kernels
std::map<std::string, long> counts;
std::map<char*, size_t> on_device, pinned;  // address -> bytes
size_t used = 0;
int graphs = 0;  // that can be launched
thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;
thread_local cudaError_t last_error = cudaSuccess;
thread_local int current_card = 0;

using Lock = std::lock_guard<std::recursive_mutex>;

const Card& card() {
  const char* name = getenv("NULL_GPU_NAME");
  return name && !strcmp(name, "T4") ? T4 : H200;
}

Stream* stream_of(cudaStream_t stream) {
  bool is_default = stream == nullptr || stream == cudaStreamLegacy || stream == cudaStreamPerThread;
  return is_default ? &default_stream : reinterpret_cast<Stream*>(stream);
}

void count(const std::string& what) {
  Lock lock(mutex);
  counts[what]++;
}

cudaError_t refuse(cudaError_t error, const std::string& call) {
  count("refused " + call);
  return last_error = error;
}

// A call that no thread may make while it captures, nor any other one while somebody captures in the mode "global".
cudaError_t count_unsafe(const char* call) {
  Lock lock(mutex);
  count(call);
  if (thread_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  for (Stream* stream : streams) {
    if (!stream->capture || stream->mode == cudaStreamCaptureModeRelaxed) continue;
    bool is_own = stream->thread == std::this_thread::get_id();
    if (is_own || (stream->mode == cudaStreamCaptureModeGlobal && thread_mode == cudaStreamCaptureModeGlobal)) {
      stream->is_broken = true;
      return refuse(cudaErrorStreamCaptureUnsupported, call);
    }
  }
  return cudaSuccess;
}

// A call that waits for a stream.
cudaError_t count_wait(const char* call, Stream* stream) {
  Lock lock(mutex);
  count(call);
  if (!stream->capture) return cudaSuccess;
  stream->is_broken = true;
  return refuse(cudaErrorStreamCaptureUnsupported, call);
}

char* map_memory(size_t bytes) {
  void* address = mmap(nullptr, std::max<size_t>(bytes, 1), PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return address == MAP_FAILED ? nullptr : static_cast<char*>(address);
}

size_t unmap_memory(std::map<char*, size_t>& memory, void* address) {
  auto found = memory.find(static_cast<char*>(address));
  if (found == memory.end()) return 0;
  size_t bytes = found->second;
  munmap(address, std::max<size_t>(bytes, 1));
  memory.erase(found);
  return bytes;
}

bool is_in(const std::map<char*, size_t>& memory, const void* address) {
  auto next = memory.upper_bound(static_cast<char*>(const_cast<void*>(address)));
  if (next == memory.begin()) return false;
  --next;
  return static_cast<const char*>(address) < next->first + next->second;
}

// Between the host and the device alone: what is copied within the device was computed by no kernel.
void copy(void* to, const void* from, size_t bytes) {
  Lock lock(mutex);
  if (!(is_in(on_device, to) && is_in(on_device, from))) memcpy(to, from, bytes);
}

}  // namespace

// For the tests, and for libraries.cpp

int null_gpu_launch(cudaStream_t stream, const std::string& name) {
  Lock lock(mutex);
  Stream* on = stream_of(stream);
  if (on->is_broken) return refuse(cudaErrorStreamCaptureInvalidated, name);
  count("launched " + name);
  if (on->capture) {
    on->graph->nodes++;
    on->work++;
  }
  return cudaSuccess;
}

int null_gpu_count_unsafe(const char* call) { return count_unsafe(call); }

void null_gpu_leave() {
  if (!graphs) return;
  fprintf(stderr, "NCCL would wait forever for a graph that holds its operations\n");
  abort();
}

// Lines "NUMBER WHAT", and zero all but the bytes of memory in use. WHAT: the name of a call; "launched KERNEL"; "refused CALL";
// "captured nodes"; "memory".
API const char* null_gpu_take_counts() {
  static std::string text;
  Lock lock(mutex);
  text.clear();
  counts["memory"] = used;
  for (auto& [what, number] : counts) text += std::to_string(number) + " " + what + "\n";
  counts.clear();
  return text.c_str();
}

// Devices

API cudaError_t cudaGetDeviceCount(int* number) {
  count("cudaGetDeviceCount");
  const char* cards = getenv("NULL_GPU_CARDS");
  *number = cards ? atoi(cards) : 1;
  return cudaSuccess;
}

API cudaError_t cudaGetDevice(int* number) {
  *number = current_card;
  return cudaSuccess;
}

API cudaError_t cudaSetDevice(int number) {
  current_card = number;
  return cudaSuccess;
}

API cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

API cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }

API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  const std::map<int, int> values = {
      {cudaDevAttrMultiProcessorCount, card().processors},
      {cudaDevAttrComputeCapabilityMajor, card().major},
      {cudaDevAttrComputeCapabilityMinor, card().minor},
      {cudaDevAttrMaxThreadsPerBlock, 1024},
      {cudaDevAttrMaxThreadsPerMultiProcessor, card().threads},
      {cudaDevAttrMaxSharedMemoryPerBlock, 49152},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, card().shared_memory_of_block},
      {cudaDevAttrWarpSize, 32},
      {cudaDevAttrMaxGridDimX, 2147483647},
      {cudaDevAttrMaxGridDimY, 65535},
      {cudaDevAttrMaxGridDimZ, 65535},
  };
  auto found = values.find(attribute);
  *value = found == values.end() ? 0 : found->second;
  return cudaSuccess;
}

API cudaError_t cudaGetDeviceProperties_v2(cudaDeviceProp* found, int) {
  *found = {};
  snprintf(found->name, sizeof found->name, "%s", card().name);
  found->totalGlobalMem = card().memory;
  found->major = card().major;
  found->minor = card().minor;
  found->multiProcessorCount = card().processors;
  found->warpSize = 32;
  found->maxThreadsPerBlock = 1024;
  found->maxThreadsPerMultiProcessor = card().threads;
  found->sharedMemPerBlock = 49152;
  found->sharedMemPerMultiprocessor = card().shared_memory;
  found->sharedMemPerBlockOptin = card().shared_memory_of_block;
  found->regsPerBlock = found->regsPerMultiprocessor = 65536;
  found->l2CacheSize = card().l2;
  found->maxBlocksPerMultiProcessor = 32;
  found->textureAlignment = 512;
  found->maxGridSize[0] = 2147483647;
  found->maxGridSize[1] = found->maxGridSize[2] = 65535;
  found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
  found->maxThreadsDim[2] = 64;
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) {
  *pool = nullptr;
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int number) {
  snprintf(id, length, "0000:00:%02d.0", number);
  return cudaSuccess;
}

API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}

API cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
API cudaError_t cudaPeekAtLastError() { return last_error; }
API const char* cudaGetErrorName(cudaError_t) { return "cudaError"; }

API const char* cudaGetErrorString(cudaError_t error) {
  if (error == cudaErrorStreamCaptureUnsupported) return "operation not permitted when stream is capturing";
  if (error == cudaErrorStreamCaptureInvalidated) return "operation failed due to a previous error during capture";
  if (error == cudaErrorStreamCaptureUnjoined) return "capturing stream has unjoined work";
  return error == cudaErrorMemoryAllocation ? "out of memory" : "refused by the null GPU";
}

static int do_nothing() { return 0; }

API cudaError_t cudaGetDriverEntryPoint(const char*, void** found, unsigned long long,
                                        cudaDriverEntryPointQueryResult* result) {
  *found = reinterpret_cast<void*>(do_nothing);
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

API cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** found, unsigned, unsigned long long flags,
                                                 cudaDriverEntryPointQueryResult* result) {
  return cudaGetDriverEntryPoint(name, found, flags, result);
}

// Memory

API cudaError_t cudaMalloc(void** address, size_t bytes) {
  if (auto error = count_unsafe("cudaMalloc")) return error;
  Lock lock(mutex);
  if (used + bytes > card().memory) return refuse(cudaErrorMemoryAllocation, "cudaMalloc");
  char* found = map_memory(bytes);
  on_device[found] = bytes;
  used += bytes;
  *address = found;
  return cudaSuccess;
}

API cudaError_t cudaFree(void* address) {
  if (!address) return cudaSuccess;
  if (auto error = count_unsafe("cudaFree")) return error;
  Lock lock(mutex);
  used -= unmap_memory(on_device, address);
  return cudaSuccess;
}

API cudaError_t cudaHostAlloc(void** address, size_t bytes, unsigned) {
  if (auto error = count_unsafe("cudaHostAlloc")) return error;
  Lock lock(mutex);
  char* found = map_memory(bytes);
  pinned[found] = bytes;
  *address = found;
  return cudaSuccess;
}

API cudaError_t cudaFreeHost(void* address) {
  Lock lock(mutex);
  unmap_memory(pinned, address);
  return cudaSuccess;
}

API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *total = card().memory;
  *free = card().memory - used;
  return cudaSuccess;
}

API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* address) {
  Lock lock(mutex);
  *found = {};
  found->type = is_in(on_device, address) ? cudaMemoryTypeDevice
                : is_in(pinned, address)  ? cudaMemoryTypeHost
                                          : cudaMemoryTypeUnregistered;
  found->device = current_card;
  found->devicePointer = found->hostPointer = const_cast<void*>(address);
  return cudaSuccess;
}

API cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  if (auto error = count_unsafe("cudaMemcpy")) return error;
  copy(to, from, bytes);
  return cudaSuccess;
}

API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  if (int error = null_gpu_launch(stream, "copy")) return static_cast<cudaError_t>(error);
  copy(to, from, bytes);
  return cudaSuccess;
}

API cudaError_t cudaMemset(void*, int, size_t) { return count_unsafe("cudaMemset"); }

API cudaError_t cudaMemsetAsync(void*, int, size_t, cudaStream_t stream) {
  return static_cast<cudaError_t>(null_gpu_launch(stream, "set"));
}

// Kernels: what nvcc compiles into a program registers them, and stores how each is launched

static void* registered;

API void** __cudaRegisterFatBinary(void*) { return &registered; }
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

API void __cudaRegisterFunction(void**, const char* kernel, char*, const char* name, int, void*, void*, void*, void*, int*) {
  Lock lock(mutex);
  names[kernel] = name;
}

struct Configuration {
  dim3 grid, block;
  size_t memory;
  cudaStream_t stream;
};

static thread_local std::vector<Configuration> configurations;

API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t memory, cudaStream_t stream) {
  configurations.push_back({grid, block, memory, stream});
  return 0;
}

API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* memory, void* stream) {
  Configuration last = configurations.back();
  configurations.pop_back();
  *grid = last.grid;
  *block = last.block;
  *memory = last.memory;
  *static_cast<cudaStream_t*>(stream) = last.stream;
  return cudaSuccess;
}

API cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void**, size_t, cudaStream_t stream) {
  Lock lock(mutex);
  unsigned threads = block.x * block.y * block.z;
  bool is_valid = grid.x && grid.y && grid.z && threads && threads <= 1024;
  if (!is_valid) return refuse(cudaErrorInvalidConfiguration, names[kernel]);
  return static_cast<cudaError_t>(null_gpu_launch(stream, names[kernel]));
}

API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* how, const void* kernel, void** arguments) {
  return cudaLaunchKernel(kernel, how->gridDim, how->blockDim, arguments, how->dynamicSmemBytes, how->stream);
}

API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
  *found = {};
  found->maxThreadsPerBlock = 1024;
  found->numRegs = 32;
  found->ptxVersion = found->binaryVersion = 10 * card().major + card().minor;
  found->maxDynamicSharedSizeBytes = 49152;
  return cudaSuccess;
}

API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
  *blocks = 4;
  return cudaSuccess;
}

API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  if (!stream_of(stream)->capture) function(data);
  return cudaSuccess;
}

// Streams and events

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  Lock lock(mutex);
  auto* made = new Stream;
  streams.insert(made);
  *stream = reinterpret_cast<cudaStream_t>(made);
  return cudaSuccess;
}

API cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}

API cudaError_t cudaStreamQuery(cudaStream_t stream) { return count_wait("cudaStreamQuery", stream_of(stream)); }
API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return count_wait("cudaStreamSynchronize", stream_of(stream));
}

API cudaError_t cudaDeviceSynchronize() {
  Lock lock(mutex);
  count("cudaDeviceSynchronize");
  for (Stream* stream : streams) {
    if (!stream->capture) continue;
    stream->is_broken = true;
    return refuse(cudaErrorStreamCaptureUnsupported, "cudaDeviceSynchronize");
  }
  return cudaSuccess;
}

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(new Event);
  return cudaSuccess;
}

API cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

API cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete reinterpret_cast<Event*>(event);
  return cudaSuccess;
}

API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  Lock lock(mutex);
  Stream* on = stream_of(stream);
  *reinterpret_cast<Event*>(event) = {on, on->capture, on->work};
  return cudaSuccess;
}

API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}

API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  Lock lock(mutex);
  Stream* waiting = stream_of(stream);
  auto* until = reinterpret_cast<Event*>(event);
  bool is_captured = until->capture && until->capture == until->stream->capture;
  if (is_captured) {
    until->stream->joined = std::max(until->stream->joined, until->work);
    if (!waiting->capture) {  // from here on it is part of the capture
      waiting->capture = until->capture;
      waiting->graph = until->stream->graph;
      waiting->mode = cudaStreamCaptureModeRelaxed;  // calls are refused by the stream that began it
      waiting->thread = {};
    }
  } else if (waiting->capture) {
    waiting->is_broken = true;
    return refuse(cudaErrorStreamCaptureIsolation, "cudaStreamWaitEvent");
  }
  return cudaSuccess;
}

API cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (auto error = count_unsafe("cudaEventQuery")) return error;
  auto* found = reinterpret_cast<Event*>(event);
  return found->capture ? refuse(cudaErrorCapturedEvent, "cudaEventQuery") : cudaSuccess;
}

API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  Lock lock(mutex);
  count("cudaEventSynchronize");
  auto* until = reinterpret_cast<Event*>(event);
  if (!until->capture || until->capture != until->stream->capture) return cudaSuccess;
  until->stream->is_broken = true;
  return refuse(cudaErrorCapturedEvent, "cudaEventSynchronize");
}

API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  *milliseconds = 0.1f;
  return cudaSuccess;
}

// Captures and graphs

API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, thread_mode);
  return cudaSuccess;
}

API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  Lock lock(mutex);
  count("cudaStreamBeginCapture");
  Stream* on = stream_of(stream);
  if (on == &default_stream || on->capture) return refuse(cudaErrorStreamCaptureUnsupported, "cudaStreamBeginCapture");
  *on = {};
  on->capture = ++captures;
  on->graph = new Graph;
  on->mode = mode;
  on->thread = std::this_thread::get_id();
  return cudaSuccess;
}

API cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* found) {
  Lock lock(mutex);
  Stream* on = stream_of(stream);
  if (!on->capture) return refuse(cudaErrorIllegalState, "cudaStreamEndCapture");
  Graph* graph = on->graph;
  bool is_broken = false, is_joined = true;
  int capture = on->capture;
  for (Stream* one : streams) {
    if (one->capture != capture) continue;
    is_broken |= one->is_broken;
    is_joined &= one == on || one->joined == one->work;
    *one = {};
  }
  *found = nullptr;
  if (is_broken) return refuse(cudaErrorStreamCaptureInvalidated, "cudaStreamEndCapture");
  if (!is_joined) return refuse(cudaErrorStreamCaptureUnjoined, "cudaStreamEndCapture");
  counts["captured nodes"] += graph->nodes;
  *found = reinterpret_cast<cudaGraph_t>(graph);
  return cudaSuccess;
}

API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  Lock lock(mutex);
  Stream* on = stream_of(stream);
  *status = on->is_broken ? cudaStreamCaptureStatusInvalidated
            : on->capture ? cudaStreamCaptureStatusActive
                          : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

API cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                            cudaGraph_t* graph, const cudaGraphNode_t** nodes, size_t* number) {
  if (id) *id = stream_of(stream)->capture;
  if (graph) *graph = reinterpret_cast<cudaGraph_t>(stream_of(stream)->graph);
  if (nodes) *nodes = nullptr;
  if (number) *number = 0;
  return cudaStreamIsCapturing(stream, status);
}

API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* number) {
  *number = reinterpret_cast<Graph*>(graph)->nodes;
  return cudaSuccess;
}

API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) {
  Lock lock(mutex);
  graphs++;
  *made = reinterpret_cast<cudaGraphExec_t>(graph);
  return cudaSuccess;
}

API cudaError_t cudaGraphInstantiate(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(made, graph, flags);
}

API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) {
  Lock lock(mutex);
  graphs--;
  return cudaSuccess;
}

API cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) {
  count("cudaGraphLaunch");
  return cudaSuccess;
}

// Calls that change nothing here

API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
API cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
API cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
API cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
API cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
