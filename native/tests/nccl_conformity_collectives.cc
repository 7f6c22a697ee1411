// Every collective with every type, compared with the expected numbers.
#include <algorithm>
#include <functional>
#include <string>

#include "nccl_conformity.h"

namespace sparkhvd::conformity {

namespace {

// Counts: one element, a few elements, more than a warp, and more than a chunk of the stand-in.
constexpr std::size_t kSizes[] = {1, 3, 1025, 70'001};
constexpr std::size_t kOneSize = 1025;

/// Input of a rank: values 1 and 2, so that the product over six ranks fits into every type.
int value(int rank, std::size_t i) {
  return 1 + static_cast<int>((i / 3 + static_cast<std::size_t>(rank)) % 2);
}

std::vector<int> values(int rank, std::size_t count, std::size_t from = 0) {
  std::vector<int> all(count);
  for (std::size_t i = 0; i < count; ++i) all[i] = value(rank, from + i);
  return all;
}

std::vector<int> reduced(int size, NcclOp op, std::size_t count, std::size_t from = 0) {
  std::vector<int> all = values(0, count, from);
  for (int rank = 1; rank < size; ++rank) {
    for (std::size_t i = 0; i < count; ++i) {
      const int other = value(rank, from + i);
      all[i] = op == NcclOp::kSum       ? all[i] + other
               : op == NcclOp::kProduct ? all[i] * other
               : op == NcclOp::kMax     ? std::max(all[i], other)
                                        : std::min(all[i], other);
    }
  }
  return all;
}

struct Case {
  NcclDataType dtype;
  NcclOp op;
  std::size_t count;
  bool is_in_place;

  std::string text() const {
    return "dtype " + std::to_string(static_cast<int>(dtype)) + ", op " +
           std::to_string(static_cast<int>(op)) + ", count " + std::to_string(count) +
           (is_in_place ? ", in place" : "");
  }
};

/// All types with all ops at one size, and all sizes with some types and ops.
std::vector<Case> cases(bool has_ops) {
  std::vector<Case> all;
  for (const NcclDataType dtype : kDTypes) {
    for (const NcclOp op : kOps) {
      if (!has_ops && op != NcclOp::kSum) continue;
      for (const std::size_t count : kSizes) {
        if (count != kOneSize && op != NcclOp::kSum) continue;
        for (const bool is_in_place : {false, true}) all.push_back({dtype, op, count, is_in_place});
      }
    }
  }
  return all;
}

void expect_same(const Memory& memory, const std::vector<int>& wanted, const Case& one) {
  expect(memory.read() == encode(wanted, one.dtype), "wrong result: " + one.text());
}

void allreduce(Rank& rank) {
  Comm comm(rank);
  for (const Case& one : cases(true)) {
    const Memory input(rank, encode(values(rank.rank, one.count), one.dtype));
    const Memory output(rank, one.count * size_of(one.dtype));
    const Memory& to = one.is_in_place ? input : output;
    comm.done(rank.nccl.ncclAllReduce(input.at(), to.at(), one.count, one.dtype, one.op, comm.get(),
                                      rank.stream),
              "ncclAllReduce");
    expect_same(to, reduced(rank.size, one.op, one.count), one);
    if (!one.is_in_place) expect_same(input, values(rank.rank, one.count), one);
  }
  comm.destroy();
}

void reduce(Rank& rank) {
  Comm comm(rank);
  int root = 0;
  for (const Case& one : cases(true)) {
    root = (root + 1) % rank.size;
    const Memory input(rank, encode(values(rank.rank, one.count), one.dtype));
    const Memory output(rank, one.count * size_of(one.dtype));
    const Memory& to = one.is_in_place ? input : output;
    comm.done(rank.nccl.ncclReduce(input.at(), to.at(), one.count, one.dtype, one.op, root,
                                   comm.get(), rank.stream),
              "ncclReduce");
    if (rank.rank == root) expect_same(to, reduced(rank.size, one.op, one.count), one);
    to.read();  // waits for the stream, before the memory is freed
  }
  comm.destroy();
}

void broadcast(Rank& rank) {
  Comm comm(rank);
  int root = 0;
  for (const Case& one : cases(false)) {
    root = (root + 1) % rank.size;
    const Memory input(rank, encode(values(rank.rank, one.count), one.dtype));
    const Memory output(rank, one.count * size_of(one.dtype));
    const Memory& to = one.is_in_place ? input : output;
    comm.done(rank.nccl.ncclBroadcast(input.at(), to.at(), one.count, one.dtype, root, comm.get(),
                                      rank.stream),
              "ncclBroadcast");
    expect_same(to, values(root, one.count), one);
  }
  comm.destroy();
}

void allgather(Rank& rank) {
  Comm comm(rank);
  const auto ranks = static_cast<std::size_t>(rank.size);
  for (const Case& one : cases(false)) {
    const std::size_t bytes = one.count * size_of(one.dtype);
    const auto own = encode(values(rank.rank, one.count), one.dtype);
    std::vector<std::byte> whole(ranks * bytes);
    const std::size_t place = static_cast<std::size_t>(rank.rank) * bytes;
    if (one.is_in_place) std::ranges::copy(own, whole.begin() + static_cast<std::ptrdiff_t>(place));
    const Memory input(rank, own);
    const Memory output(rank, whole);
    const std::byte* from = one.is_in_place ? output.at(place) : input.at();
    comm.done(
        rank.nccl.ncclAllGather(from, output.at(), one.count, one.dtype, comm.get(), rank.stream),
        "ncclAllGather");
    std::vector<int> wanted;
    for (int i = 0; i < rank.size; ++i) {
      const auto part = values(i, one.count);
      wanted.insert(wanted.end(), part.begin(), part.end());
    }
    expect_same(output, wanted, one);
  }
  comm.destroy();
}

void reducescatter(Rank& rank) {
  Comm comm(rank);
  const auto ranks = static_cast<std::size_t>(rank.size);
  const auto index = static_cast<std::size_t>(rank.rank);
  for (const Case& one : cases(true)) {
    const std::size_t bytes = one.count * size_of(one.dtype);
    const Memory input(rank, encode(values(rank.rank, ranks * one.count), one.dtype));
    const Memory output(rank, bytes);
    std::byte* to = one.is_in_place ? input.at(index * bytes) : output.at();
    comm.done(rank.nccl.ncclReduceScatter(input.at(), to, one.count, one.dtype, one.op, comm.get(),
                                          rank.stream),
              "ncclReduceScatter");
    const auto all = one.is_in_place ? input.read() : output.read();
    const auto wanted = encode(reduced(rank.size, one.op, one.count, index * one.count), one.dtype);
    const auto start =
        all.begin() + static_cast<std::ptrdiff_t>(one.is_in_place ? index * bytes : 0);
    expect(std::equal(wanted.begin(), wanted.end(), start), "wrong result: " + one.text());
  }
  comm.destroy();
}

/// Sends and receives in a group, as in alltoall(v). Some pairs exchange no elements, some pairs several chunks.
void send_and_receive_in_a_group(Rank& rank) {
  Comm comm(rank);
  const auto count = [&](int from, int to) {
    return static_cast<std::size_t>((from * 2 + to) % 3) * 20'011;
  };
  for (const NcclDataType dtype : kDTypes) {
    std::vector<std::unique_ptr<Memory>> sent;
    std::vector<std::unique_ptr<Memory>> received;
    rank.nccl.check(rank.nccl.ncclGroupStart(), "ncclGroupStart");
    for (int peer = 0; peer < rank.size; ++peer) {
      const std::size_t out = count(rank.rank, peer);
      const std::size_t in = count(peer, rank.rank);
      sent.push_back(std::make_unique<Memory>(
          rank, encode(values(rank.rank, out, static_cast<std::size_t>(peer)), dtype)));
      received.push_back(std::make_unique<Memory>(rank, in * size_of(dtype)));
      if (out > 0) {
        rank.nccl.check(
            rank.nccl.ncclSend(sent.back()->at(), out, dtype, peer, comm.get(), rank.stream),
            "ncclSend");
      }
      if (in > 0) {
        rank.nccl.check(
            rank.nccl.ncclRecv(received.back()->at(), in, dtype, peer, comm.get(), rank.stream),
            "ncclRecv");
      }
    }
    comm.done(rank.nccl.ncclGroupEnd(), "ncclGroupEnd");
    for (int peer = 0; peer < rank.size; ++peer) {
      const auto wanted = values(peer, count(peer, rank.rank), static_cast<std::size_t>(rank.rank));
      expect(received[static_cast<std::size_t>(peer)]->read() == encode(wanted, dtype),
             "wrong data from rank " + std::to_string(peer));
    }
  }
  comm.destroy();
}

void many_collectives_in_a_group(Rank& rank) {
  Comm comm(rank);
  constexpr std::size_t kTensors = 40;
  std::vector<std::unique_ptr<Memory>> tensors;
  for (std::size_t i = 0; i < kTensors; ++i) {
    tensors.push_back(
        std::make_unique<Memory>(rank, encode(values(rank.rank, 100 * i + 1), kDTypes[i % 10])));
  }
  rank.nccl.check(rank.nccl.ncclGroupStart(), "ncclGroupStart");
  for (std::size_t i = 0; i < kTensors; ++i) {
    rank.nccl.check(rank.nccl.ncclAllReduce(tensors[i]->at(), tensors[i]->at(), 100 * i + 1,
                                            kDTypes[i % 10], NcclOp::kSum, comm.get(), rank.stream),
                    "ncclAllReduce");
  }
  comm.done(rank.nccl.ncclGroupEnd(), "ncclGroupEnd");
  for (std::size_t i = 0; i < kTensors; ++i) {
    const auto wanted = encode(reduced(rank.size, NcclOp::kSum, 100 * i + 1), kDTypes[i % 10]);
    expect(tensors[i]->read() == wanted, "wrong tensor " + std::to_string(i));
  }
  comm.destroy();
}

void collectives_of_no_elements(Rank& rank) {
  Comm comm(rank);
  constexpr auto kType = NcclDataType::kFloat32;
  const Memory memory(rank, encode({5, 6}, kType));
  auto* at = memory.at();
  const auto& nccl = rank.nccl;
  comm.done(nccl.ncclAllReduce(at, at, 0, kType, NcclOp::kSum, comm.get(), rank.stream), "zero");
  comm.done(nccl.ncclReduce(at, at, 0, kType, NcclOp::kSum, 0, comm.get(), rank.stream), "zero");
  comm.done(nccl.ncclBroadcast(at, at, 0, kType, 0, comm.get(), rank.stream), "zero");
  comm.done(nccl.ncclAllGather(at, at, 0, kType, comm.get(), rank.stream), "zero");
  comm.done(nccl.ncclReduceScatter(at, at, 0, kType, NcclOp::kSum, comm.get(), rank.stream),
            "zero");
  expect(memory.read() == encode({5, 6}, kType), "a collective of no elements wrote something");
  comm.destroy();
}

void two_communicators_in_one_order(Rank& rank) {
  Comm first(rank);
  Comm second(rank);
  constexpr std::size_t kCount = 5000;
  constexpr auto kType = NcclDataType::kInt32;
  const Memory memory(rank, encode(values(rank.rank, kCount), kType));
  const Memory other(rank, encode(values(rank.rank, kCount), kType));
  for (int round = 0; round < 5; ++round) {
    for (Comm* comm : {&first, &second}) {
      const Memory& used = comm == &first ? memory : other;
      comm->done(rank.nccl.ncclAllReduce(used.at(), used.at(), kCount, kType, NcclOp::kMax,
                                         comm->get(), rank.stream),
                 "ncclAllReduce");
    }
  }
  const auto wanted = encode(reduced(rank.size, NcclOp::kMax, kCount), kType);
  expect(memory.read() == wanted && other.read() == wanted, "wrong result");
  // An error on the device may only appear now.
  for (Comm* comm : {&first, &second}) comm->done(comm->settle(), "ncclAllReduce");
  first.destroy();
  second.destroy();
}

}  // namespace

std::vector<Test> collective_tests() {
  return {{"allreduce", allreduce},
          {"reduce", reduce},
          {"broadcast", broadcast},
          {"allgather", allgather},
          {"reducescatter", reducescatter},
          {"send_and_receive_in_a_group", send_and_receive_in_a_group},
          {"many_collectives_in_a_group", many_collectives_in_a_group},
          {"collectives_of_no_elements", collectives_of_no_elements},
          {"two_communicators_in_one_order", two_communicators_in_one_order}};
}

}  // namespace sparkhvd::conformity
