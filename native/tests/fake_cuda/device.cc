#include "device.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <sstream>
#include <string>

#include "faults.h"

namespace fake {

using sparkhvd::nccl::kCudaErrorInvalidHandle;
using sparkhvd::nccl::kCudaErrorInvalidValue;
using sparkhvd::nccl::kCudaErrorStreamCaptureInvalidated;
using sparkhvd::nccl::kCudaErrorStreamCaptureUnsupported;
using sparkhvd::nccl::kCudaSuccess;

namespace {

constexpr int kDefaultDevices = 8;
constexpr std::align_val_t kAlignment{512};  // cuMemAlloc guarantees 256

sparkhvd::nccl::CUuuid make_uuid(int index) {
  sparkhvd::nccl::CUuuid uuid{};
  std::memcpy(uuid.bytes.data(), "fake GPU", 8);
  uuid.bytes[15] = static_cast<unsigned char>(index);
  return uuid;
}

}  // namespace

Stream::Position Stream::submit(std::function<void()> item) {
  const std::scoped_lock lock(mutex_);
  if (is_capturing || faults().is_idle()) return submitted_;
  items_.push_back(std::move(item));
  ++submitted_;
  if (!is_running_) {
    is_running_ = true;
    std::thread([self = shared_from_this()] { self->run(); }).detach();
  }
  changed_.notify_all();
  return submitted_;
}

void Stream::submit_wait(const std::shared_ptr<Stream>& other, Position position) {
  if (other.get() == this || other->has_reached(position)) return;
  submit([other, position] { other->wait(position); });
}

Stream::Position Stream::position() {
  const std::scoped_lock lock(mutex_);
  return submitted_;
}

bool Stream::has_reached(Position position) {
  const std::scoped_lock lock(mutex_);
  return completed_ >= position;
}

void Stream::wait(Position position) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return completed_ >= position; });
}

void Stream::hold(std::chrono::microseconds duration) {
  const std::scoped_lock lock(mutex_);
  held_until_ = std::chrono::steady_clock::now() + duration;
}

void Stream::close() {
  const std::scoped_lock lock(mutex_);
  is_closed_ = true;
  changed_.notify_all();
}

void Stream::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return !items_.empty() || is_closed_; });
    if (items_.empty()) return;
    auto item = std::move(items_.front());
    items_.pop_front();
    // The stream may be held again while the item waits.
    const auto late =
        std::chrono::steady_clock::now() + std::chrono::microseconds(faults().stream_delay_us());
    while (std::chrono::steady_clock::now() < std::max(late, held_until_)) {
      changed_.wait_until(lock, std::max(late, held_until_));
    }
    lock.unlock();
    item();
    item = nullptr;  // destroys the item now, because it may own this stream
    lock.lock();
    ++completed_;
    changed_.notify_all();
  }
}

Device::Device(int index)
    : index(index), uuid(make_uuid(index)), legacy(std::make_shared<Stream>()) {}

std::uint64_t Device::launch() {
  const std::scoped_lock lock(mutex_);
  ++unfinished_;
  return ++tickets_;
}

bool Device::acquire(std::uint64_t ticket, std::uint64_t key, const std::function<bool()>& stop) {
  std::unique_lock lock(mutex_);
  ready_.insert(ticket);
  for (;;) {
    const bool is_free = num_holders_ == 0 && *ready_.begin() == ticket;
    if (is_free || (num_holders_ > 0 && holder_ == key)) break;
    if (stop()) {
      ready_.erase(ticket);
      changed_.notify_all();
      return false;
    }
    changed_.wait_for(lock, std::chrono::milliseconds(1));
  }
  ready_.erase(ticket);
  holder_ = key;
  ++num_holders_;
  changed_.notify_all();
  return true;
}

void Device::release() {
  const std::scoped_lock lock(mutex_);
  --num_holders_;
  changed_.notify_all();
}

void Device::retire() {
  const std::scoped_lock lock(mutex_);
  --unfinished_;
  changed_.notify_all();
}

void Device::wait_for_launches() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return unfinished_ == 0; });
}

std::shared_ptr<Stream> Device::add_stream(bool syncs_with_legacy) {
  auto stream = std::make_shared<Stream>();
  stream->syncs_with_legacy = syncs_with_legacy;
  const std::scoped_lock lock(mutex_);
  streams_.push_back(stream);
  return stream;
}

std::vector<std::shared_ptr<Stream>> Device::streams() {
  const std::scoped_lock lock(mutex_);
  std::erase_if(streams_, [](const auto& stream) { return stream.expired(); });
  std::vector<std::shared_ptr<Stream>> all{legacy};
  for (const auto& stream : streams_) {
    if (auto alive = stream.lock()) all.push_back(std::move(alive));
  }
  return all;
}

Driver::Driver() {
  const char* number = std::getenv("FAKE_CUDA_DEVICES");
  const int physical = number != nullptr ? std::atoi(number) : kDefaultDevices;
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  if (visible == nullptr) {
    for (int i = 0; i < physical; ++i) devices.push_back(std::make_unique<Device>(i));
    return;
  }
  // As in CUDA, the list ends at the first word that is not a device.
  std::istringstream words(visible);
  for (std::string word; std::getline(words, word, ',');) {
    char* end = nullptr;
    const long index = std::strtol(word.c_str(), &end, 10);
    if (word.empty() || *end != '\0' || index < 0 || index >= physical) break;
    devices.push_back(std::make_unique<Device>(static_cast<int>(index)));
  }
}

Driver& driver() {
  static auto* const the_driver = new Driver;
  return *the_driver;
}

ThreadState& this_thread() {
  thread_local ThreadState state;
  return state;
}

Device* current_device() {
  const auto& contexts = this_thread().contexts;
  return contexts.empty() ? nullptr : contexts.back();
}

std::uint64_t Driver::allocate(Device& device, std::size_t bytes, bool can_be_registered) {
  void* memory = ::operator new(bytes, kAlignment);
  // New memory of a GPU has arbitrary content.
  std::memset(memory, 0xa5, bytes);
  const auto address = reinterpret_cast<std::uint64_t>(memory);
  const std::scoped_lock lock(mutex_);
  memory_[address] = {&device, bytes, can_be_registered};
  return address;
}

bool Driver::free(std::uint64_t address) {
  {
    const std::scoped_lock lock(mutex_);
    if (memory_.erase(address) == 0) return false;
  }
  ::operator delete(reinterpret_cast<void*>(address), kAlignment);
  return true;
}

std::optional<Allocation> Driver::find(std::uint64_t address, std::size_t bytes) {
  const std::scoped_lock lock(mutex_);
  auto after = memory_.upper_bound(address);
  if (after == memory_.begin()) return std::nullopt;
  const auto& [start, allocation] = *--after;
  if (address + bytes > start + allocation.bytes) return std::nullopt;
  return allocation;
}

std::shared_ptr<Event> Driver::find_event(const void* handle) {
  const std::scoped_lock lock(mutex_);
  const auto found = events_.find(handle);
  return found != events_.end() ? found->second : nullptr;
}

void* Driver::add_event() {
  auto event = std::make_shared<Event>();
  const std::scoped_lock lock(mutex_);
  events_[event.get()] = event;
  return event.get();
}

bool Driver::remove_event(const void* handle) {
  const std::scoped_lock lock(mutex_);
  return events_.erase(handle) > 0;
}

std::shared_ptr<Stream> Driver::find_stream(const void* handle) {
  // 0 and 1 (CU_STREAM_LEGACY) mean the default stream of the current context.
  if (reinterpret_cast<std::uintptr_t>(handle) <= 1) {
    Device* device = current_device();
    return device != nullptr ? device->legacy : nullptr;
  }
  const std::scoped_lock lock(mutex_);
  const auto found = streams_.find(handle);
  return found != streams_.end() ? found->second : nullptr;
}

Device* Driver::device_of(const std::shared_ptr<Stream>& stream) {
  for (const auto& device : devices) {
    for (const auto& other : device->streams()) {
      if (other == stream) return device.get();
    }
  }
  return nullptr;
}

void* Driver::add_stream(Device& device, bool syncs_with_legacy) {
  auto stream = device.add_stream(syncs_with_legacy);
  const std::scoped_lock lock(mutex_);
  streams_[stream.get()] = stream;
  return stream.get();
}

bool Driver::remove_stream(const void* handle) {
  std::shared_ptr<Stream> stream;
  {
    const std::scoped_lock lock(mutex_);
    const auto found = streams_.find(handle);
    if (found == streams_.end()) return false;
    stream = std::move(found->second);
    streams_.erase(found);
  }
  stream->close();
  return true;
}

CUresult Driver::check_capture() {
  const CUstreamCaptureMode mode = this_thread().capture_mode;
  if (mode == CUstreamCaptureMode::kRelaxed) return kCudaSuccess;
  const std::scoped_lock lock(mutex_);
  bool is_forbidden = false;
  for (auto& [stream, thread] : captures_) {
    if (mode == CUstreamCaptureMode::kGlobal || thread == std::this_thread::get_id()) {
      stream->is_spoilt = true;
      is_forbidden = true;
    }
  }
  return is_forbidden ? kCudaErrorStreamCaptureUnsupported : kCudaSuccess;
}

CUresult Driver::begin_capture(const void* handle) {
  // The default stream cannot be captured.
  if (reinterpret_cast<std::uintptr_t>(handle) <= 1) return kCudaErrorStreamCaptureUnsupported;
  const auto stream = find_stream(handle);
  if (stream == nullptr) return kCudaErrorInvalidHandle;
  const std::scoped_lock lock(mutex_);
  if (!captures_.emplace(stream.get(), std::this_thread::get_id()).second) {
    return kCudaErrorInvalidValue;
  }
  stream->is_spoilt = false;
  stream->is_capturing = true;
  return kCudaSuccess;
}

CUresult Driver::end_capture(const void* handle) {
  const auto stream = find_stream(handle);
  if (stream == nullptr) return kCudaErrorInvalidHandle;
  const std::scoped_lock lock(mutex_);
  if (captures_.erase(stream.get()) == 0) return kCudaErrorInvalidValue;
  stream->is_capturing = false;
  return stream->is_spoilt ? kCudaErrorStreamCaptureInvalidated : kCudaSuccess;
}

void check_confirmed(Stream& stream, const char* function) {
  if (stream.unconfirmed > 0) {
    faults().misuse(std::string(function) +
                    " on a stream before ncclCommGetAsyncError said that the launch there is done");
  }
}

Stream::Position submit(const std::shared_ptr<Stream>& stream, std::function<void()> item) {
  if (faults().is_idle()) return stream->position();
  Device* device = driver().device_of(stream);
  if (device != nullptr && stream == device->legacy) {
    for (const auto& other : device->streams()) {
      if (other->syncs_with_legacy) stream->submit_wait(other, other->position());
    }
  } else if (device != nullptr && stream->syncs_with_legacy) {
    stream->submit_wait(device->legacy, device->legacy->position());
  }
  return stream->submit(std::move(item));
}

}  // namespace fake
