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
constexpr int kLooks = 50;

BARE_VECTORS void add_to_both(float* __restrict a, float* __restrict b, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const float sum = a[i] + b[i];
    a[i] = sum;
    b[i] = sum;
  }
}

BARE_VECTORS void add(float* __restrict own, const float* __restrict other, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) own[i] += other[i];
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

struct Slice {
  std::size_t begin;
  std::size_t count;
};

/// Slice `rank` of `count` elements, cut at cache lines.
Slice slice_of(std::size_t count, int rank, int ranks) {
  const auto cut = [&](int index) {
    const std::size_t even =
        count * static_cast<std::size_t>(index) / static_cast<std::size_t>(ranks);
    return index == ranks ? count : std::min(count, (even + kLine - 1) / kLine * kLine);
  };
  return {cut(rank), cut(rank + 1) - cut(rank)};
}

// What stays in the L1 cache while the others' parts are added to it.
constexpr std::size_t kBlock = 2048;

}  // namespace

Shared::Shared(int ranks, std::size_t bytes)
    : ranks_(ranks),
      buffer_bytes_((bytes + 4095) / 4096 * 4096 + kGap),
      total_bytes_(4096 + static_cast<std::size_t>(ranks) * (buffer_bytes_ + kSlots * kSlotBytes)) {
  void* memory = ::mmap(nullptr, total_bytes_, PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("mmap of the bare buffers failed");
  memory_ = static_cast<std::byte*>(memory);
  static_assert(kMaxRanks * sizeof(Words) <= 4096);
  for (int rank = 0; rank < ranks; ++rank) new (&words(rank)) Words{};
}

Shared::~Shared() { ::munmap(memory_, total_bytes_); }

float* Shared::buffer(int rank) const noexcept {
  const auto index = static_cast<std::size_t>(rank);
  return reinterpret_cast<float*>(memory_ + 4096 + index * buffer_bytes_);
}

float* Shared::slot(int rank, std::uint64_t chunk) const noexcept {
  const std::size_t index = static_cast<std::size_t>(rank) * kSlots + chunk % kSlots;
  return reinterpret_cast<float*>(
      memory_ + 4096 + static_cast<std::size_t>(ranks_) * buffer_bytes_ + index * kSlotBytes);
}

Shared::Words& Shared::words(int rank) const noexcept {
  return reinterpret_cast<Words*>(memory_)[rank];
}

/// Until every other process has counted that far.
void Rank::wait(Shared::Count Shared::Words::* count, std::uint64_t until) const {
  for (int other = 0; other < shared_->ranks(); ++other) {
    if (other == rank_) continue;
    const auto& value = (shared_->words(other).*count).value;
    for (int looks = 0; value.load(std::memory_order_acquire) < until; ++looks) {
#if defined(__x86_64__)
      _mm_pause();
#endif
      if (looks >= kLooks) {
        ::sched_yield();
        looks = 0;
      }
    }
  }
}

void Rank::meet() {
  ++meetings_;
  shared_->words(rank_).arrived.value.store(meetings_, std::memory_order_release);
  wait(&Shared::Words::arrived, meetings_);
}

void Rank::direct(std::size_t count) {
  const Slice half = slice_of(count, rank_, 2);
  meet();
  add_to_both(shared_->buffer(0) + half.begin, shared_->buffer(1) + half.begin, half.count);
  meet();
}

void Rank::copy_in(std::span<float> piece, std::uint64_t chunk) {
  for (int other = 0; other < shared_->ranks(); ++other) {
    if (other == rank_) continue;
    const Slice theirs = slice_of(piece.size(), other, shared_->ranks());
    std::memcpy(shared_->slot(rank_, chunk) + theirs.begin, piece.data() + theirs.begin,
                theirs.count * sizeof(float));
  }
  shared_->words(rank_).copied_in.value.store(chunk + 1, std::memory_order_release);
}

void Rank::reduce(std::span<float> piece, std::uint64_t chunk) {
  const Slice mine = slice_of(piece.size(), rank_, shared_->ranks());
  const int last = rank_ == shared_->ranks() - 1 ? rank_ - 1 : shared_->ranks() - 1;
  for (std::size_t done = 0; done < mine.count; done += kBlock) {
    const std::size_t begin = mine.begin + done;
    const std::size_t count = std::min(kBlock, mine.count - done);
    float* own = piece.data() + begin;
    for (int other = 0; other < last; ++other) {
      if (other != rank_) add(own, shared_->slot(other, chunk) + begin, count);
    }
    add(own, shared_->slot(last, chunk) + begin, shared_->slot(rank_, chunk) + begin, count);
  }
  shared_->words(rank_).reduced.value.store(chunk + 1, std::memory_order_release);
}

void Rank::copy_out(std::span<float> piece, std::uint64_t chunk) {
  for (int other = 0; other < shared_->ranks(); ++other) {
    if (other == rank_) continue;
    const Slice theirs = slice_of(piece.size(), other, shared_->ranks());
    std::memcpy(piece.data() + theirs.begin, shared_->slot(other, chunk) + theirs.begin,
                theirs.count * sizeof(float));
  }
  shared_->words(rank_).copied_out.value.store(chunk + 1, std::memory_order_release);
}

void Rank::chunked(std::span<float> data) {
  const std::uint64_t chunks = (data.size() + kSlotCount - 1) / kSlotCount;
  const auto part = [&](std::uint64_t chunk) {
    const std::size_t begin = chunk * kSlotCount;
    return data.subspan(begin, std::min(kSlotCount, data.size() - begin));
  };
  for (std::uint64_t step = 0; step < chunks + 2; ++step) {
    if (step < chunks) {
      const std::uint64_t number = chunks_ + step + 1;
      if (number > Shared::kSlots) wait(&Shared::Words::copied_out, number - Shared::kSlots);
      copy_in(part(step), chunks_ + step);
    }
    if (step >= 1 && step - 1 < chunks) {
      wait(&Shared::Words::copied_in, chunks_ + step);
      reduce(part(step - 1), chunks_ + step - 1);
    }
    if (step >= 2) {
      wait(&Shared::Words::reduced, chunks_ + step - 1);
      copy_out(part(step - 2), chunks_ + step - 2);
    }
  }
  chunks_ += chunks;
}

}  // namespace bare
