#include "engine/graceful_close.h"

#include <atomic>
#include <chrono>
#include <cstddef>
#include <span>
#include <system_error>
#include <thread>
#include <utility>

namespace sparkhvd {
namespace {

constexpr auto kGoodbyeTime = std::chrono::seconds(1);
// Longest wait in the caller's thread. A live host takes microseconds, or 40 ms if its kernel delays the last
// acknowledgement.
constexpr auto kGoodbyeHere = std::chrono::milliseconds(100);
constexpr auto kGoodbyePause = std::chrono::microseconds(200);
// Largest number of bytes that are read from a connection in one round.
constexpr std::size_t kReadBudget = 1 << 20;

// Number of background threads that still close connections. It is atomic and has no lock, because a lock could be held
// at the moment of a fork.
std::atomic<std::size_t> background = 0;

bool ignore_frame(FrameType, std::span<const std::byte>) { return true; }

}  // namespace

GracefulClose::GracefulClose(std::vector<ControlLink> links, std::vector<DataLink> data_links)
    : links_(std::move(links)), data_links_(std::move(data_links)) {
  for (auto& link : links_) link.leave_engine();
  for (auto& link : data_links_) link.leave_engine();
}

void GracefulClose::say(GracefulClose graceful_close) {
  const TimePoint now = Clock::now();
  if (graceful_close.close_until(now + kGoodbyeHere)) return;
  ++background;
  const auto go_on = [until = now + kGoodbyeTime](GracefulClose left) {
    left.close_until(until);
    left = {{}, {}};
    --background;
  };
  try {
    std::thread(go_on, std::move(graceful_close)).detach();
  } catch (const std::system_error&) {  // no thread available
    go_on(std::move(graceful_close));
  }
}

void GracefulClose::finish() {
  // The deadline is for a forked child: it has a copy of the counter, but no background threads that count down.
  const TimePoint deadline = Clock::now() + kGoodbyeTime;
  while (background > 0 && Clock::now() < deadline) std::this_thread::sleep_for(kGoodbyePause);
}

bool GracefulClose::close_until(TimePoint deadline) {
  while (!close_delivered()) {
    if (Clock::now() >= deadline) return false;
    std::this_thread::sleep_for(kGoodbyePause);
  }
  return true;
}

/// Closes every connection with all bytes delivered to the peer's host. True if all connections are closed.
bool GracefulClose::close_delivered() {
  bool is_done = true;
  const auto part = [&](Link& link) {
    const bool is_over = link.state() != Link::State::kOpen || link.is_delivered();
    if (is_over) link.close();
    is_done = is_done && is_over;
  };
  for (auto& link : data_links_) {
    if (link.is_open()) part(link);
  }
  for (auto& link : links_) {
    if (!link.is_open()) continue;
    const bool had_output = link.wants_write();
    link.flush();
    if (had_output && !link.wants_write()) link.close_write();
    link.read(ignore_frame, kReadBudget);  // reads, because the peer may wait until it can write
    if (link.wants_write() && link.state() == Link::State::kOpen) {
      is_done = false;
    } else {
      part(link);
    }
  }
  return is_done;
}

}  // namespace sparkhvd
