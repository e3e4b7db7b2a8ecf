// params.h - every parameter by name, shape and unit, and where this rank's piece of it lies.
//
// Storage is by unit (the embedding, each block, the head): one flat buffer of weights and one of gradients per
// unit. One description of a parameter drives its initial values, slicing, gathering, the gradient norm,
// verification and checkpoints.
#pragma once
#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "config.h"
#include "device.h"

struct Parallel;

// How a parameter may be cut between ranks: by rows (the outputs of a linear layer), by columns (its inputs), or
// not at all (norms).
enum class Split { none, rows, columns };

// Which part of a parameter is here: [begin, end) along `axis` of its global shape (rows, columns).
struct Piece {
  int axis = 0;
  int64_t begin = 0, end = 0;
};

struct Param {
  std::string name;      // Hugging Face's
  int64_t rows, columns; // global shape; a norm's weight (D) is (1, D)
  bool vector = false;   // its shape is (columns): norms
  Split split = Split::none;
  int unit = 0;
  Piece piece;           // what is here
  int64_t offset = 0;    // of the piece, in its unit's flat storage
  bool fresh = true;     // no gradient of this step yet: the first one is written, the next ones are added

  bool decays() const { return !vector; }
  int64_t local_rows() const { return piece.axis == 0 ? piece.end - piece.begin : rows; }
  int64_t local_columns() const { return piece.axis == 1 ? piece.end - piece.begin : columns; }
  int64_t local_size() const { return local_rows() * local_columns(); }
  // The global (row-major) index of the piece's element i.
  int64_t global_index(int64_t i) const {
    const int64_t row = i / local_columns(), column = i % local_columns();
    return (row + (piece.axis == 0 ? piece.begin : 0)) * columns + column + (piece.axis == 1 ? piece.begin : 0);
  }
};

// One of `count` equal parts of a unit's flat storage.
struct Shard {
  int index = 0, count = 1;
};

// How a kind of training state is stored between its uses. A shard: only the part that this rank updates.
enum class Storage { whole, shard, shard_on_host };

struct Unit {
  int index = 0;
  std::vector<Param> params;
  int64_t size = 0;           // elements of this rank's pieces
  int64_t padded = 0;         // rounded up to a multiple of the shards it is cut into
  Shard shard;                // which of them is updated here
  Buffer weights, gradients;  // (padded) each; where only a shard is stored: empty, except while the unit is used
  Buffer weight_shard, gradient_shard;  // (padded / shards) each, if the shard is stored apart

  // The one owner function: this rank updates the elements [begin, end) of the flat storage. Reduction, gradient
  // norm, optimizer, gathering and the proof all ask here.
  int64_t share() const { return padded / shard.count; }
  int64_t begin() const { return std::min(padded, shard.index * share()); }
  int64_t end() const { return std::min(padded, begin() + share()); }
  // Their weights and gradients, wherever they lie.
  Tensor my_weights() const { return mine(weights, weight_shard); }
  Tensor my_gradients() const { return mine(gradients, gradient_shard); }

 private:
  Tensor mine(const Buffer& whole, const Buffer& part) const {
    return {part ? part.data : whole.data + begin(), {end() - begin()}};
  }
};

class Params {
 public:
  // Describes, allocates and initialises what `parallel` says is on this rank.
  Params(const ModelConfig&, Parallel&, Device&, uint64_t seed);

  std::vector<Unit>& units() { return units_; }  // those on this rank
  Unit& unit(int index);                         // throws if it is not here
  bool has_unit(int index) const;
  Param* find(const std::string& name);          // nullptr if it is not here
  int64_t local_size() const;                    // elements on this rank

  Tensor weight(const Param&);
  Tensor gradient(const Param&);
  float accumulate(Param&);        // beta for the next product into this gradient: 0 the first time in a step, then 1
  void start_step();               // from here on, gradients are fresh

  // Every parameter of the whole model, in order, whatever is here: names and global shapes.
  static std::vector<Param> describe(const ModelConfig&);
  // The initial value of one element: a pure function of (seed, name, global index), the same in every layout.
  static float initial_value(const Param&, uint64_t seed, uint64_t name, int64_t global_index);

  // Host copies of this rank's piece; set_weight takes the values of the whole parameter.
  std::vector<float> weight_to_host(const Param&);
  std::vector<float> gradient_to_host(const Param&);
  void set_weight(Param&, const std::vector<float>& whole);
  // The elements of the piece, from `first` on, that this rank stores (of a weight) or updates (of a gradient).
  struct Part {
    int64_t first;
    std::vector<float> values;
  };
  Part stored_weight(const Param&);
  Part updated_gradient(const Param&);

  const ModelConfig& config() const { return config_; }
  Device& device() { return device_; }

 private:
  Part to_host(const Param&, Tensor stretch, int64_t begin, bool on_host = false);
  ModelConfig config_;
  Device& device_;
  std::vector<Unit> units_;
  bool gradients_on_host_ = false;
};
