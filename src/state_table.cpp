#include "state_table.h"

void print_state_table(Lesson& lesson, AdamW& adamw, const Textbook& book, int64_t sent) {
  Device& device = lesson.device();
  const int64_t B = sizeof(real), d = book.ranks, m = lesson.options().micro_batches;
  const StateBytes& bytes = kTrainingStates[B == 4 ? 0 : 1];
  const StateShare share = zero_state(book.stage, double(d), bytes, book.offload);
  const double Psi = double(lesson.config().parameters());
  int64_t padded = 0;
  for (const Unit& unit : adamw.model().params().units()) padded += unit.padded;
  const int64_t optimizer = bytes.optimizer * adamw.elements();  // padding has none

  lesson.print("training state per rank, %d ranks, divided by %lld%s; Psi %.0f, with padding %lld\n",
               lesson.world().size(), (long long)d, book.offload ? ", offloaded" : "", Psi, (long long)padded);
  lesson.print("  %-11s %13s %13s %13s %13s   %s\n", "bytes", "peak", "stored", "exact", "textbook", "");
  auto row = [&](Memory kind, int64_t exact, double per_parameter, const std::string& formula) {
    lesson.print("  %-11s %13lld %13lld %13lld %13.0f   %s\n", memory_name(kind), (long long)device.peak(kind),
                 (long long)device.current(kind), (long long)exact, per_parameter * Psi, formula.c_str());
    lesson.expect_stored(kind, exact, formula + (kind == Memory::optimizer ? "" : ", padded"));
  };
  auto formula = [&](int each, bool divided) { return format(divided ? "%d Psi/d" : "%d Psi", each); };
  const bool off = book.offload;
  row(Memory::parameters, B * (book.stage >= 3 ? padded / d : padded), share.weights, formula(int(B), book.stage >= 3));
  row(Memory::gradients, off ? 0 : B * (book.stage >= 2 ? padded / d : padded), share.gradients,
      off ? "0" : formula(int(B), book.stage >= 2));
  row(Memory::optimizer, off ? 0 : optimizer, share.optimizer, off ? "0" : formula(bytes.optimizer, book.stage >= 1));
  if (off) row(Memory::host, 2 * B * padded / d + optimizer, share.host, formula(bytes.all(), true));
  const int64_t all = device.current(Memory::parameters) + device.current(Memory::gradients) +
                      device.current(Memory::optimizer);
  lesson.print("  %-11s %13s %13lld %13s %13.0f   on one GPU: %d Psi\n", "on the GPU", "", (long long)all, "",
               share.device() * Psi, bytes.all());

  int64_t counted = 0;
  for (const Traffic& traffic : lesson.world().traffic()) counted += traffic.sent;
  const int64_t steps = int64_t(lesson.steps().size());
  const double multiple = zero_sent(book.stage, double(m), book.reduce_each, book.keep_parameters);
  const double r = double(book.replicas), replicas = 2 * (r - 1) / r / double(d);
  std::string text = format("%g Psi (d-1)/d", multiple);
  if (r > 1) text += format(" + 2 (r-1)/r Psi/d, r = %.0f", r);
  if (book.stage == 3 && lesson.config().tied && !book.keep_parameters) text += "; a tied table is gathered twice more";
  lesson.print("  sent per step, elements    %13s %13lld %13.0f   %s\n",
               World::counts_traffic() ? format("%lld", (long long)(counted / B / steps)).c_str() : "not counted",
               (long long)sent, Psi * (multiple * double(d - 1) / double(d) + replicas), text.c_str());
}
