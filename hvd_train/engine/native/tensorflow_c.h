// What we call of TensorFlow's C interface, which is the same in all its versions: so nobody needs its headers.
// With TENSORFLOW_HEADERS (a test) these declarations are compared with TensorFlow's own.
#ifndef HVD_TRAIN_TENSORFLOW_C_H
#define HVD_TRAIN_TENSORFLOW_C_H

#include <stddef.h>
#include <stdint.h>

#ifdef TENSORFLOW_HEADERS
#include "tensorflow/c/kernels.h"
#include "tensorflow/c/ops.h"
#include "tensorflow/c/tf_tensor.h"
#define SAME(name, value) static_assert(name == value, #name)
SAME(TF_FLOAT, 1);
SAME(TF_DOUBLE, 2);
SAME(TF_INT32, 3);
SAME(TF_UINT8, 4);
SAME(TF_INT16, 5);
SAME(TF_INT8, 6);
SAME(TF_INT64, 9);
SAME(TF_BOOL, 10);
SAME(TF_UINT16, 17);
SAME(TF_HALF, 19);
SAME(TF_OK, 0);
SAME(TF_UNKNOWN, 2);
SAME(TF_INVALID_ARGUMENT, 3);
SAME(TF_RESOURCE_EXHAUSTED, 8);
SAME(TF_FAILED_PRECONDITION, 9);
SAME(TF_ABORTED, 10);
SAME(TF_INTERNAL, 13);
#else
typedef enum {
  TF_FLOAT = 1,
  TF_DOUBLE = 2,
  TF_INT32 = 3,
  TF_UINT8 = 4,
  TF_INT16 = 5,
  TF_INT8 = 6,
  TF_INT64 = 9,
  TF_BOOL = 10,
  TF_UINT16 = 17,
  TF_HALF = 19,
} TF_DataType;
typedef enum {
  TF_OK = 0,
  TF_UNKNOWN = 2,
  TF_INVALID_ARGUMENT = 3,
  TF_RESOURCE_EXHAUSTED = 8,
  TF_FAILED_PRECONDITION = 9,
  TF_ABORTED = 10,
  TF_INTERNAL = 13,
} TF_Code;
typedef struct TF_Status TF_Status;
typedef struct TF_Tensor TF_Tensor;
typedef struct TF_OpDefinitionBuilder TF_OpDefinitionBuilder;
typedef struct TF_ShapeHandle TF_ShapeHandle;
typedef struct TF_ShapeInferenceContext TF_ShapeInferenceContext;
typedef struct TF_KernelBuilder TF_KernelBuilder;
typedef struct TF_OpKernelConstruction TF_OpKernelConstruction;
typedef struct TF_OpKernelContext TF_OpKernelContext;
typedef struct TF_AsyncOpKernelDoneCallback TF_AsyncOpKernelDoneCallback;
#endif

extern "C" {

TF_Status* TF_NewStatus(void);
void TF_DeleteStatus(TF_Status*);
void TF_SetStatus(TF_Status*, TF_Code, const char* text);
TF_Code TF_GetCode(const TF_Status*);

size_t TF_DataTypeSize(TF_DataType);
TF_DataType TF_TensorType(const TF_Tensor*);
int TF_NumDims(const TF_Tensor*);
int64_t TF_Dim(const TF_Tensor*, int);
int64_t TF_TensorElementCount(const TF_Tensor*);
size_t TF_TensorByteSize(const TF_Tensor*);
void* TF_TensorData(const TF_Tensor*);
void TF_DeleteTensor(TF_Tensor*);

TF_OpDefinitionBuilder* TF_NewOpDefinitionBuilder(const char* name);
void TF_OpDefinitionBuilderAddAttr(TF_OpDefinitionBuilder*, const char*);
void TF_OpDefinitionBuilderAddInput(TF_OpDefinitionBuilder*, const char*);
void TF_OpDefinitionBuilderAddOutput(TF_OpDefinitionBuilder*, const char*);
void TF_OpDefinitionBuilderSetShapeInferenceFunction(TF_OpDefinitionBuilder*,
                                                     void (*)(TF_ShapeInferenceContext*, TF_Status*));
void TF_RegisterOpDefinition(TF_OpDefinitionBuilder*, TF_Status*);
TF_ShapeHandle* TF_NewShapeHandle();
void TF_DeleteShapeHandle(TF_ShapeHandle*);
void TF_ShapeInferenceContextGetInput(TF_ShapeInferenceContext*, int, TF_ShapeHandle*, TF_Status*);
void TF_ShapeInferenceContextSetOutput(TF_ShapeInferenceContext*, int, TF_ShapeHandle*, TF_Status*);
void TF_ShapeInferenceContextSetUnknownShape(TF_ShapeInferenceContext*, TF_Status*);

TF_KernelBuilder* TF_NewAsyncKernelBuilder(const char* op, const char* device,
                                           void* (*create)(TF_OpKernelConstruction*),
                                           void (*compute)(void*, TF_OpKernelContext*, TF_AsyncOpKernelDoneCallback*),
                                           void (*remove)(void*));
void TF_RegisterKernelBuilder(const char* op, TF_KernelBuilder*, TF_Status*);
void TF_OpKernelConstruction_Failure(TF_OpKernelConstruction*, TF_Status*);
void TF_OpKernelConstruction_GetAttrSize(TF_OpKernelConstruction*, const char*, int32_t* list, int32_t* total,
                                         TF_Status*);
void TF_OpKernelConstruction_GetAttrString(TF_OpKernelConstruction*, const char*, char*, size_t, TF_Status*);
void TF_OpKernelConstruction_GetAttrInt32(TF_OpKernelConstruction*, const char*, int32_t*, TF_Status*);
void TF_OpKernelConstruction_GetAttrFloat(TF_OpKernelConstruction*, const char*, float*, TF_Status*);

void TF_GetInput(TF_OpKernelContext*, int, TF_Tensor**, TF_Status*);
TF_DataType TF_ExpectedOutputDataType(TF_OpKernelContext*, int);
TF_Tensor* TF_AllocateOutput(TF_OpKernelContext*, int, TF_DataType, const int64_t* shape, int dims, size_t bytes,
                             TF_Status*);
TF_Tensor* TF_ForwardInputOrAllocateOutput(TF_OpKernelContext*, const int* inputs, int count, int output,
                                           const int64_t* shape, int dims, int* forwarded, TF_Status*);
void TF_OpKernelContext_Failure(TF_OpKernelContext*, TF_Status*);
}

#endif
