// 02_dp.cpp - data parallelism with a parameter server: one rank sums all gradients and updates for everyone.
//
//        worker 1      worker 2      worker 3          every rank: forward and backward on its slice of the batch
//            \             |             /
//      gradients: Psi from each worker: (n-1) Psi arrive at one port
//              \           |           /
//               server 0 (a worker too): sum, clip, AdamW         the optimizer's state exists only here
//              /           |           \.
//      parameters: Psi to each worker: (n-1) Psi leave from one port
//
// Sent and received per step by the server: (n-1) Psi each way; by a worker: Psi each way. The time of a step grows
// with n at the server's port, whatever the others have to spare. `--servers k` splits each unit's parameters over
// ranks 0 .. k-1; with k = n this is a reduce-scatter and an all-gather, and every port carries the same.
//                                                                                   notes/parameter_server.md
#include "../src/data_parallel.h"
#include "../src/lesson.h"
#include "../kernels/kernels.h"

struct ParameterServer : DataParallel {
  ParameterServer(Group& dp, int servers) : DataParallel(dp), servers(servers) {
    if (servers < 1 || servers > dp.size())
      throw Error(format("--servers %d: choose 1 to %d, the number of ranks", servers, dp.size()));
  }
  // Server s updates part s of every unit. The other ranks update nothing, and hold no optimizer state.
  Shard shard() const override { return {std::min(dp.rank(), servers), servers}; }
  bool counts(const Param&) const override { return true; }  // in the norm, each server counts its own part
  bool serves() const { return dp.rank() < servers; }
  static Tensor part(Buffer& flat, int s, int servers) {
    const int64_t share = flat.numel() / servers;
    return {flat.data + s * share, {share}};
  }

  // Push: in round j rank r sends to server r+j, and takes from rank r-j if it serves. So no two ranks ever wait for
  // the same port, if there are several servers; and a server adds in a fixed order, so the sums are the same bits
  // every time.
  void finish_gradients(Transformer& model) override {
    const int n = dp.size(), r = dp.rank();
    for (Unit& unit : model.params().units()) {
      Buffer theirs;
      if (serves()) theirs = dp.device().allocate<real>(Memory::communication, {unit.gradients.numel() / servers});
      for (int j = 1; j < n; ++j) {
        const int to = (r + j) % n, from = (r + n - j) % n;
        {
          Group::Together together(dp, "push");
          if (to < servers) dp.send(part(unit.gradients, to, servers), to);
          if (serves()) dp.receive<real>(theirs, from);
        }
        if (!serves()) continue;
        Tensor mine = part(unit.gradients, r, servers);
        add(mine.data, mine.data, theirs.data, mine.numel(), dp.device().stream());
      }
    }
  }

  // Update, then pull: everybody gets the new parameters from their servers, in the same rounds.
  void update(AdamW& adamw, float lr, float gradient_scale) override {
    const int n = dp.size(), r = dp.rank();
    adamw.step(lr, gradient_scale);
    for (Unit& unit : adamw.model().params().units())
      for (int j = 1; j < n; ++j) {
        const int to = (r + j) % n, from = (r + n - j) % n;
        Group::Together together(dp, "pull");
        if (serves()) dp.send(part(unit.weights, r, servers), to);
        if (from < servers) dp.receive(part(unit.weights, from, servers), from);
      }
  }

  int servers;
};

static Options dp_defaults(Options o) {
  o.world.threads = 4;
  o.steps = 20;
  o.extra["servers"] = {1, "ranks that are parameter servers, each of a part of every unit"};
  return o;
}

LESSON(dp, "data parallelism with a parameter server", dp_defaults({})) {
  Group& all = lesson.world().all();
  ParameterServer server(all, int(lesson.option("servers")));
  Transformer model(lesson.config(), server, lesson.device(), lesson.seed());
  AdamW adamw(model, lesson.options());
  lesson.start(adamw);

  for (int64_t step : lesson.steps()) {
    model.start_step();
    for (const MicroBatch& part : lesson.batch(step, model)) {
      model.forward(part);
      model.backward(part);
    }
    server.finish_gradients(model);  // <- the idea: to the server and back
    const double loss = lesson.sum(model.loss());
    const double norm = std::sqrt(lesson.sum(model.squared_gradient_norm()));
    lesson.log(step, loss, norm, model);
    server.update(adamw, lesson.learning_rate(step), lesson.clip_factor(norm));
  }

  // Psi here is with the padding that makes each unit divisible by k; `mine` is this rank's part of it, if it serves.
  int64_t Psi = 0, largest = 0;
  for (const Unit& unit : model.params().units()) Psi += unit.padded, largest = std::max(largest, unit.padded);
  const int64_t n = all.size(), mine = server.serves() ? Psi / server.servers : 0, B = sizeof(real);
  const int64_t steps = int64_t(lesson.steps().size());
  lesson.expect_sent("world", "send", steps * B * ((Psi - mine) + (n - 1) * mine),
                     "steps B (Psi - mine + (n-1) mine), mine = Psi/k on a server, else 0");
  lesson.expect_received("world", "recv", steps * B * ((n - 1) * mine + (Psi - mine)),
                         "steps B ((n-1) mine + Psi - mine)");
  lesson.expect_state(B * Psi, B * Psi, (B == 4 ? 8 : 12) * (server.serves() ? adamw.elements() : 0));
  lesson.expect_activations(model);
  lesson.expect_peak(Memory::communication, server.serves() ? largest / server.servers * B : 0,
                     "one part of the largest unit, on a server");
  lesson.finish(adamw);
  return lesson.prove(model);
}
