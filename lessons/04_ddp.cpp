// 04_ddp.cpp - DDP: gradients are all-reduced in buckets, while backward still computes the next ones.
//
//   compute:  F F F F | B head | B block 4 | B block 3 | B block 2 | B block 1 | B embedding | wait | update
//   comm:                                  | bucket 1  | bucket 2  | bucket 3  | bucket 4    | bucket 5
//                                            (head and block 4)
//
// Backward finishes the last unit first, so buckets are filled from the end of the model. Each has two events:
//   ready: recorded on the compute stream when its gradients are complete; the communication stream waits for it;
//   done:  recorded on the communication stream after its all-reduce; the compute stream waits for it once, at the end.
// With several micro-batches only the last one triggers (no_sync in PyTorch): one reduction a step, not m.
// Sent per rank: 2 Psi (n-1)/n, as without overlap. Exposed communication = step time - time of the same step without
// communication.                                                                                  notes/ddp.md
#include <algorithm>
#include <chrono>
#include <thread>

#include "../src/data_parallel.h"
#include "../src/formulas.h"
#include "../src/lesson.h"

struct Ddp : DataParallel {
  struct Bucket {
    std::vector<Unit*> units;
    Buffer data;
    cudaEvent_t ready, done;
  };
  enum class Mode { overlap, after_backward, none };  // none: only to measure what computing alone takes

  Ddp(Group& dp, int64_t bucket_bytes) : DataParallel(dp), bucket_bytes(bucket_bytes) {
    CUDA_CHECK(cudaStreamCreateWithFlags(&comm, cudaStreamNonBlocking));
  }
  ~Ddp() override {
    cudaStreamDestroy(comm);
    for (Bucket& bucket : buckets) cudaEventDestroy(bucket.ready), cudaEventDestroy(bucket.done);
  }

  // Called after forward and after backward of every unit; `last`: of the last micro-batch, so gradients are complete.
  void close(Unit& unit, bool backward, bool last) override {
    pace(backward);
    if (!backward || !last || mode == Mode::none) return;
    filling.push_back(&unit);
    filling_bytes += unit.gradients.bytes();
    if (filling_bytes >= bucket_bytes || unit.index == 0) launch();
  }

  // One bucket: copied together, reduced by one call, copied back. All of it on the communication stream.
  void launch() {
    if (used == buckets.size()) {  // the order of units is the same in every step, so buckets are reused
      Bucket fresh;
      fresh.data = dp.device().allocate<real>(Memory::communication, {filling_bytes / int64_t(sizeof(real))});
      CUDA_CHECK(cudaEventCreateWithFlags(&fresh.ready, cudaEventDisableTiming));
      CUDA_CHECK(cudaEventCreateWithFlags(&fresh.done, cudaEventDisableTiming));
      buckets.push_back(std::move(fresh));
    }
    Bucket& bucket = buckets[used++];
    bucket.units = std::move(filling);
    filling.clear(), filling_bytes = 0;
    CUDA_CHECK(cudaEventRecord(bucket.ready, dp.device().stream()));
    if (mode == Mode::overlap) reduce(bucket);
  }

  void reduce(Bucket& bucket) {
    CUDA_CHECK(cudaStreamWaitEvent(comm, bucket.ready, 0));
    auto copy = [&](bool in) {
      real* at = bucket.data.data;
      for (Unit* unit : bucket.units) {
        Buffer& g = unit->gradients;
        CUDA_CHECK(cudaMemcpyAsync(in ? at : g.data, in ? g.data : at, g.bytes(), cudaMemcpyDeviceToDevice, comm));
        at += g.numel();
      }
    };
    copy(true);
    dp.all_reduce<real>(bucket.data, Reduce::sum, comm);
    copy(false);
    CUDA_CHECK(cudaEventRecord(bucket.done, comm));
  }

  void finish_gradients(Transformer&) override {
    if (mode == Mode::after_backward)
      for (size_t i = 0; i < used; ++i) reduce(buckets[i]);
    for (size_t i = 0; i < used; ++i) CUDA_CHECK(cudaStreamWaitEvent(dp.device().stream(), buckets[i].done, 0));
    used = 0;
  }

  // --unit-ms: a unit's backward takes at least that long, so that overlap can be seen on a busy machine.
  void pace(bool backward) {
    if (backward && unit_seconds > 0) {
      dp.device().synchronize();
      std::this_thread::sleep_for(std::chrono::duration<double>(unit_began + unit_seconds - seconds()));
    }
    unit_began = seconds();
  }

  int64_t bucket_bytes, filling_bytes = 0;
  std::vector<Unit*> filling;    // units whose gradients wait for their bucket to be full
  std::vector<Bucket> buckets;
  size_t used = 0;               // buckets launched in this step
  Mode mode = Mode::overlap;
  double unit_seconds = 0, unit_began = 0;
  cudaStream_t comm = nullptr;
};

// One step of training, up to the gradients; in seconds.
static double timed_step(Lesson& lesson, Transformer& model, Ddp& ddp, int64_t step) {
  const std::vector<MicroBatch> parts = lesson.batch(step, model);
  lesson.sum(0);  // all ranks begin together
  const double start = seconds();
  model.start_step();
  for (const MicroBatch& part : parts) {
    model.forward(part);
    model.backward(part);
  }
  ddp.finish_gradients(model);
  lesson.device().synchronize();
  lesson.sum(0);  // and the slowest one counts
  return seconds() - start;
}

// What communication adds to a step, with and without overlap.
static void show_exposed(Lesson& lesson, Transformer& model, Ddp& ddp) {
  const Ddp::Mode modes[] = {Ddp::Mode::none, Ddp::Mode::after_backward, Ddp::Mode::overlap};
  std::vector<double> times[3];
  for (int round = 0; round < 5; ++round)
    for (int i = 0; i < 3; ++i) {
      ddp.mode = modes[i];
      times[i].push_back(timed_step(lesson, model, ddp, round));
    }
  for (auto& t : times) std::sort(t.begin(), t.end());
  const double compute = times[0][0], after = times[1][0], overlap = times[2][0];
  lesson.print("exposed communication, the shortest of 5 steps%s\n", lesson.link_text().c_str());
  lesson.print("  computing alone      %8.1f ms\n", 1e3 * compute);
  lesson.print("  reduce after backward%8.1f ms, exposed %7.1f ms\n", 1e3 * after, 1e3 * (after - compute));
  lesson.print("  overlapped           %8.1f ms, exposed %7.1f ms\n", 1e3 * overlap, 1e3 * (overlap - compute));
  const WorldOptions& link = lesson.options().world;
  if (ddp.unit_seconds == 0 || link.link_gbps == 0) return;
  std::vector<double> ready, drain;  // what a queue of these buckets predicts, if computing takes just the pace
  double units = 0, all = 0;
  for (const Ddp::Bucket& bucket : ddp.buckets) {
    ready.push_back((units += double(bucket.units.size())) * ddp.unit_seconds);
    drain.push_back(ring_all_reduce_seconds(double(bucket.data.bytes()), ddp.dp.size(), 1e-6 * link.link_us,
                                            1e9 * link.link_gbps));
    all += drain.back();
  }
  lesson.print("  by formula           exposed %.1f milliseconds after backward, %.1f overlapped\n", 1e3 * all,
               1e3 * (last_reduced(ready, drain) - ready.back()));
}

static Options ddp_defaults(Options o) {
  o.world.threads = 4;
  o.steps = 20;
  o.model.layers = 4;
  o.extra["bucket-kb"] = {512, "size at which a bucket is full, kilobytes (PyTorch: 25 MiB, the first 1 MiB)"};
  o.extra["unit-ms"] = {0, "ms that the backward of a unit takes at least, to see overlap on a busy machine; 0: off"};
  o.extra["overlap"] = {1, "1: reduce while backward computes; 0: after it"};
  return o;
}

LESSON(ddp, "DDP: all-reduce in buckets, while backward still computes", ddp_defaults({})) {
  Group& all = lesson.world().all();
  Ddp ddp(all, int64_t(lesson.option("bucket-kb") * 1000));
  ddp.mode = lesson.option("overlap") ? Ddp::Mode::overlap : Ddp::Mode::after_backward;
  ddp.unit_seconds = 1e-3 * lesson.option("unit-ms");
  Transformer model(lesson.config(), ddp, lesson.device(), lesson.seed());
  AdamW adamw(model, lesson.options());
  lesson.start(adamw);

  for (int64_t step : lesson.steps()) {
    model.start_step();
    for (const MicroBatch& part : lesson.batch(step, model)) {
      model.forward(part);
      model.backward(part);          // <- the idea: close() launches a bucket's all-reduce in here
    }
    ddp.finish_gradients(model);     // waits for the buckets
    const double loss = lesson.sum(model.loss());
    const double norm = std::sqrt(lesson.sum(model.squared_gradient_norm()));
    lesson.log(step, loss, norm, model);
    adamw.step(lesson.learning_rate(step), lesson.clip_factor(norm));
  }

  int64_t Psi = 0, sent = 0;
  const int64_t n = all.size(), r = all.rank(), B = sizeof(real), steps = int64_t(lesson.steps().size());
  for (const Unit& unit : model.params().units()) Psi += unit.padded;
  for (const Ddp::Bucket& bucket : ddp.buckets) {
    const int64_t X = bucket.data.numel();
    auto c = [&](int64_t i) { return X / n + (i % n < X % n); };
    if (n > 1) sent += 2 * X - c(r + 1) - c(r + 2);
  }
  lesson.print("  buckets %zu, one all-reduce each per step\n", ddp.buckets.size());
  lesson.expect_sent("world", "all_reduce", steps * B * sent, "steps B sum over buckets of 2X - |c(r+1)| - |c(r+2)|");
  lesson.expect_calls("world", "all_reduce", steps * int64_t(ddp.buckets.size()), "steps x buckets");
  lesson.expect_state(B * Psi, B * Psi, (B == 4 ? 8 : 12) * Psi);
  lesson.expect_activations(model);
  lesson.expect_peak(Memory::communication, B * Psi, "the buckets together: B Psi");
  lesson.finish(adamw);
  show_exposed(lesson, model, ddp);
  return lesson.prove(model);
}
