// Shared memory of the ranks of a communicator. It has no name, so a killed test leaves nothing behind. It works
// between threads of a process and between processes of a host.
//
// The unique id has the process that made it and the memory's descriptor in that process. The other ranks open it
// through /proc, so the process must live until all ranks have joined, as with the real NCCL.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "nccl/nccl_api.h"

namespace fake {

/// A rank's description of a collective. Ranks compare their descriptions before the data, to find a disagreement.
struct Descriptor {
  std::uint32_t kind = 0;
  std::uint32_t dtype = 0;
  std::uint32_t op = 0;
  std::uint32_t root = 0;
  std::uint64_t count = 0;
  bool operator==(const Descriptor&) const = default;
};

struct Identity {
  std::uint64_t host = 0;
  std::uint64_t gpu[2] = {};
};

inline constexpr std::size_t kChunkBytes = 64 << 10;
inline constexpr std::size_t kMailBytes = 16 << 10;

/// State of a rank in shared memory.
struct alignas(64) Seat {
  std::atomic<std::uint32_t> is_taken;
  std::atomic<std::uint32_t> step;  // number of barriers that the rank has passed
  Identity identity;
  Descriptor descriptor;
  std::int32_t color;
  std::int32_t key;
  sparkhvd::nccl::NcclUniqueId id;  // for the new communicator of a split that this rank leads
  std::byte chunk[kChunkBytes];
};

/// A chunk on its way from a rank to another rank.
struct alignas(64) Mailbox {
  std::atomic<std::uint32_t> is_full;
  std::uint64_t message_bytes;
  std::uint64_t chunk_bytes;
  std::byte chunk[kMailBytes];
};

using Stop = std::function<bool()>;

class Meeting {
 public:
  /// Opens the memory of `id` for `size` ranks and takes the seat `rank`. Throws std::runtime_error.
  Meeting(const sparkhvd::nccl::NcclUniqueId& id, int rank, int size, const Identity& identity);
  Meeting(const Meeting&) = delete;
  Meeting& operator=(const Meeting&) = delete;
  ~Meeting();

  /// Waits until every rank has its seat. Every wait returns false if `stop` became true first.
  bool wait_for_all(const Stop& stop);
  bool barrier(const Stop& stop);
  bool wait(const std::function<bool()>& condition, const Stop& stop);
  /// Wakes waiting ranks after a change that is not a barrier.
  void ring();

  Seat& seat(int rank) const { return seats_[rank]; }
  Mailbox& mailbox(int from, int to) const { return mailboxes_[from * size_ + to]; }
  int rank() const { return rank_; }
  int size() const { return size_; }
  /// Key of the communicator: equal on all its ranks, and different from other communicators.
  std::uint64_t key() const { return key_; }

 private:
  struct Header;

  int rank_;
  int size_;
  std::uint64_t key_ = 0;
  std::size_t bytes_ = 0;
  void* memory_ = nullptr;
  Header* header_ = nullptr;
  Seat* seats_ = nullptr;
  Mailbox* mailboxes_ = nullptr;
  std::uint32_t step_ = 0;
  sparkhvd::nccl::NcclUniqueId id_;
};

/// Makes a unique id. Its memory stays until all ranks have joined.
sparkhvd::nccl::NcclUniqueId make_unique_id();

}  // namespace fake
