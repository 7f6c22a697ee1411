#include "transport/control_link.h"

#include <fcntl.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "error.h"

namespace sparkhvd {

void ControlLink::send(Bytes frame) {
  if (!can_write()) return;
  outgoing_.push_back({std::move(frame), 0, {}});
  has_output();
}

void ControlLink::send(Bytes head, std::span<const std::byte> payload) {
  if (!can_write()) return;
  has_output();
  std::size_t written = 0;
  if (outgoing_.empty()) {
    // The cast is safe, because sendmsg() only reads the bytes.
    auto* bytes = const_cast<std::byte*>(payload.data());
    std::array<iovec, 2> parts{iovec{head.data(), head.size()}, iovec{bytes, payload.size()}};
    written = write_some(parts).value_or(0);
    has_written_ = has_written_ || written > 0;
  }
  if (written == head.size() + payload.size()) return;
  head.insert(head.end(), payload.begin(), payload.end());
  outgoing_.push_back({std::move(head), written, {}});
}

void ControlLink::send_with_fds(Bytes frame, std::span<const int> fds) {
  if (fds.size() > kMaxFds) throw Error(SPARKHVD_INTERNAL, "too many descriptors in one message.");
  if (!can_write()) return;
  Outgoing item{std::move(frame), 0, {}};
  for (const int fd : fds) {
    item.fds.emplace_back(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
    if (!item.fds.back().valid()) throw_errno("fcntl(F_DUPFD_CLOEXEC)");
  }
  outgoing_.push_back(std::move(item));
  has_output();
}

bool ControlLink::flush() {
  bool moved = false;
  while (wants_write()) {
    std::array<iovec, kMaxVectors> vectors{};
    std::size_t count = 0;
    for (auto& item : outgoing_) {
      // Descriptors arrive with the first bytes of a sendmsg() call, so a frame with descriptors must begin a new call.
      if (count == kMaxVectors || (!item.fds.empty() && count > 0)) break;
      vectors[count++] = {item.frame.data() + item.written, item.frame.size() - item.written};
    }
    const auto written = write_some(std::span(vectors).first(count), outgoing_.front().fds);
    if (!written) break;
    moved = moved || *written > 0;
    outgoing_.front().fds.clear();
    for (std::size_t left = *written; !outgoing_.empty();) {
      Outgoing& item = outgoing_.front();
      const std::size_t step = std::min(left, item.frame.size() - item.written);
      item.written += step;
      left -= step;
      if (item.written < item.frame.size()) break;
      outgoing_.pop_front();
    }
  }
  return moved;
}

std::vector<Fd> ControlLink::take_fds(std::size_t count) {
  std::vector<Fd> taken;
  for (; taken.size() < count && !fds_.empty(); fds_.pop_front()) {
    taken.push_back(std::move(fds_.front()));
  }
  return taken;
}

/// Calls the handler for every complete frame in the buffer. False if the handler stops reading.
bool ControlLink::parse(const Handler& handler) {
  while (end_ - begin_ >= kFrameHeaderBytes) {
    const auto bytes = std::span<const std::byte>(buffer_).subspan(begin_, end_ - begin_);
    const FrameHeader header = decode_header(bytes.first(kFrameHeaderBytes));
    if (header.type == FrameType::kData) throw nonsense("tensor bytes among control frames");
    const std::size_t frame = kFrameHeaderBytes + header.body_bytes;
    if (bytes.size() < frame) {
      if (buffer_.size() < frame) buffer_.resize(frame);
      break;
    }
    begin_ += frame;
    if (!handler(header.type, bytes.subspan(kFrameHeaderBytes, header.body_bytes))) {
      resume_ = true;
      return false;
    }
    if (!is_open()) return false;
  }
  return true;
}

bool ControlLink::read(const Handler& handler, std::size_t budget) {
  if (!is_open()) return false;
  if (buffer_.empty()) buffer_.resize(kBufferBytes);
  bool moved = std::exchange(resume_, false);
  std::size_t total = 0;
  const auto take = [](Link& link, int fd) {
    static_cast<ControlLink&>(link).fds_.emplace_back(fd);
  };
  try {
    // epoll is level-triggered, so it reports bytes beyond the budget again.
    while (state() == State::kOpen && parse(handler) && total < budget) {
      std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
      end_ -= std::exchange(begin_, 0);
      iovec room{buffer_.data() + end_, buffer_.size() - end_};
      const auto count = read_some(std::span(&room, 1), accept_fds_ ? +take : nullptr);
      if (fds_.size() > kMaxFds) throw nonsense("too many descriptors");
      if (!count) break;
      // If the socket gave fewer bytes than there was room for, it is empty, so another call would be wasted.
      total = *count < room.iov_len ? budget : total + *count;
      end_ += *count;
      moved = true;
    }
  } catch (const Error& error) {
    if (error.status() != SPARKHVD_PEER_LOST) throw;
    fail(std::string("it sent ") + error.what());
  }
  return moved;
}

}  // namespace sparkhvd
