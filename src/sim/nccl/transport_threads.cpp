// Ranks as threads of one process. A send leaves a note with its address in the receiver's box; the receiver
// copies straight from the sender's buffer to its own, then marks the note as done.
#include "transport.h"

#include <cstring>
#include <deque>

namespace sim {

namespace {
enum State { Posted, Copying, Done, Withdrawn };

struct Note {
  Header header;
  const void* data;
  std::atomic<State> state{Posted};
};
struct Receive;
struct Queue {
  std::deque<std::shared_ptr<Note>> sends;
  std::deque<Receive*> receives;
};
struct Box {
  std::mutex lock;
  std::map<std::pair<int, uint32_t>, Queue> queues;  // by sender and channel
};

}  // namespace

struct Hub {
  explicit Hub(int size) : boxes(size) {}
  std::vector<Box> boxes;
};

namespace {
struct SendRequest : Request {
  std::shared_ptr<Note> note;
  ~SendRequest() override {
    State posted = Posted;
    if (note->state.compare_exchange_strong(posted, Withdrawn)) return;
    while (note->state.load(std::memory_order_acquire) == Copying) sched_yield();
  }
};

struct Receive : Request {
  Box* box;
  Queue* queue;
  Header header;
  void* data;
  std::shared_ptr<Note> note;  // its partner, once there is one
  int64_t arrival = 0;
  ~Receive() override {
    std::lock_guard guard(box->lock);
    std::erase(queue->receives, this);
  }
};

// Under the box's lock: the oldest send meets the oldest receive.
void match(Queue& queue) {
  while (!queue.sends.empty() && !queue.receives.empty()) {
    queue.receives.front()->note = queue.sends.front();
    queue.sends.pop_front();
    queue.receives.pop_front();
  }
}

class ThreadsTransport : public Transport {
 public:
  ThreadsTransport(std::shared_ptr<Hub> hub, Board* board, const Link& link, int rank)
      : Transport(board, link, rank), hub_(std::move(hub)) {}

  std::unique_ptr<Request> isend(int peer, const void* data, size_t bytes, Header header) override {
    auto request = std::make_unique<SendRequest>();
    request->note = std::make_shared<Note>();
    request->note->header = complete(header, bytes);
    request->note->data = data;
    ledger.sent(request->note->header);
    Box& box = hub_->boxes[peer];
    std::lock_guard guard(box.lock);
    Queue& queue = box.queues[{rank, header.call.channel}];
    queue.sends.push_back(request->note);
    match(queue);
    return request;
  }

  std::unique_ptr<Request> irecv(int peer, void* data, size_t bytes, Header expected) override {
    auto request = std::make_unique<Receive>();
    Box& box = hub_->boxes[rank];
    std::lock_guard guard(box.lock);
    Queue& queue = box.queues[{peer, expected.call.channel}];
    request->box = &box;
    request->queue = &queue;
    request->header = complete(expected, bytes);
    request->data = data;
    queue.receives.push_back(request.get());
    match(queue);
    return request;
  }

  bool test(Request& request) override {
    if (auto* send = dynamic_cast<SendRequest*>(&request))
      return send->note->state.load(std::memory_order_acquire) == Done;
    auto& receive = static_cast<Receive&>(request);
    {
      std::lock_guard guard(receive.box->lock);
      if (!receive.note) return false;
    }
    Note& note = *receive.note;
    check(receive.header, note.header);
    if (!arrived(receive.arrival, note.header, receive.header)) return false;
    State posted = Posted;
    if (!note.state.compare_exchange_strong(posted, Copying)) return false;  // withdrawn: the world is ending
    if (note.header.bytes) memcpy(receive.data, note.data, note.header.bytes);
    note.state.store(Done, std::memory_order_release);
    ledger.received(note.header, receive.header);
    return true;
  }

 private:
  std::shared_ptr<Hub> hub_;
};
}  // namespace

std::shared_ptr<Hub> make_hub(int size) { return std::make_shared<Hub>(size); }

std::unique_ptr<Transport> threads_transport(std::shared_ptr<Hub> hub, Board* board, const Link& link,
                                             int rank) {
  return std::make_unique<ThreadsTransport>(std::move(hub), board, link, rank);
}

}  // namespace sim
