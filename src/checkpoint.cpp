#include "checkpoint.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <type_traits>

namespace fs = std::filesystem;

namespace {

// The folder itself, whatever links and dots lead to it: renaming a link would not move what it points to.
fs::path clean(const std::string& folder) {
  std::error_code failed;
  fs::path path = fs::weakly_canonical(fs::absolute(folder), failed);
  if (failed) path = fs::absolute(folder).lexically_normal();
  return path.has_filename() ? path : path.parent_path();
}

// A new checkpoint is written here, and what it replaces is moved here.
fs::path beside(const fs::path& to) { return to.string() + ".new"; }

const char* const kFiles[] = {"model.safetensors", "optimizer.safetensors", "config.json", "trainer.json"};

// A file in `folder` that no save of ours has written (a killed one leaves "<file>.<number>.tmp"), or "".
std::string foreign_file(const fs::path& folder) {
  std::error_code ignored;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, ignored)) {
    const std::string name = entry.path().filename().string();
    bool ours = false;
    for (const std::string file : kFiles)
      ours |= name == file || (name.starts_with(file + ".") && name.ends_with(".tmp"));
    if (!ours || entry.is_directory(ignored)) return name;
  }
  return "";
}

// Removes a folder, if all that it holds is a checkpoint or parts of one.
void discard(const fs::path& folder) {
  std::error_code ignored;
  if (foreign_file(folder).empty()) fs::remove_all(folder, ignored);
}

// Exchanges two folders in one system call: at every moment `to` is the old checkpoint or the new one.
void exchange(const fs::path& fresh, const fs::path& to) {
  if (!fs::exists(to)) return fs::rename(fresh, to);
  if (renameat2(AT_FDCWD, fresh.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE) == 0) return;
  if (errno != EINVAL && errno != ENOSYS)
    throw Error(format("--save can't replace %s (%s)", to.c_str(), std::strerror(errno)));
  const fs::path old = to.string() + ".old";  // a file system that can't exchange, such as NFS: in steps
  discard(old);
  fs::rename(to, old);
  fs::rename(fresh, to);
  fs::rename(old, fresh);
}

std::vector<int64_t> shape_of(const Param& p) {
  return p.vector ? std::vector<int64_t>{p.columns} : std::vector<int64_t>{p.rows, p.columns};
}

// Visits the optimizer's arrays of every parameter: name in the file, device pointer, parameter.
template <class Visit>
void each_state(AdamW& adamw, Visit visit) {
  for (AdamW::State& s : adamw.states()) {
    if (s.end - s.begin != adamw.model().params().unit(s.unit).size) continue;  // a rank that updates nothing
    for (const Param& p : adamw.model().params().unit(s.unit).params) {
      visit("exp_avg." + p.name, s.m.data + p.offset, p);
      visit("exp_avg_sq." + p.name, s.v.data + p.offset, p);
      if (s.master) visit("master." + p.name, s.master.data + p.offset, p);
    }
  }
}

const HostTensor& tensor_of(const Safetensors& file, const std::string& path, const std::string& name,
                            const std::vector<int64_t>& shape) {
  auto it = file.tensors.find(name);
  if (it == file.tensors.end())
    throw Error(format("%s has no tensor %s; do config.json and it belong together?", path.c_str(), name.c_str()));
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

// `folder` as the user wrote it, for messages.
void check_target(const std::string& folder) {
  std::error_code ignored;
  const fs::path to = clean(folder), here = fs::current_path(ignored);
  const char* const name = folder.c_str();
  if (fs::exists(fs::symlink_status(to, ignored)) && !fs::is_directory(to, ignored))
    throw Error(format("--save %s is not a folder; name a new one", name));
  if (std::mismatch(to.begin(), to.end(), here.begin(), here.end()).first == to.end())
    throw Error(format("--save %s holds the folder you are in, and a save replaces it whole; name a new folder", name));
  struct stat mine = {}, above = {};
  if (stat(to.c_str(), &mine) == 0 && stat(to.parent_path().c_str(), &above) == 0 && mine.st_dev != above.st_dev)
    throw Error(format("--save %s is a mount point, which can't be replaced; name a folder in it", name));
  for (const fs::path& path : {to, beside(to)})
    if (const std::string file = foreign_file(path); !file.empty())
      throw Error(format("--save %s would remove %s, which no save has written; name a new folder", name,
                         (path / file).c_str()));
}

}  // namespace

bool holds_whole(AdamW& adamw) {
  Transformer& model = adamw.model();
  for (const Param& p : Params::describe(model.config())) {
    Param* mine = model.params().find(p.name);
    if (!mine || mine->local_size() != p.rows * p.columns || model.parallel().shard().count != 1) return false;
  }
  return true;
}

void check_writable(const std::string& folder) {
  check_target(folder);
  const fs::path trial = beside(clean(folder));
  std::error_code failed;
  const bool made = fs::create_directories(trial, failed);
  if (!failed && (access(trial.parent_path().c_str(), W_OK) != 0 || access(trial.c_str(), W_OK) != 0))
    failed = std::error_code(errno, std::generic_category());
  std::error_code ignored;
  if (made) fs::remove(trial, ignored);
  if (failed)
    throw Error(format("--save %s can't be written (%s); choose another folder", folder.c_str(),
                       failed.message().c_str()));
}

void save_checkpoint(const std::string& folder, AdamW& adamw, int64_t step) {
  Transformer& model = adamw.model();
  const fs::path to = clean(folder), fresh = beside(to);

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
    if (adamw.on_host()) std::copy_n(data, p.local_size(), values.data());
    else model.device().download(values.data(), data, p.local_size());
    state.tensors[name] = HostTensor::from_floats(shape_of(p), values);
  });
  try {
    discard(fresh);
    fs::create_directories(fresh);
    save_safetensors(fresh / "model.safetensors", weights);
    save_safetensors(fresh / "optimizer.safetensors", state);
    save_json_text(fresh / "config.json", to_hugging_face(model.config()));
    save_json_text(fresh / "trainer.json", format("{\"step\": %lld}\n", (long long)step));
  } catch (const std::exception& wrong) {
    std::error_code ignored;
    const bool had = fs::exists(to, ignored);
    discard(fresh);
    throw Error(format("%s; %s %s", wrong.what(), folder.c_str(), had ? "still holds what it held" : "was not made"));
  }
  try {
    check_target(folder);  // again: much may have happened since the run began
    exchange(fresh, to);
  } catch (const std::exception& wrong) {
    throw Error(format("%s; the new checkpoint is in %s", wrong.what(), fresh.c_str()));
  }
  discard(fresh);
}

ModelConfig checkpoint_config(const std::string& folder) {
  if (!fs::exists(folder)) throw Error(format("--load %s: no such folder; check the path", folder.c_str()));
  if (!fs::is_directory(folder))
    throw Error(format("--load %s is not a folder; give the one that --save wrote", folder.c_str()));
  const std::string path = folder + "/config.json";
  return from_hugging_face(load_flat_json(path), path);
}

Checkpoint read_checkpoint(const std::string& folder) {
  Checkpoint from{folder, load_safetensors(folder + "/model.safetensors"), {}, -1};
  const std::string state = folder + "/optimizer.safetensors", trainer = folder + "/trainer.json";
  if (!fs::exists(state) && !fs::exists(trainer)) return from;
  from.state = load_safetensors(state);
  const auto fields = load_flat_json(trainer);
  auto it = fields.find("step");
  const std::string text = it == fields.end() ? "missing" : it->second;
  const auto [end, wrong] = std::from_chars(text.data(), text.data() + text.size(), from.step);
  if (wrong != std::errc() || end != text.data() + text.size() || from.step < 0)
    throw Error(format("%s: \"step\" is %s, not a number of steps; copy the folder again", trainer.c_str(),
                       text.c_str()));
  return from;
}

int64_t restore(const Checkpoint& from, AdamW& adamw) {
  Transformer& model = adamw.model();
  const std::string weights = from.folder + "/model.safetensors", state = from.folder + "/optimizer.safetensors";
  for (const auto& [name, tensor] : from.weights.tensors)  // more than fits here: another model, cut down unseen
    if (!model.params().find(name) && !name.ends_with("rotary_emb.inv_freq") && name != "lm_head.weight")
      throw Error(format("%s has %s, for which this model has no place; do config.json and it belong together?",
                         weights.c_str(), name.c_str()));
  for (Unit& unit : model.params().units())
    for (Param& p : unit.params)
      model.params().set_weight(p, tensor_of(from.weights, weights, p.name, shape_of(p)).to_floats());
  adamw.refresh_masters();
  auto put = [&](float* data, const std::vector<float>& values) {
    if (adamw.on_host()) std::copy(values.begin(), values.end(), data);
    else model.device().upload(data, values.data(), int64_t(values.size()));
  };
  each_state(adamw, [&](const std::string& name, float* data, const Param& p) {  // fp32 weights: masters need no rounding
    if (name.starts_with("master.")) put(data, tensor_of(from.weights, weights, p.name, shape_of(p)).to_floats());
  });
  if (from.step < 0) return 0;  // weights from elsewhere: a fresh start with them

  each_state(adamw, [&](const std::string& name, float* data, const Param& p) {
    if (name.starts_with("master.") && !from.state.tensors.count(name)) return;  // saved by an fp32 run: made above
    put(data, tensor_of(from.state, state, name, shape_of(p)).to_floats());
  });
  adamw.set_steps(from.step);
  return from.step;
}
