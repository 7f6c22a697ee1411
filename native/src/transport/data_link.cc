#include "transport/data_link.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "error.h"

namespace sparkhvd {

// ---- Sending ---------------------------------------------------------------------------------

DataLink::Ticket DataLink::send_data(std::int32_t stream, std::span<const std::byte> payload) {
  Stream& state = streams_[stream];
  const bool is_done = payload.empty() || is_cancelled_ || state.is_cancelled;
  const Ticket ticket = sends_.push({stream, payload, is_done});
  if (!is_done) {
    state.sends.push_back(ticket);
    make_frames(stream, state);
  }
  return ticket;
}

void DataLink::grant(std::int32_t stream, std::uint64_t bytes) {
  Stream& state = streams_[stream];
  state.granted = std::max(state.granted, bytes);
  make_frames(stream, state);
}

void DataLink::make_frames(std::int32_t stream, Stream& state) {
  const std::uint64_t granted = std::max(state.granted, unasked_);
  while (!state.sends.empty() && state.framed < granted) {
    const Ticket ticket = state.sends.front();
    Send& send = sends_.at(ticket);
    const auto bytes = static_cast<std::size_t>(
        std::min<std::uint64_t>({send.left.size(), kMaxDataBytes, granted - state.framed}));
    Frame frame;
    frame.header = encode_data_header(stream, bytes);
    frame.payload = send.left.first(bytes);
    frame.stream = stream;
    send.left = send.left.subspan(bytes);
    state.framed += bytes;
    if (send.left.empty()) {
      frame.completes = ticket;
      state.sends.pop_front();
    }
    frames_.push_back(std::move(frame));
    has_output();
  }
}

bool DataLink::flush() {
  bool moved = false;
  while (wants_write()) {
    std::array<iovec, kMaxVectors> vectors{};
    std::size_t count = 0;
    for (auto& frame : frames_) {
      if (count + 2 > kMaxVectors) break;
      const std::size_t of_header = std::min(frame.written, frame.header.size());
      if (of_header < frame.header.size()) {
        vectors[count++] = {frame.header.data() + of_header, frame.header.size() - of_header};
      }
      const auto rest = frame.payload.subspan(frame.written - of_header);
      vectors[count++] = {const_cast<std::byte*>(rest.data()), rest.size()};
    }
    const auto written = write_some(std::span(vectors).first(count));
    if (!written) break;
    moved = moved || *written > 0;
    count_written(*written);
  }
  if (moved) written_at_ = Clock::now();
  return moved;
}

void DataLink::count_written(std::size_t bytes) {
  while (!frames_.empty()) {
    Frame& frame = frames_.front();
    const std::size_t step = std::min(bytes, frame.size() - frame.written);
    frame.written += step;
    bytes -= step;
    if (frame.written < frame.size()) return;
    if (frame.completes != 0) sends_.finish(frame.completes);
    frames_.pop_front();
  }
}

// ---- Receiving -------------------------------------------------------------------------------

DataLink::Ticket DataLink::receive_data(std::int32_t stream, std::span<std::byte> target) {
  Stream& state = streams_[stream];
  const Ticket ticket = receives_.push({stream, target, target.empty() || is_cancelled_});
  if (!receives_.is_done(ticket)) {
    state.posted += target.size();
    state.receives.push_back(ticket);
    take_early(state);
  }
  return ticket;
}

std::optional<std::uint64_t> DataLink::take_credit(std::int32_t stream) {
  Stream& state = streams_[stream];
  const std::uint64_t wanted = state.posted + unasked_;
  // Sends credit when half of it is used, so that the sender need not wait until the credit arrives.
  if (wanted - std::max(state.offered, unasked_) < unasked_ / 2) return std::nullopt;
  return state.offered = wanted;
}

void DataLink::discard(Ticket ticket) {
  if (!received(ticket)) receives_.at(ticket).is_discarded = true;
}

std::size_t DataLink::missing(Ticket ticket) noexcept {
  return received(ticket) ? 0 : receives_.at(ticket).left.size();
}

void DataLink::redirect(Ticket ticket, std::span<std::byte> target) {
  if (!received(ticket)) receives_.at(ticket).left = target.first(missing(ticket));
}

void DataLink::copy(const Receive& receive, std::span<const std::byte> bytes) {
  if (!receive.is_discarded) std::memcpy(receive.left.data(), bytes.data(), bytes.size());
}

void DataLink::advance(Stream& stream, std::size_t bytes) {
  const Ticket ticket = stream.receives.front();
  Receive& receive = receives_.at(ticket);
  receive.left = receive.left.subspan(bytes);
  if (!receive.left.empty()) return;
  stream.receives.pop_front();
  receives_.finish(ticket);
}

void DataLink::take_early(Stream& stream) {
  while (stream.taken < stream.early.size() && !stream.receives.empty()) {
    const Receive& receive = receives_.at(stream.receives.front());
    const std::size_t step = std::min(stream.early.size() - stream.taken, receive.left.size());
    copy(receive, std::span(stream.early).subspan(stream.taken, step));
    stream.taken += step;
    advance(stream, step);
  }
  if (stream.taken == stream.early.size()) {
    stream.early.clear();
    stream.taken = 0;
  }
}

void DataLink::begin_frame(std::span<const std::byte> header) {
  const FrameHeader decoded = decode_header(header.first(kFrameHeaderBytes));
  if (decoded.type != FrameType::kData) throw nonsense("a control frame among tensor bytes");
  std::int32_t stream = 0;
  std::memcpy(&stream, header.data() + kFrameHeaderBytes, sizeof(stream));
  data_left_ = decoded.body_bytes - sizeof(stream);
  current_ = &streams_[stream];
  if (streams_.size() > kMaxStreams) throw nonsense("bytes of too many process sets");
  current_->arrived += data_left_;
  if (!current_->is_cancelled && current_->arrived > std::max(current_->offered, unasked_)) {
    throw nonsense("tensor bytes that were not requested");
  }
}

/// Copies received bytes of the current frame into the lent memory of their receives, or keeps them until a receive
/// comes.
void DataLink::deliver(std::span<const std::byte> bytes) {
  data_left_ -= bytes.size();
  Stream& stream = *current_;
  if (stream.is_cancelled) return;
  while (!bytes.empty() && !stream.receives.empty()) {
    const Receive& receive = receives_.at(stream.receives.front());
    const std::size_t step = std::min(bytes.size(), receive.left.size());
    copy(receive, bytes.first(step));
    bytes = bytes.subspan(step);
    advance(stream, step);
  }
  stream.early.insert(stream.early.end(), bytes.begin(), bytes.end());
}

void DataLink::parse() {
  while (begin_ < end_) {
    const auto bytes = std::span<const std::byte>(buffer_).subspan(begin_, end_ - begin_);
    if (data_left_ > 0) {
      const std::size_t step = std::min(data_left_, bytes.size());
      deliver(bytes.first(step));
      begin_ += step;
    } else {
      if (bytes.size() < kDataHeaderBytes) break;
      begin_frame(bytes.first(kDataHeaderBytes));
      begin_ += kDataHeaderBytes;
    }
  }
  std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
  end_ -= std::exchange(begin_, 0);
}

bool DataLink::read(std::size_t budget) {
  if (!is_open() || is_cancelled_) return false;
  if (buffer_.empty()) buffer_.resize(kBufferBytes);
  bool moved = false;
  try {
    // epoll is level-triggered, so it reports bytes beyond the budget again.
    for (std::size_t total = 0; state() == State::kOpen && total < budget;) {
      // In the middle of a tensor, reads directly into its memory, and the next header into the buffer.
      std::array<iovec, 2> vectors{};
      std::size_t direct = 0;
      if (data_left_ > 0 && !current_->is_cancelled && !current_->receives.empty()) {
        const Receive& receive = receives_.at(current_->receives.front());
        if (!receive.is_discarded) direct = std::min(receive.left.size(), data_left_);
        vectors[0] = {receive.left.data(), direct};
      }
      const std::size_t room = direct == 0            ? buffer_.size() - end_
                               : direct == data_left_ ? kDataHeaderBytes
                                                      : 0;
      vectors[1] = {buffer_.data() + end_, room};
      const auto count = read_some(direct == 0 ? std::span(vectors).last(1) : std::span(vectors));
      if (!count) break;
      moved = true;
      const std::size_t arrived = std::min(*count, direct);
      if (arrived > 0) {
        data_left_ -= arrived;
        advance(*current_, arrived);
      }
      end_ += *count - arrived;
      parse();
      // If the socket gave fewer bytes than there was room for, it is empty, so another call would be wasted.
      total = *count < direct + room ? budget : total + *count;
    }
  } catch (const Error& error) {
    if (error.status() != SPARKHVD_PEER_LOST) throw;
    fail(std::string("it sent ") + error.what());
  }
  if (moved) read_at_ = Clock::now();
  return moved;
}

// ---- Ends ------------------------------------------------------------------------------------

void DataLink::cancel_lent() {
  is_cancelled_ = true;
  frames_.clear();
  streams_.clear();
  current_ = nullptr;
  sends_.finish_all();
  receives_.finish_all();
}

void DataLink::cancel_lent(std::int32_t stream) {
  Stream& state = streams_[stream];
  state.is_cancelled = true;
  std::erase_if(frames_,
                [&](const Frame& frame) { return frame.stream == stream && frame.written == 0; });
  if (!frames_.empty() && frames_.front().stream == stream) {
    // The rest of a partly written frame must still be sent, or the peer would misread later frames.
    Frame& frame = frames_.front();
    frame.owned.assign(frame.payload.begin(), frame.payload.end());
    frame.payload = frame.owned;
    frame.completes = 0;
  }
  for (auto& send : sends_.transfers) send.done = send.done || send.stream == stream;
  for (auto& receive : receives_.transfers) receive.done = receive.done || receive.stream == stream;
  sends_.pop_done();
  receives_.pop_done();
  state.sends.clear();
  state.receives.clear();
  state.early = {};
  state.taken = 0;
}

void DataLink::forget(std::int32_t stream) {
  const auto entry = streams_.find(stream);
  if (entry == streams_.end()) return;
  if (current_ == &entry->second) {
    if (data_left_ > 0) return;  // only an invalid peer sends bytes of a forgotten stream
    current_ = nullptr;
  }
  streams_.erase(entry);
}

}  // namespace sparkhvd
