#include <sys/mman.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <utility>

#include "nccl_conformity.h"

namespace sparkhvd::conformity {

namespace {

constexpr std::chrono::seconds kLongestWait{60};  // long enough for a sanitizer on a busy machine

std::uint16_t to_float16(int value) {
  if (value == 0) return 0;
  const int exponent = std::ilogb(static_cast<double>(value));
  const int mantissa = (value << 10 >> exponent) & 1023;
  return static_cast<std::uint16_t>(((exponent + 15) << 10) | mantissa);
}

template <class T>
void append(std::vector<std::byte>& bytes, T value) {
  const auto* start = reinterpret_cast<const std::byte*>(&value);
  bytes.insert(bytes.end(), start, start + sizeof(T));
}

void append_as(std::vector<std::byte>& bytes, int value, NcclDataType dtype) {
  switch (dtype) {
    case NcclDataType::kInt8:
    case NcclDataType::kUint8:
      return append(bytes, static_cast<std::uint8_t>(value));
    case NcclDataType::kInt32:
    case NcclDataType::kUint32:
      return append(bytes, static_cast<std::uint32_t>(value));
    case NcclDataType::kInt64:
    case NcclDataType::kUint64:
      return append(bytes, static_cast<std::uint64_t>(value));
    case NcclDataType::kFloat16:
      return append(bytes, to_float16(value));
    case NcclDataType::kFloat32:
      return append(bytes, static_cast<float>(value));
    case NcclDataType::kFloat64:
      return append(bytes, static_cast<double>(value));
    case NcclDataType::kBfloat16:
      return append(bytes, static_cast<std::uint16_t>(
                               std::bit_cast<std::uint32_t>(static_cast<float>(value)) >> 16));
  }
}

}  // namespace

struct Room::Shared {
  std::atomic<int> arrived;
  std::atomic<int> round;
  std::atomic<bool> failed;
  std::atomic<char> id[sizeof(NcclUniqueId)];
};

Room::Room(int size) : size_(size) {
  void* memory =
      ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("mmap");
  shared_ = new (memory) Shared{};
}

Room::~Room() { ::munmap(shared_, sizeof(Shared)); }

void Room::barrier() {
  const int round = shared_->round;
  if (++shared_->arrived == size_) {
    shared_->arrived = 0;
    ++shared_->round;
    return;
  }
  wait_until([&] { return shared_->round != round || shared_->failed; }, "the other ranks");
  if (shared_->round == round) throw std::runtime_error("another rank failed");
}

NcclUniqueId Room::share(int rank, const std::function<NcclUniqueId()>& make) {
  NcclUniqueId id{};
  if (rank == 0) {
    id = make();
    for (std::size_t i = 0; i < id.bytes.size(); ++i) shared_->id[i] = id.bytes[i];
  }
  barrier();
  for (std::size_t i = 0; i < id.bytes.size(); ++i) id.bytes[i] = shared_->id[i];
  barrier();
  return id;
}

void Room::fail() { shared_->failed = true; }
bool Room::has_failed() const { return shared_->failed; }

void expect(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error(what);
}

void expect_ok(const Rank& rank, CUresult result, const char* call) {
  rank.cuda.check(result, call);
}

void wait_until(const std::function<bool()>& condition, const std::string& what) {
  const auto deadline = std::chrono::steady_clock::now() + kLongestWait;
  while (!condition()) {
    expect(std::chrono::steady_clock::now() < deadline, "waited too long for " + what);
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

Comm::Comm(Rank& rank) : rank_(rank) {
  const NcclUniqueId id = rank.room.share(rank.rank, [&] {
    NcclUniqueId made{};
    rank.nccl.check(rank.nccl.ncclGetUniqueId(&made), "ncclGetUniqueId");
    return made;
  });
  NcclConfig config = non_blocking_config();
  const NcclResult result =
      rank.nccl.ncclCommInitRankConfig(&handle_, rank.size, id, rank.rank, &config);
  done(result, "ncclCommInitRankConfig");
}

Comm::~Comm() {
  if (handle_ != nullptr) rank_.nccl.ncclCommAbort(handle_);
}

NcclResult Comm::settle() {
  NcclResult state = NcclResult::kInProgress;
  wait_until(
      [&] {
        rank_.nccl.check(rank_.nccl.ncclCommGetAsyncError(handle_, &state),
                         "ncclCommGetAsyncError");
        return state != NcclResult::kInProgress || rank_.room.has_failed();
      },
      "ncclCommGetAsyncError");
  return state;
}

void Comm::done(NcclResult result, const char* call) {
  if (result == NcclResult::kInProgress) result = settle();
  rank_.nccl.check(result, call, handle_);
}

void Comm::destroy() {
  done(rank_.nccl.ncclCommFinalize(handle_), "ncclCommFinalize");
  rank_.nccl.check(rank_.nccl.ncclCommDestroy(std::exchange(handle_, nullptr)), "ncclCommDestroy");
}

Memory::Memory(Rank& rank, std::vector<std::byte> content) : rank_(rank), bytes_(content.size()) {
  // Allocates some bytes more than requested, so that zero bytes have an address too.
  expect_ok(rank, rank.cuda.cuMemAlloc(&address_, bytes_ + 16), "cuMemAlloc");
  if (bytes_ == 0) return;
  expect_ok(rank, rank.cuda.cuMemcpyHtoDAsync(address_, content.data(), bytes_, rank.stream),
            "cuMemcpyHtoDAsync");
}

Memory::~Memory() {
  // After a failure a collective may spin on the device forever, and cuMemFree would wait for it. The process ends
  // anyway.
  if (!rank_.room.has_failed()) rank_.cuda.cuMemFree(address_);
}

std::vector<std::byte> Memory::read() const {
  std::vector<std::byte> content(bytes_);
  if (bytes_ > 0) {
    expect_ok(rank_, rank_.cuda.cuMemcpyDtoHAsync(content.data(), address_, bytes_, rank_.stream),
              "cuMemcpyDtoHAsync");
  }
  wait_until([&] { return rank_.cuda.cuStreamQuery(rank_.stream) != kCudaErrorNotReady; },
             "the stream");
  expect_ok(rank_, rank_.cuda.cuStreamSynchronize(rank_.stream), "cuStreamSynchronize");
  return content;
}

std::size_t size_of(NcclDataType dtype) {
  std::vector<std::byte> one;
  append_as(one, 0, dtype);
  return one.size();
}

std::vector<std::byte> encode(const std::vector<int>& values, NcclDataType dtype) {
  std::vector<std::byte> bytes;
  bytes.reserve(values.size() * sizeof(double));
  for (const int value : values) append_as(bytes, value, dtype);
  return bytes;
}

}  // namespace sparkhvd::conformity
