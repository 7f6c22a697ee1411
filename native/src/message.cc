#include "message.h"

#include <algorithm>

#include "wire.h"

namespace sparkhvd {
namespace {

void write(Writer& writer, const SegmentKey& key) {
  writer.number(key.process_set).number(key.sequence);
}

SegmentKey read_key(Reader& reader) {
  SegmentKey key;
  key.process_set = reader.number<std::int32_t>();
  key.sequence = reader.number<std::uint64_t>();
  return key;
}

void write(Writer& writer, const Place& place) {
  write(writer, place.segment);
  writer.number(place.offset);
}

Place read_place(Reader& reader) {
  Place place;
  place.segment = read_key(reader);
  place.offset = reader.number<std::uint64_t>();
  return place;
}

/// A failure: who believed OK or PENDING here would take garbage for a result, or wait for ever.
std::int32_t read_failure(Reader& reader) {
  const auto status = reader.number<std::int32_t>();
  if (status <= SPARKHVD_PENDING || status > SPARKHVD_NO_MEMORY) {
    malformed("a failure of unknown status " + std::to_string(status));
  }
  return status;
}

void write(Writer& writer, const Descriptor& descriptor) {
  writer.number(static_cast<std::int32_t>(descriptor.collective))
      .number(static_cast<std::int32_t>(descriptor.dtype))
      .number(static_cast<std::int32_t>(descriptor.reduce_op))
      .number(index_of(descriptor.root))
      .number(descriptor.prescale)
      .number(descriptor.postscale)
      .number(descriptor.timeout_s)
      .number(static_cast<std::uint32_t>(descriptor.shapes.size()));
  for (const auto& shape : descriptor.shapes) writer.numbers(shape);
  writer.numbers(descriptor.numbers).numbers(descriptor.room).flag(descriptor.place.has_value());
  if (descriptor.place) write(writer, *descriptor.place);
  writer.flag(descriptor.is_on_device);
}

Descriptor read_descriptor(Reader& reader) {
  Descriptor descriptor;
  descriptor.collective = known(to_collective(reader.number<std::int32_t>()), "collective");
  descriptor.dtype = known(to_dtype(reader.number<std::int32_t>()), "element type");
  descriptor.reduce_op = known(to_reduce_op(reader.number<std::int32_t>()), "reduction");
  descriptor.root = Rank{reader.number<std::int32_t>()};
  descriptor.prescale = reader.number<double>();
  descriptor.postscale = reader.number<double>();
  descriptor.timeout_s = reader.number<double>();
  if (!(descriptor.timeout_s >= 0)) malformed("a negative timeout");
  const auto tensors = reader.number<std::uint32_t>();
  // No reserve: the number is not to be believed before its bytes are there.
  for (std::uint32_t i = 0; i < tensors; ++i) {
    descriptor.shapes.push_back(reader.numbers<std::int64_t>());
    const auto& shape = descriptor.shapes.back();
    if (shape.size() > kMaxDims) malformed("a tensor of too many dimensions");
    if (!count_elements(shape, descriptor.dtype)) malformed("a tensor of an impossible shape");
  }
  descriptor.numbers = reader.numbers<std::int64_t>();
  descriptor.room = reader.numbers<std::int64_t>();
  const bool has_room = descriptor.room.size() == tensors &&
                        std::ranges::all_of(descriptor.room, [](auto bytes) { return bytes >= 0; });
  if (!has_room && !descriptor.room.empty()) malformed("impossible room for results");
  if (reader.flag()) descriptor.place = read_place(reader);
  descriptor.is_on_device = reader.flag();
  return descriptor;
}

void write(Writer& writer, const Execute& message) {
  writer.number(message.process_set)
      .number(message.sequence)
      .text(message.name)
      .numbers(message.rows)
      .numbers(message.splits)
      .number(static_cast<std::uint32_t>(message.places.size()));
  for (const auto& place : message.places) write(writer, place);
  writer.numbers(message.contributors).flag(message.descriptor.has_value());
  if (message.descriptor) write(writer, *message.descriptor);
  writer.flag(message.is_on_device).numbers(message.unique_id).flag(message.asks_for_memory);
}

Execute read_execute(Reader& reader) {
  Execute message;
  message.process_set = reader.number<std::int32_t>();
  message.sequence = reader.number<std::uint64_t>();
  message.name = reader.text(kMaxNameBytes);
  message.rows = reader.numbers<std::int64_t>();
  message.splits = reader.numbers<std::int64_t>();
  const auto places = reader.number<std::uint32_t>();
  for (std::uint32_t i = 0; i < places; ++i) message.places.push_back(read_place(reader));
  message.contributors = reader.numbers<Rank>();
  if (reader.flag()) message.descriptor = read_descriptor(reader);
  message.is_on_device = reader.flag();
  message.unique_id = reader.numbers<std::uint8_t>();
  message.asks_for_memory = reader.flag();
  const std::size_t id = message.unique_id.size();
  if (id != 0 && (id != kUniqueIdBytes || !message.is_on_device)) malformed("an id out of place");
  if (message.is_on_device && !message.places.empty()) malformed("places on a device");
  if (message.descriptor && message.descriptor->is_on_device != message.is_on_device) {
    malformed("an order and a description of two planes");
  }
  return message;
}

}  // namespace

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

Bytes encode(const Ready& message) {
  Writer writer(FrameType::kReady);
  writer.number(message.process_set).text(message.name);
  write(writer, message.descriptor);
  return writer.finish();
}

Bytes encode(const Execute& message) {
  Writer writer(FrameType::kExecute);
  write(writer, message);
  return writer.finish();
}

Bytes encode(const Order& message) {
  Writer writer(FrameType::kOrder);
  write(writer, message.execute);
  return writer.finish();
}

Bytes encode(const Refuse& message) {
  return Writer(FrameType::kRefuse)
      .number(message.process_set)
      .text(message.name)
      .number(message.status)
      .text(message.message)
      .number(message.device_orders)
      .finish();
}

Bytes encode(const Goodbye& message) {
  Writer writer(FrameType::kGoodbye);
  writer.number(static_cast<std::uint32_t>(message.sets.size()));
  for (const auto& entry : message.sets) {
    writer.number(entry.process_set).number(entry.executed).number(entry.executed_on_device);
  }
  return writer.finish();
}

Bytes encode(const StackRequest&) { return Writer(FrameType::kStackRequest).finish(); }

Bytes encode(const Stack& message) { return Writer(FrameType::kStack).text(message.text).finish(); }

Bytes encode(const Abort& message) {
  return Writer(FrameType::kAbort).number(message.status).text(message.message).finish();
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
      type > static_cast<std::uint8_t>(FrameType::kPoint)) {
    malformed("a frame of unknown type " + std::to_string(type));
  }
  result.type = static_cast<FrameType>(type);
  for (std::size_t i = 5; i < kFrameHeaderBytes; ++i) {
    if (header[i] != std::byte{0}) malformed("a frame header with bytes set that mean nothing");
  }
  const bool is_data = result.type == FrameType::kData;
  const std::size_t limit = is_data ? kMaxDataBytes + 4 : kMaxControlBytes;
  if (result.body_bytes > limit || (is_data && result.body_bytes < 4)) {
    malformed("a frame of " + std::to_string(result.body_bytes) + " bytes");
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
Ready decode<Ready>(std::span<const std::byte> body) {
  Reader reader(body);
  Ready message;
  message.process_set = reader.number<std::int32_t>();
  message.name = reader.text(kMaxNameBytes);
  message.descriptor = read_descriptor(reader);
  reader.end();
  return message;
}

template <>
Execute decode<Execute>(std::span<const std::byte> body) {
  Reader reader(body);
  Execute message = read_execute(reader);
  reader.end();
  return message;
}

template <>
Order decode<Order>(std::span<const std::byte> body) {
  Reader reader(body);
  Order message{read_execute(reader)};
  reader.end();
  if (!message.execute.is_on_device) malformed("an order to pass on that is not for devices");
  return message;
}

template <>
Refuse decode<Refuse>(std::span<const std::byte> body) {
  Reader reader(body);
  Refuse message;
  message.process_set = reader.number<std::int32_t>();
  message.name = reader.text(kMaxNameBytes);
  message.status = read_failure(reader);
  message.message = reader.text(kMaxControlBytes);
  message.device_orders = reader.number<std::uint64_t>();
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
  Reader(body).end();
  return {};
}

template <>
Stack decode<Stack>(std::span<const std::byte> body) {
  Reader reader(body);
  Stack message{reader.text(kMaxStackBytes)};
  reader.end();
  return message;
}

template <>
Abort decode<Abort>(std::span<const std::byte> body) {
  Reader reader(body);
  Abort message;
  message.status = read_failure(reader);
  message.message = reader.text(kMaxControlBytes);
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
