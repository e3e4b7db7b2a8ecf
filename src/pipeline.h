// pipeline.h - pipelines: which stage holds which layers, schedules as data, the timetable they lead to, and one engine
// that runs any of them.
//
// The model is cut into p v chunks of consecutive units. Rank i is stage i and holds the chunks i, p + i, 2p + i, ...;
// without interleaving v = 1. A schedule is the list of what a stage computes. Sends and receives are added here, in
// one order that all ranks agree on, so that no schedule can deadlock.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "adamw.h"
#include "parallel.h"

class Lesson;

// Throws Error, one line, if p stages of v chunks can't hold this model.
void check_stages(const ModelConfig&, int p, int v);

// What stage i of p computes in a step of m micro-batches, in order: forward, backward, or the halves of backward.
using Order = std::vector<Op>;
using Schedule = std::function<Order(int p, int i, int m)>;

// When everything happens if each forward of a chunk takes 1, each backward 2 (each half of it 1), and transfers
// nothing. The unit of time is a chunk's forward: tF = v of them.
struct Timetable {
  struct Entry {
    Op op;
    double start, end;
  };
  int p = 1, v = 1, m = 1;
  std::vector<std::vector<Entry>> stages;

  double makespan() const;                    // in tF, as all that follow
  double ideal() const { return 3.0 * m; }    // m (tF + tB): every stage always busy
  double overhead() const { return makespan() / ideal() - 1; }  // bubble over ideal time
  double share() const { return 1 - ideal() / makespan(); }     // bubble over the time of the step
  std::vector<int> stash() const;             // by stage: most chunks of micro-batches kept at one time for backward
  std::string draw() const;                   // lines of text: F3 forward of micro-batch 3, B3, W3; f3: of an odd chunk
  std::vector<Span> spans() const;            // the same for trace.h, 1 us = 1 tF
};

// Throws Error if the orders wait for each other for ever, or leave a forward or backward out or do it twice.
Timetable simulate(int p, int m, int v, const Schedule&);

// Stage i's order with its sends and receives. All transfers of all stages have one place in time: the end of what
// produced them. Each stage does everything in the order of that time (computing: of its end), so of all that is not
// yet done, the earliest can always be done: no deadlock, even if a send waits until it is received.
Order with_transfers(const Timetable&, int stage);

class Pipeline : public Parallel {
 public:
  // Stage pp.rank() of a pipeline over `pp`, with v chunks a stage. All ranks construct theirs together.
  // Throws Error if there are fewer layers than chunks.
  Pipeline(Group& pp, const ModelConfig&, Schedule, int v = 1);
  ~Pipeline() override;

  int stage(int unit) const override;               // which of this rank's chunks
  bool counts(const Param&) const override;         // a shared table on the first stage only
  std::vector<Op> schedule(int m) const override;   // of this rank, with sends and receives
  void finish_gradients(Transformer&) override;     // tied: sums the two copies' gradients

  // One step: all micro-batches, forward and backward, as schedule() says.
  void run(Transformer&, const std::vector<MicroBatch>&);

  int chunks() const { return v_; }
  int first_unit(int chunk) const;                  // this rank's chunk: units [first_unit, last_unit)
  int last_unit(int chunk) const;
  int blocks() const;                               // on this stage
  bool holds(int unit) const { return stage(unit) >= 0; }
  int sends() const;                                // that this stage does for each micro-batch, both directions
  int64_t parameters() const;                       // of this stage, a copy of a shared table included
  Timetable timetable(int m) const { return simulate(pp_.size(), m, v_, schedule_); }

  // Peak bytes along this stage's order, for micro-batches of `samples` samples each: activations, with what has
  // arrived too early and what is not sent yet; and scratch, with what postponed weight halves keep.
  int64_t peak_activations(const std::vector<int>& samples) const;
  int64_t peak_workspace(const std::vector<int>& samples) const;

  // After the loop: what this stage should have held and summed (all but its sends, which the lesson spells out) ...
  void expect(Lesson&) const;
  // ... and the timetable: predicted and, from the steps that ran, measured. Prints on rank 0; all ranks call it.
  void report(Lesson&) const;

 private:
  int chunk_of(int unit) const;                     // of the whole model, 0 .. p v - 1
  int begin_of(int chunk) const;                    // the first unit of one of them
  template <class Visit> void walk(const std::vector<int>& samples, Visit) const;

  Group& pp_;
  ModelConfig config_;
  Schedule schedule_;
  int v_;
  cudaStream_t transfers_ = nullptr;                // all sends and receives, in the agreed order
  std::unique_ptr<Group> embedding_;                // first and last stage, if they share a table
  struct Ran {
    Op op;
    double start, end;  // seconds
  };
  std::vector<std::vector<Ran>> ran_;               // every step
  int peak_stash_ = 0;
};

// What the four pipeline lessons start with: enough layers and micro-batches to see something; and the check that
// options and ranks fit, with the lesson's own after it.
Options pipeline_defaults(int layers, std::map<std::string, Extra> extra = {},
                          std::function<void(const Options&, int p)> check = {});
