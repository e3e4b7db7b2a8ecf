// cuBLAS on a CPU: checks, then OpenBLAS. Both are column-major, so dimensions pass through unchanged.
#include <cblas.h>

#include <algorithm>
#include <string>
#include <vector>

#include "include/cublas_v2.h"
#include "include/cuda_bf16.h"
#include "internal.h"

struct cublasContext {
  cudaStream_t stream = nullptr;
};

namespace {

struct Operand {
  cudaDataType type;
  int rows, cols, ld;  // as stored
  long long stride;    // elements from one matrix of a batch to the next

  size_t element() const { return type == CUDA_R_32F ? sizeof(float) : sizeof(__nv_bfloat16); }
  size_t bytes(int batches) const {
    if (rows == 0 || cols == 0) return 0;
    return (static_cast<size_t>(batches - 1) * stride + static_cast<size_t>(cols - 1) * ld + rows) *
           element();
  }
};

struct Gemm {
  bool transpose_a, transpose_b;
  int m, n, k, batches;
  float alpha, beta;
  Operand a, b, c;
  const void *pa, *pb;
  void* pc;
};

cublasStatus_t fail(cublasStatus_t status, const std::string& text) {
  sim::set_last_error(text);
  return status;
}

bool is_floats(const Operand& o) { return o.type == CUDA_R_32F; }

const char* at(const void* p, const Operand& o, int batch) {
  return static_cast<const char*>(p) + static_cast<size_t>(batch) * o.stride * o.element();
}

// A bf16 matrix as floats, without gaps between its columns.
const float* widen(std::vector<float>& out, const char* p, const Operand& o) {
  const auto* in = reinterpret_cast<const __nv_bfloat16*>(p);
  if (out.size() < static_cast<size_t>(o.rows) * o.cols) out.resize(static_cast<size_t>(o.rows) * o.cols);
  for (size_t j = 0; j < static_cast<size_t>(o.cols); ++j) {
    const __nv_bfloat16* from = in + j * o.ld;
    float* to = out.data() + j * o.rows;
    for (int i = 0; i < o.rows; ++i) to[i] = from[i];
  }
  return out.data();
}

void sgemm(const Gemm& g, const float* a, int lda, const float* b, int ldb, float* c, int ldc) {
  cblas_sgemm(CblasColMajor, g.transpose_a ? CblasTrans : CblasNoTrans,
              g.transpose_b ? CblasTrans : CblasNoTrans, g.m, g.n, g.k, g.alpha, a, lda, b, ldb, g.beta, c,
              ldc);
}

void run(const Gemm& g) {
  thread_local std::vector<float> wide_a, wide_b, wide_c;
  for (int i = 0; i < g.batches; ++i) {
    const char *pa = at(g.pa, g.a, i), *pb = at(g.pb, g.b, i), *pc = at(g.pc, g.c, i);
    const bool floats = is_floats(g.a);
    const float* a = floats ? reinterpret_cast<const float*>(pa) : widen(wide_a, pa, g.a);
    const float* b = floats ? reinterpret_cast<const float*>(pb) : widen(wide_b, pb, g.b);
    const int lda = floats ? g.a.ld : std::max(1, g.a.rows), ldb = floats ? g.b.ld : std::max(1, g.b.rows);
    if (is_floats(g.c)) {
      sgemm(g, a, lda, b, ldb, reinterpret_cast<float*>(const_cast<char*>(pc)), g.c.ld);
      continue;
    }
    // Sum in float, round once. With beta = 0 BLAS does not read c, so old scratch is as good as any.
    wide_c.resize(std::max(wide_c.size(), static_cast<size_t>(g.m) * g.n));
    if (g.beta != 0) widen(wide_c, pc, g.c);
    sgemm(g, a, lda, b, ldb, wide_c.data(), g.m);
    auto* out = reinterpret_cast<__nv_bfloat16*>(const_cast<char*>(pc));
    for (size_t j = 0; j < static_cast<size_t>(g.n); ++j) {
      const float* from = wide_c.data() + j * g.m;
      __nv_bfloat16* to = out + j * g.c.ld;
      for (int r = 0; r < g.m; ++r) to[r] = from[r];
    }
  }
}

// Is the operand well formed, and inside its buffer?
cublasStatus_t check(const void* p, const Operand& o, int batches, const char* name) {
  if (o.ld < std::max(1, o.rows))
    return fail(CUBLAS_STATUS_INVALID_VALUE,
                sim::line(name, ": leading dimension ", o.ld, " of a matrix with ", o.rows, " rows"));
  if (o.stride < 0) return fail(CUBLAS_STATUS_INVALID_VALUE, sim::line(name, ": a negative stride"));
  return sim::check_device_range(p, o.bytes(batches), name) ? CUBLAS_STATUS_SUCCESS
                                                            : CUBLAS_STATUS_INVALID_VALUE;
}

}  // namespace

cublasStatus_t cublasCreate_v2(cublasHandle_t* handle) {
  // Ranks are the parallelism here; BLAS threads on top of them would only fight for the cores.
  static const bool once = (openblas_set_num_threads(1), true);
  (void)once;
  *handle = new cublasContext;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) {
  delete handle;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t streamId) {
  if (handle == nullptr) return fail(CUBLAS_STATUS_NOT_INITIALIZED, "cublasSetStream: no handle");
  handle->stream = streamId;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t /*mode*/) {
  if (handle == nullptr) return fail(CUBLAS_STATUS_NOT_INITIALIZED, "cublasSetMathMode: no handle");
  return CUBLAS_STATUS_SUCCESS;
}

const char* cublasGetStatusString(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_SUCCESS:
      return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_NOT_INITIALIZED:
      return "CUBLAS_STATUS_NOT_INITIALIZED";
    case CUBLAS_STATUS_ALLOC_FAILED:
      return "CUBLAS_STATUS_ALLOC_FAILED";
    case CUBLAS_STATUS_INVALID_VALUE:
      return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_EXECUTION_FAILED:
      return "CUBLAS_STATUS_EXECUTION_FAILED";
    case CUBLAS_STATUS_INTERNAL_ERROR:
      return "CUBLAS_STATUS_INTERNAL_ERROR";
    case CUBLAS_STATUS_NOT_SUPPORTED:
      return "CUBLAS_STATUS_NOT_SUPPORTED";
  }
  return "unknown cuBLAS status";
}

cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t transa, cublasOperation_t transb, int m,
                            int n, int k, const void* alpha, const void* A, cudaDataType Atype, int lda,
                            const void* B, cudaDataType Btype, int ldb, const void* beta, void* C,
                            cudaDataType Ctype, int ldc, cublasComputeType_t computeType,
                            cublasGemmAlgo_t algo) {
  return cublasGemmStridedBatchedEx(handle, transa, transb, m, n, k, alpha, A, Atype, lda, 0, B, Btype, ldb,
                                    0, beta, C, Ctype, ldc, 0, 1, computeType, algo);
}

cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t handle, cublasOperation_t transa,
                                          cublasOperation_t transb, int m, int n, int k, const void* alpha,
                                          const void* A, cudaDataType Atype, int lda, long long int strideA,
                                          const void* B, cudaDataType Btype, int ldb, long long int strideB,
                                          const void* beta, void* C, cudaDataType Ctype, int ldc,
                                          long long int strideC, int batchCount,
                                          cublasComputeType_t computeType, cublasGemmAlgo_t /*algo*/) {
  if (handle == nullptr) return fail(CUBLAS_STATUS_NOT_INITIALIZED, "cublasGemm: no handle");
  if (m < 0 || n < 0 || k < 0 || batchCount < 0)
    return fail(CUBLAS_STATUS_INVALID_VALUE, "cublasGemm: a negative size");
  if (Atype != Btype || (Ctype != Atype && Ctype != CUDA_R_32F) || computeType != CUBLAS_COMPUTE_32F)
    return fail(CUBLAS_STATUS_NOT_SUPPORTED,
                "cublasGemm: A and B share a type, C has it or float, sums are float");
  if (m == 0 || n == 0 || batchCount == 0) return CUBLAS_STATUS_SUCCESS;

  const bool ta = transa == CUBLAS_OP_T, tb = transb == CUBLAS_OP_T;
  const Operand a{Atype, ta ? k : m, ta ? m : k, lda, strideA};
  const Operand b{Btype, tb ? n : k, tb ? k : n, ldb, strideB};
  const Operand c{Ctype, m, n, ldc, strideC};
  cublasStatus_t status = check(A, a, batchCount, "cublasGemm: A");
  if (status == CUBLAS_STATUS_SUCCESS) status = check(B, b, batchCount, "cublasGemm: B");
  if (status == CUBLAS_STATUS_SUCCESS) status = check(C, c, batchCount, "cublasGemm: C");
  if (status != CUBLAS_STATUS_SUCCESS) return status;

  const Gemm gemm{
      ta, tb, m, n, k, batchCount, *static_cast<const float*>(alpha), *static_cast<const float*>(beta),
      a,  b,  c, A, B, C};
  if (handle->stream == nullptr) {
    run(gemm);
  } else {
    sim::enqueue(handle->stream, [gemm] { run(gemm); });
  }
  return CUBLAS_STATUS_SUCCESS;
}
