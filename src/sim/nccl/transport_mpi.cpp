// Ranks as MPI processes.
//
// A small payload travels in one message with its header, because a small call's time is the number of
// messages. A large one follows its header in a message of its own: nothing is copied to make room for the
// header, and the receiver has checked the header before it lends MPI its buffer. Sends are synchronous
// (MPI_Issend): done when matched, never because MPI had a buffer left. All calls are made under the rank's
// one lock and none of them blocks: Debian's MPICH would spin.
#ifdef HAVE_MPI
#include "transport.h"

#include <mpi.h>

#include <cstring>

namespace sim {

namespace {
constexpr size_t kTogether = 8192;  // largest payload that shares a message with its header

// Tags: 20 bits of channel, then for a payload that comes alone its serial number (mod 64) and a mark.
int header_tag(const Header& h) { return int(h.call.channel << 7); }
int payload_tag(const Header& h) { return int(h.call.channel << 7 | 64 | (h.serial & 63)); }

struct Transfer : Request {
  Transfer(bool sending, void* data) : sending(sending), data(data) {}
  ~Transfer() override {
    bool pending = false;
    for (MPI_Request* r : {&first, &second}) {
      if (*r == MPI_REQUEST_NULL) continue;
      pending = true;
      MPI_Cancel(r);
      MPI_Request_free(r);
    }
    if (pending) (void)packet.release();  // the world is ending, and MPI may still look at it
  }
  bool sending;
  void* data;
  Header header;
  std::unique_ptr<char[]> packet;  // the header, and behind it a small payload
  MPI_Request first = MPI_REQUEST_NULL, second = MPI_REQUEST_NULL;
  bool checked = false, started = false;
  int64_t arrival = 0;
};

bool finished(MPI_Request* request) {
  int done = 0;
  MPI_Test(request, &done, MPI_STATUS_IGNORE);
  return done;
}

class MpiTransport : public Transport {
 public:
  using Transport::Transport;

  std::unique_ptr<Request> isend(int peer, const void* data, size_t bytes, Header header) override {
    auto t = std::make_unique<Transfer>(true, nullptr);
    t->header = complete(header, bytes);
    t->header.serial = serial_[{peer, header.call.channel}]++;
    ledger.sent(t->header);
    const size_t inside = together(bytes) ? bytes : 0;
    t->packet.reset(new char[sizeof(Header) + inside]);
    memcpy(t->packet.get(), &t->header, sizeof(Header));
    if (inside) memcpy(t->packet.get() + sizeof(Header), data, inside);
    (together(bytes) ? MPI_Issend : MPI_Isend)(t->packet.get(), int(sizeof(Header) + inside), MPI_BYTE, peer,
                                               header_tag(header), MPI_COMM_WORLD, &t->first);
    if (!together(bytes))
      MPI_Issend(data, int(bytes), MPI_BYTE, peer, payload_tag(t->header), MPI_COMM_WORLD, &t->second);
    return t;
  }

  std::unique_ptr<Request> irecv(int peer, void* data, size_t bytes, Header expected) override {
    auto t = std::make_unique<Transfer>(false, data);
    t->header = complete(expected, bytes);
    t->packet.reset(new char[sizeof(Header) + kTogether]);  // for any header, even one we do not agree with
    MPI_Irecv(t->packet.get(), sizeof(Header) + kTogether, MPI_BYTE, peer, header_tag(expected),
              MPI_COMM_WORLD, &t->first);
    return t;
  }

  bool test(Request& request) override {
    auto& t = static_cast<Transfer&>(request);
    if (t.first != MPI_REQUEST_NULL && !finished(&t.first)) return false;
    if (t.sending) return t.second == MPI_REQUEST_NULL || finished(&t.second);
    Header theirs;
    memcpy(&theirs, t.packet.get(), sizeof(Header));
    if (!t.checked) check(t.header, theirs);
    t.checked = true;
    if (!arrived(t.arrival, theirs, t.header)) return false;
    if (together(theirs.bytes)) {
      if (theirs.bytes) memcpy(t.data, t.packet.get() + sizeof(Header), theirs.bytes);
    } else {
      if (!t.started)
        MPI_Irecv(t.data, int(theirs.bytes), MPI_BYTE, theirs.from, payload_tag(theirs), MPI_COMM_WORLD,
                  &t.second);
      t.started = true;
      if (!finished(&t.second)) return false;
    }
    ledger.received(theirs, t.header);
    return true;
  }

  void idle() override {
    int flag;
    MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &flag, MPI_STATUS_IGNORE);
  }

 private:
  // On a simulated link the payload always comes alone, so that the send ends when the link has carried it.
  bool together(size_t bytes) const { return bytes <= kTogether && !link.on(); }
  std::map<std::pair<int, uint32_t>, uint32_t> serial_;
};
}  // namespace

std::unique_ptr<Transport> mpi_transport(Board* board, const Link& link, int rank) {
  return std::make_unique<MpiTransport>(board, link, rank);
}

}  // namespace sim
#endif
