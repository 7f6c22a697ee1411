// The driver and the connections: what is read and written when, and how they end (see engine.h).
#include <chrono>
#include <thread>

#include "engine.h"
#include "text.h"

namespace sparkhvd {
namespace {

// Bytes from one connection before the others get their turn.
constexpr std::size_t kReadBudget = 1 << 20;
// How long shutdown waits for the peers' hosts to take the last bytes. Live hosts take microseconds.
constexpr auto kGoodbyeTime = std::chrono::seconds(1);
constexpr auto kGoodbyePause = std::chrono::microseconds(200);

bool ignore_frame(FrameType, std::span<const std::byte>) { return true; }

}  // namespace

bool Engine::poll_links(int timeout_ms, bool& interrupted) {
  bool moved = false;
  // Frames that were read together with earlier ones make no event.
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
    const bool is_writable = (event.events & EPOLLOUT) != 0;
    const bool is_readable = (event.events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0;
    if (event.data.u64 >= size_) {
      DataLink& link = world_->data_links()[event.data.u64 - size_];
      if (has_failed_ || !link.is_open()) continue;
      if (is_writable) moved |= link.flush();
      if (is_readable) moved |= read_data(link);
      if (link.is_open()) watch(link);
      continue;
    }
    ControlLink& link = world_->links()[event.data.u64];
    if (!link.is_open()) continue;
    if (has_failed_) {
      moved |= link.read(ignore_frame, kReadBudget);
      part_with(link);
      continue;
    }
    if (is_writable) moved |= flush(link);
    if (is_readable) moved |= read_link(link);
    if (has_failed_) return true;
    if (link.is_open()) watch(link);
  }
  return moved;
}

bool Engine::read_link(ControlLink& link) {
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
  flush(link);
  watch(link);
  return moved;
}

bool Engine::read_data(DataLink& link) {
  const bool moved = link.read(kReadBudget);
  if (link.state() == Link::State::kOpen) return moved;
  on_data_end(link);
  if (&link == &world_->data_link(link.peer(), 0)) messages_->on_data_end(link.peer());
  return true;
}

bool Engine::flush(ControlLink& link) {
  const bool moved = link.flush();
  if (moved && link.is_tcp()) loss_watch_.start();
  return moved;
}

/// A submission writes control frames only: a peer that reads on could hold it, and Python's lock, for a whole
/// tensor.
bool Engine::flush_links(Work work) {
  bool moved = false;
  for (auto& link : world_->links()) {
    if (!link.is_open() || !link.wants_write()) continue;
    moved |= flush(link);
    watch(link);
  }
  if (work == Work::kControl) return moved;
  for (auto& link : world_->data_links()) {
    if (!link.is_open() || !link.wants_write()) continue;
    moved |= link.flush();
    watch(link);
  }
  return moved;
}

std::size_t Engine::index_of_link(const ControlLink& link) const {
  return static_cast<std::size_t>(index_of(link.peer()));
}

std::size_t Engine::index_of_link(const DataLink& link) const {
  return size_ + static_cast<std::size_t>(&link - world_->data_links().data());
}

void Engine::watch(const Link& link, std::size_t index, std::uint32_t events) {
  if (watched_[index] == events) return;
  if (watched_[index].has_value()) {
    poller_.modify(link.fd(), events, index);
  } else {
    poller_.add(link.fd(), events, index);
  }
  watched_[index] = events;
}

void Engine::unwatch(const Link& link, std::size_t index) {
  if (watched_[index].has_value()) poller_.remove(link.fd());
  watched_[index].reset();
}

/// After a failure: the first cause travels before the end of the connection, so that nobody takes
/// this rank for it, however long the peer needs to make room. Meanwhile what the peer sends is read
/// and dropped, because it may need room too. The socket stays open for reading: closing it with
/// unread bytes would reset it and lose the message.
void Engine::part_with(ControlLink& link) {
  flush(link);
  if (link.wants_write() && link.state() == Link::State::kOpen) return watch(link);
  link.close_write();
  unwatch(link, index_of_link(link));
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
    for (auto& link : world_->links()) {
      if (link.is_open()) link.send(encode(goodbye));
    }
    // What has ended here may need this rank's communicators on the others for a moment.
    if (!on_plane_.empty()) abort_device();
  }
  for (auto& link : world_->data_links()) link.close_write();
  const TimePoint deadline = Clock::now() + kGoodbyeTime;
  while (!part_with_all() && Clock::now() < deadline) {
    std::this_thread::sleep_for(kGoodbyePause);
  }
  world_->close_descriptors();
}

/// Closes every connection whose bytes have reached the peer's host: closing earlier could destroy them,
/// be it tensors, the goodbye or the cause of a failure. True if none is left.
bool Engine::part_with_all() {
  bool is_done = true;
  const auto part = [&](Link& link) {
    const bool is_over = link.state() != Link::State::kOpen || link.is_delivered();
    if (is_over) link.close();
    is_done = is_done && is_over;
  };
  for (auto& link : world_->data_links()) {
    if (link.is_open()) part(link);
  }
  for (auto& link : world_->links()) {
    if (!link.is_open()) continue;
    const bool had_output = link.wants_write();
    link.flush();
    if (had_output && !link.wants_write()) link.close_write();
    link.read(ignore_frame, kReadBudget);  // the peer may need room
    if (link.wants_write() && link.state() == Link::State::kOpen) {
      is_done = false;
    } else {
      part(link);
    }
  }
  return is_done;
}

}  // namespace sparkhvd
