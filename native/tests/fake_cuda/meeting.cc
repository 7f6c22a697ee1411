#include "meeting.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <ctime>
#include <map>
#include <mutex>
#include <random>
#include <stdexcept>

namespace fake {

using sparkhvd::nccl::NcclUniqueId;

static_assert(std::atomic<std::uint32_t>::is_always_lock_free);  // needed between processes

namespace {

constexpr char kMagic[8] = {'f', 'a', 'k', 'e', 'N', 'C', 'C', 'L'};

struct IdContent {
  char magic[8];
  std::int32_t process;
  std::int32_t descriptor;
  std::uint64_t key;
};
static_assert(sizeof(IdContent) <= sizeof(NcclUniqueId));

IdContent read_id(const NcclUniqueId& id) {
  IdContent content;
  std::memcpy(&content, id.bytes.data(), sizeof(content));
  return content;
}

std::runtime_error failure(const std::string& call) {
  return std::runtime_error(call + ": " + std::strerror(errno));
}

/// Descriptors of unique ids of this process that some ranks have not joined yet.
struct OpenIds {
  std::mutex mutex;
  std::map<std::uint64_t, int> descriptors;  // by key

  void close_one(std::uint64_t key) {
    const std::scoped_lock lock(mutex);
    const auto found = descriptors.find(key);
    if (found == descriptors.end()) return;
    ::close(found->second);
    descriptors.erase(found);
  }
};

OpenIds& open_ids() {
  static auto* const ids = new OpenIds;
  return *ids;
}

}  // namespace

struct alignas(64) Meeting::Header {
  std::atomic<std::uint32_t> size;
  std::atomic<std::uint32_t> joined;
  std::atomic<std::uint32_t> wakeup;
};

NcclUniqueId make_unique_id() {
  std::random_device random;
  IdContent content{};
  std::memcpy(content.magic, kMagic, sizeof(kMagic));
  content.process = ::getpid();
  content.key = (std::uint64_t{random()} << 32) | random();
  content.descriptor = ::memfd_create("fake_nccl", MFD_CLOEXEC);
  if (content.descriptor < 0) throw failure("memfd_create");
  NcclUniqueId id{};
  std::memcpy(id.bytes.data(), &content, sizeof(content));
  const std::scoped_lock lock(open_ids().mutex);
  open_ids().descriptors[content.key] = content.descriptor;
  return id;
}

Meeting::Meeting(const NcclUniqueId& id, int rank, int size, const Identity& identity)
    : rank_(rank), size_(size), id_(id) {
  const IdContent content = read_id(id);
  if (std::memcmp(content.magic, kMagic, sizeof(kMagic)) != 0) {
    throw std::runtime_error("the unique id was not made by this library");
  }
  key_ = content.key;
  const std::string path =
      "/proc/" + std::to_string(content.process) + "/fd/" + std::to_string(content.descriptor);
  const int descriptor = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (descriptor < 0) {
    throw failure("the process that made the unique id has gone, or all ranks have joined: " +
                  path);
  }
  const auto ranks = static_cast<std::size_t>(size);
  bytes_ = sizeof(Header) + ranks * sizeof(Seat) + ranks * ranks * sizeof(Mailbox);
  struct stat status{};
  // The file only grows, and every rank sets the same size. So the first rank provides the pages.
  const bool is_sized = ::fstat(descriptor, &status) == 0 &&
                        (static_cast<std::size_t>(status.st_size) >= bytes_ ||
                         ::ftruncate(descriptor, static_cast<off_t>(bytes_)) == 0);
  if (is_sized) {
    memory_ = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  }
  const int code = errno;
  ::close(descriptor);
  errno = code;
  if (!is_sized || memory_ == MAP_FAILED) {
    memory_ = nullptr;
    throw failure("the memory of a communicator");
  }
  auto* start = static_cast<std::byte*>(memory_);
  header_ = reinterpret_cast<Header*>(start);
  seats_ = reinterpret_cast<Seat*>(start + sizeof(Header));
  mailboxes_ = reinterpret_cast<Mailbox*>(start + sizeof(Header) + ranks * sizeof(Seat));
  std::uint32_t agreed = 0;
  if (!header_->size.compare_exchange_strong(agreed, static_cast<std::uint32_t>(size)) &&
      agreed != static_cast<std::uint32_t>(size)) {
    ::munmap(memory_, bytes_);
    throw std::runtime_error("ranks of one unique id disagree on the number of ranks");
  }
  if (seat(rank).is_taken.exchange(1) != 0) {
    ::munmap(memory_, bytes_);
    throw std::runtime_error("two ranks of one unique id have the number " + std::to_string(rank));
  }
  seat(rank).identity = identity;
  ++header_->joined;
  ring();
}

Meeting::~Meeting() { ::munmap(memory_, bytes_); }

bool Meeting::wait_for_all(const Stop& stop) {
  const bool are_there =
      wait([&] { return header_->joined == static_cast<std::uint32_t>(size_); }, stop);
  open_ids().close_one(key_);  // if this rank gives up, ranks that have not joined get an error
  return are_there;
}

bool Meeting::barrier(const Stop& stop) {
  seat(rank_).step = ++step_;
  ring();
  for (int other = 0; other < size_; ++other) {
    // Signed, so that the counter may wrap.
    const auto is_there = [&] { return static_cast<std::int32_t>(seat(other).step - step_) >= 0; };
    if (!wait(is_there, stop)) return false;
  }
  return true;
}

bool Meeting::wait(const std::function<bool()>& condition, const Stop& stop) {
  for (;;) {
    const std::uint32_t wakeup = header_->wakeup;
    if (condition()) return true;
    if (stop()) return false;
    const timespec longest{0, 1'000'000};  // wakes every millisecond to check for an abort
    ::syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&header_->wakeup), FUTEX_WAIT, wakeup,
              &longest, nullptr, 0);
  }
}

void Meeting::ring() {
  ++header_->wakeup;
  ::syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&header_->wakeup), FUTEX_WAKE, INT32_MAX,
            nullptr, nullptr, 0);
}

}  // namespace fake
