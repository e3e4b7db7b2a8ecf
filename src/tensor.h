// tensor.h - a pointer and a shape. A tensor owns nothing; a Buffer (device.h) does.
#pragma once
#include <cassert>
#include <cstdint>
#include <initializer_list>

#include "../kernels/real.h"

template <class T>
struct TensorOf {
  T* data = nullptr;
  int64_t shape[4] = {1, 1, 1, 1};
  int dims = 0;

  TensorOf() = default;
  TensorOf(T* data, std::initializer_list<int64_t> sizes) : data(data) {
    assert(sizes.size() <= 4);
    for (int64_t size : sizes) shape[dims++] = size;
  }
  int64_t operator[](int axis) const { return shape[axis]; }
  int64_t numel() const { return dims ? shape[0] * shape[1] * shape[2] * shape[3] : 0; }
};

using Tensor = TensorOf<real>;        // parameters, gradients, activations
using FloatTensor = TensorOf<float>;  // statistics: row maxima, losses, optimizer state
using IntTensor = TensorOf<int>;      // token ids, positions
