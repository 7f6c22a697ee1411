// The connections to the other ranks: reading, writing, closing. peer_ends.cc handles ranks that leave or are lost.
#include "engine/peers.h"

#include "engine/graceful_close.h"
#include "engine/orders.h"

namespace sparkhvd {
namespace {

constexpr std::uint64_t kBellKey = UINT64_MAX;
// Largest number of bytes that are read from a connection before the other connections are read.
constexpr std::size_t kReadBudget = 1 << 20;

bool ignore_frame(FrameType, std::span<const std::byte>) { return true; }

}  // namespace

Peers::Peers(World& world, Poller& poller, WakeupEvent& wakeup, InFlight& in_flight,
             Recorder& recorder, PeerEvents& events, Stacks& stacks, double host_loss_s)
    : world_(world),
      poller_(poller),
      wakeup_(wakeup),
      in_flight_(in_flight),
      recorder_(recorder),
      events_(events),
      stacks_(stacks),
      watched_(world.links().size() + world.data_links().size()),
      has_left_(world.size(), false),
      loss_watch_(host_loss_s) {}

void Peers::start() {
  poller_.add(wakeup_.fd(), EPOLLIN, kBellKey);
  wakeup_.count(recorder_.activity().wakeups);
  const auto start = [this](auto links, std::vector<Link*>& with_output) {
    for (auto& link : links) {
      link.count(recorder_.activity().sockets);
      link.list_output(with_output);
      if (!link.is_open()) continue;
      watch(link);
      if (link.wants_write()) with_output.push_back(&link);
    }
  };
  start(world_.links(), with_frames_);
  start(world_.data_links(), with_tensors_);
  // Bytes that came with the handshake are already buffered, so no epoll event would report them.
  wakeup_.ring_self();
}

// ---- Reading and writing ---------------------------------------------------------------------

bool Peers::poll(int timeout_ms, bool& interrupted) {
  bool moved = false;
  // Frames that were buffered together with earlier frames cause no epoll event.
  for (auto& link : world_.links()) {
    if (!in_flight_.has_failed() && link.is_open() && link.has_buffered()) {
      moved |= read(link);
      timeout_ms = 0;
      if (in_flight_.has_failed()) return true;
    }
  }
  const std::size_t size = world_.size();
  for (const auto& event : poller_.wait(timeout_ms, interrupted)) {
    if (event.data.u64 == kBellKey) {
      // Returns true, so that the caller runs another round: the signal's cause may have arrived after this round
      // looked for it, and a peer signals only once per sleep.
      wakeup_.clear();
      moved = true;
      continue;
    }
    const bool is_writable = (event.events & EPOLLOUT) != 0;
    const bool is_readable = (event.events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0;
    const bool had_failed = in_flight_.has_failed();
    if (event.data.u64 >= size) {
      on_event(world_.data_links()[event.data.u64 - size], is_writable, is_readable, moved);
    } else {
      on_event(world_.links()[event.data.u64], is_writable, is_readable, moved);
    }
    if (in_flight_.has_failed() && !had_failed) return true;
  }
  return moved;
}

void Peers::on_event(DataLink& link, bool is_writable, bool is_readable, bool& moved) {
  if (in_flight_.has_failed() || !link.is_open()) return;
  if (is_writable) moved |= link.flush();
  if (is_readable) moved |= read(link);
  if (link.is_open() && !in_flight_.has_failed()) watch(link);
}

void Peers::on_event(ControlLink& link, bool is_writable, bool is_readable, bool& moved) {
  if (!link.is_open()) return;
  if (in_flight_.has_failed()) {
    moved |= link.read(ignore_frame, kReadBudget);
    return part_with(link);
  }
  if (is_writable) moved |= flush(link);
  if (is_readable) moved |= read(link);
  if (link.is_open() && !in_flight_.has_failed()) watch(link);
}

bool Peers::read(ControlLink& link) {
  const bool moved = link.read(
      [this, &link](FrameType type, std::span<const std::byte> body) {
        events_.on_frame(link.peer(), type, body);
        return !in_flight_.has_failed();
      },
      kReadBudget);
  if (in_flight_.has_failed()) return true;
  if (link.state() != Link::State::kOpen) {
    on_end(link);
    return true;
  }
  // Writes the answers at once, so that usually the connection need not be watched for writing.
  flush(link);
  watch(link);
  return moved;
}

bool Peers::read(DataLink& link) {
  const bool moved = link.read(kReadBudget);
  if (link.state() == Link::State::kOpen) return moved;
  on_end(link);
  if (&link == &world_.data_link(link.peer(), 0)) events_.on_data_end(link.peer());
  return true;
}

bool Peers::flush(ControlLink& link) {
  const bool moved = link.flush();
  if (moved && link.is_tcp()) loss_watch_.start();
  return moved;
}

bool Peers::flush(bool with_tensors) {
  bool moved = false;
  for (Link* listed : with_frames_) {
    auto& link = static_cast<ControlLink&>(*listed);
    link.unlist();
    if (link.take_has_written() && link.is_tcp()) loss_watch_.start();
    if (!link.is_open() || !link.wants_write()) continue;
    moved |= flush(link);
    watch(link);  // epoll reports when the socket can take the rest
  }
  with_frames_.clear();
  if (!with_tensors) return moved;
  for (Link* listed : with_tensors_) {
    auto& link = static_cast<DataLink&>(*listed);
    link.unlist();
    if (!link.is_open() || !link.wants_write()) continue;
    moved |= link.flush();
    watch(link);
  }
  with_tensors_.clear();
  return moved;
}

void Peers::send(Rank to, const Bytes& frame) {
  if (ControlLink& link = world_.link(to); link.is_open()) link.send(frame);
}

bool Peers::send_to(std::span<const Rank> to, const Bytes& frame) {
  for (const Rank rank : to) {
    if (rank != world_.rank()) send(rank, frame);
  }
  return std::ranges::count(to, world_.rank()) > 0;
}

std::optional<Execute> Peers::send_order(Execute order, const Team& team) {
  std::optional<Execute> mine;
  for (auto& part : parts_of(std::move(order), team)) {
    if (send_to(part.to, encode(part.order))) mine = std::move(part.order);
  }
  return mine;
}

// ---- The epoll -------------------------------------------------------------------------------

std::size_t Peers::index_of_link(const ControlLink& link) const {
  return static_cast<std::size_t>(index_of(link.peer()));
}

std::size_t Peers::index_of_link(const DataLink& link) const {
  return world_.size() + static_cast<std::size_t>(&link - world_.data_links().data());
}

template <class AnyLink>
void Peers::watch(const AnyLink& link) {
  const std::size_t index = index_of_link(link);
  const std::uint32_t events = EPOLLIN | (link.wants_write() ? EPOLLOUT : 0U);
  if (watched_[index] == events) return;
  if (watched_[index].has_value()) {
    poller_.modify(link.fd(), events, index);
  } else {
    poller_.add(link.fd(), events, index);
  }
  watched_[index] = events;
}

template <class AnyLink>
void Peers::unwatch(const AnyLink& link) {
  const std::size_t index = index_of_link(link);
  if (watched_[index].has_value()) poller_.remove(link.fd());
  watched_[index].reset();
}

void Peers::on_end(ControlLink& link) {
  if (!has_left(link.peer())) return lose(link.peer(), kind_of(link), link.trouble());
  unwatch(link);
  link.close();
}

/// Handles a closed connection for tensors. If the rank has ended, its connection for control frames shows this too,
/// with the rank's last frames. So the rank is only a suspect for now.
void Peers::on_end(DataLink& link) {
  if (!has_left(link.peer())) suspect(link);
  unwatch(link);
  link.close();
}

// ---- Parting ---------------------------------------------------------------------------------

void Peers::part_with_all(const Bytes& last_words) {
  for (auto& link : world_.links()) {
    if (!link.is_open()) continue;
    link.send(last_words);
    part_with(link);
  }
  for (auto& link : world_.data_links()) {
    link.close_write();
    unwatch(link);
  }
}

/// Sends the last frames to a peer after a failure, and then closes the connection for writing.
///
/// The peer must receive the cause of the failure, or it would blame this rank. The peer may read slowly, so the rest
/// is written later. Meanwhile its bytes are read and dropped, because it may wait until it can write. The socket stays
/// open for reading: closing it with unread bytes would reset it and lose the message.
void Peers::part_with(ControlLink& link) {
  flush(link);
  if (link.wants_write() && link.state() == Link::State::kOpen) return watch(link);
  link.close_write();
  unwatch(link);
}

void Peers::leave() {
  for (auto& link : world_.data_links()) link.close_write();
  GracefulClose::say({world_.take_links(), world_.take_data_links()});
}

void Peers::after_fork() noexcept {
  world_.close_descriptors();
  stacks_.close();
  poller_.close();
}

}  // namespace sparkhvd
