// What the machine can do: allreduces of float32 between processes of one host with nothing around
// them. No negotiation, no names, no faults, no deadlines: a peer that is gone means waiting for ever.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

namespace bare {

/// Memory that all processes see, made before the fork.
class Shared {
 public:
  static constexpr int kMaxRanks = 16;

  /// `bytes` for the buffer of each process. Throws std::runtime_error.
  Shared(int ranks, std::size_t bytes);
  ~Shared();
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;

  static constexpr std::size_t kSlotBytes = 256 << 10;
  static constexpr std::size_t kSlots = 4;

  struct alignas(64) Count {
    std::atomic<std::uint64_t> value;
  };
  /// Words of one process, each on a line of its own.
  struct Words {
    Count arrived;
    Count copied_in;
    Count reduced;
    Count copied_out;
  };

  int ranks() const noexcept { return ranks_; }
  float* buffer(int rank) const noexcept;
  float* slot(int rank, std::uint64_t chunk) const noexcept;
  Words& words(int rank) const noexcept;

 private:
  int ranks_;
  std::byte* memory_;
  std::size_t buffer_bytes_;
  std::size_t total_bytes_;
};

/// One process's end. All call the same functions in the same order.
class Rank {
 public:
  Rank(Shared& shared, int rank) : shared_(&shared), rank_(rank) {}

  /// Returns once all processes are here; spins.
  void meet();
  /// Two processes, in place in the shared buffers: each adds up half of both and stores it to both.
  void direct(std::size_t count);
  /// In place in private memory, through shared slots: copy in, add up one's slice of the chunk, copy
  /// out, the steps of neighbouring chunks overlapping between the processes.
  void chunked(std::span<float> data);

 private:
  void wait(Shared::Count Shared::Words::* count, std::uint64_t until) const;
  void copy_in(std::span<float> piece, std::uint64_t chunk);
  void reduce(std::span<float> piece, std::uint64_t chunk);
  void copy_out(std::span<float> piece, std::uint64_t chunk);

  Shared* shared_;
  int rank_;
  std::uint64_t meetings_ = 0;
  std::uint64_t chunks_ = 0;
};

}  // namespace bare
