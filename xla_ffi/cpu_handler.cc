// The XLA FFI handler of platform "cpu": an all-reduce with skipping between the devices of one process.
//
// The calls of one collective find each other by three things: the state of the call site, which XLA makes once and all
// devices of an executable share; the number of the execution; and the group of workers. None of them blocks a
// thread of XLA's: a worker that has to wait returns a future, and the last one does the sums.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "completions.h"
#include "cpu_reduce.h"
#include "export.h"
#include "meeting.h"
#include "xla/ffi/api/ffi.h"

namespace skipreduce {
namespace {

namespace ffi = ::xla::ffi;

// What XLA makes once for each place in the program at which it calls the handler.
struct CpuState {
  static ffi::TypeId id;

  int num_workers;
  Divide divide;
  ElementType wire;
  CallSite site;
};

ffi::TypeId CpuState::id = {};

ffi::ErrorOr<std::unique_ptr<CpuState>> Instantiate(std::int64_t num_workers, std::int64_t divide,
                                                    std::int64_t wire_type, std::int64_t time_limit_ms) {
  if (num_workers < 1 || num_workers > 65536 || divide < 0 || divide > 2 || wire_type < -1 || wire_type > 2 ||
      time_limit_ms < 1) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("skipreduce: an attribute of the call is out of range"));
  }
  const int workers = static_cast<int>(num_workers);
  return std::unique_ptr<CpuState>(new CpuState{workers, static_cast<Divide>(divide),
                                                static_cast<ElementType>(wire_type),
                                                CallSite(workers, std::chrono::milliseconds(time_limit_ms))});
}

ElementType TypeOf(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F32:
      return ElementType::kFloat32;
    case ffi::DataType::F64:
      return ElementType::kFloat64;
    case ffi::DataType::BF16:
      return ElementType::kBFloat16;
    case ffi::DataType::F16:
      return ElementType::kFloat16;
    default:
      return ElementType::kNone;
  }
}

// The sums of one collective, done by several threads.
struct Work {
  Work(Reduction reduction, std::vector<Arrival> arrivals)
      : reduction(std::move(reduction)), arrivals(std::move(arrivals)), unfinished(this->reduction.num_pieces()) {}

  Reduction reduction;
  std::vector<Arrival> arrivals;
  std::atomic<std::int64_t> next{0};
  std::atomic<std::int64_t> unfinished;

  // Does pieces until none is left; who finishes the last one tells all workers.
  void Help() {
    for (;;) {
      const std::int64_t piece = next.fetch_add(1, std::memory_order_relaxed);
      if (piece >= reduction.num_pieces()) return;
      reduction.RunPiece(piece);
      if (unfinished.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        for (Arrival& arrival : arrivals) {
          RunInOwnThread([complete = std::move(arrival.complete)] { complete(nullptr); });
        }
      }
    }
  }
};

ffi::Future Execute(CpuState* state, ffi::RunId run, ffi::ThreadPool pool, ffi::BufferR0<ffi::S32> rank,
                    ffi::BufferR0<ffi::S32> group, ffi::BufferR0<ffi::S32> num_skipped, ffi::BufferR0<ffi::S32> shift,
                    ffi::RemainingArgs inputs, ffi::RemainingRets outputs) {
  const int own_rank = *rank.typed_data(), k = *num_skipped.typed_data();
  ReductionSettings settings{state->num_workers, k, *shift.typed_data(), state->divide, {}, state->wire, {}};
  Arrival arrival{own_rank, k, settings.shift, {}, {}, {}};
  // Who is refused comes all the same, so that the others learn of it and do not wait.
  if (inputs.size() == 0 || inputs.size() != outputs.size()) {
    arrival.refused = "skipreduce: expected as many results as arrays, at least one";
  } else if (own_rank < 0 || own_rank >= state->num_workers || k < 0 || k >= state->num_workers) {
    arrival.refused = "skipreduce: rank " + std::to_string(own_rank) + " skips " + std::to_string(k) + " steps of " +
                      std::to_string(state->num_workers) + " workers";
  }
  for (std::size_t i = 0; i < inputs.size() && arrival.refused.empty(); ++i) {
    const auto input = inputs.get<ffi::AnyBuffer>(i);
    const auto result = outputs.get<ffi::AnyBuffer>(i);
    const ElementType type = input.has_error() ? ElementType::kNone : TypeOf(input->element_type());
    if (type == ElementType::kNone || (i > 0 && type != settings.type) || input->element_count() == 0 ||
        result.has_error()) {
      arrival.refused = "skipreduce: array " + std::to_string(i) + " is of a type or size that the call does not take";
      break;
    }
    const ffi::AnyBuffer output = *ffi::Result<ffi::AnyBuffer>(result.value());
    if (output.element_type() != input->element_type() || output.element_count() != input->element_count()) {
      arrival.refused = "skipreduce: result " + std::to_string(i) + " is not of the type and size of its array";
      break;
    }
    settings.type = type;
    arrival.sizes.push_back(static_cast<std::int64_t>(input->element_count()));
    arrival.arrays.push_back({input->untyped_data(), output.untyped_data()});
  }
  settings.sizes = arrival.sizes;

  ffi::Promise promise;
  ffi::Future future(promise);
  arrival.complete = [promise = std::move(promise)](const std::string* error) mutable {
    if (error == nullptr) {
      promise.SetAvailable();
    } else {
      promise.SetError(ffi::Error(ffi::ErrorCode::kAborted, *error));
    }
  };
  auto arrivals = state->site.Arrive({run.run_id, *group.typed_data()}, std::move(arrival));
  if (!arrivals) return future;

  std::vector<std::vector<Array>> workers;
  for (const Arrival& other : *arrivals) workers.push_back(other.arrays);
  auto work = std::make_shared<Work>(Reduction(std::move(settings), std::move(workers)), *std::move(arrivals));
  // More threads than cores would only take turns, however many the pool has.
  const std::int64_t cores = std::max(1u, std::thread::hardware_concurrency());
  const std::int64_t helpers = std::min({pool.num_threads(), cores, work->reduction.num_pieces()}) - 1;
  for (std::int64_t i = 0; i < helpers; ++i) pool.Schedule([work] { work->Help(); });
  work->Help();
  return future;
}

}  // namespace

XLA_FFI_DEFINE_HANDLER(InstantiateHandler, Instantiate,
                       ffi::Ffi::BindInstantiate()
                           .Attr<std::int64_t>("num_workers")
                           .Attr<std::int64_t>("divide")
                           .Attr<std::int64_t>("wire_type")
                           .Attr<std::int64_t>("time_limit_ms"));

XLA_FFI_DEFINE_HANDLER(ExecuteHandler, Execute,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::State<CpuState>>()
                           .Ctx<ffi::RunId>()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::BufferR0<ffi::S32>>()
                           .Arg<ffi::BufferR0<ffi::S32>>()
                           .Arg<ffi::BufferR0<ffi::S32>>()
                           .Arg<ffi::BufferR0<ffi::S32>>()
                           .RemainingArgs()
                           .RemainingRets());

}  // namespace skipreduce

SKIPREDUCE_EXPORT XLA_FFI_Error* skipreduce_cpu_instantiate(XLA_FFI_CallFrame* call_frame) {
  return skipreduce::InstantiateHandler(call_frame);
}

SKIPREDUCE_EXPORT XLA_FFI_Error* skipreduce_cpu_execute(XLA_FFI_CallFrame* call_frame) {
  return skipreduce::ExecuteHandler(call_frame);
}

// What XLA has to know of the state: an id, which it fills in, and how a state is destroyed.
SKIPREDUCE_EXPORT XLA_FFI_TypeId* skipreduce_cpu_state_type_id() { return &skipreduce::CpuState::id; }

SKIPREDUCE_EXPORT const XLA_FFI_TypeInfo* skipreduce_cpu_state_type_info() {
  static const XLA_FFI_TypeInfo info = skipreduce::ffi::MakeTypeInfo<skipreduce::CpuState>();
  return &info;
}
