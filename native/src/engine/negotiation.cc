#include "engine/negotiation.h"

#include <algorithm>

#include "collectives/spec.h"
#include "engine/difference.h"
#include "error.h"
#include "spare_memory.h"
#include "text.h"

namespace sparkhvd {
namespace {

const Descriptor& first_of(const std::vector<std::shared_ptr<const Descriptor>>& arrived) {
  return **std::ranges::find_if(arrived, [](const auto& each) { return each != nullptr; });
}

}  // namespace

std::string departure_text(Collective collective, const std::string& name, Rank departed) {
  return operation_label(collective, name) + ": " + rank_text(departed) +
         " shut down before it, and it needs every rank. Call shutdown() on a rank only after its "
         "last "
         "operation.";
}

std::size_t Negotiation::member_index(Rank rank) const {
  return static_cast<std::size_t>(std::ranges::lower_bound(options_.members, rank) -
                                  options_.members.begin());
}

std::vector<Rank> Negotiation::missing(const Pending& pending) const {
  std::vector<Rank> ranks;
  for (std::size_t i = 0; i < options_.members.size(); ++i) {
    if (!pending.arrived[i]) ranks.push_back(options_.members[i]);
  }
  return ranks;
}

std::vector<Rank> Negotiation::absent(const Pending& pending) const {
  auto ranks = missing(pending);
  std::erase_if(ranks, [this](Rank rank) { return has_joined(rank); });
  return ranks;
}

std::vector<Rank> Negotiation::arrived(const Pending& pending) const {
  std::vector<Rank> ranks;
  for (std::size_t i = 0; i < options_.members.size(); ++i) {
    if (pending.arrived[i]) ranks.push_back(options_.members[i]);
  }
  return ranks;
}

void Negotiation::refuse(const std::string& name, const Pending& pending, std::int32_t status,
                         std::string text, Outcome& outcome) {
  const Refuse message{options_.process_set, name, status, std::move(text)};
  outcome.decisions.push_back({arrived(pending), message});
  auto unaware = absent(pending);
  std::erase_if(unaware, [&](Rank rank) { return std::ranges::count(departed_, rank) > 0; });
  if (!unaware.empty()) refused_.emplace(name, Refused{message, std::move(unaware)});
}

std::optional<std::string> Negotiation::disagreement(const std::string& name,
                                                     const Pending& pending) const {
  const Descriptor& first = first_of(pending.arrived);
  const Rank first_rank = arrived(pending).front();
  for (std::size_t i = 0; i < options_.members.size(); ++i) {
    if (!pending.arrived[i]) continue;
    if (auto text =
            difference(name, {first_rank, first}, {options_.members[i], *pending.arrived[i]}))
      return text;
  }
  if (pending.num_arrived == options_.members.size()) return std::nullopt;
  // The missing ranks have joined and contribute zeros. This is correct only for a sum.
  const bool is_sum = first.reduce_op == ReduceOp::kSum || first.reduce_op == ReduceOp::kAverage;
  const bool goes_on = spec_of(first.collective).goes_on_without_joined;
  if (goes_on && is_sum) return std::nullopt;
  const std::string what = goes_on ? std::string(name_of(first.collective)) + " with " +
                                         std::string(name_of(first.reduce_op))
                                   : std::string(name_of(first.collective));
  return operation_label(first.collective, name) + ": " + rank_list(missing(pending)) +
         (missing(pending).size() == 1 ? " has" : " have") + " joined, and " + what +
         " needs every rank. After join() only allreduce with Sum or Average continues without a "
         "rank; call it before join() on every rank.";
}

Execute Negotiation::order(const std::string& name, const Pending& pending) {
  const Descriptor& first = first_of(pending.arrived);
  std::vector<const Descriptor*> contributors;
  for (const auto& descriptor : pending.arrived) {
    if (descriptor) contributors.push_back(descriptor.get());
  }
  Execute execute;
  execute.process_set = options_.process_set;
  execute.is_on_device = first.is_on_device;
  execute.name = name;
  if (const auto write_rows = spec_of(first.collective).write_rows) {
    write_rows(contributors, execute);
  }
  // All tensors must be in the same registered memory, because ranks only read mailboxes but also write to buffers.
  const auto is_same = [&](const Descriptor* each) {
    return each->place && each->place->segment == first.place->segment;
  };
  if (first.place && std::ranges::all_of(contributors, is_same)) {
    for (const Descriptor* each : contributors) execute.places.push_back(*each->place);
  }
  if (pending.num_arrived < options_.members.size()) {
    execute.contributors = arrived(pending);
    execute.descriptor = first;
    execute.descriptor->place.reset();
  }
  return execute;
}

/// Checks that the results of an order fit into the callers' memory, and returns the error, if any. It also sets
/// `asks_for_memory` for large results.
std::string Negotiation::check_results(const std::string& name, const Pending& pending,
                                       Execute& order) const {
  const Descriptor& first = first_of(pending.arrived);
  const auto rows_of_result = spec_of(first.collective).rows_of_result;
  if (rows_of_result == nullptr) return {};
  for (std::size_t tensor = 0; tensor < first.shapes.size(); ++tensor) {
    const std::size_t row_bytes =
        row_elements(first.shapes[tensor], first.dtype) * element_size(first.dtype);
    std::size_t member = 0;
    for (std::size_t i = 0; i < options_.members.size(); ++i) {
      if (!pending.arrived[i]) continue;
      const Descriptor& descriptor = *pending.arrived[i];
      const auto rows = rows_of_result(first, order, tensor, options_.members, member++);
      const std::size_t bytes = static_cast<std::size_t>(rows) * row_bytes;
      order.asks_for_memory |=
          (bytes >= kLargeResult || descriptor.lacks_memory) && !first.is_on_device;
      if (descriptor.room.empty()) continue;
      const auto room = static_cast<std::size_t>(descriptor.room.at(tensor));
      if (bytes <= room) continue;
      return operation_label(first.collective, name) + ": the result on " +
             rank_text(options_.members[i]) + " has " + std::to_string(bytes) + " bytes (" +
             std::to_string(rows) + " rows), but its output has " + std::to_string(room) +
             ". Give an output with room for the rows of all ranks.";
    }
  }
  return {};
}

void Negotiation::conclude(const std::string& name, const Pending& pending, TimePoint now,
                           Outcome& outcome) {
  if (pending.num_planned == options_.members.size()) {
    outcome.decisions.push_back({options_.members, Again{*pending.number, next_sequence_++}});
    return wait_longer_for_joins(now);
  }
  if (auto text = disagreement(name, pending)) {
    outcome.decisions.push_back({arrived(pending), Refuse{options_.process_set, name,
                                                          SPARKHVD_MISMATCH, std::move(*text)}});
    return;
  }
  Execute execute = order(name, pending);
  if (auto text = check_results(name, pending, execute); !text.empty()) {
    outcome.decisions.push_back(
        {arrived(pending), Refuse{options_.process_set, name, SPARKHVD_MISMATCH, std::move(text)}});
    return;
  }
  execute.sequence = execute.is_on_device ? next_device_sequence_++ : next_sequence_++;
  if (!execute.is_on_device && execute.contributors.empty()) execute.number = plan(name, pending);
  outcome.decisions.push_back({options_.members, std::move(execute)});
  wait_longer_for_joins(now);
}

/// Restarts the time limit of the joined ranks: they wait legitimately while the other ranks still run operations.
void Negotiation::wait_longer_for_joins(TimePoint now) {
  if (!join_) return;
  join_->since = now;
  join_->deadline = deadline_after(now, join_->joined.begin()->second.timeout_s);
}

bool Negotiation::is_complete(const Pending& pending) const {
  if (!join_) return pending.num_arrived == options_.members.size();
  for (std::size_t i = 0; i < options_.members.size(); ++i) {
    if (!pending.arrived[i] && !has_joined(options_.members[i])) return false;
  }
  return true;
}

/// Removes a pending operation and returns it.
Negotiation::Pending Negotiation::take(const std::string& name) {
  Pending pending = std::move(pending_.extract(name).mapped());
  if (pending.number) planned_[*pending.number].pending = nullptr;
  return pending;
}

std::optional<Negotiation::Outcome> Negotiation::take_refusal(Rank from, const std::string& name) {
  const auto [begin, end] = refused_.equal_range(name);
  for (auto entry = begin; entry != end; ++entry) {
    auto& unaware = entry->second.unaware;
    const auto place = std::ranges::find(unaware, from);
    if (place == unaware.end()) continue;
    Outcome outcome;
    outcome.decisions.push_back({{from}, entry->second.message});
    unaware.erase(place);
    if (unaware.empty()) refused_.erase(entry);
    return outcome;
  }
  return std::nullopt;
}

Negotiation::Outcome Negotiation::ready(Rank from, Ready message, TimePoint now) {
  if (auto refusal = take_refusal(from, message.name)) return std::move(*refusal);
  if (message.descriptor.collective == Collective::kJoin) {
    return join(from, std::move(message), now);
  }
  return arrive(from, pending_[message.name], message.name,
                std::make_shared<const Descriptor>(std::move(message.descriptor)), now);
}

Negotiation::Outcome Negotiation::arrive(Rank from, Pending& pending, const std::string& name,
                                         std::shared_ptr<const Descriptor> descriptor,
                                         TimePoint now) {
  Outcome outcome;
  if (pending.num_arrived == 0) {
    pending.arrived.resize(options_.members.size());
    pending.since = now;
    pending.warn_at = deadline_after(now, options_.stall_warning_s);
  }
  pending.deadline = std::min(pending.deadline, deadline_after(now, descriptor->timeout_s));
  next_tick_ = std::min({next_tick_, pending.deadline, pending.warn_at});
  auto& place = pending.arrived[member_index(from)];
  if (place) throw Error(SPARKHVD_PEER_LOST, "the operation '" + name + "' twice");
  place = std::move(descriptor);
  ++pending.num_arrived;
  if (is_complete(pending)) {
    const std::string concluded = name;
    conclude(concluded, take(concluded), now, outcome);
  } else if (!departed_.empty()) {
    const std::string refused = name;
    const Pending done = take(refused);
    refuse(refused, done, SPARKHVD_SHUT_DOWN,
           departure_text(first_of(done.arrived).collective, refused, departed_.front()), outcome);
  }
  return outcome;
}

Negotiation::Outcome Negotiation::join(Rank from, Ready message, TimePoint now) {
  Outcome outcome;
  if (!join_) join_.emplace();
  if (has_joined(from)) throw Error(SPARKHVD_PEER_LOST, "join twice");
  if (join_->joined.empty()) {
    join_->name = message.name;
    join_->since = now;
  }
  join_->deadline = deadline_after(now, message.descriptor.timeout_s);
  next_tick_ = std::min(next_tick_, join_->deadline);
  join_->last = from;
  join_->joined.emplace(from, std::move(message.descriptor));
  // Drops the refusals that wait for this rank, because it will not submit anything more.
  for (auto& [name, refused] : refused_) std::erase(refused.unaware, from);
  std::erase_if(refused_, [](const auto& entry) { return entry.second.unaware.empty(); });
  if (!departed_.empty()) {
    refuse_join(SPARKHVD_SHUT_DOWN,
                departure_text(Collective::kJoin, join_->name, departed_.front()), outcome);
    return outcome;
  }
  // Operations that only this rank had not submitted continue without it.
  for (auto entry = pending_.begin(); entry != pending_.end();) {
    const auto current = entry++;
    if (!is_complete(current->second)) continue;
    const std::string name = current->first;
    conclude(name, take(name), now, outcome);
  }
  if (join_->joined.size() == options_.members.size()) {
    Execute execute;
    execute.process_set = options_.process_set;
    execute.sequence = next_sequence_++;
    execute.name = join_->name;
    execute.rows = {index_of(join_->last)};
    outcome.decisions.push_back({options_.members, std::move(execute)});
    join_.reset();
  }
  return outcome;
}

void Negotiation::refuse_join(std::int32_t status, const std::string& text, Outcome& outcome) {
  Decision decision{{}, Refuse{options_.process_set, join_->name, status, text}};
  for (const auto& [rank, descriptor] : join_->joined) decision.to.push_back(rank);
  outcome.decisions.push_back(std::move(decision));
  join_.reset();
}

Negotiation::Outcome Negotiation::departed(Rank rank) {
  Outcome outcome;
  departed_.push_back(rank);
  for (const auto& [name, pending] : pending_) {
    refuse(name, pending, SPARKHVD_SHUT_DOWN,
           departure_text(first_of(pending.arrived).collective, name, rank), outcome);
  }
  pending_.clear();
  for (auto& planned : planned_) planned.pending = nullptr;
  if (join_) {
    refuse_join(SPARKHVD_SHUT_DOWN, departure_text(Collective::kJoin, join_->name, rank), outcome);
  }
  return outcome;
}

Negotiation::Outcome Negotiation::tick(TimePoint now) {
  Outcome outcome;
  if (now < next_tick_) return outcome;
  for (auto entry = pending_.begin(); entry != pending_.end();) {
    auto& [name, pending] = *entry;
    const double waited = std::chrono::duration<double>(now - pending.since).count();
    const std::string label = operation_label(first_of(pending.arrived).collective, name);
    if (now >= pending.deadline) {
      refuse(name, pending, SPARKHVD_TIMEOUT,
             label + ": " + rank_list(absent(pending)) + " did not submit it within " +
                 seconds_text(waited) + " s, while " + rank_list(arrived(pending)) +
                 " waited. Look at what the missing rank does, or raise stall_shutdown_s.",
             outcome);
      if (pending.number) planned_[*pending.number].pending = nullptr;
      entry = pending_.erase(entry);
      continue;
    }
    if (now >= pending.warn_at) {
      pending.warn_at = deadline_after(now, options_.stall_warning_s);
      outcome.warnings.push_back(label + ": waiting for " + rank_list(absent(pending)) + " since " +
                                 seconds_text(waited) + " s, while " + rank_list(arrived(pending)) +
                                 " submitted it. Look at what the missing rank does.");
      for (const Rank rank : absent(pending)) {
        if (std::ranges::count(outcome.awaited, rank) == 0) outcome.awaited.push_back(rank);
      }
    }
    ++entry;
  }
  if (join_ && now >= join_->deadline) {
    std::vector<Rank> absent;
    for (const Rank rank : options_.members) {
      if (!has_joined(rank)) absent.push_back(rank);
    }
    const double waited = std::chrono::duration<double>(now - join_->since).count();
    refuse_join(SPARKHVD_TIMEOUT,
                operation_label(Collective::kJoin, join_->name) + ": " + rank_list(absent) +
                    " neither joined nor submitted anything for " + seconds_text(waited) +
                    " s. Look at what the missing rank does, or raise stall_shutdown_s.",
                outcome);
  }
  next_tick_ = join_ ? join_->deadline : kNever;
  for (const auto& [name, pending] : pending_) {
    next_tick_ = std::min({next_tick_, pending.deadline, pending.warn_at});
  }
  return outcome;
}

}  // namespace sparkhvd
