// One connection: framing, lent memory, back pressure, and how it ends.
#include "transport/link.h"

#include <sys/socket.h>

#include <random>

#include "error.h"
#include "test.h"
#include "transport/memfd.h"

namespace sparkhvd::test::link_test {
namespace {

struct Pair {
  Link a;
  Link b;
};

/// With small socket buffers, so that every transfer is cut into many pieces.
Pair connect() {
  int fds[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) != 0) throw_errno("socketpair");
  const int bytes = 4096;
  for (const int fd : fds) {
    ::setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof(bytes));
  }
  return {Link(Rank{1}, Fd(fds[0])), Link(Rank{0}, Fd(fds[1]))};
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

}  // namespace

TEST(tensor_bytes_and_frames_arrive_in_order_through_tiny_buffers) {
  auto [a, b] = connect();
  const Bytes first = pattern(3 << 20, 1);
  const Bytes second = pattern(12345, 2);
  Bytes received(first.size());
  Bytes tail(second.size());
  a.send_data(0, first);
  a.send(encode(Goodbye{{{0, 1}}}));
  const auto sent = a.send_data(0, second);
  // Receives need not be cut like sends.
  b.receive_data(0, std::span(received).first(1000));
  b.receive_data(0, std::span(received).subspan(1000));
  const auto done = b.receive_data(0, tail);
  int frames = 0;
  for (int round = 0; round < 100000 && !b.received(done); ++round) {
    a.flush();
    b.read(
        [&](FrameType type, std::span<const std::byte>) {
          CHECK(type == FrameType::kGoodbye);
          ++frames;
          return true;
        },
        5000);
  }
  CHECK(b.received(done));
  CHECK(a.sent(sent));
  CHECK(frames == 1);
  CHECK(received == first);
  CHECK(tail == second);
}

TEST(a_link_waits_until_somebody_asks_for_the_tensor) {
  auto [a, b] = connect();
  const Bytes data = pattern(100, 3);
  Bytes target(100);
  a.send_data(0, data);
  a.flush();
  b.read(no_frames, 1 << 20);
  CHECK(!b.wants_read());
  const auto ticket = b.receive_data(0, target);
  CHECK(b.wants_read() && b.has_buffered());
  b.read(no_frames, 1 << 20);
  CHECK(b.received(ticket));
  CHECK(target == data);
}

TEST(streams_overtake_each_other_once_early_bytes_are_kept) {
  auto [a, b] = connect();
  const Bytes first = pattern(3'000'000, 3);
  const Bytes second = pattern(50'000, 4);
  Bytes head(1'000'000);
  Bytes tail(2'000'000);
  Bytes target(second.size());
  std::size_t frames = 0;
  const auto count = [&](FrameType, std::span<const std::byte>) { return ++frames > 0; };
  a.send_data(0, first);
  a.send_data(7, second);
  a.send(encode(Mapped{true}));
  const auto head_ticket = b.receive_data(5, std::span(head).first(1));  // never comes
  const auto ticket = b.receive_data(7, target);
  for (int i = 0; i < 100; ++i) {
    a.flush();
    b.read(count, 1 << 20);
  }
  CHECK(!b.received(ticket) && frames == 0);
  b.keep_early_data();
  for (int i = 0; i < 10000 && frames == 0; ++i) {
    a.flush();
    b.read(count, 1 << 20);
  }
  CHECK_EQUAL(frames, 1U);
  CHECK(b.received(ticket) && !b.received(head_ticket));
  CHECK(target == second);
  // What came early is taken in order, by receives of any size, and nothing else is read for it.
  const auto tickets = {b.receive_data(0, head), b.receive_data(0, tail)};
  for (const auto posted : tickets) CHECK(b.received(posted));
  CHECK(std::equal(head.begin(), head.end(), first.begin()));
  CHECK(std::equal(tail.begin(), tail.end(), first.begin() + 1'000'000));
  // A stream that is cancelled forgets what came early.
  Bytes forgotten(100);
  a.send_data(3, std::span(first).first(100));
  a.flush();
  b.read(count, 1 << 20);
  b.cancel_lent(3);
  CHECK(!b.received(b.receive_data(3, forgotten)));
}

TEST(cancelled_memory_is_never_touched_again_and_frames_stay_whole) {
  auto [a, b] = connect();
  Bytes target(1 << 20);
  {
    const Bytes data = pattern(1 << 20, 4);
    a.send_data(0, data);
    a.flush();  // part of it: the socket buffer is small
    a.cancel_lent();
  }
  a.send(encode(Goodbye{{{0, 5}}}));
  b.receive_data(0, target);
  b.read(no_frames, 1000);
  b.cancel_lent();
  const Bytes before = target;
  std::uint64_t executed = 0;
  for (int round = 0; round < 10000 && executed == 0; ++round) {
    a.flush();
    b.read(
        [&](FrameType, std::span<const std::byte> body) {
          executed = decode<Goodbye>(body).sets.at(0).executed;
          return true;
        },
        1 << 20);
  }
  CHECK(executed == 5);
  CHECK(target == before);
}

TEST(last_words_are_read_before_the_end_is_seen) {
  auto [a, b] = connect();
  a.send(encode(Abort{5, "the cause"}));
  a.flush();
  a.close();
  // The other side notices the end by writing, and still receives the cause.
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
  auto [a, b] = connect();
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
