// Encodes and decodes POINT frames.
#include <span>
#include <string>

#include "message.h"
#include "wire.h"

namespace sparkhvd {

namespace {

/// The frame of a message, or only its beginning if `with_payload` is false.
Bytes frame_of(const Point& message, bool with_payload) {
  const auto payload = with_payload ? message.payload : std::span<const std::byte>();
  return Writer(FrameType::kPoint)
      .number(static_cast<std::uint8_t>(message.kind))
      .number(message.process_set)
      .number(message.tag)
      .number(static_cast<std::int32_t>(message.dtype))
      .number(message.bytes)
      .number(message.number)
      .text(message.text)
      .raw(payload)
      .finish(message.payload.size() - payload.size());
}

}  // namespace

Bytes encode(const Point& message) { return frame_of(message, true); }

Bytes encode_head(const Point& message) { return frame_of(message, false); }

template <>
Point decode<Point>(std::span<const std::byte> body) {
  Reader reader(body);
  Point message;
  const auto kind = reader.number<std::uint8_t>();
  if (kind > static_cast<std::uint8_t>(PointKind::kWithdraw)) malformed("an unknown message");
  message.kind = static_cast<PointKind>(kind);
  message.process_set = reader.number<std::int32_t>();
  message.tag = reader.number<std::int64_t>();
  message.dtype = known(to_dtype(reader.number<std::int32_t>()), "element type");
  message.bytes = reader.number<std::uint64_t>();
  message.number = reader.number<std::uint64_t>();
  message.text = reader.text(kMaxNameBytes);
  message.payload = reader.rest();
  const bool has_payload = message.kind == PointKind::kEager;
  if (message.bytes > kMaxTensorBytes ||
      message.payload.size() != (has_payload ? message.bytes : 0)) {
    malformed("a message of an invalid size");
  }
  return message;
}

}  // namespace sparkhvd
