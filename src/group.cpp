#include "group.h"

#include <exception>

#ifndef RINGTRON_NCCL
#include "sim/nccl/world.h"
#endif

namespace {

void check_nccl(ncclResult_t status, const char* call) {
  if (status == ncclSuccess) return;
  const char* detail = ncclGetLastError(nullptr);
  throw Error(detail && *detail ? std::string(detail) : format("%s failed: %s", call, ncclGetErrorString(status)));
}
#define NCCL_CHECK(call) check_nccl((call), #call)

ncclDataType_t type_of(const float*) { return ncclFloat32; }
ncclDataType_t type_of(const int*) { return ncclInt32; }
#ifdef PRECISION_BF16
ncclDataType_t type_of(const real*) { return ncclBfloat16; }
#endif

ncclRedOp_t op_of(Reduce op) { return op == Reduce::sum ? ncclSum : ncclMax; }

void check_parts(const Group& group, const char* call, int64_t whole, int64_t part) {
  if (whole != part * group.size())
    throw Error(format("%s on group '%s' of %d ranks: %lld elements are not %d parts of %lld", call,
                       group.name().c_str(), group.size(), (long long)whole, group.size(), (long long)part));
}

}  // namespace

Group::Group(ncclComm_t comm, const std::string& name, Device& device, bool control)
    : comm_(comm), name_(name), device_(device) {
  NCCL_CHECK(ncclCommUserRank(comm, &rank_));
  NCCL_CHECK(ncclCommCount(comm, &size_));
#ifndef RINGTRON_NCCL
  sim::name_comm(comm, name, control);
#else
  (void)control;
#endif
}

Group::~Group() {
#ifdef RINGTRON_NCCL
  if (std::uncaught_exceptions()) return;  // it would wait for ranks that do not come; the process is about to end
#endif
  ncclCommDestroy(comm_);
}

std::unique_ptr<Group> Group::split(int color, int key, const std::string& name) const {
  ncclComm_t comm = nullptr;
  NCCL_CHECK(ncclCommSplit(comm_, color, key, &comm, nullptr));
  return comm ? std::make_unique<Group>(comm, name, device_) : nullptr;
}

template <class Call>
void Group::run(const char* name, int64_t bytes, cudaStream_t stream, Call call) {
  Trace& trace = device_.trace;
  const bool own = on(stream) != device_.stream();
  Trace::Scope scope(together_ ? nullptr : &trace, on(stream), own ? "communication" : "compute", "communication", name,
                     trace.on() ? format("%lld bytes in %s", (long long)bytes, name_.c_str()) : "");
  check_nccl(call(on(stream)), name);
}

template <class T>
void Group::all_reduce(TensorOf<T> x, Reduce op, cudaStream_t stream) {
  run("all_reduce", x.numel() * sizeof(T), stream, [&](cudaStream_t s) {
    return ncclAllReduce(x.data, x.data, x.numel(), type_of(x.data), op_of(op), comm_, s);
  });
}

template <class T>
void Group::reduce_scatter(TensorOf<T> out, TensorOf<T> in, cudaStream_t stream) {
  check_parts(*this, "reduce_scatter", in.numel(), out.numel());
  run("reduce_scatter", in.numel() * sizeof(T), stream, [&](cudaStream_t s) {
    return ncclReduceScatter(in.data, out.data, out.numel(), type_of(in.data), ncclSum, comm_, s);
  });
}

template <class T>
void Group::all_gather(TensorOf<T> out, TensorOf<T> in, cudaStream_t stream) {
  check_parts(*this, "all_gather", out.numel(), in.numel());
  run("all_gather", out.numel() * sizeof(T), stream, [&](cudaStream_t s) {
    return ncclAllGather(in.data, out.data, in.numel(), type_of(in.data), comm_, s);
  });
}

template <class T>
void Group::all_to_all(TensorOf<T> out, TensorOf<T> in, cudaStream_t stream) {
  if (in.numel() != out.numel() || in.numel() % size_)
    throw Error(format("all_to_all on group '%s' of %d ranks: %lld elements in, %lld out, must be equal and a multiple "
                       "of the ranks", name_.c_str(), size_, (long long)in.numel(), (long long)out.numel()));
  const int64_t part = in.numel() / size_;
  Together together;
  for (int peer = 0; peer < size_; ++peer) {
    send(TensorOf<T>(in.data + peer * part, {part}), peer, stream);
    receive(TensorOf<T>(out.data + peer * part, {part}), peer, stream);
  }
}

template <class T>
void Group::broadcast(TensorOf<T> x, int root, cudaStream_t stream) {
  run("broadcast", x.numel() * sizeof(T), stream, [&](cudaStream_t s) {
    return ncclBroadcast(x.data, x.data, x.numel(), type_of(x.data), root, comm_, s);
  });
}

template <class T>
void Group::reduce(TensorOf<T> x, int root, cudaStream_t stream) {
  run("reduce", x.numel() * sizeof(T), stream, [&](cudaStream_t s) {
    return ncclReduce(x.data, x.data, x.numel(), type_of(x.data), ncclSum, root, comm_, s);
  });
}

template <class T>
void Group::send(TensorOf<T> x, int peer, cudaStream_t stream) {
  run("send", x.numel() * sizeof(T), stream, [&](cudaStream_t s) {
    return ncclSend(x.data, x.numel(), type_of(x.data), peer, comm_, s);
  });
}

template <class T>
void Group::receive(TensorOf<T> x, int peer, cudaStream_t stream) {
  run("receive", x.numel() * sizeof(T), stream, [&](cudaStream_t s) {
    return ncclRecv(x.data, x.numel(), type_of(x.data), peer, comm_, s);
  });
}

Group::Together::Together() { NCCL_CHECK(ncclGroupStart()); }
Group::Together::Together(Group& group, const char* name) : Together() {
  span.emplace(&group.device_.trace, group.device_.stream(), "compute", "communication", name, "in " + group.name_);
  this->group = &group;
  group.together_ = true;
}
Group::Together::~Together() noexcept(false) {
  if (group) group->together_ = false;
  const ncclResult_t status = ncclGroupEnd();
  if (std::uncaught_exceptions() == 0) NCCL_CHECK(status);
}

#define GROUP_OF(T)                                                                  \
  template void Group::all_reduce(TensorOf<T>, Reduce, cudaStream_t);                \
  template void Group::reduce_scatter(TensorOf<T>, TensorOf<T>, cudaStream_t);       \
  template void Group::all_gather(TensorOf<T>, TensorOf<T>, cudaStream_t);           \
  template void Group::all_to_all(TensorOf<T>, TensorOf<T>, cudaStream_t);           \
  template void Group::broadcast(TensorOf<T>, int, cudaStream_t);                    \
  template void Group::reduce(TensorOf<T>, int, cudaStream_t);                       \
  template void Group::send(TensorOf<T>, int, cudaStream_t);                         \
  template void Group::receive(TensorOf<T>, int, cudaStream_t);
GROUP_OF(float)
GROUP_OF(int)
#ifdef PRECISION_BF16
GROUP_OF(real)
#endif
