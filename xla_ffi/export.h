// What the shared library shows: the rest is hidden.

#ifndef SKIPREDUCE_EXPORT_H_
#define SKIPREDUCE_EXPORT_H_

#define SKIPREDUCE_EXPORT extern "C" __attribute__((visibility("default")))

#endif  // SKIPREDUCE_EXPORT_H_
