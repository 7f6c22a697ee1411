// Reduce, gather and scatter, and results in the caller's memory, compared with plain loops. The tests use the C
// interface, with ranks as threads.
#include <sys/mman.h>

#include <cstring>

#include "tensors.h"
#include "world.h"

namespace sparkhvd::test::rooted_test {
namespace {

std::int64_t signed_of(std::size_t value) { return static_cast<std::int64_t>(value); }

/// The result that the engine has allocated for a finished operation.
Numbers output_of(TestWork& work, std::int32_t dtype) {
  sparkhvd_output output{};
  output.struct_size = sizeof(output);
  CHECK_EQUAL(sparkhvd_work_output(work.get(), &output, nullptr, 0), SPARKHVD_OK);
  const std::size_t count = output.num_bytes / element_size(static_cast<DType>(dtype));
  Tensor tensor(dtype, Numbers(count));
  if (count > 0) std::memcpy(tensor.data(), output.data, output.num_bytes);
  return tensor.values();
}

/// Number of a rank's rows: different on each rank, and 0 on some ranks.
std::size_t rows_of_rank(std::int32_t rank, std::size_t rows) {
  return rank % 3 == 1 ? 0 : rows + static_cast<std::size_t>(rank);
}

}  // namespace

TEST(reduce_of_every_type_and_reduction_to_every_root_on_every_layout) {
  on_layouts([](TestEngine& engine, std::int32_t rank, std::int32_t size) {
    for (const std::int32_t dtype : kDTypes) {
      for (const std::int32_t op : kOps) {
        if (dtype == SPARKHVD_BOOL && op == SPARKHVD_AVERAGE) continue;
        for (const std::size_t count : {0, 1, 1301, 20011}) {
          const auto root = static_cast<std::int32_t>(count + static_cast<std::size_t>(op)) % size;
          const bool in_place = count % 2 == 1 && op != SPARKHVD_MIN;
          // The data is split into two tensors, which are reduced as one operation.
          const std::size_t cut = count / 3;
          Tensor input(dtype, values_of(rank, count, dtype));
          Tensor output(dtype, Numbers(count));
          const std::size_t element = element_size(static_cast<DType>(dtype));
          std::byte* result = in_place ? input.data() : output.data();
          Request request(SPARKHVD_REDUCE, label(dtype, op, count), dtype);
          const auto add = [&](std::size_t begin, std::size_t elements) {
            std::byte* target = result + begin * element;
            request.tensor(input.data() + begin * element, rank == root ? target : nullptr,
                           {signed_of(elements)});
          };
          add(0, cut);
          add(cut, count - cut);
          request.raw().reduce_op = op;
          request.raw().root_rank = root;
          CHECK_EQUAL(engine.submit(request.raw()).wait().message, "");
          if (rank == root) {
            check_close((in_place ? input : output).values(), expected_of(size, count, dtype, op),
                        dtype, label(dtype, op, count));
          } else {
            check_close(input.values(), values_of(rank, count, dtype), dtype, "the input");
          }
        }
      }
    }
  });
}

TEST(large_reduce_gather_and_scatter_go_through_many_slots) {
  on_layouts([](TestEngine& engine, std::int32_t rank, std::int32_t size) {
    constexpr std::int32_t kType = SPARKHVD_FLOAT32;
    constexpr std::size_t kCount = 300007;
    const std::int32_t root = size - 1;
    Tensor tensor(kType, values_of(rank, kCount, kType));
    Tensor sum(kType, Numbers(kCount));
    Request reduce(SPARKHVD_REDUCE, "large", kType);
    reduce.tensor(tensor.data(), sum.data(), {kCount}).raw().root_rank = root;
    CHECK_EQUAL(engine.submit(reduce.raw()).wait().message, "");
    if (rank == root) {
      check_close(sum.values(), expected_of(size, kCount, kType, SPARKHVD_SUM), kType, "reduce");
    }
    Request gather(SPARKHVD_GATHER, "large", kType);
    gather.tensor(tensor.data(), nullptr, {kCount}).raw().root_rank = root;
    TestWork gathered = engine.submit(gather.raw());
    CHECK_EQUAL(gathered.wait().message, "");
    Numbers all;
    for (std::int32_t from = 0; from < size; ++from) {
      const Numbers part = values_of(from, kCount, kType);
      all.insert(all.end(), part.begin(), part.end());
    }
    check_close(output_of(gathered, kType), rank == root ? all : Numbers{}, kType, "gather");
    Tensor whole(kType, all);
    Request scatter(SPARKHVD_SCATTER, "large", kType);
    scatter.tensor(whole.data(), nullptr, {rank == root ? signed_of(all.size()) : std::int64_t{0}})
        .raw()
        .root_rank = root;
    TestWork scattered = engine.submit(scatter.raw());
    CHECK_EQUAL(scattered.wait().message, "");
    check_close(output_of(scattered, kType), values_of(rank, kCount, kType), kType, "scatter");
  });
}

TEST(gather_and_scatter_of_any_number_of_rows_to_and_from_every_root_on_every_layout) {
  on_layouts([](TestEngine& engine, std::int32_t rank, std::int32_t size) {
    for (const std::int32_t dtype : {SPARKHVD_FLOAT64, SPARKHVD_BFLOAT16, SPARKHVD_UINT8}) {
      for (const std::size_t rows : {0, 1, 977}) {
        for (const std::size_t columns : {1, 3}) {
          for (std::int32_t root = 0; root < size; ++root) {
            Numbers all;
            std::vector<std::int64_t> splits;
            for (std::int32_t from = 0; from < size; ++from) {
              const std::size_t count = rows_of_rank(from, rows);
              const Numbers part = values_of(from, count * columns, dtype);
              all.insert(all.end(), part.begin(), part.end());
              splits.push_back(signed_of(count));
            }
            const std::size_t own = rows_of_rank(rank, rows);
            const Numbers mine = values_of(rank, own * columns, dtype);
            Tensor part(dtype, mine);
            Tensor whole(dtype, all);
            const std::size_t element = element_size(static_cast<DType>(dtype));
            // Every other time the caller gives the memory for the result.
            const bool brings_memory = (root + rank) % 2 == 0;
            Tensor result(dtype, Numbers(all.size() + 1, 1));
            const std::string name = "of " + std::to_string(root);

            Request gather(SPARKHVD_GATHER, name, dtype);
            gather.tensor(part.data(), brings_memory ? result.data() : nullptr,
                          shape_of(own, columns), rank == root ? all.size() * element : 0);
            gather.raw().root_rank = root;
            TestWork gathered = engine.submit(gather.raw());
            CHECK_EQUAL(gathered.wait().message, "");
            const Numbers expected = rank == root ? all : Numbers{};
            Numbers found = brings_memory ? result.values() : output_of(gathered, dtype);
            if (brings_memory) {
              CHECK_EQUAL(found[expected.size()], 1.0);
              found.resize(expected.size());
            }
            check_close(found, expected, dtype, "gather " + name);

            Request scatter(SPARKHVD_SCATTER, name, dtype);
            scatter.tensor(rank == root ? whole.data() : nullptr,
                           brings_memory ? result.data() : nullptr,
                           {rank == root ? signed_of(all.size() / columns) : std::int64_t{0},
                            signed_of(columns)},
                           all.size() * element);
            if (rank == root) scatter.numbers(splits);
            scatter.raw().root_rank = root;
            TestWork scattered = engine.submit(scatter.raw());
            CHECK_EQUAL(scattered.wait().message, "");
            found = brings_memory ? result.values() : output_of(scattered, dtype);
            if (brings_memory) found.resize(mine.size());
            check_close(found, mine, dtype, "scatter " + name);
          }
        }
      }
    }
  });
}

TEST(allgather_and_alltoall_into_memory_of_the_callers_on_every_layout) {
  on_layouts([](TestEngine& engine, std::int32_t rank, std::int32_t size) {
    constexpr std::int32_t kType = SPARKHVD_FLOAT32;
    for (const std::size_t rows : {0, 1, 20011}) {
      std::vector<Tensor> results;
      Numbers all;
      for (std::int32_t from = 0; from < size; ++from) {
        const Numbers part = values_of(from, rows_of_rank(from, rows), kType);
        all.insert(all.end(), part.begin(), part.end());
      }
      // The results of two tensors, in memory that is larger than they need.
      Tensor own(kType, values_of(rank, rows_of_rank(rank, rows), kType));
      for (int i = 0; i < 2; ++i) results.emplace_back(kType, Numbers(all.size() + 5, -1));
      Request gather(SPARKHVD_ALLGATHER, "gather", kType);
      for (auto& result : results) {
        gather.tensor(own.data(), result.data(), {signed_of(rows_of_rank(rank, rows))},
                      result.bytes().size());
      }
      CHECK_EQUAL(engine.submit(gather.raw()).wait().message, "");
      for (const auto& result : results) {
        Numbers found = result.values();
        CHECK_EQUAL(found[all.size()], -1.0);
        found.resize(all.size());
        check_close(found, all, kType, "allgather");
      }

      const auto members = static_cast<std::size_t>(size);
      Tensor sent(kType, values_of(rank, rows * members, kType));
      Tensor received(kType, Numbers(rows * members));
      Request exchange(SPARKHVD_ALLTOALL, "exchange", kType);
      exchange.tensor(sent.data(), received.data(), {signed_of(rows * members)},
                      received.bytes().size());
      CHECK_EQUAL(engine.submit(exchange.raw()).wait().message, "");
      Numbers expected;
      for (std::int32_t from = 0; from < size; ++from) {
        const Numbers values = values_of(from, rows * members, kType);
        const auto begin =
            values.begin() + static_cast<std::ptrdiff_t>(rows * static_cast<std::size_t>(rank));
        expected.insert(expected.end(), begin, begin + static_cast<std::ptrdiff_t>(rows));
      }
      check_close(received.values(), expected, kType, "alltoall");
    }
  });
}

TEST(an_output_without_room_is_told_to_every_rank_and_the_engine_goes_on) {
  on_layouts([](TestEngine& engine, std::int32_t rank, std::int32_t size) {
    Tensor own(SPARKHVD_FLOAT32, values_of(rank, 8, SPARKHVD_FLOAT32));
    Tensor result(SPARKHVD_FLOAT32, Numbers(8 * static_cast<std::size_t>(size)));
    const std::int32_t tight = size - 1;
    const std::uint64_t bytes = result.bytes().size();
    for (const bool fits : {false, true}) {
      Request gather(SPARKHVD_ALLGATHER, "gather");
      gather.tensor(own.data(), result.data(), {8}, rank == tight && !fits ? bytes - 1 : bytes);
      const auto status = engine.submit(gather.raw()).wait();
      CHECK_EQUAL(status.code, fits ? SPARKHVD_OK : SPARKHVD_MISMATCH);
      if (fits) continue;
      const std::string expected = "the result on rank " + std::to_string(tight) + " has " +
                                   std::to_string(bytes) + " bytes (" + std::to_string(8 * size) +
                                   " rows), but its output has " + std::to_string(bytes - 1);
      CHECK_MESSAGE(status.message.find(expected) != std::string::npos, status.message);
    }
  });
}

// Not with sanitizers: their allocators end the process if memory is exhausted.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
TEST(results_too_large_for_a_rank_end_their_own_work_on_every_rank) {
  // More memory than any machine has. It is only address space and is never read.
  constexpr std::size_t kBytes = std::size_t{60} << 40;
  void* huge =
      ::mmap(nullptr, kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  CHECK(huge != MAP_FAILED);
  on_layouts([&](TestEngine& engine, std::int32_t rank, std::int32_t size) {
    if (size == 1) return;
    // First the last rank gives memory for its result, then no rank does.
    for (const std::int32_t owner : {size - 1, -1}) {
      Request gather(SPARKHVD_ALLGATHER, "gather", SPARKHVD_UINT8);
      const std::size_t rows = rank == 0 ? kBytes : 0;
      gather.tensor(huge, rank == owner ? huge : nullptr, {signed_of(rows)}, kBytes);
      const auto status = engine.submit(gather.raw()).wait();
      CHECK_EQUAL(status.code, SPARKHVD_NO_MEMORY);
      const std::string expected = owner == 1 ? "rank 0 has no memory" : "no memory for the result";
      CHECK_MESSAGE(status.message.find(expected) != std::string::npos, status.message);
    }
    Tensor own(SPARKHVD_FLOAT32, values_of(rank, 8, SPARKHVD_FLOAT32));
    Request gather(SPARKHVD_ALLGATHER, "gather");
    gather.tensor(own.data(), nullptr, {8});
    CHECK_EQUAL(engine.submit(gather.raw()).wait().message, "");
  });
  ::munmap(huge, kBytes);
}
#endif

TEST(rooted_collectives_refuse_what_they_cannot_do) {
  on_layouts([](TestEngine& engine, std::int32_t rank, std::int32_t size) {
    Tensor tensor(SPARKHVD_FLOAT32, Numbers(8));
    const auto refused = [&](std::int32_t collective, const Sizes& shape, std::int32_t root,
                             void* output, const Sizes& numbers) {
      Request request(collective, "wrong");
      request.tensor(tensor.data(), output, shape).numbers(numbers);
      request.raw().root_rank = root;
      Status status;
      engine.submit(request.raw(), &status);
      CHECK_EQUAL(status.code, SPARKHVD_INVALID_ARGUMENT);
      return status.message;
    };
    const auto says = [](const std::string& message, const char* part) {
      CHECK_MESSAGE(message.find(part) != std::string::npos, message);
    };
    says(refused(SPARKHVD_REDUCE, {8}, size, tensor.data(), {}), "is not in the process set");
    says(refused(SPARKHVD_REDUCE, {8}, rank, nullptr, {}), "has no output");
    says(refused(SPARKHVD_SCATTER, {}, rank, nullptr, {}), "is a scalar, and scatter divides");
    says(refused(SPARKHVD_SCATTER, {8}, rank, nullptr, Sizes(static_cast<std::size_t>(size), 9)),
         "at most the first dimension");
    says(refused(SPARKHVD_GATHER, {8}, rank, nullptr, {1}), "it takes no splits");
    if (size == 1) return;
    says(refused(SPARKHVD_SCATTER, {8}, (rank + 1) % size, nullptr, {}), "only the root has rows");
    for (const std::int32_t collective : {SPARKHVD_REDUCE, SPARKHVD_GATHER}) {
      Request request(collective, "differs");
      request.tensor(tensor.data(), tensor.data(), {8}, 4096).raw().root_rank = rank == 0 ? 1 : 0;
      const auto status = engine.submit(request.raw()).wait();
      CHECK_EQUAL(status.code, SPARKHVD_MISMATCH);
      says(status.message, "the root rank");
    }
  });
}

}  // namespace sparkhvd::test::rooted_test
