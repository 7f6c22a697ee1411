// Specs of the operations on the engine itself: barrier, join, process sets, registered memory and settings. The engine
// executes most of them itself, in the negotiated order. Messages (send and receive) have their specs here too.
#include <cstdint>

#include "collectives/collectives.h"
#include "collectives/spec.h"

namespace sparkhvd {
namespace {

void check_is_global(const Submitted& submitted) {
  if (submitted.process_set != 0) {
    submitted.refuse("all ranks call it, so process_set must be 0.");
  }
}

void check_new_set(const Submitted& submitted) {
  check_is_global(submitted);
  const auto& numbers = submitted.descriptor.numbers;
  if (numbers.empty()) submitted.refuse("a process set has at least one rank.");
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    if (numbers[i] < 0 || static_cast<std::size_t>(numbers[i]) >= submitted.world_size) {
      submitted.refuse("rank " + std::to_string(numbers[i]) + " does not exist; ranks are 0 to " +
                       std::to_string(submitted.world_size - 1) + ".");
    }
    if (i > 0 && numbers[i] <= numbers[i - 1]) {
      submitted.refuse("the ranks must be ascending and without duplicates.");
    }
  }
}

void check_old_set(const Submitted& submitted) {
  const auto& numbers = submitted.descriptor.numbers;
  if (numbers.size() != 1 || numbers[0] < 1 || numbers[0] > INT32_MAX) {
    submitted.refuse(
        "give the id of a process set that was added; process set 0 has all ranks and cannot be "
        "removed.");
  }
  check_is_global(submitted);
}

void check_registration(const Submitted& submitted) {
  const auto& numbers = submitted.descriptor.numbers;
  if (numbers.empty() || numbers.size() > 2 || numbers[0] < 1 ||
      static_cast<std::uint64_t>(numbers[0]) > kMaxTensorBytes) {
    submitted.refuse("give a number of bytes from 1 to 64 TiB.");
  }
  if (numbers.size() == 2 && numbers[1] != 0 && numbers[1] != 1) {
    submitted.refuse("the second number must be 1 for one piece per host, or 0.");
  }
  if (submitted.descriptor.is_on_device && numbers.size() == 2 && numbers[1] == 1) {
    submitted.refuse(
        "the ranks of a host have no common piece of their devices' memory, so the second number "
        "must be 0.");
  }
}

void check_knobs(const Submitted& submitted) {
  const auto& numbers = submitted.descriptor.numbers;
  if (numbers.size() != SPARKHVD_NUM_KNOBS) {
    submitted.refuse(std::to_string(numbers.size()) + " knobs were given; there are " +
                     std::to_string(SPARKHVD_NUM_KNOBS) + ".");
  }
  const auto check = [&](std::size_t knob, const char* name, std::uint64_t low,
                         std::uint64_t high) {
    const auto value = static_cast<std::uint64_t>(numbers[knob]);
    if (numbers[knob] == 0 || (numbers[knob] > 0 && value >= low && value <= high)) return;
    submitted.refuse(std::string(name) + " is " + std::to_string(numbers[knob]) +
                     "; it must be from " + std::to_string(low) + " to " + std::to_string(high) +
                     ", or 0 to keep its value.");
  };
  check(SPARKHVD_KNOB_CHUNK_BYTES, "chunk_bytes", 4096, submitted.slot_bytes);
  check(SPARKHVD_KNOB_STREAMS, "streams", 1, submitted.streams);
  check(SPARKHVD_KNOB_DIRECT_RANKS, "direct_ranks", 1, 1024);
}

bool is_last_rank_possible(const Received& received) {
  return received.order.rows.size() == 1 &&
         received.team.includes(Rank{static_cast<std::int32_t>(received.order.rows[0])});
}

void check_message(const Submitted& submitted) {
  const auto& numbers = submitted.descriptor.numbers;
  const bool receives = submitted.descriptor.collective == Collective::kReceive;
  const bool has_tag = !numbers.empty() && numbers[0] >= 0;
  const bool says_whether_shorter =
      receives && numbers.size() == 2 && (numbers[1] == 0 || numbers[1] == 1);
  if (has_tag && (numbers.size() == 1 || says_whether_shorter)) return;
  submitted.refuse(std::string("give one tag, from 0 to 2^63 - 1") +
                   (receives ? ", and behind it 1 if shorter messages fit, too." : "."));
}

Task make_memory(Context& context) {
  const auto& numbers = context.operation.descriptor.numbers;
  const bool is_one_piece = numbers.size() > 1 && numbers[1] == 1;
  return share_memory(context, static_cast<std::size_t>(numbers.at(0)),
                      is_one_piece ? Segment::Kind::kOnePiece : Segment::Kind::kPieceEach);
}

}  // namespace

extern const CollectiveSpec kBarrierSpec = {.collective = Collective::kBarrier,
                                            .check = take_no_numbers};
extern const CollectiveSpec kJoinSpec = {.collective = Collective::kJoin,
                                         .check = take_no_numbers,
                                         .are_rows_possible = is_last_rank_possible};
extern const CollectiveSpec kAddProcessSetSpec = {.collective = Collective::kAddProcessSet,
                                                  .same_numbers = "the ranks of the process set",
                                                  .check = check_new_set};
extern const CollectiveSpec kRemoveProcessSetSpec = {.collective = Collective::kRemoveProcessSet,
                                                     .same_numbers = "the process set to remove",
                                                     .check = check_old_set};
extern const CollectiveSpec kRegisterSpec = {.collective = Collective::kRegister,
                                             .same_numbers = "the bytes to register",
                                             .check = check_registration,
                                             .run = make_memory,
                                             .device_algorithm = "nccl_register"};
extern const CollectiveSpec kConfigureSpec = {
    .collective = Collective::kConfigure, .same_numbers = "the settings", .check = check_knobs};
extern const CollectiveSpec kSendSpec = {.collective = Collective::kSend,
                                         .min_tensors = 1,
                                         .max_tensors = 1,
                                         .is_point_to_point = true,
                                         .check = check_message};
extern const CollectiveSpec kReceiveSpec = {.collective = Collective::kReceive,
                                            .min_tensors = 1,
                                            .max_tensors = 1,
                                            .is_point_to_point = true,
                                            .result = Result::kReceived,
                                            .check = check_message};

}  // namespace sparkhvd
