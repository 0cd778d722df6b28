// Horovod's collectives on host memory as a C interface, for callers that know neither C++ nor each other's frameworks.
#ifndef HVD_TRAIN_ENGINE_H
#define HVD_TRAIN_ENGINE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { ENGINE_ALLREDUCE, ENGINE_ALLGATHER, ENGINE_BROADCAST, ENGINE_ALLTOALL, ENGINE_REDUCESCATTER };

// Called from Horovod's background thread when a transfer has ended. status: 0 if it succeeded, else see reason.
typedef void (*EngineDone)(void* argument, int status, const char* reason);

// Returns memory for output number index, whose shape is known only now, or null if there is none.
typedef void* (*EngineAllocate)(void* argument, int index, int dims, const int64_t* shape);

// One collective. All arrays belong to the caller and are only read by engine_start, except the memory that inputs and
// outputs point to: it must stay until the transfer has ended.
typedef struct {
  int collective;
  int count; // tensors; more than one (not with broadcast and alltoall) are exchanged as a group
  const char* const* names;
  void* const* inputs;
  void* const* outputs;  // null: the engine allocates them (allgather, alltoall)
  const int* dims;       // of each tensor
  const int64_t* shapes; // of all tensors, one after another
  int dtype;             // horovod::common::DataType
  int reduce_op;         // horovod::common::ReduceOp
  int root;              // broadcast: a rank of the world
  double prescale, postscale;
  int process_set;
  const int32_t* splits; // alltoall: rows to each rank
  int split_count;
  EngineAllocate allocate; // null: outputs without memory are allocated by the engine
  EngineDone done;         // null: the caller waits
  void* argument;          // of allocate and done
} EngineCall;

// Starts a collective. Returns null if it could not (see engine_error). Otherwise the caller frees the transfer once
// it has ended; with done, it may free it at once.
void* engine_start(const EngineCall* call);

// Returns 1 if the transfer has ended, else 0.
int engine_ended(void* transfer);

// Waits for the end of a transfer: yields for ``yield_seconds``, then sleeps. Returns 0 or an error's status.
int engine_wait(void* transfer, double yield_seconds);

// Returns the number of dimensions of an output that the engine allocated, its memory and its shape (up to ``room``
// numbers), or -1 if there is none. The memory lives as long as the transfer.
int engine_output(void* transfer, int index, void** data, int64_t* shape, int room);

void engine_free(void* transfer);

// Returns the text of the calling thread's last error.
const char* engine_error(void);

#ifdef __cplusplus
}
#endif
#endif
