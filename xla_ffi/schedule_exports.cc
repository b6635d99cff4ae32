// The slice arithmetic as plain C functions, so that a test can compare it with jax_skipreduce/_topologies/ring.py.

#include "export.h"
#include "ring_schedule.h"

SKIPREDUCE_EXPORT int skipreduce_slice_to_send(int num_workers, int num_skipped, int shift, int rank, int step) {
  return skipreduce::RingSchedule{num_workers, num_skipped, shift}.SliceToSend(rank, step);
}

SKIPREDUCE_EXPORT int skipreduce_slice_to_receive(int num_workers, int num_skipped, int shift, int rank, int step) {
  return skipreduce::RingSchedule{num_workers, num_skipped, shift}.SliceToReceive(rank, step);
}

SKIPREDUCE_EXPORT int skipreduce_owned_slice(int num_workers, int num_skipped, int shift, int rank) {
  return skipreduce::RingSchedule{num_workers, num_skipped, shift}.OwnedSlice(rank);
}

SKIPREDUCE_EXPORT int skipreduce_owner(int num_workers, int num_skipped, int shift, int slice) {
  return skipreduce::RingSchedule{num_workers, num_skipped, shift}.Owner(slice);
}

SKIPREDUCE_EXPORT int skipreduce_contributor(int num_workers, int num_skipped, int shift, int slice, int position) {
  return skipreduce::RingSchedule{num_workers, num_skipped, shift}.Contributor(slice, position);
}

SKIPREDUCE_EXPORT int skipreduce_next(int num_workers, int rank) {
  return skipreduce::RingSchedule{num_workers, 0, 0}.Next(rank);
}
