// host.h - what the host's processor computes on page-locked memory, where optimizer state is offloaded.
//
// The same formulas as the kernels of these names. On the simulated GPU the bits of AdamW are the same too; a GPU
// fuses multiplications and additions where a CPU may not, and the norm's sum runs in another order, so there the
// last bit may differ. The proof's bounds are those of every other stage.
#pragma once
#include "../kernels/kernels.h"

void host_adamw(real* w, float* w32, float* m, float* v, const real* g, int64_t n, AdamWStep);
void host_add(real* out, const real* a, const real* b, int64_t n);  // out may be a or b
double host_sum_of_squares(const real* x, int64_t n);
