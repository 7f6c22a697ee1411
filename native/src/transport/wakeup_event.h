// Bells, by which ranks of one host wake each other: an eventfd per rank and a word in shared memory that says
// whether ringing is worth a system call. With it one epoll_wait waits for sockets and shared
// memory alike.
//
// **Ownership.** A rank writes its own word only. An odd value means "I sleep, or am about to:
// ring"; each sleep has its own odd value, so that a peer rings once per sleep.
//
// **Why no wake-up is lost.** The sleeper stores the odd value and then looks at the counters
// again; a writer stores its counter and then looks at the word. All four are sequentially
// consistent, so at least one of the two sees the other.
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

  /// The word that peers see; before, a private one.
  void use_word(SharedWord& word) noexcept { word_ = &word; }
  void add_peer(Rank rank, const SharedWord& word, Fd event) {
    const auto index = static_cast<std::size_t>(index_of(rank));
    if (peers_.size() <= index) peers_.resize(index + 1);
    peers_[index] = {&word, std::move(event), 0};
  }

  /// From now on every ring of a peer is counted there.
  void count(Counter& rings) noexcept { rings_ = &rings; }

  /// Announces sleep; look at the shared counters again before sleeping.
  void set_sleeping() noexcept {
    if ((epoch_ & 1) == 0) word_->value.store(++epoch_, std::memory_order_seq_cst);
  }
  void set_awake() noexcept {
    if ((epoch_ & 1) == 1) word_->value.store(++epoch_, std::memory_order_seq_cst);
  }

  /// Wakes those of the ranks that are peers and sleep. Call after storing (seq_cst) what they wait
  /// for.
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

  /// Wakes the threads of this process that wait on `fd`. Any thread.
  void ring_self() const noexcept { write_event(event_); }

  /// The same if this rank sleeps, or is about to. Call after storing (seq_cst) what it waits for.
  /// Any thread.
  void ring_self_if_asleep() const noexcept {
    if ((word_->value.load(std::memory_order_seq_cst) & 1) == 1) ring_self();
  }

  void clear() noexcept {
    std::uint64_t count = 0;
    // EAGAIN: another thread has cleared it.
    [[maybe_unused]] const auto result = ::read(event_.get(), &count, sizeof(count));
  }

  /// Closes every descriptor without ringing (in a forked child).
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
    // EAGAIN: it is rung already.
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
