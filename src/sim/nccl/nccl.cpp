// The calls of nccl.h: checks arguments, collects groups, puts the work on its stream.
#include "../include/nccl.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "rank.h"
#ifndef RINGTRON_CUDA
#include "../sim.h"
#endif

namespace sim {
namespace {

struct Channel {  // a communicator, as long as queued work needs it
  std::shared_ptr<Rank> rank;
  uint32_t id = 0;
  Members members;
  std::string name;
  bool control = false;
  uint32_t collectives = 0, messages = 0;
  // Where its last call went: a call on another stream waits for that one, since ranks call in one order.
  cudaStream_t stream = nullptr;
  cudaEvent_t passed = nullptr;
  ~Channel() {
    if (passed) cudaEventDestroy(passed);
  }
};

struct Work {  // one call
  std::shared_ptr<Channel> channel;
  Header header;
  const void* send;
  void* recv;
  cudaStream_t stream;

  const Call& call() const { return header.call; }
  bool point_to_point() const { return call().op == Send || call().op == Recv; }
  bool to_self() const { return point_to_point() && call().root == channel->rank->id(); }
  bool is_root() const { return call().root == channel->members.me; }
  size_t send_bytes() const {
    const int op = call().op;
    if (op == Recv || (op == Broadcast && !is_root())) return 0;
    return call().count * size_of(call().type) * (op == ReduceScatter ? channel->members.size() : 1);
  }
  size_t recv_bytes() const {
    const int op = call().op;
    if (op == Send || (op == Reduce && !is_root())) return 0;
    return call().count * size_of(call().type) *
           (op == AllGather || op == Split ? channel->members.size() : 1);
  }
};

thread_local std::string t_error;
thread_local int t_control = 0, t_depth = 0;
thread_local std::vector<Work> t_group;
thread_local ncclResult_t t_group_error = ncclSuccess;

template <typename F>
ncclResult_t guarded(F f) {
  auto failed = [](ncclResult_t code, const char* text) {
    t_error = text;
    if (t_depth) t_group_error = code;
    return code;
  };
  try {
    f();
    return ncclSuccess;
  } catch (const CommError& e) {
    return failed(e.code, e.what());
  } catch (const std::logic_error& e) {
    return failed(ncclInvalidUsage, e.what());
  } catch (const std::exception& e) {
    return failed(ncclInternalError, e.what());
  }
}

void require(bool ok, const std::string& text) {
  if (!ok) throw CommError(ncclInvalidArgument, text);
}
void cuda(cudaError_t error) {
  if (error != cudaSuccess) throw CommError(ncclUnhandledCudaError, cudaGetErrorString(error));
}

#ifdef RINGTRON_CUDA
// Device buffers are staged through pinned host memory. Synchronous for the host, and never inside a CUDA
// host function: CUDA may run those one after another, and then ranks that share a GPU would never meet.
class Staging {
 public:
  Staging(std::vector<Work>& work, cudaStream_t stream) : work_(work), outside_(work) {
    cuda(cudaStreamSynchronize(stream));
    for (Work& w : work_) {
      w.send = host(w.send_bytes());
      w.recv = host(w.recv_bytes());
      const Work& out = outside_[&w - work_.data()];
      if (w.send)
        cuda(cudaMemcpy(const_cast<void*>(w.send), out.send, w.send_bytes(), cudaMemcpyDeviceToHost));
    }
  }
  void copy_back() {
    for (size_t i = 0; i < work_.size(); i++)
      if (work_[i].recv)
        cuda(cudaMemcpy(outside_[i].recv, work_[i].recv, work_[i].recv_bytes(), cudaMemcpyHostToDevice));
  }
  ~Staging() {
    for (void* p : buffers_) cudaFreeHost(p);
  }

 private:
  void* host(size_t bytes) {
    void* p = nullptr;
    if (bytes) cuda(cudaMallocHost(&p, bytes));
    if (p) buffers_.push_back(p);
    return p;
  }
  std::vector<Work>& work_;
  const std::vector<Work> outside_;
  std::vector<void*> buffers_;
};
#endif

// Runs calls of one rank that start together; those of a communicator are next to each other.
void perform(std::vector<Work>& work, [[maybe_unused]] cudaStream_t stream) {
#ifdef RINGTRON_CUDA
  Staging staging(work, stream);
#endif
  std::vector<Batch> batches;
  for (size_t i = 0; i < work.size();) {
    const auto channel = work[i].channel;
    Batch& batch = batches.emplace_back();
    std::vector<Lane> together;
    std::vector<const Work*> own_sends, own_receives;
    for (; i < work.size() && work[i].channel == channel; i++) {
      const Work& w = work[i];
      if (w.to_self())
        (w.call().op == Send ? own_sends : own_receives).push_back(&w);
      else if (w.point_to_point())
        together.push_back(plan(w.header, channel->members, w.send, w.recv));
      else
        batch.stages.emplace_back().push_back(plan(w.header, channel->members, w.send, w.recv));
    }
    for (size_t k = 0; k < own_sends.size(); k++) {  // never leaves the rank
      together.emplace_back(own_sends[k]->header);
      together.back().copies.push_back(
          {own_sends[k]->send, own_receives[k]->recv, own_sends[k]->send_bytes()});
    }
    if (!together.empty()) batch.stages.push_back(std::move(together));
  }
  work[0].channel->rank->run(batches);
#ifdef RINGTRON_CUDA
  staging.copy_back();
#endif
}

void check_self_sends(const std::vector<Work>& work) {
  std::vector<const Work*> sends, receives;
  for (const Work& w : work)
    if (w.to_self()) (w.call().op == Send ? sends : receives).push_back(&w);
  const std::string me = work.empty() ? "" : "rank " + std::to_string(work[0].header.from);
  if (sends.size() != receives.size())
    throw CommError(ncclInvalidUsage,
                    me + " must send to itself as often as it receives from itself in one group");
  for (size_t i = 0; i < sends.size(); i++)
    if (!agree(receives[i]->call(), sends[i]->call()))
      throw CommError(ncclInvalidUsage,
                      me + " called " + describe(sends[i]->call()) + " and " + describe(receives[i]->call()));
}

// Numbers the calls of a group (often of one call) and queues them. One task a stream, which starts all its
// calls together.
void submit(std::vector<Work> group) {
  std::vector<std::pair<cudaStream_t, std::vector<Work>>> streams;
  while (!group.empty()) {
    const auto channel = group[0].channel;
    const cudaStream_t stream = group[0].stream;
    std::vector<Work> collectives, messages, rest;
    for (Work& w : group)
      (w.channel != channel ? rest : w.point_to_point() ? messages : collectives).push_back(w);
    check_self_sends(messages);
    collectives.insert(collectives.end(), messages.begin(), messages.end());
    for (Work& w : collectives) {
      if (w.stream != stream)
        throw CommError(ncclInvalidUsage,
                        "group '" + channel->name + "' is used on two streams in one group call");
      w.header.call.number = w.point_to_point() ? ++channel->messages : ++channel->collectives;
      channel->rank->count_call(w.header);
    }
#ifndef RINGTRON_CUDA
    if (channel->passed && channel->stream != stream)
      cuda(stream ? cudaStreamWaitEvent(stream, channel->passed) : cudaEventSynchronize(channel->passed));
#endif
    channel->stream = stream;
    auto place = streams.begin();
    while (place != streams.end() && place->first != stream) place++;
    if (place == streams.end()) place = streams.insert(place, {stream, {}});
    place->second.insert(place->second.end(), collectives.begin(), collectives.end());
    group = std::move(rest);
  }
  // Stream 0 runs at once, so it comes last.
  std::stable_partition(streams.begin(), streams.end(), [](auto& s) { return s.first != nullptr; });
  for (auto& [stream, work] : streams) {
#ifdef RINGTRON_CUDA
    perform(work, stream);
#else
    auto task = std::make_shared<std::vector<Work>>(std::move(work));
    enqueue(stream, [task, stream = stream] { perform(*task, stream); });
    if (!stream) continue;
    for (const Work& w : *task) {
      if (!w.channel->passed) cuda(cudaEventCreateWithFlags(&w.channel->passed, cudaEventDisableTiming));
      cuda(cudaEventRecord(w.channel->passed, stream));
    }
#endif
  }
}

void check_buffer([[maybe_unused]] const void* p, size_t bytes, const Header& h, const char* what) {
  require(p || !bytes, describe(h.call) + ": the " + what + " buffer is null");
#ifndef RINGTRON_CUDA
  const size_t room = bytes_from(p);
  require(bytes <= room, describe(h.call) + " of group '" + h.group + "': the " + what + " buffer has " +
                             std::to_string(room) + " bytes, the call needs " + std::to_string(bytes));
#endif
}

void gather(Channel& channel, Op op, const void* send, void* recv, size_t bytes) {
  Call call;
  call.channel = channel.id;
  call.number = ++channel.collectives;
  call.op = op;
  call.type = ncclUint8;
  call.count = bytes;
  const Header header = make_header(*channel.rank, call, channel.name, true);
  channel.rank->count_call(header);
  std::vector<Batch> batches(1);
  batches[0].stages.emplace_back().push_back(plan(header, channel.members, send, recv));
  channel.rank->run(batches);
}

// Finds out which rank of the world is which rank of a new group, over the board: each shows what it joins
// until all have read it, which the first call of the new group makes sure of.
std::shared_ptr<Channel> meet(uint32_t id, int n, int me) {
  auto channel = std::make_shared<Channel>();
  Rank& rank = *this_rank();
  channel->rank = this_rank();
  channel->id = id;
  channel->members.me = me;
  channel->members.world.assign(n, -1);
  channel->name = n == rank.size() ? "world" : "group" + std::to_string(id);
  Board& board = *rank.board;
  auto pack = [&](int r) { return uint64_t(1) << 63 | uint64_t(id) << 24 | uint64_t(n) << 12 | uint64_t(r); };
  board.rank[rank.id()].joining = pack(me);
  Call call;
  call.channel = id;
  call.op = Join;
  rank.wait_until(make_header(rank, call, channel->name, true), [&] {
    int found = 0;
    for (int r = 0; r < board.size; r++) {
      const uint64_t other = board.rank[r].joining;
      if (other >> 24 != pack(0) >> 24) continue;
      found++;
      if ((other ^ pack(0)) >> 12 == 0 && int(other & 0xfff) < n) channel->members.world[other & 0xfff] = r;
    }
    return found >= n;
  });
  for (int r = 0; r < n; r++)
    if (channel->members.world[r] < 0)
      rank.fail(ncclInvalidUsage, "ncclCommInitRank: nobody is rank " + std::to_string(r) + " of " +
                                      std::to_string(n) + " with the id that rank " +
                                      std::to_string(rank.id()) + " of the world uses");
  gather(*channel, Join, nullptr, nullptr, 0);
  channel->collectives = 0;
  board.rank[rank.id()].joining = 0;
  return channel;
}

}  // namespace
}  // namespace sim

struct ncclComm {
  std::shared_ptr<sim::Channel> channel;
};

namespace sim {
namespace {

void issue(ncclComm_t comm, Call call, const void* send, void* recv, cudaStream_t stream) {
  require(comm, std::string(op_name(call.op)) + ": no communicator");
  Channel& channel = *comm->channel;
  const int n = channel.members.size();
  const int t = call.type;
  const bool reduces = call.op == AllReduce || call.op == ReduceScatter || call.op == Reduce;
  const bool sums = t == ncclFloat || t == ncclBfloat16 || t == ncclInt32;
  const std::string name = op_name(call.op);
  require(sums || (!reduces && (t == ncclInt8 || t == ncclUint8)), name + ": cannot do this data type");
  require(!reduces || call.red == ncclSum || call.red == ncclMax, name + ": only ncclSum and ncclMax");
  require(call.root >= 0 && call.root < n,
          name + ": no rank " + std::to_string(call.root) + " in a group of " + std::to_string(n));
  if (call.op == Send || call.op == Recv) call.root = channel.members.world[call.root];
  call.channel = channel.id;
  Work work{comm->channel, make_header(*channel.rank, call, channel.name, channel.control || t_control), send, recv,
            stream};
  check_buffer(send, work.send_bytes(), work.header, "send");
  check_buffer(recv, work.recv_bytes(), work.header, "receive");
  if (channel.rank->board->has_failed()) channel.rank->board->throw_failure();
  if (t_depth)
    t_group.push_back(work);
  else
    submit({work});
}

ncclResult_t start(ncclComm_t comm, Op op, ncclDataType_t type, int red, int root, size_t count,
                   const void* send, void* recv, cudaStream_t stream) {
  return guarded([&] {
    Call call;
    call.op = op, call.type = type, call.red = red, call.root = root, call.count = count;
    issue(comm, call, send, recv, stream);
  });
}

}  // namespace

void name_comm(ncclComm_t comm, const std::string& name, bool control) {
  comm->channel->name = name.substr(0, sizeof(Header::group) - 1);
  comm->channel->control = control;
}

ControlTraffic::ControlTraffic() { t_control++; }
ControlTraffic::~ControlTraffic() { t_control--; }

}  // namespace sim

using namespace sim;

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  return guarded([&] {
    require(id, "ncclGetUniqueId: null");
    static std::atomic<uint32_t> outside{0};  // for a thread that is no rank, and starts them later
    const auto rank = this_rank_or_null();
    const uint32_t channel = rank ? rank->new_channel() : 255u << 12 | (outside++ & 0xfff);
    memset(id, 0, sizeof(*id));
    memcpy(id->internal, &channel, sizeof(channel));
  });
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int n, ncclUniqueId id, int rank) {
  return guarded([&] {
    require(comm && n >= 1 && rank >= 0 && rank < n,
            "ncclCommInitRank: rank " + std::to_string(rank) + " of " + std::to_string(n));
    require(n <= this_rank()->size(), "ncclCommInitRank: the world has only " +
                                          std::to_string(this_rank()->size()) + " ranks, not " +
                                          std::to_string(n));
    uint32_t channel;
    memcpy(&channel, id.internal, sizeof(channel));
    *comm = new ncclComm{meet(channel, n, rank)};
  });
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* newcomm, ncclConfig_t* config) {
  return guarded([&] {
    require(comm && newcomm && !config, "ncclCommSplit: null communicator, or a configuration");
    Channel& parent = *comm->channel;
#ifndef RINGTRON_CUDA
    if (parent.passed) cuda(cudaEventSynchronize(parent.passed));
#endif
    struct Wish {
      int color, key;
      uint32_t channel;  // the number of the new group, if this becomes its rank 0
    };
    const Wish mine{color, key, parent.rank->new_channel()};
    std::vector<Wish> all(parent.members.size());
    gather(parent, Split, &mine, all.data(), sizeof(Wish));
    *newcomm = nullptr;
    if (color == NCCL_SPLIT_NOCOLOR) return;
    std::vector<int> order;  // of ranks of the parent
    for (int r = 0; r < parent.members.size(); r++)
      if (all[r].color == color) order.push_back(r);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return all[a].key < all[b].key; });
    auto channel = std::make_shared<Channel>();
    channel->rank = parent.rank;
    channel->id = all[order[0]].channel;
    for (int r : order) channel->members.world.push_back(parent.members.world[r]);
    channel->members.me = int(std::find(order.begin(), order.end(), parent.members.me) - order.begin());
    channel->name = "group" + std::to_string(channel->id);
    channel->control = parent.control;
    *newcomm = new ncclComm{channel};
  });
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  delete comm;  // work that is still queued keeps what it needs
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) { return ncclCommDestroy(comm); }

ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  return guarded([&] {
    require(comm && count, "ncclCommCount: null");
    *count = comm->channel->members.size();
  });
}
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  return guarded([&] {
    require(comm && rank, "ncclCommUserRank: null");
    *rank = comm->channel->members.me;
  });
}

const char* ncclGetErrorString(ncclResult_t result) {
  const char* texts[] = {"no error",         "unhandled CUDA error", "system error", "internal error",
                         "invalid argument", "invalid usage",        "remote error"};
  return result >= 0 && result <= ncclRemoteError ? texts[result] : "unknown result code";
}
const char* ncclGetLastError(ncclComm_t) { return t_error.c_str(); }

ncclResult_t ncclGroupStart() {
  t_depth++;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  const ncclResult_t failed = t_group_error;
  return guarded([&] {
    if (!t_depth) throw CommError(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
    if (--t_depth) return;
    auto group = std::move(t_group);
    t_group.clear();
    t_group_error = ncclSuccess;
    if (failed) throw CommError(failed, std::string(t_error));  // nothing of the group starts
    if (!group.empty()) submit(std::move(group));
  });
}

ncclResult_t ncclAllReduce(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
  return start(comm, AllReduce, type, op, 0, count, send, recv, stream);
}
ncclResult_t ncclReduceScatter(const void* send, void* recv, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return start(comm, ReduceScatter, type, op, 0, count, send, recv, stream);
}
ncclResult_t ncclAllGather(const void* send, void* recv, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
  return start(comm, AllGather, type, 0, 0, count, send, recv, stream);
}
ncclResult_t ncclBroadcast(const void* send, void* recv, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  return start(comm, Broadcast, type, 0, root, count, send, recv, stream);
}
ncclResult_t ncclReduce(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                        int root, ncclComm_t comm, cudaStream_t stream) {
  return start(comm, Reduce, type, op, root, count, send, recv, stream);
}
ncclResult_t ncclSend(const void* send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return start(comm, Send, type, 0, peer, count, send, nullptr, stream);
}
ncclResult_t ncclRecv(void* recv, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return start(comm, Recv, type, 0, peer, count, nullptr, recv, stream);
}
