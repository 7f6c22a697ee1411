#include "options.h"

#include <string>

#include "error.h"
#include "request.h"

namespace sparkhvd {
namespace {

constexpr std::uint32_t kMaxStreams = 64;

}  // namespace

EngineOptions read_options(const sparkhvd_engine_options* given) {
  sparkhvd_engine_options defaults{};
  defaults.spin_us = 100;
  defaults.stall_warning_s = 60;
  defaults.stall_shutdown_s = 1800;
  defaults.host_loss_s = 15;
  defaults.connect_timeout_s = 300;
  defaults.slot_bytes = 256 << 10;
  defaults.slots = 4;
  defaults.use_shared_memory = 1;
  defaults.streams = 1;
  const auto raw = read_struct(given, defaults, "options");
  EngineOptions options;
  // The engine owns the sockets from the call on, also when the call fails.
  if (raw.sockets != nullptr && raw.size > 0) {
    for (std::int32_t i = 0; i < raw.size; ++i) options.sockets.emplace_back(raw.sockets[i]);
    const bool has_data = raw.stream_sockets != nullptr && raw.streams <= kMaxStreams;
    const std::uint32_t num_data =
        has_data ? raw.streams * static_cast<std::uint32_t>(raw.size) : 0;
    for (std::uint32_t i = 0; i < num_data; ++i)
      options.sockets.emplace_back(raw.stream_sockets[i]);
  }
  if (raw.size < 1 || raw.rank < 0 || raw.rank >= raw.size) {
    invalid("rank " + std::to_string(raw.rank) + " of size " + std::to_string(raw.size) +
            " does not exist.");
  }
  if (raw.hosts == nullptr || raw.sockets == nullptr)
    invalid("hosts and sockets must not be NULL.");
  if (raw.streams < 1 || raw.streams > kMaxStreams) {
    invalid("streams must be from 1 to " + std::to_string(kMaxStreams) + ".");
  }
  if (raw.stream_sockets == nullptr) invalid("stream_sockets must not be NULL.");
  for (std::size_t i = 0; i < options.sockets.size(); ++i) {
    const auto peer = static_cast<std::int32_t>(i % static_cast<std::size_t>(raw.size));
    if (options.sockets[i].valid() == (peer == raw.rank)) {
      invalid(peer == raw.rank ? "a rank has no socket to itself: pass -1."
                               : "the socket to rank " + std::to_string(peer) + " is missing.");
    }
  }
  if (raw.slots < 2 || raw.slots > 1024) invalid("slots must be from 2 to 1024.");
  if (raw.slot_bytes < 4096 || raw.slot_bytes > (std::uint64_t{1} << 32)) {
    invalid("slot_bytes must be from 4096 to 4 GiB.");
  }
  if (raw.spin_us < 0) invalid("spin_us must not be negative.");
  options.world.membership.self = Rank{raw.rank};
  options.world.membership.hosts.assign(raw.hosts, raw.hosts + raw.size);
  options.world.slot_bytes = raw.slot_bytes;
  options.world.slots = raw.slots;
  options.world.use_shared_memory = raw.use_shared_memory != 0;
  options.world.connect_timeout_s = raw.connect_timeout_s;
  options.world.streams = raw.streams;
  options.isa = raw.isa;
  options.spin_us = raw.spin_us;
  options.stall_warning_s = raw.stall_warning_s;
  options.stall_shutdown_s = raw.stall_shutdown_s;
  options.host_loss_s = raw.host_loss_s;
  options.stack_signal = raw.stack_signal;
  options.stack_pipe = raw.stack_pipe;
  return options;
}

nccl::DeviceOptions read_device_options(const sparkhvd_device_options* given) {
  const auto raw = read_struct(given, sparkhvd_device_options{}, "options");
  nccl::DeviceOptions options;
  options.ordinal = raw.device;
  if (raw.cuda_library != nullptr) options.cuda_library = raw.cuda_library;
  if (raw.nccl_library != nullptr) options.nccl.library = raw.nccl_library;
  if (raw.num_nccl_candidates > 0 && raw.nccl_candidates == nullptr) {
    invalid("nccl_candidates must not be NULL.");
  }
  for (std::uint32_t i = 0; i < raw.num_nccl_candidates; ++i) {
    if (raw.nccl_candidates[i] != nullptr) {
      options.nccl.candidates.emplace_back(raw.nccl_candidates[i]);
    }
  }
  return options;
}

}  // namespace sparkhvd
