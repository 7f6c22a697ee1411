// The only exception of the engine: a status of sparkhvd.h and the caller's message.
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

/// Fails one operation, on every rank that runs it; the engine stays usable. Thrown when all ranks know it, before any of
/// them has moved a byte.
class OperationFailed : public Error {
 public:
  using Error::Error;
};

/// Invalid data from a peer; the reader of the connection adds the peer.
inline Error nonsense(const std::string& what) { return {SPARKHVD_PEER_LOST, what}; }

/// "Bad file descriptor (errno 9)".
inline std::string errno_text(int code) {
  return std::generic_category().message(code) + " (errno " + std::to_string(code) + ")";
}

/// Throws the errno of the failed system call `call`.
[[noreturn]] inline void throw_errno(std::string_view call) {
  const int code = errno;
  throw Error(SPARKHVD_INTERNAL, std::string(call) + " failed: " + errno_text(code) + ".");
}

[[noreturn]] inline void invalid(const std::string& text) {
  throw Error(SPARKHVD_INVALID_ARGUMENT, text);
}

}  // namespace sparkhvd
