// softmax.cu - the masked softmax of attention: each row of scores becomes probabilities, in place.
// A query sees the keys whose position is not after its own. Key positions ascend, so what a row sees is a
// prefix; the rest of the row, up to `keys`, becomes zero.
#include "kernels.h"
#include "kernel.cuh"

// How many of the ascending positions are <= query.
__device__ __forceinline__ int visible_keys(const int* positions, int keys, int query) {
  int low = 0, high = keys;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (positions[middle] <= query) low = middle + 1;
    else high = middle;
  }
  return low;
}

// p (rows, stride), of which `keys` columns are used; row r is the query number (first_row + r) % T.
__global__ void softmax_forward_kernel(real* __restrict__ p, const int* __restrict__ query_positions,
                                       const int* __restrict__ key_positions, int64_t rows, int64_t first_row,
                                       int T, int keys, int stride) {
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    real* s = p + row * stride;
    const int seen = visible_keys(key_positions, keys, query_positions[(first_row + row) % T]);
    const float most = block_max(seen, [=](int i) { return float(s[i]); });
    const float sum = block_sum(seen, [=](int i) {
      const float e = exponential(float(s[i]) - most);
      s[i] = real(e);
      return e;
    });
    const float inverse = seen > 0 ? 1.f / sum : 0.f;
    for (int i = threadIdx.x; i < seen; i += blockDim.x) s[i] = real(float(s[i]) * inverse);
    for (int i = seen + threadIdx.x; i < keys; i += blockDim.x) s[i] = real(0.f);
  }
}

// dp (rows, stride) becomes the gradient of the scores: ds = p * (dp - sum(p * dp)) * factor.
__global__ void softmax_backward_kernel(real* __restrict__ dp, const real* __restrict__ p, int64_t rows, int keys,
                                        int stride, float factor) {
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    real* d = dp + row * stride;
    const real* q = p + row * stride;
    const float dot = block_sum(keys, [=](int i) { return float(q[i]) * float(d[i]); });
    for (int i = threadIdx.x; i < keys; i += blockDim.x) d[i] = real(float(q[i]) * (float(d[i]) - dot) * factor);
  }
}

void softmax_forward(real* p, const int* query_positions, const int* key_positions, int64_t rows, int64_t first_row,
                     int T, int keys, int stride, cudaStream_t stream) {
  launch(softmax_forward_kernel, grid_for_rows(rows), threads_for(keys), stream, p, query_positions, key_positions,
         rows, first_row, T, keys, stride);
}

void softmax_backward(real* dp, const real* p, int64_t rows, int keys, int stride, float factor,
                      cudaStream_t stream) {
  launch(softmax_backward_kernel, grid_for_rows(rows), threads_for(keys), stream, dp, p, rows, keys, stride, factor);
}
