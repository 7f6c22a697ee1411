// Controls of the stand-ins. libfake_cuda.so exports them for C++ tests and for ctypes, and README.md describes them.
// `function` is the exported name of a function ("cuEventQuery", "ncclAllReduce"). "ncclAllReduce@stream" is the same
// collective at the time when the stream runs it.
#pragma once

#include <cstdint>

extern "C" {

/// Makes the `nth` call from now (1 is the next) only return `result`.
void fake_cuda_fail(const char* function, int nth, int result);
/// Makes the `nth` call from now sleep before it does its work.
void fake_cuda_delay_us(const char* function, int nth, int us);
/// Makes the `nth` call from now hang until fake_cuda_reset, or on a stream until an abort.
void fake_cuda_hang(const char* function, int nth);
/// Makes the `nth` cuStreamWaitEvent from now return success without a wait.
void fake_cuda_skip_wait(int nth);
/// Delays every item of every stream by this time, so that a missing dependency causes wrong data.
void fake_cuda_stream_delay_us(int us);
/// Makes streams drop their items as if they were done at once, and turns off counts and rules. Benchmarks use it to
/// measure the host's work.
void fake_cuda_idle(int is_idle);
/// Number of calls since the start or the last reset.
int fake_cuda_count(const char* function);
/// Forgets rules, counts and misuse, and ends hangs. Streams and memory stay.
void fake_cuda_reset(void);
/// Text of the first misuse (a mistake that causes random errors on a GPU), or an empty text.
const char* fake_cuda_misuse(void);
/// Begins and ends the capture of a graph in global mode by the calling thread. Launches meanwhile are dropped. The end
/// returns 0, or 901 if the capture was invalidated.
int fake_cuda_begin_capture(std::uint64_t stream);
int fake_cuda_end_capture(std::uint64_t stream);

}  // extern "C"
