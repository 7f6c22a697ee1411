// The engine's exceptions: a status of sparkhvd.h and a message for the caller.
#pragma once

#include <cerrno>
#include <cstdint>
#include <exception>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "sparkhvd.h"

namespace sparkhvd {

class Error : public std::exception {
 public:
  Error(std::int32_t status, std::string message) : status_(status), message_(std::move(message)) {}
  std::int32_t status() const noexcept { return status_; }
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  std::int32_t status_;
  std::string message_;
};

/// Fails one operation on every rank that runs it; the engine stays usable. A task throws it when all ranks know of the
/// failure, before any rank has moved a byte.
class OperationFailed : public Error {
 public:
  using Error::Error;
};

/// Error for invalid data from a peer. `what` describes the data; the reader of the connection adds the peer's name.
inline Error nonsense(const std::string& what) { return {SPARKHVD_PEER_LOST, what}; }

/// Text of an errno: "Bad file descriptor (errno 9)".
inline std::string errno_text(int code) {
  return std::generic_category().message(code) + " (errno " + std::to_string(code) + ")";
}

/// Throws an Error with the text of errno, after the system call `call` has failed.
[[noreturn]] inline void throw_errno(std::string_view call) {
  const int code = errno;
  throw Error(SPARKHVD_INTERNAL, std::string(call) + " failed: " + errno_text(code) + ".");
}

[[noreturn]] inline void invalid(const std::string& text) {
  throw Error(SPARKHVD_INVALID_ARGUMENT, text);
}

}  // namespace sparkhvd
