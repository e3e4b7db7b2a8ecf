#include "checkpoint.h"

#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <type_traits>

#include "safetensors.h"

namespace fs = std::filesystem;

namespace {

std::string clean(const std::string& folder) {
  fs::path path = fs::path(folder).lexically_normal();
  return path.has_filename() ? path.string() : path.parent_path().string();
}

std::vector<int64_t> shape_of(const Param& p) {
  return p.vector ? std::vector<int64_t>{p.columns} : std::vector<int64_t>{p.rows, p.columns};
}

void require_whole(AdamW& adamw) {
  Transformer& model = adamw.model();
  for (const Param& p : Params::describe(model.config())) {
    Param* mine = model.params().find(p.name);
    if (!mine || mine->local_size() != p.rows * p.columns || model.parallel().shard().count != 1)
      throw Error("--save and --load need a rank that holds the whole model, and this one holds a part of it; "
                  "saving from any layout is what lesson 21 is about");
  }
}

// Visits the optimizer's arrays of every parameter: name in the file, device pointer, parameter.
template <class Visit>
void each_state(AdamW& adamw, Visit visit) {
  for (AdamW::State& s : adamw.states())
    for (const Param& p : adamw.model().params().unit(s.unit).params) {
      visit("exp_avg." + p.name, s.m.data + p.offset, p);
      visit("exp_avg_sq." + p.name, s.v.data + p.offset, p);
      if (s.master) visit("master." + p.name, s.master.data + p.offset, p);
    }
}

const HostTensor& tensor_of(const Safetensors& file, const std::string& path, const std::string& name,
                            const std::vector<int64_t>& shape) {
  auto it = file.tensors.find(name);
  if (it == file.tensors.end()) throw Error(format("%s has no tensor %s", path.c_str(), name.c_str()));
  auto text = [](const std::vector<int64_t>& sizes) {
    std::string all;
    for (int64_t size : sizes) all += (all.empty() ? "" : " x ") + std::to_string(size);
    return all;
  };
  if (it->second.shape != shape)
    throw Error(format("%s: %s is %s, this model wants %s; load it with the sizes it was trained with", path.c_str(),
                       name.c_str(), text(it->second.shape).c_str(), text(shape).c_str()));
  return it->second;
}

}  // namespace

void check_writable(const std::string& folder) {
  const std::string to = clean(folder);
  std::error_code ignored;
  if (fs::exists(to, ignored) && !fs::is_directory(to, ignored))
    throw Error(format("--save %s is a file; name a folder", folder.c_str()));
  if (fs::is_directory(to, ignored) && !fs::is_empty(to, ignored) && !fs::exists(to + "/trainer.json", ignored))
    throw Error(format("--save %s holds other files; name a new folder, or one that --save wrote", folder.c_str()));
  const std::string trial = to + ".new";
  fs::remove_all(trial, ignored);
  std::error_code failed;
  fs::create_directories(trial, failed);
  const bool writable = !failed && access(trial.c_str(), W_OK) == 0;
  fs::remove_all(trial, ignored);
  if (!writable)
    throw Error(format("--save %s can't be written (%s); choose another folder", folder.c_str(),
                       failed ? failed.message().c_str() : std::strerror(errno)));
}

void save_checkpoint(const std::string& folder, AdamW& adamw, int64_t step) {
  require_whole(adamw);
  Transformer& model = adamw.model();
  const std::string to = clean(folder), fresh = to + ".new";
  fs::remove_all(fresh);
  fs::create_directories(fresh);

  Safetensors weights, state;
  weights.metadata["format"] = "pt";  // transformers asks for it
  for (const Unit& unit : model.params().units())
    for (const Param& p : unit.params) {
      const std::vector<float> values = model.params().weight_to_host(p);
      weights.tensors[p.name] = std::is_same_v<real, float> ? HostTensor::from_floats(shape_of(p), values)
                                                            : HostTensor::bf16_from_floats(shape_of(p), values);
    }
  each_state(adamw, [&](const std::string& name, float* data, const Param& p) {
    std::vector<float> values(p.local_size());
    model.device().download(values.data(), data, p.local_size());
    state.tensors[name] = HostTensor::from_floats(shape_of(p), values);
  });
  save_safetensors(fresh + "/model.safetensors", weights);
  save_safetensors(fresh + "/optimizer.safetensors", state);
  save_json_text(fresh + "/config.json", to_hugging_face(model.config()));
  save_json_text(fresh + "/trainer.json", format("{\"step\": %lld}\n", (long long)step));

  // Exchange the two folders in one system call: at every moment `to` is the old checkpoint or the new one.
  if (!fs::exists(to)) {
    fs::rename(fresh, to);
  } else {
    if (renameat2(AT_FDCWD, fresh.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE) != 0)
      throw Error(format("%s could not replace %s (%s); the new checkpoint stays in the first", fresh.c_str(),
                         to.c_str(), std::strerror(errno)));
    fs::remove_all(fresh);
  }
}

ModelConfig checkpoint_config(const std::string& folder) {
  if (!fs::is_directory(folder)) throw Error(format("--load %s is not a folder", folder.c_str()));
  const std::string path = clean(folder) + "/config.json";
  return from_hugging_face(load_flat_json(path), path);
}

int64_t load_checkpoint(const std::string& folder, AdamW& adamw) {
  require_whole(adamw);
  Transformer& model = adamw.model();
  const std::string from = clean(folder);
  const std::string weights_path = from + "/model.safetensors", state_path = from + "/optimizer.safetensors";
  const Safetensors weights = load_safetensors(weights_path);
  for (Unit& unit : model.params().units())
    for (Param& p : unit.params)
      model.params().set_weight(p, tensor_of(weights, weights_path, p.name, shape_of(p)).to_floats());
  adamw.refresh_masters();
  if (!fs::exists(state_path)) return 0;  // weights from elsewhere: a fresh start with them

  const Safetensors state = load_safetensors(state_path);
  each_state(adamw, [&](const std::string& name, float* data, const Param& p) {
    if (name.starts_with("master.") && !state.tensors.count(name)) return;  // saved by an fp32 run: made above
    const std::vector<float> values = tensor_of(state, state_path, name, shape_of(p)).to_floats();
    model.device().upload(data, values.data(), p.local_size());
  });
  const auto fields = load_flat_json(from + "/trainer.json");
  auto it = fields.find("step");
  if (it == fields.end()) throw Error(format("%s/trainer.json has no \"step\"", from.c_str()));
  const int64_t step = std::stoll(it->second);
  adamw.set_steps(step);
  return step;
}
