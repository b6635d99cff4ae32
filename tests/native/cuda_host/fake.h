// What the test tells the fake libcuda, libnvrtc and libnccl, which are one library under three names.

#ifndef SKIPREDUCE_TESTS_NATIVE_FAKE_H_
#define SKIPREDUCE_TESTS_NATIVE_FAKE_H_

struct ncclComm;
struct CUstream_st;

struct FakeSettings {
  int nccl_version = 22902;
  int lsa_size = 0;             // 0: all ranks reach each other
  bool in_progress = false;     // communicators that do not block
  bool slow = false;            // operations of streams take random times
  const char* failing = "";     // the name of the function that fails ..
  int failing_rank = -1;        // .. on threads of this rank; -1: on all
  int failing_call = 1;         // .. at its so manieth call there
};

// The functions that the fake exports, with C linkage.
using FakeConfigure = void (*)(const FakeSettings*);
using FakeSetRank = void (*)(int rank);                       // of the calling thread
using FakeNewGroup = void* (*)(int size);                     // a communicator's ranks
using FakeComm = ncclComm* (*)(void* group, int rank);
using FakeNewStream = CUstream_st* (*)(int rank);             // in a context of its own, for each rank
using FakeSynchronize = void (*)(CUstream_st*);
using FakeDeleteStream = void (*)(CUstream_st*);
using FakeCount = long long (*)(const char* name);            // calls of a function so far, or launches of a kernel
using FakeLeaks = long long (*)();                            // things that were made and not given back

#endif  // SKIPREDUCE_TESTS_NATIVE_FAKE_H_
