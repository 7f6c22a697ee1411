// Memory for a result of negotiated size. Before a large result, every rank reports whether it has memory; if a rank
// lacks memory, only this operation fails, before a byte moves. Small results use spare memory (spare_memory.h).
#include <memory>
#include <new>

#include "collectives/answers.h"
#include "collectives/collectives.h"
#include "error.h"
#include "text.h"

namespace sparkhvd {

ResultMemory::ResultMemory(Operation& operation, std::span<const std::size_t> bytes) {
  std::size_t total = 0;
  for (const std::size_t size : bytes) total += size;
  if (operation.outputs.empty()) {
    operation.output = std::make_unique_for_overwrite<std::byte[]>(total);
    operation.output_bytes = total;
    pieces_.add(operation.output.get(), operation.output.get(), total);
    return;
  }
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    pieces_.add(operation.outputs.at(i), operation.outputs.at(i), bytes[i]);
  }
}

std::span<std::byte> ResultMemory::part(Range range) const {
  std::span<std::byte> result;
  pieces_.for_range(range.begin, range.size,
                    [&](const Pieces::Part& part) { result = {part.output, part.bytes}; });
  return result;
}

Task make_result(Context& context, std::vector<std::size_t> bytes, ResultMemory& memory) {
  bool is_there = true;
  try {
    memory = ResultMemory(context.operation, bytes);
  } catch (const std::bad_alloc&) {
    is_there = false;
  }
  if (!context.agreed.asks_for_memory) {
    if (is_there) co_return;
    context.communicator.world().spare_memory().give();
    memory = ResultMemory(context.operation, bytes);
    co_return;
  }
  Answers answers(context, {context.communicator.process_set(), context.agreed.sequence});
  answers.give(is_there);
  co_await answers.all();
  const auto lacking = answers.take_refusals();
  if (lacking.empty()) co_return;
  throw OperationFailed(SPARKHVD_NO_MEMORY,
                        context.operation.label() + ": " + rank_list(lacking) +
                            (lacking.size() == 1 ? " has" : " have") +
                            " no memory for the result. Gather less at once, or give the process "
                            "more memory.");
}

}  // namespace sparkhvd
