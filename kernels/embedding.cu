// embedding.cu - a row of the table for each token, and the way back.
// A rank may hold only rows [first, first + rows) of the table (a split vocabulary): tokens of other ranks
// give zero rows here, and the ranks' outputs are summed afterwards.
#include "kernels.h"
#include "kernel.cuh"

// out (N, D), table (rows, D), tokens (N)
__global__ void embedding_forward_kernel(real* __restrict__ out, const real* __restrict__ table,
                                         const int* __restrict__ tokens, int N, int D, int first, int rows) {
  for (int n = blockIdx.x; n < N; n += gridDim.x) {
    const int row = tokens[n] - first;
    const bool mine = row >= 0 && row < rows;
    for (int i = threadIdx.x; i < D; i += blockDim.x)
      out[int64_t(n) * D + i] = mine ? table[int64_t(row) * D + i] : real(0.f);
  }
}

// dtable (rows, D) += the rows of dout (N, D), summed by token. `order` lists 0..N-1 sorted by token (stable),
// so each row of the table is summed by one block, in a fixed order: no atomics, the same bits every time.
__global__ void embedding_backward_kernel(real* __restrict__ dtable, const real* __restrict__ dout,
                                          const int* __restrict__ tokens, const int* __restrict__ order, int N,
                                          int D, int first, int rows) {
  for (int j = blockIdx.x; j < N; j += gridDim.x) {
    const int token = tokens[order[j]];
    const bool leads = j == 0 || tokens[order[j - 1]] != token;  // the first of its run does the work
    if (leads && token >= first && token < first + rows) {
      real* row = dtable + int64_t(token - first) * D;
#ifdef REAL_BLOCKS
      for (int i = threadIdx.x; i < D; i += blockDim.x) {
        float sum = float(row[i]);
        for (int k = j; k < N && tokens[order[k]] == token; ++k) sum += float(dout[int64_t(order[k]) * D + i]);
        row[i] = real(sum);
      }
#else
      constexpr int kColumns = 64;  // a CPU adds whole rows, a few cache lines at a time, instead of columns
      for (int i0 = 0; i0 < D; i0 += kColumns) {
        const int width = D - i0 < kColumns ? D - i0 : kColumns;
        float sum[kColumns];
        for (int i = 0; i < width; ++i) sum[i] = float(row[i0 + i]);
        for (int k = j; k < N && tokens[order[k]] == token; ++k) {
          const real* from = dout + int64_t(order[k]) * D + i0;
          for (int i = 0; i < width; ++i) sum[i] += float(from[i]);
        }
        for (int i = 0; i < width; ++i) row[i0 + i] = real(sum[i]);
      }
#endif
    }
  }
}

void embedding_forward(real* out, const real* table, const int* tokens, int N, int D, int first, int rows,
                       cudaStream_t stream) {
  launch(embedding_forward_kernel, grid_for_rows(N), threads_for(D), stream, out, table, tokens, N, D, first, rows);
}

void embedding_backward(real* dtable, const real* dout, const int* tokens, const int* order, int N, int D,
                        int first, int rows, cudaStream_t stream) {
  launch(embedding_backward_kernel, grid_for_rows(N), threads_for(D), stream, dtable, dout, tokens, order, N, D,
         first, rows);
}
