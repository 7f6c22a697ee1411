// Memory that the ranks of a host share. Either every rank allocates a piece of equal size and maps the pieces of all
// ranks, or one rank allocates a single piece and all ranks map it.
#pragma once

#include <cstddef>
#include <map>
#include <utility>

#include "transport/memfd.h"
#include "types.h"

namespace sparkhvd {

/// Key of registered memory: equal on all ranks, because memory is registered by a collective operation.
struct SegmentKey {
  std::int32_t process_set = 0;
  std::uint64_t sequence = 0;  // number of the operation that allocated the memory
  auto operator<=>(const SegmentKey&) const = default;
};

/// Place of a rank's tensor in registered memory.
struct Place {
  SegmentKey segment;
  std::uint64_t offset = 0;
  bool operator==(const Place&) const = default;
};

/// The pieces by rank. They are unmapped with the last owner (the user's buffer, or a running operation).
class Segment {
 public:
  /// kWorkspace is the engine's own memory for a process set. Forked children do not inherit it, because the ranks
  /// would read what a child writes there.
  enum class Kind { kPieceEach, kOnePiece, kWorkspace };

  Segment(SegmentKey key, std::size_t bytes, Kind kind = Kind::kPieceEach)
      : key_(key), bytes_(bytes), kind_(kind) {}

  const SegmentKey& key() const noexcept { return key_; }
  /// Bytes of each rank's piece.
  std::size_t bytes() const noexcept { return bytes_; }
  void add(Rank rank, Mapping mapping) {
    if (kind_ == Kind::kWorkspace) mapping.hide_from_children();
    pieces_.insert_or_assign(rank, std::move(mapping));
  }
  bool is_one_piece() const noexcept { return kind_ == Kind::kOnePiece; }
  bool has(Rank rank) const noexcept {
    return is_one_piece() ? !pieces_.empty() : pieces_.contains(rank);
  }
  std::size_t num_pieces() const noexcept { return pieces_.size(); }
  /// The piece of a rank.
  std::byte* data(Rank rank) const {
    return is_one_piece() ? pieces_.begin()->second.data() : pieces_.at(rank).data();
  }
  /// Drops the pieces of the other ranks, because some rank failed to map a piece.
  void keep_only(Rank rank) {
    std::erase_if(pieces_, [rank](const auto& piece) { return piece.first != rank; });
  }

 private:
  SegmentKey key_;
  std::size_t bytes_;
  Kind kind_;
  std::map<Rank, Mapping> pieces_;
};

}  // namespace sparkhvd
