// Encoding of numbers, texts and lists as bytes on the wire.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "error.h"
#include "message.h"

namespace sparkhvd {

static_assert(std::endian::native == std::endian::little,
              "the wire is little-endian; a big-endian machine needs swaps here");

class Writer {
 public:
  explicit Writer(FrameType type) : bytes_(kFrameHeaderBytes) {
    bytes_[4] = static_cast<std::byte>(type);
  }

  template <class T>
    requires std::is_arithmetic_v<T>
  Writer& number(T value) {
    const auto raw = std::as_bytes(std::span(&value, 1));
    bytes_.insert(bytes_.end(), raw.begin(), raw.end());
    return *this;
  }

  Writer& text(std::string_view value) {
    number(static_cast<std::uint32_t>(value.size()));
    const auto raw = std::as_bytes(std::span(value));
    bytes_.insert(bytes_.end(), raw.begin(), raw.end());
    return *this;
  }

  template <class T>
  Writer& numbers(const std::vector<T>& values) {
    number(static_cast<std::uint32_t>(values.size()));
    const auto raw = std::as_bytes(std::span(values));
    bytes_.insert(bytes_.end(), raw.begin(), raw.end());
    return *this;
  }

  Writer& raw(std::span<const std::byte> value) {
    bytes_.insert(bytes_.end(), value.begin(), value.end());
    return *this;
  }

  Writer& flag(bool value) { return number(static_cast<std::uint8_t>(value)); }

  /// Completes and returns the frame. `more`: bytes of the body that the caller sends after it.
  Bytes finish(std::size_t more = 0) {
    const std::size_t body = bytes_.size() - kFrameHeaderBytes + more;
    if (body > kMaxControlBytes) {
      throw Error(SPARKHVD_INVALID_ARGUMENT,
                  "the operation's description needs " + std::to_string(body) +
                      " bytes, more than the limit of " + std::to_string(kMaxControlBytes) +
                      ". Submit fewer tensors at once.");
    }
    const auto length = static_cast<std::uint32_t>(body);
    std::memcpy(bytes_.data(), &length, sizeof(length));
    return std::move(bytes_);
  }

 private:
  Bytes bytes_;
};

[[noreturn]] inline void malformed(const std::string& what) {
  throw Error(SPARKHVD_PEER_LOST, what);
}

class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  template <class T>
    requires std::is_arithmetic_v<T>
  T number() {
    T value;
    std::memcpy(&value, take(sizeof(T)).data(), sizeof(T));
    return value;
  }

  std::string text(std::size_t limit) {
    const auto size = number<std::uint32_t>();
    if (size > limit) malformed("a text of " + std::to_string(size) + " bytes");
    const auto raw = take(size);
    return {reinterpret_cast<const char*>(raw.data()), raw.size()};
  }

  template <class T>
  std::vector<T> numbers() {
    const auto size = number<std::uint32_t>();
    const auto raw = take(std::size_t{size} * sizeof(T));
    std::vector<T> values(size);
    if (size != 0) std::memcpy(values.data(), raw.data(), raw.size());
    return values;
  }

  bool flag() {
    const auto value = number<std::uint8_t>();
    if (value > 1) malformed("a flag of value " + std::to_string(value));
    return value == 1;
  }

  /// The remaining bytes.
  std::span<const std::byte> rest() { return std::exchange(bytes_, {}); }

  void end() const {
    if (!bytes_.empty()) malformed(std::to_string(bytes_.size()) + " bytes too many in a frame");
  }

 private:
  std::span<const std::byte> take(std::size_t count) {
    if (count > bytes_.size()) malformed("a frame that ends early");
    const auto head = bytes_.first(count);
    bytes_ = bytes_.subspan(count);
    return head;
  }

  std::span<const std::byte> bytes_;
};

template <class T>
T known(std::optional<T> value, const char* what) {
  if (!value) malformed(std::string("an unknown ") + what);
  return *value;
}

inline void write(Writer& writer, const SegmentKey& key) {
  writer.number(key.process_set).number(key.sequence);
}

inline SegmentKey read_key(Reader& reader) {
  SegmentKey key;
  key.process_set = reader.number<std::int32_t>();
  key.sequence = reader.number<std::uint64_t>();
  return key;
}

inline void write(Writer& writer, const std::vector<Loss>& losses) {
  writer.number(static_cast<std::uint32_t>(losses.size()));
  for (const Loss& loss : losses) {
    writer.number(index_of(loss.rank)).number(static_cast<std::uint8_t>(loss.kind));
  }
}

inline std::vector<Loss> read_losses(Reader& reader) {
  std::vector<Loss> losses;
  const auto count = reader.number<std::uint32_t>();
  for (std::uint32_t i = 0; i < count; ++i) {
    const Rank rank{reader.number<std::int32_t>()};
    const auto kind = static_cast<LossKind>(reader.number<std::uint8_t>());
    if (kind < LossKind::kDead || kind > LossKind::kLeft) malformed("a loss of unknown kind");
    losses.push_back({rank, kind});
  }
  return losses;
}

/// Reads a failure status. Rejects OK, because garbage would become a result, and PENDING, because a wait would not
/// end.
inline std::int32_t read_failure(Reader& reader) {
  const auto status = reader.number<std::int32_t>();
  if (status <= SPARKHVD_PENDING || status > SPARKHVD_NO_MEMORY) {
    malformed("a failure of unknown status " + std::to_string(status));
  }
  return status;
}

}  // namespace sparkhvd
