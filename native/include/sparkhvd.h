/* sparkhvd: the only interface of the compiled collective engine.
 *
 * Plain C, so that one shared library serves every Python, every torch and no torch at all. Rules that hold
 * for every function here:
 *   - no function throws, exits the process or touches the environment;
 *   - handles are opaque; several engines may live in one process (ranks are threads in the tests);
 *   - a function that can fail returns a status and, unless it is SPARKHVD_OK or SPARKHVD_PENDING, writes one
 *     NUL-terminated sentence (UTF-8, truncated to fit) into `error`, which may be NULL when `error_size` is 0;
 *   - structures begin with `struct_size`, set by the caller to sizeof; fields are only ever appended, and a
 *     field that a shorter caller does not know has the documented default;
 *   - only sparkhvd_run, sparkhvd_wait, sparkhvd_wait_stream, sparkhvd_engine_create,
 *     sparkhvd_engine_shutdown, sparkhvd_finish, sparkhvd_device_open, sparkhvd_timeline_start,
 *     sparkhvd_timeline_stop and sparkhvd_crc32_blocks may block. The timeline's functions block on the disk only,
 *     sparkhvd_crc32_blocks only while it computes.
 */
#ifndef SPARKHVD_H_
#define SPARKHVD_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SPARKHVD_API __attribute__((visibility("default")))

/* Raised by one whenever this header changes incompatibly for older callers. */
#define SPARKHVD_ABI_VERSION 12
/* Raised by one whenever bytes between ranks change; part of the handshake. */
#define SPARKHVD_WIRE_VERSION 15

/* Status of a call or of a finished operation. */
#define SPARKHVD_OK 0
#define SPARKHVD_PENDING 1          /* not finished yet (poll, wait) */
#define SPARKHVD_INVALID_ARGUMENT 2 /* this rank's call is wrong; nothing was submitted */
#define SPARKHVD_MISMATCH 3         /* ranks disagree, reported on each; the engine stays usable */
#define SPARKHVD_TIMEOUT 4          /* a rank was too late; the message names it */
#define SPARKHVD_PEER_LOST 5   /* a rank's process or connection is gone; the engine has failed */
#define SPARKHVD_SHUT_DOWN 6   /* the engine was shut down, here or by the peer named */
#define SPARKHVD_UNSUPPORTED 7 /* this build or this machine lacks the feature */
#define SPARKHVD_INTERNAL 8    /* a defect of sparkhvd */
#define SPARKHVD_NO_MEMORY 9   /* a rank has no memory for its result; the engine stays usable */

/* Element types. 16-bit floats are accumulated in float32. */
#define SPARKHVD_UINT8 0
#define SPARKHVD_INT8 1
#define SPARKHVD_UINT16 2
#define SPARKHVD_INT16 3
#define SPARKHVD_UINT32 4
#define SPARKHVD_INT32 5
#define SPARKHVD_UINT64 6
#define SPARKHVD_INT64 7
#define SPARKHVD_FLOAT16 8
#define SPARKHVD_BFLOAT16 9
#define SPARKHVD_FLOAT32 10
#define SPARKHVD_FLOAT64 11
#define SPARKHVD_BOOL 12 /* one byte, 0 or 1; Sum and Max are "or", Product and Min are "and" */

/* Reductions. Horovod's reductions have Horovod's numbers. */
#define SPARKHVD_AVERAGE 0 /* the sum divided once by the size of the process set */
#define SPARKHVD_SUM 1
#define SPARKHVD_ADASUM 2
#define SPARKHVD_MIN 3
#define SPARKHVD_MAX 4
#define SPARKHVD_PRODUCT 5
#define SPARKHVD_BIT_AND 6 /* the three bit operations reduce integers and bool, on the CPU */
#define SPARKHVD_BIT_OR 7
#define SPARKHVD_BIT_XOR 8

/* Collectives. */
#define SPARKHVD_ALLREDUCE 0
#define SPARKHVD_ALLGATHER 1
#define SPARKHVD_BROADCAST 2
#define SPARKHVD_BARRIER 3
#define SPARKHVD_ALLTOALL 4
#define SPARKHVD_REDUCESCATTER 5
#define SPARKHVD_JOIN 6
/* Collectives on the engine itself: on process set 0, by all ranks. */
#define SPARKHVD_ADD_PROCESS_SET 7    /* `splits`: its ranks, ascending; output rows[0]: its id */
#define SPARKHVD_REMOVE_PROCESS_SET 8 /* `splits`: its id */
/* On any process set, by all of its ranks: */
/* `splits`: the bytes; sparkhvd_work_buffer returns the memory. If a second number is 1, each host allocates one piece
 * for all of its ranks; if a host cannot share it, no rank of the set gets shared memory. */
#define SPARKHVD_REGISTER 9
#define SPARKHVD_CONFIGURE 10 /* `splits`: SPARKHVD_NUM_KNOBS values, 0 = unchanged */
/* The inverse of reducescatter, in place: every rank has its rows of every tensor, and receives the rows of the other
 * ranks. */
#define SPARKHVD_ALLGATHER_INTO 11
/* Collectives with a root: */
#define SPARKHVD_REDUCE 12
/* Tensors may differ in their first dimension; only the root has a result. */
#define SPARKHVD_GATHER 13
/* `splits`, on the root: rows for each rank of the set (NULL = equal parts). The other ranks pass a tensor of 0 rows.
 * */
#define SPARKHVD_SCATTER 14
/* Messages from one rank of the process set to another. `root_rank` is the other rank; a receive with -1 accepts any
 * rank. `splits` has the tag; a second number of 1 in a receive accepts shorter messages too. The engine matches
 * messages by rank and tag, in the order of submission. Names need only be unique on this rank. */
#define SPARKHVD_SEND 15
#define SPARKHVD_RECEIVE 16
#define SPARKHVD_NUM_COLLECTIVES 17

/* Indices into `splits` of SPARKHVD_CONFIGURE. The first two knobs never change a bit of a result. */
#define SPARKHVD_KNOB_CHUNK_BYTES 0  /* bytes of a pipeline step in a slot; at most slot_bytes */
#define SPARKHVD_KNOB_STREAMS 1      /* connections used per pair; at most options.streams */
#define SPARKHVD_KNOB_DIRECT_RANKS 2 /* more hosts than this form a ring; only for tests */
#define SPARKHVD_NUM_KNOBS 3

/* Instruction sets of the reduce kernels. All give the same bits. */
#define SPARKHVD_ISA_AUTO 0
#define SPARKHVD_ISA_SCALAR 1
#define SPARKHVD_ISA_AVX2 2
#define SPARKHVD_ISA_AVX512 3
#define SPARKHVD_ISA_NEON 4

#define SPARKHVD_DEVICE_CPU (-1)

typedef struct sparkhvd_engine sparkhvd_engine;
typedef struct sparkhvd_work sparkhvd_work;
typedef struct sparkhvd_buffer sparkhvd_buffer;

/* Arguments of an engine; read during sparkhvd_engine_create only. */
typedef struct sparkhvd_engine_options {
  uint32_t struct_size;
  int32_t rank;
  int32_t size;
  /* [size] index of the host of each rank: ranks with the same index can map each other's memory. */
  const int32_t* hosts;
  /* [size] one connected, authenticated stream socket per peer for control frames, -1 at `rank`. AF_UNIX between
   * ranks of one host (descriptors are passed over it), TCP otherwise. The engine owns them from the call on, also when
   * the call fails. */
  const int32_t* sockets;
  int32_t isa;             /* SPARKHVD_ISA_*; SPARKHVD_UNSUPPORTED if the CPU lacks it */
  int32_t spin_us;         /* time that a waiter spins before it sleeps */
  double stall_warning_s;  /* wait for a late rank before a warning on stderr; 0 = no warning */
  double stall_shutdown_s; /* wait for a late rank before TIMEOUT; 0 = no limit */
  double host_loss_s; /* a host is lost if its kernel answers nothing for this time; at least 3 */
  double connect_timeout_s;   /* longest wait for the peers inside sparkhvd_engine_create */
  uint64_t slot_bytes;        /* staging memory of one pipeline slot in shared memory */
  uint32_t slots;             /* pipeline slots per rank, at least 2 */
  uint32_t use_shared_memory; /* 0: sockets only, also inside a host */
  /* Connections per pair of ranks that tensors are spread over, from 1 to 64. */
  uint32_t streams;
  uint32_t reserved; /* 0 */
  /* [streams * size] the sockets of these connections, stream after stream, each in the form of `sockets`. */
  const int32_t* stream_sockets;
  /* `stack_signal`: a signal with a handler that writes the stacks of this process to a pipe (Python's faulthandler);
   * 0 = no stacks. `stack_pipe`: the reading end of the pipe; both ends are non-blocking, and the engine copies the
   * descriptor. When a coordinator waits for this rank, a thread of the engine raises the signal on itself, unless
   * another handler has been installed since. */
  int32_t stack_signal;
  int32_t stack_pipe;
} sparkhvd_engine_options;

/* A rank's GPU, and the paths of its libraries. */
typedef struct sparkhvd_device_options {
  uint32_t struct_size;
  int32_t device;           /* the CUDA driver's ordinal of the device in this process */
  const char* cuda_library; /* NULL: libcuda.so.1 */
  /* The only library to try; NULL: the copy that the process has loaded, then the candidates, then
   * libnccl.so.2. */
  const char* nccl_library;
  const char* const* nccl_candidates; /* [num_nccl_candidates] paths, tried in order */
  uint32_t num_nccl_candidates;
  uint32_t reserved; /* 0 */
} sparkhvd_device_options;

/* One tensor of a request: contiguous, row-major. */
typedef struct sparkhvd_tensor {
  const void* input; /* read until the operation is finished */
  void*
      output; /* written; may equal `input` if both have the same size. reducescatter: memory for this rank's rows,
                   which may be these rows in `input` (of d rows and n ranks, each rank gets d / n, and the first d % n
                   ranks get an additional row). allgather_into: must equal `input`. reduce: only on the root.
                   allgather, alltoall, gather, scatter: NULL = the engine allocates the result (see sparkhvd_output);
                   required on a device */
  const int64_t* shape; /* [num_dims], copied at submission */
  uint32_t num_dims;
  uint32_t reserved; /* 0 */
  uint64_t
      output_bytes; /* allgather, alltoall, gather, scatter on the CPU: bytes at `output`; at least the result's */
} sparkhvd_tensor;

/* One operation, submitted asynchronously and matched across ranks by (process_set, name). */
typedef struct sparkhvd_request {
  uint32_t struct_size;
  int32_t collective;  /* SPARKHVD_ALLREDUCE, ... */
  const char* name;    /* unique among this rank's operations in flight on the process set; on a
                          device it is free again when sparkhvd_wait_stream can return */
  int32_t process_set; /* 0 = all ranks; this rank must be in it */
  int32_t dtype;       /* SPARKHVD_FLOAT32, ... */
  int32_t reduce_op;   /* SPARKHVD_SUM, ...; allreduce, reducescatter and reduce */
  int32_t root_rank;   /* broadcast, reduce, gather, scatter: global rank */
  double prescale;     /* reductions: factor of every input, in the accumulation type */
  double postscale;    /* reductions: factor of the result; an average of floating-point
                       numbers is the sum divided once, by size / postscale */
  /* SPARKHVD_DEVICE_CPU, or the opened device with the tensors, where NCCL runs the
   * operation. Then reductions are Sum, Min, Max or Product without scales and not of 16-bit integers;
   * allgather and alltoall need an `output` with room for the rows of all ranks. There is no barrier, join or
   * process set on a device. REGISTER allocates memory of the device. */
  int32_t device;
  uint32_t
      num_tensors; /* allreduce: any number, reduced as one ("gather list"); allgather, reducescatter,
                      allgather_into, reduce: at least 1; broadcast, alltoall, gather, scatter: 1; others: 0 */
  const sparkhvd_tensor* tensors; /* [num_tensors], copied at submission */
  uint64_t stream; /* on a device: the CUstream whose pending work the operation waits for */
  const int64_t*
      splits; /* allreduce, allgather(_into), reducescatter: NULL, or one number that must be equal on all ranks (the
                 digest of a group of several operations). alltoall, and scatter on its root: [num_splits] rows for
                 each rank of the set; NULL = equal parts. Other collectives: see the definition of the collective */
  uint32_t num_splits;
  uint32_t reserved; /* 0 */
  double timeout_s;  /* longest wait for the slowest rank; negative = stall_shutdown_s */
} sparkhvd_request;

/* Result that the engine has allocated for a finished operation. Valid until sparkhvd_work_release. */
typedef struct sparkhvd_output {
  uint32_t struct_size;
  uint32_t num_rows; /* length of `rows` */
  void* data;        /* row-major, ordered by rank; NULL if the caller gave the memory */
  uint64_t num_bytes;
  /* [num_rows] allgather, gather: first dimensions, [tensor][rank of the set] (`data` has tensor after tensor);
   * scatter: this rank's rows; receive: sender, tag, bytes; alltoall: rows from each rank of the set; join: the rank
   * that joined last; ADD_PROCESS_SET: the id. */
  const int64_t* rows;
} sparkhvd_output;

SPARKHVD_API uint32_t sparkhvd_abi_version(void);
SPARKHVD_API uint32_t sparkhvd_wire_version(void);
/* 1 when the running CPU has the instruction set and this build has its kernels, else 0. */
SPARKHVD_API int32_t sparkhvd_isa_available(int32_t isa);

/* Continues the CRC-32 (the algorithm of zlib) of each block of a file over the next `size` bytes. `at` is the offset
 * of the first byte in its block, below `block_bytes`. `crcs` has the CRC of each block so far, 0 for a new block. Its
 * length is (at + size + block_bytes - 1) / block_bytes. */
SPARKHVD_API void sparkhvd_crc32_blocks(const void* data, uint64_t size, uint64_t block_bytes,
                                        uint64_t at, uint32_t* crcs);

/* Starts an engine: maps the memory of the host's ranks and starts the progress thread. It returns when every rank has
 * called it, or with TIMEOUT or PEER_LOST and the missing rank in the message. */
SPARKHVD_API int32_t sparkhvd_engine_create(const sparkhvd_engine_options* options,
                                            sparkhvd_engine** engine, char* error,
                                            size_t error_size);
/* Closes gracefully and stops the progress thread. Operations in flight finish with SHUT_DOWN on every rank; the
 * message on the other ranks names this rank. Idempotent. The handle stays valid until sparkhvd_engine_destroy. If a
 * peer does not read at the moment, the engine tries to send the remaining bytes for a second: see sparkhvd_finish. */
SPARKHVD_API int32_t sparkhvd_engine_shutdown(sparkhvd_engine* engine, char* error,
                                              size_t error_size);
/* Waits at most a second, until the last frames of all engines that were shut down have reached their peers' hosts.
 * Call it before the process ends. */
SPARKHVD_API void sparkhvd_finish(void);
/* Fails every operation here and on the peers, with `reason` in their messages. Never blocks. */
SPARKHVD_API void sparkhvd_engine_abort(sparkhvd_engine* engine, const char* reason);
/* OK while the engine is usable; otherwise the status and message of its failure. */
SPARKHVD_API int32_t sparkhvd_engine_status(sparkhvd_engine* engine, char* error,
                                            size_t error_size);
/* In a forked child: closes the child's copies of the descriptors without notifying the peers. Only
 * sparkhvd_engine_status (SHUT_DOWN, "created before fork") may be called on the handle afterwards. */
SPARKHVD_API void sparkhvd_engine_after_fork(sparkhvd_engine* engine);
/* Shuts the engine down if necessary, and frees it. No wait may be running. Works stay valid until they are released:
 * their operations have finished, so poll, wait, work_output and work_release keep working. */
SPARKHVD_API void sparkhvd_engine_destroy(sparkhvd_engine* engine);

/* How a rank was lost. DEAD: its process has ended. SILENT: its process may live, but it does not answer, has stopped
 * in the middle of an operation, or its connection broke. LEFT: it has left gracefully. */
#define SPARKHVD_DEAD 1
#define SPARKHVD_SILENT 2
#define SPARKHVD_LEFT 3
typedef struct sparkhvd_loss {
  int32_t rank;
  int32_t kind;
} sparkhvd_loss;
/* Lost ranks that this rank knows of, ascending: the ranks that made the engine fail, and the ranks that have left.
 * Writes at most `max_losses` of them and returns their number; 0 in a forked child. Any thread, at any time until
 * sparkhvd_engine_destroy. */
SPARKHVD_API uint32_t sparkhvd_engine_lost(sparkhvd_engine* engine, sparkhvd_loss* losses,
                                           uint32_t max_losses);

/* Writes the engine's counters since its start into `buffer`: a JSON object (docs/monitoring.md), NUL-terminated and
 * cut to fit. Returns the length of the whole text without NUL; 0 in a forked child. Any thread may call it at any time
 * until sparkhvd_engine_destroy. */
SPARKHVD_API size_t sparkhvd_engine_counters(sparkhvd_engine* engine, char* buffer, size_t size);
/* Starts a timeline of this rank (Chrome's trace event format) and ends a running one. INVALID_ARGUMENT if the file
 * cannot be created. `mark_cycles`: also mark when a thread begins to drive. */
SPARKHVD_API int32_t sparkhvd_timeline_start(sparkhvd_engine* engine, const char* path,
                                             int32_t mark_cycles, char* error, size_t error_size);
/* Ends a running timeline. Waits for the disk, and returns when the file is complete. */
SPARKHVD_API int32_t sparkhvd_timeline_stop(sparkhvd_engine* engine, char* error,
                                            size_t error_size);

/* Opens this rank's device for operations. Has no effect if the same device is open. Not collective. UNSUPPORTED if a
 * library or the device is missing. */
SPARKHVD_API int32_t sparkhvd_device_open(sparkhvd_engine* engine,
                                          const sparkhvd_device_options* options, char* error,
                                          size_t error_size);

/* Submits one operation; never blocks on a peer. On OK, *work must be released. */
SPARKHVD_API int32_t sparkhvd_submit(sparkhvd_engine* engine, const sparkhvd_request* request,
                                     sparkhvd_work** work, char* error, size_t error_size);
/* Submits and drives until the operation is finished or `timeout_ms` is over. PENDING: wait for *work and release it as
 * after sparkhvd_submit. Any other status: *work is NULL; the operation has finished with that status, or was not
 * submitted. */
SPARKHVD_API int32_t sparkhvd_run(sparkhvd_engine* engine, const sparkhvd_request* request,
                                  uint32_t timeout_ms, sparkhvd_work** work, char* error,
                                  size_t error_size);
/* PENDING, or the status of the finished operation. It does not drive the engine. */
SPARKHVD_API int32_t sparkhvd_poll(sparkhvd_work* work, char* error, size_t error_size);
/* Drives every operation of the engine until this one is finished or `timeout_ms` is over (PENDING). */
SPARKHVD_API int32_t sparkhvd_wait(sparkhvd_work* work, uint32_t timeout_ms, char* error,
                                   size_t error_size);
/* Drives until the operation is launched on the device, or has ended, or `timeout_ms` is over (PENDING); then makes
 * `stream` wait for its end. The caller's thread never waits for the device. */
SPARKHVD_API int32_t sparkhvd_wait_stream(sparkhvd_work* work, uint64_t stream, uint32_t timeout_ms,
                                          char* error, size_t error_size);
/* Result that the engine has allocated for a finished operation (see sparkhvd_output). */
SPARKHVD_API int32_t sparkhvd_work_output(sparkhvd_work* work, sparkhvd_output* output, char* error,
                                          size_t error_size);
/* The memory of a finished SPARKHVD_REGISTER: this rank's part, zeroed, aligned to a page. If all ranks pass in-place
 * tensors inside such memory, the engine reduces them there without a copy; this needs no flag. The memory stays valid
 * until it is released, also after the engine's end. On a host that could not share it (a warning gives the reason) it
 * is ordinary memory. */
SPARKHVD_API int32_t sparkhvd_work_buffer(sparkhvd_work* work, sparkhvd_buffer** buffer,
                                          char* error, size_t error_size);
SPARKHVD_API void* sparkhvd_buffer_data(sparkhvd_buffer* buffer);
SPARKHVD_API uint64_t sparkhvd_buffer_bytes(sparkhvd_buffer* buffer);
/* 1 if the ranks of this host share it. */
SPARKHVD_API int32_t sparkhvd_buffer_is_shared(sparkhvd_buffer* buffer);
/* The device of the memory; SPARKHVD_DEVICE_CPU for memory of the host. */
SPARKHVD_API int32_t sparkhvd_buffer_device(sparkhvd_buffer* buffer);
/* Unmaps the memory. No operation on it may be in flight. Any thread may call it, also after the engine's end. */
SPARKHVD_API void sparkhvd_buffer_release(sparkhvd_buffer* buffer);

/* 1 if the operation has ended at a deadline while its device hangs: the device may still use the tensors, so the
 * caller must never free them. Else 0. */
SPARKHVD_API int32_t sparkhvd_work_is_left_to_device(sparkhvd_work* work);
/* Releases the handle. An unfinished operation continues, and reads and writes its tensors until it has finished: the
 * caller must keep them alive. */
SPARKHVD_API void sparkhvd_work_release(sparkhvd_work* work);

#ifdef __cplusplus
}
#endif

#endif  // SPARKHVD_H_
