// Frames of the negotiation: READY, EXECUTE, ORDER, REFUSE, and the short forms of the plan (see
// message.h).
#include <algorithm>

#include "message.h"
#include "wire.h"

namespace sparkhvd {
namespace {

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
  writer.flag(descriptor.is_on_device).flag(descriptor.lacks_memory);
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
  // No reserve(): a false number of tensors must not allocate memory before their bytes have arrived.
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
  descriptor.lacks_memory = reader.flag();
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
  writer.flag(message.number.has_value());
  if (message.number) writer.number(*message.number);
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
  if (reader.flag()) message.number = reader.number<std::uint32_t>();
  const std::size_t id = message.unique_id.size();
  if (id != 0 && (id != kUniqueIdBytes || !message.is_on_device))
    malformed("an unexpected NCCL id");
  if (message.is_on_device && !message.places.empty())
    malformed("places in shared memory for an operation on devices");
  if (message.number && (message.is_on_device || !message.contributors.empty())) {
    malformed("a plan's number with an order that cannot be in a plan");
  }
  if (message.descriptor && message.descriptor->is_on_device != message.is_on_device) {
    malformed("an order and a description with different kinds of devices");
  }
  return message;
}

}  // namespace

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
  Writer writer(FrameType::kRefuse);
  writer.number(message.process_set)
      .text(message.name)
      .number(message.status)
      .text(message.message)
      .number(message.device_orders);
  write(writer, message.losses);
  return writer.finish();
}

Bytes encode(const ReadyAgain& message) {
  return Writer(FrameType::kReadyAgain)
      .number(message.process_set)
      .numbers(message.numbers)
      .finish();
}

Bytes encode(const ExecuteAgain& message) {
  return Writer(FrameType::kExecuteAgain)
      .number(message.process_set)
      .number(message.sequence)
      .numbers(message.numbers)
      .finish();
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
  message.losses = read_losses(reader);
  reader.end();
  return message;
}

template <>
ReadyAgain decode<ReadyAgain>(std::span<const std::byte> body) {
  Reader reader(body);
  ReadyAgain message;
  message.process_set = reader.number<std::int32_t>();
  message.numbers = reader.numbers<std::uint32_t>();
  reader.end();
  return message;
}

template <>
ExecuteAgain decode<ExecuteAgain>(std::span<const std::byte> body) {
  Reader reader(body);
  ExecuteAgain message;
  message.process_set = reader.number<std::int32_t>();
  message.sequence = reader.number<std::uint64_t>();
  message.numbers = reader.numbers<std::uint32_t>();
  reader.end();
  return message;
}

}  // namespace sparkhvd
