// Controls of the stand-ins, exported by libfake_cuda.so for C++ tests and for ctypes. README.md
// says what each does; a function is named as it is exported ("cuEventQuery", "ncclAllReduce"), and
// "ncclAllReduce@stream" is the same collective when its turn in the stream comes.
#pragma once

#include <cstdint>

extern "C" {

/// The `nth` call from now (1 is the next) answers `result` and does nothing else.
void fake_cuda_fail(const char* function, int nth, int result);
/// The `nth` call from now sleeps before it does its work.
void fake_cuda_delay_us(const char* function, int nth, int us);
/// The `nth` call from now does not return before fake_cuda_reset (on a stream: or abort).
void fake_cuda_hang(const char* function, int nth);
/// The `nth` cuStreamWaitEvent from now answers success and waits for nothing.
void fake_cuda_skip_wait(int nth);
/// Every item of every stream starts that much late, so that a missing dependency shows.
void fake_cuda_stream_delay_us(int us);
/// From now on streams drop what they are given, as if it were done at once, and no call is counted or
/// comes under a rule: for measuring the host.
void fake_cuda_idle(int is_idle);
/// Calls since the start or the last reset.
int fake_cuda_count(const char* function);
/// Forgets rules, counts and misuse, and lets go what hangs. Streams and memory stay.
void fake_cuda_reset(void);
/// What was done that a GPU would punish at random: the first of it, or an empty text.
const char* fake_cuda_misuse(void);
/// Capture of a graph in global mode by the calling thread; what is launched meanwhile is dropped.
/// Ending answers 0, or 901 where the capture was spoilt.
int fake_cuda_begin_capture(std::uint64_t stream);
int fake_cuda_end_capture(std::uint64_t stream);

}  // extern "C"
