// The driver and the connections: what is read and written when, and how they end (see engine.h).
#include <poll.h>

#include "engine.h"
#include "text.h"

namespace sparkhvd {
namespace {

// Bytes from one connection before the others get their turn.
constexpr std::size_t kReadBudget = 1 << 20;
// How long shutdown waits for peers to read the goodbye. Live peers take microseconds.
constexpr auto kGoodbyeTime = std::chrono::seconds(1);

bool ignore_frame(FrameType, std::span<const std::byte>) { return true; }

}  // namespace

bool Engine::poll_links(int timeout_ms, bool& interrupted) {
  bool moved = false;
  // Bytes that were read together with earlier ones make no event.
  for (auto& link : world_->links()) {
    if (!has_failed_ && link.is_open() && link.has_buffered()) {
      moved |= read_link(link);
      timeout_ms = 0;
      if (has_failed_) return true;
    }
  }
  for (const auto& event : poller_.wait(timeout_ms, interrupted)) {
    if (event.data.u64 == kBellKey) {
      // Counts as movement: what it was rung for may have come after this round looked, and a peer
      // rings once per sleep.
      bell_.clear();
      moved = true;
      continue;
    }
    Link& link = world_->links()[event.data.u64];
    if (!link.is_open()) continue;
    if (has_failed_) {
      moved |= link.read(ignore_frame, kReadBudget);
      part_with(link);
      continue;
    }
    if ((event.events & EPOLLOUT) != 0) moved |= link.flush();
    if ((event.events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) moved |= read_link(link);
    if (has_failed_) return true;
    if (link.is_open()) watch(link);
  }
  return moved;
}

bool Engine::read_link(Link& link) {
  const bool moved = link.read(
      [this, &link](FrameType type, std::span<const std::byte> body) {
        handle(link, type, body);
        return !has_failed_;
      },
      kReadBudget);
  if (has_failed_) return true;
  if (link.state() != Link::State::kOpen) {
    on_link_end(link);
    return true;
  }
  // An answer goes out at once, so that a connection that takes it needs no other epoll events.
  link.flush();
  watch(link);
  return moved;
}

bool Engine::flush_links() {
  bool moved = false;
  for (auto& link : world_->links()) {
    if (!link.is_open() || !link.wants_write()) continue;
    moved |= link.flush();
    watch(link);
  }
  return moved;
}

void Engine::watch(Link& link) {
  const auto index = static_cast<std::size_t>(&link - world_->links().data());
  std::uint32_t wanted = 0;
  if (link.wants_read()) wanted |= EPOLLIN;
  if (link.wants_write()) wanted |= EPOLLOUT;
  // The end of a connection is reported even to those who ask for nothing, over and over.
  if (wanted == 0) return unwatch(link);
  if (watched_[index] == wanted) return;
  if (watched_[index].has_value()) {
    poller_.modify(link.fd(), wanted, index);
  } else {
    poller_.add(link.fd(), wanted, index);
  }
  watched_[index] = wanted;
}

void Engine::unwatch(Link& link) {
  const auto index = static_cast<std::size_t>(&link - world_->links().data());
  if (watched_[index].has_value()) poller_.remove(link.fd());
  watched_[index].reset();
}

/// After a failure: the first cause travels before the end of the connection, so that nobody takes
/// this rank for it, however long the peer needs to make room. Meanwhile what the peer sends is read
/// and dropped, because it may need room too. The socket stays open for reading: closing it with
/// unread bytes would reset it and lose the message.
void Engine::part_with(Link& link) {
  link.flush();
  if (link.wants_write() && link.state() == Link::State::kOpen) return watch(link);
  link.close_write();
  unwatch(link);
}

void Engine::say_goodbye() {
  hear_device();  // what has ended on the device belongs into the goodbye
  if (!has_failed_) {
    fail_all(SPARKHVD_SHUT_DOWN, "the engine of " + rank_text(rank_) +
                                     " was shut down while the operation was in flight.");
    Goodbye goodbye;
    for (const auto& [id, group] : groups_) {
      goodbye.sets.push_back({id, group->executed, group->device.finished});
    }
    for (auto& link : world_->control_links()) {
      if (link.is_open()) link.send(encode(goodbye));
    }
    // What has ended here may need this rank's communicators on the others for a moment.
    if (!on_plane_.empty()) abort_device();
  }
  const TimePoint deadline = Clock::now() + kGoodbyeTime;
  // A connection is closed when the peer has nothing more to say: closing earlier could destroy
  // what it has not read yet, be it the goodbye or the cause of a failure.
  while (true) {
    std::vector<pollfd> polls;
    for (auto& link : world_->links()) {
      if (!link.is_open()) continue;
      const bool had_output = link.wants_write();
      link.flush();
      if (had_output && !link.wants_write()) link.close_write();
      link.read(ignore_frame, kReadBudget);
      if (link.state() != Link::State::kOpen) {
        unwatch(link);
        link.close();
        continue;
      }
      const short out = link.wants_write() ? POLLOUT : short{0};
      polls.push_back({link.fd(), static_cast<short>(POLLIN | out), 0});
    }
    if (polls.empty() || Clock::now() >= deadline) break;
    ::poll(polls.data(), polls.size(), milliseconds_until(deadline));
  }
  for (auto& link : world_->links()) link.close();
}

}  // namespace sparkhvd
