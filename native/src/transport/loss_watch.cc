#include "transport/loss_watch.h"

#include <algorithm>
#include <utility>

#include "transport/tcp.h"

namespace sparkhvd {
namespace {

constexpr auto kPeriod = std::chrono::milliseconds(500);
// Resolution of the kernel's clock.
constexpr auto kTick = std::chrono::milliseconds(10);

}  // namespace

LossWatch::LossWatch(double host_loss_s) : limit_s_(std::max(3.0, host_loss_s)) {}

void LossWatch::start() {
  if (next_ != kNever) return;
  last_ = Clock::now();
  next_ = last_ + kPeriod;
}

std::optional<Rank> LossWatch::look(std::span<ControlLink> links, TimePoint now) {
  if (now < next_) return std::nullopt;
  // If this process itself was stopped, it has not seen the answers of that time. So it counts at most two periods.
  const auto elapsed = now - last_;
  const auto passed = std::min<Clock::duration>(elapsed, 2 * kPeriod);
  last_ = now;
  next_ = kNever;
  for (auto& link : links) {
    if (!link.is_open() || !link.is_tcp()) continue;
    const auto state = tcp_state(link.fd());
    if (!state || (!state->is_owed && !state->is_blocked)) {
      heard_.erase(link.peer());
      continue;
    }
    next_ = now + kPeriod;
    auto& heard = heard_.try_emplace(link.peer(), Heard{state->segments}).first->second;
    if (std::exchange(heard.segments, state->segments) != state->segments) {
      // A segment arrived without an answer to this rank's bytes, so it is a keepalive of the peer's kernel.
      if (state->since_answer > elapsed + kTick) {
        heard.keepalive_period = std::max(heard.keepalive_period, heard.silence + passed);
      }
      heard.silence = {};
      continue;
    }
    heard.silence = std::min<Clock::duration>(heard.silence + passed, state->since_answer);
    std::chrono::duration<double> limit(limit_s_);
    if (!state->is_owed) {
      if (heard.keepalive_period == Clock::duration::zero()) continue;
      // The peer may have another host_loss_s, so its keepalives may be less frequent.
      limit = std::max(limit, 1.5 * std::chrono::duration<double>(heard.keepalive_period));
    }
    if (heard.silence >= limit) return link.peer();
  }
  return std::nullopt;
}

}  // namespace sparkhvd
