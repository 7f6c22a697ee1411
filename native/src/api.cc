// The C boundary: every function is one guarded call into the engine; nothing else lives here but
// the translation of the caller's structures.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <new>
#include <string>

#include "engine.h"
#include "error.h"
#include "kernels/kernels.h"
#include "operation.h"
#include "sparkhvd.h"

using sparkhvd::Error;

struct sparkhvd_engine {
  std::unique_ptr<sparkhvd::Engine> engine;
};

struct sparkhvd_work {
  sparkhvd::Engine* engine;
  std::shared_ptr<sparkhvd::Operation> operation;
};

namespace {

struct Message {
  char* text;
  std::size_t size;
};

void write(Message message, const char* text) noexcept {
  if (message.text == nullptr || message.size == 0) return;
  std::size_t length = std::min(std::strlen(text), message.size - 1);
  // Never half a character: step back over continuation bytes of UTF-8.
  while (length > 0 && length < std::strlen(text) && (text[length] & 0xC0) == 0x80) --length;
  std::memcpy(message.text, text, length);
  message.text[length] = '\0';
}

/// Runs `body` and turns what it throws into a status and a message.
template <class Body>
std::int32_t guard(Message message, Body body) noexcept {
  try {
    return body();
  } catch (const Error& error) {
    write(message, error.what());
    return error.status();
  } catch (const std::bad_alloc&) {
    write(message, "out of memory.");
    return SPARKHVD_INTERNAL;
  } catch (const std::exception& error) {
    write(message, error.what());
    return SPARKHVD_INTERNAL;
  } catch (...) {
    write(message, "an unknown C++ exception.");
    return SPARKHVD_INTERNAL;
  }
}

[[noreturn]] void invalid(const std::string& text) { throw Error(SPARKHVD_INVALID_ARGUMENT, text); }

/// The caller's structure, with what an older caller does not know set to `defaults`.
template <class Struct>
Struct read_struct(const Struct* given, Struct defaults, const char* what) {
  if (given == nullptr) invalid(std::string(what) + " is NULL.");
  if (given->struct_size < sizeof(given->struct_size)) {
    invalid(std::string(what) + ".struct_size is not set.");
  }
  std::memcpy(&defaults, given, std::min<std::size_t>(given->struct_size, sizeof(Struct)));
  return defaults;
}

sparkhvd::EngineOptions read_options(const sparkhvd_engine_options* given) {
  sparkhvd_engine_options defaults{};
  defaults.spin_us = 30;
  defaults.stall_warning_s = 60;
  defaults.stall_shutdown_s = 1800;
  defaults.host_loss_s = 15;
  defaults.connect_timeout_s = 300;
  defaults.slot_bytes = 256 << 10;
  defaults.slots = 4;
  defaults.use_shared_memory = 1;
  const auto raw = read_struct(given, defaults, "options");
  sparkhvd::EngineOptions options;
  // The sockets are the engine's from the call on, also when the call fails.
  if (raw.sockets != nullptr && raw.size > 0) {
    for (std::int32_t i = 0; i < raw.size; ++i) options.sockets.emplace_back(raw.sockets[i]);
  }
  if (raw.size < 1 || raw.rank < 0 || raw.rank >= raw.size) {
    invalid("rank " + std::to_string(raw.rank) + " of size " + std::to_string(raw.size) +
            " does not exist.");
  }
  if (raw.hosts == nullptr || raw.sockets == nullptr)
    invalid("hosts and sockets must not be NULL.");
  for (std::int32_t i = 0; i < raw.size; ++i) {
    const bool has_socket = options.sockets[static_cast<std::size_t>(i)].valid();
    if (has_socket == (i == raw.rank)) {
      invalid(i == raw.rank ? "a rank has no socket to itself: pass -1."
                            : "the socket to rank " + std::to_string(i) + " is missing.");
    }
  }
  if (raw.slots < 2 || raw.slots > 1024) invalid("slots must be from 2 to 1024.");
  if (raw.slot_bytes < 4096 || raw.slot_bytes > (std::uint64_t{1} << 32)) {
    invalid("slot_bytes must be from 4096 to 4 GiB.");
  }
  if (raw.spin_us < 0) invalid("spin_us must not be negative.");
  options.communicator.rank = sparkhvd::Rank{raw.rank};
  options.communicator.hosts.assign(raw.hosts, raw.hosts + raw.size);
  options.communicator.slot_bytes = raw.slot_bytes;
  options.communicator.slots = raw.slots;
  options.communicator.use_shared_memory = raw.use_shared_memory != 0;
  options.communicator.connect_timeout_s = raw.connect_timeout_s;
  options.isa = raw.isa;
  options.spin_us = raw.spin_us;
  options.stall_warning_s = raw.stall_warning_s;
  options.stall_shutdown_s = raw.stall_shutdown_s;
  options.host_loss_s = raw.host_loss_s;
  return options;
}

std::shared_ptr<sparkhvd::Operation> read_request(const sparkhvd_request* given,
                                                  const sparkhvd::Engine& engine) {
  sparkhvd_request defaults{};
  defaults.prescale = 1;
  defaults.postscale = 1;
  defaults.device = SPARKHVD_DEVICE_CPU;
  defaults.timeout_s = -1;
  const auto raw = read_struct(given, defaults, "request");
  const auto collective = sparkhvd::to_collective(raw.collective);
  if (!collective) invalid("collective " + std::to_string(raw.collective) + " does not exist.");
  if (raw.name == nullptr) invalid(std::string(name_of(*collective)) + ": the name is NULL.");
  auto operation = std::make_shared<sparkhvd::Operation>();
  operation->process_set = raw.process_set;
  operation->name = raw.name;
  sparkhvd::Descriptor& descriptor = operation->descriptor;
  descriptor.collective = *collective;
  const std::string label = operation->label();
  if (operation->name.empty() || operation->name.size() > sparkhvd::kMaxNameBytes) {
    invalid(label + ": a name has 1 to " + std::to_string(sparkhvd::kMaxNameBytes) + " bytes.");
  }
  const auto unsupported = [&](const std::string& text) {
    throw Error(SPARKHVD_UNSUPPORTED, label + ": " + text);
  };
  using sparkhvd::Collective;
  using sparkhvd::DType;
  using sparkhvd::ReduceOp;
  if (*collective != Collective::kAllreduce && *collective != Collective::kAllgather &&
      *collective != Collective::kBroadcast && *collective != Collective::kBarrier) {
    unsupported("this version of sparkhvd has no " + std::string(name_of(*collective)) + " yet.");
  }
  if (raw.process_set != 0) {
    unsupported("process set " + std::to_string(raw.process_set) +
                " does not exist; this version of sparkhvd has only 0, all ranks.");
  }
  if (raw.device != SPARKHVD_DEVICE_CPU) {
    unsupported(
        "this build of sparkhvd reduces tensors in CPU memory only. Move the tensor to the CPU.");
  }
  if (*collective != Collective::kBarrier) {
    const auto dtype = sparkhvd::to_dtype(raw.dtype);
    if (!dtype) invalid(label + ": dtype " + std::to_string(raw.dtype) + " does not exist.");
    descriptor.dtype = *dtype;
  }
  if (*collective == Collective::kAllreduce) {
    const auto op = sparkhvd::to_reduce_op(raw.reduce_op);
    if (!op) invalid(label + ": reduce_op " + std::to_string(raw.reduce_op) + " does not exist.");
    descriptor.reduce_op = *op;
    if (*op == ReduceOp::kAdasum) unsupported("this version of sparkhvd has no Adasum yet.");
    descriptor.prescale = raw.prescale;
    descriptor.postscale = raw.postscale;
    if (descriptor.dtype == DType::kBool) {
      if (*op == ReduceOp::kAverage) {
        invalid(label + ": there is no Average of bool. Use Sum or Max for \"or\", or convert it.");
      }
      if (raw.prescale != 1 || raw.postscale != 1) {
        invalid(label + ": bool cannot be scaled. Leave prescale and postscale at 1.");
      }
    }
  }
  if (*collective == Collective::kBroadcast) {
    if (raw.root_rank < 0 || static_cast<std::size_t>(raw.root_rank) >= engine.size()) {
      invalid(label + ": root_rank " + std::to_string(raw.root_rank) +
              " does not exist; ranks are 0 to " + std::to_string(engine.size() - 1) + ".");
    }
    descriptor.root = sparkhvd::Rank{raw.root_rank};
  }
  const double timeout_s = raw.timeout_s < 0 ? engine.stall_shutdown_s() : raw.timeout_s;
  if (std::isnan(timeout_s)) invalid(label + ": timeout_s is not a number.");
  descriptor.timeout_s = timeout_s;
  const std::uint32_t expected = *collective == Collective::kBarrier ? 0 : 1;
  if (*collective != Collective::kAllreduce && raw.num_tensors != expected) {
    invalid(label + ": num_tensors is " + std::to_string(raw.num_tensors) + ", but must be " +
            std::to_string(expected) + ".");
  }
  if (raw.num_tensors > 0 && raw.tensors == nullptr) invalid(label + ": tensors is NULL.");
  std::uint64_t total = 0;
  for (std::uint32_t i = 0; i < raw.num_tensors; ++i) {
    const sparkhvd_tensor& tensor = raw.tensors[i];
    const std::string which = label + ": tensor " + std::to_string(i);
    if (tensor.num_dims > sparkhvd::kMaxDims) {
      invalid(which + " has more than " + std::to_string(sparkhvd::kMaxDims) + " dimensions.");
    }
    if (tensor.num_dims > 0 && tensor.shape == nullptr) invalid(which + " has no shape.");
    std::vector<std::int64_t> shape;
    if (tensor.num_dims > 0) shape.assign(tensor.shape, tensor.shape + tensor.num_dims);
    const auto count = sparkhvd::count_elements(shape, descriptor.dtype);
    if (!count) invalid(which + " has an impossible shape (negative or larger than 64 TiB).");
    const std::uint64_t bytes = *count * element_size(descriptor.dtype);
    total += bytes;
    if (total > sparkhvd::kMaxTensorBytes) invalid(label + ": more than 64 TiB.");
    const bool needs_output = *collective != Collective::kAllgather;
    if (bytes > 0 && (tensor.input == nullptr || (needs_output && tensor.output == nullptr))) {
      invalid(which + " has no " + (tensor.input == nullptr ? "input." : "output."));
    }
    operation->pieces.add(tensor.input, tensor.output, bytes);
    descriptor.shapes.push_back(std::move(shape));
  }
  return operation;
}

void check_handle(const void* handle, const char* what) {
  if (handle == nullptr) invalid(std::string("the ") + what + " is NULL.");
}

std::int32_t status_of(const sparkhvd::Operation& operation, Message message) {
  const std::int32_t status = operation.status.load(std::memory_order_acquire);
  if (status > SPARKHVD_PENDING) write(message, operation.message.c_str());
  return status;
}

}  // namespace

extern "C" {

uint32_t sparkhvd_abi_version(void) { return SPARKHVD_ABI_VERSION; }

uint32_t sparkhvd_wire_version(void) { return SPARKHVD_WIRE_VERSION; }

int32_t sparkhvd_isa_available(int32_t isa) { return sparkhvd::isa_available(isa) ? 1 : 0; }

int32_t sparkhvd_engine_create(const sparkhvd_engine_options* options, sparkhvd_engine** engine,
                               char* error, size_t error_size) {
  return guard({error, error_size}, [&] {
    auto read = read_options(options);
    check_handle(static_cast<const void*>(engine), "place for the engine");
    auto handle = std::make_unique<sparkhvd_engine>();
    handle->engine = std::make_unique<sparkhvd::Engine>(std::move(read));
    *engine = handle.release();
    return SPARKHVD_OK;
  });
}

int32_t sparkhvd_engine_shutdown(sparkhvd_engine* engine, char* error, size_t error_size) {
  return guard({error, error_size}, [&] {
    check_handle(engine, "engine");
    if (engine->engine->is_forked_copy()) throw sparkhvd::created_before_fork();
    engine->engine->shutdown();
    return SPARKHVD_OK;
  });
}

void sparkhvd_engine_abort(sparkhvd_engine* engine, const char* reason) {
  guard({nullptr, 0}, [&] {
    check_handle(engine, "engine");
    if (!engine->engine->is_forked_copy()) {
      engine->engine->abort(reason == nullptr ? "no reason given" : reason);
    }
    return SPARKHVD_OK;
  });
}

int32_t sparkhvd_engine_status(sparkhvd_engine* engine, char* error, size_t error_size) {
  return guard({error, error_size}, [&] {
    check_handle(engine, "engine");
    engine->engine->check();
    return SPARKHVD_OK;
  });
}

void sparkhvd_engine_after_fork(sparkhvd_engine* engine) {
  if (engine != nullptr) engine->engine->after_fork();
}

void sparkhvd_engine_destroy(sparkhvd_engine* engine) {
  std::unique_ptr<sparkhvd_engine> owner(engine);
  // In a forked child the thread to join and the locks to take are another process's: nothing can
  // be undone.
  if (owner && owner->engine->is_forked_copy()) (void)owner.release();
}

int32_t sparkhvd_submit(sparkhvd_engine* engine, const sparkhvd_request* request,
                        sparkhvd_work** work, char* error, size_t error_size) {
  return guard({error, error_size}, [&] {
    check_handle(engine, "engine");
    check_handle(static_cast<const void*>(work), "place for the work");
    if (engine->engine->is_forked_copy()) throw sparkhvd::created_before_fork();
    auto operation = read_request(request, *engine->engine);
    auto handle = std::make_unique<sparkhvd_work>(sparkhvd_work{engine->engine.get(), operation});
    engine->engine->submit(std::move(operation));
    *work = handle.release();
    return SPARKHVD_OK;
  });
}

int32_t sparkhvd_poll(sparkhvd_work* work, char* error, size_t error_size) {
  return guard({error, error_size}, [&] {
    check_handle(work, "work");
    return status_of(*work->operation, {error, error_size});
  });
}

int32_t sparkhvd_wait(sparkhvd_work* work, uint32_t timeout_ms, char* error, size_t error_size) {
  return guard({error, error_size}, [&] {
    check_handle(work, "work");
    if (!work->operation->is_finished()) {
      if (work->engine->is_forked_copy()) throw sparkhvd::created_before_fork();
      work->engine->wait(*work->operation,
                         sparkhvd::Clock::now() + std::chrono::milliseconds(timeout_ms));
    }
    return status_of(*work->operation, {error, error_size});
  });
}

int32_t sparkhvd_work_output(sparkhvd_work* work, sparkhvd_output* output, char* error,
                             size_t error_size) {
  return guard({error, error_size}, [&] {
    check_handle(work, "work");
    const auto size = read_struct(output, sparkhvd_output{}, "output").struct_size;
    const auto& operation = *work->operation;
    const std::int32_t status = status_of(operation, {error, error_size});
    if (status == SPARKHVD_PENDING) {
      invalid(operation.label() + " is not finished: wait before asking for its output.");
    }
    if (status != SPARKHVD_OK) return status;
    if (operation.descriptor.collective != sparkhvd::Collective::kAllgather) {
      invalid(operation.label() + " has no output of its own: it wrote to the caller's tensors.");
    }
    sparkhvd_output result{};
    result.struct_size = size;
    result.num_rows = static_cast<std::uint32_t>(operation.rows.size());
    result.data = operation.output.get();
    result.num_bytes = operation.output_bytes;
    result.rows = operation.rows.data();
    std::memcpy(output, &result, std::min<std::size_t>(size, sizeof(result)));
    return SPARKHVD_OK;
  });
}

void sparkhvd_work_release(sparkhvd_work* work) {
  const std::unique_ptr<sparkhvd_work> owner(work);
}

}  // extern "C"
