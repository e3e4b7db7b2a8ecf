ddp-average.o: exercises/checks/ddp-average.cpp \
 exercises/checks/../harness/check.h \
 exercises/checks/../harness/../../src/world.h \
 exercises/checks/../harness/../../src/config.h \
 exercises/checks/../harness/../../src/group.h \
 exercises/checks/../harness/../../src/device.h \
 src/sim/include/cublas_v2.h src/sim/include/cuda_runtime.h \
 src/sim/include/../launch.h src/sim/include/../sim.h \
 exercises/checks/../harness/../../src/error.h \
 exercises/checks/../harness/../../src/tensor.h \
 exercises/checks/../harness/../../src/../kernels/real.h \
 exercises/checks/../harness/../../src/trace.h \
 exercises/checks/../harness/../../src/sim/include/nccl.h \
 exercises/checks/../harness/../exercises.h
exercises/checks/../harness/check.h:
exercises/checks/../harness/../../src/world.h:
exercises/checks/../harness/../../src/config.h:
exercises/checks/../harness/../../src/group.h:
exercises/checks/../harness/../../src/device.h:
src/sim/include/cublas_v2.h:
src/sim/include/cuda_runtime.h:
src/sim/include/../launch.h:
src/sim/include/../sim.h:
exercises/checks/../harness/../../src/error.h:
exercises/checks/../harness/../../src/tensor.h:
exercises/checks/../harness/../../src/../kernels/real.h:
exercises/checks/../harness/../../src/trace.h:
exercises/checks/../harness/../../src/sim/include/nccl.h:
exercises/checks/../harness/../exercises.h:
