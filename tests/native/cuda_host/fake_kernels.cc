// The kernels for one T and W on the CPU, as a library that the fake driver loads: what a cubin is to the real one.

#include "../kernel_on_cpu.h"
// After it:
#include "../../../xla_ffi/cuda/kernels.cu"

#include <cstring>

namespace {

template <typename Value>
Value& As(void* parameter) {
  return *static_cast<Value*>(parameter);
}

}  // namespace

// Block after block, each of one thread: blocks only wait for the same block of other workers, which have threads of
// their own. Returns whether there is such a kernel.
extern "C" __attribute__((visibility("default"))) bool fake_run_kernel(const char* name, unsigned int num_blocks,
                                                                       void** p) {
  const auto is = [name](const char* other) { return std::strcmp(name, other) == 0; };
  blockDim.x = 1;
  threadIdx.x = 0;
  gridDim.x = num_blocks;
  for (blockIdx.x = 0; blockIdx.x < num_blocks; ++blockIdx.x) {
    if (is("skr_first")) {
      skr_first(As<Collective>(p[0]), As<Chunk>(p[1]), As<W*>(p[2]));
    } else if (is("skr_add")) {
      skr_add(As<Collective>(p[0]), As<Chunk>(p[1]), As<int>(p[2]), As<const W*>(p[3]), As<W*>(p[4]));
    } else if (is("skr_finish_own")) {
      skr_finish_own(As<Collective>(p[0]), As<Chunk>(p[1]), As<W*>(p[2]));
    } else if (is("skr_place")) {
      skr_place(As<Collective>(p[0]), As<const W*>(p[1]));
    } else if (is("skr_ring")) {
      skr_ring(As<Collective>(p[0]), As<Window>(p[1]));
    } else if (is("skr_direct")) {
      skr_direct(As<Collective>(p[0]), As<Window>(p[1]));
    } else {
      return false;
    }
  }
  return true;
}

// How many parameters, and of which sizes: the fake driver copies them, as the real one does.
extern "C" __attribute__((visibility("default"))) int fake_parameter_sizes(const char* name, unsigned long* sizes) {
  const unsigned long c = sizeof(Collective), chunk = sizeof(Chunk), window = sizeof(Window), pointer = sizeof(void*);
  const struct {
    const char* name;
    int count;
    unsigned long sizes[5];
  } kernels[] = {
      {"skr_first", 3, {c, chunk, pointer}}, {"skr_add", 5, {c, chunk, sizeof(int), pointer, pointer}},
      {"skr_finish_own", 3, {c, chunk, pointer}}, {"skr_place", 2, {c, pointer}},
      {"skr_ring", 2, {c, window}}, {"skr_direct", 2, {c, window}},
  };
  for (const auto& kernel : kernels) {
    if (std::strcmp(name, kernel.name) != 0) continue;
    std::memcpy(sizes, kernel.sizes, sizeof(kernel.sizes));
    return kernel.count;
  }
  return -1;
}
