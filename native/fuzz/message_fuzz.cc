// Bytes of a peer through the decoders and through a connection: any bytes end in messages or in an
// Error. Without arguments that libFuzzer knows, `message_fuzz --write-corpus <folder>` writes real
// frames to start from.
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "error.h"
#include "message.h"
#include "transport/control_link.h"
#include "transport/data_link.h"

namespace sparkhvd {
namespace {

using Input = std::span<const std::byte>;

/// What was understood must be understood again, and the same, after it was written.
template <class Message>
void try_decode(Input body) {
  Bytes again;
  try {
    again = encode(decode<Message>(body));
  } catch (const Error&) {
    return;
  }
  const auto body_again = Input(again).subspan(kFrameHeaderBytes);
  if (!std::ranges::equal(body_again, body)) std::abort();
}

void decode_everything(Input body) {
  try_decode<Hello>(body);
  try_decode<Mapped>(body);
  try_decode<Ready>(body);
  try_decode<Execute>(body);
  try_decode<Order>(body);
  try_decode<Refuse>(body);
  try_decode<Goodbye>(body);
  try_decode<Abort>(body);
  try_decode<SegmentOffer>(body);
  try_decode<SegmentMapped>(body);
  try_decode<Credit>(body);
  try_decode<Point>(body);
  try_decode<ReadyAgain>(body);
  try_decode<ExecuteAgain>(body);
}

/// The input as what a peer sends, cut where the input says. Returns how much of it was taken.
template <class L, class Read>
std::size_t feed(L& link, Fd peer, Input input, const Read& read) {
  std::size_t sent = 0;
  std::size_t step = 1 + input.size() / 3;
  while (sent < input.size()) {
    const auto part = input.subspan(sent, std::min(step, input.size() - sent));
    const auto written = ::send(peer.get(), part.data(), part.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (written <= 0) break;  // the link has stopped reading
    sent += static_cast<std::size_t>(written);
    step = 1 + step * 7 % 5000;
    for (int i = 0; i < 3; ++i) read();
  }
  peer.reset();
  for (int i = 0; i < 1000 && link.state() == Link::State::kOpen; ++i) read();
  if (link.state() == Link::State::kOpen) std::abort();
  if (link.state() == Link::State::kBroken && link.trouble().empty()) std::abort();
  return sent;
}

/// Every byte of a frame is handed over once, or the link says what is wrong.
void read_control(Input input) {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) return;
  ControlLink link(Rank{1}, Fd(ends[1]));
  std::size_t handed_over = 0;
  const auto handler = [&](FrameType, Input body) {
    handed_over += body.size();
    return handed_over % 7 != 3;  // sometimes "stop reading for now"
  };
  const auto sent = feed(link, Fd(ends[0]), input, [&] { link.read(handler, 1 << 20); });
  if (handed_over > sent) std::abort();
}

/// With a receiver that wants tensor bytes of two process sets.
void read_data(Input input) {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) return;
  std::vector<std::byte> tensors(3000);
  DataLink link(Rank{1}, Fd(ends[1]), DataLink::unasked_among(2));
  link.receive_data(0, std::span(tensors).first(1000));
  link.receive_data(1, std::span(tensors).subspan(1000, 500));
  link.receive_data(0, std::span(tensors).subspan(1500));
  int reads = 0;
  feed(link, Fd(ends[0]), input, [&] {
    link.read(1 << 20);
    if (++reads == 5) link.cancel_lent(1);
    if (const auto bytes = link.take_credit(0)) link.grant(0, *bytes);
  });
  link.cancel_lent();
}

void write_corpus(const std::filesystem::path& folder) {
  std::filesystem::create_directories(folder);
  std::vector<Bytes> frames;
  Hello hello;
  hello.hosts = {0, 0, 1, 1};
  hello.slot_bytes = 262144;
  hello.slots = 4;
  hello.has_memory = true;
  frames.push_back(encode(hello));
  frames.push_back(encode(Mapped{true}));
  Ready ready;
  ready.name = "allreduce.layer3.weight";
  ready.descriptor.dtype = DType::kFloat32;
  ready.descriptor.timeout_s = 1800;
  for (const auto& shapes :
       std::vector<std::vector<std::vector<std::int64_t>>>{{}, {{}}, {{3, 4}, {0}, {7}}}) {
    ready.descriptor.shapes = shapes;
    for (const auto collective :
         {Collective::kAllreduce, Collective::kAllgather, Collective::kBarrier}) {
      ready.descriptor.collective = collective;
      frames.push_back(encode(ready));
    }
  }
  Execute planned{0, 17, "allgather.x", {3, 0, 5}};
  frames.push_back(encode(planned));
  planned.number = 4;
  frames.push_back(encode(planned));
  frames.push_back(encode(ReadyAgain{0, {4, 0, 31}}));
  frames.push_back(encode(ExecuteAgain{0, 18, {0, 4}}));
  frames.push_back(encode(Refuse{0, "x", SPARKHVD_MISMATCH, "ranks disagree on shape."}));
  Execute partial{1, 18, "bucket.3", {}};
  partial.contributors = {Rank{0}, Rank{2}};
  partial.descriptor = ready.descriptor;
  frames.push_back(encode(partial));
  partial.is_on_device = partial.descriptor->is_on_device = true;
  partial.unique_id.assign(kUniqueIdBytes, 1);
  frames.push_back(encode(partial));
  frames.push_back(encode(Order{partial}));
  frames.push_back(encode(Goodbye{{{0, 12}, {3, 1}}}));
  frames.push_back(encode(SegmentOffer{{}, true}));
  frames.push_back(encode(SegmentMapped{{}, true}));
  frames.push_back(encode(Abort{SPARKHVD_PEER_LOST, "rank 2 is lost"}));
  frames.push_back(encode(Credit{1, 0, 1 << 20}));
  const std::array<std::byte, 8> payload{};
  frames.push_back(encode(Point{PointKind::kEager, 0, 5, DType::kFloat32, 8, 1, "", payload}));
  frames.push_back(encode(Point{PointKind::kReject, 0, 5, DType::kFloat32, 0, 1, "why", {}}));
  for (const std::int32_t stream : {0, 1}) {
    const auto header = encode_data_header(stream, 700);
    Bytes data(header.begin(), header.end());
    data.resize(data.size() + 700, std::byte{1});
    frames.push_back(data);
  }
  Bytes conversation;
  std::size_t number = 0;
  const auto write = [&](const Bytes& bytes) {
    std::ofstream file(folder / ("seed-" + std::to_string(number++)), std::ios::binary);
    file.write(reinterpret_cast<const char*>(bytes.data()),
               static_cast<std::streamsize>(bytes.size()));
  };
  for (const auto& frame : frames) {
    write(frame);
    conversation.insert(conversation.end(), frame.begin(), frame.end());
  }
  write(conversation);
}

}  // namespace
}  // namespace sparkhvd

extern "C" int LLVMFuzzerInitialize(int* count, char*** arguments) {
  if (*count == 3 && std::strcmp((*arguments)[1], "--write-corpus") == 0) {
    sparkhvd::write_corpus((*arguments)[2]);
    std::exit(0);
  }
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto input = std::as_bytes(std::span(data, size));
  if (size >= sparkhvd::kFrameHeaderBytes) {
    try {
      (void)sparkhvd::decode_header(input.first(sparkhvd::kFrameHeaderBytes));
    } catch (const sparkhvd::Error&) {
      // A sentence is one of the two right answers.
    }
    sparkhvd::decode_everything(input.subspan(sparkhvd::kFrameHeaderBytes));
  }
  sparkhvd::decode_everything(input);
  sparkhvd::read_control(input);
  sparkhvd::read_data(input);
  return 0;
}
