// roofline.cpp - arithmetic intensity of our kernels: FLOPs per byte of device memory, counted from their sources.
//
//   make roofline                        bf16
//   make roofline ARGS="--bytes 4"       fp32
//   make roofline ARGS="--gemm 512"      and an n x n matrix product of that size
//
// A kernel is bound by memory where its intensity is below the GPU's ridge, peak FLOP/s over bytes/s. Arithmetic only;
// nothing runs. One exp, division or root counts as one FLOP.
#include <CLI/CLI.hpp>
#include <cstdio>

namespace {

// Per element of the largest array: FLOPs; how many arrays of `real` must cross the memory bus once; how many cross it
// in our kernel, pass by pass, if no cache helps; and bytes of fp32 state.
struct Kernel {
  const char* name;
  int flops, least, passes, state_bytes;
};
const Kernel kKernels[] = {
    {"add", 1, 3, 3, 0},                 // a, b -> out
    {"sum_of_squares", 2, 1, 1, 0},      // x
    {"rmsnorm_forward", 4, 2, 3, 0},     // x for the sum, x again -> y
    {"rmsnorm_backward", 8, 4, 6, 0},    // w dy x for the sum; then dx, dy, x -> dx
    {"swiglu_forward", 5, 3, 3, 0},      // gate, up -> out
    {"swiglu_backward", 12, 5, 5, 0},    // dout, gate, up -> dgate, dup
    {"softmax_forward", 5, 2, 5, 0},     // maximum; exponential in place and sum; scale in place
    {"softmax_backward", 5, 3, 5, 0},    // p dp for the sum; then p, dp -> ds
    {"cross_entropy", 7, 2, 4, 0},       // maximum; sum; gradient in place: three kernels
    {"adamw", 17, 2, 2, 24},             // g -> w, and m, v, w32 read and written
};

// Quoted: dense bf16 FLOP/s and memory bandwidth of NVIDIA's data sheets (A100 80 GB SXM, H100 SXM, H200 SXM).
struct Gpu {
  const char* name;
  double flops, bandwidth;
};
const Gpu kGpus[] = {{"A100", 312e12, 2.039e12}, {"H100", 989e12, 3.35e12}, {"H200", 989e12, 4.8e12}};

}  // namespace

int main(int argc, char** argv) {
  int bytes = 2, n = 4096;
  CLI::App app("arithmetic intensity of our kernels, and of a matrix product");
  app.add_option("--bytes", bytes, "bytes of an element: 2 (bf16) or 4 (fp32)")->check(CLI::IsMember({2, 4}));
  app.add_option("--gemm", n, "size of the n x n matrix product")->check(CLI::Range(1, 1 << 20));
  CLI11_PARSE(app, argc, argv);

  std::printf("%-18s %12s %14s %14s %12s %12s\n", "kernel", "FLOP/element", "bytes at least", "bytes by pass", "FLOP/byte",
              "by pass");
  for (const Kernel& k : kKernels) {
    // In fp32 the master copy is the weight itself, and is written once.
    const int state = k.state_bytes - (k.state_bytes && bytes == 4 ? 4 : 0);
    const int least = k.least * bytes + state, passes = k.passes * bytes + state;
    std::printf("%-18s %12d %14d %14d %12.2f %12.2f\n", k.name, k.flops, least, passes, double(k.flops) / least,
                double(k.flops) / passes);
  }
  // C = A B: 2 n^3 FLOPs, three matrices cross once. y = A x: 2 n^2 FLOPs, A crosses.
  const double size = n;
  std::printf("matrix product, n = %d: %.1f FLOP/byte = 2n/(3B); matrix times vector: %.2f\n", n, 2 * size / (3 * bytes),
              2 * size * size / (bytes * (size * size + 2 * size)));
  for (const Gpu& gpu : kGpus) {
    const double ridge = gpu.flops / gpu.bandwidth;
    std::printf("%s: ridge %.0f FLOP/byte (bf16); an n x n product is bound by memory below n = %.0f; AdamW of 7e9 "
                "parameters takes %.0f ms or more\n", gpu.name, ridge, ridge * 3 * bytes / 2,
                7e9 * (2 * bytes + 24 - (bytes == 4 ? 4 : 0)) / gpu.bandwidth * 1e3);
  }
}
