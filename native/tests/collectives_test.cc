// Results of the collectives for every type, reduction and layout of ranks, compared with plain loops. The tests use
// the C interface, with ranks as threads.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <mutex>
#include <numeric>
#include <random>

#include "kernels/kernels.h"
#include "tensors.h"
#include "types.h"
#include "world.h"

namespace sparkhvd::test::collectives_test {
namespace {

/// Random numbers whose sums depend on the order of addition.
Numbers random_numbers(unsigned seed, std::size_t count, double deviation = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal(0, deviation);
  Numbers numbers(count);
  for (double& number : numbers) number = normal(random);
  return numbers;
}

/// The average of tensors: added up in their order, in the type in which the engine computes `dtype`, and divided once.
Tensor average_of(std::int32_t dtype, const std::vector<Tensor>& tensors, double prescale) {
  Numbers result(tensors[0].values().size());
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    std::vector<T> sums(result.size());
    for (std::size_t rank = 0; rank < tensors.size(); ++rank) {
      const Numbers values = tensors[rank].values();
      for (std::size_t i = 0; i < sums.size(); ++i) {
        const T addend = static_cast<T>(static_cast<T>(values[i]) * static_cast<T>(prescale));
        sums[i] = static_cast<T>(rank == 0 ? addend : sums[i] + addend);
      }
    }
    for (std::size_t i = 0; i < sums.size(); ++i) {
      result[i] = static_cast<double>(static_cast<T>(sums[i] / static_cast<T>(tensors.size())));
    }
  });
  return {dtype, result};
}

/// Memory that the ranks of a host share.
class SharedBuffer {
 public:
  SharedBuffer(TestEngine& engine, std::size_t bytes) {
    Request request(SPARKHVD_REGISTER, "buffer " + std::to_string(bytes));
    TestWork work = engine.submit(request.numbers({static_cast<std::int64_t>(bytes)}).raw());
    CHECK_EQUAL(work.wait().message, "");
    CHECK_EQUAL(sparkhvd_work_buffer(work.get(), &buffer_, nullptr, 0), SPARKHVD_OK);
    data_ = static_cast<std::byte*>(sparkhvd_buffer_data(buffer_));
  }
  SharedBuffer(const SharedBuffer&) = delete;
  ~SharedBuffer() { sparkhvd_buffer_release(buffer_); }
  std::byte* data() const { return data_; }

 private:
  sparkhvd_buffer* buffer_ = nullptr;
  std::byte* data_ = nullptr;
};

/// Checks allreduces of every type and reduction.
void check_allreduces(TestEngine& engine, std::int32_t rank, std::int32_t size,
                      const std::vector<std::size_t>& counts) {
  for (const std::int32_t dtype : kDTypes) {
    for (const std::int32_t op : kOps) {
      if (dtype == SPARKHVD_BOOL && op == SPARKHVD_AVERAGE) continue;
      for (const std::size_t count : counts) {
        const std::string what = label(dtype, op, count);
        Tensor input(dtype, values_of(rank, count, dtype));
        Tensor output(dtype, Numbers(count));
        const bool in_place = count % 2 == 0 || op == SPARKHVD_MAX;
        Request request(SPARKHVD_ALLREDUCE, what, dtype);
        request.tensor(input.data(), in_place ? input.data() : output.data(),
                       {static_cast<std::int64_t>(count)});
        request.raw().reduce_op = op;
        CHECK_EQUAL(engine.submit(request.raw()).wait().message, "");
        check_close((in_place ? input : output).values(), expected_of(size, count, dtype, op),
                    dtype, what);
      }
    }
  }
}

}  // namespace

TEST(allreduce_of_every_type_and_reduction_on_every_layout) {
  on_layouts([](TestEngine& engine, std::int32_t rank, std::int32_t size) {
    // The counts need a mailbox, one chunk, and several chunks of 4096 bytes.
    check_allreduces(engine, rank, size, {1, 1301, 20011});
  });
}

TEST(allreduce_of_every_type_and_reduction_through_a_ring) {
  on_layouts([](TestEngine& engine, std::int32_t rank, std::int32_t size) {
    Request configure(SPARKHVD_CONFIGURE, "a ring of any number of islands");
    CHECK_EQUAL(engine.submit(configure.numbers({0, 0, 1}).raw()).wait().message, "");
    check_allreduces(engine, rank, size, {0, 7, 20011});
    // More chunks than can be in flight at once, in private and in registered memory.
    constexpr std::size_t kCount = 600011;
    const SharedBuffer buffer(engine, kCount * sizeof(float));
    Tensor tensor(SPARKHVD_FLOAT32, values_of(rank, kCount, SPARKHVD_FLOAT32));
    std::memcpy(buffer.data(), tensor.data(), kCount * sizeof(float));
    const Tensor expected(SPARKHVD_FLOAT32,
                          expected_of(size, kCount, SPARKHVD_FLOAT32, SPARKHVD_SUM));
    for (std::byte* data : {tensor.data(), buffer.data()}) {
      Request request(SPARKHVD_ALLREDUCE, "large");
      request.tensor(data, data, {kCount});
      CHECK_EQUAL(engine.submit(request.raw()).wait().message, "");
      CHECK(std::memcmp(data, expected.bytes().data(), kCount * sizeof(float)) == 0);
    }
  });
}

TEST(every_way_of_average_inside_a_host_divides_the_sum_in_rank_order) {
  // Single tensors and lists of tensors, in private and registered memory, and over sockets; also with reducescatter.
  constexpr std::size_t kMost = 20011;
  std::vector<std::int32_t> isas;
  for (const int isa :
       {SPARKHVD_ISA_SCALAR, SPARKHVD_ISA_AVX2, SPARKHVD_ISA_AVX512, SPARKHVD_ISA_NEON}) {
    if (isa_available(isa)) isas.push_back(isa);
  }
  for (int size = 1; size <= 9; ++size) {
    for (const bool use_shared_memory : {true, false}) {
      WorldOptions options;
      options.hosts = one_host(size);
      options.use_shared_memory = use_shared_memory;
      options.isa = isas[static_cast<std::size_t>(size) % isas.size()];
      run_ranks(options, [&](TestEngine& engine, std::int32_t rank) {
        const SharedBuffer buffer(engine, kMost * sizeof(double));
        for (const std::int32_t dtype : {SPARKHVD_FLOAT32, SPARKHVD_FLOAT64, SPARKHVD_BFLOAT16,
                                         SPARKHVD_FLOAT16, SPARKHVD_INT32}) {
          for (const std::size_t count : {std::size_t{1}, std::size_t{1301}, kMost}) {
            const std::string what =
                label(dtype, SPARKHVD_AVERAGE, count) + " of " + std::to_string(size) + " ranks";
            const double prescale = count == 1301 && is_float(dtype) ? 1.3 : 1;
            std::vector<Tensor> inputs;
            for (int i = 0; i < size; ++i) {
              inputs.emplace_back(dtype, random_numbers(static_cast<unsigned>(i), count, 10));
            }
            const Tensor expected = average_of(dtype, inputs, prescale);
            Tensor& own = inputs[static_cast<std::size_t>(rank)];
            const std::size_t bytes = own.bytes().size();
            std::memcpy(buffer.data(), own.data(), bytes);
            Tensor output(dtype, Numbers(count));
            const std::size_t cut = count / 3;
            const auto check = [&](Request& request, const std::byte* result, std::size_t first,
                                   std::size_t last) {
              request.raw().reduce_op = SPARKHVD_AVERAGE;
              request.raw().prescale = prescale;
              CHECK_EQUAL(engine.submit(request.raw()).wait().message, "");
              const std::size_t element = bytes / count;
              const bool is_equal = std::memcmp(result, expected.bytes().data() + first * element,
                                                (last - first) * element) == 0;
              CHECK_MESSAGE(is_equal, what);
            };
            Request alone(SPARKHVD_ALLREDUCE, "alone", dtype);
            alone.tensor(own.data(), output.data(), {static_cast<std::int64_t>(count)});
            check(alone, output.data(), 0, count);

            Request registered(SPARKHVD_ALLREDUCE, "registered", dtype);
            registered.tensor(buffer.data(), buffer.data(), {static_cast<std::int64_t>(count)});
            check(registered, buffer.data(), 0, count);

            const auto members = static_cast<std::size_t>(size);
            const auto me = static_cast<std::size_t>(rank);
            const std::size_t first = me * (count / members) + std::min(me, count % members);
            const std::size_t rows = count / members + (me < count % members ? 1 : 0);
            Request scatter(SPARKHVD_REDUCESCATTER, "scatter", dtype);
            scatter.tensor(own.data(), output.data(), {static_cast<std::int64_t>(count)});
            check(scatter, output.data(), first, first + rows);

            Request list(SPARKHVD_ALLREDUCE, "list", dtype);
            std::byte* second = own.data() + cut * (bytes / count);
            list.tensor(own.data(), own.data(), {static_cast<std::int64_t>(cut)});
            list.tensor(second, second, {static_cast<std::int64_t>(count - cut)});
            check(list, own.data(), 0, count);
          }
        }
      });
    }
  }
}

TEST(all_ranks_get_the_same_bits_between_hosts) {
  std::vector<std::vector<std::int32_t>> layouts{{0, 0, 1},
                                                 {0, 0, 1, 1},
                                                 {0, 0, 0, 1},
                                                 {0, 1, 2, 3},
                                                 {0, 1, 0, 2, 2},
                                                 {0, 0, 0, 1, 1, 1},
                                                 std::vector<std::int32_t>(18)};
  std::iota(layouts.back().begin(), layouts.back().end(), 0);  // a ring
  for (const auto& hosts : layouts) {
    for (const std::int32_t dtype : {SPARKHVD_FLOAT32, SPARKHVD_BFLOAT16}) {
      constexpr std::size_t kCount = 50021;
      // Each algorithm adds in another order, so the numbers have sums that are exact in any order.
      std::vector<Tensor> exact;
      for (unsigned rank = 0; rank < hosts.size(); ++rank) {
        Numbers numbers = random_numbers(rank, kCount);
        for (double& number : numbers) number = std::trunc(number * 8) / 8;
        exact.emplace_back(dtype, numbers);
      }
      const Tensor average = average_of(dtype, exact, 1);
      std::vector<std::vector<std::byte>> results;
      std::mutex mutex;
      WorldOptions options;
      options.hosts = hosts;
      run_ranks(options, [&](TestEngine& engine, std::int32_t rank) {
        Tensor tensor(dtype, random_numbers(static_cast<unsigned>(rank), kCount));
        const auto original = tensor.bytes();
        SharedBuffer buffer(engine, original.size());
        const auto reduce = [&](std::byte* data, std::int32_t op, double postscale) {
          Request request(SPARKHVD_ALLREDUCE, "x", dtype);
          request.tensor(data, data, {kCount});
          request.raw().reduce_op = op;
          request.raw().postscale = postscale;
          CHECK_EQUAL(engine.submit(request.raw()).wait().message, "");
        };
        std::memcpy(buffer.data(), original.data(), original.size());
        for (std::byte* data : {tensor.data(), buffer.data()}) {
          reduce(data, SPARKHVD_SUM, 0.3);
          const std::scoped_lock lock(mutex);
          results.emplace_back(data, data + original.size());
        }
        const auto& own = exact[static_cast<std::size_t>(rank)].bytes();
        for (std::byte* data : {tensor.data(), buffer.data()}) {
          std::memcpy(data, own.data(), own.size());
          reduce(data, SPARKHVD_AVERAGE, 1);
          CHECK(std::memcmp(data, average.bytes().data(), own.size()) == 0);
        }
      });
      CHECK_EQUAL(results.size(), 2 * hosts.size());
      for (const auto& result : results) CHECK(result == results[0]);
    }
  }
}

TEST(reducescatter_divides_any_number_of_rows_on_every_layout) {
  on_layouts([](TestEngine& engine, std::int32_t rank, std::int32_t size) {
    const auto members = static_cast<std::size_t>(size);
    const auto me = static_cast<std::size_t>(rank);
    for (const std::int32_t dtype :
         {SPARKHVD_FLOAT32, SPARKHVD_BFLOAT16, SPARKHVD_INT64, SPARKHVD_UINT8}) {
      for (const std::int32_t op : {SPARKHVD_SUM, SPARKHVD_AVERAGE, SPARKHVD_MAX}) {
        // Several tensors at once; some tensors have no rows or no columns.
        for (const auto& shapes : std::vector<std::vector<Sizes>>{
                 {shape_of(members, 1)},
                 {shape_of(members + 1, 3), shape_of(0, 5), shape_of(members - 1, 7)},
                 {shape_of(3, 0)},
                 {shape_of(977, 33), shape_of(1, 1), shape_of(41, 1000)}}) {
          Request request(SPARKHVD_REDUCESCATTER, "scatter", dtype);
          std::vector<Tensor> inputs;
          std::vector<Tensor> outputs;
          std::vector<Numbers> expected;
          for (const auto& shape : shapes) {
            const auto rows = static_cast<std::size_t>(shape[0]);
            const auto columns = static_cast<std::size_t>(shape[1]);
            const std::size_t first = me * (rows / members) + std::min(me, rows % members);
            const std::size_t own = rows / members + (me < rows % members ? 1 : 0);
            inputs.emplace_back(dtype, values_of(rank, rows * columns, dtype));
            outputs.emplace_back(dtype, Numbers(own * columns, 9));
            const Numbers all = expected_of(size, rows * columns, dtype, op);
            const auto begin = all.begin() + static_cast<std::ptrdiff_t>(first * columns);
            expected.emplace_back(begin, begin + static_cast<std::ptrdiff_t>(own * columns));
          }
          for (std::size_t i = 0; i < shapes.size(); ++i) {
            request.tensor(inputs[i].data(), outputs[i].data(), shapes[i]);
          }
          request.raw().reduce_op = op;
          CHECK_EQUAL(engine.submit(request.raw()).wait().message, "");
          for (std::size_t i = 0; i < shapes.size(); ++i) {
            check_close(outputs[i].values(), expected[i], dtype, label(dtype, op, i));
          }
        }
      }
    }
  });
}

TEST(reducescatter_and_allgather_into_in_place_are_an_allreduce_on_every_layout) {
  on_layouts([](TestEngine& engine, std::int32_t rank, std::int32_t size) {
    const auto members = static_cast<std::size_t>(size);
    const auto me = static_cast<std::size_t>(rank);
    for (const std::int32_t dtype : {SPARKHVD_FLOAT64, SPARKHVD_BFLOAT16, SPARKHVD_INT8}) {
      for (const auto& shapes : std::vector<std::vector<Sizes>>{
               {shape_of(members, 1)},
               {shape_of(members + 1, 3), shape_of(0, 5), shape_of(1, 7), shape_of(members - 1, 1)},
               {shape_of(2, 0)},
               {shape_of(20011, 3), shape_of(1, 1), shape_of(41, 1000), shape_of(99999, 1)}}) {
        std::vector<Tensor> tensors;
        for (const auto& shape : shapes) {
          tensors.emplace_back(
              dtype, values_of(rank, static_cast<std::size_t>(shape[0] * shape[1]), dtype));
        }
        Request scatter(SPARKHVD_REDUCESCATTER, "scatter", dtype);
        Request gather(SPARKHVD_ALLGATHER_INTO, "gather", dtype);
        for (std::size_t i = 0; i < shapes.size(); ++i) {
          const auto rows = static_cast<std::size_t>(shapes[i][0]);
          const std::size_t first = me * (rows / members) + std::min(me, rows % members);
          const std::size_t row_bytes = rows == 0 ? 0 : tensors[i].bytes().size() / rows;
          std::byte* data = tensors[i].data();
          scatter.tensor(data, data + first * row_bytes, shapes[i]);
          gather.tensor(data, data, shapes[i]);
        }
        CHECK_EQUAL(engine.submit(scatter.raw()).wait().message, "");
        CHECK_EQUAL(engine.submit(gather.raw()).wait().message, "");
        for (std::size_t i = 0; i < shapes.size(); ++i) {
          const auto count = static_cast<std::size_t>(shapes[i][0] * shapes[i][1]);
          check_close(tensors[i].values(), expected_of(size, count, dtype, SPARKHVD_SUM), dtype,
                      label(dtype, SPARKHVD_SUM, i));
        }
      }
    }
  });
}

TEST(allgather_into_refuses_what_it_cannot_do) {
  on_layouts([](TestEngine& engine, std::int32_t rank, std::int32_t size) {
    Tensor first(SPARKHVD_FLOAT32, Numbers(8));
    Tensor second(SPARKHVD_FLOAT32, Numbers(8));
    const auto refused = [&](const void* input, void* output, const Sizes& shape) {
      Request request(SPARKHVD_ALLGATHER_INTO, "wrong", SPARKHVD_FLOAT32);
      request.tensor(input, output, shape);
      Status status;
      engine.submit(request.raw(), &status);
      CHECK_EQUAL(status.code, SPARKHVD_INVALID_ARGUMENT);
      return status.message;
    };
    CHECK(refused(first.data(), first.data(), {}).find("is a scalar") != std::string::npos);
    CHECK(refused(first.data(), second.data(), {8}).find("works in place") != std::string::npos);
    CHECK(refused(first.data(), nullptr, {8}).find("has no output") != std::string::npos);
    if (size == 1) return;
    Request request(SPARKHVD_ALLGATHER_INTO, "differs", SPARKHVD_FLOAT32);
    request.tensor(first.data(), first.data(), {rank == 0 ? 7 : 8});
    const auto status = engine.submit(request.raw()).wait();
    CHECK_EQUAL(status.code, SPARKHVD_MISMATCH);
    CHECK(status.message.find("ranks disagree on shape") != std::string::npos);
  });
}

TEST(reducescatter_scales_before_and_after) {
  on_layouts([](TestEngine& engine, std::int32_t rank, std::int32_t size) {
    constexpr std::size_t kColumns = 3001;
    const auto rows = static_cast<std::size_t>(size);
    Tensor input(SPARKHVD_FLOAT16, values_of(rank, rows * kColumns, SPARKHVD_FLOAT16));
    Tensor output(SPARKHVD_FLOAT16, Numbers(kColumns));
    Request request(SPARKHVD_REDUCESCATTER, "scaled", SPARKHVD_FLOAT16);
    request.tensor(input.data(), output.data(), shape_of(rows, kColumns));
    request.raw().prescale = 3;
    request.raw().postscale = 0.5;
    CHECK_EQUAL(engine.submit(request.raw()).wait().message, "");
    const Numbers all = expected_of(size, rows * kColumns, SPARKHVD_FLOAT16, SPARKHVD_SUM);
    Numbers expected(kColumns);
    for (std::size_t i = 0; i < kColumns; ++i) {
      expected[i] = all[static_cast<std::size_t>(rank) * kColumns + i] * 1.5;
    }
    check_close(output.values(), expected, SPARKHVD_FLOAT16, "scaled");
  });
}

TEST(alltoall_carries_any_number_of_rows_from_everyone_to_everyone) {
  on_layouts([](TestEngine& engine, std::int32_t rank, std::int32_t size) {
    for (const std::int64_t columns : {std::int64_t{1}, std::int64_t{3}, std::int64_t{700}}) {
      for (unsigned seed = 0; seed < 4; ++seed) {
        // The rows are equal on all ranks. In every other round some ranks send or receive no rows.
        std::mt19937 random(seed);
        const auto members = static_cast<std::size_t>(size);
        std::vector<Sizes> rows(members, Sizes(members));
        for (std::size_t from = 0; from < members; ++from) {
          for (std::size_t to = 0; to < members; ++to) {
            rows[from][to] = static_cast<std::int64_t>(random() % (seed == 3 ? 40 : 5));
            if (seed % 2 == 1 && (from == seed % members || to == 0)) rows[from][to] = 0;
          }
        }
        const auto me = static_cast<std::size_t>(rank);
        // The value contains the sender and the receiver of the number.
        const auto number = [&](std::size_t from, std::size_t to, std::int64_t i) {
          return static_cast<std::int32_t>(from * 100000000 + to * 10000000 +
                                           static_cast<std::size_t>(i));
        };
        std::vector<std::int32_t> input;
        std::vector<std::int32_t> expected;
        Sizes expected_rows;
        for (std::size_t other = 0; other < members; ++other) {
          for (std::int64_t i = 0; i < rows[me][other] * columns; ++i) {
            input.push_back(number(me, other, i));
          }
          for (std::int64_t i = 0; i < rows[other][me] * columns; ++i) {
            expected.push_back(number(other, me, i));
          }
          expected_rows.push_back(rows[other][me]);
        }
        const std::int64_t total = std::accumulate(rows[me].begin(), rows[me].end(), 0LL);
        Request request(SPARKHVD_ALLTOALL, "alltoall", SPARKHVD_INT32);
        request.tensor(input.data(), nullptr, {total, columns}).numbers(rows[me]);
        TestWork work = engine.submit(request.raw());
        CHECK_EQUAL(work.wait().message, "");
        const auto result = result_of<std::int32_t>(work);
        CHECK(result.rows == expected_rows);
        CHECK(result.data == expected);
      }
    }
  });
}

TEST(allgather_of_several_tensors_gives_tensor_after_tensor) {
  on_layouts([](TestEngine& engine, std::int32_t rank, std::int32_t size) {
    const auto rows = [](std::int32_t from, std::size_t tensor) {
      return static_cast<std::int64_t>((static_cast<std::size_t>(from) * 3 + tensor * 5) % 7);
    };
    const std::vector<std::int64_t> columns{1, 500, 3};
    Request request(SPARKHVD_ALLGATHER, "group", SPARKHVD_INT32);
    std::vector<std::vector<std::int32_t>> inputs;
    std::vector<std::int32_t> expected;
    Sizes expected_rows;
    for (std::size_t tensor = 0; tensor < columns.size(); ++tensor) {
      for (std::int32_t from = 0; from < size; ++from) {
        expected_rows.push_back(rows(from, tensor));
        for (std::int64_t i = 0; i < rows(from, tensor) * columns[tensor]; ++i) {
          expected.push_back(static_cast<std::int32_t>(tensor) * 1000000 + from * 100000 +
                             static_cast<std::int32_t>(i));
        }
      }
      inputs.emplace_back();
      for (std::int64_t i = 0; i < rows(rank, tensor) * columns[tensor]; ++i) {
        inputs.back().push_back(static_cast<std::int32_t>(tensor) * 1000000 + rank * 100000 +
                                static_cast<std::int32_t>(i));
      }
    }
    for (std::size_t tensor = 0; tensor < columns.size(); ++tensor) {
      request.tensor(inputs[tensor].data(), nullptr, {rows(rank, tensor), columns[tensor]});
    }
    TestWork work = engine.submit(request.raw());
    CHECK_EQUAL(work.wait().message, "");
    const auto result = result_of<std::int32_t>(work);
    CHECK(result.rows == expected_rows);
    CHECK(result.data == expected);
  });
}

namespace {

/// Adasum by the formula of the paper, on whole vectors.
Numbers adasum_of(const Numbers& a, const Numbers& b) {
  const auto dot = [](const Numbers& x, const Numbers& y) {
    return std::inner_product(x.begin(), x.end(), y.begin(), 0.0);
  };
  const double product = dot(a, b);
  const auto factor = [&](double square) { return square == 0 ? 1.0 : 1 - product / (2 * square); };
  const double factor_a = factor(dot(a, a));
  const double factor_b = factor(dot(b, b));
  Numbers result(a.size());
  for (std::size_t i = 0; i < a.size(); ++i) result[i] = a[i] * factor_a + b[i] * factor_b;
  return result;
}

Numbers adasum_of(std::vector<Numbers> vectors) {
  while (vectors.size() > 1) {
    std::vector<Numbers> pairs;
    for (std::size_t i = 0; i < vectors.size(); i += 2) {
      pairs.push_back(adasum_of(vectors[i], vectors[i + 1]));
    }
    vectors = std::move(pairs);
  }
  return vectors[0];
}

}  // namespace

TEST(adasum_combines_pairs_as_in_the_paper) {
  for (const auto& hosts : std::vector<std::vector<std::int32_t>>{{0},
                                                                  {0, 0},
                                                                  {0, 1},
                                                                  {0, 0, 0, 0},
                                                                  {0, 0, 1, 1},
                                                                  {0, 1, 0, 1},
                                                                  {0, 0, 0, 1},
                                                                  {0, 0, 1, 1, 2, 2, 3, 3}}) {
    const std::size_t size = hosts.size();
    for (const std::int32_t dtype :
         {SPARKHVD_FLOAT32, SPARKHVD_FLOAT64, SPARKHVD_FLOAT16, SPARKHVD_BFLOAT16}) {
      // Each tensor is combined separately: a tensor of zeros, a tensor of zeros on some ranks, a tensor of one number,
      // and a large tensor.
      const auto input = [&](std::size_t rank, std::size_t tensor) -> Numbers {
        if (tensor == 0) return Numbers(5);
        if (tensor == 1 && rank % 2 == 1) return Numbers(100);
        const std::size_t count = tensor == 1 ? 100 : tensor == 2 ? 1 : 9001;
        Numbers numbers = random_numbers(static_cast<unsigned>(rank * 10 + tensor), count);
        // Rounds the numbers to the type, so that the reference starts from equal values.
        return Tensor(dtype, numbers).values();
      };
      std::vector<std::vector<std::vector<std::byte>>> results(size);
      WorldOptions options;
      options.hosts = hosts;
      run_ranks(options, [&](TestEngine& engine, std::int32_t rank) {
        Request request(SPARKHVD_ALLREDUCE, "adasum", dtype);
        std::vector<Tensor> tensors;
        for (std::size_t i = 0; i < 4; ++i) {
          tensors.emplace_back(dtype, input(static_cast<std::size_t>(rank), i));
        }
        for (auto& tensor : tensors) {
          request.tensor(tensor.data(), tensor.data(),
                         {static_cast<std::int64_t>(tensor.values().size())});
        }
        request.raw().reduce_op = SPARKHVD_ADASUM;
        request.raw().postscale = 2;
        CHECK_EQUAL(engine.submit(request.raw()).wait().message, "");
        for (std::size_t i = 0; i < tensors.size(); ++i) {
          std::vector<Numbers> inputs;
          for (std::size_t r = 0; r < size; ++r) inputs.push_back(input(r, i));
          Numbers expected = adasum_of(inputs);
          for (double& number : expected) number *= 2;
          // The engine rounds after every step and not only once, so the comparison is less exact.
          check_close(tensors[i].values(), expected,
                      dtype == SPARKHVD_FLOAT64   ? SPARKHVD_FLOAT64
                      : dtype == SPARKHVD_FLOAT32 ? SPARKHVD_FLOAT16
                                                  : SPARKHVD_BFLOAT16,
                      label(dtype, SPARKHVD_ADASUM, i));
          results[static_cast<std::size_t>(rank)].push_back(tensors[i].bytes());
        }
      });
      for (const auto& result : results) CHECK(result == results[0]);
    }
  }
}

TEST(a_result_can_be_stored_to_several_places_at_once) {
  for (const int isa :
       {SPARKHVD_ISA_SCALAR, SPARKHVD_ISA_AVX2, SPARKHVD_ISA_AVX512, SPARKHVD_ISA_NEON}) {
    if (!isa_available(isa)) continue;
    for (const std::int32_t dtype : kDTypes) {
      for (const std::size_t count : {0U, 1U, 63U, 64U, 65U, 1000U}) {
        std::vector<Tensor> tensors;
        std::vector<const void*> sources;
        std::vector<void*> places;
        for (std::int32_t rank = 0; rank < 3; ++rank) {
          tensors.emplace_back(dtype, values_of(rank, count, dtype));
        }
        for (auto& tensor : tensors) {
          sources.push_back(tensor.data());
          places.push_back(tensor.data());
        }
        Tensor expected(dtype, Numbers(count));
        const auto& table = kernels(isa);
        table.reduce(static_cast<DType>(dtype), ReduceOp::kSum, expected.data(), sources, count,
                     {});
        table.reduce_to_all(static_cast<DType>(dtype), ReduceOp::kSum, places, sources, count, {});
        for (const auto& tensor : tensors) CHECK(tensor.bytes() == expected.bytes());
      }
    }
  }
}

}  // namespace sparkhvd::test::collectives_test
