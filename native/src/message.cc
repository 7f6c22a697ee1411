#include "message.h"

#include <algorithm>

#include "wire.h"

namespace sparkhvd {

std::size_t row_elements(std::span<const std::int64_t> shape, DType dtype) {
  return *count_elements(shape.empty() ? shape : shape.subspan(1), dtype);
}

std::optional<std::uint64_t> count_elements(std::span<const std::int64_t> shape,
                                            DType dtype) noexcept {
  const std::uint64_t limit = kMaxTensorBytes / element_size(dtype);
  std::uint64_t count = 1;
  bool is_empty = false;
  for (const std::int64_t dimension : shape) {
    if (dimension < 0 || static_cast<std::uint64_t>(dimension) > limit) return std::nullopt;
    if (dimension == 0) {
      is_empty = true;
    } else if (count > limit / static_cast<std::uint64_t>(dimension)) {
      return std::nullopt;
    } else {
      count *= static_cast<std::uint64_t>(dimension);
    }
  }
  return is_empty ? 0 : count;
}

Bytes encode(const Hello& message) {
  return Writer(FrameType::kHello)
      .number(message.wire_version)
      .number(message.rank)
      .numbers(message.hosts)
      .number(message.slot_bytes)
      .number(message.slots)
      .number(message.streams)
      .flag(message.has_memory)
      .finish();
}

Bytes encode(const Mapped& message) { return Writer(FrameType::kMapped).flag(message.ok).finish(); }

Bytes encode(const Goodbye& message) {
  Writer writer(FrameType::kGoodbye);
  writer.number(static_cast<std::uint32_t>(message.sets.size()));
  for (const auto& entry : message.sets) {
    writer.number(entry.process_set).number(entry.executed).number(entry.executed_on_device);
  }
  return writer.finish();
}

Bytes encode(const StackRequest& message) {
  return Writer(FrameType::kStackRequest).flag(message.for_life).finish();
}

Bytes encode(const Stack& message) {
  return Writer(FrameType::kStack).text(message.text).number(message.still_ms).finish();
}

Bytes encode(const Abort& message) {
  Writer writer(FrameType::kAbort);
  writer.number(message.status).text(message.message);
  write(writer, message.losses);
  return writer.finish();
}

Bytes encode(const SegmentOffer& message) {
  Writer writer(FrameType::kSegmentOffer);
  write(writer, message.key);
  return writer.flag(message.has_memory).finish();
}

Bytes encode(const SegmentMapped& message) {
  Writer writer(FrameType::kSegmentMapped);
  write(writer, message.key);
  return writer.flag(message.ok).finish();
}

Bytes encode(const Credit& message) {
  return Writer(FrameType::kCredit)
      .number(message.process_set)
      .number(message.connection)
      .number(message.bytes)
      .finish();
}

std::array<std::byte, kDataHeaderBytes> encode_data_header(std::int32_t stream,
                                                           std::size_t payload_bytes) {
  std::array<std::byte, kDataHeaderBytes> header{};
  const auto length = static_cast<std::uint32_t>(payload_bytes + sizeof(stream));
  std::memcpy(header.data(), &length, sizeof(length));
  header[4] = static_cast<std::byte>(FrameType::kData);
  std::memcpy(header.data() + kFrameHeaderBytes, &stream, sizeof(stream));
  return header;
}

FrameHeader decode_header(std::span<const std::byte> header) {
  Reader reader(header);
  FrameHeader result;
  result.body_bytes = reader.number<std::uint32_t>();
  const auto type = reader.number<std::uint8_t>();
  if (type < static_cast<std::uint8_t>(FrameType::kHello) ||
      type > static_cast<std::uint8_t>(FrameType::kExecuteAgain)) {
    malformed("a frame of unknown type " + std::to_string(type));
  }
  result.type = static_cast<FrameType>(type);
  for (std::size_t i = 5; i < kFrameHeaderBytes; ++i) {
    if (header[i] != std::byte{0}) malformed("a frame header with unused bytes that are not 0");
  }
  const bool is_data = result.type == FrameType::kData;
  const std::size_t limit = is_data ? kMaxDataBytes + 4 : kMaxControlBytes;
  if (result.body_bytes > limit || (is_data && result.body_bytes < 4)) {
    malformed("a frame of the invalid size " + std::to_string(result.body_bytes) + " bytes");
  }
  return result;
}

template <>
Hello decode<Hello>(std::span<const std::byte> body) {
  Reader reader(body);
  Hello message;
  message.wire_version = reader.number<std::uint32_t>();
  message.rank = reader.number<std::int32_t>();
  message.hosts = reader.numbers<std::int32_t>();
  message.slot_bytes = reader.number<std::uint64_t>();
  message.slots = reader.number<std::uint32_t>();
  message.streams = reader.number<std::uint32_t>();
  message.has_memory = reader.flag();
  reader.end();
  return message;
}

template <>
Mapped decode<Mapped>(std::span<const std::byte> body) {
  Reader reader(body);
  const Mapped message{reader.flag()};
  reader.end();
  return message;
}

template <>
Goodbye decode<Goodbye>(std::span<const std::byte> body) {
  Reader reader(body);
  Goodbye message;
  const auto sets = reader.number<std::uint32_t>();
  for (std::uint32_t i = 0; i < sets; ++i) {
    Goodbye::Entry entry;
    entry.process_set = reader.number<std::int32_t>();
    entry.executed = reader.number<std::uint64_t>();
    entry.executed_on_device = reader.number<std::uint64_t>();
    message.sets.push_back(entry);
  }
  reader.end();
  return message;
}

template <>
StackRequest decode<StackRequest>(std::span<const std::byte> body) {
  Reader reader(body);
  const StackRequest message{reader.flag()};
  reader.end();
  return message;
}

template <>
Stack decode<Stack>(std::span<const std::byte> body) {
  Reader reader(body);
  Stack message{reader.text(kMaxStackBytes)};
  message.still_ms = reader.number<std::uint64_t>();
  reader.end();
  return message;
}

template <>
Abort decode<Abort>(std::span<const std::byte> body) {
  Reader reader(body);
  Abort message;
  message.status = read_failure(reader);
  message.message = reader.text(kMaxControlBytes);
  message.losses = read_losses(reader);
  reader.end();
  return message;
}

template <>
SegmentOffer decode<SegmentOffer>(std::span<const std::byte> body) {
  Reader reader(body);
  SegmentOffer message;
  message.key = read_key(reader);
  message.has_memory = reader.flag();
  reader.end();
  return message;
}

template <>
SegmentMapped decode<SegmentMapped>(std::span<const std::byte> body) {
  Reader reader(body);
  SegmentMapped message;
  message.key = read_key(reader);
  message.ok = reader.flag();
  reader.end();
  return message;
}

template <>
Credit decode<Credit>(std::span<const std::byte> body) {
  Reader reader(body);
  Credit message;
  message.process_set = reader.number<std::int32_t>();
  message.connection = reader.number<std::uint32_t>();
  message.bytes = reader.number<std::uint64_t>();
  reader.end();
  return message;
}

}  // namespace sparkhvd
