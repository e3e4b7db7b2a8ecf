# ringtron. `make help` lists the targets, `make info` says what was found on this machine.
#
# Knobs: DEVICE=auto|cpu|cuda  PRECISION=fp32|bf16  NP=ranks  ARGS="options of the lesson"  CXX=g++|clang++
#        CUDA_HOME=toolkit  SM=90  DEPS=folder of the header-only libraries, on a machine that installs nothing
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
ifeq ($(MAKELEVEL),0)  # a make that is started by this one shares its jobs
MAKEFLAGS += -j$(shell nproc)
endif

ifeq ($(origin CXX),default)
CXX := g++
endif
DEVICE ?= auto
PRECISION ?= fp32
ARGS ?=
DEPS ?=
comma := ,

# ---- what is here --------------------------------------------------------------------------------------------
# The one list of Debian packages: package, and the header or program that shows it is installed.
PACKAGES := mpich:mpiexec libmpich-dev:mpi.h libopenblas-dev:cblas.h doctest-dev:doctest/doctest.h \
            nlohmann-json3-dev:nlohmann/json.hpp libcli11-dev:CLI/CLI.hpp
# Without these two there is still a way: ranks as threads.
OPTIONAL := mpich libmpich-dev

DEPS_FLAGS := $(if $(DEPS),-isystem $(abspath $(DEPS)))
MPI_INCLUDE := $(firstword $(wildcard /usr/include/x86_64-linux-gnu/mpich /usr/include/aarch64-linux-gnu/mpich))
MISSING := $(strip $(shell scripts/missing.sh "$(CXX) $(DEPS_FLAGS) $(MPI_INCLUDE:%=-I%)" $(PACKAGES)))

CUDA_HOME ?= $(firstword $(wildcard /usr/local/cuda) $(patsubst %/bin/nvcc,%,$(shell command -v nvcc 2>/dev/null)))
NVCC := $(wildcard $(CUDA_HOME)/bin/nvcc)
GPUS := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
ifeq ($(DEVICE),auto)
override DEVICE := $(if $(and $(NVCC),$(filter-out 0,$(GPUS))),cuda,cpu)
endif
SM ?= $(or $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -1 | tr -d .),90)
# NCCL: a system package, the toolkit's folder, or the wheel that PyTorch brings.
NCCL_HEADER := $(firstword $(wildcard $(CUDA_HOME)/include/nccl.h /usr/include/nccl.h) \
  $(wildcard $(shell python3 -c 'import nvidia.nccl as n; print(list(n.__path__)[0])' 2>/dev/null)/include/nccl.h))
NCCL_HOME := $(patsubst %/include/nccl.h,%,$(NCCL_HEADER))
HAVE_MPI := $(if $(filter mpich libmpich-dev,$(MISSING)),,yes)

# Who carries the collectives: NCCL where there is a GPU for each rank, else our own implementation of its calls.
COMM ?= $(if $(and $(filter cuda,$(DEVICE)),$(NCCL_HEADER)),nccl,host)

ifeq ($(filter $(DEVICE),cpu cuda),)
$(error DEVICE=$(DEVICE) is not one of auto, cpu, cuda)
endif
ifeq ($(filter $(PRECISION),fp32 bf16),)
$(error PRECISION=$(PRECISION) is not one of fp32, bf16)
endif
ifeq ($(filter $(COMM),host $(if $(filter cuda,$(DEVICE)),nccl)),)
$(error COMM=$(COMM) is not one of nccl (with DEVICE=cuda), host)
endif
NEEDED := $(filter-out $(OPTIONAL) $(if $(filter cuda,$(DEVICE)),libopenblas-dev),$(MISSING))

# A processor with 512-bit products can also be timed with 256-bit ones: a lower peak over the same memory.
AVX512 := $(shell grep -o -m1 avx512f /proc/cpuinfo 2>/dev/null | head -1)

# ---- flags ---------------------------------------------------------------------------------------------------
OUT := build/$(DEVICE)-$(PRECISION)-$(notdir $(CXX))$(if $(filter cudahost,$(DEVICE)$(COMM)),-host)$(VARIANT)
# Never -ffast-math: NaN must stay NaN. -fopenmp-simd gives sums independent lanes, where the code says so.
OPTIMIZE := -O3 -march=native -fno-math-errno -fno-trapping-math -fopenmp-simd
CXXFLAGS := -std=c++20 $(OPTIMIZE) -g1 -Wall -Wextra -MMD -MP $(DEPS_FLAGS) $(EXTRA)
LDLIBS := -lpthread
ifneq ($(findstring clang,$(notdir $(CXX))),)
CXXFLAGS += -Wno-pass-failed  # clang says so where it can't vectorize a float maximum
endif
ifeq ($(PRECISION),bf16)
CXXFLAGS += -DPRECISION_BF16
endif
ifeq ($(HAVE_MPI),yes)
CXXFLAGS += -DHAVE_MPI $(MPI_INCLUDE:%=-isystem %)
LDLIBS += -lmpich
endif
ifeq ($(DEVICE),cuda)
CXXFLAGS += -DRINGTRON_CUDA -isystem $(CUDA_HOME)/include
LDLIBS += -L$(CUDA_HOME)/lib64 -Wl,-rpath,$(CUDA_HOME)/lib64 -lcublas -lcudart
NVCCFLAGS := -std=c++20 -O3 -arch=sm_$(SM) -ccbin $(CXX) -Xcompiler -Wall,-Wextra -lineinfo \
             $(if $(filter bf16,$(PRECISION)),-DPRECISION_BF16) -DRINGTRON_CUDA
else
CXXFLAGS += -Isrc/sim/include
LDLIBS += -lopenblas
endif
ifeq ($(COMM),nccl)
CXXFLAGS += -DRINGTRON_NCCL -isystem $(NCCL_HOME)/include
NCCL_LIBRARY := $(firstword $(wildcard $(NCCL_HOME)/lib64/libnccl.so $(NCCL_HOME)/lib/libnccl.so \
  $(NCCL_HOME)/lib/libnccl.so.2 $(NCCL_HOME)/lib/*/libnccl.so))
LDLIBS += $(or $(NCCL_LIBRARY),-lnccl) $(if $(NCCL_LIBRARY),-Wl$(comma)-rpath$(comma)$(dir $(NCCL_LIBRARY)))
endif

SOURCES := $(wildcard src/*.cpp) $(if $(filter cpu,$(DEVICE)),$(wildcard src/sim/*.cpp)) \
           $(filter-out $(if $(filter nccl,$(COMM)),src/sim/nccl/nccl.cpp) \
             $(if $(HAVE_MPI),,src/sim/nccl/transport_mpi.cpp),$(wildcard src/sim/nccl/*.cpp))
KERNELS := $(wildcard kernels/*.cu)
LIBRARY := $(SOURCES:%.cpp=$(OUT)/%.o) $(KERNELS:%.cu=$(OUT)/%.o)
LESSONS := $(sort $(wildcard lessons/[0-9][0-9]_*.cpp))
STAGES := $(foreach l,$(LESSONS),$(shell basename $(l) .cpp | cut -c4-))
# On a GPU: what does not concern the simulator, or the programs of the CPU build.
TESTS := $(filter-out $(if $(filter cuda,$(DEVICE)),tests/test_sim% tests/test_nccl% tests/test_mpi% tests/test_lessons%),\
           $(wildcard tests/test_*.cpp))
MPI_PROGRAMS := $(if $(and $(HAVE_MPI),$(filter cpu,$(DEVICE))),$(OUT)/mpi_nccl $(OUT)/bench_all_reduce)

# Ranks of a stage: NP=, else the GPUs present, else 4. As MPI processes where mpich is installed, else as threads.
RANKS := $(or $(NP),$(if $(filter cuda,$(DEVICE)),$(GPUS)),4)

# ---- targets -------------------------------------------------------------------------------------------------
.PHONY: help info setup all build-tests build-bench run test bench estimate grid roofline test-faults test-sanitize test-checked hangs scaling collectives memory schedules deep-mlp corpus notes notes-check gpu-check clean FORCE

help:            ## this list
	@echo "ringtron: make <target> [DEVICE=auto|cpu|cuda] [PRECISION=fp32|bf16] [NP=ranks] [ARGS=\"--steps 50 ...\"]"
	@grep -hE '^[a-z-]+:.*## ' Makefile exercises/exercises.mk | sed -E 's/^([a-z-]+):.*## /\1\t/' | awk -F'\t' '{printf "  %-14s %s\n", $$1, $$2}'
	@echo "  run-<stage>    one stage on NP ranks, TRACE=1 writes its timeline to out/: $(STAGES)"

info:            ## what was found on this machine
	@echo "compiler   $$($(CXX) --version | head -1)"
	@echo "nvcc       $(or $(NVCC),not found)"
	@echo "GPUs       $(or $(GPUS),0)$(if $(filter cuda,$(DEVICE)),$(comma) building for sm_$(SM))"
	@echo "NCCL       $(or $(NCCL_HEADER),not found)"
	@echo "MPI        $(if $(HAVE_MPI),mpich: $(shell command -v mpiexec),not found: ranks will be threads)"
	@echo "BLAS       $(if $(filter cuda,$(DEVICE)),cuBLAS,$(if $(filter libopenblas-dev,$(MISSING)),not found,OpenBLAS))"
	@echo "building   DEVICE=$(DEVICE) PRECISION=$(PRECISION) into $(OUT)"

setup:           ## install the missing Debian packages
	@scripts/setup.sh "$(MISSING)" "$(NEEDED)"

# With packages missing, every other target first installs them and then starts over, so that one command does it.
ifneq ($(if $(RINGTRON_SETUP_DONE),$(NEEDED),$(MISSING)),)
all run test bench estimate grid roofline test-faults test-sanitize test-checked hangs scaling collectives memory schedules deep-mlp notes notes-check corpus $(STAGES:%=run-%): setup
	@$(MAKE) RINGTRON_SETUP_DONE=1 $@
else

all: $(LESSONS:lessons/%.cpp=$(OUT)/%) $(patsubst tools/%.cpp,$(OUT)/%,$(wildcard tools/*.cpp))  ## build every lesson and tool

build-tests: $(OUT)/test_all $(MPI_PROGRAMS)
build-bench: $(OUT)/bench $(OUT)/bench_zero

run: info all    ## run every stage, then print one table
	@scripts/run_all.sh $(OUT) "$(LESSONS)" "$(RANKS)" "$(HAVE_MPI)" $(ARGS)

$(STAGES:%=run-%): run-%: FORCE
	@$(MAKE) -s $(OUT)/$(notdir $(basename $(filter %_$*.cpp,$(LESSONS))))
	@scripts/run_stage.sh $(OUT)/$(notdir $(basename $(filter %_$*.cpp,$(LESSONS)))) "$(RANKS)" "$(HAVE_MPI)" \
	  $(if $(TRACE),--trace out/$*.json) $(ARGS)

test: info build-tests $(if $(filter cpu,$(DEVICE)),all $(OUT)/notes_check)  ## build and run all tests; ends in "N passed, N failed"
	@scripts/test.sh $(OUT) $(ARGS)

bench: $(OUT)/bench $(OUT)/bench_zero $(MPI_PROGRAMS)  ## speed: one line a figure, bench<TAB>name<TAB>value<TAB>unit<TAB>goal
	@OPENBLAS_NUM_THREADS=1 $(OUT)/bench $(ARGS)
	$(if $(and $(AVX512),$(filter cpu,$(DEVICE))),@OPENBLAS_CORETYPE=Haswell OPENBLAS_NUM_THREADS=1 $(OUT)/bench single | sed 's#single/#single_avx2/#')
	@OPENBLAS_NUM_THREADS=1 $(OUT)/bench_zero
	$(if $(MPI_PROGRAMS),@mpiexec -n 4 $(OUT)/bench_all_reduce)

estimate: $(OUT)/estimate  ## parameters, FLOPs, bytes and days of a model: ARGS="--model llama-2-7b", ARGS=--help
	@$(OUT)/estimate $(ARGS)

grid: $(OUT)/grid  ## which ranks form which group: ARGS="--tp 2 --pp 4 --dp 2 --nodes 8", ARGS=--help
	@$(OUT)/grid $(ARGS)

collectives: $(OUT)/collectives  ## what a collective sends and how long it takes: ARGS="--ranks 8 --bytes 200e6 --gbps 12.5 --us 100"
	@$(OUT)/collectives $(ARGS)

scaling: $(OUT)/scaling  ## the time to exchange gradients against the number of ranks: one server, n servers, a ring
	@$(OUT)/scaling $(ARGS)

hangs: $(OUT)/hangs  ## ways in which ranks get stuck, and how each is found: ARGS="--kind order", NP=3: as processes
	@$(if $(NP),scripts/run_stage.sh $(OUT)/hangs "$(NP)" "$(HAVE_MPI)",$(OUT)/hangs) $(ARGS)

deep-mlp: $(OUT)/deep_mlp  ## a cut MLP of 2, 4 and 8 layers: with the sums between pairs, and without
	@$(OUT)/deep_mlp
schedules: $(OUT)/schedules  ## the four pipeline schedules, drawn and timed: ARGS="--p 4 --m 8 --v 2", ARGS=--help
	@$(OUT)/schedules $(ARGS)
memory: $(OUT)/memory  ## bytes per rank of DDP, ZeRO-1, 2, 3, offload: ARGS="--params 7.5e9 --dp 64", ARGS=--help
	@$(OUT)/memory $(ARGS)
roofline: $(OUT)/roofline  ## FLOPs, bytes and arithmetic intensity of our kernels: ARGS="--bytes 4 --gemm 512"
	@$(OUT)/roofline $(ARGS)

test-checked: $(if $(filter cpu,$(DEVICE)),all)  ## kernels with real blocks in every order, lessons with late and early streams
	@scripts/test_checked.sh $(OUT)

test-sanitize:   ## the tests under AddressSanitizer, UBSan and ThreadSanitizer
	@scripts/test_sanitize.sh $(OUT)

test-faults: $(OUT)/libringtron.a  ## plant faults in copies of kernels and lessons: is each one found?
	@scripts/test_faults.sh $(OUT)

corpus:          ## make lessons/corpus.txt anew from README and notes (it is frozen: printed losses depend on it)
	@scripts/corpus.sh > lessons/corpus.txt.tmp && mv lessons/corpus.txt.tmp lessons/corpus.txt
	@wc -c lessons/corpus.txt

notes: all $(OUT)/notes_check        ## run the commands in the notes and write what they print
	@$(OUT)/notes_check --write

notes-check: all $(OUT)/notes_check  ## run the commands in the notes and compare with what is written
	@$(OUT)/notes_check

endif

# Installs nothing: a machine with a GPU may have no network.
gpu-check:       ## on a machine with a GPU: build, test, compare with the reference, measure (4 minutes)
	@DEPS="$(DEPS)" CUDA_HOME="$(CUDA_HOME)" scripts/gpu_check.sh

clean:           ## remove what was built
	rm -rf build out

include exercises/exercises.mk

# ---- rules ---------------------------------------------------------------------------------------------------
$(OUT)/%.o: %.cpp
	@mkdir -p $(@D)
	@echo "  $(notdir $(CXX))  $<"
	@$(CXX) $(CXXFLAGS) -c $< -o $@

ifeq ($(DEVICE),cuda)
$(OUT)/%.o: %.cu
	@mkdir -p $(@D)
	@echo "  nvcc  $<"
	@$(NVCC) $(NVCCFLAGS) -MMD -MF $(@:.o=.d) -c $< -o $@
else
$(OUT)/%.o: %.cu
	@mkdir -p $(@D)
	@echo "  $(notdir $(CXX))  $<"
	@$(CXX) $(CXXFLAGS) -x c++ -c $< -o $@
endif

$(OUT)/libringtron.a: $(LIBRARY)
	@rm -f $@ && ar rcs $@ $^

$(LESSONS:lessons/%.cpp=$(OUT)/%): $(OUT)/%: $(OUT)/lessons/%.o $(OUT)/libringtron.a
	@$(CXX) $< $(OUT)/libringtron.a -o $@ $(LDLIBS) $(EXTRA)

$(OUT)/test_all: $(TESTS:%.cpp=$(OUT)/%.o) $(OUT)/libringtron.a
	@$(CXX) $^ -o $@ $(LDLIBS) $(EXTRA)

$(patsubst tools/%.cpp,$(OUT)/%,$(wildcard tools/*.cpp)): $(OUT)/%: $(OUT)/tools/%.o $(OUT)/libringtron.a
	@$(CXX) $^ -o $@ $(LDLIBS) $(EXTRA)

$(OUT)/bench $(OUT)/bench_zero $(OUT)/notes_check $(OUT)/mpi_nccl $(OUT)/bench_all_reduce: $(OUT)/%: $(OUT)/tests/%.o $(OUT)/libringtron.a
	@$(CXX) $^ -o $@ $(LDLIBS) $(EXTRA)

# The one file that also includes NVIDIA's headers, to hold our declarations against them.
$(OUT)/tests/test_sim_contract.o $(OUT)/tests/test_nccl_contract.o: CXXFLAGS := $(CUDA_HOME:%=-I%/include) $(CXXFLAGS)
$(OUT)/tests/test_%.o: CXXFLAGS += -O1

-include $(shell find $(OUT) -name '*.d' 2>/dev/null)
