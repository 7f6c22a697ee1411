// The collectives, in chunks through shared memory. The code is simple rather than fast. It reads input and writes
// output only when the stream runs the collective, never earlier.
#include <algorithm>
#include <array>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "comm.h"
#include "reduce.h"

namespace fake {

namespace {

/// Throws if the ranks' descriptions of this collective differ. False if the communicator was aborted.
bool agree(Meeting& meeting, const Op& op, const Stop& stop) {
  Seat& own = meeting.seat(meeting.rank());
  own.descriptor = {static_cast<std::uint32_t>(op.kind), static_cast<std::uint32_t>(op.dtype),
                    static_cast<std::uint32_t>(op.op), static_cast<std::uint32_t>(op.root),
                    op.count};
  if (!meeting.barrier(stop)) return false;
  bool is_agreed = true;
  for (int i = 0; i < meeting.size(); ++i) {
    is_agreed = is_agreed && meeting.seat(i).descriptor == own.descriptor;
  }
  // No rank may write its next description before all ranks have read this description.
  if (!meeting.barrier(stop)) return false;
  if (!is_agreed) {
    throw std::runtime_error(std::string("the ranks of a communicator do not call the same ") +
                             name_of(op.kind) + ", or not with the same arguments");
  }
  return true;
}

/// Exchanges `bytes` from every rank's `input` in chunks. `take` gets the chunks of all ranks at an offset.
template <class Take>
bool exchange(Meeting& meeting, const std::byte* input, std::size_t bytes, const Stop& stop,
              Take take) {
  for (std::size_t at = 0; at < bytes; at += kChunkBytes) {
    const std::size_t part = std::min(kChunkBytes, bytes - at);
    if (input != nullptr) {
      std::memcpy(meeting.seat(meeting.rank()).chunk, input + at, part);
    }
    if (!meeting.barrier(stop)) return false;
    take(at, part);
    if (!meeting.barrier(stop)) return false;
  }
  return true;
}

void reduce_chunks(const Meeting& meeting, const Op& op, std::byte* out, std::size_t part) {
  std::vector<const std::byte*> inputs;
  for (int i = 0; i < meeting.size(); ++i) inputs.push_back(meeting.seat(i).chunk);
  reduce({out, part}, inputs, op.dtype, op.op);
}

bool run_collective(Meeting& meeting, const Op& op, const Stop& stop) {
  if (!agree(meeting, op, stop)) return false;
  const std::size_t bytes = op.count * size_of(op.dtype);
  const bool is_root = meeting.rank() == op.root;
  switch (op.kind) {
    case Kind::kAllReduce:
    case Kind::kReduce:
      return exchange(meeting, op.send, bytes, stop, [&](std::size_t at, std::size_t part) {
        if (op.kind == Kind::kReduce && !is_root) return;
        reduce_chunks(meeting, op, op.recv + at, part);
      });
    case Kind::kBroadcast:
      return exchange(meeting, is_root ? op.send : nullptr, bytes, stop,
                      [&](std::size_t at, std::size_t part) {
                        std::memcpy(op.recv + at, meeting.seat(op.root).chunk, part);
                      });
    case Kind::kAllGather:
      return exchange(meeting, op.send, bytes, stop, [&](std::size_t at, std::size_t part) {
        for (int i = 0; i < meeting.size(); ++i) {
          std::memcpy(op.recv + static_cast<std::size_t>(i) * bytes + at, meeting.seat(i).chunk,
                      part);
        }
      });
    case Kind::kReduceScatter:
      for (int to = 0; to < meeting.size(); ++to) {
        const auto* input = op.send + static_cast<std::size_t>(to) * bytes;
        const auto take = [&](std::size_t at, std::size_t part) {
          if (to == meeting.rank()) reduce_chunks(meeting, op, op.recv + at, part);
        };
        if (!exchange(meeting, input, bytes, stop, take)) return false;
      }
      return true;
    case Kind::kSend:
    case Kind::kRecv:
      break;
  }
  throw std::logic_error("not a collective");
}

/// An unfinished send or receive.
struct Message {
  const Op* op;
  std::size_t done = 0;

  std::size_t bytes() const { return op->count * size_of(op->dtype); }
  bool is_done() const { return done == bytes(); }
};

/// Moves a chunk if there is room or data. True if it did.
bool advance(Meeting& meeting, Message& message) {
  const bool is_send = message.op->kind == Kind::kSend;
  const int peer = message.op->root;
  Mailbox& mail =
      is_send ? meeting.mailbox(meeting.rank(), peer) : meeting.mailbox(peer, meeting.rank());
  if ((mail.is_full != 0) == is_send) return false;
  if (is_send) {
    const std::size_t part = std::min(kMailBytes, message.bytes() - message.done);
    std::memcpy(mail.chunk, message.op->send + message.done, part);
    mail.message_bytes = message.bytes();
    mail.chunk_bytes = part;
    mail.is_full = 1;
    message.done += part;
  } else {
    if (mail.message_bytes != message.bytes()) {
      throw std::runtime_error("ncclRecv of " + std::to_string(message.bytes()) +
                               " bytes meets an ncclSend of " + std::to_string(mail.message_bytes));
    }
    std::memcpy(message.op->recv + message.done, mail.chunk, mail.chunk_bytes);
    message.done += mail.chunk_bytes;
    mail.is_full = 0;
  }
  meeting.ring();
  return true;
}

/// Runs all messages concurrently, but messages of the same pair and direction in order.
bool run_messages(Meeting& meeting, std::vector<Message> messages, const Stop& stop) {
  const auto advance_all = [&] {
    bool has_moved = false;
    std::vector<std::array<bool, 2>> is_busy(static_cast<std::size_t>(meeting.size()));
    for (Message& message : messages) {
      if (message.is_done()) continue;
      bool& busy = is_busy[static_cast<std::size_t>(message.op->root)]
                          [message.op->kind == Kind::kSend ? 1 : 0];
      if (!busy && advance(meeting, message)) has_moved = true;
      busy = true;
    }
    return has_moved || std::ranges::all_of(messages, &Message::is_done);
  };
  while (!std::ranges::all_of(messages, &Message::is_done)) {
    if (!meeting.wait(advance_all, stop)) return false;
  }
  return true;
}

}  // namespace

const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::kAllReduce:
      return "ncclAllReduce";
    case Kind::kReduce:
      return "ncclReduce";
    case Kind::kBroadcast:
      return "ncclBroadcast";
    case Kind::kAllGather:
      return "ncclAllGather";
    case Kind::kReduceScatter:
      return "ncclReduceScatter";
    case Kind::kSend:
      return "ncclSend";
    case Kind::kRecv:
      return "ncclRecv";
  }
  return "";
}

bool run_ops(Meeting& meeting, const std::vector<Op>& ops, const Stop& stop) {
  std::vector<Message> messages;
  for (const Op& op : ops) {
    if (op.kind == Kind::kSend || op.kind == Kind::kRecv) {
      messages.push_back({&op});
    } else if (!run_collective(meeting, op, stop)) {
      return false;
    }
  }
  return run_messages(meeting, std::move(messages), stop);
}

}  // namespace fake
