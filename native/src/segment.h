// Memory that the ranks of a host share: every rank allocates a piece of equal size, and all map all
// pieces; or one rank allocates the only piece for all.
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
  std::uint64_t sequence = 0;  // of the operation that allocated it
  auto operator<=>(const SegmentKey&) const = default;
};

/// Place of a rank's tensor in registered memory.
struct Place {
  SegmentKey segment;
  std::uint64_t offset = 0;
  bool operator==(const Place&) const = default;
};

/// The pieces by rank. Unmapped with the last owner: the user's buffer, a running operation.
class Segment {
 public:
  /// A workspace of a process set is excluded from forked children: their copies of tensors are private, but
  /// the ranks would read their writes here.
  enum class Kind { kPieceEach, kOnePiece, kWorkspace };

  Segment(SegmentKey key, std::size_t bytes, Kind kind = Kind::kPieceEach)
      : key_(key), bytes_(bytes), kind_(kind) {}

  const SegmentKey& key() const noexcept { return key_; }
  /// Of each rank's piece.
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
  /// Keeps this rank's own piece only (mapping others failed somewhere).
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
