// Wakeup events of the ranks of one host. Each rank has an eventfd, so its epoll_wait waits for sockets and for shared
// memory at once. Each rank also has a word in shared memory that shows whether it sleeps: a peer makes the system call
// only for a sleeping rank.
//
// **Ownership.** A rank writes only its own word. An odd value means that it sleeps, or is about to sleep. Each sleep
// has another odd value, so that a peer signals once per sleep.
//
// **Why no wakeup is lost.** The sleeper stores the odd value and then reads the shared counters again. A peer stores
// its counter and then reads the word. All four accesses are sequentially consistent, so at least one of the two ranks
// sees the store of the other.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "counter.h"
#include "error.h"
#include "transport/fd.h"
#include "types.h"

namespace sparkhvd {

/// A counter in memory shared between processes, on a cache line of its own.
struct alignas(64) SharedWord {
  std::atomic<std::uint64_t> value{0};
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free,
              "shared memory between processes needs lock-free atomics");

class WakeupEvent {
 public:
  WakeupEvent() : event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (!event_.valid()) throw_errno("eventfd");
  }

  int fd() const noexcept { return event_.get(); }

  /// Sets the word that peers see. Until then the rank uses a private word.
  void use_word(SharedWord& word) noexcept { word_ = &word; }
  void add_peer(Rank rank, const SharedWord& word, Fd event) {
    const auto index = static_cast<std::size_t>(index_of(rank));
    if (peers_.size() <= index) peers_.resize(index + 1);
    peers_[index] = {&word, std::move(event), 0};
  }

  /// Makes the event count its signals to peers in `rings`.
  void count(Counter& rings) noexcept { rings_ = &rings; }

  /// Announces that this rank is about to sleep. Read the shared counters again before the sleep.
  void set_sleeping() noexcept {
    if ((epoch_ & 1) == 0) word_->value.store(++epoch_, std::memory_order_seq_cst);
  }
  void set_awake() noexcept {
    if ((epoch_ & 1) == 1) word_->value.store(++epoch_, std::memory_order_seq_cst);
  }

  /// Wakes the sleeping peers among the ranks. Call after storing (seq_cst) the values that they wait for.
  void ring(std::span<const Rank> ranks) noexcept {
    for (const Rank rank : ranks) {
      const auto index = static_cast<std::size_t>(index_of(rank));
      if (index >= peers_.size() || peers_[index].word == nullptr) continue;
      Peer& peer = peers_[index];
      const auto word = peer.word->value.load(std::memory_order_seq_cst);
      if ((word & 1) == 0 || word == peer.rung) continue;
      peer.rung = word;
      if (rings_ != nullptr) rings_->add();
      write_event(peer.event);
    }
  }

  /// Wakes the threads of this process that wait on `fd`. Any thread may call it.
  void ring_self() const noexcept { write_event(event_); }

  /// Wakes the threads of this process if this rank sleeps, or is about to sleep. Call it after storing (seq_cst) the
  /// values that they wait for. Any thread may call it.
  void ring_self_if_asleep() const noexcept {
    if ((word_->value.load(std::memory_order_seq_cst) & 1) == 1) ring_self();
  }

  void clear() noexcept {
    std::uint64_t count = 0;
    // It fails with EAGAIN if another thread has cleared the event.
    [[maybe_unused]] const auto result = ::read(event_.get(), &count, sizeof(count));
  }

  /// Closes every descriptor in a forked child, without signalling a peer.
  void close() noexcept {
    event_.reset();
    for (auto& peer : peers_) peer.event.reset();
  }

 private:
  struct Peer {
    const SharedWord* word = nullptr;
    Fd event;
    std::uint64_t rung = 0;
  };

  static void write_event(const Fd& event) noexcept {
    const std::uint64_t one = 1;
    // It fails with EAGAIN if the counter of the event is full; the event then signals anyway.
    [[maybe_unused]] const auto result = ::write(event.get(), &one, sizeof(one));
  }

  Fd event_;
  SharedWord private_word_;
  SharedWord* word_ = &private_word_;
  std::uint64_t epoch_ = 0;
  std::vector<Peer> peers_;  // by rank
  Counter* rings_ = nullptr;
};

}  // namespace sparkhvd
