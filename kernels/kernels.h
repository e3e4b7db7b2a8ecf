// kernels.h - every operation of the model, by name. Each is a file here: kernel(s), then the launcher.
// Arguments: outputs first, then inputs, then sizes, then the stream. All pointers are device memory.
// N: tokens on this rank (B samples x T positions), D: width, V: vocabulary, H: heads, d: head size.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "real.h"

// elementwise.cu
template <class T> void fill(T* out, float value, int64_t n, cudaStream_t);
template <class T> void scale(T* x, float factor, int64_t n, cudaStream_t);
template <class T> void add(T* out, const T* a, const T* b, int64_t n, cudaStream_t);  // out may be a or b

// embedding.cu: rows [first, first + rows) of the table are here; backward adds to dtable.
void embedding_forward(real* out, const real* table, const int* tokens, int N, int D, int first, int rows,
                       cudaStream_t);
void embedding_backward(real* dtable, const real* dout, const int* tokens, const int* order, int N, int D,
                        int first, int rows, cudaStream_t);

// rmsnorm.cu: backward adds to dx; backward_weight needs `partial` of rmsnorm_partial_size(N, D) floats, and
// writes dw (beta 0) or adds to it (beta 1).
void rmsnorm_forward(real* y, float* rstd, const real* x, const real* w, int N, int D, float eps, cudaStream_t);
void rmsnorm_backward(real* dx, const real* dy, const real* x, const float* rstd, const real* w, int N, int D,
                      cudaStream_t);
int64_t rmsnorm_partial_size(int N, int D);
void rmsnorm_backward_weight(real* dw, float* partial, const real* dy, const real* x, const float* rstd, int N,
                             int D, float beta, cudaStream_t);

// rope.cu: (B, T, H, d) -> (B, H, T, d) and back, rotating if there is a table (T, d).
void rope_table(float* table, const int* positions, int T, int d, double theta, cudaStream_t);
void split_heads(real* out, const real* in, const float* table, int B, int T, int H, int d, cudaStream_t);
void merge_heads(real* out, const real* in, const float* table, int B, int T, int H, int d, cudaStream_t);

// softmax.cu: in place on (rows, stride), using `keys` columns; positions of keys ascend.
void softmax_forward(real* p, const int* query_positions, const int* key_positions, int64_t rows, int64_t first_row,
                     int T, int keys, int stride, cudaStream_t);
void softmax_backward(real* dp, const real* p, int64_t rows, int keys, int stride, float factor, cudaStream_t);

// swiglu.cu
void swiglu_forward(real* out, const real* gate, const real* up, int64_t n, cudaStream_t);
void swiglu_backward(real* dgate, real* dup, const real* dout, const real* gate, const real* up, int64_t n,
                     cudaStream_t);

// cross_entropy.cu: columns [first, first + V) of the vocabulary are here; target -1 is ignored.
void cross_entropy_max(float* row_max, const real* logits, int N, int V, cudaStream_t);
void cross_entropy_sum(float* row_sum, float* target_logit, const real* logits, const float* row_max,
                       const int* targets, int N, int V, int first, cudaStream_t);
void cross_entropy_loss(float* loss, real* logits, const float* row_max, const float* row_sum,
                        const float* target_logit, const int* targets, int N, int V, int first, float factor,
                        cudaStream_t);

// adamw.cu
struct AdamWStep {
  float lr, beta1, beta2, eps, decay;
  float m_correction, v_correction;  // 1 / (1 - beta^step)
  float gradient_scale;              // from clipping by the global norm
};
void adamw(real* w, float* w32, float* m, float* v, const real* g, int64_t n, AdamWStep, cudaStream_t);

// sum_of_squares.cu: chunk_count(n) partial sums in double, to be added in order.
int64_t chunk_count(int64_t n);
void chunk_sums_of_squares(double* sums, const real* x, int64_t n, cudaStream_t);
void chunk_sums(double* sums, const float* x, int64_t n, cudaStream_t);
