// The NCCL calls ringtron uses, with NCCL 2.28's names, values and signatures, implemented in src/sim/nccl
// over MPI processes or threads. tests/test_nccl_contract.cpp compares this file with NVIDIA's where that is
// installed.
//
// The rules are NCCL's: all ranks of a communicator call the same collectives in the same order; a call on a
// stream other than 0 is queued and its buffers belong to it until the stream has passed it; inside a group
// calls are collected and start together; all-gather is in place if sendbuff == recvbuff + rank * sendcount,
// reduce-scatter if recvbuff == sendbuff + rank * recvcount, the others if sendbuff == recvbuff.
// Differences: a group may use each communicator on one stream only; ncclCommInitRank is not grouped.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

extern "C" {

typedef struct ncclComm* ncclComm_t;
typedef struct ncclConfig_v22800 ncclConfig_t;  // only ever passed as NULL

#define NCCL_UNIQUE_ID_BYTES 128
typedef struct {
  char internal[NCCL_UNIQUE_ID_BYTES];
} ncclUniqueId;

#define NCCL_SPLIT_NOCOLOR -1

typedef enum {
  ncclSuccess = 0,
  ncclUnhandledCudaError = 1,
  ncclSystemError = 2,
  ncclInternalError = 3,
  ncclInvalidArgument = 4,
  ncclInvalidUsage = 5,
  ncclRemoteError = 6,
} ncclResult_t;

typedef enum { ncclSum = 0, ncclMax = 2 } ncclRedOp_t;

typedef enum {
  ncclInt8 = 0,  // bytes can be moved, but not reduced
  ncclUint8 = 1,
  ncclInt32 = 2,
  ncclFloat32 = 7,
  ncclFloat = 7,
  ncclBfloat16 = 9,
} ncclDataType_t;

ncclResult_t ncclGetUniqueId(ncclUniqueId* uniqueId);
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int nranks, ncclUniqueId commId, int rank);
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* newcomm, ncclConfig_t* config);
ncclResult_t ncclCommDestroy(ncclComm_t comm);
ncclResult_t ncclCommAbort(ncclComm_t comm);
ncclResult_t ncclCommCount(const ncclComm_t comm, int* count);
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank);
const char* ncclGetErrorString(ncclResult_t result);
const char* ncclGetLastError(ncclComm_t comm);  // of the calling thread

ncclResult_t ncclAllReduce(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclReduceScatter(const void* sendbuff, void* recvbuff, size_t recvcount,
                               ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclAllGather(const void* sendbuff, void* recvbuff, size_t sendcount, ncclDataType_t datatype,
                           ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclBroadcast(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                           int root, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclReduce(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                        ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclSend(const void* sendbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
                      cudaStream_t stream);
ncclResult_t ncclRecv(void* recvbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
                      cudaStream_t stream);
ncclResult_t ncclGroupStart();
ncclResult_t ncclGroupEnd();
}
