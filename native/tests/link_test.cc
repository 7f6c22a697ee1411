// Connections of two ranks: frames, lent memory, credit, and the ends of connections.
#include <netinet/in.h>
#include <sys/socket.h>

#include <random>
#include <span>

#include "error.h"
#include "test.h"
#include "transport/control_link.h"
#include "transport/data_link.h"
#include "transport/memfd.h"
#include "transport/tcp.h"

namespace sparkhvd::test::link_test {
namespace {

template <class L>
struct Pair {
  L a;
  L b;
};

constexpr std::uint64_t kUnasked = 256 << 10;

template <class L>
L make(Rank peer, int fd) {
  if constexpr (std::is_same_v<L, DataLink>) {
    return L(peer, Fd(fd), kUnasked);
  } else {
    return L(peer, Fd(fd));
  }
}

/// Connects two links with small socket buffers, so that every transfer is cut into many pieces.
template <class L>
Pair<L> connect() {
  int fds[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) != 0) throw_errno("socketpair");
  const int bytes = 4096;
  for (const int fd : fds) {
    ::setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof(bytes));
  }
  return {make<L>(Rank{1}, fds[0]), make<L>(Rank{0}, fds[1])};
}

bool no_frames(FrameType, std::span<const std::byte>) {
  throw test::Failure("no control frame was expected");
}

Bytes pattern(std::size_t size, unsigned seed) {
  Bytes bytes(size);
  std::mt19937 random(seed);
  for (auto& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

/// Moves bytes until none can move any more, with the credit that the receiver gives for `streams`.
void move(DataLink& from, DataLink& to, std::initializer_list<std::int32_t> streams = {0}) {
  for (int idle = 0; idle < 2; ++idle) {
    for (const auto stream : streams) {
      if (const auto bytes = to.take_credit(stream)) from.grant(stream, *bytes);
    }
    while (from.flush() | to.read(5000)) idle = 0;
  }
}

}  // namespace

TEST(tensor_bytes_arrive_in_order_through_tiny_buffers) {
  auto [a, b] = connect<DataLink>();
  const Bytes first = pattern(3 << 20, 1);
  const Bytes second = pattern(12345, 2);
  Bytes received(first.size());
  Bytes tail(second.size());
  a.send_data(0, first);
  a.send_data(0, {});
  const auto sent = a.send_data(0, second);
  // Receives need not have the sizes of the sends.
  b.receive_data(0, std::span(received).first(1000));
  b.receive_data(0, std::span(received).subspan(1000));
  CHECK(!b.received(b.receive_data(0, std::span(tail).first(1))));
  const auto done = b.receive_data(0, std::span(tail).subspan(1));
  move(a, b);
  CHECK(b.received(done));
  CHECK(a.sent(sent));
  CHECK(received == first);
  CHECK(tail == second);
}

TEST(a_sender_runs_ahead_by_a_limited_number_of_bytes) {
  auto [a, b] = connect<DataLink>();
  const Bytes data = pattern(3'000'000, 3);
  Traffic traffic;
  b.count(traffic);
  const auto sent = a.send_data(0, data);
  move(a, b);
  CHECK(!a.sent(sent));
  CHECK(traffic.received.value() >= kUnasked);
  CHECK(traffic.received.value() < kUnasked + 1000);
  // Receives of any size take the early bytes in order.
  Bytes target(data.size());
  CHECK(b.received(b.receive_data(0, std::span(target).first(1000))));
  CHECK(b.received(b.receive_data(0, std::span(target).subspan(1000, 50000))));
  const auto rest = b.receive_data(0, std::span(target).subspan(51000));
  CHECK(!b.received(rest));
  move(a, b);
  CHECK(a.sent(sent) && b.received(rest));
  CHECK(target == data);
}

TEST(connections_inside_a_host_are_not_asked_for_its_end) {
  const Fd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  CHECK_EQUAL(::bind(listener.get(), any, size), 0);
  CHECK_EQUAL(::listen(listener.get(), 1), 0);
  CHECK_EQUAL(::getsockname(listener.get(), any, &size), 0);
  const Fd connected(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  CHECK_EQUAL(::connect(connected.get(), any, size), 0);
  tune_tcp(connected.get(), 20.0);
  int keepalive = -1;
  size = sizeof(keepalive);
  CHECK_EQUAL(::getsockopt(connected.get(), SOL_SOCKET, SO_KEEPALIVE, &keepalive, &size), 0);
  CHECK_EQUAL(keepalive, 0);
}

TEST(many_ranks_run_ahead_by_less) {
  CHECK_EQUAL(DataLink::unasked_among(2), std::uint64_t{512 << 10});
  CHECK_EQUAL(DataLink::unasked_among(64), std::uint64_t{512 << 10});
  CHECK_EQUAL(DataLink::unasked_among(4096), std::uint64_t{256 << 10});
}

TEST(streams_overtake_each_other) {
  auto [a, b] = connect<DataLink>();
  const Bytes first = pattern(3'000'000, 3);
  const Bytes second = pattern(1'000'000, 4);
  Bytes target(second.size());
  const auto waiting = a.send_data(0, first);
  const auto sent = a.send_data(7, second);
  const auto never = b.receive_data(5, std::span(target).first(1));
  const auto ticket = b.receive_data(7, target);
  move(a, b, {0, 5, 7});
  CHECK(a.sent(sent) && !a.sent(waiting));
  CHECK(b.received(ticket) && !b.received(never));
  CHECK(target == second);
  // A cancelled stream drops its early bytes, and keeps no further bytes.
  b.cancel_lent(0);
  Bytes rest(100);
  CHECK(!b.received(b.receive_data(5, rest)));
  a.send_data(5, std::span(second).first(101));
  move(a, b, {5});
  CHECK(b.received(never));
  CHECK(rest == Bytes(second.begin() + 1, second.begin() + 101));
}

TEST(cancelled_memory_is_never_touched_again_and_frames_stay_whole) {
  auto [a, b] = connect<DataLink>();
  Bytes target(1 << 20);
  {
    const Bytes data = pattern(1 << 20, 4);
    a.send_data(3, data);
    a.flush();  // writes only a part, because the socket buffer is small
    a.cancel_lent(3);
  }
  const Bytes after = pattern(1000, 5);
  a.send_data(4, after);
  const auto cancelled = b.receive_data(3, target);
  b.read(1000);
  b.cancel_lent(3);
  CHECK(b.received(cancelled));
  const Bytes before = target;
  Bytes second(after.size());
  const auto done = b.receive_data(4, second);
  move(a, b, {4});
  CHECK(b.received(done) && second == after);
  CHECK(target == before);
  // After the cancellation of all streams no bytes move.
  Bytes lent = pattern(1 << 20, 6);
  const auto sent = a.send_data(4, lent);
  a.cancel_lent();
  CHECK(a.sent(sent) && !a.wants_write());
}

TEST(more_tensor_bytes_than_were_asked_for_break_a_link) {
  auto [a, b] = connect<DataLink>();
  a.grant(0, 1 << 20);  // forged: the other side has not granted this credit
  const Bytes data = pattern(1 << 20, 7);
  a.send_data(0, data);
  while (a.flush() | b.read(1 << 20)) {
  }
  CHECK(b.state() == Link::State::kBroken);
  CHECK(b.trouble() == "it sent tensor bytes that were not requested");
}

TEST(last_words_are_read_before_the_end_is_seen) {
  auto [a, b] = connect<ControlLink>();
  a.send(encode(Abort{5, "the cause"}));
  a.flush();
  a.close();
  // The other side notices the end when it writes, and can still read the cause.
  b.send(encode(Goodbye{{{0, 1}}}));
  b.flush();
  std::string cause;
  b.read(
      [&](FrameType, std::span<const std::byte> body) {
        cause = decode<Abort>(body).message;
        return true;
      },
      1 << 20);
  b.read(no_frames, 1 << 20);
  CHECK(cause == "the cause");
  CHECK(b.state() != Link::State::kOpen);
}

TEST(nonsense_breaks_a_link_with_a_sentence) {
  auto [a, b] = connect<ControlLink>();
  const unsigned char nonsense[] = {0, 0, 0, 0, 200, 0, 0, 0};
  CHECK(::send(a.fd(), nonsense, sizeof(nonsense), 0) == sizeof(nonsense));
  b.read(no_frames, 1 << 20);
  CHECK(b.state() == Link::State::kBroken);
  CHECK(b.trouble() == "it sent a frame of unknown type 200");
}

TEST(shared_memory_is_sealed_and_checked) {
  const Fd memory = create_memfd(8192);
  check_memfd(memory, 8192);
  CHECK_THROWS(Error, check_memfd(memory, 8193));
  CHECK(::ftruncate(memory.get(), 0) != 0);
  const Mapping writer(memory, 8192, Mapping::Access::kReadWrite);
  const Mapping reader(memory, 8192, Mapping::Access::kReadOnly);
  writer.data()[8191] = std::byte{7};
  CHECK(reader.data()[8191] == std::byte{7});
  CHECK(!memory_shortage(4096, 4096).has_value());
}

}  // namespace sparkhvd::test::link_test
