// Control frames through shared memory: order, room, and invalid data from a corrupt peer.
#include "transport/control_ring.h"

#include <deque>
#include <memory>
#include <random>
#include <thread>

#include "test.h"

namespace sparkhvd::test::control_ring_test {
namespace {

struct Pair {
  std::unique_ptr<ControlRing> ring = std::make_unique<ControlRing>();
  SharedWord taken;
  ControlWriter writer{*ring};
  ControlReader reader{Rank{1}, *ring, taken};

  bool write(const Bytes& frame) { return writer.write(frame, taken.value.load()); }
};

Bytes frame_of(std::size_t size, unsigned seed) {
  Bytes bytes(size);
  for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(seed + i);
  return bytes;
}

TEST(control_ring_keeps_the_order_of_frames_of_all_sizes) {
  Pair pair;
  std::mt19937 random(7);
  std::deque<Bytes> inside;
  std::size_t refused = 0;
  for (unsigned i = 0; i < 20000; ++i) {
    const bool is_long = random() % 8 == 0;
    const std::size_t size =
        kFrameHeaderBytes + random() % (is_long ? ControlRing::kMaxFrame - 7 : 200);
    Bytes frame = frame_of(size, i);
    if (pair.write(frame)) {
      inside.push_back(std::move(frame));
    } else {
      ++refused;
      CHECK(!inside.empty());
    }
    while (!inside.empty() && random() % 2 == 0) {
      CHECK(pair.reader.next() == inside.front());
      CHECK(pair.reader.next() == inside.front());  // next() returns the same frame until pop()
      pair.reader.pop();
      inside.pop_front();
    }
  }
  CHECK(refused > 100);
  for (; !inside.empty(); inside.pop_front(), pair.reader.pop()) {
    CHECK(pair.reader.next() == inside.front());
  }
  CHECK(pair.reader.next().empty());
}

TEST(control_ring_takes_what_fits_and_nothing_else) {
  Pair pair;
  CHECK(!pair.write(frame_of(ControlRing::kMaxFrame + 1, 0)));
  std::size_t frames = 0;
  while (pair.write(frame_of(ControlRing::kMaxFrame, 1))) ++frames;
  CHECK_EQUAL(frames, 3U);  // and not four, because the length of each frame takes room too
  CHECK(pair.reader.next() == frame_of(ControlRing::kMaxFrame, 1));
  CHECK(!pair.write(frame_of(ControlRing::kMaxFrame, 2)));
  pair.reader.pop();
  CHECK(pair.write(frame_of(ControlRing::kMaxFrame, 2)));
  // A reader claims to have read more than was written.
  pair.taken.value = UINT64_MAX;
  CHECK(!pair.write(frame_of(8, 3)));
}

TEST(control_ring_crosses_threads) {
  Pair pair;
  constexpr unsigned kFrames = 20000;
  std::thread writer([&] {
    for (unsigned i = 0; i < kFrames; ++i) {
      const Bytes frame = frame_of(kFrameHeaderBytes + i % 300, i);
      while (!pair.write(frame)) std::this_thread::yield();
    }
  });
  unsigned wrong = 0;
  for (unsigned i = 0; i < kFrames; ++i) {
    while (pair.reader.next().empty()) std::this_thread::yield();
    wrong += pair.reader.next() == frame_of(kFrameHeaderBytes + i % 300, i) ? 0 : 1;
    pair.reader.pop();
  }
  writer.join();
  CHECK_EQUAL(wrong, 0U);
}

TEST(control_ring_follows_no_nonsense) {
  for (const std::uint64_t written : {std::uint64_t{8}, std::uint64_t{ControlRing::kBytes + 8},
                                      std::uint64_t{1} << 40, UINT64_MAX}) {
    Pair pair;
    CHECK(pair.write(frame_of(100, 0)));
    pair.ring->written.value = written;
    CHECK_THROWS(Error, pair.reader.next());
  }
  for (const std::uint64_t length :
       {std::uint64_t{0}, std::uint64_t{7}, std::uint64_t{ControlRing::kMaxFrame + 1}, UINT64_MAX,
        UINT64_MAX - 7}) {
    Pair pair;
    CHECK(pair.write(frame_of(100, 0)));
    std::memcpy(pair.ring->bytes, &length, sizeof(length));
    CHECK_THROWS(Error, pair.reader.next());
  }
}

}  // namespace
}  // namespace sparkhvd::test::control_ring_test
