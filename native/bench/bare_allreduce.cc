#include "bare_allreduce.h"

#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>

#if defined(__x86_64__)
#include <immintrin.h>
// The widest vectors of the CPU it runs on, as the engine's kernels.
#define BARE_VECTORS __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define BARE_VECTORS
#endif

namespace bare {
namespace {

constexpr std::size_t kLine = 64 / sizeof(float);
constexpr std::size_t kSlotCount = Shared::kSlotBytes / sizeof(float);
// After this many looks a waiter offers its core: it may be the one that the other needs.
constexpr int kLooks = 1000;

BARE_VECTORS void add_to_both(float* __restrict a, float* __restrict b, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const float sum = a[i] + b[i];
    a[i] = sum;
    b[i] = sum;
  }
}

BARE_VECTORS void add(float* __restrict own, const float* __restrict other,
                      float* __restrict shared, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const float sum = own[i] + other[i];
    own[i] = sum;
    shared[i] = sum;
  }
}

// Between the buffers, so that they are not a power of two apart: AMD's L1 cache keeps only one of two
// lines at such a distance.
constexpr std::size_t kGap = 31 * 4096;

struct Half {
  std::size_t begin;
  std::size_t count;
};

/// Half `rank` of `count` elements, cut at a cache line.
Half half_of(std::size_t count, int rank) {
  const std::size_t cut = std::min(count, (count / 2 + kLine - 1) / kLine * kLine);
  return rank == 0 ? Half{0, cut} : Half{cut, count - cut};
}

}  // namespace

Shared::Shared(std::size_t bytes)
    : buffer_bytes_((bytes + 4095) / 4096 * 4096 + kGap),
      total_bytes_(4096 + 2 * (buffer_bytes_ + kSlots * kSlotBytes)) {
  void* memory = ::mmap(nullptr, total_bytes_, PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("mmap of the bare buffers failed");
  memory_ = static_cast<std::byte*>(memory);
  static_assert(2 * sizeof(Words) <= 4096);
  for (int rank = 0; rank < 2; ++rank) new (&words(rank)) Words{};
}

Shared::~Shared() { ::munmap(memory_, total_bytes_); }

float* Shared::buffer(int rank) const noexcept {
  const auto index = static_cast<std::size_t>(rank);
  return reinterpret_cast<float*>(memory_ + 4096 + index * buffer_bytes_);
}

float* Shared::slot(int rank, std::uint64_t chunk) const noexcept {
  const std::size_t index = static_cast<std::size_t>(rank) * kSlots + chunk % kSlots;
  return reinterpret_cast<float*>(memory_ + 4096 + 2 * buffer_bytes_ + index * kSlotBytes);
}

Shared::Words& Shared::words(int rank) const noexcept {
  return reinterpret_cast<Words*>(memory_)[rank];
}

void Rank::wait(const Shared::Count& count, std::uint64_t until) const {
  for (int looks = 0; count.value.load(std::memory_order_acquire) < until; ++looks) {
#if defined(__x86_64__)
    _mm_pause();
#endif
    if (looks >= kLooks) {
      ::sched_yield();
      looks = 0;
    }
  }
}

void Rank::meet() {
  ++meetings_;
  shared_->words(rank_).arrived.value.store(meetings_, std::memory_order_release);
  wait(shared_->words(1 - rank_).arrived, meetings_);
}

void Rank::direct(std::size_t count) {
  const Half half = half_of(count, rank_);
  meet();
  add_to_both(shared_->buffer(0) + half.begin, shared_->buffer(1) + half.begin, half.count);
  meet();
}

void Rank::chunked(std::span<float> data) {
  Shared::Words& own = shared_->words(rank_);
  Shared::Words& other = shared_->words(1 - rank_);
  const std::uint64_t chunks = (data.size() + kSlotCount - 1) / kSlotCount;
  const auto part = [&](std::uint64_t chunk) {
    const std::size_t begin = chunk * kSlotCount;
    return data.subspan(begin, std::min(kSlotCount, data.size() - begin));
  };
  for (std::uint64_t step = 0; step < chunks + 1; ++step) {
    if (step < chunks) {
      const std::uint64_t number = chunks_ + step + 1;
      if (number > Shared::kSlots) wait(other.copied_out, number - Shared::kSlots);
      const auto piece = part(step);
      const Half theirs = half_of(piece.size(), 1 - rank_);
      std::memcpy(shared_->slot(rank_, chunks_ + step) + theirs.begin, piece.data() + theirs.begin,
                  theirs.count * sizeof(float));
      own.copied_in.value.store(number, std::memory_order_release);
    }
    if (step == 0) continue;
    const std::uint64_t chunk = chunks_ + step - 1;
    const auto piece = part(step - 1);
    const Half mine = half_of(piece.size(), rank_);
    wait(other.copied_in, chunk + 1);
    add(piece.data() + mine.begin, shared_->slot(1 - rank_, chunk) + mine.begin,
        shared_->slot(rank_, chunk) + mine.begin, mine.count);
    own.reduced.value.store(chunk + 1, std::memory_order_release);
    const Half theirs = half_of(piece.size(), 1 - rank_);
    wait(other.reduced, chunk + 1);
    std::memcpy(piece.data() + theirs.begin, shared_->slot(1 - rank_, chunk) + theirs.begin,
                theirs.count * sizeof(float));
    own.copied_out.value.store(chunk + 1, std::memory_order_release);
  }
  chunks_ += chunks;
}

}  // namespace bare
