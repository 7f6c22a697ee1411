#include "transport/loss_watch.h"

#include <algorithm>

#include "transport/tcp.h"

namespace sparkhvd {
namespace {

constexpr auto kPeriod = std::chrono::milliseconds(500);

}  // namespace

LossWatch::LossWatch(double host_loss_s) : limit_s_(std::max(3.0, host_loss_s)) {}

void LossWatch::start() {
  if (next_ != kNever) return;
  last_ = Clock::now();
  next_ = last_ + kPeriod;
}

std::optional<Rank> LossWatch::look(std::span<ControlLink> links, TimePoint now) {
  if (now < next_) return std::nullopt;
  // A process that was stopped itself has not seen the answers of that time, so it counts little of it.
  const auto passed = std::min<Clock::duration>(now - last_, 2 * kPeriod);
  last_ = now;
  next_ = kNever;
  for (auto& link : links) {
    if (!link.is_open() || !link.is_tcp()) continue;
    const auto found = tcp_silence(link.fd());
    if (!found || !found->is_owed) {
      silence_.erase(link.peer());
      continue;
    }
    next_ = now + kPeriod;
    auto& silence = silence_[link.peer()];
    silence = std::min<Clock::duration>(silence + passed, found->since_answer);
    if (silence >= std::chrono::duration<double>(limit_s_)) return link.peer();
  }
  return std::nullopt;
}

}  // namespace sparkhvd
