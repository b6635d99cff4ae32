// Threads in which a collective that is done tells XLA so.

#ifndef SKIPREDUCE_COMPLETIONS_H_
#define SKIPREDUCE_COMPLETIONS_H_

#include <functional>

namespace skipreduce {

// Runs `task` in a thread in which nothing else runs meanwhile.
//
// XLA goes on with a device's program in the thread that completes its future, and that program may come to a
// collective of XLA's own next, which blocks until all devices are there. So no thread completes two futures one after
// the other. Threads are kept and used again; there are as many as there were tasks at the same time.
void RunInOwnThread(std::function<void()> task);

}  // namespace skipreduce

#endif  // SKIPREDUCE_COMPLETIONS_H_
