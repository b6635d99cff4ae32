// A fake libcuda, libnvrtc and libnccl. Streams are threads that do one operation after the other, events order them,
// as on a device: what the code under test forgets to order is out of order, and ThreadSanitizer sees it. Kernels
// really run, from libraries of fake_kernels.cc beside this one. NCCL moves bytes between the streams of N ranks of one
// process.

#include "fake.h"

#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

FakeSettings settings;
std::string failing;
std::mutex mutex;  // of what follows
std::map<std::string, long long> counts;
std::map<int, int> failing_calls;  // by rank
std::multiset<std::string> alive;
thread_local int this_rank = -1;
thread_local std::vector<void*> contexts;

bool Fails(const char* name) {
  const std::lock_guard lock(mutex);
  ++counts[name];
  if (failing != name || (settings.failing_rank >= 0 && settings.failing_rank != this_rank)) return false;
  return ++failing_calls[this_rank] == settings.failing_call;
}

void Made(const char* what) {
  const std::lock_guard lock(mutex);
  alive.insert(what);
}
void Gone(const char* what) {
  const std::lock_guard lock(mutex);
  const auto found = alive.find(what);
  if (found == alive.end()) std::abort();  // given back twice
  alive.erase(found);
}

void Shake() {
  if (settings.slow) usleep(rand() % 300);
}

}  // namespace

struct CUstream_st {
  explicit CUstream_st(void* context) : context(context), thread([this] { Run(); }) {}
  ~CUstream_st() {
    Enqueue(nullptr);
    thread.join();
  }

  void Enqueue(std::function<void()> operation) {
    const std::lock_guard lock(stream_mutex);
    queue.push_back(std::move(operation));
    ++enqueued;
    changed.notify_all();
  }

  void Synchronize() {
    std::unique_lock lock(stream_mutex);
    changed.wait(lock, [this, until = enqueued] { return done >= until; });
  }

  void Run() {
    for (;;) {
      std::function<void()> operation;
      {
        std::unique_lock lock(stream_mutex);
        changed.wait(lock, [this] { return !queue.empty(); });
        operation = std::move(queue.front());
        queue.pop_front();
      }
      if (!operation) return;
      Shake();
      operation();
      const std::lock_guard lock(stream_mutex);
      ++done;
      changed.notify_all();
    }
  }

  void* const context;
  std::mutex stream_mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> queue;
  long long enqueued = 0;
  long long done = 0;
  std::thread thread;  // last: it uses all of the above
};

struct State {
  std::mutex event_mutex;
  std::condition_variable changed;
  long long recorded = 0;
  long long completed = 0;
};

struct CUevent_st {
  std::shared_ptr<State> state = std::make_shared<State>();
};

struct CUmod_st {
  void* library;
  std::vector<struct CUfunc_st*> functions;
};

struct CUfunc_st {
  std::string name;
  bool (*run)(const char*, unsigned, void**);
  int (*sizes)(const char*, unsigned long*);
};

using Stream = CUstream_st*;

// ---- libcuda ----

EXPORT int cuGetErrorName(int, const char** name) { return *name = "CUDA_ERROR_FAKE", 0; }
EXPORT int cuGetErrorString(int, const char** text) { return *text = "this was injected", 0; }

#define FAIL_IF_ASKED(name) \
  if (Fails(#name)) return 999

EXPORT int cuDriverGetVersion(int* version) {
  FAIL_IF_ASKED(cuDriverGetVersion);
  *version = 13000;
  return 0;
}
EXPORT int cuStreamGetCtx(Stream stream, void** context) {
  FAIL_IF_ASKED(cuStreamGetCtx);
  *context = stream->context;
  return 0;
}
EXPORT int cuCtxPushCurrent_v2(void* context) {
  FAIL_IF_ASKED(cuCtxPushCurrent_v2);
  contexts.push_back(context);
  Made("context");
  return 0;
}
EXPORT int cuCtxPopCurrent_v2(void** context) {
  if (contexts.empty()) std::abort();
  *context = contexts.back();
  contexts.pop_back();
  Gone("context");
  FAIL_IF_ASKED(cuCtxPopCurrent_v2);
  return 0;
}
EXPORT int cuCtxGetDevice(int* device) {
  FAIL_IF_ASKED(cuCtxGetDevice);
  if (contexts.empty()) return 201;
  *device = 0;
  return 0;
}
EXPORT int cuDeviceGetAttribute(int* value, int attribute, int) {
  FAIL_IF_ASKED(cuDeviceGetAttribute);
  *value = attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 16 ? 3 : -1;
  return 0;
}
EXPORT int cuStreamCreate(Stream* stream, unsigned) {
  FAIL_IF_ASKED(cuStreamCreate);
  if (contexts.empty()) return 201;
  *stream = new CUstream_st(contexts.back());
  Made("stream");
  return 0;
}
EXPORT int cuStreamDestroy_v2(Stream stream) {
  Gone("stream");
  delete stream;
  FAIL_IF_ASKED(cuStreamDestroy_v2);
  return 0;
}
EXPORT int cuStreamSynchronize(Stream stream) {
  FAIL_IF_ASKED(cuStreamSynchronize);
  stream->Synchronize();
  return 0;
}
EXPORT int cuStreamIsCapturing(Stream, int* status) {
  FAIL_IF_ASKED(cuStreamIsCapturing);
  *status = 0;
  return 0;
}
EXPORT int cuEventCreate(CUevent_st** event, unsigned) {
  FAIL_IF_ASKED(cuEventCreate);
  *event = new CUevent_st;
  Made("event");
  return 0;
}
EXPORT int cuEventDestroy_v2(CUevent_st* event) {
  Gone("event");
  delete event;
  FAIL_IF_ASKED(cuEventDestroy_v2);
  return 0;
}
EXPORT int cuEventRecord(CUevent_st* event, Stream stream) {
  FAIL_IF_ASKED(cuEventRecord);
  const std::shared_ptr<State> state = event->state;
  long long number;
  {
    const std::lock_guard lock(state->event_mutex);
    number = ++state->recorded;
  }
  stream->Enqueue([state, number] {
    const std::lock_guard lock(state->event_mutex);
    if (state->completed < number) state->completed = number;
    state->changed.notify_all();
  });
  return 0;
}
EXPORT int cuStreamWaitEvent(Stream stream, CUevent_st* event, unsigned) {
  FAIL_IF_ASKED(cuStreamWaitEvent);
  const std::shared_ptr<State> state = event->state;
  long long number;
  {
    const std::lock_guard lock(state->event_mutex);
    number = state->recorded;
  }
  stream->Enqueue([state, number] {
    std::unique_lock lock(state->event_mutex);
    state->changed.wait(lock, [&] { return state->completed >= number; });
  });
  return 0;
}
EXPORT int cuMemHostAlloc(void** pointer, size_t size, unsigned) {
  FAIL_IF_ASKED(cuMemHostAlloc);
  *pointer = std::malloc(size);
  Made("host memory");
  return 0;
}
EXPORT int cuMemFreeHost(void* pointer) {
  Gone("host memory");
  std::free(pointer);
  FAIL_IF_ASKED(cuMemFreeHost);
  return 0;
}
EXPORT int cuMemcpyHtoDAsync_v2(unsigned long long to, const void* from, size_t size, Stream stream) {
  FAIL_IF_ASKED(cuMemcpyHtoDAsync_v2);
  const auto* bytes = static_cast<const char*>(from);  // pageable memory is read at once
  stream->Enqueue([to, data = std::vector<char>(bytes, bytes + size)] {
    std::memcpy(reinterpret_cast<void*>(to), data.data(), data.size());
  });
  return 0;
}
EXPORT int cuMemcpyDtoHAsync_v2(void* to, unsigned long long from, size_t size, Stream stream) {
  FAIL_IF_ASKED(cuMemcpyDtoHAsync_v2);
  stream->Enqueue([=] { std::memcpy(to, reinterpret_cast<void*>(from), size); });
  stream->Synchronize();  // as CUDA does where the host's memory is pageable
  return 0;
}
EXPORT int cuMemsetD8Async(unsigned long long to, unsigned char value, size_t size, Stream stream) {
  FAIL_IF_ASKED(cuMemsetD8Async);
  stream->Enqueue([=] { std::memset(reinterpret_cast<void*>(to), value, size); });
  return 0;
}
EXPORT int cuModuleLoadData(CUmod_st** module, const void* image) {
  FAIL_IF_ASKED(cuModuleLoadData);
  Dl_info self;
  dladdr(reinterpret_cast<void*>(&cuModuleLoadData), &self);
  std::string path = self.dli_fname;
  path = path.substr(0, path.rfind('/') + 1) + static_cast<const char*>(image) + ".so";
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return 209;
  *module = new CUmod_st{library, {}};
  Made("module");
  return 0;
}
EXPORT int cuModuleUnload(CUmod_st* module) {
  Gone("module");
  for (CUfunc_st* function : module->functions) delete function;
  delete module;  // the library stays: threads of ThreadSanitizer's may still know it
  FAIL_IF_ASKED(cuModuleUnload);
  return 0;
}
EXPORT int cuModuleGetFunction(CUfunc_st** function, CUmod_st* module, const char* name) {
  FAIL_IF_ASKED(cuModuleGetFunction);
  *function = new CUfunc_st{name,
                            reinterpret_cast<bool (*)(const char*, unsigned, void**)>(
                                dlsym(module->library, "fake_run_kernel")),
                            reinterpret_cast<int (*)(const char*, unsigned long*)>(
                                dlsym(module->library, "fake_parameter_sizes"))};
  module->functions.push_back(*function);
  unsigned long sizes[5];
  return (*function)->sizes(name, sizes) < 0 ? 500 : 0;
}
EXPORT int cuLaunchKernel(CUfunc_st* function, unsigned grid, unsigned y, unsigned z, unsigned block, unsigned by,
                          unsigned bz, unsigned, Stream stream, void** parameters, void**) {
  FAIL_IF_ASKED(cuLaunchKernel);
  if (grid < 1 || y * z * by * bz != 1 || block % 32 != 0 || block > 1024) return 1;
  {
    const std::lock_guard lock(mutex);
    ++counts[function->name];
  }
  unsigned long sizes[5];
  const int count = function->sizes(function->name.c_str(), sizes);
  std::vector<std::vector<char>> copies;
  for (int i = 0; i < count; ++i) {
    const char* bytes = static_cast<char*>(parameters[i]);
    copies.emplace_back(bytes, bytes + sizes[i]);
  }
  stream->Enqueue([run = function->run, name = function->name, grid, copies = std::move(copies)]() mutable {
    std::vector<void*> pointers;
    for (auto& copy : copies) pointers.push_back(copy.data());
    if (!run(name.c_str(), grid, pointers.data())) std::abort();
  });
  return 0;
}

// ---- libnvrtc ----

struct FakeProgram {
  std::string image;
};

EXPORT const char* nvrtcGetErrorString(int) { return "NVRTC_ERROR_FAKE"; }
EXPORT int nvrtcVersion(int* major, int* minor) { return *major = 13, *minor = 0, 0; }
EXPORT int nvrtcGetNumSupportedArchs(int* count) {
  FAIL_IF_ASKED(nvrtcGetNumSupportedArchs);
  *count = 3;
  return 0;
}
EXPORT int nvrtcGetSupportedArchs(int* architectures) {
  FAIL_IF_ASKED(nvrtcGetSupportedArchs);
  architectures[0] = 80, architectures[1] = 90, architectures[2] = 100;
  return 0;
}
EXPORT int nvrtcCreateProgram(FakeProgram** program, const char*, const char*, int, const char* const*,
                              const char* const*) {
  FAIL_IF_ASKED(nvrtcCreateProgram);
  *program = new FakeProgram;
  Made("program");
  return 0;
}
EXPORT int nvrtcDestroyProgram(FakeProgram** program) {
  Gone("program");
  delete *program;
  FAIL_IF_ASKED(nvrtcDestroyProgram);
  return 0;
}
EXPORT int nvrtcCompileProgram(FakeProgram* program, int count, const char* const* options) {
  FAIL_IF_ASKED(nvrtcCompileProgram);
  program->image = "kernels";
  for (int i = 0; i < count; ++i) {
    const std::string option = options[i];
    if (option.rfind("-DSKIPREDUCE_", 0) == 0) program->image += "_" + option.substr(option.find('=') + 1);
  }
  return 0;
}
EXPORT int nvrtcGetCUBINSize(FakeProgram* program, size_t* size) {
  FAIL_IF_ASKED(nvrtcGetCUBINSize);
  *size = program->image.size() + 1;
  return 0;
}
EXPORT int nvrtcGetCUBIN(FakeProgram* program, char* image) {
  FAIL_IF_ASKED(nvrtcGetCUBIN);
  std::memcpy(image, program->image.c_str(), program->image.size() + 1);
  return 0;
}
EXPORT int nvrtcGetPTXSize(FakeProgram* program, size_t* size) { return nvrtcGetCUBINSize(program, size); }
EXPORT int nvrtcGetPTX(FakeProgram* program, char* image) { return nvrtcGetCUBIN(program, image); }
EXPORT int nvrtcGetProgramLogSize(FakeProgram*, size_t* size) { return *size = sizeof("line 1: a log"), 0; }
EXPORT int nvrtcGetProgramLog(FakeProgram*, char* log) { return std::strcpy(log, "line 1: a log"), 0; }

// ---- libnccl ----

struct Group {
  explicit Group(int size) : size(size), windows(size), sent(size, std::vector<std::deque<std::vector<char>>>(size)) {}

  // What all ranks hand in for collective number `sequence`, once all have.
  std::vector<std::vector<char>> Exchange(long long sequence, int rank, std::vector<char> data) {
    std::unique_lock lock(group_mutex);
    auto& parts = exchanged[sequence];
    parts.resize(size);
    parts[rank] = std::move(data);
    ++arrived[sequence];
    changed.notify_all();
    changed.wait(lock, [&] { return arrived[sequence] >= size; });
    auto all = exchanged[sequence];
    if (++arrived[sequence] == 2 * size) exchanged.erase(sequence);
    return all;
  }

  const int size;
  std::mutex group_mutex;
  std::condition_variable changed;
  std::map<long long, std::vector<std::vector<char>>> exchanged;
  std::map<long long, int> arrived;
  std::vector<void*> windows;
  std::vector<std::vector<std::deque<std::vector<char>>>> sent;  // [from][to]
};

struct ncclComm {
  Group* group;
  int rank;
  long long host_sequence = 0;
  long long sequence = 0;
  std::atomic<int> busy{0};
};

struct FakeWindow {
  Group* group;
};

struct Transfer {
  bool is_send;
  void* buffer;
  size_t size;
  int peer;
  ncclComm* comm;
  Stream stream;
};

namespace {

thread_local int group_depth = 0;
thread_local std::vector<Transfer> pending;
thread_local bool group_failed = false;

// What a call on a communicator returns that does or does not block.
int Begun(ncclComm* comm) {
  if (!settings.in_progress) return 0;
  comm->busy = 3;
  return 7;
}

void Move(const std::vector<Transfer>& transfers) {
  for (const Transfer& t : transfers) {
    if (!t.is_send) continue;
    Group& group = *t.comm->group;
    const char* bytes = static_cast<char*>(t.buffer);
    const std::lock_guard lock(group.group_mutex);
    group.sent[t.comm->rank][t.peer].emplace_back(bytes, bytes + t.size);
    group.changed.notify_all();
  }
  for (const Transfer& t : transfers) {
    if (t.is_send) continue;
    Group& group = *t.comm->group;
    std::unique_lock lock(group.group_mutex);
    auto& queue = group.sent[t.peer][t.comm->rank];
    group.changed.wait(lock, [&] { return !queue.empty(); });
    if (queue.front().size() != t.size) std::abort();  // send and receive do not match
    std::memcpy(t.buffer, queue.front().data(), t.size);
    queue.pop_front();
  }
}

int Add(const Transfer& transfer) {
  if (group_depth == 0) std::abort();  // a send alone would wait for ever
  pending.push_back(transfer);
  return 0;
}

}  // namespace

EXPORT const char* ncclGetErrorString(int) { return "fake NCCL error"; }
EXPORT const char* ncclGetLastError(ncclComm*) { return "the last error"; }
EXPORT int ncclGetVersion(int* version) {
  *version = settings.nccl_version;
  return 0;
}
EXPORT int ncclCommCount(ncclComm* comm, int* count) {
  FAIL_IF_ASKED(ncclCommCount);
  *count = comm->group->size;
  return 0;
}
EXPORT int ncclCommUserRank(ncclComm* comm, int* rank) {
  FAIL_IF_ASKED(ncclCommUserRank);
  *rank = comm->rank;
  return 0;
}
EXPORT int ncclCommGetAsyncError(ncclComm* comm, int* state) {
  FAIL_IF_ASKED(ncclCommGetAsyncError);
  *state = comm->busy > 0 && comm->busy-- > 1 ? 7 : 0;
  return 0;
}
EXPORT int ncclGroupStart() {
  FAIL_IF_ASKED(ncclGroupStart);
  ++group_depth;
  Made("group");
  return 0;
}
EXPORT int ncclGroupEnd() {
  if (group_depth-- == 0) std::abort();
  Gone("group");
  std::vector<Transfer> transfers;
  transfers.swap(pending);
  if (std::exchange(group_failed, false)) return 3;  // as NCCL: nothing of a group in which something failed is done
  FAIL_IF_ASKED(ncclGroupEnd);
  if (transfers.empty()) return 0;
  ncclComm* comm = transfers[0].comm;
  const Stream stream = transfers[0].stream;
  stream->Enqueue([transfers = std::move(transfers)] { Move(transfers); });
  return Begun(comm);
}
EXPORT int ncclSend(const void* buffer, size_t count, int type, int peer, ncclComm* comm, Stream stream) {
  if (Fails("ncclSend")) return group_failed = true, 999;
  return type != 1 ? 4 : Add({true, const_cast<void*>(buffer), count, peer, comm, stream});
}
EXPORT int ncclRecv(void* buffer, size_t count, int type, int peer, ncclComm* comm, Stream stream) {
  if (Fails("ncclRecv")) return group_failed = true, 999;
  return type != 1 ? 4 : Add({false, buffer, count, peer, comm, stream});
}
EXPORT int ncclAllGather(const void* from, void* to, size_t count, int type, ncclComm* comm, Stream stream) {
  FAIL_IF_ASKED(ncclAllGather);
  if (type != 1) return 4;
  stream->Enqueue([=, sequence = comm->sequence++] {
    const char* bytes = static_cast<const char*>(from);
    const auto all = comm->group->Exchange(sequence, comm->rank, {bytes, bytes + count});
    for (int rank = 0; rank < comm->group->size; ++rank) {
      std::memcpy(static_cast<char*>(to) + rank * count, all[rank].data(), count);
    }
  });
  return Begun(comm);
}
EXPORT int ncclAllReduce(const void* from, void* to, size_t count, int type, int operation, ncclComm* comm,
                         Stream stream) {
  FAIL_IF_ASKED(ncclAllReduce);
  if (type != 4 || operation != 3) return 4;
  stream->Enqueue([=, sequence = comm->sequence++] {
    const char* bytes = static_cast<const char*>(from);
    const auto all = comm->group->Exchange(sequence, comm->rank, {bytes, bytes + count * sizeof(long long)});
    auto* least = static_cast<long long*>(to);
    for (size_t i = 0; i < count; ++i) {
      for (size_t rank = 0; rank < all.size(); ++rank) {
        long long value;
        std::memcpy(&value, all[rank].data() + i * sizeof(value), sizeof(value));
        if (rank == 0 || value < least[i]) least[i] = value;
      }
    }
  });
  return Begun(comm);
}
EXPORT int ncclMemAlloc(void** pointer, size_t size) {
  FAIL_IF_ASKED(ncclMemAlloc);
  *pointer = std::aligned_alloc(4096, (size + 4095) / 4096 * 4096);
  std::memset(*pointer, 0xab, size);
  Made("device memory");
  return 0;
}
EXPORT int ncclMemFree(void* pointer) {
  Gone("device memory");
  std::free(pointer);
  FAIL_IF_ASKED(ncclMemFree);
  return 0;
}
EXPORT int ncclCommWindowRegister(ncclComm* comm, void* pointer, size_t, FakeWindow** window, int flags) {
  FAIL_IF_ASKED(ncclCommWindowRegister);
  if (flags != 1) return 4;
  comm->group->windows[comm->rank] = pointer;
  comm->group->Exchange(-1 - comm->host_sequence++, comm->rank, {});  // a barrier of the host threads
  *window = new FakeWindow{comm->group};
  Made("window");
  return Begun(comm);
}
EXPORT int ncclCommWindowDeregister(ncclComm*, FakeWindow* window) {
  Gone("window");
  delete window;
  FAIL_IF_ASKED(ncclCommWindowDeregister);
  return 0;
}
EXPORT int ncclGetLsaDevicePointer(FakeWindow* window, size_t offset, int rank, void** pointer) {
  FAIL_IF_ASKED(ncclGetLsaDevicePointer);
  *pointer = static_cast<char*>(window->group->windows[rank]) + offset;
  return 0;
}

struct FakeTeam {
  int num_ranks, rank, stride;
};
EXPORT FakeTeam ncclTeamLsa(ncclComm* comm) {
  const int size = settings.lsa_size == 0 ? comm->group->size : settings.lsa_size;
  return {size, comm->rank % size, 1};
}

// ---- what the test asks for ----

EXPORT void fake_configure(const FakeSettings* wanted) {
  const std::lock_guard lock(mutex);
  settings = *wanted;
  failing = wanted->failing;
  failing_calls.clear();
  counts.clear();
}
EXPORT void fake_set_rank(int rank) { this_rank = rank; }
EXPORT void* fake_new_group(int size) { return new Group(size); }
EXPORT ncclComm* fake_comm(void* group, int rank) { return new ncclComm{static_cast<Group*>(group), rank}; }
EXPORT Stream fake_new_stream(int rank) { return new CUstream_st(reinterpret_cast<void*>(0x1000L * (rank + 1))); }
EXPORT void fake_synchronize(Stream stream) { stream->Synchronize(); }
EXPORT void fake_delete_stream(Stream stream) { delete stream; }
EXPORT long long fake_count(const char* name) {
  const std::lock_guard lock(mutex);
  return counts[name];
}
EXPORT long long fake_leaks() {
  const std::lock_guard lock(mutex);
  for (const std::string& what : alive) fprintf(stderr, "left over: %s\n", what.c_str());
  return static_cast<long long>(alive.size());
}
