// The stacks of this process's Python threads, for the stall report. Python has installed a signal
// handler that writes them to a pipe without the interpreter (faulthandler.register), so a process
// answers also while a long call into C holds the interpreter.
//
// **Threads.** `take` is called by one thread at a time, the one that drives the engine. It raises
// the signal on itself, so the handler has run when it reads the pipe, and no system call of
// another thread is interrupted.
//
// **Ownership.** The pipe's descriptor is a copy of the caller's.
#pragma once

#include <string>

#include "transport/fd.h"

namespace sparkhvd {

class Stacks {
 public:
  Stacks() noexcept = default;
  /// `signal` 0: no stacks. `pipe`: the handler's pipe, both ends non-blocking. Stores the currently
  /// installed handler. Throws INVALID_ARGUMENT for an invalid signal or pipe.
  Stacks(int signal, int pipe);

  /// The stacks, at most kMaxStackBytes, or the reason why they are missing. Never blocks, never ends the process: if the
  /// handler has changed, the signal is not raised.
  std::string take() const;
  /// Closes the descriptor, also in a forked child.
  void close() noexcept { pipe_.reset(); }

 private:
  int signal_ = 0;
  Fd pipe_;
  void (*handler_)(int) = nullptr;
};

}  // namespace sparkhvd
