// rope.cu - rotary positions (Su et al., arXiv:2104.09864), in Hugging Face's half-rotated layout: element i is
// paired with element i + d/2. The same pass moves heads in front of time, (B, T, H, d) -> (B, H, T, d), so that
// attention's matrix products find each head contiguous. Values (v) move without being rotated: no table.
#include "kernels.h"
#include "kernel.cuh"

// table (T, d): the cosines of a position's d/2 angles, then their sines. Double, because position x frequency
// in float is off by 1e-4 at position 2000.
__global__ void rope_table_kernel(float* __restrict__ table, const int* __restrict__ positions, int T, int d,
                                  double theta) {
  const int half = d / 2;
  for (int t = blockIdx.x; t < T; t += gridDim.x)
    for (int i = threadIdx.x; i < half; i += blockDim.x) {
      const double angle = positions[t] * pow(theta, -2.0 * i / d);
      table[int64_t(t) * d + i] = float(cos(angle));
      table[int64_t(t) * d + half + i] = float(sin(angle));
    }
}

// out (B, H, T, d) from in (B, T, H, d)
__global__ void split_heads_kernel(real* __restrict__ out, const real* __restrict__ in,
                                   const float* __restrict__ table, int B, int T, int H, int d) {
  const int half = d / 2;
  for (int row = blockIdx.x; row < B * T; row += gridDim.x) {
    const int b = row / T, t = row % T;
    const float* c = table ? table + int64_t(t) * d : nullptr;
    for (int h = 0; h < H; ++h) {
      const real* x = in + (int64_t(row) * H + h) * d;
      real* y = out + ((int64_t(b) * H + h) * T + t) * d;
      if (c) {
        for (int i = threadIdx.x; i < half; i += blockDim.x) {
          const float first = float(x[i]), second = float(x[i + half]);
          y[i] = real(first * c[i] - second * c[i + half]);
          y[i + half] = real(second * c[i] + first * c[i + half]);
        }
      } else {
        for (int i = threadIdx.x; i < d; i += blockDim.x) y[i] = x[i];
      }
    }
  }
}

// out (B, T, H, d) from in (B, H, T, d): the inverse, which for a rotation is also its gradient.
__global__ void merge_heads_kernel(real* __restrict__ out, const real* __restrict__ in,
                                   const float* __restrict__ table, int B, int T, int H, int d) {
  const int half = d / 2;
  for (int row = blockIdx.x; row < B * T; row += gridDim.x) {
    const int b = row / T, t = row % T;
    const float* c = table ? table + int64_t(t) * d : nullptr;
    for (int h = 0; h < H; ++h) {
      const real* y = in + ((int64_t(b) * H + h) * T + t) * d;
      real* x = out + (int64_t(row) * H + h) * d;
      if (c) {
        for (int i = threadIdx.x; i < half; i += blockDim.x) {
          const float first = float(y[i]), second = float(y[i + half]);
          x[i] = real(first * c[i] + second * c[i + half]);
          x[i + half] = real(second * c[i] - first * c[i + half]);
        }
      } else {
        for (int i = threadIdx.x; i < d; i += blockDim.x) x[i] = y[i];
      }
    }
  }
}

void rope_table(float* table, const int* positions, int T, int d, double theta, cudaStream_t stream) {
  launch(rope_table_kernel, grid_for_rows(T), threads_for(d / 2), stream, table, positions, T, d, theta);
}

void split_heads(real* out, const real* in, const float* table, int B, int T, int H, int d, cudaStream_t stream) {
  launch(split_heads_kernel, grid_for_rows(int64_t(B) * T), threads_for(d), stream, out, in, table, B, T, H, d);
}

void merge_heads(real* out, const real* in, const float* table, int B, int T, int H, int d, cudaStream_t stream) {
  launch(merge_heads_kernel, grid_for_rows(int64_t(B) * T), threads_for(d), stream, out, in, table, B, T, H, d);
}
