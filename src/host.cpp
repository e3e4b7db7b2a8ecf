#include "host.h"

#include <cmath>

void host_adamw(real* w, float* w32, float* m, float* v, const real* g, int64_t n, AdamWStep s) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float gradient = float(g[i]) * s.gradient_scale;
    const float mi = s.beta1 * m[i] + (1.f - s.beta1) * gradient;
    const float vi = s.beta2 * v[i] + (1.f - s.beta2) * gradient * gradient;
    const float step = mi * s.m_correction / (std::sqrt(vi * s.v_correction) + s.eps) + s.decay * w32[i];
    const float wi = w32[i] - s.lr * step;
    m[i] = mi;
    v[i] = vi;
    w32[i] = wi;
    w[i] = real(wi);
  }
}

void host_add(real* out, const real* a, const real* b, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = real(float(a[i]) + float(b[i]));
}

double host_sum_of_squares(const real* x, int64_t n) {
  double sum[8] = {};  // independent lanes, so that the additions do not wait for each other
  for (int64_t i = 0; i < n; ++i) sum[i % 8] += double(float(x[i])) * float(x[i]);
  double all = 0;
  for (double lane : sum) all += lane;
  return all;
}
