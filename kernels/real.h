// real.h - the storage type of parameters, gradients and activations, fixed at build time (PRECISION=).
// Kernels read and write `real` and compute in float.
#pragma once

#ifdef PRECISION_BF16
#include <cuda_bf16.h>
using real = __nv_bfloat16;
constexpr const char* kPrecision = "bf16";
#else
using real = float;
constexpr const char* kPrecision = "fp32";
#endif
