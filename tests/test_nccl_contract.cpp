// Our nccl.h says what NVIDIA's says: the same values, types and signatures. Everything is checked when this
// file is compiled; the Makefile gives it, and only it, the include path of NVIDIA's headers where they are
// installed (and not the path of ours).
#include <doctest/doctest.h>
#include <cstdio>

#if __has_include(<nccl.h>) && __has_include(<cuda_runtime.h>)
#include <nccl.h>
#endif

#ifdef NCCL_VERSION_CODE  // else that was ours, or none
#include <type_traits>

// One program can't declare a C function twice with different types, nor a type: ours get other names here.
#define OURS(name) ours_##name
#define ncclComm OURS(ncclComm)
#define ncclComm_t OURS(ncclComm_t)
#define ncclConfig_v22800 OURS(ncclConfig)
#define ncclConfig_t OURS(ncclConfig_t)
#define ncclUniqueId OURS(ncclUniqueId)
#define ncclResult_t OURS(ncclResult_t)
#define ncclRedOp_t OURS(ncclRedOp_t)
#define ncclDataType_t OURS(ncclDataType_t)
#define ncclGetUniqueId OURS(ncclGetUniqueId)
#define ncclCommInitRank OURS(ncclCommInitRank)
#define ncclCommSplit OURS(ncclCommSplit)
#define ncclCommDestroy OURS(ncclCommDestroy)
#define ncclCommAbort OURS(ncclCommAbort)
#define ncclCommCount OURS(ncclCommCount)
#define ncclCommUserRank OURS(ncclCommUserRank)
#define ncclGetErrorString OURS(ncclGetErrorString)
#define ncclGetLastError OURS(ncclGetLastError)
#define ncclAllReduce OURS(ncclAllReduce)
#define ncclReduceScatter OURS(ncclReduceScatter)
#define ncclAllGather OURS(ncclAllGather)
#define ncclBroadcast OURS(ncclBroadcast)
#define ncclReduce OURS(ncclReduce)
#define ncclSend OURS(ncclSend)
#define ncclRecv OURS(ncclRecv)
#define ncclGroupStart OURS(ncclGroupStart)
#define ncclGroupEnd OURS(ncclGroupEnd)
const int their_id_bytes = NCCL_UNIQUE_ID_BYTES, their_no_color = NCCL_SPLIT_NOCOLOR;
#undef NCCL_UNIQUE_ID_BYTES
#undef NCCL_SPLIT_NOCOLOR
namespace ours {  // for the enumerators
#include "../src/sim/include/nccl.h"
}
#undef ncclComm
#undef ncclComm_t
#undef ncclConfig_v22800
#undef ncclConfig_t
#undef ncclUniqueId
#undef ncclResult_t
#undef ncclRedOp_t
#undef ncclDataType_t
#undef ncclGetUniqueId
#undef ncclCommInitRank
#undef ncclCommSplit
#undef ncclCommDestroy
#undef ncclCommAbort
#undef ncclCommCount
#undef ncclCommUserRank
#undef ncclGetErrorString
#undef ncclGetLastError
#undef ncclAllReduce
#undef ncclReduceScatter
#undef ncclAllGather
#undef ncclBroadcast
#undef ncclReduce
#undef ncclSend
#undef ncclRecv
#undef ncclGroupStart
#undef ncclGroupEnd

namespace {

static_assert(NCCL_UNIQUE_ID_BYTES == their_id_bytes && NCCL_SPLIT_NOCOLOR == their_no_color);
static_assert(sizeof(ours::ours_ncclUniqueId) == sizeof(ncclUniqueId));

#define SAME(name) static_assert(int(ours::name) == int(::name))
SAME(ncclSuccess);
SAME(ncclUnhandledCudaError);
SAME(ncclSystemError);
SAME(ncclInternalError);
SAME(ncclInvalidArgument);
SAME(ncclInvalidUsage);
SAME(ncclRemoteError);
SAME(ncclSum);
SAME(ncclMax);
SAME(ncclInt8);
SAME(ncclUint8);
SAME(ncclInt32);
SAME(ncclFloat32);
SAME(ncclFloat);
SAME(ncclBfloat16);

// Their type for one of ours, through pointers and functions.
template <typename T>
struct Theirs {
  using type = T;
};
template <typename T>
using theirs = typename Theirs<T>::type;
#define MAP(T)                    \
  template <>                     \
  struct Theirs<ours::ours_##T> { \
    using type = ::T;             \
  }
MAP(ncclComm_t);
MAP(ncclConfig_t);
MAP(ncclUniqueId);
MAP(ncclResult_t);
MAP(ncclRedOp_t);
MAP(ncclDataType_t);
template <typename T>
requires(!std::is_same_v<T*, ours::ours_ncclComm_t>) struct Theirs<T*> {
  using type = theirs<T>*;
};
template <typename R, typename... A>
struct Theirs<R(A...)> {
  using type = theirs<R>(theirs<A>...);
};

#define SAME_CALL(name) static_assert(std::is_same_v<theirs<decltype(ours::ours_##name)>, decltype(::name)>)
SAME_CALL(ncclGetUniqueId);
SAME_CALL(ncclCommInitRank);
SAME_CALL(ncclCommSplit);
SAME_CALL(ncclCommDestroy);
SAME_CALL(ncclCommAbort);
SAME_CALL(ncclCommCount);
SAME_CALL(ncclCommUserRank);
SAME_CALL(ncclGetErrorString);
SAME_CALL(ncclGetLastError);
SAME_CALL(ncclAllReduce);
SAME_CALL(ncclReduceScatter);
SAME_CALL(ncclAllGather);
SAME_CALL(ncclBroadcast);
SAME_CALL(ncclReduce);
SAME_CALL(ncclSend);
SAME_CALL(ncclRecv);
SAME_CALL(ncclGroupStart);
SAME_CALL(ncclGroupEnd);

}  // namespace

TEST_CASE("nccl: our nccl.h agrees with NVIDIA's") { MESSAGE("compared with version " << NCCL_VERSION_CODE); }
#else
TEST_CASE("nccl: our nccl.h agrees with NVIDIA's") { std::puts("skipped: no nccl.h of NVIDIA's"); }
#endif
