// The library as a user gets it: linked at run time, and used only through its C interface. The other tests link its
// object files. So only this test notices a function that is not exported, or exceptions and threads that do not work
// with the C++ runtime inside the library.
#include <cstdio>
#include <cstring>

#include "sparkhvd.h"

namespace {

int fail(const char* what, const char* message) {
  std::fprintf(stderr, "FAILED: %s: %s\n", what, message);
  return 1;
}

int reduce(sparkhvd_engine* engine, char* error, std::size_t error_size) {
  const float input[3] = {1, 2, 3};
  float output[3] = {};
  const int64_t shape[1] = {3};
  const sparkhvd_tensor tensor{input, output, shape, 1, 0};
  sparkhvd_request request{};
  request.struct_size = sizeof(request);
  request.collective = SPARKHVD_ALLREDUCE;
  request.name = "library_test";
  request.dtype = SPARKHVD_FLOAT32;
  request.reduce_op = SPARKHVD_SUM;
  request.prescale = 2;
  request.postscale = 1;
  request.device = SPARKHVD_DEVICE_CPU;
  request.num_tensors = 1;
  request.tensors = &tensor;
  request.timeout_s = 10;
  sparkhvd_work* work = nullptr;
  if (sparkhvd_submit(engine, &request, &work, error, error_size) != SPARKHVD_OK) {
    return fail("sparkhvd_submit", error);
  }
  const int32_t status = sparkhvd_wait(work, 10000, error, error_size);
  sparkhvd_work_release(work);
  if (status != SPARKHVD_OK) return fail("sparkhvd_wait", error);
  const float expected[3] = {2, 4, 6};
  if (std::memcmp(output, expected, sizeof(output)) != 0) return fail("allreduce", "wrong values");
  // This call throws and catches an exception inside the library.
  request.dtype = -1;
  if (sparkhvd_submit(engine, &request, &work, error, error_size) != SPARKHVD_INVALID_ARGUMENT) {
    return fail("sparkhvd_submit of a wrong dtype", "it was not refused");
  }
  return 0;
}

}  // namespace

int main() {
  const int32_t hosts[1] = {0};
  const int32_t sockets[1] = {-1};
  sparkhvd_engine_options options{};
  options.struct_size = sizeof(options);
  options.size = 1;
  options.hosts = hosts;
  options.sockets = sockets;
  options.streams = 1;
  options.stream_sockets = sockets;
  options.spin_us = 20;
  options.stall_shutdown_s = 10;
  options.host_loss_s = 15;
  options.connect_timeout_s = 10;
  options.slot_bytes = 4096;
  options.slots = 4;
  options.use_shared_memory = 1;
  char error[2048] = "";
  sparkhvd_engine* engine = nullptr;
  if (sparkhvd_engine_create(&options, &engine, error, sizeof(error)) != SPARKHVD_OK) {
    return fail("sparkhvd_engine_create", error);
  }
  const int failed = reduce(engine, error, sizeof(error));
  sparkhvd_engine_destroy(engine);
  return failed;
}
