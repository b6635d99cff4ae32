// Runs the CUDA handlers as XLA would, N ranks as N threads, over the fake libraries of fake.cc. Prints what failed;
// the last line is "ok" or "failed".
//
//   driver FOLDER all ALGORITHM T W MOST_WORKERS   correct for all k and odd sizes, back to back
//   driver FOLDER failures                         an error of each library function, on all ranks
//   driver FOLDER alone                            an error on one rank, while a communicator is set up
//   driver FOLDER messages                         what users are told
//   driver FOLDER old                              an NCCL without windows
//   driver FOLDER none                             prints what users are told who have no such library

#include <dlfcn.h>

#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../../../xla_ffi/cuda/all_reduce.h"
#include "../../../xla_ffi/cuda/dynamic_library.h"
#include "../../../xla_ffi/element_types.h"
#include "fake.h"
#include "xla/ffi/api/c_api.h"

extern "C" XLA_FFI_Error* skipreduce_cuda_prepare(XLA_FFI_CallFrame*);
extern "C" XLA_FFI_Error* skipreduce_cuda_execute(XLA_FFI_CallFrame*);
extern "C" long long skipreduce_cuda_scratch_bytes(long long, long long, int);
extern "C" long long skipreduce_cuda_probe(char*, long long);

namespace {

using skipreduce::BFloat16;
using skipreduce::Float16;

int num_bad = 0;

void Expect(bool good, const std::string& what) {
  if (good) return;
  if (++num_bad <= 10) std::printf("wrong: %s\n", what.c_str());
}

void ExpectHas(const std::string& text, const std::string& part, const std::string& where) {
  Expect(text.find(part) != std::string::npos, where + ": \"" + text + "\" has no \"" + part + "\"");
}

// ---- The fake library ----

void* fake = nullptr;

template <typename Function>
Function Fake(const char* name) {
  return reinterpret_cast<Function>(dlsym(fake, name));
}
void Configure(const FakeSettings& settings) { Fake<FakeConfigure>("fake_configure")(&settings); }
long long Count(const char* name) { return Fake<FakeCount>("fake_count")(name); }
long long Leaks() { return Fake<FakeLeaks>("fake_leaks")(); }

// ---- The fake XLA ----

// Structs of collectives_c_api.h, written down a second time, from the header.
struct Id {
  int64_t type;
  int32_t major, minor;
};
struct Extension {
  size_t struct_size;
  Id id;
  const void* next;
  void* state;
  XLA_FFI_Error* (*request)(const Extension*, struct Arguments*);
  XLA_FFI_Error* (*get)(const Extension*, struct Arguments*);
};
struct ReplicaGroup {
  const int64_t* ids;
  size_t size;
};
struct Arguments {
  size_t struct_size;
  void* extension_start;
  int mode;
  const ReplicaGroup* groups;
  size_t num_groups;
  int64_t communication_id;
  void* communicator;
};
struct FindArguments {
  size_t struct_size;
  void* extension_start;
  void* context;
  int64_t type;
  const void* extension;
};

// What stands for XLA's context of a call: which device, and what it has.
struct Call {
  CUstream_st* stream = nullptr;
  int64_t device = 0;
  void* group = nullptr;       // the fake's, of N ranks
  ncclComm* comm = nullptr;
  bool has_extension = true;
  int requested = 0;
  Extension extension{};
};

XLA_FFI_Error* MakeError(const std::string& message) {
  return reinterpret_cast<XLA_FFI_Error*>(new std::string(message));
}

XLA_FFI_Error* Request(const Extension* self, Arguments* args) {
  auto* call = static_cast<Call*>(self->state);
  Expect(args->struct_size == 48 && args->mode == 3 && args->communication_id == 0, "the request of a communicator");
  ++call->requested;
  return nullptr;
}

// As XLA does: the rank is the position in the group that the device is in.
XLA_FFI_Error* Get(const Extension* self, Arguments* args) {
  auto* call = static_cast<Call*>(self->state);
  Expect(args->struct_size == 56 && args->mode == 3 && args->communication_id == 0, "the getting of a communicator");
  if (call->requested == 0) return MakeError("not requested");
  for (size_t g = 0; g < args->num_groups; ++g) {
    for (size_t rank = 0; rank < args->groups[g].size; ++rank) {
      if (args->groups[g].ids[rank] != call->device) continue;
      if (call->comm == nullptr) call->comm = Fake<FakeComm>("fake_comm")(call->group, static_cast<int>(rank));
      args->communicator = call->comm;
      return nullptr;
    }
  }
  return MakeError("this device is in no group");
}

XLA_FFI_Error* Find(FindArguments* args) {
  auto* call = static_cast<Call*>(args->context);
  Expect(args->struct_size == 40 && args->type == 129, "the search for the extension");
  call->extension = {sizeof(Extension), {129, 0, 2}, nullptr, call, Request, Get};
  args->extension = call->has_extension ? &call->extension : nullptr;
  return nullptr;
}

XLA_FFI_Error* CreateError(XLA_FFI_Error_Create_Args* args) { return MakeError(args->message); }
void GetMessage(void* raw) {
  struct {
    size_t struct_size;
    void* extension_start;
    std::string* error;
    const char* message;
  } args;
  std::memcpy(&args, raw, sizeof(args));
  args.message = args.error->c_str();
  std::memcpy(raw, &args, sizeof(args));
}
void DestroyError(XLA_FFI_Error_Destroy_Args* args) { delete reinterpret_cast<std::string*>(args->error); }
XLA_FFI_Error* GetStream(XLA_FFI_Stream_Get_Args* args) {
  args->stream = reinterpret_cast<Call*>(args->ctx)->stream;
  return nullptr;
}

// XLA_FFI_Api, of API 0.3 or 0.4: the latter ends behind the function that finds extensions.
std::vector<char> MakeApi(bool with_extensions) {
  std::vector<char> bytes(256);
  auto* api = reinterpret_cast<XLA_FFI_Api*>(bytes.data());
  api->struct_size = with_extensions ? 200 : 192;
  api->api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, 0, with_extensions ? 4 : 3};
  api->XLA_FFI_Error_Create = CreateError;
  api->XLA_FFI_Error_Destroy = DestroyError;
  api->XLA_FFI_Stream_Get = GetStream;
  void (*get_message)(void*) = GetMessage;  // its name changed after API 0.3
  std::memcpy(bytes.data() + offsetof(XLA_FFI_Api, XLA_FFI_Error_Create) + sizeof(void*), &get_message,
              sizeof(get_message));
  XLA_FFI_Error* (*find)(FindArguments*) = Find;
  if (with_extensions) std::memcpy(bytes.data() + 192, &find, sizeof(find));
  return bytes;
}

const XLA_FFI_Api* Api(bool with_extensions) {
  static const std::vector<char> kWith = MakeApi(true);
  static const std::vector<char> kWithout = MakeApi(false);
  return reinterpret_cast<const XLA_FFI_Api*>((with_extensions ? kWith : kWithout).data());
}

// ---- One call ----

struct Parameters {
  int num_workers = 2, num_skipped = 0, shift = 0;
  long long slice_elements = 5;
  int type = 0, wire = 0;  // codes of Element
  long long divisor = 0, time_limit_ms = 60000;
  std::vector<int64_t> groups;  // empty: one group, in order
  XLA_FFI_DataType block_dtype = XLA_FFI_DataType_INVALID;  // INVALID: that of `type`
  int num_operands = 2;
  long long scratch_missing = 0;
  bool api_with_extensions = true;
};

XLA_FFI_DataType DataType(int type) {
  return type == 0 ? XLA_FFI_DataType_F32 : type == 1 ? XLA_FFI_DataType_BF16 : XLA_FFI_DataType_F16;
}

std::string Invoke(XLA_FFI_Handler* handler, XLA_FFI_ExecutionStage stage, Call* call, const Parameters& p, void* block,
                   void* out, int* shift, void* scratch) {
  int64_t block_dims[] = {p.num_workers, p.slice_elements};
  int64_t scratch_dims[] = {skipreduce_cuda_scratch_bytes(p.num_workers, p.slice_elements, p.wire) - p.scratch_missing};
  const XLA_FFI_DataType dtype = p.block_dtype == XLA_FFI_DataType_INVALID ? DataType(p.type) : p.block_dtype;
  XLA_FFI_Buffer buffers[] = {{XLA_FFI_Buffer_STRUCT_SIZE, nullptr, dtype, block, 2, block_dims},
                              {XLA_FFI_Buffer_STRUCT_SIZE, nullptr, XLA_FFI_DataType_S32, shift, 0, nullptr},
                              {XLA_FFI_Buffer_STRUCT_SIZE, nullptr, dtype, out, 2, block_dims},
                              {XLA_FFI_Buffer_STRUCT_SIZE, nullptr, XLA_FFI_DataType_U8, scratch, 1, scratch_dims}};
  XLA_FFI_ArgType arg_types[] = {XLA_FFI_ArgType_BUFFER, XLA_FFI_ArgType_BUFFER};
  XLA_FFI_RetType ret_types[] = {XLA_FFI_RetType_BUFFER, XLA_FFI_RetType_BUFFER};
  void* args[] = {&buffers[0], &buffers[1]};
  void* rets[] = {&buffers[2], &buffers[3]};

  std::vector<int64_t> ids = p.groups;
  for (int i = 0; ids.size() < static_cast<size_t>(p.num_workers) && p.groups.empty(); ++i) ids.push_back(i);
  int64_t values[] = {p.divisor, p.num_skipped, p.num_workers, p.time_limit_ms, p.wire == p.type ? -1 : p.wire};
  const char* names[] = {"divisor", "num_skipped", "num_workers", "replica_groups", "time_limit_ms", "wire_type"};
  XLA_FFI_Scalar scalars[5];
  for (int i = 0; i < 5; ++i) scalars[i] = {XLA_FFI_DataType_S64, &values[i]};
  XLA_FFI_Array array = {XLA_FFI_DataType_S64, ids.size(), ids.data()};
  void* attrs[] = {&scalars[0], &scalars[1], &scalars[2], &array, &scalars[3], &scalars[4]};
  XLA_FFI_AttrType attr_types[6];
  XLA_FFI_ByteSpan spans[6];
  XLA_FFI_ByteSpan* span_pointers[6];
  for (int i = 0; i < 6; ++i) {
    attr_types[i] = attrs[i] == &array ? XLA_FFI_AttrType_ARRAY : XLA_FFI_AttrType_SCALAR;
    spans[i] = {names[i], std::strlen(names[i])};
    span_pointers[i] = &spans[i];
  }
  XLA_FFI_CallFrame frame{};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = Api(p.api_with_extensions);
  frame.ctx = reinterpret_cast<XLA_FFI_ExecutionContext*>(call);
  frame.stage = stage;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, p.num_operands, arg_types, args};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, 2, ret_types, rets};
  frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr, 6, attr_types, span_pointers, attrs};
  XLA_FFI_Error* error = handler(&frame);
  if (error == nullptr) return "";
  auto* text = reinterpret_cast<std::string*>(error);
  const std::string message = *text;
  delete text;
  return message;
}

// Both stages. Returns the error, or "".
std::string Run(Call* call, const Parameters& p, void* block, void* out, int* shift, void* scratch) {
  const std::string error =
      Invoke(skipreduce_cuda_prepare, XLA_FFI_ExecutionStage_PREPARE, call, p, block, out, shift, scratch);
  if (!error.empty()) return error;
  return Invoke(skipreduce_cuda_execute, XLA_FFI_ExecutionStage_EXECUTE, call, p, block, out, shift, scratch);
}

// ---- Numbers ----

float ToFloat(int type, const char* from) {
  if (type == 0) {
    float value;
    std::memcpy(&value, from, sizeof(value));
    return value;
  }
  unsigned short bits;
  std::memcpy(&bits, from, sizeof(bits));
  return type == 1 ? BFloat16{bits}.ToFloat() : Float16{bits}.ToFloat();
}
void FromFloat(int type, float value, char* to) {
  if (type == 0) {
    std::memcpy(to, &value, sizeof(value));
    return;
  }
  const unsigned short bits = type == 1 ? BFloat16::FromFloat(value).bits : Float16::FromFloat(value).bits;
  std::memcpy(to, &bits, sizeof(bits));
}
float Rounded(int type, float value) {
  char bytes[4];
  FromFloat(type, value, bytes);
  return ToFloat(type, bytes);
}
int Bytes(int type) { return type == 0 ? 4 : 2; }

// One all-reduce: what each rank takes and gives.
struct Arrays {
  Parameters p;
  std::vector<std::vector<char>> block, out, scratch;
  std::vector<int> shift;

  Arrays(const Parameters& parameters, std::mt19937& random) : p(parameters), shift(p.num_workers, p.shift) {
    const long long size = p.num_workers * p.slice_elements;
    for (int rank = 0; rank < p.num_workers; ++rank) {
      block.emplace_back(size * Bytes(p.type));
      for (long long i = 0; i < size; ++i) {
        FromFloat(p.type, static_cast<float>(static_cast<int>(random() % 2001) - 1000) / 64.0f,
                  block.back().data() + i * Bytes(p.type));
      }
      out.emplace_back(size * Bytes(p.type), char(0x77));
      scratch.emplace_back(skipreduce_cuda_scratch_bytes(p.num_workers, p.slice_elements, p.wire), char(0x77));
    }
  }

  // Slice j goes from worker to worker, j+k .. j+N-1: the workers j .. j+k-1 are left out. c renames slice j to j + c.
  float Expected(long long i) const {
    const int n = p.num_workers;
    const long long renamed = i / p.slice_elements - static_cast<long long>(p.shift);
    const int slice = static_cast<int>(((renamed % n) + n) % n);
    float sum = 0;
    for (int worker = slice + p.num_skipped; worker <= slice + n - 1; ++worker) {
      const float own = ToFloat(p.type, block[worker % n].data() + i * Bytes(p.type));
      sum = worker == slice + p.num_skipped ? own : Rounded(p.wire, Rounded(p.type, sum)) + own;
    }
    if (p.divisor != 0) sum *= 1.0f / static_cast<float>(p.divisor);
    return Rounded(p.wire, Rounded(p.type, sum));
  }

  void Check(const std::string& where) const {
    const long long size = p.num_workers * p.slice_elements;
    std::vector<long long> wrong(p.num_workers);
    for (long long i = 0; i < size; ++i) {
      const float expected = Expected(i);
      for (int rank = 0; rank < p.num_workers; ++rank) {
        wrong[rank] += ToFloat(p.type, out[rank].data() + i * Bytes(p.type)) != expected;
      }
    }
    for (int rank = 0; rank < p.num_workers; ++rank) {
      Expect(wrong[rank] == 0, where + ": rank " + std::to_string(rank) + " has " + std::to_string(wrong[rank]) +
                                   " of " + std::to_string(size) + " wrong, N=" + std::to_string(p.num_workers) +
                                   " k=" + std::to_string(p.num_skipped) + " c=" + std::to_string(p.shift) + " S=" +
                                   std::to_string(p.slice_elements));
    }
  }
};

// N ranks that make calls, each in a thread and with a stream of its own. The device of rank r is device_of[r].
class Ranks {
 public:
  explicit Ranks(int size, std::vector<int64_t> device_of = {}) : calls_(size) {
    void* group = Fake<FakeNewGroup>("fake_new_group")(size);
    for (int rank = 0; rank < size; ++rank) {
      calls_[rank].device = device_of.empty() ? rank : device_of[rank];
      calls_[rank].group = group;
      calls_[rank].stream = Fake<FakeNewStream>("fake_new_stream")(rank);
    }
  }
  ~Ranks() {
    skipreduce::cuda::ReleaseAll();
    for (Call& call : calls_) Fake<FakeDeleteStream>("fake_delete_stream")(call.stream);
  }

  // All ranks make all calls, nothing else keeps them together. The first error of each rank, which ends its calls.
  std::vector<std::string> RunAll(std::vector<Arrays>& all) {
    std::vector<std::string> errors(calls_.size());
    std::vector<std::thread> threads;
    for (size_t rank = 0; rank < calls_.size(); ++rank) {
      threads.emplace_back([&, rank] {
        Fake<FakeSetRank>("fake_set_rank")(static_cast<int>(rank));
        for (Arrays& a : all) {
          if (!errors[rank].empty()) break;
          errors[rank] = Run(&calls_[rank], a.p, a.block[rank].data(), a.out[rank].data(), &a.shift[rank],
                             a.scratch[rank].data());
        }
        Fake<FakeSynchronize>("fake_synchronize")(calls_[rank].stream);
      });
    }
    for (std::thread& thread : threads) thread.join();
    return errors;
  }

  Call& call(int rank) { return calls_[rank]; }

 private:
  std::vector<Call> calls_;
};

void CheckAll(const char* algorithm, int type, int wire, int most_workers) {
  setenv("SKIPREDUCE_DIRECT_MIB", "16", 1);
  setenv("SKIPREDUCE_ALGORITHM", algorithm, 1);
  std::mt19937 random(7);
  for (int variant = 0; variant < 2; ++variant) {
    FakeSettings settings;
    settings.slow = variant == 1;
    settings.in_progress = variant == 1;
    for (int n = 1; n <= most_workers; ++n) {
      if (n == 1 && std::strcmp(algorithm, "host") != 0 && std::strcmp(algorithm, "auto") != 0) continue;
      Configure(settings);
      std::vector<int64_t> device_of;
      for (int rank = 0; rank < n; ++rank) device_of.push_back((3 * rank + 1) % 7);  // in no order
      Ranks ranks(n, device_of);
      std::vector<Arrays> all;
      for (int k = 0; k < n; ++k) {
        for (long long size : {0LL, 1LL, 7LL, 64LL, 1001LL}) {
          Parameters p;
          p.num_workers = n;
          p.num_skipped = k;
          p.shift = static_cast<int>(random() % 4 == 0 ? INT_MIN + 5 : random() % 11) - 5;
          p.slice_elements = size;
          p.type = type;
          p.wire = wire;
          p.divisor = size % 2 == 0 ? 0 : k == 1 ? n - k : n;
          p.groups = device_of;
          all.emplace_back(p, random);
        }
      }
      if (variant == 0 || n == 3) {
        // So large that slices are cut in several chunks.
        Parameters p = all.back().p;
        p.num_skipped = 0;
        p.slice_elements = (5 << 20) / 2 / Bytes(wire) + 13;
        all.emplace_back(p, random);
      }
      const auto errors = ranks.RunAll(all);
      for (const std::string& error : errors) Expect(error.empty(), error);
      for (const Arrays& a : all) a.Check(algorithm);
      if (n > 1) {
        const bool host = std::strcmp(algorithm, "host") == 0;
        Expect((Count("ncclSend") > 0) == host && (Count("ncclMemAlloc") > 0) == !host, "the algorithm that ran");
        const long long launches = n * (static_cast<long long>(all.size()) - n);  // none where S = 0
        if (!host) Expect(Count("skr_ring") + Count("skr_direct") == launches, "one kernel");
      }
    }
    Expect(Leaks() == 0, "something is left over");
  }
}

// The functions of the libraries that a call of `algorithm` uses, first call and second.
void InjectFailures(const char* algorithm, const std::vector<const char*>& names, bool is_fatal) {
  setenv("SKIPREDUCE_ALGORITHM", algorithm, 1);
  std::mt19937 random(3);
  for (const char* name : names) {
    for (int call : {1, 2}) {
      FakeSettings settings;
      settings.failing = name;
      settings.failing_call = call;
      Configure(settings);
      const std::string where = std::string(algorithm) + ", call " + std::to_string(call) + " of " + name;
      {
        Ranks ranks(2);
        Parameters p;
        p.slice_elements = (2 << 20) / 4 + 1;  // in chunks
        std::vector<Arrays> all = {{p, random}};
        const auto errors = ranks.RunAll(all);
        const long long calls = Count(name);
        if (call == 1) Expect(calls > 0, where + " was never made");
        for (const std::string& error : errors) {
          if (calls < 2 * call) continue;  // it is not called twice by each rank
          Expect(!error.empty() == is_fatal, where + (is_fatal ? " gave no error" : " gave an error: ") + error);
          if (is_fatal) ExpectHas(error, name, where);
        }
        // What was kept is as good as new: the same ranks go on.
        Configure(FakeSettings{});
        const auto again = ranks.RunAll(all);
        for (const std::string& error : again) {
          // Who has agreed to go without a window stays without.
          if (!error.empty()) ExpectHas(error, "SKIPREDUCE_ALGORITHM=ring: ", where + ", then");
        }
        if (again[0].empty()) all[0].Check(where);
      }
      Expect(Leaks() == 0, where + " leaves something over");
    }
  }
}

void Failures() {
  InjectFailures("host",
                 {"cuStreamGetCtx", "cuCtxPushCurrent_v2", "cuStreamIsCapturing", "ncclCommCount", "ncclCommUserRank",
                  "cuCtxGetDevice", "cuDeviceGetAttribute", "cuStreamCreate", "cuEventCreate", "cuMemcpyHtoDAsync_v2",
                  "ncclAllReduce", "cuMemcpyDtoHAsync_v2", "cuStreamSynchronize", "cuDriverGetVersion",
                  "nvrtcGetNumSupportedArchs", "nvrtcGetSupportedArchs", "nvrtcCreateProgram", "nvrtcCompileProgram",
                  "nvrtcGetCUBINSize", "nvrtcGetCUBIN", "cuModuleLoadData", "cuModuleGetFunction"},
                 true);
  InjectFailures("host", {"cuLaunchKernel", "cuEventRecord", "cuStreamWaitEvent", "ncclGroupStart", "ncclSend",
                          "ncclRecv", "ncclGroupEnd", "ncclAllGather"},
                 true);
  InjectFailures("ring", {"cuMemHostAlloc", "ncclMemAlloc", "cuMemsetD8Async", "ncclCommWindowRegister",
                          "ncclGetLsaDevicePointer", "cuLaunchKernel"},
                 true);
  InjectFailures("direct", {"cuLaunchKernel"}, true);
  // Without a wish, the ring over the host API takes over.
  InjectFailures("auto", {"cuMemHostAlloc", "ncclMemAlloc", "cuMemsetD8Async", "ncclCommWindowRegister",
                          "ncclGetLsaDevicePointer"},
                 false);
}

// One rank fails before it has agreed with the others: they are told, and do not wait.
void FailAlone() {
  std::mt19937 random(3);
  for (const char* name : {"ncclCommCount", "cuDeviceGetAttribute", "cuStreamCreate", "cuEventCreate"}) {
    setenv("SKIPREDUCE_ALGORITHM", "auto", 1);
    FakeSettings settings;
    settings.failing = name;
    settings.failing_rank = 1;
    Configure(settings);
    {
      Ranks ranks(3);
      Parameters p;
      p.num_workers = 3;
      std::vector<Arrays> all = {{p, random}};
      auto errors = ranks.RunAll(all);
      ExpectHas(errors[0], "another worker could not be set up", name);
      ExpectHas(errors[1], name, name);
      ExpectHas(errors[2], "another worker could not be set up", name);
      errors = ranks.RunAll(all);
      for (const std::string& error : errors) Expect(error.empty(), std::string(name) + ", then: " + error);
      all[0].Check(name);
    }
    Expect(Leaks() == 0, std::string(name) + " leaves something over");
  }
  for (const char* name : {"ncclMemAlloc", "cuMemHostAlloc", "cuMemsetD8Async", "ncclGetLsaDevicePointer"}) {
    for (const char* algorithm : {"auto", "ring"}) {
      setenv("SKIPREDUCE_ALGORITHM", algorithm, 1);
      FakeSettings settings;
      settings.failing = name;
      settings.failing_rank = 1;
      Configure(settings);
      {
        Ranks ranks(3);
        Parameters p;
        p.num_workers = 3;
        std::vector<Arrays> all = {{p, random}};
        const auto errors = ranks.RunAll(all);
        if (std::strcmp(algorithm, "auto") == 0) {
          for (const std::string& error : errors) Expect(error.empty(), error);
          all[0].Check(name);
          Expect(Count("ncclSend") > 0, "not all went to the ring over the host API");
        } else {
          ExpectHas(errors[0], "SKIPREDUCE_ALGORITHM=ring: another worker cannot", name);
          ExpectHas(errors[1], name, name);
          ExpectHas(errors[2], "SKIPREDUCE_ALGORITHM=ring: another worker cannot", name);
        }
      }
      Expect(Leaks() == 0, std::string(name) + " leaves something over");
    }
  }
}

// The error of one call of two ranks, which have to have the same.
std::string ErrorOf(const Parameters& p, const FakeSettings& settings = {}, bool has_extension = true) {
  std::mt19937 random(5);
  Configure(settings);
  Ranks ranks(p.num_workers);
  for (int rank = 0; rank < p.num_workers; ++rank) ranks.call(rank).has_extension = has_extension;
  std::vector<Arrays> all = {{p, random}};
  const auto errors = ranks.RunAll(all);
  for (const std::string& error : errors) Expect(error == errors[0], "\"" + error + "\" is not \"" + errors[0] + "\"");
  return errors[0];
}

void Messages() {
  setenv("SKIPREDUCE_ALGORITHM", "auto", 1);
  const Parameters good;
  const char* const no_extension = "FFI extension for collectives, in jaxlib and the CUDA plugin since 0.11.2";
  ExpectHas(ErrorOf(good, {}, false), no_extension, "none");
  Parameters p = good;
  p.api_with_extensions = false;
  ExpectHas(ErrorOf(p), no_extension, "API 0.3");
  p = good;
  p.block_dtype = XLA_FFI_DataType_S32;
  ExpectHas(ErrorOf(p), "dtype has the number 4 (xla.PrimitiveType): expected float32, bfloat16 or float16", "dtype");
  p = good;
  p.num_operands = 1;
  ExpectHas(ErrorOf(p), "Wrong number of arguments: expected 2 but got 1", "operands");
  p = good;
  p.scratch_missing = 1;
  ExpectHas(ErrorOf(p), "scratch, has 255 bytes: expected 256", "scratch");
  p = good;
  p.num_skipped = 2;
  ExpectHas(ErrorOf(p), "num_skipped=2: expected 0 to num_workers-1", "k");
  p = good;
  p.type = 1;
  p.wire = 2;
  ExpectHas(ErrorOf(p), "wire_type=2: expected -1", "wire");
  p = good;
  p.groups = {0, 1, 2};
  ExpectHas(ErrorOf(p), "replica_groups has 3 ids: expected a multiple of num_workers=2", "groups");
  p = good;
  p.groups = {4, 5};
  ExpectHas(ErrorOf(p), "XLA's communicator: this device is in no group", "groups");
  p = good;
  p.time_limit_ms = 0;
  ExpectHas(ErrorOf(p), "time_limit_ms=0", "time limit");

  setenv("SKIPREDUCE_ALGORITHM", "best", 1);
  ExpectHas(ErrorOf(good), "SKIPREDUCE_ALGORITHM=best: expected auto, host, ring or direct", "environment");
  setenv("SKIPREDUCE_ALGORITHM", "direct", 1);
  FakeSettings settings;
  settings.lsa_size = 1;
  ExpectHas(ErrorOf(good, settings), "SKIPREDUCE_ALGORITHM=direct: only 1 of 2 workers reach each other's memory",
            "team");
  setenv("SKIPREDUCE_DIRECT_MIB", "1", 1);
  p = good;
  p.slice_elements = 1 << 20;
  ExpectHas(ErrorOf(p), "the array takes 8388608 bytes, the window has room for 1048576", "window");
  unsetenv("SKIPREDUCE_DIRECT_MIB");

  // A worker that does not come: the kernel of the other gives up, and the next call says so.
  setenv("SKIPREDUCE_ALGORITHM", "ring", 1);
  Configure(FakeSettings{});
  {
    std::mt19937 random(5);
    Ranks ranks(2);
    p = good;
    p.time_limit_ms = 200;
    std::vector<Arrays> together = {{p, random}};
    for (const std::string& error : ranks.RunAll(together)) Expect(error.empty(), error);
    Arrays lonely(p, random);
    const auto call = [&] {
      return Run(&ranks.call(0), p, lonely.block[0].data(), lonely.out[0].data(), &lonely.shift[0],
                 lonely.scratch[0].data());
    };
    Expect(call().empty(), "the call that waits");
    Fake<FakeSynchronize>("fake_synchronize")(ranks.call(0).stream);
    const float value = ToFloat(0, lonely.out[0].data());
    Expect(value != value, "no NaN where a worker did not come");
    ExpectHas(call(), "a worker did not come within the time limit", "time limit");
  }
  Expect(Leaks() == 0, "something is left over");
}

// In a process of its own: the version is read once.
void OldNccl() {
  FakeSettings settings;
  settings.nccl_version = 22809;
  setenv("SKIPREDUCE_ALGORITHM", "ring", 1);
  ExpectHas(ErrorOf({}, settings), "SKIPREDUCE_ALGORITHM=ring: NCCL 2.28.9 is older than 2.29.2", "version");
  setenv("SKIPREDUCE_ALGORITHM", "auto", 1);
  Expect(ErrorOf({}, settings).empty(), "an old NCCL with the ring over the host API");
  char json[4096];
  Expect(skipreduce_cuda_probe(json, sizeof(json)) < 4096, "the length of the probe");
  ExpectHas(json, "\"version\": \"2.28.9\", \"no_windows\": \"NCCL 2.28.9 is older than 2.29.2\"", "probe");
  ExpectHas(json, "\"version\": \"13.0\"", "probe");
}

}  // namespace

int main(int num_arguments, char** arguments) {
  if (num_arguments < 3) return 2;
  const std::string folder = arguments[1];
  const std::string what = arguments[2];
  skipreduce::cuda::SetLibraryFolders(folder);
  fake = dlopen((folder + "/libcuda.so.1").c_str(), RTLD_NOW | RTLD_LOCAL);
  if (what == "none") {
    // No library of NVIDIA's anywhere: FOLDER is empty.
    Call call;
    call.comm = reinterpret_cast<ncclComm*>(&call);
    char memory[4096];
    int shift = 0;
    const std::string error = Run(&call, {}, memory, memory, &shift, memory);
    std::printf("%s\n", error.c_str());
    return 0;
  }
  if (fake == nullptr) return 3;
  if (what == "all") {
    CheckAll(arguments[3], std::atoi(arguments[4]), std::atoi(arguments[5]), std::atoi(arguments[6]));
  } else if (what == "failures") {
    Failures();
  } else if (what == "alone") {
    FailAlone();
  } else if (what == "messages") {
    Messages();
  } else if (what == "old") {
    OldNccl();
  }
  std::printf("%s\n", num_bad == 0 ? "ok" : "failed");
  return num_bad != 0;
}
