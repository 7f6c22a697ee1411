// The C interface: every function converts the caller's structures, makes one call into the engine, and turns
// exceptions into a status.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <new>
#include <span>
#include <string>

#include "crc32.h"
#include "engine/engine.h"
#include "engine/graceful_close.h"
#include "error.h"
#include "kernels/kernels.h"
#include "operation.h"
#include "options.h"
#include "request.h"
#include "sparkhvd.h"
#include "text.h"

using sparkhvd::Error;

struct sparkhvd_engine {
  std::unique_ptr<sparkhvd::Engine> engine;
};

struct sparkhvd_work {
  sparkhvd::Engine* engine;
  std::shared_ptr<sparkhvd::Operation> operation;
  sparkhvd::Rank rank;
};

struct sparkhvd_buffer {
  std::shared_ptr<sparkhvd::Segment> segment;
  sparkhvd::Rank rank;
  std::shared_ptr<sparkhvd::nccl::DeviceBuffer> device;  // set in place of `segment` on a device
};

namespace {

struct Message {
  char* text;
  std::size_t size;
};

void write(Message message, const char* text) noexcept {
  if (message.text == nullptr || message.size == 0) return;
  std::size_t length = std::min(std::strlen(text), message.size - 1);
  // Steps back over continuation bytes of UTF-8, so that the cut is never inside a character.
  while (length > 0 && length < std::strlen(text) && (text[length] & 0xC0) == 0x80) --length;
  std::memcpy(message.text, text, length);
  message.text[length] = '\0';
}

/// Runs `body` and turns its exceptions into a status and a message.
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

using sparkhvd::invalid;
using sparkhvd::read_struct;

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

void sparkhvd_crc32_blocks(const void* data, uint64_t size, uint64_t block_bytes, uint64_t at,
                           uint32_t* crcs) {
  std::span<const std::byte> left(static_cast<const std::byte*>(data), size);
  for (uint64_t room = block_bytes - at; !left.empty(); room = block_bytes) {
    const std::size_t count = std::min<std::size_t>(room, left.size());
    *crcs = sparkhvd::crc32(*crcs, left.first(count));
    ++crcs;
    left = left.subspan(count);
  }
}

int32_t sparkhvd_engine_create(const sparkhvd_engine_options* options, sparkhvd_engine** engine,
                               char* error, size_t error_size) {
  return guard({error, error_size}, [&] {
    auto read = sparkhvd::read_options(options);
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

void sparkhvd_finish(void) {
  guard({nullptr, 0}, [] {
    sparkhvd::GracefulClose::finish();
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
  // A forked child has no progress thread, and its locks may be held: the destructor would block, so the memory leaks.
  if (owner && owner->engine->is_forked_copy()) (void)owner.release();
}

uint32_t sparkhvd_engine_lost(sparkhvd_engine* engine, sparkhvd_loss* losses, uint32_t max_losses) {
  std::uint32_t count = 0;
  guard({nullptr, 0}, [&] {
    check_handle(engine, "engine");
    if (engine->engine->is_forked_copy()) throw sparkhvd::created_before_fork();
    for (const auto& loss : engine->engine->losses()) {
      if (count < max_losses) {
        losses[count] = {sparkhvd::index_of(loss.rank), static_cast<std::int32_t>(loss.kind)};
      }
      ++count;
    }
    return SPARKHVD_OK;
  });
  return count;
}

size_t sparkhvd_engine_counters(sparkhvd_engine* engine, char* buffer, size_t size) {
  std::size_t length = 0;
  guard({nullptr, 0}, [&] {
    check_handle(engine, "engine");
    if (engine->engine->is_forked_copy()) throw sparkhvd::created_before_fork();
    const std::string text = engine->engine->recorder().json();
    write({buffer, size}, text.c_str());
    length = text.size();
    return SPARKHVD_OK;
  });
  return length;
}

int32_t sparkhvd_timeline_start(sparkhvd_engine* engine, const char* path, int32_t mark_cycles,
                                char* error, size_t error_size) {
  return guard({error, error_size}, [&] {
    check_handle(engine, "engine");
    check_handle(path, "path");
    engine->engine->check();
    engine->engine->recorder().start_timeline(path, mark_cycles != 0);
    return SPARKHVD_OK;
  });
}

int32_t sparkhvd_timeline_stop(sparkhvd_engine* engine, char* error, size_t error_size) {
  return guard({error, error_size}, [&] {
    check_handle(engine, "engine");
    if (engine->engine->is_forked_copy()) throw sparkhvd::created_before_fork();
    engine->engine->recorder().stop_timeline();
    return SPARKHVD_OK;
  });
}

int32_t sparkhvd_device_open(sparkhvd_engine* engine, const sparkhvd_device_options* options,
                             char* error, size_t error_size) {
  return guard({error, error_size}, [&] {
    check_handle(engine, "engine");
    engine->engine->open_device(sparkhvd::read_device_options(options));
    return SPARKHVD_OK;
  });
}

int32_t sparkhvd_submit(sparkhvd_engine* engine, const sparkhvd_request* request,
                        sparkhvd_work** work, char* error, size_t error_size) {
  return guard({error, error_size}, [&] {
    check_handle(engine, "engine");
    check_handle(static_cast<const void*>(work), "place for the work");
    if (engine->engine->is_forked_copy()) throw sparkhvd::created_before_fork();
    auto operation = sparkhvd::read_request(request, *engine->engine);
    auto handle = std::make_unique<sparkhvd_work>(
        sparkhvd_work{engine->engine.get(), operation, engine->engine->rank()});
    engine->engine->submit(std::move(operation));
    *work = handle.release();
    return SPARKHVD_OK;
  });
}

int32_t sparkhvd_run(sparkhvd_engine* engine, const sparkhvd_request* request, uint32_t timeout_ms,
                     sparkhvd_work** work, char* error, size_t error_size) {
  return guard({error, error_size}, [&] {
    check_handle(engine, "engine");
    check_handle(static_cast<const void*>(work), "place for the work");
    *work = nullptr;
    if (engine->engine->is_forked_copy()) throw sparkhvd::created_before_fork();
    auto operation = sparkhvd::read_request(request, *engine->engine);
    engine->engine->run(operation, sparkhvd::Clock::now() + std::chrono::milliseconds(timeout_ms));
    const std::int32_t status = status_of(*operation, {error, error_size});
    if (status == SPARKHVD_PENDING) {
      *work = new sparkhvd_work{engine->engine.get(), operation, engine->engine->rank()};
    }
    return status;
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

int32_t sparkhvd_wait_stream(sparkhvd_work* work, uint64_t stream, uint32_t timeout_ms, char* error,
                             size_t error_size) {
  return guard({error, error_size}, [&] {
    check_handle(work, "work");
    auto& operation = *work->operation;
    if (!operation.on_device) {
      invalid(operation.label() + " is not an operation on a device: wait for it.");
    }
    if (work->engine->is_forked_copy()) throw sparkhvd::created_before_fork();
    work->engine->wait_launched(operation,
                                sparkhvd::Clock::now() + std::chrono::milliseconds(timeout_ms));
    const std::int32_t status = status_of(operation, {error, error_size});
    if (status > SPARKHVD_PENDING) return status;
    return operation.on_device->let_wait(stream, operation.label()) ? SPARKHVD_OK : status;
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
    if (operation.rows.empty()) invalid(operation.label() + " has no output from the engine.");
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

int32_t sparkhvd_work_buffer(sparkhvd_work* work, sparkhvd_buffer** buffer, char* error,
                             size_t error_size) {
  return guard({error, error_size}, [&] {
    check_handle(work, "work");
    check_handle(static_cast<const void*>(buffer), "place for the buffer");
    const auto& operation = *work->operation;
    const std::int32_t status = status_of(operation, {error, error_size});
    if (status == SPARKHVD_PENDING) invalid(operation.label() + " is not finished: wait first.");
    if (status != SPARKHVD_OK) return status;
    if (operation.descriptor.collective != sparkhvd::Collective::kRegister) {
      invalid(operation.label() + " registered no memory.");
    }
    if (operation.on_device) {
      *buffer = new sparkhvd_buffer{nullptr, work->rank, operation.on_device->buffer};
      return SPARKHVD_OK;
    }
    if (!operation.segment) {
      throw Error(SPARKHVD_UNSUPPORTED,
                  operation.label() +
                      ": a rank of this host could not make or map the memory "
                      "(it printed the reason). Use ordinary memory.");
    }
    *buffer = new sparkhvd_buffer{operation.segment, work->rank, nullptr};
    return SPARKHVD_OK;
  });
}

void* sparkhvd_buffer_data(sparkhvd_buffer* buffer) {
  if (buffer == nullptr) return nullptr;
  return buffer->device ? buffer->device->memory().data() : buffer->segment->data(buffer->rank);
}

uint64_t sparkhvd_buffer_bytes(sparkhvd_buffer* buffer) {
  if (buffer == nullptr) return 0;
  return buffer->device ? buffer->device->memory().bytes() : buffer->segment->bytes();
}

int32_t sparkhvd_buffer_is_shared(sparkhvd_buffer* buffer) {
  if (buffer == nullptr || buffer->device) return 0;
  return buffer->segment->num_pieces() > 1 || buffer->segment->is_one_piece() ? 1 : 0;
}

int32_t sparkhvd_buffer_device(sparkhvd_buffer* buffer) {
  return buffer != nullptr && buffer->device ? buffer->device->memory().ordinal()
                                             : SPARKHVD_DEVICE_CPU;
}

void sparkhvd_buffer_release(sparkhvd_buffer* buffer) {
  const std::unique_ptr<sparkhvd_buffer> owner(buffer);
}

int32_t sparkhvd_work_is_left_to_device(sparkhvd_work* work) {
  const sparkhvd::Operation& operation = *work->operation;
  if (!operation.on_device || !operation.is_finished()) return 0;
  return operation.on_device->is_left_to_device ? 1 : 0;
}

void sparkhvd_work_release(sparkhvd_work* work) {
  const std::unique_ptr<sparkhvd_work> owner(work);
}

}  // extern "C"
