#include "transport/link.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "error.h"

namespace sparkhvd {
namespace {

// Holds several control frames; tensor bytes go past it.
constexpr std::size_t kBufferBytes = 64 << 10;
constexpr std::size_t kMaxVectors = 16;
constexpr std::size_t kMaxFds = 4;
// A peer that runs ahead by more than this has to wait, as with one stream.
constexpr std::size_t kMaxEarlyBytes = std::size_t{1} << 30;

}  // namespace

void Link::send(Bytes frame) {
  if (state_ != State::kOpen && write_broken_) return;
  Outgoing item;
  item.owned = std::move(frame);
  outgoing_.push_back(std::move(item));
}

void Link::send_with_fds(Bytes frame, std::span<const int> fds) {
  if (fds.size() > kMaxFds) throw Error(SPARKHVD_INTERNAL, "too many descriptors in one message.");
  if (state_ != State::kOpen && write_broken_) return;
  Outgoing item;
  item.owned = std::move(frame);
  for (const int fd : fds) {
    item.fds.emplace_back(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
    if (!item.fds.back().valid()) throw_errno("fcntl(F_DUPFD_CLOEXEC)");
  }
  outgoing_.push_back(std::move(item));
}

std::vector<Fd> Link::take_fds(std::size_t count) {
  std::vector<Fd> taken;
  for (; taken.size() < count && !fds_.empty(); fds_.pop_front()) {
    taken.push_back(std::move(fds_.front()));
  }
  return taken;
}

Link::Ticket Link::send_data(std::int32_t stream, std::span<const std::byte> payload) {
  while (!payload.empty()) {
    const std::size_t count = std::min(payload.size(), kMaxDataBytes);
    Outgoing item;
    item.owned = encode_data_header(stream, count);
    item.lent = payload.first(count);
    payload = payload.subspan(count);
    item.completes = true;
    item.stream = stream;
    ++queued_;
    outgoing_.push_back(std::move(item));
  }
  return queued_;
}

Link::Ticket Link::receive_data(std::int32_t stream, std::span<std::byte> target) {
  Posted posted;
  posted.stream = stream;
  posted.target = target;
  posted.done = target.empty();
  take_early(posted);
  posted_.push_back(posted);
  ++posted_count_;
  complete_posted();
  go_on();
  return posted_count_;
}

void Link::go_on() noexcept {
  if (!is_paused_) return;
  is_paused_ = false;
  resume_ = true;
}

bool Link::is_discarded() const {
  return discard_data_ || std::ranges::count(discarded_, data_stream_) > 0;
}

void Link::complete_posted() {
  while (!posted_.empty() && posted_.front().done) {
    posted_.pop_front();
    ++received_;
  }
}

std::ptrdiff_t Link::send_some(std::span<iovec> vectors, std::span<const Fd> fds) {
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMaxFds * sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = vectors.data();
  message.msg_iovlen = vectors.size();
  if (!fds.empty()) {
    message.msg_control = control.data();
    message.msg_controllen = CMSG_SPACE(fds.size() * sizeof(int));
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
    for (std::size_t i = 0; i < fds.size(); ++i) {
      const int fd = fds[i].get();
      std::memcpy(CMSG_DATA(header) + i * sizeof(int), &fd, sizeof(int));
    }
  }
  return ::sendmsg(fd(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

bool Link::flush() {
  bool moved = false;
  while (!outgoing_.empty() && !write_broken_ && socket_.valid()) {
    if (outgoing_.front().size() == 0) {  // cancelled
      ++sent_;
      outgoing_.pop_front();
      continue;
    }
    std::array<iovec, kMaxVectors> vectors{};
    std::size_t count = 0;
    for (const auto& item : outgoing_) {
      if (count + 2 > kMaxVectors) break;
      // Descriptors arrive with the bytes of the call that sends them, so their frame begins one.
      if (!item.fds.empty() && count > 0) break;
      std::size_t skip = item.written;
      if (skip < item.owned.size()) {
        vectors[count++] = {const_cast<std::byte*>(item.owned.data()) + skip,
                            item.owned.size() - skip};
        skip = 0;
      } else {
        skip -= item.owned.size();
      }
      if (skip < item.lent.size()) {
        vectors[count++] = {const_cast<std::byte*>(item.lent.data()) + skip,
                            item.lent.size() - skip};
      }
    }
    const auto written = send_some(std::span(vectors).first(count), outgoing_.front().fds);
    if (written < 0) {
      if (errno == EINTR) continue;
      // A write error is not acted on: the peer's last words may still be unread, and they tell the
      // cause.
      if (errno != EAGAIN && errno != EWOULDBLOCK) write_broken_ = true;
      return moved;
    }
    moved = moved || written > 0;
    if (traffic_ != nullptr) traffic_->sent.add(static_cast<std::uint64_t>(written));
    outgoing_.front().fds.clear();
    auto left = static_cast<std::size_t>(written);
    while (!outgoing_.empty()) {
      Outgoing& item = outgoing_.front();
      const std::size_t step = std::min(left, item.size() - item.written);
      item.written += step;
      left -= step;
      if (item.written < item.size()) break;
      if (item.completes) ++sent_;
      outgoing_.pop_front();
    }
  }
  return moved;
}

std::ptrdiff_t Link::receive_some(std::span<std::byte> target) {
  while (true) {
    iovec vector{target.data(), target.size()};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(kMaxFds * sizeof(int))> control;
    msghdr message{};
    message.msg_iov = &vector;
    message.msg_iovlen = 1;
    if (accept_fds_) {
      message.msg_control = control.data();
      message.msg_controllen = control.size();
    }
    const auto count = ::recvmsg(fd(), &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (count < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return 0;
      fail("its connection broke: " + errno_text(errno));
      return -1;
    }
    if (traffic_ != nullptr) traffic_->received.add(static_cast<std::uint64_t>(count));
    if (accept_fds_) {
      for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
           header = CMSG_NXTHDR(&message, header)) {
        if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
        const std::size_t fds = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (std::size_t i = 0; i < fds; ++i) {
          int received = -1;
          std::memcpy(&received, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
          fds_.emplace_back(received);
        }
      }
      if (fds_.size() > kMaxFds) {
        fail("it sent more descriptors than it should");
        return -1;
      }
    }
    if (count == 0) {
      state_ = State::kEnded;
      return -1;
    }
    return count;
  }
}

void Link::fail(std::string trouble) {
  state_ = State::kBroken;
  trouble_ = std::move(trouble);
}

Link::Posted* Link::find_posted() {
  for (auto& posted : posted_) {
    if (!posted.done && posted.stream == data_stream_) return &posted;
  }
  return nullptr;
}

void Link::keep_early_data() noexcept {
  keeps_early_ = true;
  go_on();
}

void Link::keep_early(std::span<const std::byte> bytes) {
  // A frame arrives in pieces of the buffer's size; small ones are joined.
  if (early_.empty() || early_.back().stream != data_stream_ ||
      early_.back().bytes.size() + bytes.size() > kMaxDataBytes) {
    early_.push_back({data_stream_, {}, 0});
  }
  early_.back().bytes.insert(early_.back().bytes.end(), bytes.begin(), bytes.end());
  early_bytes_ += bytes.size();
}

void Link::take_early(Posted& posted) {
  for (auto item = early_.begin(); item != early_.end() && !posted.done;) {
    if (item->stream != posted.stream) {
      ++item;
      continue;
    }
    const std::size_t step =
        std::min(item->bytes.size() - item->taken, posted.target.size() - posted.filled);
    std::memcpy(posted.target.data() + posted.filled, item->bytes.data() + item->taken, step);
    posted.filled += step;
    item->taken += step;
    early_bytes_ -= step;
    posted.done = posted.filled == posted.target.size();
    if (item->taken == item->bytes.size()) item = early_.erase(item);
  }
}

bool Link::deliver() {
  // From the buffer into lent memory. Returns false when these bytes have not been asked for yet.
  while (data_left_ > 0 && begin_ < end_) {
    const std::size_t available = std::min(data_left_, end_ - begin_);
    if (is_discarded()) {
      data_left_ -= available;
      begin_ += available;
      continue;
    }
    Posted* posted = find_posted();
    if (posted == nullptr) {
      if (!keeps_early_ || early_bytes_ >= kMaxEarlyBytes) return false;
      keep_early(std::span<const std::byte>(buffer_).subspan(begin_, available));
      data_left_ -= available;
      begin_ += available;
      continue;
    }
    const std::size_t step = std::min(available, posted->target.size() - posted->filled);
    std::memcpy(posted->target.data() + posted->filled, buffer_.data() + begin_, step);
    posted->filled += step;
    data_left_ -= step;
    begin_ += step;
    if (posted->filled == posted->target.size()) {
      posted->done = true;
      complete_posted();
    }
  }
  return true;
}

bool Link::parse(const Handler& handler) {
  // Returns false to stop reading: paused, stopped by the handler, or broken.
  while (true) {
    if (data_left_ > 0) {
      if (!deliver()) {
        is_paused_ = true;
        return false;
      }
      if (data_left_ > 0) return true;  // buffer is empty
    }
    const std::size_t available = end_ - begin_;
    if (available < kFrameHeaderBytes) break;
    const auto bytes = std::span<const std::byte>(buffer_).subspan(begin_, available);
    const FrameHeader header = decode_header(bytes.first(kFrameHeaderBytes));
    if (header.type == FrameType::kData) {
      if (available < kDataHeaderBytes) break;
      std::memcpy(&data_stream_, bytes.data() + kFrameHeaderBytes, sizeof(data_stream_));
      begin_ += kDataHeaderBytes;
      data_left_ = header.body_bytes - sizeof(data_stream_);
      continue;
    }
    const std::size_t frame = kFrameHeaderBytes + header.body_bytes;
    if (available < frame) {
      if (buffer_.size() < frame) buffer_.resize(frame);
      break;
    }
    begin_ += frame;
    if (!handler(header.type, bytes.subspan(kFrameHeaderBytes, header.body_bytes))) {
      resume_ = true;
      return false;
    }
    if (!socket_.valid()) return false;
  }
  return true;
}

bool Link::read(const Handler& handler, std::size_t budget) {
  if (!socket_.valid()) return false;
  if (buffer_.empty()) buffer_.resize(kBufferBytes);
  bool moved = std::exchange(resume_, false);
  std::size_t total = 0;
  try {
    while (state_ == State::kOpen && parse(handler)) {
      if (total >= budget) break;  // level-triggered: the rest is reported again
      // In the middle of a tensor with nothing buffered: straight into its memory.
      Posted* posted = data_left_ > 0 && begin_ == end_ ? find_posted() : nullptr;
      if (posted != nullptr) {
        const std::size_t room = posted->target.size() - posted->filled;
        const auto count =
            receive_some(posted->target.subspan(posted->filled, std::min(room, data_left_)));
        if (count <= 0) break;
        const auto bytes = static_cast<std::size_t>(count);
        posted->filled += bytes;
        data_left_ -= bytes;
        total += bytes;
        moved = true;
        if (posted->filled == posted->target.size()) {
          posted->done = true;
          complete_posted();
        }
        continue;
      }
      if (begin_ == end_) {
        begin_ = end_ = 0;
      } else if (begin_ > 0) {
        std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
        end_ -= begin_;
        begin_ = 0;
      }
      const std::size_t room = buffer_.size() - end_;
      const auto count = receive_some(std::span(buffer_).subspan(end_));
      if (count <= 0) break;
      // Less than there was room for means that the socket is empty; asking again would cost a
      // call.
      if (static_cast<std::size_t>(count) < room) total = budget;
      end_ += static_cast<std::size_t>(count);
      total += static_cast<std::size_t>(count);
      moved = true;
    }
  } catch (const Error& error) {
    if (error.status() != SPARKHVD_PEER_LOST) throw;
    fail(std::string("it sent ") + error.what());
  }
  return moved;
}

void Link::cancel_lent() {
  // A frame that is partly written must be finished for the ones behind it to be understood.
  for (auto item = outgoing_.begin(); item != outgoing_.end();) {
    if (item->lent.empty()) {
      ++item;
    } else if (item->written == 0) {
      item = outgoing_.erase(item);
    } else {
      item->owned.insert(item->owned.end(), item->lent.begin(), item->lent.end());
      item->lent = {};
      item->completes = false;
      ++item;
    }
  }
  sent_ = queued_;
  discard_data_ = true;
  early_.clear();
  early_bytes_ = 0;
  posted_.clear();
  received_ = posted_count_;
  go_on();
}

void Link::cancel_lent(std::int32_t stream) {
  for (auto& item : outgoing_) {
    if (item.lent.empty() || item.stream != stream) continue;
    if (item.written == 0) {
      item.owned.clear();  // an empty item only counts
    } else {
      item.owned.insert(item.owned.end(), item.lent.begin(), item.lent.end());
    }
    item.lent = {};
  }
  for (auto& posted : posted_) posted.done = posted.done || posted.stream == stream;
  complete_posted();
  std::erase_if(early_, [&](const Early& item) {
    if (item.stream == stream) early_bytes_ -= item.bytes.size() - item.taken;
    return item.stream == stream;
  });
  discarded_.push_back(stream);
  go_on();
}

void Link::close_write() noexcept {
  if (socket_.valid()) ::shutdown(socket_.get(), SHUT_WR);
}

}  // namespace sparkhvd
