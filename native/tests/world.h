// Ranks as threads: engines that are connected by socket pairs, used through the public C interface.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "sparkhvd.h"
#include "test.h"

namespace sparkhvd::test {

struct WorldOptions {
  std::vector<std::int32_t> hosts;  // by rank; its length is the world size
  bool use_shared_memory = true;
  bool use_tcp = false;             // between hosts
  std::uint64_t slot_bytes = 4096;  // small, so that small tensors need several slots
  std::uint32_t slots = 4;
  std::int32_t isa = SPARKHVD_ISA_AUTO;
  std::int32_t spin_us = 20;
  double stall_warning_s = 0;
  double stall_shutdown_s = 30;
  double connect_timeout_s = 20;
  std::uint32_t streams = 1;
};

inline std::vector<std::int32_t> one_host(int size) {
  return std::vector<std::int32_t>(static_cast<std::size_t>(size), 0);
}

/// Makes a TCP connection over loopback and stores its two ends in `pair`.
inline void connect_tcp(int pair[2]) {
  const int listener = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  auto* raw = reinterpret_cast<sockaddr*>(&address);
  pair[0] = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (::bind(listener, raw, length) != 0 || ::listen(listener, 1) != 0 ||
      ::getsockname(listener, raw, &length) != 0 || ::connect(pair[0], raw, length) != 0) {
    throw std::runtime_error("TCP over loopback");
  }
  pair[1] = ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
  ::close(listener);
}

/// Connects all ranks. [i][j] is rank i's end of the connection to rank j for control frames;
/// [i][(1 + stream) * size + j] is its end of a connection for tensors.
inline std::vector<std::vector<std::int32_t>> connect_all(
    std::size_t size, const std::function<bool(std::size_t, std::size_t)>& use_tcp = {},
    std::size_t streams = 1) {
  std::vector<std::vector<std::int32_t>> sockets(
      size, std::vector<std::int32_t>((1 + streams) * size, -1));
  for (std::size_t i = 0; i < size; ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      for (std::size_t first = 0; first < (1 + streams) * size; first += size) {
        int pair[2];
        if (use_tcp && use_tcp(i, j)) {
          connect_tcp(pair);
        } else if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) {
          throw std::runtime_error("socketpair");
        }
        sockets[i][first + j] = pair[0];
        sockets[j][first + i] = pair[1];
      }
    }
  }
  return sockets;
}

inline void close_all(const std::vector<std::int32_t>& sockets) {
  for (const auto socket : sockets) {
    if (socket >= 0) ::close(socket);
  }
}

struct Status {
  std::int32_t code = SPARKHVD_OK;
  std::string message;
};

/// A submitted operation. The destructor releases it.
class TestWork {
 public:
  explicit TestWork(sparkhvd_work* work) : work_(work) {}
  TestWork(TestWork&& other) noexcept : work_(std::exchange(other.work_, nullptr)) {}
  TestWork& operator=(TestWork&& other) noexcept {
    std::swap(work_, other.work_);
    return *this;
  }
  TestWork(const TestWork&) = delete;
  ~TestWork() {
    if (work_ != nullptr) sparkhvd_work_release(work_);
  }
  Status wait(std::uint32_t timeout_ms = 30000) {
    Status status;
    char text[4096] = "";
    status.code = sparkhvd_wait(work_, timeout_ms, text, sizeof(text));
    status.message = text;
    return status;
  }
  bool is_left_to_device() { return sparkhvd_work_is_left_to_device(work_) == 1; }
  std::int32_t poll() { return sparkhvd_poll(work_, nullptr, 0); }
  sparkhvd_work* get() const { return work_; }

 private:
  sparkhvd_work* work_;
};

class TestEngine {
 public:
  TestEngine(const WorldOptions& options, std::int32_t rank,
             const std::vector<std::int32_t>& sockets) {
    sparkhvd_engine_options raw{};
    raw.struct_size = sizeof(raw);
    raw.rank = rank;
    raw.size = static_cast<std::int32_t>(options.hosts.size());
    raw.hosts = options.hosts.data();
    raw.sockets = sockets.data();
    raw.isa = options.isa;
    raw.spin_us = options.spin_us;
    raw.stall_warning_s = options.stall_warning_s;
    raw.stall_shutdown_s = options.stall_shutdown_s;
    raw.host_loss_s = 15;
    raw.connect_timeout_s = options.connect_timeout_s;
    raw.slot_bytes = options.slot_bytes;
    raw.slots = options.slots;
    raw.use_shared_memory = options.use_shared_memory ? 1 : 0;
    raw.streams = options.streams;
    raw.stream_sockets = sockets.data() + options.hosts.size();
    char text[4096] = "";
    status_.code = sparkhvd_engine_create(&raw, &engine_, text, sizeof(text));
    status_.message = text;
  }
  TestEngine(const TestEngine&) = delete;
  ~TestEngine() { destroy(); }
  void destroy() {
    if (engine_ != nullptr) sparkhvd_engine_destroy(engine_);
    engine_ = nullptr;
  }
  const Status& created() const { return status_; }
  sparkhvd_engine* get() const { return engine_; }

  TestWork submit(const sparkhvd_request& request, Status* status = nullptr) {
    sparkhvd_work* work = nullptr;
    char text[4096] = "";
    const auto code = sparkhvd_submit(engine_, &request, &work, text, sizeof(text));
    if (status != nullptr) {
      *status = {code, text};
    } else if (code != SPARKHVD_OK) {
      throw Failure(std::string("submit: ") + text);
    }
    return TestWork(work);
  }
  /// The lost ranks, each with the kind of its loss.
  std::vector<std::pair<std::int32_t, std::int32_t>> losses() const {
    std::vector<sparkhvd_loss> found(sparkhvd_engine_lost(engine_, nullptr, 0));
    sparkhvd_engine_lost(engine_, found.data(), static_cast<std::uint32_t>(found.size()));
    std::vector<std::pair<std::int32_t, std::int32_t>> losses;
    for (const auto& loss : found) losses.emplace_back(loss.rank, loss.kind);
    return losses;
  }
  Status shutdown() {
    char text[4096] = "";
    const auto code = sparkhvd_engine_shutdown(engine_, text, sizeof(text));
    return {code, text};
  }
  void abort(const char* reason) { sparkhvd_engine_abort(engine_, reason); }

 private:
  sparkhvd_engine* engine_ = nullptr;
  Status status_;
};

/// A request that owns its shapes and list of tensors.
class Request {
 public:
  Request(std::int32_t collective, std::string name, std::int32_t dtype = SPARKHVD_FLOAT32)
      : name_(std::move(name)) {
    raw_.struct_size = sizeof(raw_);
    raw_.collective = collective;
    raw_.dtype = dtype;
    raw_.reduce_op = SPARKHVD_SUM;
    raw_.prescale = 1;
    raw_.postscale = 1;
    raw_.device = SPARKHVD_DEVICE_CPU;
    raw_.timeout_s = -1;
  }
  Request& tensor(const void* input, void* output, std::vector<std::int64_t> shape,
                  std::uint64_t output_bytes = 0) {
    shapes_.push_back(std::move(shape));
    tensors_.push_back({input, output, nullptr, 0, 0, output_bytes});
    return *this;
  }
  Request& numbers(std::vector<std::int64_t> values) {
    numbers_ = std::move(values);
    return *this;
  }
  Request& on(std::int32_t process_set) {
    raw_.process_set = process_set;
    return *this;
  }
  sparkhvd_request& raw() {
    raw_.splits = numbers_.empty() ? nullptr : numbers_.data();
    raw_.num_splits = static_cast<std::uint32_t>(numbers_.size());
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      tensors_[i].shape = shapes_[i].data();
      tensors_[i].num_dims = static_cast<std::uint32_t>(shapes_[i].size());
    }
    raw_.name = name_.c_str();
    raw_.tensors = tensors_.data();
    raw_.num_tensors = static_cast<std::uint32_t>(tensors_.size());
    return raw_;
  }

 private:
  std::string name_;
  std::vector<std::vector<std::int64_t>> shapes_;
  std::vector<sparkhvd_tensor> tensors_;
  std::vector<std::int64_t> numbers_;
  sparkhvd_request raw_{};
};

/// The output of a finished operation: its rows, and its data as T.
template <class T = float>
struct Result {
  std::vector<std::int64_t> rows;
  std::vector<T> data;
};

template <class T = float>
Result<T> result_of(const TestWork& work) {
  sparkhvd_output output{};
  output.struct_size = sizeof(output);
  char text[1024] = "";
  if (sparkhvd_work_output(work.get(), &output, text, sizeof(text)) != SPARKHVD_OK) {
    throw Failure(text);
  }
  Result<T> result;
  result.rows.assign(output.rows, output.rows + output.num_rows);
  const auto* data = static_cast<const T*>(output.data);
  if (output.num_bytes > 0) result.data.assign(data, data + output.num_bytes / sizeof(T));
  return result;
}

/// Runs `body(engine, rank)` on every rank in a separate thread, and rethrows the first failure. `rewire` may change
/// the sockets before the ranks start.
inline void run_ranks(
    const WorldOptions& options, const std::function<void(TestEngine&, std::int32_t)>& body,
    const std::function<void(std::vector<std::vector<std::int32_t>>&)>& rewire = {}) {
  const std::size_t size = options.hosts.size();
  const auto use_tcp = [&](std::size_t i, std::size_t j) {
    return options.use_tcp && options.hosts[i] != options.hosts[j];
  };
  auto sockets = connect_all(size, use_tcp, options.streams);
  if (rewire) rewire(sockets);
  std::vector<std::string> problems(size);
  {
    std::vector<std::jthread> threads;
    for (std::size_t i = 0; i < size; ++i) {
      threads.emplace_back([&, i] {
        const auto rank = static_cast<std::int32_t>(i);
        TestEngine engine(options, rank, sockets[i]);
        try {
          CHECK_MESSAGE(engine.created().code == SPARKHVD_OK, engine.created().message);
          body(engine, rank);
        } catch (const std::exception& error) {
          problems[i] = "rank " + std::to_string(i) + ": " + error.what();
          // Aborts, so that the other ranks do not wait for a rank that has failed.
          if (engine.get() != nullptr) engine.abort("the test failed on this rank");
        }
      });
    }
  }
  for (const auto& problem : problems) {
    if (!problem.empty() && problem.find("the test failed on this rank") == std::string::npos) {
      throw Failure(problem);
    }
  }
}

}  // namespace sparkhvd::test
