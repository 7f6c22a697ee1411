#include "stacks.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <cerrno>

#include "error.h"
#include "message.h"

namespace sparkhvd {
namespace {

/// The current handler of a signal, or SIG_DFL or SIG_IGN.
void (*handler_of(int signal))(int) {
  struct sigaction action{};
  if (::sigaction(signal, nullptr, &action) != 0) {
    throw Error(SPARKHVD_INVALID_ARGUMENT, "stack_signal: " + std::to_string(signal) +
                                               " is no signal. Use 0 to have no stacks.");
  }
  return action.sa_handler;
}

}  // namespace

Stacks::Stacks(int signal, int pipe) : signal_(signal) {
  if (signal == 0) return;
  handler_ = handler_of(signal);
  if (handler_ == SIG_DFL || handler_ == SIG_IGN) {
    throw Error(SPARKHVD_INVALID_ARGUMENT, "stack_signal: signal " + std::to_string(signal) +
                                               " has no handler. Install it before the engine.");
  }
  pipe_ = Fd(::fcntl(pipe, F_DUPFD_CLOEXEC, 0));
  if (!pipe_.valid() && errno != EBADF) throw_errno("fcntl(F_DUPFD_CLOEXEC)");
  const int flags = pipe_.valid() ? ::fcntl(pipe_.get(), F_GETFL) : -1;
  if (flags < 0 || (flags & O_NONBLOCK) == 0) {
    throw Error(SPARKHVD_INVALID_ARGUMENT,
                "stack_pipe: " + std::to_string(pipe) +
                    " is not the reading end of a pipe in non-blocking mode.");
  }
}

std::string Stacks::take() const {
  if (signal_ == 0 || !pipe_.valid()) {
    return "(no stack: it was started without stack_signal, or the signal was in use)";
  }
  // Raising the signal without this handler could end the process.
  if (handler_of(signal_) != handler_) {
    return "(no stack: the handler of signal " + std::to_string(signal_) +
           " was replaced after the engine had started)";
  }
  std::array<char, 4096> part{};
  while (::read(pipe_.get(), part.data(), part.size()) > 0) {  // drops stacks of earlier signals
  }
  sigset_t only;
  sigset_t before;
  ::sigemptyset(&only);
  ::sigaddset(&only, signal_);
  ::pthread_sigmask(SIG_UNBLOCK, &only, &before);
  ::raise(signal_);
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  std::string text;
  while (text.size() < kMaxStackBytes) {
    const auto count = ::read(pipe_.get(), part.data(), part.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) break;
    text.append(part.data(), static_cast<std::size_t>(count));
  }
  if (text.size() > kMaxStackBytes) text.resize(kMaxStackBytes);
  // Another machine prints the text on a terminal, so control characters are replaced.
  for (char& c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if ((byte < 0x20 && c != '\n' && c != '\t') || byte == 0x7F) c = '?';
  }
  return text.empty() ? "(no stack: the handler wrote nothing)" : text;
}

}  // namespace sparkhvd
