#include "negotiation.h"

#include <algorithm>
#include <cstdio>

#include "error.h"
#include "text.h"

namespace sparkhvd {
namespace {

std::string number_text(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.17g", value);
  double parsed = 0;
  for (int digits = 1; digits <= 17; ++digits) {  // the shortest that reads back as the same number
    std::snprintf(text, sizeof(text), "%.*g", digits, value);
    if (std::sscanf(text, "%lf", &parsed) == 1 && parsed == value) break;
  }
  return text;
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text = "(";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  }
  return text + (shape.size() == 1 ? ",)" : ")");
}

std::string side(const Submission& submission, const std::string& value) {
  return "rank " + std::to_string(index_of(submission.rank)) + " sent " + value;
}

std::string disagree(const std::string& name, const Submission& first, const Submission& second,
                     const std::string& what, const std::string& first_value,
                     const std::string& second_value, const std::string& advice) {
  std::string sides = side(first, first_value) + ", " + side(second, second_value) + ". ";
  sides[0] = 'R';
  return operation_label(first.descriptor.collective, name) + ": ranks disagree on " + what + ". " +
         sides + advice;
}

/// True if the shapes may differ in the first dimension only.
bool is_uneven(Collective collective) { return collective == Collective::kAllgather; }

bool shapes_match(Collective collective, const std::vector<std::int64_t>& a,
                  const std::vector<std::int64_t>& b) {
  if (!is_uneven(collective)) return a == b;
  return a.size() == b.size() && (a.empty() || std::equal(a.begin() + 1, a.end(), b.begin() + 1));
}

const char kBuildSame[] =
    "Build the same model on every rank, or give the two tensors different names.";

}  // namespace

std::string departure_text(Collective collective, const std::string& name, Rank departed) {
  return operation_label(collective, name) + ": " + rank_text(departed) +
         " shut down before it, and it needs every rank. Call shutdown() on a rank only after its "
         "last "
         "operation.";
}

std::optional<std::string> difference(const std::string& name, const Submission& first,
                                      const Submission& second) {
  const Descriptor& a = first.descriptor;
  const Descriptor& b = second.descriptor;
  const auto differ = [&](const std::string& what, const std::string& x, const std::string& y,
                          const std::string& advice) {
    return disagree(name, first, second, what, x, y, advice);
  };
  const char call_same[] = "Make the same call on every rank, or use different names.";
  if (a.collective != b.collective) {
    return differ("the operation", std::string(name_of(a.collective)),
                  std::string(name_of(b.collective)), call_same);
  }
  if (a.shapes.size() != b.shapes.size()) {
    return differ("the number of tensors", std::to_string(a.shapes.size()),
                  std::to_string(b.shapes.size()), call_same);
  }
  for (std::size_t i = 0; i < a.shapes.size(); ++i) {
    if (a.dtype == b.dtype && shapes_match(a.collective, a.shapes[i], b.shapes[i])) continue;
    const bool shape_differs = !shapes_match(a.collective, a.shapes[i], b.shapes[i]);
    std::string what = shape_differs ? "shape" : "dtype";
    if (shape_differs && a.shapes[i].size() != b.shapes[i].size())
      what = "the number of dimensions";
    if (a.shapes.size() > 1) what += " of tensor " + std::to_string(i);
    const char any_rows[] =
        "Only the first dimension may differ: give every rank the same number of dimensions and "
        "the "
        "same sizes after the first, or use different names.";
    return differ(what, shape_text(a.shapes[i]) + " " + std::string(name_of(a.dtype)),
                  shape_text(b.shapes[i]) + " " + std::string(name_of(b.dtype)),
                  shape_differs && is_uneven(a.collective) ? any_rows : kBuildSame);
  }
  if (a.dtype != b.dtype) {
    return differ("dtype", std::string(name_of(a.dtype)), std::string(name_of(b.dtype)),
                  kBuildSame);
  }
  if (a.reduce_op != b.reduce_op) {
    return differ("the reduction", std::string(name_of(a.reduce_op)),
                  std::string(name_of(b.reduce_op)), call_same);
  }
  if (a.root != b.root) {
    return differ("the root rank", std::to_string(index_of(a.root)),
                  std::to_string(index_of(b.root)), call_same);
  }
  if (a.prescale != b.prescale) {
    return differ("prescale_factor", number_text(a.prescale), number_text(b.prescale), call_same);
  }
  if (a.postscale != b.postscale) {
    return differ("postscale_factor", number_text(a.postscale), number_text(b.postscale),
                  call_same);
  }
  return std::nullopt;
}

std::vector<Rank> Negotiation::missing(const Pending& pending) const {
  std::vector<Rank> ranks;
  for (const Rank rank : options_.members) {
    if (!pending.arrived.contains(rank)) ranks.push_back(rank);
  }
  return ranks;
}

std::vector<Rank> Negotiation::arrived(const Pending& pending) const {
  std::vector<Rank> ranks;
  for (const auto& [rank, descriptor] : pending.arrived) ranks.push_back(rank);
  return ranks;
}

void Negotiation::refuse(const std::string& name, const Pending& pending, std::int32_t status,
                         std::string text, Outcome& outcome) {
  const Refuse message{options_.process_set, name, status, std::move(text)};
  outcome.decisions.push_back({arrived(pending), message});
  auto unaware = missing(pending);
  std::erase_if(unaware, [&](Rank rank) { return std::ranges::count(departed_, rank) > 0; });
  if (!unaware.empty()) refused_.emplace(name, Refused{message, std::move(unaware)});
}

Decision Negotiation::conclude(const std::string& name, const Pending& pending) {
  const auto& [first_rank, first] = *pending.arrived.begin();
  for (const auto& [rank, descriptor] : pending.arrived) {
    if (auto text = difference(name, {first_rank, first}, {rank, descriptor})) {
      return {options_.members,
              Refuse{options_.process_set, name, SPARKHVD_MISMATCH, std::move(*text)}};
    }
  }
  Execute execute{options_.process_set, next_sequence_++, name, {}};
  if (is_uneven(first.collective)) {
    for (const Rank rank : options_.members) {
      const auto& shape = pending.arrived.at(rank).shapes.at(0);
      execute.rows.push_back(shape.empty() ? 1 : shape[0]);
    }
  }
  return {options_.members, std::move(execute)};
}

Negotiation::Outcome Negotiation::ready(Rank from, Ready message, TimePoint now) {
  Outcome outcome;
  const auto [begin, end] = refused_.equal_range(message.name);
  for (auto entry = begin; entry != end; ++entry) {
    auto& unaware = entry->second.unaware;
    const auto place = std::ranges::find(unaware, from);
    if (place == unaware.end()) continue;
    outcome.decisions.push_back({{from}, entry->second.message});
    unaware.erase(place);
    if (unaware.empty()) refused_.erase(entry);
    return outcome;
  }
  Pending& pending = pending_[message.name];
  if (pending.arrived.contains(from)) {
    throw Error(SPARKHVD_PEER_LOST, "the operation '" + message.name + "' twice");
  }
  if (pending.arrived.empty()) {
    pending.since = now;
    pending.warn_at = deadline_after(now, options_.stall_warning_s);
  }
  pending.deadline = std::min(pending.deadline, deadline_after(now, message.descriptor.timeout_s));
  pending.arrived.emplace(from, std::move(message.descriptor));
  if (pending.arrived.size() == options_.members.size()) {
    outcome.decisions.push_back(conclude(message.name, pending));
    pending_.erase(message.name);
  } else if (!departed_.empty()) {
    const auto done = pending_.extract(message.name);
    refuse(message.name, done.mapped(), SPARKHVD_SHUT_DOWN,
           departure_text(done.mapped().arrived.begin()->second.collective, message.name,
                          departed_.front()),
           outcome);
  }
  return outcome;
}

Negotiation::Outcome Negotiation::departed(Rank rank) {
  Outcome outcome;
  departed_.push_back(rank);
  for (const auto& [name, pending] : pending_) {
    refuse(name, pending, SPARKHVD_SHUT_DOWN,
           departure_text(pending.arrived.begin()->second.collective, name, rank), outcome);
  }
  pending_.clear();
  return outcome;
}

Negotiation::Outcome Negotiation::tick(TimePoint now) {
  Outcome outcome;
  for (auto entry = pending_.begin(); entry != pending_.end();) {
    auto& [name, pending] = *entry;
    const double waited = std::chrono::duration<double>(now - pending.since).count();
    const auto& first = pending.arrived.begin()->second;
    const std::string label = operation_label(first.collective, name);
    if (now >= pending.deadline) {
      char seconds[32];
      std::snprintf(seconds, sizeof(seconds), "%.3g", waited);
      refuse(name, pending, SPARKHVD_TIMEOUT,
             label + ": " + rank_list(missing(pending)) + " did not submit it within " + seconds +
                 " s, while " + rank_list(arrived(pending)) +
                 " waited. Look at what the missing rank does, or raise stall_shutdown_s.",
             outcome);
      entry = pending_.erase(entry);
      continue;
    }
    if (now >= pending.warn_at) {
      pending.warn_at = deadline_after(now, options_.stall_warning_s);
      char seconds[32];
      std::snprintf(seconds, sizeof(seconds), "%.3g", waited);
      outcome.warnings.push_back(label + ": waiting for " + rank_list(missing(pending)) +
                                 " since " + seconds + " s, while " + rank_list(arrived(pending)) +
                                 " submitted it. Look at what the missing rank does.");
    }
    ++entry;
  }
  return outcome;
}

TimePoint Negotiation::next_deadline() const {
  TimePoint next = kNever;
  for (const auto& [name, pending] : pending_) {
    next = std::min({next, pending.deadline, pending.warn_at});
  }
  return next;
}

}  // namespace sparkhvd
