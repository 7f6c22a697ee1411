// The stacks of this process's Python threads, for the stall report. Python has installed a signal handler that writes
// the stacks to a pipe without the interpreter (faulthandler.register). So a process answers even while a long call
// into C holds the interpreter's lock.
//
// **Threads.** Only the thread that drives the engine calls `take`. It raises the signal on itself: the handler has run
// when `take` reads the pipe, and no system call of another thread is interrupted.
//
// **Ownership.** The pipe's descriptor is a copy of the caller's.
#pragma once

#include <string>

#include "transport/fd.h"

namespace sparkhvd {

class Stacks {
 public:
  Stacks() noexcept = default;
  /// Stores the handler that is installed now. `signal` 0: no stacks. `pipe`: the reading end of the handler's pipe;
  /// both ends are non-blocking. Throws INVALID_ARGUMENT for an invalid signal or pipe.
  Stacks(int signal, int pipe);

  /// Returns the stacks, at most kMaxStackBytes, or the reason why they are missing. Never blocks. If another handler
  /// has been installed, it does not raise the signal, because this could end the process.
  std::string take() const;
  /// Closes the descriptor; a forked child may call it too.
  void close() noexcept { pipe_.reset(); }

 private:
  int signal_ = 0;
  Fd pipe_;
  void (*handler_)(int) = nullptr;
};

}  // namespace sparkhvd
