// Lanes (rows) of the timeline: one per operation name, up to a limit (see timeline.h).
#include <algorithm>

#include "json.h"
#include "text.h"
#include "timeline.h"

namespace sparkhvd {
namespace {

// From kManyLabels lanes on, names that differ only in digits share a lane. From kTooManyLabels on, all operations of a
// collective share a lane.
constexpr std::size_t kManyLabels = 200;
constexpr std::size_t kTooManyLabels = 400;
constexpr std::size_t kMaxLanesPerLabel = 64;
// An operation may be submitted while the driver still finishes the previous operation of the lane, so their times may
// overlap by this much.
constexpr std::int64_t kOverlap_ns = 50'000;

std::string without_digits(const std::string& name) {
  std::string label;
  for (const char c : name) {
    const bool is_digit = c >= '0' && c <= '9';
    if (!is_digit) {
      label += c;
    } else if (label.empty() || label.back() != '*') {
      label += '*';
    }
  }
  return label;
}

/// True for a generated name with a number. Each such name is used once, so it must not get its own lane.
bool is_numbered(const std::string& name) {
  return name.find(".noname.") != std::string::npos || name.starts_with("barrier.") ||
         name.starts_with("sparkhvd.");
}

}  // namespace

std::string Timeline::label_of(const TimelineEvent& event) const {
  const std::string set =
      event.process_set == 0 ? "" : " (process set " + std::to_string(event.process_set) + ")";
  std::string label = event.name + set;
  if (!is_numbered(event.name)) {
    if (lanes_by_label_.size() < kManyLabels || lanes_by_label_.contains(label)) return label;
  }
  label = without_digits(event.name) + set;
  if (lanes_by_label_.size() < kTooManyLabels || lanes_by_label_.contains(label)) return label;
  return "others" + set;
}

/// The lane of an operation, which owns it until it has finished.
std::uint32_t Timeline::lane_of(const TimelineEvent& event, std::int64_t begin) {
  const Key key{event.process_set, event.name};
  const auto owned = owners_.find(key);
  if (owned != owners_.end()) return owned->second;
  const auto lane = take_lane(label_of(event), begin);
  lanes_[lane].has_owner = true;
  owners_.emplace(key, lane);
  return lane;
}

std::uint32_t Timeline::take_lane(const std::string& label, std::int64_t begin) {
  auto& rows = lanes_by_label_[label];
  std::uint32_t any_free = kMarksLane;
  for (const auto row : rows) {
    if (lanes_[row].has_owner) continue;
    if (lanes_[row].free_from <= begin + kOverlap_ns) return row;
    any_free = row;
  }
  if (any_free != kMarksLane && rows.size() >= kMaxLanesPerLabel) return any_free;
  const auto made = static_cast<std::uint32_t>(lanes_.size());
  lanes_.push_back({});
  rows.push_back(made);
  std::string name = label;
  if (rows.size() > 1) name += " #" + std::to_string(rows.size());
  const std::string id = std::to_string(made);
  const std::string head = "{\"ph\":\"M\",\"pid\":" + std::to_string(index_of(options_.rank)) +
                           ",\"tid\":" + id + ",\"name\":";
  text_ = head + R"("thread_name","args":{"name":)";
  append_json_string(text_, name);
  text_ += "}}";
  put();
  text_ = head + R"("thread_sort_index","args":{"sort_index":)" + id + "}}";
  put();
  return made;
}

}  // namespace sparkhvd
