// The wire format: every message stays equal after encoding and decoding, and no bytes make the decoder crash.
#include "message.h"

#include <algorithm>
#include <random>
#include <span>

#include "error.h"
#include "test.h"

namespace sparkhvd::test::message_test {
namespace {

std::span<const std::byte> body_of(const Bytes& frame) {
  return std::span<const std::byte>(frame).subspan(kFrameHeaderBytes);
}

Ready example() {
  Ready ready;
  ready.process_set = 7;
  ready.name = "layer3.weight";
  ready.descriptor.collective = Collective::kAllreduce;
  ready.descriptor.dtype = DType::kBfloat16;
  ready.descriptor.reduce_op = ReduceOp::kMax;
  ready.descriptor.root = Rank{3};
  ready.descriptor.prescale = 0.5;
  ready.descriptor.postscale = 3;
  ready.descriptor.timeout_s = 1.5;
  ready.descriptor.shapes = {{128, 64}, {}, {0}};
  return ready;
}

template <class Message>
void survive(std::span<const std::byte> body) {
  try {
    decode<Message>(body);
  } catch (const Error&) {
    // The decoder may refuse the bytes with an Error. A sanitizer reports other mistakes.
  }
}

void survive_all(std::span<const std::byte> body) {
  survive<Hello>(body);
  survive<Mapped>(body);
  survive<Ready>(body);
  survive<Execute>(body);
  survive<Order>(body);
  survive<Refuse>(body);
  survive<Goodbye>(body);
  survive<SegmentOffer>(body);
  survive<SegmentMapped>(body);
  survive<StackRequest>(body);
  survive<Stack>(body);
  survive<Abort>(body);
  survive<ReadyAgain>(body);
  survive<ExecuteAgain>(body);
}

}  // namespace

TEST(messages_survive_the_round_trip) {
  const Bytes frame = encode(example());
  const FrameHeader header = decode_header(std::span(frame).first(kFrameHeaderBytes));
  CHECK(header.type == FrameType::kReady);
  CHECK(header.body_bytes == frame.size() - kFrameHeaderBytes);
  const Ready ready = decode<Ready>(body_of(frame));
  CHECK(ready.process_set == 7);
  CHECK(ready.name == "layer3.weight");
  CHECK(ready.descriptor.dtype == DType::kBfloat16);
  CHECK(ready.descriptor.reduce_op == ReduceOp::kMax);
  CHECK(ready.descriptor.root == Rank{3});
  CHECK(ready.descriptor.shapes == example().descriptor.shapes);
  const Execute execute = decode<Execute>(body_of(encode(Execute{1, 99, "x", {4, 0, 2}})));
  CHECK(execute.sequence == 99);
  CHECK(execute.rows == (std::vector<std::int64_t>{4, 0, 2}));
  Execute full{1, 99, "x", {}, {{{2, 5}, 640}, {{2, 5}, 0}}, {Rank{0}, Rank{3}}};
  full.splits = {7, 0, 1, 2};
  full.descriptor = example().descriptor;
  full.descriptor->numbers = {1, 2};
  full.descriptor->room = {1 << 14, 2, 0};
  full.asks_for_memory = true;
  full.descriptor->place = full.places[0];
  const Execute decoded = decode<Execute>(body_of(encode(full)));
  CHECK(decoded.places == full.places && decoded.splits == full.splits);
  CHECK(decoded.contributors == full.contributors);
  CHECK(decoded.descriptor->numbers == full.descriptor->numbers);
  CHECK(decoded.descriptor->room == full.descriptor->room && decoded.asks_for_memory);
  for (const auto& room : {std::vector<std::int64_t>{1, 2}, std::vector<std::int64_t>{1, 2, -1}}) {
    full.descriptor->room = room;
    CHECK_THROWS(Error, decode<Execute>(body_of(encode(full))));
  }
  CHECK(decoded.descriptor->place == full.places[0]);
  const auto offer = decode<SegmentOffer>(body_of(encode(SegmentOffer{{3, 9}, true})));
  CHECK(offer.key == (SegmentKey{3, 9}) && offer.has_memory);
  CHECK(decode<SegmentMapped>(body_of(encode(SegmentMapped{{3, 9}, true}))).ok);
  const Bytes payload(8, std::byte{7});
  Point point{PointKind::kEager, 3, 5, DType::kFloat32, 8, 11, "why", payload};
  const Bytes point_frame = encode(point);
  const Point eager = decode<Point>(body_of(point_frame));
  CHECK(eager.tag == 5 && eager.number == 11 && eager.text == "why" && eager.process_set == 3);
  CHECK(std::ranges::equal(eager.payload, payload));
  for (const PointKind kind : {PointKind::kAnnounce, PointKind{6}}) {
    point.kind = kind;  // a kind without payload; a kind that does not exist
    CHECK_THROWS(Error, decode<Point>(body_of(encode(point))));
  }
  CHECK(decode<StackRequest>(body_of(encode(StackRequest{true}))).for_life);
  CHECK(decode<Stack>(body_of(encode(Stack{"File x", 7}))).text == "File x");
  CHECK(decode<Stack>(body_of(encode(Stack{"File x", 7}))).still_ms == 7);
  CHECK_THROWS(Error, decode<Stack>(body_of(encode(Stack{std::string(kMaxStackBytes + 1, 'x')}))));
  const Hello hello = decode<Hello>(body_of(encode(Hello{1, 2, {0, 0, 1}, 4096, 4, 1, true})));
  CHECK(hello.hosts == (std::vector<std::int32_t>{0, 0, 1}));
  CHECK(hello.has_memory);
  CHECK(decode<Abort>(body_of(encode(Abort{5, "why"}))).message == "why");
  CHECK(decode<Goodbye>(body_of(encode(Goodbye{{{3, 12, 8}}}))).sets.at(0).executed == 12);
  const Goodbye leaving{{{3, 12, 8}}};
  CHECK(decode<Goodbye>(body_of(encode(leaving))).sets.at(0).executed_on_device == 8);
  CHECK(decode<Refuse>(body_of(encode(Refuse{0, "n", 3, "m", 6}))).status == 3);
  CHECK(decode<Refuse>(body_of(encode(Refuse{0, "n", 3, "m", 6}))).device_orders == 6);
  CHECK(decode<Refuse>(body_of(encode(Refuse{0, "n", 3, "m", 6, {{Rank{2}, LossKind::kLeft}}})))
            .losses.size() == 1);
}

TEST(orders_for_devices_survive_the_round_trip_and_nothing_else_passes) {
  Execute execute{4, 7, "x", {1, 2}};
  execute.is_on_device = true;
  execute.unique_id.assign(kUniqueIdBytes, 0xab);
  execute.contributors = {Rank{1}};
  execute.descriptor = example().descriptor;
  execute.descriptor->is_on_device = true;
  const Execute direct = decode<Execute>(body_of(encode(execute)));
  CHECK(direct.is_on_device && direct.unique_id == execute.unique_id);
  CHECK(direct.descriptor->is_on_device);
  const Execute relayed = decode<Order>(body_of(encode(Order{execute}))).execute;
  CHECK(relayed.sequence == 7 && relayed.rows == execute.rows && relayed.is_on_device);
  Execute wrong = execute;
  wrong.unique_id.pop_back();
  CHECK_THROWS(Error, decode<Execute>(body_of(encode(wrong))));
  wrong = execute;
  wrong.places = {{{2, 5}, 640}};
  CHECK_THROWS(Error, decode<Execute>(body_of(encode(wrong))));
  wrong = execute;
  wrong.descriptor->is_on_device = false;
  CHECK_THROWS(Error, decode<Execute>(body_of(encode(wrong))));
  wrong = execute;
  wrong.is_on_device = false;
  CHECK_THROWS(Error, decode<Execute>(body_of(encode(wrong))));
  CHECK_THROWS(Error, decode<Order>(body_of(encode(Order{Execute{4, 7, "x", {}}}))));
}

TEST(frames_have_the_documented_bytes) {
  const Bytes goodbye = encode(Goodbye{{{2, 0x0102030405060708, 9}}});
  const unsigned char expected[] = {24, 0, 0, 0, 7, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0,
                                    8,  7, 6, 5, 4, 3, 2, 1, 9, 0, 0, 0, 0, 0, 0, 0};
  CHECK(goodbye.size() == sizeof(expected));
  CHECK(std::memcmp(goodbye.data(), expected, sizeof(expected)) == 0);
  const auto data = encode_data_header(2, 256);
  const unsigned char header[] = {4, 1, 0, 0, 6, 0, 0, 0, 2, 0, 0, 0};
  CHECK(data.size() == sizeof(header));
  CHECK(std::memcmp(data.data(), header, sizeof(header)) == 0);
}

TEST(truncated_and_padded_messages_are_refused) {
  const Bytes frame = encode(example());
  for (std::size_t size = 0; size + kFrameHeaderBytes < frame.size(); ++size) {
    CHECK_THROWS(Error, decode<Ready>(body_of(frame).first(size)));
  }
  Bytes padded = frame;
  padded.push_back(std::byte{0});
  CHECK_THROWS(Error, decode<Ready>(body_of(padded)));
}

TEST(impossible_headers_and_shapes_are_refused) {
  const auto header = [](std::uint32_t size, std::uint8_t type) {
    Bytes bytes(kFrameHeaderBytes);
    std::memcpy(bytes.data(), &size, sizeof(size));
    bytes[4] = std::byte{type};
    return bytes;
  };
  CHECK_THROWS(Error, decode_header(header(0, 0)));
  CHECK_THROWS(Error, decode_header(header(0, 18)));
  CHECK_THROWS(Error, decode_header(header(0xffffffff, 3)));
  CHECK_THROWS(Error, decode_header(header(3, 6)));
  CHECK_THROWS(Error, decode_header(header(kMaxDataBytes + 5, 6)));
  Bytes noise = header(8, 6);
  CHECK_EQUAL(decode_header(noise).body_bytes, 8U);
  noise[7] = std::byte{1};
  CHECK_THROWS(Error, decode_header(noise));
  Ready negative = example();
  negative.descriptor.shapes = {{-1}};
  CHECK_THROWS(Error, decode<Ready>(body_of(encode(negative))));
  for (const std::int32_t status : {SPARKHVD_OK, SPARKHVD_PENDING, SPARKHVD_NO_MEMORY + 1, -1}) {
    CHECK_THROWS(Error, decode<Abort>(body_of(encode(Abort{status, "x"}))));
    CHECK_THROWS(Error, decode<Refuse>(body_of(encode(Refuse{0, "w", status, "x"}))));
  }
  Ready huge = example();
  huge.descriptor.shapes = {{INT64_MAX, 2}};
  CHECK_THROWS(Error, decode<Ready>(body_of(encode(huge))));
  Ready product = example();
  product.descriptor.shapes = {{1 << 30, 1 << 30, 0}};
  CHECK_THROWS(Error, decode<Ready>(body_of(encode(product))));
}

TEST(random_bytes_never_crash_the_decoder) {
  std::mt19937_64 random(1);
  const Bytes valid = encode(example());
  for (int round = 0; round < 20000; ++round) {
    Bytes bytes;
    if (round % 2 == 0) {
      bytes.resize(random() % 64);
      for (auto& byte : bytes) byte = static_cast<std::byte>(random() % (round % 4 == 0 ? 4 : 256));
    } else {
      bytes.assign(valid.begin() + kFrameHeaderBytes, valid.end());
      for (int flip = 0; flip < 3; ++flip) {
        bytes[random() % bytes.size()] = static_cast<std::byte>(random());
      }
    }
    survive_all(bytes);
  }
}

}  // namespace sparkhvd::test::message_test
