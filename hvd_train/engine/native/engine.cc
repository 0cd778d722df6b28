#include "engine.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "horovod/common/operations.h"
#include "horovod/common/ops/collective_operations.h"

namespace {

using namespace horovod::common;

thread_local std::string last_error;

int64_t ItemBytes(DataType type) {
  switch (type) {
  case HOROVOD_UINT8:
  case HOROVOD_INT8:
  case HOROVOD_BOOL:
    return 1;
  case HOROVOD_UINT16:
  case HOROVOD_INT16:
  case HOROVOD_FLOAT16:
    return 2;
  case HOROVOD_INT32:
  case HOROVOD_FLOAT32:
    return 4;
  default:
    return 8;
  }
}

// 64-byte aligned, as frameworks like it, and never null.
struct Memory {
  explicit Memory(int64_t bytes) {
    if (posix_memalign(&data, 64, static_cast<size_t>(bytes > 0 ? bytes : 1)) != 0) {
      throw std::bad_alloc();
    }
  }
  ~Memory() { std::free(data); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  void* data = nullptr;
};

class HostTensor : public Tensor {
public:
  // Memory of the caller.
  HostTensor(void* data, TensorShape shape, DataType type) : data_(data), shape_(std::move(shape)), type_(type) {}
  // Memory of its own.
  HostTensor(TensorShape shape, DataType type)
      : memory_(new Memory(shape.num_elements() * ItemBytes(type))), data_(memory_->data), shape_(std::move(shape)),
        type_(type) {}
  const DataType dtype() const override { return type_; }
  const TensorShape shape() const override { return shape_; }
  const void* data() const override { return data_; }
  int64_t size() const override { return shape_.num_elements() * ItemBytes(type_); }
  void* memory() const { return data_; }

private:
  std::unique_ptr<Memory> memory_;
  void* data_;
  TensorShape shape_;
  DataType type_;
};

class HostBuffer : public PersistentBuffer {
public:
  explicit HostBuffer(int64_t bytes) : memory_(bytes) {}
  const void* AccessData(std::shared_ptr<OpContext>) const override { return memory_.data; }

private:
  Memory memory_;
};

// What is under way, or has ended: shared by the caller and the callbacks.
struct Transfer {
  std::mutex mutex;
  std::condition_variable condition;
  int open;                      // tensors of the group that are still under way
  std::atomic_bool ended{false}; // for a look without the lock
  Status status;
  std::vector<std::shared_ptr<HostTensor>> outputs; // allocated here, by number
  EngineAllocate allocate;
  EngineDone done;
  void* argument;

  explicit Transfer(const EngineCall& call)
      : open(call.count), allocate(call.allocate), done(call.done), argument(call.argument) {}

  void End(const Status& result) {
    bool last;
    {
      std::lock_guard<std::mutex> guard(mutex);
      if (!result.ok()) {
        status = result;
      }
      last = --open == 0;
      ended = last;
      if (last) {
        condition.notify_all();
      }
    }
    if (last && done != nullptr) {
      if (!status.ok()) {
        NoteFailure();
      }
      done(argument, static_cast<int>(status.type()), status.reason().c_str());
    }
  }
};

class HostContext : public OpContext {
public:
  HostContext(std::shared_ptr<Transfer> transfer, DataType type) : transfer_(std::move(transfer)), type_(type) {}

  Status AllocatePersistent(int64_t size, std::shared_ptr<PersistentBuffer>* buffer) override {
    *buffer = std::make_shared<HostBuffer>(size);
    return Status::OK();
  }

  Status AllocateOutput(TensorShape shape, std::shared_ptr<Tensor>* tensor,
                        std::shared_ptr<ReadyEvent>* event) override {
    return AllocateOutput(0, std::move(shape), tensor, event);
  }

  Status AllocateOutput(int index, TensorShape shape, std::shared_ptr<Tensor>* tensor,
                        std::shared_ptr<ReadyEvent>*) override {
    // Output 1 of an alltoall: the rows received from each rank.
    DataType type = index == 0 ? type_ : HOROVOD_INT32;
    std::shared_ptr<HostTensor> output;
    if (transfer_->allocate == nullptr) {
      output = std::make_shared<HostTensor>(std::move(shape), type);
    } else {
      auto sizes = shape.to_vector();
      void* data = transfer_->allocate(transfer_->argument, index, shape.dims(), sizes.data());
      if (data == nullptr) {
        return Status::UnknownError("no memory for what was received");
      }
      output = std::make_shared<HostTensor>(data, std::move(shape), type);
    }
    std::lock_guard<std::mutex> guard(transfer_->mutex);
    if (transfer_->outputs.size() <= static_cast<size_t>(index)) {
      transfer_->outputs.resize(index + 1);
    }
    transfer_->outputs[index] = output;
    *tensor = output;
    return Status::OK();
  }

  Status AllocateZeros(int64_t count, DataType type, std::shared_ptr<Tensor>* tensor) override {
    auto zeros = std::make_shared<HostTensor>(TensorShape({count}), type);
    std::memset(zeros->memory(), 0, static_cast<size_t>(zeros->size()));
    *tensor = zeros;
    return Status::OK();
  }

  // Only a key of Horovod's fusion buffers, for which "none" has no value.
  Framework framework() const override { return Framework::PYTORCH; }

private:
  std::shared_ptr<Transfer> transfer_;
  DataType type_;
};

Status Enqueue(const EngineCall& call, const std::shared_ptr<Transfer>& transfer) {
  auto type = static_cast<DataType>(call.dtype);
  auto op = static_cast<ReduceOp>(call.reduce_op);
  std::vector<std::shared_ptr<OpContext>> contexts;
  std::vector<std::shared_ptr<Tensor>> inputs, outputs;
  std::vector<ReadyEventList> ready(call.count);
  std::vector<std::string> names(call.names, call.names + call.count);
  std::vector<StatusCallback> callbacks;
  const int64_t* sizes = call.shapes;
  for (int i = 0; i < call.count; ++i) {
    contexts.push_back(std::make_shared<HostContext>(transfer, type));
    TensorShape shape(std::vector<int64_t>(sizes, sizes + call.dims[i]));
    sizes += call.dims[i];
    inputs.push_back(std::make_shared<HostTensor>(call.inputs[i], shape, type));
    if (call.collective == ENGINE_REDUCESCATTER) {
      shape = ReducescatterOp::ComputeOutputShapeForRank(shape, horovod_process_set_rank(call.process_set),
                                                         horovod_process_set_size(call.process_set));
    }
    bool given = call.outputs != nullptr && call.outputs[i] != nullptr;
    outputs.push_back(given ? std::make_shared<HostTensor>(call.outputs[i], shape, type) : nullptr);
    callbacks.emplace_back([transfer](const Status& status) { transfer->End(status); });
  }
  switch (call.collective) {
  case ENGINE_ALLREDUCE:
    return EnqueueTensorAllreduces(contexts, inputs, outputs, ready, names, CPU_DEVICE_ID, callbacks, op,
                                   call.prescale, call.postscale, call.process_set);
  case ENGINE_ALLGATHER:
    return EnqueueTensorAllgathers(contexts, inputs, ready, names, CPU_DEVICE_ID, callbacks, call.process_set);
  case ENGINE_REDUCESCATTER:
    return EnqueueTensorReducescatters(contexts, inputs, outputs, ready, names, CPU_DEVICE_ID, callbacks, op,
                                       call.process_set, call.prescale, call.postscale);
  case ENGINE_BROADCAST:
    if (horovod_rank() == call.root) { // Horovod wants no output at the root
      if (outputs[0] != nullptr && call.outputs[0] != call.inputs[0]) {
        std::memcpy(call.outputs[0], call.inputs[0], static_cast<size_t>(inputs[0]->size()));
      }
      outputs[0] = nullptr;
    }
    return EnqueueTensorBroadcast(contexts[0], inputs[0], outputs[0], call.root, ready[0], names[0], CPU_DEVICE_ID,
                                  callbacks[0], call.process_set);
  case ENGINE_ALLTOALL: {
    auto splits = std::make_shared<HostTensor>(TensorShape({call.split_count}), HOROVOD_INT32);
    std::memcpy(splits->memory(), call.splits, sizeof(int32_t) * call.split_count);
    return EnqueueTensorAlltoall(contexts[0], inputs[0], splits, ready[0], names[0], CPU_DEVICE_ID, callbacks[0],
                                 call.process_set);
  }
  default:
    return Status::InvalidArgument("no such collective");
  }
}

std::shared_ptr<Transfer>& Of(void* transfer) { return *static_cast<std::shared_ptr<Transfer>*>(transfer); }

} // namespace

void* engine_start(const EngineCall* call) {
  try {
    auto transfer = std::make_shared<Transfer>(*call);
    Status status = Enqueue(*call, transfer);
    if (status.ok()) {
      return new std::shared_ptr<Transfer>(std::move(transfer));
    }
    last_error = status.reason();
  } catch (const std::exception& error) {
    last_error = error.what();
  }
  if (call->done != nullptr) {
    NoteFailure();
  }
  return nullptr;
}

int engine_ended(void* transfer) { return Of(transfer)->ended ? 1 : 0; }

int engine_wait(void* pointer, double yield_seconds) {
  auto& transfer = *Of(pointer);
  if (yield_seconds > 0 && !transfer.ended) { // a thread that sleeps gets its core back late
    auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(yield_seconds);
    while (!transfer.ended && std::chrono::steady_clock::now() < until) {
      std::this_thread::yield();
    }
  }
  std::unique_lock<std::mutex> guard(transfer.mutex);
  transfer.condition.wait(guard, [&] { return transfer.open == 0; });
  last_error = transfer.status.reason();
  return static_cast<int>(transfer.status.type());
}

int engine_output(void* transfer, int index, void** data, int64_t* shape, int room) {
  auto& outputs = Of(transfer)->outputs;
  if (static_cast<size_t>(index) >= outputs.size() || outputs[index] == nullptr) {
    return -1;
  }
  *data = outputs[index]->memory();
  auto sizes = outputs[index]->shape().to_vector();
  for (size_t i = 0; i < sizes.size() && i < static_cast<size_t>(room); ++i) {
    shape[i] = sizes[i];
  }
  return static_cast<int>(sizes.size());
}

void engine_free(void* transfer) { delete &Of(transfer); }

const char* engine_error() { return last_error.c_str(); }
