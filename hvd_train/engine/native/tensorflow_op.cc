// The engine's collectives as TensorFlow operations, on TensorFlow's C interface: one file for all its versions.
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "engine.h"
#include "tensorflow_c.h"

namespace {

// Set by engine_use: the engine is a library of its own, which Python has loaded.
decltype(&engine_start) start = nullptr;
decltype(&engine_free) release = nullptr;
decltype(&engine_error) error_text = nullptr;

struct Status {
  TF_Status* status = TF_NewStatus();
  ~Status() { TF_DeleteStatus(status); }
  operator TF_Status*() const { return status; }
  bool Ok() const { return TF_GetCode(status) == TF_OK; }
};

int HorovodType(TF_DataType type) {
  switch (type) {
  case TF_UINT8:
    return 0;
  case TF_INT8:
    return 1;
  case TF_UINT16:
    return 2;
  case TF_INT16:
    return 3;
  case TF_INT32:
    return 4;
  case TF_INT64:
    return 5;
  case TF_HALF:
    return 6;
  case TF_FLOAT:
    return 7;
  case TF_DOUBLE:
    return 8;
  case TF_BOOL:
    return 9;
  default:
    return -1; // the operation's definition does not take it
  }
}

// Never null, also for a tensor without entries.
void* Address(TF_Tensor* tensor) {
  static char nothing;
  return TF_TensorByteSize(tensor) > 0 ? TF_TensorData(tensor) : &nothing;
}

// The attributes of a node.
struct Kernel {
  std::string name;
  int32_t reduce_op = 1, process_set = 0, root = 0;
  float prescale = 1, postscale = 1;

  explicit Kernel(TF_OpKernelConstruction* node) {
    Status status;
    int32_t length = 0, total = 0;
    TF_OpKernelConstruction_GetAttrSize(node, "tensor_name", &length, &total, status);
    name.resize(total > 0 ? total : 0);
    TF_OpKernelConstruction_GetAttrString(node, "tensor_name", &name[0], name.size(), status);
    TF_OpKernelConstruction_GetAttrInt32(node, "reduce_op", &reduce_op, status);
    TF_OpKernelConstruction_GetAttrInt32(node, "process_set", &process_set, status);
    TF_OpKernelConstruction_GetAttrInt32(node, "root", &root, status);
    TF_OpKernelConstruction_GetAttrFloat(node, "prescale", &prescale, status);
    TF_OpKernelConstruction_GetAttrFloat(node, "postscale", &postscale, status);
    if (!status.Ok()) {
      TF_OpKernelConstruction_Failure(node, status);
    }
  }
};

// One run of a node, until the transfer has ended.
class Run {
public:
  // TensorFlow hands over the address of a std::function that is gone when the kernel has returned: copy it.
  Run(TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done)
      : context_(context), done_(*reinterpret_cast<std::function<void()>*>(done)) {}

  ~Run() {
    for (auto tensor : tensors_) {
      TF_DeleteTensor(tensor);
    }
  }

  TF_Tensor* Input(int index) {
    Status status;
    TF_Tensor* tensor = nullptr;
    TF_GetInput(context_, index, &tensor, status);
    return Kept(tensor, status);
  }

  // Gives an input back: nobody could write in its place otherwise.
  void Drop() {
    TF_DeleteTensor(tensors_.back());
    tensors_.pop_back();
  }

  // The output of the input's shape, in its place if nobody else reads it.
  TF_Tensor* InPlace(const std::vector<int64_t>& shape) {
    Status status;
    int candidate = 0, forwarded = -1;
    auto tensor = TF_ForwardInputOrAllocateOutput(context_, &candidate, 1, 0, shape.data(), shape.size(), &forwarded,
                                                  status);
    return Kept(tensor, status);
  }

  static void* Allocate(void* argument, int index, int dims, const int64_t* shape) {
    auto run = static_cast<Run*>(argument);
    Status status;
    auto type = TF_ExpectedOutputDataType(run->context_, index);
    size_t bytes = TF_DataTypeSize(type);
    for (int i = 0; i < dims; ++i) {
      bytes *= static_cast<size_t>(shape[i]);
    }
    auto tensor = run->Kept(TF_AllocateOutput(run->context_, index, type, shape, dims, bytes, status), status);
    return tensor == nullptr ? nullptr : Address(tensor);
  }

  static void Done(void* argument, int code, const char* reason) {
    static const TF_Code codes[] = {TF_OK, TF_UNKNOWN, TF_FAILED_PRECONDITION, TF_ABORTED, TF_INVALID_ARGUMENT};
    static_cast<Run*>(argument)->End(code < 5 ? codes[code] : TF_UNKNOWN, reason);
  }

  void End(TF_Code code, const char* reason) {
    if (code != TF_OK) {
      Status status;
      TF_SetStatus(status, code, reason);
      TF_OpKernelContext_Failure(context_, status);
    }
    auto done = std::move(done_);
    delete this; // frees the tensors before TensorFlow goes on
    done();
  }

private:
  TF_Tensor* Kept(TF_Tensor* tensor, const Status& status) {
    if (tensor != nullptr) {
      tensors_.push_back(tensor);
    }
    return status.Ok() ? tensor : nullptr;
  }

  TF_OpKernelContext* context_;
  std::function<void()> done_;
  std::vector<TF_Tensor*> tensors_;
};

template <int COLLECTIVE>
void Compute(void* pointer, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done) {
  auto& kernel = *static_cast<Kernel*>(pointer);
  auto run = new Run(context, done);
  auto input = run->Input(0);
  auto splits = COLLECTIVE == ENGINE_ALLTOALL ? run->Input(1) : nullptr;
  if (input == nullptr || (COLLECTIVE == ENGINE_ALLTOALL && splits == nullptr)) {
    return run->End(TF_INTERNAL, "Horovod: no input");
  }
  int dims = TF_NumDims(input);
  std::vector<int64_t> shape;
  for (int i = 0; i < dims; ++i) {
    shape.push_back(TF_Dim(input, i));
  }
  auto type = TF_TensorType(input);
  void* to = nullptr;
  if (COLLECTIVE == ENGINE_ALLREDUCE || COLLECTIVE == ENGINE_BROADCAST) {
    run->Drop();
    auto output = run->InPlace(shape);
    if (output == nullptr) {
      return run->End(TF_RESOURCE_EXHAUSTED, "Horovod: no memory for the output");
    }
    input = run->Input(0);
    to = Address(output);
  }
  void* from = Address(input);
  const char* name = kernel.name.c_str();
  EngineCall call = {};
  call.collective = COLLECTIVE;
  call.count = 1;
  call.names = &name;
  call.inputs = &from;
  call.outputs = &to;
  call.dims = &dims;
  call.shapes = shape.data();
  call.dtype = HorovodType(type);
  call.reduce_op = kernel.reduce_op;
  call.root = kernel.root;
  call.prescale = kernel.prescale;
  call.postscale = kernel.postscale;
  call.process_set = kernel.process_set;
  if (splits != nullptr) {
    call.splits = static_cast<const int32_t*>(TF_TensorData(splits));
    call.split_count = static_cast<int>(TF_TensorElementCount(splits));
  }
  call.allocate = Run::Allocate;
  call.done = Run::Done;
  call.argument = run;
  if (start == nullptr) {
    return run->End(TF_INTERNAL, "Horovod: the engine is not loaded");
  }
  void* transfer = start(&call);
  if (transfer == nullptr) {
    return run->End(TF_FAILED_PRECONDITION, error_text());
  }
  release(transfer); // ``run`` may be gone by now
}

void* Create(TF_OpKernelConstruction* node) { return new Kernel(node); }

void Delete(void* kernel) { delete static_cast<Kernel*>(kernel); }

void SameShape(TF_ShapeInferenceContext* context, TF_Status* status) {
  auto shape = TF_NewShapeHandle();
  TF_ShapeInferenceContextGetInput(context, 0, shape, status);
  TF_ShapeInferenceContextSetOutput(context, 0, shape, status);
  TF_DeleteShapeHandle(shape);
}

void OtherLength(TF_ShapeInferenceContext* context, TF_Status* status) {
  TF_ShapeInferenceContextSetUnknownShape(context, status);
}

void Register(const char* name, int collective,
              void (*compute)(void*, TF_OpKernelContext*, TF_AsyncOpKernelDoneCallback*)) {
  bool alltoall = collective == ENGINE_ALLTOALL;
  bool same = collective == ENGINE_ALLREDUCE || collective == ENGINE_BROADCAST;
  Status status;
  auto op = TF_NewOpDefinitionBuilder(name);
  TF_OpDefinitionBuilderAddAttr(op, "T: {uint8, int8, uint16, int16, int32, int64, half, float, double, bool}");
  TF_OpDefinitionBuilderAddAttr(op, "tensor_name: string");
  TF_OpDefinitionBuilderAddAttr(op, "process_set: int = 0");
  TF_OpDefinitionBuilderAddAttr(op, "root: int = 0");
  TF_OpDefinitionBuilderAddAttr(op, "reduce_op: int = 1");
  TF_OpDefinitionBuilderAddAttr(op, "prescale: float = 1.0");
  TF_OpDefinitionBuilderAddAttr(op, "postscale: float = 1.0");
  TF_OpDefinitionBuilderAddInput(op, "tensor: T");
  if (alltoall) {
    TF_OpDefinitionBuilderAddInput(op, "splits: int32");
  }
  TF_OpDefinitionBuilderAddOutput(op, "output: T");
  if (alltoall) {
    TF_OpDefinitionBuilderAddOutput(op, "received: int32");
  }
  // Not stateful: TensorFlow runs stateful operations of a graph one after another.
  TF_OpDefinitionBuilderSetShapeInferenceFunction(op, same ? SameShape : OtherLength);
  TF_RegisterOpDefinition(op, status);
  auto kernel = TF_NewAsyncKernelBuilder(name, "CPU", Create, compute, Delete);
  TF_RegisterKernelBuilder(name, kernel, status);
}

__attribute__((constructor)) void RegisterAll() {
  Register("HvdTrainAllreduce", ENGINE_ALLREDUCE, Compute<ENGINE_ALLREDUCE>);
  Register("HvdTrainAllgather", ENGINE_ALLGATHER, Compute<ENGINE_ALLGATHER>);
  Register("HvdTrainBroadcast", ENGINE_BROADCAST, Compute<ENGINE_BROADCAST>);
  Register("HvdTrainAlltoall", ENGINE_ALLTOALL, Compute<ENGINE_ALLTOALL>);
}

} // namespace

extern "C" __attribute__((visibility("default"))) void engine_use(void* start_, void* free_, void* error) {
  start = reinterpret_cast<decltype(start)>(start_);
  release = reinterpret_cast<decltype(release)>(free_);
  error_text = reinterpret_cast<decltype(error_text)>(error);
}
