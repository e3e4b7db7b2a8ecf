// Starting and ending ranks, and making sure that a rank that goes away takes the others with it.
#include "world.h"

#include <unistd.h>

#include <cstdlib>
#include <set>
#include <thread>

#include "rank.h"
#ifdef HAVE_MPI
#include <mpi.h>
#endif

namespace sim {

int world_rank() { return this_rank()->id(); }
int world_size() { return this_rank()->size(); }
std::vector<TrafficRow> traffic() { return this_rank()->traffic(); }
void reset_traffic() { this_rank()->reset_traffic(); }
Busy::Busy() { this_rank()->board->rank[world_rank()].busy = true; }
Busy::~Busy() { this_rank()->board->rank[world_rank()].busy = false; }

namespace {

struct World {  // the one of this process
  std::shared_ptr<Board> board;
  WorldOptions options;
  int rank = -1;  // of an MPI process
};
std::atomic<World*> running{nullptr};

void print(const World& world, const std::string& text) {
  if (world.options.print)
    world.options.print(text);
  else
    fprintf(stderr, "%s\n", text.c_str());
}

void pause_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

#ifdef HAVE_MPI
// mpiexec forwards what ranks print, and at an abort drops what it has not read yet.
void abort_all() {
  fflush(nullptr);
  pause_ms(200);
  MPI_Abort(MPI_COMM_WORLD, 1);
}
#endif

// exit() inside a body is a failure of the world, whatever its status: mpiexec and main() would report
// success.
void on_exit_called() {
  World* world = running;
  if (!world) return;
  const int rank = this_rank_or_null() ? this_rank_or_null()->id() : world->rank;
  world->board->leave(rank, "it called exit");
  if (world->board->fail(rank, ncclRemoteError,
                         "rank " + std::to_string(rank) +
                             " called exit before its work was done; what every rank is "
                             "doing:" +
                             world->board->report()))
    print(*world, world->board->error);
  for (int i = 0; i < 200 && !world->board->all_left(rank); i++) pause_ms(10);  // others clean up
  fflush(nullptr);
#ifdef HAVE_MPI
  if (world->rank >= 0) abort_all();
#endif
  _exit(1);
}

void begin(World* world) {
  static const int registered = std::atexit(on_exit_called);
  (void)registered;
  World* none = nullptr;
  if (!running.compare_exchange_strong(none, world)) throw std::logic_error("one world at a time");
}

// The life of a rank on its own thread. Returns its status and what it has to say that the board does not.
std::pair<int, std::string> live(std::unique_ptr<Transport> transport, const World& world,
                                 const std::function<int(int)>& body) {
  Board& board = *world.board;
  const int me = transport->rank;
  const std::string name = "rank " + std::to_string(me);
  set_this_rank(std::make_shared<Rank>(std::move(transport), world.board, world.options.timeout_s));
  int status = 1;
  std::string thrown;
  bool threw = false;
  try {
    status = body(me);
    // Work in streams belongs to the rank's life. (Its error is on the board.)
    (void)cudaDeviceSynchronize();
    board.leave(me, "it returned " + std::to_string(status));
  } catch (const std::exception& e) {
    threw = true;
    thrown = *e.what() ? e.what() : "an exception without a text";
  } catch (...) {
    threw = true;
    thrown = "something that is no std::exception";
  }
  if (threw) {
    const bool echo = board.failed == 2 && thrown.find(board.error) != std::string::npos;
    thrown = echo ? "" : name + " threw: " + thrown;
    if (!echo && board.fail(me, ncclRemoteError, thrown + "; what every rank is doing:" + board.report()))
      thrown = "";
    board.leave(me, echo ? "it stopped with the others" : "it threw");
#ifdef RINGTRON_NCCL
    if (world.rank < 0) {  // threads: others may wait inside NCCL, which does not look at the board (run_mpi aborts)
      while (board.failed != 2) pause_ms(1);
      print(world, board.error);
      fflush(nullptr);
      _exit(1);
    }
#endif
  }
  if (board.has_failed() && status == 0) status = 1;
  set_this_rank(nullptr);
  return {status, thrown};
}

}  // namespace

int run_threads(int n, const WorldOptions& options, const std::function<int(int)>& body) {
  World world;
  world.options = options;
  // The board outlives the world if work is still queued in a stream.
  world.board =
      std::shared_ptr<Board>(Board::create(aligned_alloc(64, (Board::bytes(n) + 63) / 64 * 64), n), free);
  begin(&world);
  auto hub = make_hub(n);
  const Link link{options.link_gbps, options.link_us};
  std::vector<std::pair<int, std::string>> ends(n);
  std::vector<std::thread> threads;
  for (int r = 0; r < n; r++)
    threads.emplace_back(
        [&, r] { ends[r] = live(threads_transport(hub, world.board.get(), link, r), world, body); });
  for (auto& t : threads) t.join();
  running = nullptr;
  if (world.board->has_failed()) print(world, world.board->error);
  std::set<std::string> said{""};
  int status = 0;
  for (auto& [code, text] : ends) {
    if (said.insert(text).second) print(world, text);
    if (code) status = code;
  }
  return status;
}

#ifdef HAVE_MPI
namespace {
int how_many_can_start(bool mine) {
  int can = mine, all = 0;
  MPI_Allreduce(&can, &all, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  return all;
}
}  // namespace

bool give_up_mpi(int* argc, char*** argv) {
  int provided, initialized = 0;
  MPI_Initialized(&initialized);
  if (initialized) return false;
  MPI_Init_thread(argc, argv, MPI_THREAD_SERIALIZED, &provided);
  const bool none = how_many_can_start(false) == 0;
  MPI_Finalize();
  return none;
}

int run_mpi(int* argc, char*** argv, const WorldOptions& options, const std::function<int(int)>& body) {
  int provided, size;
  World world;
  world.options = options;
  MPI_Init_thread(argc, argv, MPI_THREAD_SERIALIZED, &provided);
  MPI_Comm_rank(MPI_COMM_WORLD, &world.rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (how_many_can_start(true) < size) {  // the others say why
    MPI_Finalize();
    return 1;
  }
  MPI_Comm node;
  int node_size;
  MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, world.rank, MPI_INFO_NULL, &node);
  MPI_Comm_size(node, &node_size);
  if (provided < MPI_THREAD_SERIALIZED || node_size != size) {
    print(world, "needs MPI_THREAD_SERIALIZED, and all ranks on one machine");
    abort_all();
  }
  // Rank 0 owns the memory of the board; a window keeps it until MPI_Finalize.
  MPI_Win window;
  void* memory;
  MPI_Aint bytes = world.rank == 0 ? MPI_Aint(Board::bytes(size)) : 0;
  int unit;
  MPI_Win_allocate_shared(bytes, 1, MPI_INFO_NULL, node, &memory, &window);
  MPI_Win_shared_query(window, 0, &bytes, &unit, &memory);
  if (world.rank == 0) Board::create(memory, size);
  MPI_Barrier(node);
  world.board = std::shared_ptr<Board>(static_cast<Board*>(memory), [](Board*) {});
  begin(&world);

  const Link link{options.link_gbps, options.link_us};
  auto [status, text] = live(mpi_transport(world.board.get(), link, world.rank), world, body);
  Board& board = *world.board;
  // MPI_Finalize waits, and would spin; so wait here, asleep, until everybody is ready for it. Progress is
  // made for the sake of peers that still receive from here.
  while (!board.all_left() && !board.has_failed()) {
    int flag;
    MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &flag, MPI_STATUS_IGNORE);
    pause_ms(1);
  }
  if (board.has_failed()) {
    while (board.failed != 2) pause_ms(1);
    if (board.culprit == world.rank) print(world, board.error);
    if (!text.empty()) print(world, text);
    fflush(nullptr);
    // One ends them all, and gives the others time to say what they have to say.
    const bool mine = board.culprit == world.rank;
    for (int i = 0; i < (mine ? 100 : 300) && !(mine && board.all_left()); i++) pause_ms(10);
    abort_all();
    _exit(1);
  }
  running = nullptr;
  MPI_Win_free(&window);
  MPI_Comm_free(&node);
  MPI_Finalize();
  return status;
}
#endif

}  // namespace sim
